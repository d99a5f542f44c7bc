"""The layer of :mod:`raglane.kernels.cpu.backend` as operators, for ``torch.compile``.

A separate module, imported only when needed: registering operators takes longer than importing the
rest of Raglane.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from raglane._utils.operators import operator
from raglane.cells import CELLS
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.contract import Request
from raglane.kernels.cpu.layer import Layer, OutputGrads, Saved, layer_of
from raglane.native.library import cell_facts

# An operator has a fixed number of arguments: at most two states, and two directions of five
# weights.
_WEIGHTS = 10
_PADDED = 2 + _WEIGHTS
_TENSORS = "Tensor h, Tensor? c, " + ", ".join(f"Tensor? w{index}" for index in range(_WEIGHTS))


def _layer_of(
    cell: str,
    values: Tensor,
    offsets: Tensor,
    padded: tuple[Tensor | None, ...],
    checkpoint_every: int,
) -> tuple[Layer, tuple[Tensor | None, ...]]:
    """Return the layer and the tensors for arguments of the operators, which users can call too."""
    if cell not in cell_facts():
        raise ArgumentError(
            "cell", repr(cell), f"one of {', '.join(cell_facts())}", "choose one of them"
        )
    states = tuple(state for state in padded[:2] if state is not None)
    for name, state in zip("hc", states, strict=False):
        if state.dim() != 3:
            rule = "a tensor (directions, sequences, size)"
            raise ShapeError(
                name, f"shape {tuple(state.shape)}", rule, "pass one state per sequence"
            )
    if checkpoint_every < 0:
        rule = "0, or the number of steps that backward recomputes at a time"
        raise ArgumentError("checkpoint_every", repr(checkpoint_every), rule, "pass 0 or more")
    directions = states[0].shape[0]
    each = len(CELLS[cell].weights_type._fields)
    weights = padded[2:][: each * directions]
    rest = padded[2:][each * directions :]
    if any(weight is not None for weight in rest):
        got = f"{directions} directions, and weights for more"
        rule = f"{each} for each direction of h"
        raise ArgumentError("weights", got, rule, "pass a state for both directions")
    tensors = (values, *states, *weights)
    # int, because they may be symbolic while tracing.
    sizes = tuple(int(state.shape[2]) for state in states)
    layer = layer_of(
        cell,
        offsets,
        tensors,
        len(weights),
        sizes,
        int(directions),
        checkpoint_every=checkpoint_every,
    )
    return layer, tensors


def _shapes(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *padded, need_output, save, need_c, every = rest
    h, c = padded[:2]
    layer, _ = _layer_of(cell, values, offsets, tuple(padded), every)
    gates, c_states = layer.saved_shapes(values.shape[0])
    return (
        values.new_empty(values.shape[0], h.shape[0] * h.shape[2])
        if need_output or save
        else values.new_empty(0),
        h.new_empty(h.shape),
        values.new_empty(0) if c is None else c.new_empty(c.shape),
        values.new_empty(gates) if save else values.new_empty(0),
        values.new_empty(c_states) if save or need_c else values.new_empty(0),
    )


@operator(
    "raglane::recurrence",
    _shapes,
    f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, bool need_output, bool save, bool need_c,"
    " int checkpoint_every) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def recurrence(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return output, final h, final c, saved gates, c after each element; empty if missing."""
    *padded, need_output, save, need_c, every = rest
    layer, tensors = _layer_of(cell, values, offsets, tuple(padded), every)
    options = {"need_output": need_output, "save": save, "need_c": need_c}
    result = layer.forward(offsets, tensors, **options)
    results = (result.output, *(*result.final, None)[:2], result.gates, result.c_states)
    return tuple([values.new_empty(0) if tensor is None else tensor for tensor in results])


def _shapes_of_gradients(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:  # noqa: ARG001
    pairs = zip((values, *rest[:_PADDED]), rest[-2], strict=True)
    return [
        values.new_empty(tensor.shape if is_needed and tensor is not None else 0)
        for tensor, is_needed in pairs
    ]


@operator(
    "raglane::recurrence_backward",
    _shapes_of_gradients,
    f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, Tensor output, Tensor gates, Tensor c_states,"
    " Tensor? grad_output, Tensor? grad_c_states, Tensor? grad_h, Tensor? grad_c, bool[] needed, int checkpoint_every)"
    " -> Tensor[]",
)
def _backward_op(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:
    """Return the gradients of (values, h, c, ten weights); empty if they are not needed."""
    *read, needed, every = rest
    padded = tuple(read[:_PADDED])
    output, gates, c_states, grad_output, grad_c_states, *grad_final = read[_PADDED:]
    layer, tensors = _layer_of(cell, values, offsets, padded, every)
    states = len(layer.initial(tensors))
    weights = layer.weights
    if len(needed) != 1 + _PADDED:
        rule = f"{1 + _PADDED} bools: of the values, two states and {_WEIGHTS} weights"
        raise ArgumentError("needed", f"{len(needed)} bools", rule, "pass one for each")
    existing = (*needed[: 1 + states], *needed[3 : 3 + weights])
    output_grads = OutputGrads(grad_output, grad_c_states, tuple(grad_final[:states]))
    saved = Saved(output, gates, c_states, is_shared=True)
    grads = layer.backward(offsets, tensors, saved, output_grads, existing, overwrite=False)
    all_grads = [
        *grads[: 1 + states],
        *[None] * (2 - states),
        *grads[1 + states :],
        *[None] * (_WEIGHTS - weights),
    ]
    pairs = zip(all_grads, needed, strict=True)
    return [
        values.new_empty(0) if grad is None or not is_needed else grad for grad, is_needed in pairs
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.cell, values, offsets, *rest = inputs
    *_, ctx.need_c, ctx.every = rest
    padded = rest[:_PADDED]
    ctx.needed = [tensor is not None and tensor.requires_grad for tensor in (values, *padded)]
    ctx.save_for_backward(values, offsets, *padded, output[0], output[3], output[4])


def _op_backward(
    ctx: Any, grad_output: Any, grad_h: Any, grad_c: Any, _: Any, grad_c_states: Any
) -> tuple[Any, ...]:
    values, offsets, *rest = ctx.saved_tensors
    output_grads = (
        grad_output,
        grad_c_states if ctx.need_c else None,
        grad_h,
        grad_c if rest[1] is not None else None,
    )
    grads = _backward_op(ctx.cell, values, offsets, *rest, *output_grads, ctx.needed, ctx.every)
    grads = [grad if is_needed else None for grad, is_needed in zip(grads, ctx.needed, strict=True)]
    return None, grads[0], None, *grads[1:], None, None, None, None


recurrence.register_autograd(_op_backward, setup_context=_setup_context)


def run(
    request: Request,
    weights: tuple[Tensor | None, ...],
    *,
    need_output: bool,
    save: bool,
    need_c: bool,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
    """Run a request of one layer by the operator."""
    output, h, c, _, c_states = recurrence(
        request.cell.name,
        request.values,
        request.offsets,
        *(*request.initial(), None)[:2],
        *weights,
        *[None] * (_WEIGHTS - len(weights)),
        need_output,
        save,
        need_c,
        request.checkpoint_every if save else 0,
    )
    return output, (h, c)[: len(request.sizes)], c_states if need_c else None
