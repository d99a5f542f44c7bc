"""Self-attention over sequences of different lengths, against torch's on padded and on nested
tensors.

    python benchmarks/attention.py > benchmarks/results/attention.md

Lengths are lognormal (``harness.lengths``). All ways have the same weights and, to rounding, the
same outputs, and take turns in one thread; times are medians of the processor's time. "padded" is
``torch.nn.MultiheadAttention`` with a ``key_padding_mask``, "nested"
``scaled_dot_product_attention`` on a jagged tensor. Memory is the growth of the process's peak in a
call.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness.lengths import LENGTHS
from harness.memory import peak_of
from harness.timing import interleave
from torch import Tensor, nn

import raglane as rl
from raglane.native.machine import cpu_name

# Sequences, features and heads.
SIZES = ((256, 64, 4), (64, 256, 8), (16, 512, 8))


def nested(attention: nn.MultiheadAttention, batch: Tensor) -> Tensor:
    """Return the attention of a jagged tensor."""
    weights = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    parts = [
        F.linear(batch, weight, bias) for weight, bias in weights
    ]  # contiguous, as torch requires
    heads = [part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in parts]
    return attention.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))


def ways(count: int, features: int, heads: int) -> tuple[list[int], dict[str, Callable[[], Any]]]:
    """Return lengths, and by name functions that return the values of the attention."""
    lengths = LENGTHS["lognormal"].draw(count)
    batch = rl.Ragged.from_flat(torch.randn(sum(lengths), features), lengths=lengths)
    own, other = (
        rl.nn.Attention(features, heads),
        nn.MultiheadAttention(features, heads, batch_first=True),
    )
    other.load_state_dict(own.state_dict())
    padded, mask = batch.to_padded()[0].requires_grad_(), ~batch.mask()
    batch.values.requires_grad_()

    def run(way: str) -> Tensor:
        own.train(torch.is_grad_enabled())
        other.train(torch.is_grad_enabled())
        if way == "raglane":
            return own(batch).values
        if way == "padded":
            return other(padded, padded, padded, key_padding_mask=mask, need_weights=False)[0]
        return nested(other, batch.to_nested()).values()

    calls = {way: partial(run, way) for way in ("raglane", "padded", "nested")}
    expected = calls["raglane"]()
    torch.testing.assert_close(calls["padded"]()[~mask], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(calls["nested"](), expected, rtol=1e-4, atol=1e-5)
    return lengths, calls


def train(call: Callable[[], Tensor]) -> None:
    """Run forward and backward."""
    call().sum().backward()


def predict(call: Callable[[], Tensor]) -> None:
    """Run forward."""
    with torch.no_grad():
        call()


def megabytes(call: Callable[[], Any]) -> float:
    """Return the growth of the peak of memory in a call."""
    ctypes.CDLL(None).malloc_trim(0)
    return peak_of(call) / 1e6


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"# Attention\n\n`python benchmarks/attention.py`: {cpu_name()}, one thread, float32.\n")
    print("| (B, features, heads) | elements, density | | raglane | padded | nested |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in SIZES:
        torch.manual_seed(0)
        lengths, calls = ways(*size)
        shape = f"{sum(lengths):,}, {sum(lengths) / (len(lengths) * max(lengths)):.2f}"
        for mode in (train, predict):
            own = {way: partial(mode, call) for way, call in calls.items()}
            times = {
                way: 1e3 * statistics.median(taken)
                for way, taken in interleave(
                    own, 7, most_seconds=10, clock=time.process_time
                ).items()
            }
            memory = {way: megabytes(call) for way, call in own.items()}
            for name, found in (("ms", times), ("MB", memory)):
                cells = " | ".join(f"{found[way]:,.1f}" for way in calls)
                print(f"| {size} | {shape} | {mode.__name__}, {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
