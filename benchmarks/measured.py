"""Measure the data of two pictures: time per element against fill for each method, and the roofline
of this machine.

    python benchmarks/measured.py > benchmarks/results/measured.json

``python docs/draw.py`` draws the pictures. The first is a training step of an LSTM with 128 units
on 64 sequences, 1,920 elements in all; the second is inference on lognormal lengths. All methods
take turns; a figure is a median. The roofline counts each operation of a cell's products once, and
each byte of values, weights and outputs; the bandwidth is that of a copy.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness.cases import Size, operations
from harness.lengths import LENGTHS, filled
from harness.timing import YARDSTICKS, interleave, peak

import raglane as rl
from raglane.planner.machine import cpu_name

_ROUNDS = 9
_MOST_SECONDS = 10.0
_COUNT, _HIDDEN = 64, 128
_FILLS = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
_WAYS = (("cpu", "lanes"), ("torch", "packed"), ("torch", "padded"))
_LAYERS = {
    "lstm": rl.nn.LSTM,
    "gru": rl.nn.GRU,
    "rnn_tanh": rl.nn.RNN,
    "mingru": rl.nn.MinGRU,
    "sru": rl.nn.SRU,
}
_SIZES = (Size(64, 128, 128), Size(32, 512, 512))


def train(layer: Any, batch: rl.Ragged) -> None:
    """Run forward and backward, with the gradients of values and weights."""
    values = batch.values.detach().requires_grad_()
    output, _ = layer(batch.with_values(values))
    output.values.sum().backward()


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of each call."""
    for call in calls.values():
        call()
    return {
        name: statistics.median(samples)
        for name, samples in interleave(calls, _ROUNDS, most_seconds=_MOST_SECONDS).items()
    }


def by_fill() -> list[dict[str, Any]]:
    """Return the seconds per element of training by method and fill."""
    rows = []
    for fill in _FILLS:
        lengths = filled(fill)(_COUNT)
        batch = rl.Ragged.from_flat(torch.randn(sum(lengths), _HIDDEN), lengths=lengths)
        layer = rl.nn.LSTM(_HIDDEN, _HIDDEN)
        calls: dict[str, Callable[[], object]] = {}
        for backend, schedule in _WAYS:
            chosen = rl.nn.LSTM(_HIDDEN, _HIDDEN, backend=backend, schedule=schedule)
            chosen.load_state_dict(layer.state_dict())
            calls[f"{schedule}, {backend}"] = partial(train, chosen, batch)
        rows += [
            {
                "method": name,
                "fill": sum(lengths) / (_COUNT * max(lengths)),
                "seconds": taken / sum(lengths),
            }
            for name, taken in medians(calls).items()
        ]
    return rows


def roofline() -> dict[str, Any]:
    """Return the roofline of this machine, and the rates of kernels in inference."""
    copy = YARDSTICKS["copy"]
    measure = peak(torch.float32)
    if measure is None:
        sys.exit("the kernels are not built")
    kernels = []
    for size in _SIZES:
        lengths = LENGTHS["lognormal"].draw(size.batch)
        batch = rl.Ragged.from_flat(torch.randn(sum(lengths), size.input), lengths=lengths)
        layers = {cell: make(size.input, size.hidden).eval() for cell, make in _LAYERS.items()}
        with torch.no_grad():
            seconds = medians({cell: partial(layer, batch) for cell, layer in layers.items()})
        for cell, layer in layers.items():
            work = operations(cell, size, "infer") * sum(lengths)
            weights = sum(weight.numel() for weight in layer.parameters())
            moved = 4 * (weights + sum(lengths) * (size.input + size.hidden))
            name = f"{cell.removesuffix('_tanh')}, {size.hidden} units"
            kernels.append({"name": name, "intensity": work / moved, "rate": work / seconds[cell]})
    taken = medians({"peak": measure, "copy": copy.prepare(torch.float32)})
    return {
        "kernels": kernels,
        "peak": measure() / taken["peak"],
        "bandwidth": copy.rate(taken["copy"]),
    }


def rounded(found: Any) -> Any:
    """Return numbers with four digits."""
    if isinstance(found, dict):
        return {name: rounded(part) for name, part in found.items()}
    if isinstance(found, list):
        return [rounded(part) for part in found]
    if isinstance(found, float) and found:
        return round(found, 3 - math.floor(math.log10(abs(found))))
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    about = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(
        json.dumps(
            rounded({"machine": about, "times": by_fill(), "roofline": roofline()}), indent=1
        )
    )
