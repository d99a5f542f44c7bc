"""Arithmetic on flat values and offsets: the sequences of a batch, without a loop over them.

A ragged batch of ``B`` sequences is ``values`` of shape ``(N, *features)`` and ``offsets`` of shape ``(B + 1,)``,
int64, first 0, last ``N``; sequence ``b`` is ``values[offsets[b]:offsets[b + 1]]``. The functions here know
nothing else, and everything above them (packing, conversions, :class:`~raglane.Ragged`, schedules) is built on
them. Gradients flow through ``values``, twice if asked. A sequence never sees another's values, so a NaN in one
stays there. Nothing here copies from a device to the host: a size that only the lengths know is an argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.rows import take_rows

__all__ = [
    "cumsum",
    "element_index",
    "first",
    "last",
    "logsumexp",
    "max",
    "mean",
    "min",
    "offsets_from_lengths",
    "positions",
    "reverse",
    "reverse_index",
    "segment_ids",
    "shift",
    "softmax",
    "spread",
    "sum",
]


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
    return torch.repeat_interleave(sequences, offsets.diff(), output_size=total)


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
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=total)
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
    return torch.arange(total, device=starts.device) + torch.repeat_interleave(shifts, lengths, output_size=total)


# ---------------------------------------------------------------------------------------------------------------
# One value a sequence
# ---------------------------------------------------------------------------------------------------------------


def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number that meets tensors on any device: on the host, whatever torch's default device is."""
    return torch.as_tensor(value, dtype=dtype, device="cpu")


def _where_empty(per_sequence: Tensor, offsets: Tensor, empty: float) -> Tensor:
    """Give ``empty`` to the sequences that have no element."""
    is_empty = offsets.diff() == 0
    shape = (-1,) + (1,) * (per_sequence.dim() - 1)
    return torch.where(is_empty.view(shape), _scalar(empty, per_sequence.dtype), per_sequence)


def _pick(values: Tensor, offsets: Tensor, index: Tensor, empty: float) -> Tensor:
    """Rows of ``values`` at ``index``, one a sequence, and ``empty`` for the sequences that have none."""
    if values.shape[0] == 0:
        return values.new_full((offsets.shape[0] - 1, *values.shape[1:]), empty)
    # The index of an empty sequence points at a neighbour's element, or past the end: clamp, take, then replace.
    # index_select, not take_rows: an empty sequence's index may repeat another's.
    rows = values.index_select(0, index.clamp(0, values.shape[0] - 1))
    return _where_empty(rows, offsets, empty)


def first(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The first element of each sequence.

    Args:
        values: ``(N, *features)``, any dtype.
        offsets: ``(B + 1,)`` int64.
        empty: what an empty sequence gives.

    Returns:
        ``(B, *features)`` of the dtype of ``values``.

    Example:
        >>> first(torch.tensor([1., 2., 3.]), torch.tensor([0, 2, 2, 3])).tolist()
        [1.0, 0.0, 3.0]
    """
    return _pick(values, offsets, offsets[:-1], empty)


def last(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The last element of each sequence.

    Args:
        values: ``(N, *features)``, any dtype.
        offsets: ``(B + 1,)`` int64.
        empty: what an empty sequence gives.

    Returns:
        ``(B, *features)`` of the dtype of ``values``.

    Example:
        >>> last(torch.tensor([1., 2., 3.]), torch.tensor([0, 2, 2, 3])).tolist()
        [2.0, 0.0, 3.0]
    """
    return _pick(values, offsets, offsets[1:] - 1, empty)


def _widened(values: Tensor) -> Tensor:
    """Numbers in which to add up: float32 for bfloat16 and float16, which stop growing after a few hundred ones."""
    return values.float() if values.is_floating_point() and values.element_size() < 4 else values


def sum(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each sequence; 0 for an empty one.

    Args:
        values: ``(N, *features)``; integers and booleans are summed as int64, as :func:`torch.sum` does. Half
            precision is added up in float32, and so it is in all that is here.
        offsets: ``(B + 1,)`` int64.

    Returns:
        ``(B, *features)``.

    Example:
        >>> sum(torch.tensor([1., 2., 3.]), torch.tensor([0, 2, 2, 3])).tolist()
        [3.0, 0.0, 3.0]
    """
    if not (values.is_floating_point() or values.is_complex()):
        values = values.long()
    wide = _widened(values)
    total = wide.new_zeros((offsets.shape[0] - 1, *values.shape[1:]))
    return total.index_add(0, segment_ids(offsets, values.shape[0]), wide).to(values.dtype)


def mean(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The mean of each sequence.

    Args:
        values: ``(N, *features)`` of a floating-point or complex dtype.
        offsets: ``(B + 1,)`` int64.
        empty: what an empty sequence gives.

    Returns:
        ``(B, *features)`` of the dtype of ``values``.

    Example:
        >>> mean(torch.tensor([1., 2., 3.]), torch.tensor([0, 2, 2, 3]), empty=-1).tolist()
        [1.5, -1.0, 3.0]
    """
    wide = _widened(values)
    counts = offsets.diff().clamp(min=1).view((-1,) + (1,) * (values.dim() - 1))
    return _where_empty((sum(wide, offsets) / counts.to(wide.dtype)).to(values.dtype), offsets, empty)


def _extreme(values: Tensor, offsets: Tensor, empty: float, reduce: str) -> Tensor:
    """The largest (``amax``) or smallest (``amin``) element of each sequence, feature by feature."""
    if values.dtype is torch.bool:
        return _extreme(values.to(torch.uint8), offsets, empty, reduce).bool()
    result = values.new_zeros((offsets.shape[0] - 1, *values.shape[1:]))
    ids = segment_ids(offsets, values.shape[0])
    index = ids.view((-1,) + (1,) * (values.dim() - 1)).expand_as(values)
    result = result.scatter_reduce(0, index, values, reduce=reduce, include_self=False)
    return _where_empty(result, offsets, empty)


def max(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The largest element of each sequence, feature by feature.

    Where several elements are largest, the gradient is shared evenly among them, as in :func:`torch.amax`.

    Args:
        values: ``(N, *features)``, any real dtype.
        offsets: ``(B + 1,)`` int64.
        empty: what an empty sequence gives.

    Returns:
        ``(B, *features)`` of the dtype of ``values``.

    Example:
        >>> max(torch.tensor([1., 2., -3.]), torch.tensor([0, 2, 2, 3])).tolist()
        [2.0, 0.0, -3.0]
    """
    return _extreme(values, offsets, empty, "amax")


def min(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The smallest element of each sequence, feature by feature.

    Where several elements are smallest, the gradient is shared evenly among them, as in :func:`torch.amin`.

    Args:
        values: ``(N, *features)``, any real dtype.
        offsets: ``(B + 1,)`` int64.
        empty: what an empty sequence gives.

    Returns:
        ``(B, *features)`` of the dtype of ``values``.

    Example:
        >>> min(torch.tensor([1., 2., -3.]), torch.tensor([0, 2, 2, 3])).tolist()
        [1.0, 0.0, -3.0]
    """
    return _extreme(values, offsets, empty, "amin")


def _exponentials(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``exp(value - largest of its sequence)``, the sums of those and the largest, of a dtype to add up in."""
    wide = _widened(values)
    # The largest is subtracted for range alone, so no gradient needs to flow through it; nothing is subtracted where
    # it is infinite, since that would give NaN.
    largest = max(wide.detach(), offsets)
    largest = torch.where(largest.isfinite(), largest, _scalar(0.0, largest.dtype))
    raised = (wide - spread(largest, offsets, values.shape[0])).exp()
    return raised, sum(raised, offsets), largest


def logsumexp(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The logarithm of the sum of the exponentials of each sequence, feature by feature.

    Args:
        values: ``(N, *features)`` of a floating-point dtype.
        offsets: ``(B + 1,)`` int64.
        empty: what an empty sequence gives; the sum of nothing would give ``-inf``.

    Returns:
        ``(B, *features)`` of the dtype of ``values``. Elements that are all ``-inf`` give ``-inf`` and get no gradient.

    Example:
        >>> logsumexp(torch.tensor([0., 0., 3.]), torch.tensor([0, 2, 2, 3])).exp().round().tolist()
        [2.0, 1.0, 20.0]
    """
    _, total, largest = _exponentials(values, offsets)
    is_zero = total == 0
    result = total.masked_fill(is_zero, 1).log().masked_fill(is_zero, float("-inf")) + largest
    return _where_empty(result.to(values.dtype), offsets, empty)


# ---------------------------------------------------------------------------------------------------------------
# One value an element
# ---------------------------------------------------------------------------------------------------------------


def spread(per_sequence: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Give every element the value of its sequence.

    Args:
        per_sequence: ``(B, *features)``, any dtype.
        offsets: ``(B + 1,)`` int64.
        total: ``N``.

    Returns:
        ``(N, *features)``.

    Example:
        >>> spread(torch.tensor([5, 6, 7]), torch.tensor([0, 2, 2, 3]), 3).tolist()
        [5, 5, 7]
    """
    # Only the backward pass adds anything up.
    source = _widened(per_sequence) if per_sequence.requires_grad else per_sequence
    return source.index_select(0, segment_ids(offsets, total)).to(per_sequence.dtype)


def softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """The softmax over the steps of each sequence, feature by feature.

    Args:
        values: ``(N, *features)`` of a floating-point dtype.
        offsets: ``(B + 1,)`` int64.

    Returns:
        ``(N, *features)``; the elements of a sequence add up to 1.

    Example:
        >>> softmax(torch.tensor([0., 0., 3.]), torch.tensor([0, 2, 3])).tolist()
        [0.5, 0.5, 1.0]
    """
    # A sequence of -inf only gives NaN, as it does in torch.softmax.
    raised, total, _ = _exponentials(values, offsets)
    return (raised / spread(total, offsets, values.shape[0])).to(values.dtype)


class _Cumsum(torch.autograd.Function):
    """A running sum by doubling: after round ``r`` an element holds the sum of the ``2 ** r`` before it.

    One running sum over all values, less what stood at each sequence's start, would be one pass, but it
    rounds like the sum of the whole batch and lets a NaN reach every later sequence.
    """

    @staticmethod
    def forward(values: Tensor, position: Tensor, longest: int, backwards: bool) -> Tensor:
        result = values.clone()
        shape = (-1,) + (1,) * (values.dim() - 1)
        step = 1
        while step < longest:
            # Row i takes row i - step where both belong to one sequence, which position >= step says; the sum
            # from the other end is the transpose of that: row i - step takes row i.
            mask = (position[step:] >= step).view(shape)
            if backwards:
                result[:-step] += torch.where(mask, result[step:], 0)
            else:
                result[step:] += torch.where(mask, result[:-step], 0)
            step *= 2
        return result

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, Tensor, int, bool],
        output: Tensor,  # noqa: ARG004
    ) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.longest, ctx.backwards = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (position,) = ctx.saved_tensors
        return _Cumsum.apply(grad, position, ctx.longest, not ctx.backwards), None, None, None  # type: ignore[no-untyped-call]


def cumsum(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """The running sum over the steps of each sequence.

    Args:
        values: ``(N, *features)``; integers and booleans are summed as int64, as :func:`torch.cumsum` does.
        offsets: ``(B + 1,)`` int64.
        longest: the largest length, or anything above it.

    Returns:
        ``(N, *features)``.

    Example:
        >>> cumsum(torch.tensor([1., 2., 3.]), torch.tensor([0, 2, 3]), 2).tolist()
        [1.0, 3.0, 3.0]
    """
    if not (values.is_floating_point() or values.is_complex()):
        values = values.long()
    result: Tensor = _Cumsum.apply(values, positions(offsets, values.shape[0]), longest, False)  # type: ignore[no-untyped-call]
    return result


def reverse_index(offsets: Tensor, total: int) -> Tensor:
    """The index that turns every sequence around: an index for :func:`take_rows`, its own inverse.

    Args:
        offsets: ``(B + 1,)`` int64.
        total: ``N``.

    Returns:
        ``(N,)`` int64.

    Example:
        >>> reverse_index(torch.tensor([0, 2, 5]), 5).tolist()
        [1, 0, 4, 3, 2]
    """
    ends = offsets[:-1] + offsets[1:] - 1
    mirrored = torch.repeat_interleave(ends, offsets.diff(), output_size=total)
    return mirrored - torch.arange(total, device=offsets.device)


def reverse(values: Tensor, offsets: Tensor) -> Tensor:
    """Every sequence from its end to its start.

    Args:
        values: ``(N, *features)``, any dtype.
        offsets: ``(B + 1,)`` int64.

    Returns:
        ``(N, *features)``.

    Example:
        >>> reverse(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).tolist()
        [2, 1, 3]
    """
    return take_rows(values, reverse_index(offsets, values.shape[0]))


def shift(values: Tensor, offsets: Tensor, steps: int, fill: float = 0.0) -> Tensor:
    """Move every sequence by ``steps``, and write ``fill`` where nothing moves in; lengths stay.

    Args:
        values: ``(N, *features)``, any dtype.
        offsets: ``(B + 1,)`` int64.
        steps: above 0 moves to later steps (an element gets what stood ``steps`` before it), below 0 to earlier.
        fill: the value of elements that nothing moves to.

    Returns:
        ``(N, *features)``.

    Example:
        >>> shift(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 4]), 1).tolist()
        [0, 1, 2, 0]
    """
    total = values.shape[0]
    position = positions(offsets, total)
    remaining = position if steps >= 0 else spread(offsets.diff(), offsets, total) - 1 - position
    kept = remaining >= abs(steps)
    moved = values.roll(steps, 0)
    shape = (-1,) + (1,) * (values.dim() - 1)
    return torch.where(kept.view(shape), moved, _scalar(fill, values.dtype))
