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
    """Where each sequence starts, and the end of the last.

    Args:
        lengths: ``(B,)`` of any integer dtype, each at least 0.

    Returns:
        ``(B + 1,)`` int64 on the device of ``lengths``.

    Example:
        >>> offsets_from_lengths(torch.tensor([4, 0, 2])).tolist()
        [0, 4, 4, 6]
    """
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


@index_arithmetic
def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """How long each sequence is.

    Args:
        offsets: ``(B + 1,)`` int64.

    Returns:
        ``(B,)`` int64 on the device of ``offsets``.

    Example:
        >>> lengths_from_offsets(torch.tensor([0, 4, 4, 6])).tolist()
        [4, 0, 2]
    """
    return offsets.diff()


def segment_ids(offsets: Tensor, total: int) -> Tensor:
    """For each element, the sequence that it belongs to.

    Args:
        offsets: ``(B + 1,)`` int64.
        total: ``N``; an argument because reading it from ``offsets`` would wait for a device.

    Returns:
        ``(N,)`` int64.

    Example:
        >>> segment_ids(torch.tensor([0, 2, 2, 5]), 5).tolist()
        [0, 0, 2, 2, 2]
    """
    count = offsets.shape[0] - 1
    sequences = torch.arange(count, device=offsets.device)
    return repeated(sequences, offsets.diff(), total)


def positions(offsets: Tensor, total: int) -> Tensor:
    """For each element, its step: 0 for the first of its sequence.

    Args:
        offsets: ``(B + 1,)`` int64.
        total: ``N``.

    Returns:
        ``(N,)`` int64.

    Example:
        >>> positions(torch.tensor([0, 2, 2, 5]), 5).tolist()
        [0, 1, 0, 1, 2]
    """
    starts = repeated(offsets[:-1], offsets.diff(), total)
    return torch.arange(total, device=offsets.device) - starts


def element_index(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """The elements of slices ``[start, start + length)`` of the flat values, slice after slice.

    Args:
        starts: ``(M,)`` int64, the first element of each slice.
        lengths: ``(M,)`` int64, the number of elements of each slice.
        total: the sum of ``lengths``.

    Returns:
        ``(total,)`` int64: an index for :func:`take_rows`.

    Example:
        >>> element_index(torch.tensor([7, 0]), torch.tensor([2, 3]), 5).tolist()
        [7, 8, 0, 1, 2]
    """
    shifts = starts - offsets_from_lengths(lengths)[:-1]
    return torch.arange(total, device=starts.device) + repeated(shifts, lengths, total)


def owners(ends: Tensor, total: int) -> Tensor:
    """What :func:`segment_ids` gives, by operators that ONNX has: how many sequences have ended before each element.

    Args:
        ends: ``(B,)`` int64, where each sequence ends.
        total: ``N``.

    Returns:
        ``(N,)`` int64.

    Example:
        >>> owners(torch.tensor([2, 2, 5]), 5).tolist()
        [0, 0, 2, 2, 2]
    """
    ended = torch.zeros(total + 1, dtype=torch.int64, device=ends.device)
    return ended.index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:total]


def repeated(rows: Tensor, repeats: Tensor, total: int) -> Tensor:
    """Each row as often as is said: what :func:`torch.repeat_interleave` gives, also in a graph that is exported.

    Args:
        rows: ``(M, *features)``.
        repeats: ``(M,)`` int64.
        total: the sum of ``repeats``.

    Returns:
        ``(total, *features)``.

    Example:
        >>> repeated(torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1]), 3).tolist()
        [7, 7, 9]
    """
    if is_exporting():
        return rows.index_select(0, owners(repeats.cumsum(0), total))
    return torch.repeat_interleave(rows, repeats, output_size=total)


# ---------------------------------------------------------------------------------------------------------------
# One value per sequence
# ---------------------------------------------------------------------------------------------------------------
