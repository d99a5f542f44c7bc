"""The norm of heads times a weight and a gate: one pass over the rows, and one backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class GatedNorm(NamedTuple):
    """The norm of the heads of rows, times a weight and a gate."""

    heads: int
    eps: float
    # The mean of a head is subtracted.
    is_centred: bool = False
    # Times the gate, too.
    is_silu: bool = False

    def __call__(self, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return ``norm(y) * weight * sigmoid(gate)`` of ``(N, H * V)``, ``(N, H * V)`` and
        ``(H * V,)``, in the dtype of the gate.
        """
        dtype = torch.promote_types(gate.dtype, torch.float32)
        tensors = [each.to(dtype) for each in (y, gate, weight)]
        has_kernel = y.is_cpu and y.numel() > 0 and dtype in DTYPES and missing_kernels() is None
        is_plain = records_operators() or are_transformed(tensors) or has_tangent(tensors)
        if is_plain or not has_kernel:
            return self.plain(*tensors).to(gate.dtype)
        result: Tensor = _NormFunction.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return result.to(gate.dtype)

    def plain(self, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Return the same by operators of torch."""
        parts = y.unflatten(1, (self.heads, -1))
        if self.is_centred:
            parts = parts - parts.mean(2, keepdim=True)
        parts = parts * torch.rsqrt(parts.square().mean(2, keepdim=True) + self.eps)
        gates = F.silu(gate) if self.is_silu else torch.sigmoid(gate)
        return parts.flatten(1) * weight * gates

    def run(self, tensors: Sequence[Tensor], written: Sequence[Tensor | None]) -> None:
        """Call C with y, gate, weight and, backward, the gradient; ``written`` are the output and
        the gradients, or None.
        """
        rows, columns = tensors[0].shape
        dtype = tensors[0].dtype
        shapes = [(columns,) if name == "weight" else (rows, columns) for name in _NAMES]
        arguments = zip(_NAMES, tensors, shapes, strict=False)
        addresses, _owners = readable(*[(*argument, dtype) for argument in arguments])
        addresses += [0] * (len(_NAMES) - len(addresses))
        sizes = (rows, self.heads, columns // self.heads, self.is_centred, self.is_silu, self.eps)
        fields = (*program_preamble(dtype), *sizes, *addresses, *map(pointer, written))
        call("raglane_gate_norm", packer("raglane_gated_norm")(*fields))


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: GatedNorm, *tensors: Tensor) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(*tensors)
        output = tensors[0].new_empty(tensors[0].shape)
        norm.run(tensors, [output, None, None, None])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs: Any = [view_of(tensor) for tensor in tensors]
            return None, *gradients_of([ctx.norm.plain(*inputs)], inputs, [grad], True)
        grads = [tensor.new_empty(tensor.shape) for tensor in tensors]
        ctx.norm.run((*tensors, grad), [None, *grads])
        return None, *grads
