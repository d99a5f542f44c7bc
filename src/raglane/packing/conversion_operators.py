"""Conversions of padded tensors to flat values and back as operators, for compilers.

The number of elements depends on the lengths, so it is a data-dependent size in a graph. The module
is imported only when needed, because registering operators is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.operators import operator
from raglane.packing.flat_values import (
    find_padded,
    flat_to_padded,
    flatten_padded,
    layout_of_padded,
)
from raglane.segments.indexing import take_rows


def _shapes_of_flat(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    total = torch.library.get_ctx().new_dynamic_size(min=0)
    offsets = lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int64, device=padded.device)
    return padded.new_empty(total, *padded.shape[2:]), offsets


@operator("raglane::padded_to_flat", _shapes_of_flat)
def padded_to_flat(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the elements of a padded tensor, ``(N, *features)``, and offsets ``(B + 1,)``; checks
    the lengths.
    """
    moved = flatten_padded(padded, lengths, batch_first)
    if moved is not None:
        return moved[0], moved[1].offsets
    elements = find_padded(padded, lengths, batch_first, argument="input")
    return take_rows(elements.rows, elements.index), elements.offsets


def _shape_of_padded(flat: Tensor, offsets: Tensor, batch_first: bool, steps: int) -> Tensor:
    count = offsets.shape[0] - 1
    shape = (count, steps) if batch_first else (steps, count)
    return flat.new_empty(*shape, *flat.shape[1:])


@operator("raglane::padded_from_flat", _shape_of_padded)
def padded_from_flat(flat: Tensor, offsets: Tensor, batch_first: bool, steps: int) -> Tensor:
    """Return a padded tensor of ``steps`` steps with elements ``(N, *features)``, and zeros."""
    if not flat.is_cpu:
        return flat_to_padded(flat, offsets, steps, batch_first)
    return layout_of_padded(offsets, steps, batch_first).from_flat(flat)


def _shape_of_elements(padded: Tensor, offsets: Tensor, batch_first: bool, total: int) -> Tensor:  # noqa: ARG001
    return padded.new_empty(total, *padded.shape[2:])


@operator("raglane::padded_elements", _shape_of_elements)
def _elements(padded: Tensor, offsets: Tensor, batch_first: bool, total: int) -> Tensor:
    """Return the elements ``(total, *features)`` of a padded tensor with known offsets; for the
    backward pass.
    """
    if not padded.is_cpu:
        elements = find_padded(padded, offsets.diff(), batch_first)
        return take_rows(elements.rows, elements.index)
    return layout_of_padded(offsets, padded.shape[1 if batch_first else 0], batch_first).to_flat(
        padded, total
    )


def _save_to_flat(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    padded, offsets, ctx.batch_first = inputs[:3]
    ctx.steps = padded.shape[1 if ctx.batch_first else 0]
    ctx.save_for_backward(output[1] if isinstance(output, tuple) else offsets)


def _backward_to_flat(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    grad_padded = padded_from_flat(grad, *ctx.saved_tensors, ctx.batch_first, ctx.steps)
    return grad_padded, *[None] * (len(ctx.needs_input_grad) - 1)


def _save_from_flat(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    flat, offsets, ctx.batch_first, _ = inputs
    ctx.total = flat.shape[0]
    ctx.save_for_backward(offsets)


def _backward_from_flat(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _elements(grad, *ctx.saved_tensors, ctx.batch_first, ctx.total), None, None, None


padded_to_flat.register_autograd(_backward_to_flat, setup_context=_save_to_flat)
_elements.register_autograd(_backward_to_flat, setup_context=_save_to_flat)
padded_from_flat.register_autograd(_backward_from_flat, setup_context=_save_from_flat)
