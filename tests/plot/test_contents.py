"""The elements, numbers and colours of pictures of layouts, of activity, of lengths and of
measurements.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.patches import Rectangle
from torch.nn.utils.rnn import pack_sequence

import raglane as rl
from drawings import EIGHT, texts_at
from raglane import plot
from raglane._utils.drawing import VERMILION
from raglane.data import BatchLimit, BatchSampler, EpochOrder
from raglane.plot.cells import color_of
from raglane.plot.picture import Picture
from raglane.schedules import SCHEDULES, Table
from strategies import lengths as some_lengths


def _bars(axes: Axes, kind: str) -> dict[tuple[int, ...], Rectangle]:
    """The rectangles of a kind by the numbers in their labels."""
    named = [
        (str(bar.get_label()).removeprefix("_").split(), bar)
        for bar in axes.patches
        if isinstance(bar, Rectangle)
    ]
    return {tuple(map(int, name[1:])): bar for name, bar in named if name[0] == kind}


def _cells(
    table: Table, lengths: list[int], real: bool
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the time and row of each real element, or each padded one, of a schedule."""
    time = torch.repeat_interleave(torch.arange(table.steps), table.rows_per_step)
    rows = zip(
        *(part.tolist() for part in (table.sequence, table.step, time, table.row)), strict=True
    )
    return {(s, step): (t, row) for s, step, t, row in rows if (step < lengths[s]) == real}


def _check(axes: Axes, name: str, lengths: list[int], lanes: int | None = None) -> None:
    table = SCHEDULES[name].table(torch.tensor(lengths, dtype=torch.int64), lanes)
    count = rl.cost(lengths, lanes=lanes)[name]
    drawn, padding = _bars(axes, "element"), _bars(axes, "padding")
    for bars, real in ((drawn, True), (padding, False)):
        assert {key: bar.get_xy() for key, bar in bars.items()} == _cells(table, lengths, real)
        assert all((bar.get_width(), bar.get_height()) == (1, 1) for bar in bars.values())
    for (sequence, _), bar in drawn.items():
        assert to_hex(bar.get_facecolor()) == color_of(sequence).lower()
    hatched = sum(
        bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_hatch()
    )
    assert hatched == count.waste


@settings(max_examples=3)
@given(lengths=some_lengths(5, 6))
@example(lengths=[])
@example(lengths=[0, 0])
def test_every_element_stands_where_the_schedule_computes_it(lengths: list[int]) -> None:
    _check(plot.padded(lengths).axes[0], "padded", lengths)
    _check(plot.packed(lengths).axes[0], "packed", lengths)
    _check(plot.lanes(lengths, 2).axes[0], "lanes", lengths, 2)
    for name, axes in zip(SCHEDULES, plot.schedules(lengths, 3).axes, strict=True):
        _check(axes, name, lengths, 3)


def test_an_element_has_its_number_or_its_label() -> None:
    lengths = [3, 0, 2]
    numbers = {(0.5, 0.5): "0", (1.5, 0.5): "1", (2.5, 0.5): "2", (0.5, 2.5): "3", (1.5, 2.5): "4"}
    assert numbers.items() <= texts_at(plot.padded(lengths).axes[0]).items()
    words = plot.padded(lengths, labels=["abc", [], ["d", 1.5]]).axes[0]
    assert [text.get_text() for text in words.texts[:-1]] == ["a", "b", "c", "d", "1.5"]
    values = rl.Ragged.from_flat(torch.tensor([7, 8, 9, 10, 11]), lengths=lengths)
    numbered = plot.padded(lengths, labels=values).axes[0]
    assert [text.get_text() for text in numbered.texts[:-1]] == ["7", "8", "9", "10", "11"]


def test_data_and_batch_sizes_are_those_of_torch() -> None:
    lengths = [4, 9, 2, 8]
    packed = pack_sequence(list(torch.arange(sum(lengths)).split(lengths)), enforce_sorted=False)
    axes = plot.packed(lengths).axes[0]
    ticks = [tick.get_text().split() for tick in axes.get_xticklabels()]
    assert [int(size) for size, _ in ticks] == packed.batch_sizes.tolist()
    assert [int(step) for _, step in ticks] == list(range(9))
    names = axes.texts[-1]
    assert names.get_text().split("\n") == ["batch size", "step"]
    strip = sorted((place[0], text) for place, text in texts_at(axes).items() if place[1] == -1)
    assert [int(text) for _, text in strip] == packed.data.tolist()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["data", "1", "3", "0", "2"]


def test_lanes_stand_by_thread_and_end_idle() -> None:
    axes = plot.lanes(EIGHT, 4, threads=2).axes[0]
    assert sorted({bar.get_y() for bar in _bars(axes, "element").values()}) == [0, 1, 2.5, 3.5]
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names == ["thread 0, 0", "thread 0, 1", "thread 1, 2", "thread 1, 3"]
    idle = {
        row: (bar.get_x(), bar.get_width(), bar.get_y())
        for (row,), bar in _bars(axes, "idle").items()
    }
    assert idle == {1: (11, 1, 1), 2: (11, 1, 2.5), 3: (11, 1, 3.5)}
    assert Counter(text.get_text() for text in axes.texts) == {
        str(s): n for s, n in enumerate(EIGHT)
    }
    crowded = plot.lanes([3, 2], 2, threads=9).axes[0]
    assert [tick.get_text() for tick in crowded.get_yticklabels()] == ["thread 0, 0", "thread 1, 1"]


@pytest.mark.parametrize("longest", [60, 10_000])
def test_many_and_long_sequences_are_bars(longest: int) -> None:
    lengths = [longest * place // 200 for place in range(200)]
    for axes in (plot.padded(lengths).axes[0], plot.schedules(lengths).axes[1]):
        bars = _bars(axes, "elements")
        assert {key[0]: bar.get_width() for key, bar in bars.items()} == {
            s: n for s, n in enumerate(lengths) if n
        }
        padding = _bars(axes, "padding")
        assert sum(bar.get_width() for bar in padding.values()) == rl.cost(lengths)["padded"].waste
        assert all(bar.get_x() == lengths[key[0]] for key, bar in padding.items())


def test_of_more_than_200_a_sample_is_drawn_and_the_picture_says_so() -> None:
    lengths = [place % 50 for place in range(1000)]
    axes = plot.padded(lengths).axes[0]
    assert len({bar.get_y() for bar in axes.patches if isinstance(bar, Rectangle)}) == 200
    assert axes.get_xlabel() == "step; 200 of 1,000 sequences drawn"
    assert (
        axes.get_title(loc="left")
        == "1,000 sequences, padded: 49,000 elements, 24,500 of them padding"
    )
    sampled = [place * 999 // 199 for place in range(200)]
    widths = {key[0]: bar.get_width() for key, bar in _bars(axes, "elements").items()}
    assert widths == {row: lengths[place] for row, place in enumerate(sampled) if lengths[place]}
    names = [int(tick.get_text()) for tick in axes.get_yticklabels()]
    assert names == sampled[:: 200 // len(names)]
    assert "drawn" not in plot.padded(lengths[:200]).axes[0].get_xlabel()


def _luminance(color: Any) -> float:
    """The relative luminance of WCAG 2."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(color)
    ]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_every_sequence_of_21_has_a_colour_on_which_its_text_can_be_read() -> None:
    assert len({color_of(number) for number in range(21)}) == 21
    axes = plot.padded([1] * 21).axes[0]
    colors = {bar.get_xy(): bar.get_facecolor() for bar in _bars(axes, "element").values()}
    inks = {text.get_position(): text.get_color() for text in axes.texts}
    for (x, y), color in colors.items():
        dark, light = sorted((_luminance(color), _luminance(inks[x + 0.5, y + 0.5])))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


_FOUR = [3, 0, 1, 2]


def _colors(axes: Any) -> Any:
    """``(rows, columns, 4)``, from shapes or from an image."""
    return np.asarray(
        axes.collections[0].get_array() if axes.collections else axes.images[0].get_array()
    )


def _batch(features: int | None = None, lengths: list[int] = _FOUR) -> rl.Ragged:
    return rl.Ragged.from_flat(
        torch.rand(sum(lengths), *([features] if features else [])), lengths=lengths
    )


def test_weights_of_each_head_stand_at_their_elements() -> None:
    weights = rl.nn.AttentionPooling(6, num_heads=3).weights(_batch(6))
    for head, axes in enumerate(plot.attention(weights).axes):
        assert axes.get_title(loc="left").startswith(f"attention, head {head}:")
        assert axes.get_xlabel() == "step; colours: square root"
        expected = {
            (step + 0.5, row + 0.5): f"{weight:.2g}"
            for row, sequence in enumerate(weights.to_list())
            for step, weight in enumerate(sequence[:, head].tolist())
        }
        assert texts_at(axes) == expected


@pytest.mark.parametrize(
    "lengths", [_FOUR, [7 * place for place in range(90)]], ids=["shapes", "an image"]
)
def test_colours_follow_the_numbers_and_end_with_their_sequence(lengths: list[int]) -> None:
    gate = _batch(1, lengths)
    colors = _colors(plot.gates({"forget": gate}).axes[0])
    expected = colormaps["viridis"](gate.to_padded()[0][:, :, 0].double().numpy())
    expected[~gate.mask().numpy()] = 0
    assert np.allclose(colors, expected)


def test_gates_are_means_and_norms_are_norms() -> None:
    batch = _batch(5)
    values = batch.values.double()
    norms = values.square().sum(1).sqrt()
    pictures = plot.gates({"i": batch}), plot.norms({"h": batch, "c": batch})
    assert [axes.get_title(loc="left") for axes in pictures[1].axes] == [
        f"norm of {s}: 4 sequences" for s in "hc"
    ]
    for picture, numbers in zip(pictures, (values.mean(1), norms), strict=True):
        shown = [text.get_text() for text in picture.axes[0].texts]
        assert shown == [
            f"{number:.3g}" if number >= 1 else f"{number:.2g}" for number in numbers.tolist()
        ]


def test_labels_stand_in_the_elements() -> None:
    texts = texts_at(
        plot.attention(_batch(), labels=["abc", "", ["$d"], ["e", "long" * 20]]).axes[0]
    )
    assert [texts[0.5, 0.5], texts[2.5, 0.5], texts[0.5, 2.5], texts[0.5, 3.5]] == [
        "a",
        "c",
        "$d",
        "e",
    ]
    assert texts[1.5, 3.5].endswith("…")


def test_numbers_that_are_not_finite_are_red_and_counted() -> None:
    states = rl.Ragged([torch.tensor([[1.0], [float("nan")]]), torch.tensor([[float("-inf")]])])
    axes = plot.norms({"h": states}).axes[0]
    colors = _colors(axes)
    assert [tuple(colors[place]) for place in ((0, 1), (1, 0))] == [to_rgba(VERMILION)] * 2
    assert tuple(colors[0, 0]) == colormaps["viridis"](1.0)
    assert axes.get_title(loc="left") == "norm of h: 2 sequences, not finite at 2 elements (red)"


def _heights(axes: Any) -> dict[float, float]:
    return {bar.get_x(): bar.get_height() for bar in axes.patches if bar.get_height()}


def test_bars_count_sequences_and_the_line_adds_them_up() -> None:
    counts, shares = plot.histogram(EIGHT).axes
    line: Any
    quantiles: Any
    assert _heights(counts) == {2.5: 1, 3.5: 2, 4.5: 1, 5.5: 1, 6.5: 1, 7.5: 2}
    line, quantiles = shares.lines
    assert dict(zip(*line.get_data(), strict=True)) == pytest.approx(
        {0: 0, 3: 12.5, 4: 37.5, 5: 50, 6: 62.5, 7: 75, 8: 100}
    )
    assert list(zip(*quantiles.get_data(), strict=True)) == [(5, 50), (8, 90), (8, 99)]


def test_few_wide_bars_still_count_everything() -> None:
    lengths = np.random.default_rng(0).integers(0, 100_000, 500)
    counts, shares = plot.histogram(lengths).axes
    assert len(counts.patches) <= 51
    assert sum(_heights(counts).values()) == 500
    assert "2,000 to a bar" in counts.get_xlabel()
    quantiles: Any = shares.lines[1]
    expected = [np.quantile(lengths, share, method="inverted_cdf") for share in (0.5, 0.9, 0.99)]
    assert list(quantiles.get_xdata()) == expected


def test_borders_are_those_of_the_batches() -> None:
    lengths = np.array([5, 1, 9, 2, 8, 1, 5, 5])
    counts, _ = plot.histogram(lengths, 2).axes
    batches = [
        sorted(lengths[batch])
        for batch in BatchSampler(lengths, BatchLimit(sequences=2), EpochOrder.sorted())
    ]
    borders = sorted({(shorter[1] + longer[0]) / 2 for longer, shorter in pairwise(batches)})
    drawn: list[Any] = list(counts.lines)
    assert [line.get_xdata()[0] for line in drawn] == borders == [1.5, 5, 6.5]
    assert len(plot.histogram(lengths, 8).axes[0].lines) == 0


def _lines(picture: Picture) -> dict[str, Any]:
    return {str(line.get_label()): line for line in picture.axes[0].lines}


@pytest.mark.parametrize("lengths", [[], [0], [7], [0, 0, 0]])
def test_hardly_any_lengths(lengths: list[int]) -> None:
    counts, _ = plot.histogram(lengths, 2).axes
    assert sum(_heights(counts).values()) == len(lengths)
    assert all(not any(line.get_ydata()) for line in _lines(plot.waste(lengths)).values())


def test_waste_is_what_cost_counts_for_the_batches_of_the_loader() -> None:
    lengths = np.random.default_rng(1).integers(0, 70, 400)
    lines = _lines(plot.waste(lengths, [4, 32], seed=3))
    assert list(lines) == ["random", "bucketed", "sorted"]
    for size, place in ((4, 0), (32, 1)):
        epochs = {
            "bucketed": BatchSampler(
                lengths, BatchLimit(sequences=size), EpochOrder.bucketed(), seed=3
            ),
            "sorted": BatchSampler(lengths, BatchLimit(sequences=size), EpochOrder.sorted()),
        }
        for name, batches in epochs.items():
            costs = [rl.cost(lengths[batch])["padded"] for batch in batches]
            share = 100 * sum(one.waste for one in costs) / sum(one.elements for one in costs)
            assert lines[name].get_ydata()[place] == pytest.approx(share)
    by_chance = lines["random"].get_ydata()
    assert all(
        share > 2 * other
        for share, other in zip(by_chance, lines["bucketed"].get_ydata(), strict=True)
    )
    # Of uniform lengths, a random batch of n pads 1 - (n + 1) / 2n of what it computes.
    assert by_chance[1] == pytest.approx(100 * (1 - 33 / 64), abs=3)


def test_sizes_of_batches() -> None:
    for count, sizes in (
        (0, [1]),
        (1, [1]),
        (9, [1, 2, 4, 8]),
        (5_000, [2**power for power in range(10)]),
    ):
        assert list(_lines(plot.waste([1] * count))["random"].get_xdata()) == sizes
    assert list(_lines(plot.waste(EIGHT, np.array([8, 2])))["random"].get_xdata()) == [2, 8]


def _points(line: Any) -> Any:
    return line.get_xydata().tolist()
