"""Errors of the pictures name the argument, its value, the rule and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import raglane as rl
from raglane import plot
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError

_HALVES = rl.Ragged.from_flat(torch.full((3,), 0.5), lengths=[2, 1])
_TIME = {"method": "a", "fill": 0.5, "seconds": 1e-6}
_KERNEL = {"name": "a", "intensity": 1.0, "rate": 1e9}


def _roofline(**given: Any) -> Any:
    return plot.roofline(**{"kernels": [_KERNEL], "peak": 1e11, "bandwidth": 1e10, **given})


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: plot.padded([3, 2], labels=["abc"]), ShapeError, "labels must be one label for each.*, got 1 lists"),
        (
            lambda: plot.packed([3, 2], labels=["abc", "d"]),
            ShapeError,
            "labels must be .*it has 2.*, got 1 for sequence 1",
        ),
        (lambda: plot.padded([1], labels=5), ArgumentTypeError, "labels must be .*got 5"),
        (lambda: plot.padded([1], labels=[5]), ArgumentTypeError, "labels must be .*got 5 for sequence 0"),
        (
            lambda: plot.padded([2**20] * 9),
            ArgumentError,
            "lengths must be .*at most 8,388,608 elements.*, got 9,437,184",
        ),
        (lambda: plot.padded([1], axes=3), ArgumentTypeError, "axes must be axes of matplotlib.*, got 3"),
        (lambda: plot.padded([1], axes=Figure()), ArgumentTypeError, "axes must be "),
        (lambda: plot.schedules([1], axes=Figure().add_subplot()), ShapeError, "axes must be 5.*, got 1 axes"),
        (lambda: plot.lanes([1], 0), ArgumentError, "lanes must be .*got 0"),
        (lambda: plot.lanes([1], threads=0), ArgumentError, "threads must be at least 1.*, got 0"),
        (lambda: plot.lanes([1], threads=1.5), ArgumentTypeError, "threads must be .*got 1.5"),  # type: ignore[arg-type]
        (lambda: plot.histogram([1], 0), ArgumentError, "batch_size must be at least 1.*, got 0"),
        (lambda: plot.waste([1], []), ArgumentError, "batch_sizes must be .*got none"),
        (lambda: plot.waste([1], [4, 0]), ArgumentError, r"batch_sizes\[1\] must be at least 1.*, got 0"),
        (lambda: plot.waste([1], 4), ArgumentTypeError, "batch_sizes must be .*got 4"),
        (lambda: plot.waste([1], seed=-1), ArgumentError, "seed must be .*got -1"),
        (lambda: plot.times([]), ArgumentError, "rows must be a list of mappings with method, fill, sec.*, got none"),
        (lambda: plot.times(_TIME), ArgumentTypeError, "rows must be "),  # type: ignore[arg-type]
        (lambda: plot.times([_TIME, 3]), ArgumentTypeError, r"rows\[1\] must be .*got 3"),  # type: ignore[list-item]
        (
            lambda: plot.times([{"method": "a"}]),
            ArgumentError,
            r"rows\[0\] must be .*, got the keys 'method'. Add fill",
        ),
        (lambda: plot.times([{**_TIME, "fill": 40}]), ArgumentError, r"rows\[0\]\['fill'\] must be above 0.*, got 40"),
        (lambda: plot.times([{**_TIME, "seconds": 0}]), ArgumentError, r"rows\[0\]\['seconds'\] must be .*got 0"),
        (lambda: plot.times([{**_TIME, "method": 3}]), ArgumentTypeError, r"rows\[0\]\['method'\] must be .*got 3"),
        (
            lambda: plot.times([{**_TIME, "method": str(place)} for place in range(41)]),
            ArgumentError,
            "rows must be at most 40.*, got 41 names",
        ),
        (lambda: _roofline(peak=0), ArgumentError, "peak must be a number above 0.*, got 0"),
        (lambda: _roofline(bandwidth="fast"), ArgumentTypeError, "bandwidth must be .*got 'fast'"),
        (
            lambda: _roofline(kernels=[{**_KERNEL, "rate": float("inf")}]),
            ArgumentError,
            r"kernels\[0\]\['rate'\] must be .*got inf",
        ),
        (lambda: plot.attention(torch.ones(3)), ArgumentTypeError, "weights must be "),  # type: ignore[arg-type]
        (lambda: plot.attention(_HALVES * 3), ArgumentError, "weights must be numbers from 0 to 1.*, got 1.5"),
        (lambda: plot.attention(_HALVES * float("nan")), ArgumentError, "weights must be .*got nan"),
        (
            lambda: plot.attention(_HALVES.to(torch.int64)),
            ArgumentTypeError,
            "weights must be floats.*, got torch.int64",
        ),
        (
            lambda: plot.norms(rl.Ragged.from_flat(torch.ones(3, 2, 2), lengths=[3])),
            ShapeError,
            r"states must be .*got elements of shape \(2, 2\)",
        ),
        (lambda: plot.gates({}), ArgumentError, "activity must be at least one Ragged.*, got none"),
        (lambda: plot.gates({3: _HALVES}), ArgumentTypeError, "a name in activity must be .*got 3"),  # type: ignore[dict-item]
        (lambda: plot.gates({"f": 3}), ArgumentTypeError, r"activity\['f'\] must be .*got 3"),  # type: ignore[dict-item]
        (
            lambda: plot.gates({"i": _HALVES, "f": _HALVES[:1]}),
            ShapeError,
            "gate f must be .*gate i has, 2.*, got 1 sequences",
        ),
        (lambda: plot.norms({"h": _HALVES}, axes=Figure().subplots(2)), ShapeError, "axes must be 1.*, got 2 axes"),
    ],
)
def test_errors_teach(call: Callable[[], Any], kind: type[RaglaneError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert " must be " in str(caught.value)


@pytest.mark.parametrize("draw", [plot.padded, plot.packed, plot.lanes, plot.schedules, plot.histogram, plot.waste])
def test_lengths_are_read_as_cost_reads_them(draw: Callable[[Any], Any]) -> None:
    for wrong in ([3, -1], [3.0], [[1, 2]], 5, "3", None, [torch.zeros(3)]):
        with pytest.raises(RaglaneError) as expected:
            rl.cost(wrong)
        with pytest.raises(type(expected.value)) as caught:
            draw(wrong)
        assert str(caught.value) == str(expected.value)
