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
        (lambda: plot.padded([3, 2], labels=["abc"]), ShapeError, "labels: got 1 lists; the rule: one label for each"),
        (lambda: plot.packed([3, 2], labels=["abc", "d"]), ShapeError, "labels: got 1 for sequence 1; .* it has 2"),
        (lambda: plot.padded([1], labels=5), ArgumentTypeError, "labels: got 5"),
        (lambda: plot.padded([1], labels=[5]), ArgumentTypeError, "labels: got 5 for sequence 0"),
        (
            lambda: plot.padded([2**20] * 9),
            ArgumentError,
            "lengths: got 9,437,184; .* at most 8,388,608 elements",
        ),
        (lambda: plot.padded([1], axes=3), ArgumentTypeError, "axes: got 3; the rule: axes of matplotlib"),
        (lambda: plot.padded([1], axes=Figure()), ArgumentTypeError, "axes: got"),
        (lambda: plot.schedules([1], axes=Figure().add_subplot()), ShapeError, "axes: got 1 axes; the rule: 5"),
        (lambda: plot.lanes([1], 0), ArgumentError, "lanes: got 0"),
        (lambda: plot.lanes([1], threads=0), ArgumentError, "threads: got 0; the rule: at least 1"),
        (lambda: plot.lanes([1], threads=1.5), ArgumentTypeError, "threads: got 1.5"),  # type: ignore[arg-type]
        (lambda: plot.histogram([1], 0), ArgumentError, "batch_size: got 0; the rule: at least 1"),
        (lambda: plot.waste([1], []), ArgumentError, "batch_sizes: got none"),
        (lambda: plot.waste([1], [4, 0]), ArgumentError, r"batch_sizes\[1\]: got 0; the rule: at least 1"),
        (lambda: plot.waste([1], 4), ArgumentTypeError, "batch_sizes: got 4"),
        (lambda: plot.waste([1], seed=-1), ArgumentError, "seed: got -1"),
        (lambda: plot.times([]), ArgumentError, "rows: got none; the rule: a list of mappings with method, fill, sec"),
        (lambda: plot.times(_TIME), ArgumentTypeError, "rows: got"),  # type: ignore[arg-type]
        (lambda: plot.times([_TIME, 3]), ArgumentTypeError, r"rows\[1\]: got 3"),  # type: ignore[list-item]
        (lambda: plot.times([{"method": "a"}]), ArgumentError, r"rows\[0\]: got the keys 'method'; .* Fix: add fill"),
        (lambda: plot.times([{**_TIME, "fill": 40}]), ArgumentError, r"rows\[0\]\['fill'\]: got 40; the rule: above 0"),
        (lambda: plot.times([{**_TIME, "seconds": 0}]), ArgumentError, r"rows\[0\]\['seconds'\]: got 0"),
        (lambda: plot.times([{**_TIME, "method": 3}]), ArgumentTypeError, r"rows\[0\]\['method'\]: got 3"),
        (
            lambda: plot.times([{**_TIME, "method": str(place)} for place in range(41)]),
            ArgumentError,
            "rows: got 41 names; the rule: at most 40",
        ),
        (lambda: _roofline(peak=0), ArgumentError, "peak: got 0; the rule: a number above 0"),
        (lambda: _roofline(bandwidth="fast"), ArgumentTypeError, "bandwidth: got 'fast'"),
        (
            lambda: _roofline(kernels=[{**_KERNEL, "rate": float("inf")}]),
            ArgumentError,
            r"kernels\[0\]\['rate'\]: got inf",
        ),
        (lambda: plot.attention(torch.ones(3)), ArgumentTypeError, "weights: got"),  # type: ignore[arg-type]
        (lambda: plot.attention(_HALVES * 3), ArgumentError, "weights: got 1.5; the rule: numbers from 0 to 1"),
        (lambda: plot.attention(_HALVES * float("nan")), ArgumentError, "weights: got nan"),
        (
            lambda: plot.attention(_HALVES.to(torch.int64)),
            ArgumentTypeError,
            "weights: got torch.int64; the rule: floats",
        ),
        (
            lambda: plot.norms(rl.Ragged.from_flat(torch.ones(3, 2, 2), lengths=[3])),
            ShapeError,
            r"states: got elements of shape \(2, 2\)",
        ),
        (lambda: plot.gates({}), ArgumentError, "activity: got none; the rule: at least one Ragged"),
        (lambda: plot.gates({3: _HALVES}), ArgumentTypeError, "a name in activity: got 3"),  # type: ignore[dict-item]
        (lambda: plot.gates({"f": 3}), ArgumentTypeError, r"activity\['f'\]: got 3"),  # type: ignore[dict-item]
        (lambda: plot.gates({"i": _HALVES, "f": _HALVES[:1]}), ShapeError, "gate f: got 1 sequences; .* gate i has, 2"),
        (lambda: plot.norms({"h": _HALVES}, axes=Figure().subplots(2)), ShapeError, "axes: got 2 axes; the rule: 1"),
    ],
)
def test_errors_teach(call: Callable[[], Any], kind: type[RaglaneError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert " Fix: " in str(caught.value)


@pytest.mark.parametrize("draw", [plot.padded, plot.packed, plot.lanes, plot.schedules, plot.histogram, plot.waste])
def test_lengths_are_read_as_cost_reads_them(draw: Callable[[Any], Any]) -> None:
    for wrong in ([3, -1], [3.0], [[1, 2]], 5, "3", None, [torch.zeros(3)]):
        with pytest.raises(RaglaneError) as expected:
            rl.cost(wrong)
        with pytest.raises(type(expected.value)) as caught:
            draw(wrong)
        assert str(caught.value) == str(expected.value)
