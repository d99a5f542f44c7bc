"""Functions of rows whose bits depend on no other row, and their gradients on no thread.

Torch computes the last numbers of an array, which do not fill a vector, differently in its sigmoid
and softplus, and divides products and sums by their sizes. Functions and sums are those of the
kernels, so that a step in one call has their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.kernels.cpu.programs import outer_products, times
from raglane.native.library import DTYPES, library, missing_kernels


def _is_recorded(*parts: Tensor | None) -> bool:
    """Return True if torch's own operators are needed."""
    tensors = [tensor for tensor in parts if tensor is not None]
    return records_operators() or are_transformed(tensors) or has_tangent(tensors)


def _has_kernel(rows: Tensor) -> bool:
    return rows.is_cpu and rows.dtype in DTYPES and rows.numel() > 0 and missing_kernels() is None


def _wide(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()


def _by_torch(rows: Tensor, weight: Tensor) -> Tensor:
    if weight.shape[0] == 1:
        return F.linear(rows, weight[0])
    columns = rows.unflatten(1, (weight.shape[0], -1)).transpose(0, 1)
    return torch.bmm(columns, weight.transpose(1, 2)).transpose(0, 1).flatten(1)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    if not _has_kernel(rows):
        return _by_torch(rows, weight)
    return times(_wide(rows), _wide(weight)).to(rows.dtype)


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


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(rows, factors)
        return rows * factors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, factors = ctx.saved_tensors
        return grad * factors, _column_sums(grad * rows)


def sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, ``(..., 1)`` of ``(..., P)``, in the order of its numbers."""
    ones = torch.ones((1, rows.shape[-1]), dtype=rows.dtype, device=rows.device)
    return product(rows.reshape(-1, rows.shape[-1]), ones).view(*rows.shape[:-1], 1)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Return ``rows * factors`` for ``(N, E)`` and ``(E,)``."""
    if _is_recorded(rows, factors):
        return rows * factors
    result: Tensor = _Scaled.apply(rows, factors)  # type: ignore[no-untyped-call]
    return result


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, rows: Tensor, terms: Tensor) -> Tensor:
        return rows + terms

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, _column_sums(grad)


def shifted(rows: Tensor, terms: Tensor) -> Tensor:
    """Return ``rows + terms`` for ``(N, E)`` and ``(E,)``."""
    if _is_recorded(rows, terms):
        return rows + terms
    result: Tensor = _Shifted.apply(rows, terms)  # type: ignore[no-untyped-call]
    return result


# Functions of the kernels, and their derivatives from their results.
_DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda result: result - result * result,
    "tanh": lambda result: 1 - result * result,
    "expm1": lambda result: result + 1,
    "sqrt": lambda result: 0.5 / result,
}


def _applied(name: str, rows: Tensor) -> Tensor:
    """Return a function of numbers, with the bits that it has in a step of the kernels."""
    if _has_kernel(rows):
        return library().apply(name, _wide(rows).resolve_neg()).to(rows.dtype)
    if name == "sigmoid":
        return rows.neg().exp_().add_(1).reciprocal_()
    if name == "softplus":
        return _plain_softplus(rows)
    result: Tensor = getattr(torch, name)(rows)
    return result


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str) -> Tensor:
        result = _applied(name, rows)
        ctx.save_for_backward(result)
        ctx.name = name
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return grad * _DERIVATIVES[ctx.name](result), None


def _function(name: str, rows: Tensor) -> Tensor:
    if _is_recorded(rows):
        recorded: Tensor = getattr(torch, name)(rows)
        return recorded
    result: Tensor = _Function.apply(rows, name)  # type: ignore[no-untyped-call]
    return result


def sigmoid(rows: Tensor) -> Tensor:
    """Return the sigmoid of numbers."""
    return _function("sigmoid", rows)


def tanh(rows: Tensor) -> Tensor:
    """Return the hyperbolic tangent of numbers."""
    return _function("tanh", rows)


def expm1(rows: Tensor) -> Tensor:
    """Return ``exp(rows) - 1``."""
    return _function("expm1", rows)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _applied("sigmoid", rows).mul_(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        gates = sigmoid(rows)
        if torch.is_grad_enabled():
            return grad * gates * (1 + rows * (1 - gates))
        return (1 - gates).mul_(rows).add_(1).mul_(gates).mul_(grad)


def silu(rows: Tensor) -> Tensor:
    """Return ``rows * sigmoid(rows)``."""
    if _is_recorded(rows):
        return rows * torch.sigmoid(rows)
    result: Tensor = _Silu.apply(rows)  # type: ignore[no-untyped-call]
    return result


def _plain_softplus(rows: Tensor) -> Tensor:
    # torch's own is the identity above 20.
    return torch.logaddexp(rows, torch.zeros_like(rows))


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _applied("softplus", rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return grad * sigmoid(rows)


def softplus(rows: Tensor) -> Tensor:
    """Return ``log(1 + exp(rows))``."""
    if _is_recorded(rows):
        return _plain_softplus(rows)
    result: Tensor = _Softplus.apply(rows)  # type: ignore[no-untyped-call]
    return result


def root(rows: Tensor) -> Tensor:
    """Return square roots, rounded to the nearest, which torch's are not in every place."""
    return _function("sqrt", rows)


class _BoundedRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, squares: Tensor) -> Tensor:
        ctx.save_for_backward(squares)
        return _applied("sqrt", squares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (squares,) = ctx.saved_tensors
        return grad / (4 * squares).clamp(min=1e-6).sqrt()


def bounded_root(squares: Tensor) -> Tensor:
    """Return square roots, whose derivative is at most 1,000."""
    if _is_recorded(squares):
        return squares.sqrt()
    result: Tensor = _BoundedRoot.apply(squares)  # type: ignore[no-untyped-call]
    return result


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
