"""One row per sequence from one per element, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane._utils.tracing import is_exporting
from raglane.segments.index import segment_ids

__all__ = ["first", "last", "logsumexp", "max", "mean", "min", "scalar", "softmax", "spread", "sum"]


def scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number that meets tensors on any device: on the host, whatever torch's default device is."""
    return torch.as_tensor(value, dtype=dtype, device="cpu")


def _where_empty(per_sequence: Tensor, offsets: Tensor, empty: float) -> Tensor:
    """Give ``empty`` to the sequences that have no element."""
    is_empty = offsets.diff() == 0
    shape = (-1,) + (1,) * (per_sequence.dim() - 1)
    return torch.where(is_empty.view(shape), scalar(empty, per_sequence.dtype), per_sequence)


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
    """The first element of each sequence."""
    return _pick(values, offsets, offsets[:-1], empty)


def last(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The last element of each sequence."""
    return _pick(values, offsets, offsets[1:] - 1, empty)


def _widened(values: Tensor) -> Tensor:
    """Numbers in which to add up: float32 for bfloat16 and float16, which stop growing after a few hundred ones."""
    return values.float() if values.is_floating_point() and values.element_size() < 4 else values


def sum(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each sequence; 0 for an empty one."""
    if not (values.is_floating_point() or values.is_complex()):
        values = values.long()
    wide = _widened(values)
    total = wide.new_zeros((offsets.shape[0] - 1, *values.shape[1:]))
    return total.index_add(0, segment_ids(offsets, values.shape[0]), wide).to(values.dtype)


def mean(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The mean of each sequence."""
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
    """
    return _extreme(values, offsets, empty, "amax")


def min(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The smallest element of each sequence, feature by feature.

    Where several elements are smallest, the gradient is shared evenly among them, as in :func:`torch.amin`.
    """
    return _extreme(values, offsets, empty, "amin")


def _exponentials(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``exp(value - largest of its sequence)``, the sums of those and the largest, of a dtype to add up in."""
    wide = _widened(values)
    # The largest is subtracted for range alone, so no gradient needs to flow through it; nothing is subtracted where
    # it is infinite, since that would give NaN.
    largest = max(wide.detach(), offsets)
    largest = torch.where(largest.isfinite(), largest, scalar(0.0, largest.dtype))
    raised = (wide - spread(largest, offsets, values.shape[0])).exp()
    return raised, sum(raised, offsets), largest


def logsumexp(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """The logarithm of the sum of the exponentials of each sequence, feature by feature."""
    _, total, largest = _exponentials(values, offsets)
    is_zero = total == 0
    result = total.masked_fill(is_zero, 1).log().masked_fill(is_zero, float("-inf")) + largest
    return _where_empty(result.to(values.dtype), offsets, empty)


# ---------------------------------------------------------------------------------------------------------------
# One value per element
# ---------------------------------------------------------------------------------------------------------------


def spread(per_sequence: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Give every element the value of its sequence."""
    # Only the backward pass adds anything up.
    source = _widened(per_sequence) if per_sequence.requires_grad else per_sequence
    return source.index_select(0, segment_ids(offsets, total)).to(per_sequence.dtype)


def softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """The softmax over the steps of each sequence, feature by feature."""
    # A sequence of -inf only gives NaN, as it does in torch.softmax.
    raised, total, _ = _exponentials(values, offsets)
    return (raised / spread(total, offsets, values.shape[0])).to(values.dtype)
