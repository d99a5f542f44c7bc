"""Small batches."""

from __future__ import annotations

import torch
from torch import Tensor

import raglane as rl
from strategies import sequences_of


def same(batch: rl.Ragged, sequences: list[Tensor]) -> bool:
    """Return True if a batch contains exactly these sequences, bit for bit."""
    held = [batch[index] for index in range(len(batch))]
    return len(held) == len(sequences) and all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(held, sequences, strict=True)
    )


def numbered(lengths: list[int]) -> rl.Ragged:
    """Return sequences whose elements are all different."""
    return rl.Ragged.from_flat(torch.arange(sum(lengths)), lengths=lengths)


def random_batch(
    lengths: list[int], size: int = 3, dtype: torch.dtype = torch.float64
) -> rl.Ragged:
    """Return sequences of random vectors."""
    return rl.Ragged(sequences_of(lengths, (size,), dtype))
