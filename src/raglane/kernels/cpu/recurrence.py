"""A layer of the cpu kernels as a function that PyTorch can differentiate, twice.

A second derivative goes through the reference kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from raglane.kernels.cpu.gradients import reference_gradients
from raglane.kernels.cpu.kinds import KINDS
from raglane.kernels.cpu.memory import Given, Layer, Saved
from raglane.native.library import leave_lost_threads
from raglane.tracing import are_transformed, is_transformed, records_operators

__all__ = ["run_layer"]


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
    tensors, kind = layer.tensors(), KINDS[layer.cell]
    needs_grad = torch.is_grad_enabled() and _any_requires_grad(tensors)
    need_output, need_cells, cells = need_output or need_states, need_states and len(layer.sizes) > 1, None
    output: Tensor | None
    if records_operators():
        from raglane.kernels.cpu import operators

        output, final, cells = operators.run(layer, need_output=need_output, save=needs_grad, need_cells=need_cells)
    elif needs_grad:
        apply = _Recurrence.apply if is_transformed(layer.values) else _apply
        form = _Form(layer.cell, len(layer.initial), layer.sizes, layer.directions, layer.depth)
        output, *rest = apply(form, layer.offsets, need_cells, *tensors)  # type: ignore[no-untyped-call]
        if need_cells:
            cells = rest.pop()
        final = tuple(rest)
    else:
        output, final, _, cells = kind.forward(layer, need_output=need_output, save=False, need_cells=need_cells)
    states = kind.states(layer, output, cells) if need_states and output is not None else None
    return (output if need_output else None), final, states


# ---------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------


def _any_requires_grad(tensors: tuple[Tensor | None, ...]) -> bool:
    for part in tensors:  # noqa: SIM110 (quicker than any of a generator)
        if part is not None and part.requires_grad:
            return True
    return False


class _Form(NamedTuple):
    """A layer without its tensors: what it is besides, and how many of the tensors are initial states."""

    cell: str
    states: int
    sizes: tuple[int, ...]
    directions: int
    depth: int

    def layer(self, offsets: Tensor, tensors: Sequence[Any]) -> Layer:
        """With its tensors, in the order of ``Layer.tensors()``."""
        initial, weights = tensors[1 : 1 + self.states], tensors[1 + self.states :]
        return Layer(self.cell, tensors[0], offsets, tuple(initial), tuple(weights), *self[2:])


class _Recurrence(torch.autograd.Function):
    """One layer in all directions; inputs are (form, offsets, whether c is wanted, *tensors)."""

    # Torch asks for it in every backward pass, and looks through all bases where it is not here.
    boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, form: _Form, offsets: Tensor, need_cells: bool, *tensors: Any) -> tuple[Tensor, ...]:
        ran = KINDS[form.cell].forward(form.layer(offsets, tensors), need_output=True, save=True, need_cells=need_cells)
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
        # With create_graph the gradient is to be differentiated again; batched gradients have no memory to read.
        if torch.is_grad_enabled() or are_transformed((grad_output, *grads)):
            return None, None, None, *reference_gradients(layer, given)
        saved, wanted = Saved(output, gates, cells, ctx.need_cells), ctx.needs_input_grad[3:]
        leave_lost_threads()
        found = KINDS[form.cell].backward(layer, saved, given, wanted, overwrite=_is_last_use())
        return None, None, None, *found


# What Function.apply calls once it has looked through all arguments for what torch.func's transforms leave behind.
_apply = super(torch.autograd.Function, _Recurrence).apply


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def _is_last_use() -> bool:
    """Whether the graph is freed after this backward pass, so that what was saved may be overwritten."""
    return _keeps_graph is not None and not _keeps_graph()
