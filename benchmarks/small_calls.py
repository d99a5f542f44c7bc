"""The time of small calls: small batches, and one step of a stream.

    python benchmarks/small_calls.py > benchmarks/results/small-calls.md

The first table has 8 sequences of 10 elements, 32 features and 32 units: our layer on a Ragged
against the fastest of torch's layer on a padded tensor and on a pack. The second has ``layer.step``
for ``B`` streams against torch's cell and against torch's layer on one step. The weights of
prepacked layers were packed before, by ``rl.pack_weights``. The third has operations of 32
sequences of 20, against torch on their values, or the shortest code by hand on values and offsets.
All calls take turns, and each figure is a median.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import raglane as rl
from raglane.native.machine import cpu_name

SEQUENCES, STEPS, SIZE = 8, 10, 32


def medians(ways: dict[str, Callable[[], Any]], number: int, rounds: int = 40) -> dict[str, float]:
    """Return the microseconds of each call."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(100):
            way()
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(number):
                way()
            taken[name].append((time.perf_counter() - start) / number * 1e6)
    return {name: statistics.median(each) for name, each in taken.items()}


def infer(layer: Any, given: Any) -> Any:
    with torch.inference_mode():
        return layer(given)


def train(layer: Any, given: Any, weights: list[Tensor], gradient: Tensor) -> Any:
    """Compute outputs, and the gradients of the weights."""
    out = layer(given)[0]
    values = (
        out if isinstance(out, Tensor) else out.values if isinstance(out, rl.Ragged) else out.data
    )
    return torch.autograd.grad(values.reshape(gradient.shape), weights, gradient)


def batches() -> None:
    columns = "ours, us | prepacked, us | torch padded, us | torch packed, us | torch / ours | torch / prepacked"
    print(f"| layer | mode | {columns} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    sequences = [torch.randn(STEPS, SIZE) for _ in range(SEQUENCES)]
    given = {
        "ours": rl.Ragged(sequences),
        "prepacked": rl.Ragged(sequences),
        "padded": torch.stack(sequences, 1),
        "packed": torch.nn.utils.rnn.pack_sequence(sequences),
    }
    gradient = torch.randn(SEQUENCES * STEPS, SIZE)
    for name in ("LSTM", "GRU", "RNN"):
        theirs = getattr(torch.nn, name)(SIZE, SIZE)
        ours = getattr(rl.nn, name)(SIZE, SIZE)
        ours.load_state_dict(theirs.state_dict())
        layers = {
            "ours": ours,
            "prepacked": rl.pack_weights(copy.deepcopy(ours)),
            "padded": theirs,
            "packed": theirs,
        }
        weights = {way: list(layer.parameters()) for way, layer in layers.items()}
        modes: dict[str, dict[str, Callable[[], Any]]] = {
            "inference": {way: partial(infer, layers[way], given[way]) for way in given},
            "training": {
                way: partial(train, layers[way], given[way], weights[way], gradient)
                for way in given
            },
        }
        for mode, ways in modes.items():
            found = medians(ways, 50)
            best = min(found["padded"], found["packed"])
            times = " | ".join(f"{found[way]:.1f}" for way in given)
            print(
                f"| {name} | {mode} | {times} | {best / found['ours']:.2f} | {best / found['prepacked']:.2f} |"
            )


def steps() -> None:
    columns = "layer.step, us | prepacked, us | torch's cell, us | torch's layer, us | cell / ours | cell / prepacked"
    print(f"| layer | B | H | {columns} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in ("LSTM", "GRU", "RNN"):
        for count, size in ((1, 32), (1, 128), (1, 512), (8, 32), (8, 128), (64, 128)):
            theirs, cell = (
                getattr(torch.nn, name)(size, size),
                getattr(torch.nn, f"{name}Cell")(size, size),
            )
            ours = getattr(rl.nn, name)(size, size)
            ours.load_state_dict(theirs.state_dict())
            prepacked = rl.pack_weights(copy.deepcopy(ours))
            x_t, state = torch.randn(count, size), torch.zeros(1, count, size)
            hx: Any = (state, state) if name == "LSTM" else state
            flat: Any = (state[0], state[0]) if name == "LSTM" else state[0]
            with torch.inference_mode():
                found = medians(
                    {
                        "ours": partial(ours.step, x_t, hx),
                        "prepacked": partial(prepacked.step, x_t, hx),
                        "cell": partial(cell, x_t, flat),
                        "layer": partial(theirs, x_t.unsqueeze(0), hx),
                    },
                    50,
                )
            times = " | ".join(f"{each:.1f}" for each in found.values())
            ratios = (
                f"{found['cell'] / found['ours']:.2f} | {found['cell'] / found['prepacked']:.2f}"
            )
            print(f"| {name} | {count} | {size} | {times} | {ratios} |")


def sliced(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``r[:, 1:]`` by hand."""
    lengths = (offsets.diff() - 1).clamp(min=0)
    ends = torch.cat([offsets[:1], lengths.cumsum(0)])
    shifts = torch.repeat_interleave(offsets[:-1] + 1 - ends[:-1], lengths)
    return values.index_select(0, torch.arange(int(ends[-1])) + shifts), ends


def mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Return ``r.mean(1)`` by hand."""
    lengths = offsets.diff()
    zeros = values.new_zeros(lengths.shape[0], values.shape[1])
    return zeros.index_add_(0, torch.repeat_interleave(lengths), values) / lengths[:, None]


def operations() -> None:
    """Print the cost of torch's functions of a Ragged; the limits are ratio * by hand + us."""
    r = rl.Ragged([torch.randn(20, SIZE) for _ in range(32)])
    s, tags = r.with_values(torch.randn_like(r.values)), r.with_values(torch.randint(SIZE, (640,)))
    values, offsets = r.values, r.offsets
    loss: Any = torch.nn.functional.cross_entropy
    rows: dict[str, tuple[Callable[[], Any], Callable[[], Any], float, float]] = {
        "`torch.relu(r)`": (lambda: torch.relu(r), lambda: torch.relu(values), 1.5, 6),
        "`r + s`": (lambda: r + s, lambda: values + s.values, 1.5, 6),
        "`F.cross_entropy(r, tags)`": (
            lambda: loss(r, tags),
            lambda: loss(values, tags.values),
            1.5,
            12,
        ),
        "`r[:, 1:]`": (lambda: r[:, 1:], lambda: sliced(values, offsets), 1.3, 8),
        "`r.mean(dim=1)`": (lambda: r.mean(dim=1), lambda: mean(values, offsets), 1.3, 8),
    }
    print("| operation | ours, us | by hand, us | limit, us |\n| --- | --- | --- | --- |")
    for name, (ours, by_hand, ratio, more) in rows.items():
        found = medians({"ours": ours, "hand": by_hand}, 50)
        limit = ratio * found["hand"] + more
        print(f"| {name} | {found['ours']:.1f} | {found['hand']:.1f} | {limit:.1f} |")


if __name__ == "__main__":
    torch.manual_seed(0)
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"# Small calls\n\n`python benchmarks/small_calls.py`: {machine}.\n")
    print(f"{SEQUENCES} sequences of {STEPS} elements, H and D of {SIZE}, float32:\n")
    batches()
    print("\nOne step of B streams, inference:\n")
    steps()
    print("\nOperations of 32 sequences of 20 elements of 32 features:\n")
    operations()
