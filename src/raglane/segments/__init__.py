"""Arithmetic on flat values and offsets: the sequences of a batch, without a loop over them.

A ragged batch of ``B`` sequences is ``values`` of shape ``(N, *features)`` and ``offsets`` of shape ``(B + 1,)``,
int64, first 0, last ``N``; sequence ``b`` is ``values[offsets[b]:offsets[b + 1]]``. The functions here know
nothing else, and everything above them (packing, conversions, :class:`~raglane.Ragged`, schedules) is built on
them. Gradients flow through ``values``, twice if asked. A sequence never sees another's values, so a NaN in one
stays there. Nothing here copies from a device to the host: a size that only the lengths know is an argument, ``total``
for ``N`` and ``longest`` for the largest length.

Nothing is checked: torch reads and writes beyond its memory where offsets do not describe the values. What calls these
has made the offsets itself, or has checked them (:func:`raglane._utils.checks.check_offsets`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane._utils.tracing import index_arithmetic, is_exporting
from raglane.segments.indexing import take_rows

IntArray = NDArray[np.int64]


# -- where the elements of each sequence are --------------------------------------------------------------------------


@index_arithmetic
def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Where each sequence starts, and the end of the last: ``(B,)`` of any integer dtype to ``(B + 1,)`` int64."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


@index_arithmetic
def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """The length of each sequence, ``(B,)``."""
    return offsets.diff()


def segment_ids(offsets: Tensor, total: int) -> Tensor:
    """For each element, the sequence that it belongs to, ``(N,)``."""
    return repeated(torch.arange(offsets.shape[0] - 1, device=offsets.device), offsets.diff(), total)


def positions(offsets: Tensor, total: int) -> Tensor:
    """For each element, its step, ``(N,)``: 0 for the first of its sequence."""
    starts = repeated(offsets[:-1], offsets.diff(), total)
    return torch.arange(total, device=offsets.device) - starts


def element_index(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """The elements of slices ``[start, start + length)`` of the flat values, slice after slice, ``(total,)``."""
    shifts = starts - offsets_from_lengths(lengths)[:-1]
    return torch.arange(total, device=starts.device) + repeated(shifts, lengths, total)


def owners(ends: Tensor, total: int) -> Tensor:
    """:func:`segment_ids` from the ends ``(B,)`` of the sequences, by operators that ONNX has."""
    ended = torch.zeros(total + 1, dtype=torch.int64, device=ends.device)
    return ended.index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:total]


def repeated(rows: Tensor, repeats: Tensor, total: int) -> Tensor:
    """:func:`torch.repeat_interleave` of rows ``(M, *features)``, also in a graph that is exported."""
    if is_exporting():
        return rows.index_select(0, owners(repeats.cumsum(0), total))
    return torch.repeat_interleave(rows, repeats, output_size=total)


def conjugate(counts: IntArray, size: int) -> IntArray:
    """How many of ``counts`` exceed ``0, 1, ..., size - 1``: lengths to batch sizes of a pack; back, longest first."""
    at_most: IntArray = np.bincount(counts, minlength=size)[:size].cumsum()
    exceeding: IntArray = counts.shape[0] - at_most
    return exceeding


# -- one row per sequence from one per element ------------------------------------------------------------------------


def scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number that meets tensors on any device: on the host, whatever torch's default device is."""
    return torch.as_tensor(value, dtype=dtype, device="cpu")


def _like_rows(per_row: Tensor, rows: Tensor) -> Tensor:
    """One value per row, with the dimensions of rows ``(M, *features)``."""
    return per_row.view((-1,) + (1,) * (rows.dim() - 1))


def _where_empty(per_sequence: Tensor, offsets: Tensor, empty: float) -> Tensor:
    """Give ``empty`` to the sequences that have no element."""
    is_empty = _like_rows(offsets.diff() == 0, per_sequence)
    return torch.where(is_empty, scalar(empty, per_sequence.dtype), per_sequence)


def _pick(values: Tensor, offsets: Tensor, index: Tensor, empty: float) -> Tensor:
    """Rows of ``values`` at ``index``, one per sequence, and ``empty`` for the sequences that have none."""
    if is_exporting():
        # One graph for batches with and without elements: what an empty sequence gives is one row more.
        rows = torch.cat([values, values.new_full((1, *values.shape[1:]), empty)])
        return rows.index_select(0, torch.where(offsets.diff() == 0, values.shape[0], index))
    if values.shape[0] == 0:
        # A sum of nothing is zeros that hang on the graph, so that a backward pass goes through.
        return _where_empty(sum(values, offsets).to(values.dtype), offsets, empty)
    # The index of an empty sequence points at a neighbour's element, or past the end: clamp, take, then replace.
    # index_select, not take_rows: an empty sequence's index may repeat another's.
    rows = values.index_select(0, index.clamp(0, values.shape[0] - 1))
    return _where_empty(rows, offsets, empty)


def first(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The first element of each sequence, ``(B, *features)``."""
    return _pick(values, offsets, offsets[:-1], empty)


def last(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The last element of each sequence, ``(B, *features)``."""
    return _pick(values, offsets, offsets[1:] - 1, empty)


def _summable(values: Tensor) -> Tensor:
    """Values of a dtype to add up in: int64 for integers, float32 for half precision, which stops growing early."""
    if not (values.is_floating_point() or values.is_complex()):
        return values.long()
    return values.float() if values.is_floating_point() and values.element_size() < 4 else values


def sum(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each sequence, ``(B, *features)``; 0 for an empty one, int64 for integers and booleans."""
    wide = _summable(values)
    total = wide.new_zeros((offsets.shape[0] - 1, *values.shape[1:]))
    summed = total.index_add(0, segment_ids(offsets, values.shape[0]), wide)
    return summed.to(values.dtype) if values.is_floating_point() else summed


def mean(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The mean of each sequence, ``(B, *features)``, of a floating-point or complex dtype."""
    wide = _summable(values)
    counts = _like_rows(offsets.diff().clamp(min=1), values)
    return _where_empty((sum(wide, offsets) / counts.to(wide.dtype)).to(values.dtype), offsets, empty)


def _extreme(values: Tensor, offsets: Tensor, empty: float, reduce: str) -> Tensor:
    """The largest (``amax``) or smallest (``amin``) element of each sequence; equal ones share the gradient evenly."""
    if values.dtype is torch.bool:
        return _extreme(values.to(torch.uint8), offsets, empty, reduce).bool()
    result = values.new_zeros((offsets.shape[0] - 1, *values.shape[1:]))
    index = _like_rows(segment_ids(offsets, values.shape[0]), values).expand_as(values)
    result = result.scatter_reduce(0, index, values, reduce=reduce, include_self=False)
    return _where_empty(result, offsets, empty)


def max(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The largest element of each sequence, feature by feature, ``(B, *features)``."""
    return _extreme(values, offsets, empty, "amax")


def min(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The smallest element of each sequence, feature by feature, ``(B, *features)``."""
    return _extreme(values, offsets, empty, "amin")


def _exponentials(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``exp(value - largest of its sequence)``, the sums of those and the largest, of a dtype to add up in."""
    wide = _summable(values)
    # The largest is subtracted for range alone, so no gradient needs to flow through it; nothing is subtracted where
    # it is infinite, since that would give NaN.
    largest = max(wide.detach(), offsets)
    largest = torch.where(largest.isfinite(), largest, scalar(0.0, largest.dtype))
    raised = (wide - spread(largest, offsets, values.shape[0])).exp()
    return raised, sum(raised, offsets), largest


def logsumexp(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The logarithm of the sum of exponentials of each sequence, ``(B, *features)``, of a floating-point dtype.

    Elements that are all ``-inf`` give ``-inf`` and get no gradient.
    """
    _, total, largest = _exponentials(values, offsets)
    is_zero = total == 0
    result = total.masked_fill(is_zero, 1).log().masked_fill(is_zero, float("-inf")) + largest
    return _where_empty(result.to(values.dtype), offsets, empty)


# -- one row per element ----------------------------------------------------------------------------------------------


def spread(per_sequence: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Give every element the value of its sequence: ``(B, *features)`` to ``(N, *features)``."""
    # Only the backward pass adds anything up.
    source = _summable(per_sequence) if per_sequence.requires_grad else per_sequence
    return source.index_select(0, segment_ids(offsets, total)).to(per_sequence.dtype)


def softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """The softmax over the steps of each sequence, ``(N, *features)`` of a floating-point dtype."""
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
        step = 1
        while step < longest:
            # Row i takes row i - step where both belong to one sequence, which position >= step says; the sum
            # from the other end is the transpose of that: row i - step takes row i.
            mask = _like_rows(position[step:] >= step, values)
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
    """The running sum over the steps of each sequence, ``(N, *features)``; int64 for integers and booleans."""
    if not (values.is_floating_point() or values.is_complex()):
        values = values.long()
    result: Tensor = _Cumsum.apply(values, positions(offsets, values.shape[0]), longest, False)  # type: ignore[no-untyped-call]
    return result


def reverse_index(offsets: Tensor, total: int) -> Tensor:
    """The index ``(N,)`` that turns every sequence around; its own inverse."""
    ends = offsets[:-1] + offsets[1:] - 1
    return repeated(ends, offsets.diff(), total) - torch.arange(total, device=offsets.device)


def reverse(values: Tensor, offsets: Tensor) -> Tensor:
    """Every sequence from its end to its start, ``(N, *features)``."""
    return take_rows(values, reverse_index(offsets, values.shape[0]))


def shift(values: Tensor, offsets: Tensor, steps: int, fill: float = 0.0) -> Tensor:
    """Move every sequence by ``steps``, below 0 to earlier ones, and write ``fill`` where nothing moves in."""
    total = values.shape[0]
    position = positions(offsets, total)
    remaining = position if steps >= 0 else spread(offsets.diff(), offsets, total) - 1 - position
    kept = _like_rows(remaining >= abs(steps), values)
    return torch.where(kept, _moved(values, steps), scalar(fill, values.dtype))


def _moved(values: Tensor, steps: int) -> Tensor:
    """The rows by so many places further on; what moves in at the end is anything."""
    if not is_exporting():
        return values.roll(steps, 0)
    # The graph of roll divides by the number of rows, and asks whether there are any.
    total, more = values.shape[0], values.new_zeros(abs(steps), *values.shape[1:])
    if steps >= 0:
        return torch.cat((more, values)).narrow(0, 0, total)
    return torch.cat((values, more)).narrow(0, -steps, total)
