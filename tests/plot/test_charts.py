"""Charts of lengths, of the waste of batches, and of measurements."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import raglane as rl
from drawings import EIGHT
from raglane import plot
from raglane.data import BatchLimit, BatchSampler, EpochOrder


def _bars(axes: Any) -> dict[float, float]:
    return {bar.get_x(): bar.get_height() for bar in axes.patches if bar.get_height()}


def test_bars_count_sequences_and_the_line_adds_them_up() -> None:
    counts, shares = plot.histogram(EIGHT).axes
    line: Any
    quantiles: Any
    assert _bars(counts) == {2.5: 1, 3.5: 2, 4.5: 1, 5.5: 1, 6.5: 1, 7.5: 2}
    line, quantiles = shares.lines
    assert dict(zip(*line.get_data(), strict=True)) == pytest.approx(
        {0: 0, 3: 12.5, 4: 37.5, 5: 50, 6: 62.5, 7: 75, 8: 100}
    )
    assert list(zip(*quantiles.get_data(), strict=True)) == [(5, 50), (8, 90), (8, 99)]


def test_few_wide_bars_still_count_everything() -> None:
    lengths = np.random.default_rng(0).integers(0, 100_000, 500)
    counts, shares = plot.histogram(lengths).axes
    assert len(counts.patches) <= 51
    assert sum(_bars(counts).values()) == 500
    assert "2,000 to a bar" in counts.get_xlabel()
    quantiles: Any = shares.lines[1]
    expected = [np.quantile(lengths, share, method="inverted_cdf") for share in (0.5, 0.9, 0.99)]
    assert list(quantiles.get_xdata()) == expected


def test_borders_are_those_of_the_batches() -> None:
    lengths = np.array([5, 1, 9, 2, 8, 1, 5, 5])
    counts, _ = plot.histogram(lengths, 2).axes
    batches = [sorted(lengths[batch]) for batch in BatchSampler(lengths, BatchLimit(sequences=2), EpochOrder.sorted())]
    borders = sorted({(shorter[1] + longer[0]) / 2 for longer, shorter in pairwise(batches)})
    drawn: list[Any] = list(counts.lines)
    assert [line.get_xdata()[0] for line in drawn] == borders == [1.5, 5, 6.5]
    assert len(plot.histogram(lengths, 8).axes[0].lines) == 0


def _lines(picture: plot.Picture) -> dict[str, Any]:
    return {str(line.get_label()): line for line in picture.axes[0].lines}


@pytest.mark.parametrize("lengths", [[], [0], [7], [0, 0, 0]])
def test_hardly_any_lengths(lengths: list[int]) -> None:
    counts, _ = plot.histogram(lengths, 2).axes
    assert sum(_bars(counts).values()) == len(lengths)
    assert all(not any(line.get_ydata()) for line in _lines(plot.waste(lengths)).values())


def test_waste_is_what_cost_counts_for_the_batches_of_the_loader() -> None:
    lengths = np.random.default_rng(1).integers(0, 70, 400)
    lines = _lines(plot.waste(lengths, [4, 32], seed=3))
    assert list(lines) == ["random", "bucketed", "sorted"]
    for size, place in ((4, 0), (32, 1)):
        epochs = {
            "bucketed": BatchSampler(lengths, BatchLimit(sequences=size), EpochOrder.grouped(), seed=3),
            "sorted": BatchSampler(lengths, BatchLimit(sequences=size), EpochOrder.sorted()),
        }
        for name, batches in epochs.items():
            costs = [rl.cost(lengths[batch])["padded"] for batch in batches]
            share = 100 * sum(one.waste for one in costs) / sum(one.elements for one in costs)
            assert lines[name].get_ydata()[place] == pytest.approx(share)
    by_chance = lines["random"].get_ydata()
    assert all(share > 2 * other for share, other in zip(by_chance, lines["bucketed"].get_ydata(), strict=True))
    # Of uniform lengths, a random batch of n pads 1 - (n + 1) / 2n of what it computes.
    assert by_chance[1] == pytest.approx(100 * (1 - 33 / 64), abs=3)


def test_sizes_of_batches() -> None:
    for count, sizes in ((0, [1]), (1, [1]), (9, [1, 2, 4, 8]), (5_000, [2**power for power in range(10)])):
        assert list(_lines(plot.waste([1] * count))["random"].get_xdata()) == sizes
    assert list(_lines(plot.waste(EIGHT, np.array([8, 2])))["random"].get_xdata()) == [2, 8]


def test_times_are_lines_over_fill() -> None:
    rows = [
        {"method": "lanes", "fill": 1.0, "seconds": 2e-6},
        {"method": "padded", "fill": 0.5, "seconds": 8e-6, "cell": "lstm"},
        {"method": "lanes", "fill": 0.25, "seconds": 1e-6},
    ]
    axes = plot.times(rows).axes[0]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {
        "lanes": [[25, pytest.approx(1)], [100, pytest.approx(2)]],
        "padded": [[50, pytest.approx(8)]],
    }
    assert axes.get_ylabel() == "time per element (µs)"
    looks = plot.times([{"method": f"m{place}", "fill": 1.0, "seconds": 1e-6} for place in range(40)]).axes[0].lines
    assert len({(line.get_color(), line.get_marker()) for line in looks}) == 40
    for seconds, unit in ((3.0, "s"), (3e-3, "ms"), (3e-9, "ns"), (3e-13, "ns")):
        label = plot.times([{"method": "a", "fill": 1, "seconds": seconds}]).axes[0].get_ylabel()
        assert label == f"time per element ({unit})"


def test_the_roof_has_its_corner_where_memory_and_peak_meet() -> None:
    kernels = [{"name": "a", "intensity": 1, "rate": 10e9}, {"name": "$b", "intensity": 50.0, "rate": 25e9}]
    axes = plot.roofline(kernels, peak=100e9, bandwidth=20e9).axes[0]
    roof, *points = axes.lines
    left, corner, right = roof.get_xydata().tolist()
    assert corner == [5, 100e9]
    assert left[1] == left[0] * 20e9
    assert right[1] == 100e9
    assert [point.get_xydata().tolist() for point in points] == [[[1, 10e9]], [[50, 25e9]]]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a: 50 %", "$b: 25 %"]
