"""The time of small calls: small batches, and one step of a stream.

    python benchmarks/small_calls.py > benchmarks/results/small-calls.md

The first table has 8 sequences of 10 elements, 32 features and 32 units: our layer on a Ragged
against the fastest of torch's layer on a padded tensor and on a pack. The second has ``layer.step``
for ``B`` streams against torch's cell and against torch's layer on one step. The weights of
prepacked layers were packed before, by ``rl.pack_weights``. The third has operations of 32
sequences of 20, against torch on their values, or the shortest code by hand on values and offsets.
One sequence is compared with torch's layer and with ONNX Runtime (``pip install onnx onnxruntime``),
whose session keeps its weights packed. All calls take turns, and each figure is a median.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness.batch import Batch
from harness.cases import Case, Size
from harness.competitors import onnx_engines
from harness.lengths import Lengths
from torch import Tensor

import raglane as rl
from raglane.native.machine import cpu_name

SEQUENCES, STEPS, SIZE = 8, 10, 32
STREAMS = ((1, 32), (1, 128), (1, 256), (1, 512), (8, 32), (8, 128), (8, 256), (8, 512), (64, 128))
CELLS_OF = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}


def medians(
    ways: dict[str, Callable[[], Any]], number: int, rounds: int = 40, warm: int = 100
) -> dict[str, float]:
    """Return the microseconds of each call."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(warm):
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
        for count, size in STREAMS:
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
                    50 if size < 256 else 5,
                )
            times = " | ".join(f"{each:.1f}" for each in found.values())
            ratios = (
                f"{found['cell'] / found['ours']:.2f} | {found['cell'] / found['prepacked']:.2f}"
            )
            print(f"| {name} | {count} | {size} | {times} | {ratios} |")


def one_sequence() -> None:
    """Print the times of one sequence, of a layer with and without packed weights."""
    ways = "dense | Ragged | packed weights, dense | packed weights, Ragged | torch | ONNX Runtime"
    ratios = ("ONNX / packed weights", "ONNX / ours", "torch / packed weights", "torch / ours")
    print(f"| layer | T | H | {ways} | {' | '.join(ratios)} |\n|{' --- |' * 13}")
    worst: dict[str, list[float]] = {ratio: [] for ratio in ratios}
    for name, size, steps in itertools.product(CELLS_OF, (32, 64, 128, 256, 512), (10, 50)):
        found = times_of_one(name, size, steps)
        ours = max(found["dense"], found["Ragged"])
        frozen = max(found["frozen dense"], found["frozen Ragged"])
        row = (found["onnx"] / frozen, found["onnx"] / ours)
        row += (found["torch"] / frozen, found["torch"] / ours)
        for ratio, figure in zip(ratios, row, strict=True):
            worst[ratio].append(figure)
        times = " | ".join(f"{each:.1f}" for each in found.values())
        print(
            f"| {name} | {steps} | {size} | {times} | {' | '.join(f'{each:.2f}' for each in row)} |",
            flush=True,
        )
    print(f"\n| | {' | '.join(ratios)} |\n|{' --- |' * 5}")
    print(f"| worst | {' | '.join(f'{min(each):.2f}' for each in worst.values())} |")
    means = (f"{statistics.geometric_mean(each):.2f}" for each in worst.values())
    print(f"| geometric mean | {' | '.join(means)} |")


def times_of_one(name: str, size: int, steps: int) -> dict[str, float]:
    """Return the microseconds of inference of one sequence, after all outputs were compared."""
    lengths = Lengths("one", f"one sequence of {steps} steps", lambda count: [steps] * count)
    size_of = Size(1, size, size)
    batch = Batch.of(Case("one", CELLS_OF[name], size_of, lengths, "infer", "float32", 1))
    theirs, ours = getattr(torch.nn, name)(size, size), getattr(rl.nn, name)(size, size)
    for layer in (theirs, ours):
        layer.load_state_dict(batch.weights)
    frozen = rl.pack_weights(copy.deepcopy(ours))
    dense, ragged = batch.values[:, None], rl.Ragged([batch.values])
    session = onnx_engines.session_of(onnx_engines.model_of(batch), 1)
    given = {"x": dense.numpy(), "lengths": batch.lengths.numpy().astype("int32")}
    run, outputs = onnx_engines.bound(session, given)
    layers = {
        "dense": partial(infer, ours, dense),
        "Ragged": partial(infer, ours, ragged),
        "frozen dense": partial(infer, frozen, dense),
        "frozen Ragged": partial(infer, frozen, ragged),
        "torch": partial(infer, theirs, dense),
    }
    for call in layers.values():
        out = call()[0]
        values = out.values if isinstance(out, rl.Ragged) else out[:, 0]
        torch.testing.assert_close(values, torch.from_numpy(outputs()[0])[:, 0, 0])
    number = 1 + 60_000 // (size * steps)
    return medians({**layers, "onnx": run}, number, 15, number)


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
    print("\nOne sequence of T elements, H and D equal, inference, us:\n")
    one_sequence()
    print("\nOperations of 32 sequences of 20 elements of 32 features:\n")
    operations()
