"""Where the elements of each sequence are: index arithmetic on lengths and offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane._utils.tracing import index_arithmetic, is_exporting

__all__ = [
    "element_index",
    "lengths_from_offsets",
    "offsets_from_lengths",
    "owners",
    "positions",
    "repeated",
    "segment_ids",
]


@index_arithmetic
def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Where each sequence starts, and the end of the last."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


@index_arithmetic
def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """How long each sequence is."""
    return offsets.diff()


def segment_ids(offsets: Tensor, total: int) -> Tensor:
    """For each element, the sequence that it belongs to."""
    count = offsets.shape[0] - 1
    sequences = torch.arange(count, device=offsets.device)
    return repeated(sequences, offsets.diff(), total)


def positions(offsets: Tensor, total: int) -> Tensor:
    """For each element, its step: 0 for the first of its sequence."""
    starts = repeated(offsets[:-1], offsets.diff(), total)
    return torch.arange(total, device=offsets.device) - starts


def element_index(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """The elements of slices ``[start, start + length)`` of the flat values, slice after slice."""
    shifts = starts - offsets_from_lengths(lengths)[:-1]
    return torch.arange(total, device=starts.device) + repeated(shifts, lengths, total)


def owners(ends: Tensor, total: int) -> Tensor:
    """What :func:`segment_ids` gives, by operators that ONNX has: how many sequences have ended before each element."""
    ended = torch.zeros(total + 1, dtype=torch.int64, device=ends.device)
    return ended.index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:total]


def repeated(rows: Tensor, repeats: Tensor, total: int) -> Tensor:
    """Each row as often as is said: what :func:`torch.repeat_interleave` gives, also in a graph that is exported."""
    if is_exporting():
        return rows.index_select(0, owners(repeats.cumsum(0), total))
    return torch.repeat_interleave(rows, repeats, output_size=total)


# ---------------------------------------------------------------------------------------------------------------
# One value per sequence
# ---------------------------------------------------------------------------------------------------------------
