"""Time and peak memory of a training step with ``checkpoint_every``, relative to one without.

    python benchmarks/checkpoints.py --threads 2 > benchmarks/results/checkpoints.md

Both layers take turns, round by round, in one process. A ratio is the median over rounds. The peak
is the memory of a step without inputs and parameters, measured in a separate process, in numbers
per element and hidden unit (N * H). ``--parts`` is the number of parts in which the longest
sequence is computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from harness.lengths import LENGTHS
from harness.memory import peak_of

import raglane as rl
from raglane.native.machine import cpu_name

SIZES = ((32, 128, 128), (64, 256, 256), (32, 512, 512))


def step_of(
    cell: str, size: tuple[int, int, int], lengths: list[int], every: int | None
) -> Callable[[], Any]:
    """Return a training step: outputs, and the gradients of the values and all weights."""
    torch.manual_seed(0)
    _, hidden, width = size
    layer = getattr(rl.nn, cell)(width, hidden, checkpoint_every=every)
    values = torch.randn(sum(lengths), width, requires_grad=True)
    given = rl.Ragged.from_flat(values, lengths=lengths)
    slope = torch.randn(sum(lengths), hidden)
    wanted = [values, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(given)[0].values, wanted, slope)


def taken(step: Callable[[], Any], seconds: float) -> float:
    """Return the median time of the steps that fit into the time."""
    times, begun = [], time.perf_counter()
    while not times or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak(arguments: str) -> float:
    """Return the peak memory of a step in N * H floats; called in a separate process."""
    cell, size, lengths, every, threads = json.loads(arguments)
    torch.set_num_threads(threads)
    step_of(cell, size, [3, 2], every)()
    return peak_of(step_of(cell, size, lengths, every)) / (4 * sum(lengths) * size[1])


def measured(*case: Any) -> float:
    command = [sys.executable, __file__, "--peak", json.dumps(case)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--parts", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--cells", nargs="+", default=["LSTM", "GRU"])
    parser.add_argument("--lengths", nargs="+", default=["lognormal", "equal"])
    parser.add_argument("--no-peaks", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(peak(given.peak))
        return
    torch.set_num_threads(given.threads)
    print("# Recomputed gates\n")
    where = f"{cpu_name()}, {given.threads} threads, torch {torch.__version__}"
    print(f"`python benchmarks/checkpoints.py --threads {given.threads}`: {where}.\n")
    print(
        "| cell | B, H, D | lengths | N | steps | time over that without | peak, N * H | without |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for cell in given.cells:
        for size in SIZES:
            for name in given.lengths:
                lengths = LENGTHS[name].draw(size[0])
                for parts in given.parts:
                    row(given, cell, size, name, lengths, math.ceil(max(lengths) / parts))


def row(
    given: Any, cell: str, size: tuple[int, int, int], name: str, lengths: list[int], every: int
) -> None:
    steps = [step_of(cell, size, lengths, chosen) for chosen in (None, every)]
    for step in steps:
        step()
    ratios = []
    for _ in range(given.rounds):
        plain, again = [taken(step, given.seconds) for step in steps]
        ratios.append(again / plain)
    peaks = ["", ""]
    if not given.no_peaks:
        peaks = [
            f"{measured(cell, size, lengths, chosen, given.threads):.2f}"
            for chosen in (every, None)
        ]
    ratio = statistics.median(ratios)
    sizes = ", ".join(map(str, size))
    print(
        f"| {cell} | {sizes} | {name} | {sum(lengths)} | {every} | {ratio:.2f} | {' | '.join(peaks)} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
