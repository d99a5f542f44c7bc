"""The backend ``cpu``, and its layer as an autograd function that is differentiable twice."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane import segments
from raglane._utils.derivatives import gradients_of, view_of
from raglane._utils.tracing import are_transformed, has_tangent, is_exporting
from raglane.cells import CELLS
from raglane.cells.module import WholeCell
from raglane.kernels import reference
from raglane.kernels.contract import (
    DirectionResult,
    Request,
    Result,
    Traits,
    run_directions,
    run_layers,
)
from raglane.kernels.cpu.layer import (
    Grads,
    Layer,
    LayerResult,
    OutputGrads,
    Saved,
    TableRefusedError,
    Tensors,
    are_hooked,
    heads_of,
    is_last_use,
    kind_of,
    layer_of,
)
from raglane.kernels.tensor_checks import check
from raglane.native import library
from raglane.native.library import has_cell, leave_lost_threads, missing_kernels
from raglane.native.memory import NO_MEMORY
from raglane.packing.flat_values import Layout, RowTable

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class CpuBackend:
    """Runs RNN, LSTM, GRU and the element-wise cells in ``lanes`` on a CPU.

    The outputs and states of a sequence are bit-identical in any batch and for any number of
    threads; gradients are bit-identical from run to run. Under :func:`torch.autocast` tensors are
    cast once, before the first layer; float64 is not cast. The reference kernel computes
    forward-mode derivatives.
    """

    schedules = ("lanes",)
    layouts: ClassVar[dict[str, type]] = {}

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`."""
        if isinstance(traits.cell, WholeCell):
            return _refuses_whole(traits)
        if not has_cell(traits.cell.name):
            return (
                missing_kernels() or f"the cpu kernels do not support the cell {traits.cell.name!r}"
            )
        if traits.device.type != "cpu":
            return f"the cpu kernels do not run on {traits.device}"
        dtype = traits.dtype
        if dtype is not torch.float64 and torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        if dtype not in _DTYPES:
            return f"the cpu kernels do not compute in {traits.dtype}"
        kind = kind_of(traits.cell.name)
        if traits.checkpoints and kind is not None and not kind.checkpoints:
            return f"the cpu kernels do not recompute gates of the cell {traits.cell.name!r} in the backward pass"
        return None

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        if isinstance(request.cell, WholeCell):
            return _run_wholes(request, schedule)
        if torch.is_autocast_enabled("cpu"):
            request = check(request).cast(torch.get_autocast_dtype("cpu"))
        if forward_ad._current_level >= 0 and has_tangent(request.tensors()):
            return reference.BACKEND.run(request, schedule)
        leave_lost_threads()
        return run_layers(request, _run_layer)


BACKEND = CpuBackend()


def _refuses_whole(traits: Traits) -> str | None:
    """Return why a module does not run whole sequences; None if it does."""
    if traits.device.type != "cpu":
        return f"the cpu kernels do not run on {traits.device}"
    if traits.dtype not in _DTYPES:
        return f"the cpu kernels do not compute in {traits.dtype}"
    if is_exporting():
        return "an exported graph consists of torch's own operators"
    if traits.need_states:
        return "the cpu kernels keep no states of every step of a linear recurrence"
    if traits.checkpoints:
        return "the cpu kernels save no gates of a linear recurrence, which backward could compute again"
    return missing_kernels()


def _run_wholes(request: Request, schedule: str) -> Result:
    """Run layers of modules that run whole sequences, in the dtype of their parameters."""
    if forward_ad._current_level >= 0 and has_tangent(request.tensors()):
        return reference.BACKEND.run(request, schedule)
    leave_lost_threads()
    with torch.autocast("cpu", enabled=False):
        return run_layers(check(request), partial(run_directions, run=_run_whole))


def _run_whole(
    layer: Request, module: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    dtype = next(module.parameters()).dtype
    values = layer.values.to(dtype)
    offsets = layer.offsets
    if not reverse:
        return DirectionResult(*module.run_whole(values, offsets, state))
    output, final = module.run_whole(segments.reverse(values, offsets), offsets, state)
    return DirectionResult(segments.reverse(output, offsets), final)


def _run_layer(request: Request) -> Result:
    """Run a request of one layer."""
    weights = (
        request.weights[0]
        if request.directions == 1
        else (*request.weights[0], *request.weights[1])
    )
    tensors = (request.values, *request.state, *weights)
    output: Tensor | None
    sizes = request.state_sizes or request.sizes
    need_output = request.need_output or request.need_states
    need_c = request.need_states and len(sizes) > 1
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        output, final, c_states = _record(
            request, weights, tensors, need_output=need_output, need_c=need_c
        )
    else:
        offsets = request.offsets
        depth = request.depth
        # Without a backward pass no gates are saved, so there is nothing to recompute.
        every = request.checkpoint_every if torch.is_grad_enabled() else 0
        layer = layer_of(
            request.cell.name,
            offsets,
            tensors,
            len(weights),
            sizes,
            request.directions,
            depth,
            every,
        )
        packed = request.packed[0] if request.packed else None
        output, final, c_states = run_layer(
            layer, offsets, tensors, need_output, need_c, packed, depth
        )
    states = None
    if request.need_states and output is not None:
        states = (cast(type[Layer], kind_of(request.cell.name)).states(output, c_states),)
    return Result(output if request.need_output else None, final, states)


def run_layer(
    layer: Layer,
    offsets: Any,
    tensors: Tensors,
    need_output: bool = True,
    need_c: bool = False,
    packed: Tensor | None = None,
    depth: int = 0,
) -> tuple[Tensor | None, tuple[Tensor, ...], Tensor | None]:
    """Run one layer on any tensors, recorded by autograd; return output, final states and ``c``."""
    try:
        save = torch.is_grad_enabled() and any(
            [tensor is not None and tensor.requires_grad for tensor in tensors]  # noqa: C419
        )
    except AttributeError:
        layer.admit(offsets, tensors, depth)  # raises, because one is not a tensor
        raise
    result = layer.forward(
        offsets,
        tensors,
        need_output=need_output,
        save=save,
        need_c=need_c,
        packed=None if save else packed,
        depth=depth,
    )
    if not save:
        return result.output, result.final, result.c_states if need_c else None
    apply = _Recurrence.apply if result.were_copied else _apply
    output, *rest = apply(layer, result, offsets, need_c, depth, *tensors)  # type: ignore[no-untyped-call]
    c_states = rest.pop() if need_c else None
    return output if need_output else None, tuple(rest), c_states


def run_table(
    layer: Layer, table: RowTable, tensors: Tensors, need_output: bool, packed: Tensor | None
) -> tuple[Tensor | None, tuple[Tensor, ...]] | None:
    """Run a layer on a table: like :func:`run_layer`, but values and output keep its layout.

    Return None if C cannot read the table.
    """
    save = torch.is_grad_enabled() and any(
        [tensor is not None and tensor.requires_grad for tensor in tensors]  # noqa: C419
    )
    packed = None if save else packed
    try:
        result = layer.forward(
            table, tensors, need_output=need_output, save=save, need_c=False, packed=packed
        )
    except TableRefusedError:
        return None
    if not save:
        return result.output, result.final
    output, *final = _apply(layer, result, None, False, 0, *tensors)  # type: ignore[no-untyped-call]
    return output if need_output else None, tuple(final)


def infer(
    layers: tuple[Layer, ...],
    packed: tuple[Tensor, ...],
    sizes: Tensor | None,
    values: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Sequence[Any],
    need_output: bool,
    order: Tensor | None,
    layout: int,
) -> list[Tensor]:
    """Run the layers of a stack by one call of C, for inference; return output and final states.

    ``h`` and ``c`` are initial states. ``weights`` are those of one layer after the other, not read
    if there are ``packed`` ones. ``layout`` is one of ``csrc/torch/rows.h``, which values and output
    have, and ``sizes`` are what it needs: offsets, lengths, batch sizes or nothing. Return nothing
    if C cannot run the call.
    """
    run = library.operators()
    if run is None:
        return []
    results: list[Tensor]
    try:
        if len(packed) == 1 and order is None:
            (only,) = packed
            head = layers[0].head(only)
            results = run.infer_packed(head, only, sizes, values, h, c, need_output, layout)
        else:
            heads = heads_of(layers, packed)
            parts = packed or weights
            are_packed = len(packed) > 0
            results = run.infer(
                heads, sizes, values, h, c, parts, are_packed, need_output, order, layout
            )
    except NO_MEMORY:
        return []
    return results


def _record(
    request: Request, weights: tuple[Any, ...], tensors: Tensors, *, need_output: bool, need_c: bool
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
    """Run a layer as an operator, for a compiler, an export or a dispatch mode."""
    from raglane.kernels.cpu import layer_operator

    if not torch.compiler.is_compiling():
        check(request)
    save = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
    return layer_operator.run(request, weights, need_output=need_output, save=save, need_c=need_c)


class _Recurrence(torch.autograd.Function):
    """One layer in all directions."""

    # torch reads this attribute in every backward pass; defined here, it is found without a search
    # in the bases.
    boxed_grads_call = False

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        result: LayerResult,
        offsets: Any,
        need_c: bool,
        depth: int,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        output = cast(Tensor, result.output)
        c_states = cast(Tensor, result.c_states)
        ctx.layer = layer
        ctx.need_c = need_c
        ctx.depth = depth
        ctx.in_layout = result.saved_plan is not None
        ctx.is_hooked = are_hooked()
        ctx.set_materialize_grads(False)
        if result.saved_plan is None:
            ctx.save_for_backward(offsets, output, result.gates, c_states, *tensors)
        else:
            ctx.save_for_backward(
                result.saved_plan,
                result.flat_output,
                result.gates,
                c_states,
                result.flat_values,
                *tensors[1:],
                # Only needed for derivatives of the gradient of the values.
                tensors[0] if ctx.needs_input_grad[5] else None,
            )
        return (output, *result.final, c_states) if need_c else (output, *result.final)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        offsets, output, gates, c_states, *rest = ctx.saved_tensors
        layer: Layer = ctx.layer
        states = len(layer.sizes)
        table = rest.pop() if ctx.in_layout else None
        layout = None
        # With create_graph the gradients must be differentiable; gradients wrapped by torch.func
        # have no storage.
        by_reference = torch.is_grad_enabled() or are_transformed((grad_output, *grads))
        saved = Saved(output, gates, c_states, ctx.need_c)
        needed = ctx.needs_input_grad[5:]
        overwrite = is_last_use() and not ctx.is_hooked
        leave_lost_threads()
        if ctx.in_layout:
            if not by_reference:
                output_grads = OutputGrads(grad_output, None, grads[:states])
                options = {"overwrite": overwrite, "in_layout": True}
                with suppress(TableRefusedError):
                    gradients = layer.backward(
                        offsets, tuple(rest), saved, output_grads, needed, **options
                    )
                    return None, None, None, None, None, *gradients
            layout = Layout.of_saved_plan(offsets)
            elements = rest[0].shape[0]
            offsets = layout.offsets
            if table is not None and torch.is_grad_enabled():
                rest[0] = layout.to_flat(table, elements)
            else:
                rest[0] = rest[0].detach().requires_grad_(needed[0])
            grad_output = None if grad_output is None else layout.to_flat(grad_output, elements)
        output_grads = OutputGrads(
            grad_output, grads[states] if ctx.need_c else None, grads[:states]
        )
        if by_reference:
            gradients = _gradients_by_reference(layer, offsets, tuple(rest), output_grads)
        else:
            gradients = layer.backward(
                offsets,
                tuple(rest),
                saved,
                output_grads,
                needed,
                overwrite=overwrite,
                depth=ctx.depth,
            )
        if layout is not None and gradients[0] is not None:
            gradients = layout.from_flat(gradients[0]), *gradients[1:]
        return None, None, None, None, None, *gradients


# Function.apply without its search for dead wrappers of torch.func among the arguments, which C
# cannot read.
_apply = super(torch.autograd.Function, _Recurrence).apply


def _gradients_by_reference(
    layer: Layer, offsets: Tensor, tensors: Tensors, grads: OutputGrads
) -> Grads:
    """Compute all gradients by the reference kernel, differentiably, or under torch.func."""
    keep = torch.is_grad_enabled()
    inputs = tuple([view_of(tensor, keep) for tensor in tensors])
    with torch.enable_grad():
        results = _reference_results(layer, offsets, inputs, grads.c_states is not None)
    upstream = (grads.output, grads.c_states, *grads.final)
    return tuple(gradients_of(results, inputs, upstream, keep))


def _reference_results(
    layer: Layer, offsets: Tensor, inputs: Tensors, need_c: bool
) -> tuple[Tensor | None, ...]:
    """Return output, ``c`` after each element if needed, and final states of the reference."""
    cell = CELLS[layer.cell]
    weights = [
        cell.weights_type(*layer.weights_of(inputs, direction))
        for direction in range(layer.directions)
    ]
    request = Request(
        cell,
        inputs[0],
        offsets,
        None,
        layer.initial(inputs),
        tuple(weights),
        directions=layer.directions,
        need_states=need_c,
        state_sizes=layer.sizes,
    )
    result = reference.BACKEND.run(request, "lanes")
    if result.states is None:
        return result.output, None, *result.state
    c_states = result.states[0][1]
    _, shape = layer.saved_shapes(inputs[0].shape[0])
    if len(shape) == 3:  # the layout of the kernels
        c_states = torch.stack(c_states.chunk(layer.directions, 1))
    return result.output, c_states, *result.state
