"""The norm of heads times a weight and a gate: one pass over the rows, and one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.derivatives import gradients_of, view_of
from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.native.library import (
    DTYPES,
    call,
    missing_kernels,
    packer,
    program_preamble,
)
from raglane.native.memory import pointer, readable

_NAMES = ("y", "gate", "weight", "grad")


def _run(
    tensors: tuple[Tensor, ...], settings: tuple[int, float], written: list[Tensor | None]
) -> None:
    """Call C with rows ``(N, H * V)``; ``written`` are the output and the gradients, or None."""
    rows, columns = tensors[0].shape
    heads, eps = settings
    dtype = tensors[0].dtype
    shapes = [(columns,) if name == "weight" else (rows, columns) for name in _NAMES]
    arguments = zip(_NAMES, tensors, shapes, strict=False)
    addresses, _owners = readable(*[(*argument, dtype) for argument in arguments])
    addresses += [0] * (len(_NAMES) - len(addresses))
    head = (*program_preamble(dtype), rows, heads, columns // heads, eps)
    pack = packer("raglane_gated_norm")
    call("raglane_gate_norm", pack(*head, *addresses, *map(pointer, written)))


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple[int, float], *tensors: Tensor) -> Tensor:
        ctx.settings = settings
        ctx.save_for_backward(*tensors)
        output = tensors[0].new_empty(tensors[0].shape)
        _run(tensors, settings, [output, None, None, None])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs: Any = [view_of(tensor) for tensor in tensors]
            return None, *gradients_of([_plain(ctx.settings, *inputs)], inputs, [grad], True)
        grads = [tensor.new_empty(tensor.shape) for tensor in tensors]
        _run((*tensors, grad), ctx.settings, [None, *grads])
        return None, *grads


def _plain(settings: tuple[int, float], y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    heads, eps = settings
    parts = y.unflatten(1, (heads, -1))
    return F.layer_norm(parts, parts.shape[2:], eps=eps).flatten(1) * weight * torch.sigmoid(gate)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``norm(y) * weight * sigmoid(gate)`` of ``(N, H, V)``, ``(N, H * V)`` and ``(H * V,)``.

    The mean of a head is subtracted, and it is divided by the root of its variance and ``eps``.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    tensors = [each.to(dtype) for each in (y.flatten(1), gate, weight)]
    settings = y.shape[1], eps
    has_kernel = y.is_cpu and y.numel() > 0 and dtype in DTYPES and missing_kernels() is None
    if has_kernel and not (records_operators() or are_transformed(tensors) or has_tangent(tensors)):
        result: Tensor = _GatedNorm.apply(settings, *tensors)  # type: ignore[no-untyped-call]
    else:
        result = _plain(settings, *tensors)
    return result.to(gate.dtype)
