"""Functions of rows whose bits depend on no other row, and their gradients on no thread.

Torch computes the last numbers of an array, which do not fill a vector, differently in its sigmoid
and softplus, and divides products and sums by their sizes. Functions and sums are those of the
kernels, so that a step in one call has their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.kernels.cpu.programs import outer_products, times
from raglane.kernels.cpu.recurrences import wide
from raglane.native.library import DTYPES, library, missing_kernels

Derivative = Callable[[Tensor], Tensor]


def _is_recorded(*parts: Tensor | None) -> bool:
    """Return True if torch's own operators are needed."""
    tensors = [tensor for tensor in parts if tensor is not None]
    return records_operators() or are_transformed(tensors) or has_tangent(tensors)


def _has_kernel(rows: Tensor) -> bool:
    return rows.is_cpu and rows.dtype in DTYPES and rows.numel() > 0 and missing_kernels() is None


def _wide(rows: Tensor) -> Tensor:
    return wide(rows).contiguous()


def _by_torch(rows: Tensor, weight: Tensor) -> Tensor:
    if weight.shape[0] == 1:
        return F.linear(rows, weight[0])
    columns = rows.unflatten(1, (weight.shape[0], -1)).transpose(0, 1)
    return torch.bmm(columns, weight.transpose(1, 2)).transpose(0, 1).flatten(1)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    if not _has_kernel(rows):
        return _by_torch(rows, weight)
    return times(_wide(rows), wide(weight)).to(rows.dtype)


def _outer(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """Return the sums over the elements of products of rows, ``(G, M, D)``."""
    if not torch.is_grad_enabled() and _has_kernel(left):
        products, _ = outer_products(_wide(left), _wide(right), groups=groups)
        if products is not None:
            return products.to(left.dtype)
    columns = [each.unflatten(1, (groups, -1)).transpose(0, 1) for each in (left, right)]
    return torch.bmm(columns[0].transpose(1, 2), columns[1])


def _column_sums(rows: Tensor) -> Tensor:
    if torch.is_grad_enabled() or not _has_kernel(rows):
        return rows.sum(0)
    _, sums = outer_products(_wide(rows), None, sums=True)
    return rows.sum(0) if sums is None else sums.to(rows.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        output = _times(rows, weight)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        multiply = _by_torch if torch.is_grad_enabled() else _times
        of_rows = multiply(grad, weight.transpose(1, 2)) if needs_rows else None
        of_weight = _outer(grad, rows, weight.shape[0]) if needs_weight else None
        return of_rows, of_weight, _column_sums(grad) if needs_bias else None


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``rows @ weight.T + bias`` for ``(N, D)``, ``(M, D)`` and ``(M,)``.

    A weight ``(G, M, D)`` multiplies G groups of D columns, each with a matrix of its own.
    """
    weight = weight if weight.dim() == 3 else weight.unsqueeze(0)
    if rows.dtype is not weight.dtype or _is_recorded(rows, weight, bias):
        output = _by_torch(rows, weight)
        return output if bias is None else output + bias
    result: Tensor = _Product.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return result


def sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, ``(..., 1)`` of ``(..., P)``, in the order of its numbers."""
    ones = torch.ones((1, rows.shape[-1]), dtype=rows.dtype, device=rows.device)
    return product(rows.reshape(-1, rows.shape[-1]), ones).view(*rows.shape[:-1], 1)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, parameter: Tensor, count: int) -> Tensor:
        return parameter.expand(count, -1)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _column_sums(grad), None


def _repeated(parameter: Tensor, rows: Tensor) -> Tensor:
    """Return a parameter for each row, whose gradient is a sum in one order."""
    if _is_recorded(rows, parameter):
        return parameter
    result: Tensor = _Repeated.apply(parameter, rows.shape[0])  # type: ignore[no-untyped-call]
    return result


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Return ``rows * factors`` for ``(N, E)`` and ``(E,)``."""
    return rows * _repeated(factors, rows)


def shifted(rows: Tensor, terms: Tensor) -> Tensor:
    """Return ``rows + terms`` for ``(N, E)`` and ``(E,)``."""
    return rows + _repeated(terms, rows)


def _of_torch(name: str, rows: Tensor) -> Tensor:
    """Return a function of numbers by torch's operators."""
    if name == "softplus":
        # Torch's own is the identity above 20.
        return torch.logaddexp(rows, torch.zeros_like(rows))
    if name == "gelu":
        return F.gelu(rows, approximate="tanh")
    function: Any = getattr(torch, name, None) or getattr(F, name)
    result: Tensor = function(rows)
    return result


def _applied(name: str, rows: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return a function of numbers, with the bits that it has in a step of the kernels, times a
    factor.
    """
    if _has_kernel(rows):
        by = None if factor is None else _wide(factor).resolve_neg()
        return library().apply(name, _wide(rows).resolve_neg(), by).to(rows.dtype)
    if name == "sigmoid":
        return rows.neg().exp_().add_(1).reciprocal_()
    result = _of_torch(name, rows)
    return result if factor is None else result * factor


class _Function(torch.autograd.Function):
    """A function of numbers whose derivative is one of its results."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, derivative: Derivative) -> Tensor:
        result = _applied(name, rows)
        ctx.save_for_backward(result)
        ctx.derivative = derivative
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        return grad * ctx.derivative(result), None, None


class _Gated(torch.autograd.Function):
    """A function of numbers whose derivative is one of them, times a factor."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, factor: Tensor | None, name: str, derivative: Derivative
    ) -> Tensor:
        ctx.save_for_backward(rows, factor)
        ctx.options = name, derivative
        return _applied(name, rows, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, factor = ctx.saved_tensors
        of_rows = grad * ctx.options[1](rows)
        if factor is None:
            return of_rows, None, None, None
        return of_rows * factor, grad * _gated(rows, None, *ctx.options), None, None


def _function(name: str, rows: Tensor, derivative: Derivative) -> Tensor:
    if _is_recorded(rows):
        return _of_torch(name, rows)
    result: Tensor = _Function.apply(rows, name, derivative)  # type: ignore[no-untyped-call]
    return result


def _gated(rows: Tensor, factor: Tensor | None, name: str, derivative: Derivative) -> Tensor:
    if _is_recorded(rows, factor):
        result = _of_torch(name, rows)
        return result if factor is None else result * factor
    gated: Tensor = _Gated.apply(rows, factor, name, derivative)  # type: ignore[no-untyped-call]
    return gated


def sigmoid(rows: Tensor) -> Tensor:
    """Return the sigmoid of numbers."""
    return _function("sigmoid", rows, lambda result: result - result * result)


def tanh(rows: Tensor) -> Tensor:
    """Return the hyperbolic tangent of numbers."""
    return _function("tanh", rows, lambda result: 1 - result * result)


def expm1(rows: Tensor) -> Tensor:
    """Return ``exp(rows) - 1``."""
    return _function("expm1", rows, lambda result: result + 1)


def softplus(rows: Tensor) -> Tensor:
    """Return ``log(1 + exp(rows))``."""
    return _function("softplus", rows, lambda result: -expm1(-result))


def root(rows: Tensor) -> Tensor:
    """Return square roots, rounded to the nearest, which torch's are not in every place."""
    return _function("sqrt", rows, lambda result: 0.5 / result)


def bounded_root(squares: Tensor) -> Tensor:
    """Return square roots, whose derivative is at most 1,000."""
    return _function("sqrt", squares, lambda result: 0.5 / result.clamp(min=0.0005))


def silu(rows: Tensor) -> Tensor:
    """Return ``rows * sigmoid(rows)``."""
    return _gated(rows, None, "silu", _slope_of_silu)


def _slope_of_silu(rows: Tensor) -> Tensor:
    gates = sigmoid(rows)
    return torch.addcmul(gates, rows, gates - gates * gates)


def gelu(rows: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return the Gaussian error linear unit by a hyperbolic tangent, times a factor."""
    return _gated(rows, factor, "gelu", _slope_of_gelu)


def _slope_of_gelu(rows: Tensor) -> Tensor:
    squares = rows * rows
    factor = math.sqrt(2 / math.pi)
    bent = tanh(rows * (factor + factor * 0.044715 * squares))
    slope = rows * (0.5 * factor + 1.5 * factor * 0.044715 * squares)
    return torch.addcmul(0.5 + 0.5 * bent, slope, 1 - bent * bent)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, eps: float) -> Tensor:
        result = rows * rows
        inverse = result.sum(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(rows, inverse, out=result)
        ctx.save_for_backward(rows, result, inverse)
        ctx.eps = eps
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, result, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            inverse = ((rows * rows).sum(-1, keepdim=True) + ctx.eps).rsqrt()
        along = (grad * result).sum(-1, keepdim=True)
        return torch.addcmul(grad, result, along, value=-1).mul_(inverse), None


def unit(rows: Tensor, eps: float) -> Tensor:
    """Return rows divided by the root of the sum of their squares and ``eps``."""
    if _is_recorded(rows):
        return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + eps)
    result: Tensor = _Unit.apply(rows, eps)  # type: ignore[no-untyped-call]
    return result
