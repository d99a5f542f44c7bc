"""Hypothesis strategies for lengths, and random sequences."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


def lengths(most: int = 6, longest: int = 9) -> st.SearchStrategy[list[int]]:
    """Draw lengths of a batch: any, all equal, or one long and many short."""
    single = st.integers(0, longest)
    free = st.lists(single, min_size=0, max_size=most)
    equal = st.builds(lambda count, length: [length] * count, st.integers(1, most), single)
    skewed = st.builds(
        lambda short, place: [*short[:place], 4 * longest, *short[place:]],
        st.lists(st.integers(0, 2), min_size=1, max_size=most),
        st.integers(0, most),
    )
    return st.one_of(free, equal, skewed)


def sequences_of(
    lengths: list[int],
    features: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
    requires_grad: bool = False,
) -> list[Tensor]:
    """Return a random tensor per length, by default on the device under test."""
    made = [
        torch.randn(length, *features, dtype=torch.float64, device=device).to(dtype)
        for length in lengths
    ]
    return [sequence.requires_grad_(requires_grad) for sequence in made]
