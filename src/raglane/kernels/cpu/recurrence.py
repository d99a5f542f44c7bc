"""A layer of the cpu kernels as a function that PyTorch can differentiate, twice, and compile.

A second derivative goes through the reference kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from raglane.kernels.contract import zero_state
from raglane.kernels.cpu import elementwise, matrix
from raglane.kernels.cpu.gradients import Given, Kind, reference_gradients
from raglane.kernels.cpu.library import Layer, Saved

__all__ = ["run_layer"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(matrix.CELLS, matrix.MatrixLayers()),
    **dict.fromkeys(elementwise.CELLS, elementwise.ElementwiseLayers()),
}


def run_layer(
    layer: Layer, need_output: bool, need_states: bool
) -> tuple[Tensor | None, tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Run one layer.

    Args:
        layer: the layer and its batch.
        need_output: whether the output must be built.
        need_states: whether the states after each element are wanted.

    Returns:
        The output ``(N, K * P)``, or None where it was not needed; the final states, ``(K, B, size)`` each; and every
        state after each element, ``(N, K * size)`` each, or None where they were not wanted.
    """
    tensors, kind = layer.tensors(), _KINDS[layer.cell]
    needs_grad = torch.is_grad_enabled() and any([part is not None and part.requires_grad for part in tensors])  # noqa: C419 (a list is quicker here)
    need_output, need_cells, cells = need_output or need_states, need_states and len(layer.sizes) > 1, None
    if torch.compiler.is_compiling():
        output, h, c, _, kept = _forward_op(
            layer.cell, layer.values, layer.offsets, *_padded(layer), need_output, needs_grad, need_cells
        )
        final = (h, c)[: len(layer.sizes)]
        cells = kept if need_cells else None
    elif needs_grad:
        apply = _Recurrence.apply if _may_be_transformed(layer.values) else _apply
        form = _Form(layer.cell, len(layer.initial), layer.sizes, layer.directions)
        output, *rest = apply(form, layer.offsets, need_cells, *tensors)  # type: ignore[no-untyped-call]
        if need_cells:
            cells = rest.pop()
        final = tuple(rest)
    else:
        output, final, _, cells = kind.forward(
            layer.contiguous(), need_output=need_output, save=False, need_cells=need_cells
        )
    states = kind.states(layer, output, cells) if need_states else None
    return (output if need_output else None), final, states


# ---------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A layer without its tensors: what it is besides, and how many of the tensors are initial states."""

    cell: str
    states: int
    sizes: tuple[int, ...]
    directions: int

    def layer(self, offsets: Tensor, tensors: Sequence[Any]) -> Layer:
        """With its tensors, in the order of ``Layer.tensors()``."""
        initial, weights = tensors[1 : 1 + self.states], tensors[1 + self.states :]
        return Layer(self.cell, tensors[0], offsets, tuple(initial), tuple(weights), self.sizes, self.directions)


class _Recurrence(torch.autograd.Function):
    """One layer in all directions; inputs are (form, offsets, whether c is wanted, *tensors)."""

    # Torch asks for it in every backward pass, and looks through all bases where it is not here.
    boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, form: _Form, offsets: Tensor, need_cells: bool, *tensors: Any) -> tuple[Tensor, ...]:
        layer = form.layer(offsets, tensors).contiguous()
        ran = _KINDS[form.cell].forward(layer, need_output=True, save=True, need_cells=need_cells)
        saved = cast(Saved, ran.saved)
        ctx.form, ctx.need_cells = form, need_cells
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(offsets, saved.output, saved.gates, saved.cells, *tensors)
        return (saved.output, *ran.final, saved.cells) if need_cells else (saved.output, *ran.final)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        offsets, output, gates, cells, *tensors = ctx.saved_tensors
        form: _Form = ctx.form
        layer, states = form.layer(offsets, tensors), len(form.sizes)
        given = Given(grad_output, grads[states] if ctx.need_cells else None, grads[:states])
        if torch.is_grad_enabled():  # create_graph: the gradient is to be differentiated again
            return None, None, None, *reference_gradients(layer, given)
        found = _KINDS[form.cell].backward(
            layer.contiguous(),
            Saved(output, gates, cells, ctx.need_cells),
            given.contiguous(),
            ctx.needs_input_grad[3:],
            overwrite=_is_last_use(),
        )
        return None, None, None, *found


# What Function.apply calls once it has looked through all arguments for what torch.func's transforms leave behind.
_apply = super(torch.autograd.Function, _Recurrence).apply


def _may_be_transformed(values: Tensor) -> bool:
    """Whether torch.func has a hand in this, so that Function.apply must look."""
    return torch._C._are_functorch_transforms_active() or torch._C._functorch.is_dead_tensor_wrapper(values)  # type: ignore[attr-defined]


def _is_last_use() -> bool:
    """Whether the graph is freed after this backward pass, so that what was saved may be overwritten."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return kept is not None and not kept()


# ---------------------------------------------------------------------------------------------------------------
# The same as operators, for torch.compile
# ---------------------------------------------------------------------------------------------------------------

# An operator's arguments are fixed in number: two states, and two directions of five weights at most.
_WEIGHTS = 10
_PADDED = 2 + _WEIGHTS
_TENSORS = "Tensor h, Tensor? c, " + ", ".join(f"Tensor? w{index}" for index in range(_WEIGHTS))


def _padded(layer: Layer) -> tuple[Tensor | None, ...]:
    """States and weights, with None for those that the layer does not have."""
    initial = layer.initial
    if not initial:
        initial = zero_state(layer.values, layer.directions, layer.offsets.shape[0] - 1, layer.sizes)
    states = (*initial, None)[:2]
    return (*states, *layer.weights, *([None] * (_WEIGHTS - len(layer.weights))))


def _layer_of(cell: str, values: Tensor, offsets: Tensor, padded: tuple[Tensor | None, ...]) -> Layer:
    """What :func:`_padded` took apart."""
    each = 5 if cell in matrix.CELLS else 4
    states, weights = tuple(part for part in padded[:2] if part is not None), padded[2:]
    weights = weights[: each if weights[each] is None else 2 * each]
    sizes = tuple(part.shape[2] for part in states)
    return Layer(cell, values, offsets, states, weights, sizes, states[0].shape[0])


@torch.library.custom_op(
    "raglane::recurrence",
    mutates_args=(),
    schema=f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, bool need_output, bool save, bool need_cells)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _recurrence_op(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Output, final h, final c, saved gates, c after each element; what there is not is empty."""
    *padded, need_output, save, need_cells = rest
    layer = _layer_of(cell, values, offsets, tuple(padded)).contiguous()
    ran = _KINDS[cell].forward(layer, need_output=need_output, save=save, need_cells=need_cells)
    nothing = [values.new_empty(0) for _ in range(4)]
    output = nothing.pop() if ran.output is None else ran.output
    c = ran.final[1] if len(ran.final) > 1 else nothing.pop()
    gates = nothing.pop() if ran.saved is None else ran.saved.gates
    cells = ran.cells if ran.saved is None else ran.saved.cells
    return output, ran.final[0], c, gates, nothing.pop() if cells is None else cells


@_recurrence_op.register_fake
def _(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *padded, need_output, save, need_cells = rest
    layer = _layer_of(cell, values, offsets, tuple(padded))
    h, c = layer.initial[0], layer.initial[1] if len(layer.initial) > 1 else None
    gates, cells = _KINDS[cell].saved_shapes(layer)
    return (
        values.new_empty(values.shape[0], h.shape[0] * h.shape[2]) if need_output or save else values.new_empty(0),
        h.new_empty(h.shape),
        values.new_empty(0) if c is None else c.new_empty(c.shape),
        values.new_empty(gates) if save else values.new_empty(0),
        values.new_empty(cells) if save or need_cells else values.new_empty(0),
    )


@torch.library.custom_op(
    "raglane::recurrence_backward",
    mutates_args=(),
    schema=f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, Tensor output, Tensor gates, Tensor cells,"
    " Tensor? grad_output, Tensor? grad_cells, Tensor? grad_h, Tensor? grad_c, bool[] wanted) -> Tensor[]",
)
def _backward_op(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:
    """The gradients of (values, h, c, ten weights); those not wanted are empty."""
    padded, (output, gates, cells, grad_output, grad_cells, *grad_final, wanted) = rest[:_PADDED], rest[_PADDED:]
    layer = _layer_of(cell, values, offsets, padded)
    states, weights = len(layer.initial), len(layer.weights)
    given = Given(grad_output, grad_cells, tuple(grad_final[:states])).contiguous()
    kept = (wanted[0], *wanted[1 : 1 + states], *wanted[3 : 3 + weights])
    found = _KINDS[cell].backward(
        layer.contiguous(), Saved(output, gates, cells, is_shared=True), given, kept, overwrite=False
    )
    by_place: list[Tensor | None] = [*found[: 1 + states], *([None] * (2 - states)), *found[1 + states :]]
    by_place += [None] * (_WEIGHTS - weights)
    return [
        values.new_empty(0) if grad is None or not want else grad for grad, want in zip(by_place, wanted, strict=True)
    ]


@_backward_op.register_fake
def _(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:  # noqa: ARG001
    parts, wanted = (values, *rest[:_PADDED]), rest[-1]
    return [
        part.new_empty(part.shape) if want and part is not None else values.new_empty(0)
        for part, want in zip(parts, wanted, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    cell, values, offsets, *rest = inputs
    padded = rest[:_PADDED]
    ctx.cell, ctx.need_cells = cell, rest[-1]
    ctx.wanted = [part is not None and part.requires_grad for part in (values, *padded)]
    ctx.save_for_backward(values, offsets, *padded, output[0], output[3], output[4])


def _op_backward(ctx: Any, grad_output: Any, grad_h: Any, grad_c: Any, _: Any, grad_cells: Any) -> tuple[Any, ...]:
    values, offsets, *rest = ctx.saved_tensors
    given = grad_output, grad_cells if ctx.need_cells else None, grad_h, grad_c if rest[1] is not None else None
    found = _backward_op(ctx.cell, values, offsets, *rest, *given, ctx.wanted)
    grads = [grad if want else None for grad, want in zip(found, ctx.wanted, strict=True)]
    return None, grads[0], None, *grads[1:], None, None, None


_recurrence_op.register_autograd(_op_backward, setup_context=_setup_context)
_forward_op = _recurrence_op
