"""A layer of the cpu kernels as a function that PyTorch can differentiate, twice.

A second derivative goes through the reference kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane._utils.tracing import are_transformed, is_transformed, records_operators
from raglane.kernels.contract import Request, Result
from raglane.kernels.cpu.gradients import is_last_use, reference_gradients
from raglane.kernels.cpu.kind import KINDS, layer_of
from raglane.kernels.cpu.layer import Layer, Tensors
from raglane.kernels.cpu.memory import Given, Saved
from raglane.native.library import leave_lost_threads

__all__ = ["run_known", "run_layer"]


def run_layer(request: Request) -> Result:
    """Run a request of one layer, in all its directions."""
    weights = request.weights[0]
    if request.directions > 1:
        weights = (*weights, *request.weights[1])
    offsets, tensors, sizes = request.offsets, (request.values, *request.state, *weights), request.sizes
    needs_grad = torch.is_grad_enabled() and _any_requires_grad(tensors)
    need_output, c_states = request.need_output or request.need_states, None
    need_c = request.need_states and len(sizes) > 1
    cell, directions, depth = request.cell.name, request.directions, request.depth
    output: Tensor | None
    if records_operators():
        from raglane.kernels.cpu import operators

        output, final, c_states = operators.run(
            request, weights, need_output=need_output, save=needs_grad, need_c=need_c
        )
    else:
        # Without gradients nothing is saved anyway, and nothing need be spared.
        every = request.checkpoint_every if needs_grad else 0
        layer = layer_of(cell, offsets, tensors, len(weights), sizes, directions, depth, every)
        if needs_grad:
            apply = _Recurrence.apply if is_transformed(request.values) else _apply
            output, *rest = apply(layer, offsets, need_c, depth, False, *tensors)  # type: ignore[no-untyped-call]
            if need_c:
                c_states = rest.pop()
            final = tuple(rest)
        else:
            packed = request.packed[0] if request.packed else None
            output, final, _, c_states = layer.forward(
                offsets, tensors, need_output=need_output, save=False, need_c=need_c, depth=depth, packed=packed
            )
    states = (KINDS[cell].states(output, c_states),) if request.need_states and output is not None else None
    return Result(output if request.need_output else None, final, states)


def run_known(
    layer: Layer, offsets: Any, tensors: Tensors, need_output: bool, packed: Tensor | None = None
) -> Result | None:
    """Run a layer without a request, as most calls can: outside of autocast and of the transformations of torch.func.

    Args:
        layer: what to run.
        offsets: ``(B + 1,)`` int64.
        tensors: the rest.
        need_output: whether the output is read.
        packed: what ``layer.packed`` made of these weights, whose numbers have not changed since.

    Returns:
        None where a tensor is not what C can read as it is, or somebody follows the operators or derivatives forward:
        then nothing was run.
    """
    if forward_ad._current_level >= 0 or records_operators():
        return None
    storages = layer.rules.hold(offsets, tensors)
    if not storages:
        return None
    leave_lost_threads()
    if torch.is_grad_enabled() and _any_requires_grad(tensors):
        output, *final = _apply(layer, offsets, False, 0, True, *tensors)  # type: ignore[no-untyped-call]
        return Result(output if need_output else None, tuple(final))
    ran = layer.run(offsets, tensors, need_output=need_output, save=False, need_c=False, packed=packed)
    return Result(ran.output, ran.final)


# ---------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------


def _any_requires_grad(tensors: Tensors) -> bool:
    for part in tensors:  # noqa: SIM110 (quicker than any of a generator)
        if part is not None and part.requires_grad:
            return True
    return False


class _Recurrence(torch.autograd.Function):
    """One layer in all directions.

    Inputs are (layer, offsets, whether c is wanted, depth, whether all was checked just now, *tensors).
    """

    # Torch asks for it in every backward pass, and looks through all bases where it is not here.
    boxed_grads_call = False

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, offsets: Tensor, need_c: bool, depth: int, is_checked: bool, *tensors: Any
    ) -> tuple[Tensor, ...]:
        if is_checked:
            ran = layer.run(offsets, tensors, need_output=True, save=True, need_c=need_c)
        else:
            ran = layer.forward(offsets, tensors, need_output=True, save=True, need_c=need_c, depth=depth)
        saved = cast(Saved, ran.saved)
        ctx.layer, ctx.need_c, ctx.depth = layer, need_c, depth
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(offsets, saved.output, saved.gates, saved.c_states, *tensors)
        return (saved.output, *ran.final, saved.c_states) if need_c else (saved.output, *ran.final)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        offsets, output, gates, c_states, *rest = ctx.saved_tensors
        layer: Layer = ctx.layer
        tensors, states = tuple(rest), len(layer.sizes)
        given = Given(grad_output, grads[states] if ctx.need_c else None, grads[:states])
        # With create_graph the gradient is to be differentiated again; batched gradients have no memory to read.
        if torch.is_grad_enabled() or are_transformed((grad_output, *grads)):
            return None, None, None, None, None, *reference_gradients(layer, offsets, tensors, given)
        saved, wanted = Saved(output, gates, c_states, ctx.need_c), ctx.needs_input_grad[5:]
        leave_lost_threads()
        found = layer.backward(offsets, tensors, saved, given, wanted, overwrite=is_last_use(), depth=ctx.depth)
        return None, None, None, None, None, *found


# What Function.apply calls once it has looked through all arguments for what torch.func's transforms leave behind.
_apply = super(torch.autograd.Function, _Recurrence).apply
