"""The cost of training in two processes: bytes of gradients, sums over both, and the schedule of a
step.

    python benchmarks/ranks.py > benchmarks/results/ranks.md     # about two minutes; requires two
    idle processors

Both processes run on this machine and use gloo. A step is that of a layer with a head, on a batch
of 32 sequences per process, with one thread each. *without* is the step without sums, *during* the
step with sums during the backward pass, and *after* the step with all sums after it; *hidden* is
the share of their time that overlaps the backward pass.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import raglane as rl
from raglane.native.machine import cpu_name

_SIZES = (128, 256, 512, 1024)
_NUMBERS = (1, 1_000, 100_000, 1_000_000, 10_000_000)
_ROUNDS, _SECONDS = 7, 6.0


class Network(nn.Module):
    """A layer of 64 channels and a head of ten classes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layer = rl.nn.LSTM(64, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, batch: rl.Ragged) -> Tensor:
        """Return a loss."""
        out: Any = self.layer(batch)[0]
        loss: Tensor = self.head(out.last()).square().sum()
        return loss


def _median(action: Callable[[], Any], seconds: float = _SECONDS) -> float:
    """Return the median seconds of an action over the rounds that fit into the time, equal in both
    processes.
    """
    times: list[float] = []
    end = torch.zeros(1)
    start = time.perf_counter()
    while not end or len(times) < _ROUNDS:
        distributed.barrier()
        before = time.perf_counter()
        action()
        times.append(time.perf_counter() - before)
        end.fill_(time.perf_counter() - start > seconds)
        distributed.all_reduce(end)
    return statistics.median(times[1:])


def _measure(rank: int, port: int, pipe: Connection) -> None:
    """Run one process; the first one prints."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5)
    )
    found: dict[str, list[Any]] = {"sums": [], "steps": []}
    for count in _NUMBERS:
        numbers = torch.zeros(count)

        def total(numbers: Tensor = numbers) -> None:
            distributed.all_reduce(numbers)

        found["sums"].append((count, _median(total, 2.0)))
    for hidden in _SIZES:
        found["steps"].append(_step(hidden))
    pipe.send(found)


def _step(hidden: int) -> tuple[Any, ...]:
    """Measure a step of one size: its gradients, and the seconds of its parts."""
    lengths = torch.randint(20, 200, (32,))
    batch = rl.Ragged.from_flat(torch.randn(int(lengths.sum()), 64), lengths=lengths)
    plain = Network(hidden)
    optimizer = torch.optim.Adam(plain.parameters())
    gradients = [torch.zeros_like(weight) for weight in plain.parameters()]
    bytes_of = sum(gradient.numel() * gradient.element_size() for gradient in gradients)

    def without() -> None:
        plain.zero_grad()
        plain(batch).backward()

    def after() -> None:
        without()
        for weight in plain.parameters():
            distributed.all_reduce(weight.grad)

    shared = DistributedDataParallel(
        Network(hidden), find_unused_parameters=True, broadcast_buffers=False
    )

    def during() -> None:
        shared.zero_grad()
        shared(batch).backward()

    forward = _median(lambda: plain(batch), 2.0)
    times = [_median(action) for action in (without, during, after)]
    without()
    return hidden, bytes_of, int(lengths.sum()), forward, *times, _median(optimizer.step, 1.0)


def main() -> None:
    """Measure and print."""
    context = get_context("spawn")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipes, processes = [], []
    for rank in range(2):
        mine, its = context.Pipe()
        processes.append(context.Process(target=_measure, args=(rank, store.port, its)))
        processes[-1].start()
        its.close()
        pipes.append(mine)
    found = pipes[0].recv()
    for process in processes:
        process.join()
    print("# Two processes that train together\n")
    print(f"`python benchmarks/ranks.py`: {cpu_name()}, torch {torch.__version__}.")
    print(
        "\n## Sums over both\n\n| float32 numbers | time, ms | MB per second |\n| --- | --- | --- |"
    )
    for count, seconds in found["sums"]:
        print(f"| {count:,} | {1e3 * seconds:.2f} | {4e-6 * count / seconds:,.0f} |")
    print(
        "\n## A step of an LSTM, 32 sequences of 20 to 199 elements of 64 channels per process, in ms\n"
    )
    columns = [
        "H",
        "gradients, MB",
        "elements/s",
        "forward",
        "backward",
        "optimizer",
        "without",
        "during",
        "after",
        "hidden",
    ]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for hidden, size, elements, forward, without, during, after, optimizer in found["steps"]:
        # On a busy machine the measured time of the sums may be 0.
        hides = (
            "-"
            if after <= without
            else f"{min(max(1 - (during - without) / (after - without), 0), 1):.0%}"
        )
        times = [forward, without - forward, optimizer, without, during, after]
        numbers = " | ".join(f"{1e3 * number:.1f}" for number in times)
        print(
            f"| {hidden} | {size / 1e6:.2f} | {elements / (without + optimizer):,.0f} | {numbers} | {hides} |"
        )


if __name__ == "__main__":
    sys.exit(main())
