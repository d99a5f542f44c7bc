"""Inference with int8 weights (``rl.quantize(layer)``) against float32 weights,
both packed beforehand.

    python benchmarks/int8.py > benchmarks/results/int8.md
    python benchmarks/int8.py runs/vowels runs/names runs/tags

With runs, which must record their test data: the score and time of each in both dtypes. Otherwise
the first table has batches of lognormal lengths, and the second ``layer.step`` for ``B`` streams.
Both dtypes take turns; a figure is a median, and a ratio the median of the ratios of neighbouring
turns. The error is the root mean square of the error of the output, relative to that of the output
in float32; weights are those of a new layer.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import raglane as rl
from raglane.native.machine import cpu_name

BATCHES = ((64, 128, 128), (64, 256, 256), (32, 512, 512), (32, 1024, 512))
STREAMS = ((1, 256), (1, 512), (1, 1024), (8, 512))


def turns(
    ways: tuple[Callable[[], Any], Callable[[], Any]], number: int, rounds: int = 15
) -> tuple[float, float, float]:
    """Return the seconds of two calls, and the ratio of the first to the second."""
    taken: list[tuple[float, float]] = []
    for _ in range(rounds + 2):
        found = []
        for way in ways:
            start = time.perf_counter()
            for _ in range(number):
                way()
            found.append((time.perf_counter() - start) / number)
        taken.append((found[0], found[1]))
    del taken[:2]  # the caches are cold at first
    first, second = (statistics.median(each) for each in zip(*taken, strict=True))
    return first, second, statistics.median(one / other for one, other in taken)


def both(name: str, inputs: int, size: int) -> tuple[Any, Any]:
    layer = getattr(rl.nn, name)(inputs, size).eval()
    return rl.pack_weights(layer), rl.quantize(copy.deepcopy(layer))


def a_batch(count: int, inputs: int) -> rl.Ragged:
    lengths = torch.randn(count).mul(0.7).add(3.3).exp().clamp(1, 400).long()
    return rl.Ragged.from_flat(torch.randn(int(lengths.sum()), inputs), lengths=lengths)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def of_runs(folders: list[str]) -> None:
    print(
        "| run | metric | float32 | int8 | float32, s | int8, s |\n| --- | --- | --- | --- | --- | --- |"
    )
    for folder in folders:
        run, found = rl.load(folder), []
        for convert in (rl.pack_weights, rl.quantize):
            convert(run.model)
            run.evaluate()  # warm
            start = time.perf_counter()
            found.append((run.evaluate(), time.perf_counter() - start))
        (one, first), (other, second) = found
        for name in one.numbers:
            print(
                f"| {folder} | {name} | {one[name]:.4f} | {other[name]:.4f} | {first:.2f} | {second:.2f} |"
            )


def main() -> None:
    torch.manual_seed(0)
    machine = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(
        f"# int8 weights\n\n`python benchmarks/int8.py`: {machine}.\n\nBatches of lognormal lengths, inference:\n"
    )
    print(
        "| layer | B, H, D | float32, ms | int8, ms | float32 / int8 | error |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in ("LSTM", "GRU", "RNN"):
        for count, size, inputs in BATCHES:
            layers, batch = both(name, inputs, size), a_batch(count, inputs)
            with torch.inference_mode():
                wanted, found = (layer(batch)[0].values for layer in layers)
                first, second, ratio = turns(
                    (partial(layers[0], batch), partial(layers[1], batch)), 1
                )
            times = f"{1e3 * first:.1f} | {1e3 * second:.1f} | {ratio:.2f}"
            print(f"| {name} | {count}, {size}, {inputs} | {times} | {error(found, wanted):.4f} |")
    print("\nOne step of B streams:\n")
    print(
        "| layer | B | H | float32, us | int8, us | float32 / int8 |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in ("LSTM", "GRU"):
        for count, size in STREAMS:
            layers, x_t = both(name, size, size), torch.randn(count, size)
            with torch.inference_mode():
                state = layers[0].step(x_t)[1]
                first, second, ratio = turns(
                    (partial(layers[0].step, x_t, state), partial(layers[1].step, x_t, state)), 30
                )
            print(
                f"| {name} | {count} | {size} | {1e6 * first:.0f} | {1e6 * second:.0f} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    of_runs(sys.argv[1:]) if sys.argv[1:] else main()
