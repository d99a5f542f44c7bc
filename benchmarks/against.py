"""Compare the speed of training steps and inference of this checkout with another one, in one run.

    python benchmarks/against.py ../other/.venv/bin/python > benchmarks/results/against.md
    python benchmarks/against.py ../other/.venv/bin/python librispeech,trec train --without-torch

The argument is the Python of another environment in which the other checkout is installed. Each
checkout runs in its own process, with the same layers and batches. They take turns, case by case
and round by round, because the speed of the machine varies. A figure is the median of the rounds'
ratios. PyTorch on padded tensors and packs takes turns too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

CELLS = ("LSTM", "GRU", "RNN")
SIZES = ((8, 64, 64), (32, 128, 128), (64, 256, 256), (32, 512, 512), (256, 128, 64))
LENGTHS = ("equal", "lognormal", "ewt", "vowels")
ROUNDS, SECONDS = 9, 0.06


def worker() -> None:
    """Read a case per line, and time it; a new case is called once before to warm up."""
    import raglane as rl

    calls: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        cell, hidden, width, lengths, mode, way = json.loads(line)
        key = line.strip()
        if key not in calls:
            calls.clear()
            torch.manual_seed(0)
            calls[key] = call_of(rl, cell, hidden, width, lengths, mode, way)
            calls[key]()
        call, taken = calls[key], []
        begun = time.perf_counter()
        while not taken or time.perf_counter() - begun < SECONDS:
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        print(statistics.median(taken), flush=True)


def call_of(
    rl: Any, cell: str, hidden: int, width: int, lengths: list[int], mode: str, way: str
) -> Callable[[], Any]:
    sequences = [torch.randn(length, width) for length in lengths]
    layer = getattr(rl.nn if way == "ours" else torch.nn, cell)(width, hidden)
    if way == "ours":
        given: Any = rl.Ragged(sequences)
    elif way == "padded":
        given = torch.nn.utils.rnn.pad_sequence(sequences)
    else:
        given = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)

    def infer() -> Any:
        with torch.inference_mode():
            return layer(given)

    if mode == "infer":
        return infer
    values = (
        (given.values if way == "ours" else given if way == "padded" else given.data)
        .detach()
        .requires_grad_()
    )
    # Earlier versions have no with_values.
    wanted = (
        rl.Ragged.from_flat(values, lengths=lengths)
        if way == "ours"
        else values
        if way == "padded"
        else given._replace(data=values)
    )
    weights = list(layer.parameters())
    slope: list[torch.Tensor] = []

    def train() -> Any:
        out = layer(wanted)[0]
        found = out.values if way == "ours" else out if way == "padded" else out.data
        if not slope:
            slope.append(torch.randn_like(found))
        return torch.autograd.grad(found, [values, *weights], slope[0])

    return train


def start(python: str) -> Any:
    return subprocess.Popen(
        [python, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(process: Any, case: list[Any]) -> float:
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def rounds_of(
    processes: Sequence[Any], cases: Sequence[list[Any]], rounds: int
) -> list[list[float]]:
    """Return the seconds of each case in its process, round by round."""
    return [
        [ask(process, case) for process, case in zip(processes, cases, strict=True)]
        for _ in range(rounds)
    ]


def ratios(found: list[list[float]]) -> list[float]:
    """Return the times of the others relative to the first, the medians over rounds."""
    ours, *others = zip(*found, strict=True)
    return [
        statistics.median(theirs / mine for mine, theirs in zip(ours, one, strict=True))
        for one in others
    ]


def main() -> None:
    from harness.lengths import LENGTHS as KNOWN

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", metavar="PYTHON")
    parser.add_argument("lengths", nargs="?", type=_split, default=LENGTHS, metavar="NAME,...")
    parser.add_argument(
        "modes", nargs="?", type=_split, default=("train", "infer"), metavar="MODE,..."
    )
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="BxHxD,...")
    parser.add_argument(
        "--without-torch", action="store_true", help="compare only the two checkouts"
    )
    chosen = parser.parse_args()
    new, old = start(sys.executable), start(chosen.other)
    torchs = None if chosen.without_torch else start(sys.executable)
    heads = ["cell", "lengths", "B, H, D", "mode", "other / this"]
    heads += [] if torchs is None else ["torch padded / this", "torch packed / this"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    gains: dict[str, list[float]] = {}
    for mode, name, cell, size in product(chosen.modes, chosen.lengths, CELLS, chosen.sizes):
        case = [cell, size[1], size[2], KNOWN[name].draw(size[0]), mode]
        ours, padded, packed = [[*case, way] for way in ("ours", "padded", "packed")]
        if torchs is None:
            found = ratios(rounds_of((new, old), (ours, ours), ROUNDS))
        else:
            found = ratios(rounds_of((new, old, torchs), (ours, ours, padded), ROUNDS))
            found += ratios(rounds_of((new, torchs), (ours, packed), 2))
        gains.setdefault(f"{mode}, {name}", []).append(found[0])
        words = [cell, name, ", ".join(map(str, size)), mode, *(f"{ratio:.2f}" for ratio in found)]
        print(f"| {' | '.join(words)} |", flush=True)
    print("\n| mode, lengths | other / this, geometric mean | smallest |")
    print("| --- | --- | --- |")
    for name, found in gains.items():
        print(f"| {name} | {statistics.geometric_mean(found):.2f} | {min(found):.2f} |")
    for process in filter(None, (new, old, torchs)):
        process.stdin.close()
        process.wait()


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _sizes(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, size.split("x"))) for size in text.split(",")]


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        main()
