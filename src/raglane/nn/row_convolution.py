"""A convolution of one long row of elements, as matrix products of its rows.

torch's convolutions read and write ``(channels, steps)``, so that those of elements ``(steps,
channels)`` are reordered twice. Here the elements of a window are a row of a matrix that is a view:
of every n-th window, so that windows of one product share no element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.tracing import (
    are_transformed,
    has_tangent,
    is_jit_traced,
    records_operators,
)


class _Product(NamedTuple):
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
        result: Tensor = _Convolution.apply(row, weight, bias, stride, dilation)  # type: ignore[no-untyped-call]
        return result
    steps = row.t().unsqueeze(0)
    output = F.conv1d(steps, weight, bias, stride=stride, dilation=dilation, groups=groups)
    return output.squeeze(0).t()


def _has_products(parts: list[Tensor]) -> bool:
    """Return True if :class:`_Convolution` supports tensors and is faster than torch's kernels."""
    return (
        not records_operators()
        and not is_jit_traced()
        and all(part.is_cpu for part in parts)
        and {part.dtype for part in parts} in ({torch.float32}, {torch.float64})
        and not torch.is_autocast_enabled("cpu")
        and not are_transformed(parts)
        and not has_tangent(parts)
    )


def _products(row: Tensor, size: int, stride: int, dilation: int) -> Iterator[_Product]:
    """Yield the products of a row ``(R, C)``, contiguous, whose sum is the convolution."""
    width = row.shape[1]
    count = (row.shape[0] - dilation * (size - 1) - 1) // stride + 1
    if dilation > 1:
        for tap in range(size):
            elements = row[tap * dilation :: stride][:count]
            yield _Product(slice(None), slice(tap * width, (tap + 1) * width), elements)
        return
    apart = -(-size // stride)
    for first in range(min(apart, count)):
        shape = (len(range(first, count, apart)), size * width)
        start = row.storage_offset() + first * stride * width
        elements = row.as_strided(shape, (apart * stride * width, 1), start)
        yield _Product(slice(first, None, apart), slice(None), elements)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, row: Tensor, weight: Tensor, bias: Tensor | None, stride: int, dilation: int
    ) -> Tensor:
        row = row.contiguous()
        outputs, _, size = weight.shape
        count = (row.shape[0] - dilation * (size - 1) - 1) // stride + 1
        matrix = weight.permute(2, 1, 0).flatten(0, 1)
        start = row.new_zeros(outputs) if bias is None else bias
        result = start.expand(count, -1).contiguous()
        for product in _products(row, size, stride, dilation):
            result[product.windows].addmm_(product.elements, matrix[product.taps])
        ctx.sizes = (stride, dilation, bias is not None)
        ctx.save_for_backward(row, weight)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        row, weight = ctx.saved_tensors
        stride, dilation, has_bias = ctx.sizes
        needs = (*ctx.needs_input_grad[:2], has_bias and ctx.needs_input_grad[2])
        if torch.is_grad_enabled():
            return *_differentiable(grad, row, weight, stride, dilation, needs), None, None
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
        return of_row, of_weight, grad.sum(0) if needs[2] else None, None, None


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
