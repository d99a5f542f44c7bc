"""The library's own threads against OpenMP's: layers alone, and between products of torch on its
OpenMP threads.

    python benchmarks/threads.py >> benchmarks/results/threads.md

Each pool has a process of its own, because it is chosen once. They take turns, call by call, and
each figure is a ratio of medians: below 1 the library's own threads are faster. With
``--wait-policy PASSIVE``, OpenMP's threads do not poll.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

import raglane as rl
from raglane.native.machine import cpu_name

POOLS = ("", "own")
CASES = [
    (cell, *shape)
    for cell in ("LSTM", "GRU", "SRU")
    for shape in ((8, 32, 32), (32, 128, 128), (64, 256, 256))
]
CASES += [("LSTM", 1, 512, 512)]
WAYS = ("inference", "training", "inference between products", "training between products")


def call_of(case: tuple[str, int, int, int], way: str) -> Callable[[], Any]:
    cell, batch, hidden, features = case
    torch.manual_seed(0)
    layer = getattr(rl.nn, cell)(features, hidden, backend="cpu")
    lengths = torch.distributions.LogNormal(3.5, 0.6).sample((batch,)).clamp(1, 200).long()
    sequences = rl.Ragged.from_flat(torch.randn(int(lengths.sum()), features), lengths=lengths)
    left, right = torch.randn(256, 512), torch.randn(512, 512)

    def call() -> None:
        if "training" in way:
            layer(sequences)[0].values.sum().backward()
        else:
            with torch.inference_mode():
                layer(sequences)
        if "between" in way:
            for _ in range(4):
                left @ right

    return call


def serve(pipe: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    call: Callable[[], Any] = partial(int)
    while message := pipe.recv():
        if not isinstance(message, int):
            call, message = call_of(*message), 3
        start = time.perf_counter()
        for _ in range(message):
            call()
        pipe.send((time.perf_counter() - start) / message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", type=int, default=2, help="of torch and the layers (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=30, help="of each case (default: 30)")
    parser.add_argument("--wait-policy", help="OMP_WAIT_POLICY of both processes")
    options = parser.parse_args()
    if options.wait_policy:
        os.environ["OMP_WAIT_POLICY"] = options.wait_policy
    pipes = []
    for pool in POOLS:
        os.environ["RAGLANE_THREADS"] = pool
        ours, theirs = get_context("spawn").Pipe()
        get_context("spawn").Process(
            target=serve, args=(theirs, options.threads), daemon=True
        ).start()
        pipes.append(ours)

    def ask(pipe: Any, message: Any) -> float:
        # OpenMP's threads of the other process poll for some milliseconds.
        time.sleep(0.02)
        pipe.send(message)
        return float(pipe.recv())

    policy = f", OMP_WAIT_POLICY={options.wait_policy}" if options.wait_policy else ""
    print(f"\n{cpu_name()}, torch {torch.__version__}, {options.threads} threads{policy}\n")
    print(
        f"| layer (B, H, D) | {' | '.join(f'{way}: OpenMP, us | own / OpenMP' for way in WAYS)} |"
    )
    print(f"| --- |{' --- |' * 2 * len(WAYS)}")
    for case in CASES:
        cells = []
        for way in WAYS:
            first = max(ask(pipe, (case, way)) for pipe in pipes)
            number = max(1, int(0.02 / first))
            taken = [[ask(pipe, number) for pipe in pipes] for _ in range(options.rounds)]
            openmp, own = (statistics.median(each) for each in zip(*taken, strict=True))
            cells.append(f"{1e6 * openmp:.0f} | {own / openmp:.2f}")
        print(f"| {case[0]} ({', '.join(map(str, case[1:]))}) | {' | '.join(cells)} |", flush=True)
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
