"""The backend ``cpu``, and a layer of it as a function that PyTorch can differentiate, twice."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane._utils.tracing import are_transformed, has_tangent
from raglane.cells import CELLS
from raglane.kernels import reference
from raglane.kernels.checks import check
from raglane.kernels.contract import Request, Result, Traits, run_layers
from raglane.kernels.cpu.layer import Admitted, Given, Grads, Layer, Saved, Tensors, is_last_use, kind_of, layer_of
from raglane.native.library import has_cell, leave_lost_threads, missing_kernels

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class CpuBackend:
    """Runs RNN, LSTM, GRU and the element-wise cells in ``lanes`` on a CPU.

    A sequence's outputs and states are bit-identical in any batch and at any number of threads; gradients are
    bit-identical from run to run. Under :func:`torch.autocast` all is cast to its dtype once, before the first
    layer; float64 is left alone. The reference kernel computes forward-mode derivatives.
    """

    schedules = ("lanes",)
    layouts: ClassVar[dict[str, type]] = {}

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`."""
        if not has_cell(traits.cell.name):
            return missing_kernels() or f"the cpu kernels do not know the cell {traits.cell.name!r}"
        if traits.device.type != "cpu":
            return f"the cpu kernels do not run on {traits.device}"
        dtype = traits.dtype
        if dtype is not torch.float64 and torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        if dtype not in _DTYPES:
            return f"the cpu kernels do not compute in {traits.dtype}"
        kind = kind_of(traits.cell.name)
        if traits.checkpoints and kind is not None and not kind.checkpoints:
            return f"the cpu kernels save all that backward needs of the cell {traits.cell.name!r}"
        return None

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        if torch.is_autocast_enabled("cpu"):
            request = check(request).cast(torch.get_autocast_dtype("cpu"))
        if forward_ad._current_level >= 0 and has_tangent(request.tensors()):
            return reference.BACKEND.run(request, schedule)
        leave_lost_threads()
        return run_layers(request, _run_layer)


BACKEND = CpuBackend()
"""The one instance; it keeps nothing between runs."""


def _run_layer(request: Request) -> Result:
    """Run a request of one layer, in all its directions."""
    weights = request.weights[0]
    if request.directions > 1:
        weights = (*weights, *request.weights[1])
    tensors = (request.values, *request.state, *weights)
    sizes, need_output = request.state_sizes or request.sizes, request.need_output or request.need_states
    need_c = request.need_states and len(sizes) > 1
    output: Tensor | None
    c_states: Tensor | None = None
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        output, final, c_states = _record(request, weights, tensors, need_output=need_output, need_c=need_c)
    else:
        offsets, depth = request.offsets, request.depth
        # Without gradients nothing is saved anyway, and nothing need be spared.
        every = request.checkpoint_every if torch.is_grad_enabled() else 0
        layer = layer_of(request.cell.name, offsets, tensors, len(weights), sizes, request.directions, depth, every)
        admitted, apply = layer.gate.look(offsets, tensors), _apply
        if admitted is None:
            admitted, apply = layer.gate.normalised(offsets, tensors, depth), _Recurrence.apply
        if torch.is_grad_enabled() and any([part is not None and part.requires_grad for part in tensors]):  # noqa: C419 (quicker)
            output, *rest = apply(layer, admitted, need_c, depth, *tensors)  # type: ignore[no-untyped-call]
            if need_c:
                c_states = rest.pop()
            final = tuple(rest)
        else:
            packed = request.packed[0] if request.packed else None
            output, final, _, c_states = layer.forward(
                admitted, need_output=need_output, save=False, need_c=need_c, packed=packed
            )
    states = None
    if request.need_states and output is not None:
        states = (cast(type[Layer], kind_of(request.cell.name)).states(output, c_states),)
    return Result(output if request.need_output else None, final, states)


def _record(
    request: Request, weights: tuple[Any, ...], tensors: Tensors, *, need_output: bool, need_c: bool
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
    """Run it as an operator, where a compiler, an export or a mode of torch records operators."""
    from raglane.kernels.cpu import operators

    if not torch.compiler.is_compiling():
        check(request)
    save = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors)
    return operators.run(request, weights, need_output=need_output, save=save, need_c=need_c)


class _Recurrence(torch.autograd.Function):
    """One layer in all directions, of (layer, what was admitted, whether c is wanted, depth, *tensors)."""

    # Torch asks for it in every backward pass, and looks through all bases where it is not here.
    boxed_grads_call = False

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, admitted: Admitted, need_c: bool, depth: int, *tensors: Any
    ) -> tuple[Tensor, ...]:
        ran = layer.forward(admitted, need_output=True, save=True, need_c=need_c)
        output, c_states = cast(Tensor, ran.output), cast(Tensor, ran.c_states)
        ctx.layer, ctx.need_c, ctx.depth = layer, need_c, depth
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(admitted[0], output, ran.gates, c_states, *tensors)
        return (output, *ran.final, c_states) if need_c else (output, *ran.final)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        offsets, output, gates, c_states, *rest = ctx.saved_tensors
        layer: Layer = ctx.layer
        tensors, states = tuple(rest), len(layer.sizes)
        given = Given(grad_output, grads[states] if ctx.need_c else None, grads[:states])
        # With create_graph the gradient is to be differentiated again; batched gradients have no memory to read.
        if torch.is_grad_enabled() or are_transformed((grad_output, *grads)):
            return None, None, None, None, *_gradients_by_reference(layer, offsets, tensors, given)
        saved, wanted = Saved(output, gates, c_states, ctx.need_c), ctx.needs_input_grad[4:]
        leave_lost_threads()
        found = layer.backward(offsets, tensors, saved, given, wanted, overwrite=is_last_use(), depth=ctx.depth)
        return None, None, None, None, *found


# What Function.apply calls once it has looked through all arguments for what torch.func's transforms leave behind.
_apply = super(torch.autograd.Function, _Recurrence).apply


def _gradients_by_reference(layer: Layer, offsets: Tensor, tensors: Tensors, given: Given) -> Grads:
    """All gradients by way of the reference kernel: where they are to be differentiated, or torch.func is at work."""
    keep = torch.is_grad_enabled()
    # Views, so that a gradient stops here where one of them was computed from another.
    inputs: Tensors = tuple([None if part is None else part.view_as(part) for part in tensors])
    if not keep:
        inputs = tuple([None if part is None else part.detach().requires_grad_(part.requires_grad) for part in inputs])
    cell = CELLS[layer.cell]
    request = Request(
        cell,
        inputs[0],
        offsets,
        None,
        layer.initial(inputs),
        tuple([cell.weights_type(*layer.weights_of(inputs, direction)) for direction in range(layer.directions)]),
        directions=layer.directions,
        need_states=given.c_states is not None,
        state_sizes=layer.sizes,
    )
    with torch.enable_grad():
        result = reference.BACKEND.run(request, "lanes")
        c_states = None if result.states is None else result.states[0][1]
        if c_states is not None and len(layer.saved_shapes(inputs[0].shape[0])[1]) == 3:
            c_states = torch.stack(c_states.chunk(layer.directions, 1))  # as the layer gave it
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(
            (result.output, c_states, *result.state), (given.output, given.c_states, *given.final), strict=True
        )
        if tensor is not None and grad is not None and tensor.requires_grad
    ]
    leaves = [part for part in inputs if part is not None and part.requires_grad]
    found = iter(
        torch.autograd.grad(
            [tensor for tensor, _ in pairs], leaves, [grad for _, grad in pairs], create_graph=keep, allow_unused=True
        )
    )
    return tuple(next(found) if part is not None and part.requires_grad else None for part in inputs)
