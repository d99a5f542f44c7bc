"""Charts of measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raglane import plot


def _points(line: Any) -> Any:
    return np.transpose(line.get_data()).tolist()


def test_times_are_lines_over_fill() -> None:
    rows = [
        {"method": "lanes", "fill": 1.0, "seconds": 2e-6},
        {"method": "padded", "fill": 0.5, "seconds": 8e-6, "cell": "lstm"},
        {"method": "lanes", "fill": 0.25, "seconds": 1e-6},
    ]
    axes = plot.times(rows).axes[0]
    lines = {line.get_label(): _points(line) for line in axes.lines}
    assert lines == {
        "lanes": [[25, pytest.approx(1)], [100, pytest.approx(2)]],
        "padded": [[50, pytest.approx(8)]],
    }
    assert axes.get_ylabel() == "time per element (µs)"
    for seconds, unit in ((3.0, "s"), (3e-3, "ms"), (3e-9, "ns"), (3e-13, "ns")):
        label = plot.times([{"method": "a", "fill": 1, "seconds": seconds}]).axes[0].get_ylabel()
        assert label == f"time per element ({unit})"


def test_the_roof_has_its_corner_where_memory_and_peak_meet() -> None:
    kernels = [{"name": "a", "intensity": 1, "rate": 10e9}, {"name": "$b", "intensity": 50.0, "rate": 25e9}]
    axes = plot.roofline(kernels, peak=100e9, bandwidth=20e9).axes[0]
    roof, *points = axes.lines
    left, corner, right = _points(roof)
    assert corner == [5, 100e9]
    assert left[1] == left[0] * 20e9
    assert right[1] == 100e9
    assert [_points(point) for point in points] == [[[1, 10e9]], [[50, 25e9]]]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a: 50 %", "$b: 25 %"]


def test_no_two_methods_look_alike() -> None:
    rows = [{"method": f"m{place}", "fill": 1.0, "seconds": 1e-6} for place in range(40)]
    lines = plot.times(rows).axes[0].lines
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 40
