"""A convolution of one long row of elements, as matrix products of its rows.

torch's convolutions read and write ``(channels, steps)``, so that those of elements ``(steps,
channels)`` are reordered twice. Here the elements of a window are a row of a matrix that is a view:
of every n-th window, so that windows of one product share no element.

The sequences of a batch are one row: with gaps of zeros between them, or, where outputs have the
lengths of the input, without; then the windows across their ends are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.tracing import (
    are_transformed,
    has_tangent,
    is_jit_traced,
    records_operators,
    runs_at_once,
)


class _WindowProduct(NamedTuple):
    """The windows and rows of the weight of one product, and the elements as a matrix."""

    windows: slice
    taps: slice
    elements: Tensor


def convolve_rows(
    row: Tensor, weight: Tensor, bias: Tensor | None, stride: int, dilation: int, groups: int
) -> Tensor:
    """Return torch's convolution without padding, from ``(R, C)`` to ``(windows, O)``."""
    parts = [part for part in (row, weight, bias) if part is not None]
    if groups == 1 and _has_products(parts):
        result: Tensor = _RowWindows.apply(row, weight, bias, stride, dilation, 0, None)  # type: ignore[no-untyped-call]
        return result
    steps = row.t().unsqueeze(0)
    output = F.conv1d(steps, weight, bias, stride=stride, dilation=dilation, groups=groups)
    return output.squeeze(0).t()


def convolve_within(
    values: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: int,
    dilation: int,
) -> Tensor | None:
    """Return the convolution of each sequence with zeros around it, as many rows as ``values``;
    None where :func:`convolve_rows` of a row with gaps is faster, or the only way.

    The values are convolved where they are. Windows that reach beyond an end of their sequence are
    few, and are computed again from copies with zeros.
    """
    parts = [part for part in (values, weight, bias) if part is not None]
    total = values.shape[0]
    size = weight.shape[2]
    reach = dilation * (size - 1)
    is_long = total > max(reach, _LONG * reach * (offsets.shape[0] - 1))
    if not (is_long and _has_products(parts) and runs_at_once(values, offsets)):
        return None
    result: Tensor = _RowWindows.apply(values, weight, bias, 1, dilation, left, total)  # type: ignore[no-untyped-call]
    if size == 1:
        return result
    rows, taps, is_real = _borders(offsets.numpy(), left, reach - left, dilation)
    elements = values.index_select(0, taps.view(-1)).view(*taps.shape, -1)
    # Not a product with zeros, in which a NaN of another sequence would stay.
    windows = torch.where(is_real.unsqueeze(-1), elements, 0).flatten(1)
    outputs = F.linear(windows, weight.permute(0, 2, 1).flatten(1), bias)
    return result.index_copy_(0, rows, outputs)


# The least number of elements for each window that is computed again.
_LONG = 4


def _borders(offsets: Any, left: int, right: int, dilation: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows whose windows reach beyond their sequence, ``(M,)``, the elements of these
    windows, ``(M, size)``, and whether these are of the sequence.
    """
    starts = offsets[:-1, None]
    ends = offsets[1:, None]
    lefts = starts + np.arange(left)
    rights = ends - 1 - np.arange(right)
    rows = np.concatenate([lefts, rights], 1)
    # A short sequence has no row twice.
    chosen = np.concatenate([lefts < ends, rights >= starts + left], 1)
    owners = chosen.nonzero()[0]
    rows = rows[chosen]
    taps = rows[:, None] + np.arange(-left, right + 1, dilation)
    is_real = (taps >= starts[owners]) & (taps < ends[owners])
    taps = np.where(is_real, taps, rows[:, None])
    return torch.from_numpy(rows), torch.from_numpy(taps), torch.from_numpy(is_real)


def _has_products(parts: list[Tensor]) -> bool:
    """Return True if :class:`_RowWindows` supports tensors and is faster than torch's kernels."""
    return (
        not records_operators()
        and not is_jit_traced()
        and all(part.is_cpu for part in parts)
        and {part.dtype for part in parts} in ({torch.float32}, {torch.float64})
        and not torch.is_autocast_enabled("cpu")
        and not are_transformed(parts)
        and not has_tangent(parts)
    )


def _products(row: Tensor, size: int, stride: int, dilation: int) -> Iterator[_WindowProduct]:
    """Yield the products of a row ``(R, C)``, contiguous, whose sum is the convolution."""
    width = row.shape[1]
    count = (row.shape[0] - dilation * (size - 1) - 1) // stride + 1
    if dilation > 1:
        for tap in range(size):
            elements = row[tap * dilation :: stride][:count]
            yield _WindowProduct(slice(None), slice(tap * width, (tap + 1) * width), elements)
        return
    apart = -(-size // stride)
    for first in range(min(apart, count)):
        shape = (len(range(first, count, apart)), size * width)
        start = row.storage_offset() + first * stride * width
        elements = row.as_strided(shape, (apart * stride * width, 1), start)
        yield _WindowProduct(slice(first, None, apart), slice(None), elements)


class _RowWindows(torch.autograd.Function):
    """The convolution of a row, its first window at row ``before`` of ``rows``; None for as many as
    there are windows. The others are the bias, and callers replace them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        row: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: int,
        dilation: int,
        before: int,
        rows: int | None,
    ) -> Tensor:
        row = row.contiguous()
        outputs, _, size = weight.shape
        count = (row.shape[0] - dilation * (size - 1) - 1) // stride + 1
        matrix = weight.permute(2, 1, 0).flatten(0, 1)
        start = row.new_zeros(outputs) if bias is None else bias
        result = start.expand(count if rows is None else rows, -1).contiguous()
        inner = result[before : before + count]
        for product in _products(row, size, stride, dilation):
            inner[product.windows].addmm_(product.elements, matrix[product.taps])
        ctx.sizes = (stride, dilation, slice(before, before + count), bias is not None)
        ctx.save_for_backward(row, weight)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        row, weight = ctx.saved_tensors
        stride, dilation, inside, has_bias = ctx.sizes
        needs = (*ctx.needs_input_grad[:2], has_bias and ctx.needs_input_grad[2])
        grad = grad[inside]
        nothing = (None,) * 4
        if torch.is_grad_enabled():
            return *_differentiable(grad, row, weight, stride, dilation, needs), *nothing
        matrix = weight.permute(2, 1, 0).flatten(0, 1)
        of_row = torch.zeros_like(row) if needs[0] else None
        of_matrix = torch.zeros_like(matrix) if needs[1] else None
        size = weight.shape[2]
        if of_row is not None:
            for product in _products(of_row, size, stride, dilation):
                product.elements.addmm_(grad[product.windows], matrix[product.taps].t())
        if of_matrix is not None:
            for product in _products(row, size, stride, dilation):
                of_matrix[product.taps].addmm_(product.elements.t(), grad[product.windows])
        of_weight = None if of_matrix is None else of_matrix.unflatten(0, (size, -1))
        of_weight = None if of_weight is None else of_weight.permute(2, 1, 0).contiguous()
        return of_row, of_weight, grad.sum(0) if needs[2] else None, *nothing


def _differentiable(
    grad: Tensor,
    row: Tensor,
    weight: Tensor,
    stride: int,
    dilation: int,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients by torch's own function, which has derivatives of any order."""
    of_steps, of_weight, of_bias = torch.ops.aten.convolution_backward(
        grad.t().unsqueeze(0),
        row.t().unsqueeze(0),
        weight,
        [weight.shape[0]],
        [stride],
        [0],
        [dilation],
        False,
        [0],
        1,
        list(needs),
    )
    return None if of_steps is None else of_steps.squeeze(0).t(), of_weight, of_bias
