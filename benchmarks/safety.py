"""The cost of safety: validating every tensor before its address goes to C, and denormals in the
backward pass.

    python benchmarks/safety.py > benchmarks/results/safety.md

The first table times :meth:`Layer.admit` on valid tensors, and the whole call that contains it. The
second times the backward pass over 1,000 steps from a gradient at the last step only, where
gradients decay until they are denormal, and compares it with gradients at every step, and with
``torch.set_flush_denormal``.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import raglane as rl
from raglane.kernels.cpu.layer import layer_of
from raglane.native.machine import cpu_name

STEPS, SEQUENCES, FEATURES = 1000, 16, 64


def microseconds(function: Callable[[], Any], number: int) -> float:
    """The median of 15 repetitions: what others do on the machine only ever adds."""
    return statistics.median(timeit.repeat(function, number=number, repeat=15)) / number * 1e6


def checks() -> None:
    print(
        "| layer | directions | checked, us per direction | forward without gradients, us |\n| --- | --- | --- | --- |"
    )
    batch = rl.Ragged([torch.randn(10, 32) for _ in range(8)])
    for name in ("LSTM", "GRU", "RNN", "MinGRU", "SRU"):
        for directions in (1, 2):
            module = getattr(rl.nn, name)(32, 32, bidirectional=directions == 2, backend="cpu")
            weights = [part for of_direction in module._weights() for part in of_direction]
            tensors, sizes = (batch.values, *weights), module.state_sizes
            layer = layer_of(
                module.cell.name, batch.offsets, tensors, len(weights), sizes, directions
            )
            check = partial(layer.admit, batch.offsets, tensors)
            checked = microseconds(check, 20_000) / directions
            with torch.no_grad():
                whole = microseconds(partial(module, batch), 1000)
            print(f"| {name} | {directions} | {checked:.2f} | {whole:.1f} |")


def slow_to_forget(layer: Any, hidden_size: int) -> None:
    """Set small weights, and gates that keep nine tenths of the state per step."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.3)
        if layer.cell.name == "mingru":
            layer.bias_ih_l0[:hidden_size] = -2
        else:
            layer.bias_ih_l0[hidden_size : 2 * hidden_size] = 2


def denormal_share(values: torch.Tensor) -> float:
    size = values.abs()
    return float(((size > 0) & (size < torch.finfo(values.dtype).tiny)).float().mean())


def denormals() -> None:
    print(
        "| layer | H | denormal | at the last step only / at every step | the same, denormals as 0 |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name in ("LSTM", "GRU", "MinGRU", "QRNN"):
        for hidden_size in (64, 256):
            layer = getattr(rl.nn, name)(FEATURES, hidden_size, backend="cpu")
            slow_to_forget(layer, hidden_size)
            values = torch.randn(SEQUENCES * STEPS, FEATURES, requires_grad=True)
            batch = rl.Ragged.from_flat(values, lengths=[STEPS] * SEQUENCES)
            seconds: dict[str, list[float]] = {"every": [], "last": [], "flushed": []}
            share = 0.0
            for _ in range(9):
                for kind, taken in seconds.items():
                    out, _ = layer(batch)
                    loss = (out.values if kind == "every" else out.last()).mul(1e-3).sum()
                    values.grad = None
                    torch.set_flush_denormal(kind == "flushed")
                    start = time.perf_counter()
                    loss.backward()
                    taken.append(time.perf_counter() - start)
                    torch.set_flush_denormal(False)
                    found: torch.Tensor | None = values.grad
                    if kind == "last" and found is not None:
                        share = denormal_share(found)
            every, last, flushed = (statistics.median(taken) for taken in seconds.values())
            print(
                f"| {name} | {hidden_size} | {share:.2f} | {last / every:.2f} | {flushed / every:.2f} |"
            )


def main() -> None:
    print("# Safety checks\n")
    print(
        f"`python benchmarks/safety.py`: {cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}.\n"
    )
    checks()
    print(f"\n{SEQUENCES} sequences of {STEPS} steps, float32, only the backward pass:\n")
    denormals()


if __name__ == "__main__":
    main()
