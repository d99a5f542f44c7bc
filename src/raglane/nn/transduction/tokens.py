"""Checks of sequences of tokens."""

from __future__ import annotations

from typing import Any

import torch

from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.ragged import Ragged


def as_tokens(name: str, given: Any, count: int | None = None) -> Ragged:
    """Return sequences of integers, from 0 to ``count - 1`` if given, as a Ragged of int64 on the CPU."""
    batch = given if isinstance(given, Ragged) else Ragged(list(given)) if isinstance(given, (list, tuple)) else None
    if batch is not None and batch.values.numel() == 0:
        return Ragged.from_flat(torch.zeros(0, dtype=torch.int64, device="cpu"), lengths=batch.host_lengths)
    is_real = batch is not None and (batch.dtype.is_floating_point or batch.dtype.is_complex)
    if batch is None or is_real or batch.dtype is torch.bool or batch.values.dim() != 1:
        got = type(given).__name__ if batch is None else f"{batch.dtype}, elements of shape {tuple(batch.features)}"
        rule, fix = "a Ragged of tokens, (N,) of an integer dtype", "wrap them with rl.Ragged(list_of_tokens)"
        raise ArgumentTypeError(name, got, rule, fix)
    values = batch.values.detach().to("cpu", torch.int64).contiguous()
    if count is not None:
        lowest, highest = map(int, values.aminmax())
        if lowest < 0 or highest >= count:
            got = f"token {lowest if lowest < 0 else highest}"
            raise ArgumentError(name, got, f"tokens from 0 to {count - 1}", "check how tokens are numbered")
    return Ragged.from_flat(values, lengths=batch.host_lengths)
