"""The same as :mod:`raglane.kernels.cpu.backend` as operators, for ``torch.compile``.

Apart from it, because to register operators with torch takes longer than to import the rest of Raglane.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.messages import message
from raglane.cells import CELLS
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.contract import Request
from raglane.kernels.cpu.layer import Given, Layer, Saved, layer_of
from raglane.native.library import cell_facts

# An operator's arguments are fixed in number: two states, and two directions of five weights at most.
_WEIGHTS = 10
_PADDED = 2 + _WEIGHTS
_TENSORS = "Tensor h, Tensor? c, " + ", ".join(f"Tensor? w{index}" for index in range(_WEIGHTS))


def _padded(request: Request, weights: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """States and weights, with None for those that the layer does not have."""
    states = (*request.initial(), None)[:2]
    return (*states, *weights, *([None] * (_WEIGHTS - len(weights))))


def _layer_of(
    cell: str, values: Tensor, offsets: Tensor, padded: tuple[Tensor | None, ...], checkpoint_every: int
) -> tuple[Layer, tuple[Tensor | None, ...]]:
    """What :func:`_padded` took apart, and its tensors. The operator can be called by anybody, with anything."""
    if cell not in cell_facts():
        raise ArgumentError(message("cell", repr(cell), f"one of {', '.join(cell_facts())}", "choose one of them"))
    states = tuple(part for part in padded[:2] if part is not None)
    for name, part in zip("hc", states, strict=False):
        if part.dim() != 3:
            rule = "a tensor (directions, sequences, size)"
            raise ShapeError(message(name, f"shape {tuple(part.shape)}", rule, "pass one state per sequence"))
    if checkpoint_every < 0:
        rule = "0, or the number of steps that are recomputed at a time"
        raise ArgumentError(message("checkpoint_every", repr(checkpoint_every), rule, "pass 0 or more"))
    directions, each = states[0].shape[0], len(CELLS[cell].weights_type._fields)
    weights, rest = padded[2:][: each * directions], padded[2:][each * directions :]
    if any(part is not None for part in rest):
        got, rule = f"{directions} directions, and weights for more", f"{each} weights for each direction of h"
        raise ArgumentError(message("weights", got, rule, "pass a state for both directions"))
    tensors = (values, *states, *weights)
    sizes = tuple(int(part.shape[2]) for part in states)  # no symbol: weights have sizes of their own
    layer = layer_of(cell, offsets, tensors, len(weights), sizes, int(directions), checkpoint_every=checkpoint_every)
    return layer, tensors


@torch.library.custom_op(
    "raglane::recurrence",
    mutates_args=(),
    schema=f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, bool need_output, bool save, bool need_c,"
    " int checkpoint_every) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def recurrence(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Output, final h, final c, saved gates, c after each element; absent parts are empty tensors."""
    *padded, need_output, save, need_c, every = rest
    layer, tensors = _layer_of(cell, values, offsets, tuple(padded), every)
    ran = layer.forward(layer.admit(offsets, tensors), need_output=need_output, save=save, need_c=need_c)
    found = (ran.output, *(*ran.final, None)[:2], ran.gates, ran.c_states)
    return tuple([values.new_empty(0) if part is None else part for part in found])


@recurrence.register_fake
def _(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *padded, need_output, save, need_c, every = rest
    h, c = padded[:2]
    layer, _ = _layer_of(cell, values, offsets, tuple(padded), every)
    gates, c_states = layer.saved_shapes(values.shape[0])
    return (
        values.new_empty(values.shape[0], h.shape[0] * h.shape[2]) if need_output or save else values.new_empty(0),
        h.new_empty(h.shape),
        values.new_empty(0) if c is None else c.new_empty(c.shape),
        values.new_empty(gates) if save else values.new_empty(0),
        values.new_empty(c_states) if save or need_c else values.new_empty(0),
    )


@torch.library.custom_op(
    "raglane::recurrence_backward",
    mutates_args=(),
    schema=f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, Tensor output, Tensor gates, Tensor c_states,"
    " Tensor? grad_output, Tensor? grad_c_states, Tensor? grad_h, Tensor? grad_c, bool[] wanted, int checkpoint_every)"
    " -> Tensor[]",
)
def _backward_op(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:
    """The gradients of (values, h, c, ten weights); those not wanted are empty."""
    padded, (output, gates, c_states, grad_output, grad_c_states, *grad_final) = rest[:_PADDED], rest[_PADDED:-2]
    wanted, every = rest[-2:]
    layer, tensors = _layer_of(cell, values, offsets, padded, every)
    states, weights = len(layer.initial(tensors)), layer.weights
    given = Given(grad_output, grad_c_states, tuple(grad_final[:states]))
    kept = (wanted[0], *wanted[1 : 1 + states], *wanted[3 : 3 + weights])
    if len(wanted) != 1 + _PADDED:
        rule = f"{1 + _PADDED} bools: for the values, two states and {_WEIGHTS} weights"
        raise ArgumentError(message("wanted", f"{len(wanted)} bools", rule, "pass one for each"))
    saved = Saved(output, gates, c_states, is_shared=True)
    found = layer.backward(offsets, tensors, saved, given, kept, overwrite=False)
    by_place: list[Tensor | None] = [*found[: 1 + states], *([None] * (2 - states)), *found[1 + states :]]
    by_place += [None] * (_WEIGHTS - weights)
    return [
        values.new_empty(0) if grad is None or not want else grad for grad, want in zip(by_place, wanted, strict=True)
    ]


@_backward_op.register_fake
def _(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:  # noqa: ARG001
    parts, wanted = (values, *rest[:_PADDED]), rest[-2]
    return [
        part.new_empty(part.shape) if want and part is not None else values.new_empty(0)
        for part, want in zip(parts, wanted, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    cell, values, offsets, *rest = inputs
    padded = rest[:_PADDED]
    ctx.cell, ctx.need_c, ctx.every = cell, *rest[-2:]
    ctx.wanted = [part is not None and part.requires_grad for part in (values, *padded)]
    ctx.save_for_backward(values, offsets, *padded, output[0], output[3], output[4])


def _op_backward(ctx: Any, grad_output: Any, grad_h: Any, grad_c: Any, _: Any, grad_c_states: Any) -> tuple[Any, ...]:
    values, offsets, *rest = ctx.saved_tensors
    given = grad_output, grad_c_states if ctx.need_c else None, grad_h, grad_c if rest[1] is not None else None
    found = _backward_op(ctx.cell, values, offsets, *rest, *given, ctx.wanted, ctx.every)
    grads = [grad if want else None for grad, want in zip(found, ctx.wanted, strict=True)]
    return None, grads[0], None, *grads[1:], None, None, None, None


recurrence.register_autograd(_op_backward, setup_context=_setup_context)


def run(
    request: Request, weights: tuple[Tensor | None, ...], *, need_output: bool, save: bool, need_c: bool
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
    """Run a request of one layer by the operator."""
    output, h, c, _, c_states = recurrence(
        request.cell.name,
        request.values,
        request.offsets,
        *_padded(request, weights),
        need_output,
        save,
        need_c,
        request.checkpoint_every if save else 0,
    )
    return output, (h, c)[: len(request.sizes)], c_states if need_c else None
