"""The pictures of layouts show the elements of the schedules, and the counts of rl.cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle
from torch.nn.utils.rnn import pack_sequence

import raglane as rl
from drawings import EIGHT, SIX
from raglane import plot
from raglane.plot.cells import color_of
from raglane.schedules import SCHEDULES, Table
from strategies import lengths as some_lengths

_Place = tuple[float, float]


def _bars(axes: Axes, kind: str) -> dict[tuple[int, ...], Rectangle]:
    """The rectangles of a kind by the numbers in their labels, which no legend shows."""
    named = [
        (str(bar.get_label()).removeprefix("_").split(), bar) for bar in axes.patches if isinstance(bar, Rectangle)
    ]
    return {tuple(map(int, name[1:])): bar for name, bar in named if name[0] == kind}


def _texts(axes: Axes) -> dict[_Place, str]:
    return {text.get_position(): text.get_text() for text in axes.texts}


def _cells(table: Table, lengths: list[int], real: bool) -> dict[tuple[int, int], _Place]:
    """Where each element belongs that a schedule computes: its time, and its row."""
    time = torch.repeat_interleave(torch.arange(table.steps), table.rows_per_step)
    rows = zip(*(part.tolist() for part in (table.sequence, table.step, time, table.row)), strict=True)
    return {(s, step): (t, row) for s, step, t, row in rows if (step < lengths[s]) == real}


def _check(axes: Axes, name: str, lengths: list[int], lanes: int | None = None) -> None:
    table = SCHEDULES[name].table(torch.tensor(lengths, dtype=torch.int64), lanes)
    count = rl.cost(lengths, lanes=lanes)[name]
    drawn, padding = _bars(axes, "element"), _bars(axes, "padding")
    assert len(drawn) == count.elements - count.waste
    assert len(padding) == count.waste
    for bars, real in ((drawn, True), (padding, False)):
        assert {key: bar.get_xy() for key, bar in bars.items()} == _cells(table, lengths, real)
        assert all((bar.get_width(), bar.get_height()) == (1, 1) for bar in bars.values())
    for (sequence, _), bar in drawn.items():
        assert to_hex(bar.get_facecolor()) == color_of(sequence).lower()
    hatched = sum(bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_hatch())
    assert hatched == count.waste


@settings(max_examples=10)
@given(lengths=some_lengths(5, 6))
def test_every_element_stands_where_the_schedule_computes_it(lengths: list[int]) -> None:
    _check(plot.padded(lengths).axes[0], "padded", lengths)
    _check(plot.packed(lengths).axes[0], "packed", lengths)
    _check(plot.lanes(lengths, 2).axes[0], "lanes", lengths, 2)
    for name, axes in zip(SCHEDULES, plot.schedules(lengths, 3).axes, strict=True):
        _check(axes, name, lengths, 3)


def test_the_numbers_at_the_side_of_padding() -> None:
    axes = plot.padded(SIX).axes[0]
    side = axes.texts[-1].get_text()
    for words in ("padded: 54 multiplications, 48 additions", "packed: 32 multiplications, 26 additions", "22 and 22"):
        assert words in side
    assert axes.get_title(loc="left") == "6 sequences, padded: 54 elements, 22 of them padding"


def test_an_element_has_its_number_or_its_label() -> None:
    lengths = [3, 0, 2]
    numbers = {(0.5, 0.5): "0", (1.5, 0.5): "1", (2.5, 0.5): "2", (0.5, 2.5): "3", (1.5, 2.5): "4"}
    assert {place: text for place, text in _texts(plot.padded(lengths).axes[0]).items() if place in numbers} == numbers
    words = plot.padded(lengths, labels=["abc", [], ["d", 1.5]]).axes[0]
    assert [text.get_text() for text in words.texts[:-1]] == ["a", "b", "c", "d", "1.5"]
    values = rl.Ragged.from_flat(torch.tensor([7, 8, 9, 10, 11]), lengths=lengths)
    numbered = plot.padded(lengths, labels=values).axes[0]
    assert [text.get_text() for text in numbered.texts[:-1]] == ["7", "8", "9", "10", "11"]


def test_data_and_batch_sizes_are_those_of_torch() -> None:
    lengths = [4, 9, 2, 8]
    values = torch.arange(sum(lengths)).split(lengths)
    packed = pack_sequence(list(values), enforce_sorted=False)
    axes = plot.packed(lengths).axes[0]
    ticks = [tick.get_text().split() for tick in axes.get_xticklabels()]
    assert [int(size) for size, _ in ticks] == packed.batch_sizes.tolist()
    assert [int(step) for _, step in ticks] == list(range(9))
    strip = sorted((place[0], text) for place, text in _texts(axes).items() if place[1] == -1)
    assert [int(text) for _, text in strip] == packed.data.tolist()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["data", "1", "3", "0", "2"]


def test_lanes_stand_by_thread_and_end_idle() -> None:
    axes = plot.lanes(EIGHT, 4, threads=2).axes[0]
    tops = sorted({bar.get_y() for bar in _bars(axes, "element").values()})
    assert tops == [0, 1, 2.5, 3.5]
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names == ["thread 0, 0", "thread 0, 1", "thread 1, 2", "thread 1, 3"]
    idle = {row: (bar.get_x(), bar.get_width(), bar.get_y()) for (row,), bar in _bars(axes, "idle").items()}
    assert idle == {1: (11, 1, 1), 2: (11, 1, 2.5), 3: (11, 1, 3.5)}
    assert Counter(text.get_text() for text in axes.texts) == {str(s): n for s, n in enumerate(EIGHT)}
    crowded = plot.lanes([3, 2], 2, threads=9).axes[0]
    assert [tick.get_text() for tick in crowded.get_yticklabels()] == ["thread 0, 0", "thread 1, 1"]


def test_titles_of_schedules_are_what_cost_counts() -> None:
    picture = plot.schedules(EIGHT, 4)
    for axes, count in zip(picture.axes, rl.cost(EIGHT, lanes=4).values(), strict=True):
        waste = f" {count.waste} of them waste," if count.waste else ""
        title = f"{count.schedule}: {count.elements} elements,{waste} {count.steps} steps"
        assert axes.get_title(loc="left") == title
    scales = {(round(axes.bbox.width / axes.get_xlim()[1], 6)) for axes in picture.axes[1:]}
    heights = {round(axes.bbox.height / axes.get_ylim()[0], 6) for axes in picture.axes[1:]}
    assert len(scales) == len(heights) == 1


@pytest.mark.parametrize("longest", [60, 10_000])
def test_many_and_long_sequences_are_bars(longest: int) -> None:
    lengths = [longest * place // 200 for place in range(200)]
    for axes in (plot.padded(lengths).axes[0], plot.schedules(lengths).axes[1]):
        bars = _bars(axes, "elements")
        assert {key[0]: bar.get_width() for key, bar in bars.items()} == {s: n for s, n in enumerate(lengths) if n}
        padding = _bars(axes, "padding")
        assert sum(bar.get_width() for bar in padding.values()) == rl.cost(lengths)["padded"].waste
        assert all(bar.get_x() == lengths[key[0]] for key, bar in padding.items())


def test_of_more_than_200_a_sample_is_drawn_and_the_picture_says_so() -> None:
    lengths = [place % 50 for place in range(1000)]
    axes = plot.padded(lengths).axes[0]
    assert len({bar.get_y() for bar in axes.patches if isinstance(bar, Rectangle)}) == 200
    assert axes.get_xlabel() == "step; 200 of 1,000 sequences drawn"
    assert axes.get_title(loc="left") == "1,000 sequences, padded: 49,000 elements, 24,500 of them padding"
    sampled = [place * 999 // 199 for place in range(200)]
    widths = {key[0]: bar.get_width() for key, bar in _bars(axes, "elements").items()}
    assert widths == {row: lengths[place] for row, place in enumerate(sampled) if lengths[place]}
    names = [int(tick.get_text()) for tick in axes.get_yticklabels()]
    assert names == sampled[:: 200 // len(names)]
    assert "drawn" not in plot.padded(lengths[:200]).axes[0].get_xlabel()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_is_drawn_of_nothing(lengths: list[int]) -> None:
    for picture in (plot.padded(lengths), plot.packed(lengths), plot.lanes(lengths), plot.schedules(lengths)):
        for axes in picture.axes:
            assert all(bar.get_width() == 0 for bar in axes.patches if isinstance(bar, Rectangle))
        picture.figure.canvas.draw()


def test_lengths_of_every_kind_give_the_same_picture() -> None:
    titles = [
        plot.packed(lengths).axes[0].get_title(loc="left")
        for lengths in (
            [4, 0, 2],
            np.array([4, 0, 2], dtype=np.uint8),
            torch.tensor([4, 0, 2]),
            rl.Ragged.from_flat(torch.zeros(6, 3), lengths=[4, 0, 2]),
        )
    ]
    assert titles == ["3 sequences, packed: 6 elements, 4 steps, no padding"] * 4


def _luminance(color: Any) -> float:
    """As WCAG 2 defines it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_every_sequence_of_21_has_a_colour_on_which_its_text_can_be_read() -> None:
    assert len({color_of(number) for number in range(21)}) == 21
    axes = plot.padded([1] * 21).axes[0]
    colors = {bar.get_xy(): bar.get_facecolor() for bar in _bars(axes, "element").values()}
    inks = {text.get_position(): text.get_color() for text in axes.texts}
    for (x, y), color in colors.items():
        light, dark = sorted((_luminance(color), _luminance(inks[x + 0.5, y + 0.5])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
