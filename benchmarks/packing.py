"""The packing functions against torch.nn.utils.rnn: time forward and backward, on a CPU.

    python benchmarks/packing.py [--threads 1 2] [--rounds 15] [--only pack_sequence]

The results of every case are compared before it is timed. In each round both functions run, in
alternating order. The table has the median over rounds, and the median of the ratios of rounds,
which a busy machine disturbs least. Below 1 Raglane is faster.

"forward" is without gradients, "recording" is forward with them, "backward" is only the backward
pass.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import rnn

from raglane import packing

RESULTS = Path(__file__).parent / "results"
FLOATS = [(8, 30, 16), (32, 100, 128), (64, 200, 256), (256, 400, 64)]
TOKENS = [(32, 100), (256, 400)]
PASSES = ("forward", "recording", "backward")


@dataclass(frozen=True)
class Task:
    """A function on a batch, given the module that contains it, and True if inputs require
    gradients.
    """

    function: str
    batch_first: bool | None
    prepare: Callable[[Any, bool], tuple[Callable[[], Any], list[Tensor]]]


def random_lengths(count: int, longest: int) -> Tensor:
    """Return lognormal lengths with the longest included, none 0, which torch does not accept."""
    drawn = np.random.default_rng(count).lognormal(np.log(longest * 0.4), 0.6, count)
    lengths = drawn.astype(np.int64).clip(1, longest)
    lengths[0] = longest
    return torch.from_numpy(np.random.default_rng(1).permutation(lengths))


@dataclass(frozen=True)
class Inputs:
    """The inputs of the functions: random values of some lengths."""

    lengths: Tensor
    features: tuple[int, ...]
    dtype: torch.dtype

    @property
    def orders(self) -> Iterator[tuple[str, bool, Tensor]]:
        """Return the lengths sorted, longest first, and unsorted; by name, with True if sorted."""
        yield "sorted", True, self.lengths.sort(descending=True, stable=True).values
        yield "unsorted", False, self.lengths

    def make(self, *shape: int, grad: bool) -> Tensor:
        values = torch.randn(*shape, *self.features)
        return values.requires_grad_() if grad else (values * 100).to(self.dtype)

    def sequences(self, given: Tensor, grad: bool) -> list[Tensor]:
        return [self.make(length, grad=grad) for length in given.tolist()]


def tasks(lengths: Tensor, features: tuple[int, ...], dtype: torch.dtype) -> Iterator[Task]:
    """Return every function with every kind of argument that changes its work."""
    inputs = Inputs(lengths, features, dtype)
    for first in (False, True):
        yield from padded_tasks(inputs, first)
    yield from list_tasks(inputs)

    def invert(module: Any, grad: bool) -> Any:  # noqa: ARG001
        order = lengths.argsort()
        return lambda: module.invert_permutation(order), []

    if dtype is torch.int64:
        yield Task("invert_permutation", None, invert)


def padded_tasks(inputs: Inputs, first: bool) -> Iterator[Task]:
    """Return the functions with padded tensors, batch first or time first."""
    lengths, (count, steps) = inputs.lengths, (len(inputs.lengths), int(inputs.lengths.max()))
    shape = (count, steps) if first else (steps, count)

    def pad(module: Any, grad: bool) -> Any:
        given = inputs.sequences(lengths, grad)
        return lambda: module.pad_sequence(given, first), given

    def unpad(module: Any, grad: bool) -> Any:
        padded = inputs.make(*shape, grad=grad).clone()
        # torch transposes a time-first argument in place, so each call gets a new view.
        return lambda: module.unpad_sequence(padded.view(padded.shape), lengths, first), [padded]

    def pack(given: Tensor, is_sorted: bool, module: Any, grad: bool) -> Any:
        padded = inputs.make(*shape, grad=grad)
        return lambda: module.pack_padded_sequence(padded, given, first, is_sorted), [padded]

    def pad_packed(given: Tensor, is_sorted: bool, module: Any, grad: bool) -> Any:
        packed = rnn.pack_sequence(inputs.sequences(given, False), is_sorted)
        data = packed.data.clone().requires_grad_(grad)
        packed = packed._replace(data=data)
        return lambda: module.pad_packed_sequence(packed, first), [data]

    yield Task("pad_sequence", first, pad)
    yield Task("unpad_sequence", first, unpad)
    for name, is_sorted, given in inputs.orders:
        yield Task(f"pack_padded_sequence, {name}", first, partial(pack, given, is_sorted))
        yield Task(f"pad_packed_sequence, {name}", first, partial(pad_packed, given, is_sorted))


def list_tasks(inputs: Inputs) -> Iterator[Task]:
    """Return the functions between lists of sequences and packs."""

    def pack_list(given: Tensor, is_sorted: bool, module: Any, grad: bool) -> Any:
        sequences = inputs.sequences(given, grad)
        return lambda: module.pack_sequence(sequences, is_sorted), sequences

    def unpack(given: Tensor, is_sorted: bool, module: Any, grad: bool) -> Any:
        packed = rnn.pack_sequence(inputs.sequences(given, False), is_sorted)
        data = packed.data.clone().requires_grad_(grad)
        packed = packed._replace(data=data)
        return lambda: module.unpack_sequence(packed), [data]

    for name, is_sorted, given in inputs.orders:
        yield Task(f"pack_sequence, {name}", None, partial(pack_list, given, is_sorted))
        yield Task(f"unpack_sequence, {name}", None, partial(unpack, given, is_sorted))


def outputs_of(result: Any) -> list[Tensor]:
    if isinstance(result, rnn.PackedSequence):
        return [result.data]
    if isinstance(result, list):
        return result
    return [result[0] if isinstance(result, tuple) else result]


def comparable(result: Any) -> list[Tensor]:
    """Return the tensors to compare; packs are unpacked, because torch orders ties in another
    way.
    """
    if isinstance(result, rnn.PackedSequence):
        result = rnn.pad_packed_sequence(result)
    return [
        output.detach() for output in (result if isinstance(result, (list, tuple)) else [result])
    ]


def runners(task: Task, which: str) -> list[Callable[[], Any]]:
    """Return our call and torch's on the same numbers, after comparing their results."""
    found: list[Callable[[], Any]] = []
    results: list[list[Tensor]] = []
    for module in (packing, rnn):
        torch.manual_seed(0)
        run, inputs = task.prepare(module, which != "forward")
        result = run()
        if which != "backward":
            found.append(run)
            results.append(comparable(result))
            continue
        outputs = outputs_of(result)
        # The outputs are their own gradients, so those of the inputs do not depend on the order of
        # ties.
        grads = [output.detach().clone() for output in outputs]
        found.append(partial(torch.autograd.grad, outputs, inputs, grads, retain_graph=True))
        results.append(list(found[-1]()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    return found


def measure(pair: list[Callable[[], Any]], rounds: int) -> tuple[float, float, float]:
    """Return the median microseconds of ours and of torch's, and the median ratio of ours to
    torch's.
    """

    def clock(run: Callable[[], Any], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats * 1e6

    single = [clock(run, 1) for run in pair]
    if max(single) > 1e6:  # over a second: more rounds would change nothing
        return single[0], single[1], single[0] / single[1]
    repeats = [max(1, min(200, int(2000 / max(time_of_one, 1)))) for time_of_one in single]
    longest = max(clock(run, count) * count for run, count in zip(pair, repeats, strict=True))
    rounds = max(3, min(rounds, int(2e6 / longest)))
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(clock(pair[side], repeats[side]))
    ratio = statistics.median(ours / theirs for ours, theirs in zip(*times, strict=True))
    return statistics.median(times[0]), statistics.median(times[1]), ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="functions whose name contains this")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5], help="numbers of the cases"
    )
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    batches = [((b, t, f), (f,), torch.float32) for b, t, f in FLOATS]
    batches += [((b, t), (), torch.int64) for b, t in TOKENS]  # type: ignore[misc]
    header = ["function", "batch_first", "batch", "threads"]
    header += [f"{which} {what}" for which in PASSES for what in ("ours us", "torch us", "ratio")]
    rows: list[list[str]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for number in arguments.sizes:
            sizes, features, dtype = batches[number]
            lengths = random_lengths(sizes[0], sizes[1])
            for task in tasks(lengths, features, dtype):
                if arguments.only not in task.function:
                    continue
                row = [
                    task.function,
                    str(task.batch_first),
                    " x ".join(map(str, sizes)),
                    str(threads),
                ]
                for which in PASSES:
                    if which != "forward" and not dtype.is_floating_point:
                        row += ["", "", ""]
                        continue
                    ours, theirs, ratio = measure(runners(task, which), arguments.rounds)
                    row += [f"{ours:.1f}", f"{theirs:.1f}", f"{ratio:.2f}"]
                rows.append(row)
                print("  ".join(row), flush=True)
    table = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    summary = []
    for place, which in enumerate(PASSES):
        ratios = [float(row[6 + 3 * place]) for row in rows if row[6 + 3 * place]]
        if ratios:
            summary.append(
                f"{which}: {len(ratios)} cases, median ratio {statistics.median(ratios):.2f}, "
            )
            summary[-1] += f"worst {max(ratios):.2f}"
    text = "\n".join(
        [
            "# Packing functions",
            "",
            f"torch {torch.__version__}, CPU. Ratio: Raglane's time over torch's.",
            "",
            *summary,
            "",
            *table,
            "",
        ]
    )
    print("\n" + text)
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "packing.md").write_text(text)
        with (RESULTS / "packing.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])


if __name__ == "__main__":
    main()
