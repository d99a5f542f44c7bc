"""The backends ``program`` and ``triton``: cells whose step can be traced, on a CPU or a GPU.

A step is traced, or its trace is read from the disk, once. The loop of a call is one function to
autograd, whose inputs are the tensors that a step reads. Values that depend only on parameters are
computed by torch before it. Second derivatives are computed by the reference kernel.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from raglane import segments
from raglane._utils.checks import check_unchanged
from raglane._utils.messages import warn_caller
from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Marked
from raglane.cells.spec import CellSpec
from raglane.kernels import reference
from raglane.kernels.contract import (
    DirectionResult,
    Request,
    Result,
    Traits,
    run_directions,
    run_layers,
)
from raglane.kernels.cpu import programs as cpu
from raglane.kernels.program.backward import Gradients, Machine, StepCall, reference_gradients
from raglane.kernels.program.verify import verify, verify_call, verify_loop
from raglane.kernels.tensor_checks import check
from raglane.kernels.triton import launch
from raglane.kernels.triton.places import Places
from raglane.native import library
from raglane.programs import stored
from raglane.programs.compiled import CompiledStep, Forward, Wanted
from raglane.programs.graph import Refused, Unkept
from raglane.programs.keys import lasting_key
from raglane.programs.parameters import ParameterValues
from raglane.programs.rules import trace
from raglane.programs.step import NARROW, Step

MACHINES = {
    "cpu": Machine(cpu.run_lowered, cpu.times, cpu.outer_products, lambda offsets, *_: offsets),
    "cuda": Machine(launch.run_lowered, launch.times, launch.outer_products, Places),
}
"""Machines by the type of a device."""
# Every 1,000th call of a program, beginning with the first, is compared with the current module.
_CALLS = 1000
_MOST_STEPS = 1024

_CPU = torch.device("cpu")
# Output, final states and the states of every step.
_Results = tuple[Tensor | None, list[Tensor], list[Tensor]]

_steps: OrderedDict[Any, CompiledStep | Refused] = OrderedDict()
_warned: set[str] = set()


def first_step(traits: Traits) -> CompiledStep | None:
    """Return the programs of the first layer; None without its weights."""
    if not traits.weights:
        return None
    cell = traits.cell
    weights = traits.weights[0]
    if isinstance(cell, Marked):
        # Masks come with a batch, and do not affect whether a step can become a program.
        cell = cell.inner
    projection = getattr(weights, "projection", None)
    sizes = cell.state_sizes(traits.hidden_size, 0 if projection is None else projection.shape[0])
    return ready(step_of(cell, weights, traits.input_size, sizes, traits.dtype), traits.device)


# ---- compiled steps ------------------------------------------------------------------------------


def step_of(
    cell: CellSpec, weights: Any, width: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> Step:
    """Return a step; it computes in float32 if values have a narrow dtype."""
    inner = cell.inner if isinstance(cell, Marked) else cell
    output = inner.output_size if isinstance(inner, ModuleCell) else sizes[0]
    return Step(cell, weights, width, sizes, output, torch.float32 if dtype in NARROW else dtype)


def ready(step: Step, device: torch.device = _CPU) -> CompiledStep:
    """Return the verified programs of a step; raises Refused if it cannot become a program."""
    other = next((leaf for leaf in step.leaves if leaf.device != device), None)
    if other is not None:
        raise Refused(f"it has a tensor of {other.layout} on {other.device}")
    key = step.key if device.type == "cpu" else (step.key, device, launch.precision())
    compiled = _steps.get(key)
    if compiled is None:
        if device.type != "cpu" and (reason := launch.why_not_now()):
            raise Refused(reason)
        start = time.perf_counter()
        try:
            compiled = _compiled(step, device, key)
        except Refused as refused:
            compiled = Refused(refused.reason)
        else:
            compiled.seconds = time.perf_counter() - start
        _remember(key, compiled)
    if isinstance(compiled, Refused):
        raise Refused(compiled.reason)
    return compiled


def _remember(key: Any, compiled: CompiledStep | Refused) -> None:
    _steps[key] = compiled
    while len(_steps) > _MOST_STEPS:
        _steps.popitem(last=False)


def _compiled(step: Step, device: torch.device, key: Any) -> CompiledStep:
    """Return verified programs: of a valid trace on the disk, or of a new one, then saved."""
    disk_key = ""
    not_kept = ""
    check = partial(_difference, device)
    has_matrices = device.type == "cpu"
    if device.type != "cpu":
        step = step.on_host()
    try:
        disk_key = lasting_key(step.facts)
        loaded = stored.load(step, disk_key)
        if loaded is not None:
            compiled = CompiledStep(loaded, key, has_matrices, is_read=True, disk_key=disk_key)
            if not check(step, compiled):  # a bad file is no reason to refuse a cell
                return compiled
    except Unkept as error:
        not_kept = error.reason
    compiled = CompiledStep(trace(step), key, has_matrices, disk_key=disk_key, not_kept=not_kept)
    reason = check(step, compiled)
    if reason:
        raise Refused(reason)
    if disk_key:
        try:
            stored.save(step, disk_key, compiled.trace)
        except Unkept as error:
            compiled.not_kept = error.reason
    return compiled


def _difference(device: torch.device, step: Step, compiled: CompiledStep) -> str:
    """Return how programs on a device differ from torch on the CPU; empty if they agree."""
    run = partial(_run_on, device)
    machine = MACHINES[device.type]
    if device.type == "cpu":
        return verify(step, compiled, run, machine)
    slack = 100.0 if launch.precision() == "tf32" else 1.0
    return verify(step, compiled, run, machine, slack) or verify_loop(
        step, compiled, run, machine, slack
    )


def _run_on(device: torch.device, call: StepCall, tensors: tuple[Tensor, ...]) -> _Results:
    """Run a call of host tensors on a device."""
    if device.type == "cpu":
        return run_loop(call, tensors)
    moved = replace(
        call,
        offsets=call.offsets.to(device),
        machine=MACHINES[device.type],
        lengths=call.offsets.diff(),
    )
    output, finals, states = run_loop(moved, tuple([tensor.to(device) for tensor in tensors]))
    return (
        None if output is None else output.cpu(),
        [state.cpu() for state in finals],
        [state.cpu() for state in states],
    )


def _discard(call: StepCall, reason: str) -> None:
    """Stop using programs that differ from their module."""
    step = call.step
    compiled = call.compiled
    _remember(compiled.key, Refused(reason))
    if compiled.disk_key:
        stored.remove(compiled.disk_key)
    cause = "the module or its globals changed after it was traced, or its step mixes rows"
    warn_caller(f"The cell {step.cell.name!r} runs in plain torch from now on: {reason}; {cause}.")


def warn(cell: CellSpec, reason: str) -> None:
    """Warn once for each kind of cell that plain torch runs it, many times slower."""
    kind = cell.name if not isinstance(cell, Marked) else cell.inner.name
    if kind not in _warned:
        _warned.add(kind)
        warn_caller(f"The cell {kind!r} runs in plain torch, step by step: {reason}.")


# ---- a call --------------------------------------------------------------------------------------


def run(request: Request) -> Result:
    """Run a request outside of graphs."""
    request = check(request, numbers=False)
    device = request.values.device.type
    if torch.is_autocast_enabled(device):
        if request.cell.follows_autocast:
            return reference.BACKEND.run(request, "lanes")
        request = request.cast(torch.get_autocast_dtype(device))
    if records_operators() or has_tangent(request.tensors()):
        return reference.BACKEND.run(request, "lanes")
    library.leave_lost_threads()
    places = MACHINES[device].places(request.offsets, request.values.shape[0], request.lengths)
    return run_layers(request, partial(run_directions, run=partial(run_direction, places=places)))


def run_direction(
    layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool, *, places: Any = None
) -> DirectionResult:
    """See :class:`~raglane.kernels.contract.RunDirection`; ``places`` are those of its machine."""
    values = layer.values
    prepared = _prepared(layer, weights, state)
    if isinstance(prepared, str):
        check_unchanged(layer.offsets, values.shape[0], values.device)  # before torch reads them
        warn(layer.cell, prepared)
        return reference.run_direction(layer, weights, state, reverse)
    step, compiled = prepared
    is_forward_mode = has_tangent(step.leaves)
    if is_forward_mode or not compiled.trace.prepares:
        check_unchanged(layer.offsets, values.shape[0], values.device)
    if is_forward_mode:
        return reference.run_direction(layer, weights, state, reverse)
    call = StepCall(
        compiled,
        step,
        layer.offsets,
        not reverse,
        layer.need_output,
        layer.need_states,
        MACHINES[values.device.type],
        None if layer.offsets.is_cpu else layer.lengths_cpu,
    )
    call.places = places
    tensors = _tensors_of(call, layer, weights, state)
    try:
        output, finals, states = run_loop(call, tensors)
    except Refused as refused:
        # The kernel of these outputs needs more than a GPU has, that of others does not.
        warn(layer.cell, refused.reason)
        return reference.run_direction(layer, weights, state, reverse)
    # Not on a device, for which the host would wait.
    if values.is_cpu and compiled.calls % _CALLS == 0 and not are_transformed(tensors):
        reason = verify_call(call, tensors, finals, run_loop)
        if reason:
            _discard(call, reason)
            return reference.run_direction(layer, weights, state, reverse)
    compiled.calls += 1
    if values.dtype in NARROW:
        output = None if output is None else output.to(values.dtype)
        finals = [tensor.to(values.dtype) for tensor in finals]
        states = [tensor.to(values.dtype) for tensor in states]
    return DirectionResult(output, tuple(finals), tuple(states) if layer.need_states else None)


def _prepared(
    layer: Request, weights: Any, state: tuple[Tensor, ...]
) -> tuple[Step, CompiledStep] | str:
    """Return the step of one direction and its programs, or the reason why it has none."""
    values = layer.values
    sizes = tuple([tensor.shape[1] for tensor in state])
    try:
        step = step_of(layer.cell, weights, values.shape[1], sizes, values.dtype)
        return step, ready(step, values.device)
    except Refused as refused:
        return refused.reason


def _tensors_of(
    call: StepCall, layer: Request, weights: Any, state: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the tensors of a call, in a dtype in which programs compute."""
    step = call.step
    rows = layer.values
    if not call.compiled.trace.prepares:
        rows = layer.cell.prepare(weights, rows, layer.offsets)
    tensors = (rows, *step.elements, *state, *step.leaves)
    if any(tensor.dtype in NARROW for tensor in tensors):
        return tuple([step.converted(tensor) for tensor in tensors])
    return tensors


def run_in_graph(
    layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """Add a launch of a verified kernel to the graph of an export; raises Refused without one."""
    values = layer.values
    cell = layer.cell
    sizes = tuple([tensor.shape[1] for tensor in state])
    with _disable_current_modes():  # numbers do not affect a program
        like = [
            None
            if weight is None
            else nn.Parameter(torch.empty(weight.shape, device=weight.device))
            for weight in weights
        ]
        step = step_of(cell, cell.weights_type(*like), values.shape[1], sizes, values.dtype)
        compiled = ready(step, values.device)
    rows = values if compiled.trace.prepares else cell.prepare(weights, values, layer.offsets)
    machine = MACHINES[values.device.type]
    needs = (layer.need_output, layer.need_states)
    call = StepCall(compiled, step, layer.offsets, not reverse, *needs, machine)
    leaves = [weight.contiguous() for weight in weights if weight is not None]
    output, finals, states = run_loop(call, (rows, *state, *leaves))
    return DirectionResult(output, tuple(finals), tuple(states) if layer.need_states else None)


def run_loop(call: StepCall, tensors: tuple[Tensor, ...]) -> _Results:
    """Run a call: output, final states and the states of every step."""
    count = len(call.compiled.order)
    if call.places is None:
        call.places = call.machine.places(
            call.offsets, tensors[0].shape[0], call.lengths, call.long
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        results = list(_Loop.apply(call, *tensors))  # type: ignore[no-untyped-call]
    else:
        leaves = tensors[len(call.compiled.elements) + count :]
        vectors, weights = call.compiled.trace.parameters.of(leaves)
        results, _ = _forward(call, tensors, vectors, weights, None)
    output = results.pop(0) if call.need_output else None
    return output, results[:count], results[count:]


def _forward(
    call: StepCall,
    tensors: tuple[Tensor, ...],
    vectors: list[Tensor],
    weights: list[Tensor],
    selection: Wanted | None,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return output, final states and states of every step; and the saved tensors by node."""
    compiled = call.compiled
    count = len(call.compiled.elements)
    program = compiled.forward(call.need_output, call.need_states, selection)
    unchanged = [tensors[count + index] for index in compiled.unchanged_places]
    changing = [tensors[count + index] for index in compiled.changing_places]
    nodes = (*compiled.elements, *compiled.states, *compiled.unchanged, *compiled.vectors)
    inputs = dict(zip(nodes, (*tensors[:count], *changing, *unchanged, *vectors), strict=True))
    over = _saved_memory(program, tensors[0])
    outputs, finals = call.machine.run_lowered(
        program.lowered, call.places, call.ascending, inputs, weights, over
    )
    results = [] if program.output is None else [outputs[program.output]]
    results += _in_order(compiled, finals, unchanged)
    if call.need_states:
        total = tensors[0].shape[0]
        spread = [segments.spread(state, call.offsets, total) for state in unchanged]
        results += _in_order(compiled, [outputs[index] for index in program.states], spread)
    return results, {node: outputs[index] for node, index in program.saved.items()}


def _in_order(compiled: CompiledStep, changing: list[Any], unchanged: list[Any]) -> list[Any]:
    """Return what belongs to each state in the order of the cell's states."""
    return [(changing if changes else unchanged)[index] for changes, index in compiled.order]


def _saved_memory(program: Forward, like: Tensor) -> dict[int, Tensor]:
    """Allocate the tensors saved only for backward: a block that is kept for the next call."""
    if not like.is_cpu:
        return {}
    widths = {
        index: program.lowered.program.outputs[index][1]
        for node, index in program.saved.items()
        if node in program.only_saved
    }
    if not widths:
        return {}
    total = sum(widths.values())
    stride = library.row_length(total)
    whole = library.empty(like, like.shape[0], stride)
    return dict(
        zip(widths, whole.split_with_sizes([*widths.values(), stride - total], 1), strict=False)
    )


class _Loop(torch.autograd.Function):
    """A call to autograd: inputs are (call, *tensors), outputs those of :func:`_forward`."""

    @staticmethod
    def forward(ctx: Any, call: StepCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        compiled = call.compiled
        count = len(call.compiled.elements)
        end = count + len(compiled.order)
        needed = tuple(map(bool, ctx.needs_input_grad[1:]))
        values = ParameterValues(compiled.trace.parameters, tensors[end:], needed[end:])
        unchanged = tuple([needed[count + index] for index in compiled.unchanged_places])
        changing = [needed[count + index] for index in compiled.changing_places]
        selection = Wanted(
            call.need_output, call.need_states, needed[:count], unchanged, *values.wanted
        )
        results, saved = _forward(call, tensors, values.vectors, values.weights, selection)
        ctx.call = call
        ctx.selection = selection
        ctx.values = values
        ctx.nodes = list(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved.values())
        # An output must not be an input.
        inputs = set(map(id, tensors))
        results = [tensor.view_as(tensor) if id(tensor) in inputs else tensor for tensor in results]
        flags = _recorded(call, selection, changing)
        ctx.mark_non_differentiable(
            *[tensor for tensor, flag in zip(results, flags, strict=True) if not flag]
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.needs_input_grad) - 1
        needed = ctx.needs_input_grad[1:]
        # Read once: a checkpoint does not return them a second time.
        saved_tensors = ctx.saved_tensors
        tensors = saved_tensors[:count]
        saved = dict(zip(ctx.nodes, saved_tensors[count:], strict=True))
        if torch.is_grad_enabled() or are_transformed(grads):
            return None, *reference_gradients(ctx.call, tensors, grads, needed)
        try:
            computed = Gradients(ctx.call, ctx.selection, ctx.values, tensors, saved).run(grads)
        except Refused:
            computed = reference_gradients(ctx.call, tensors, grads, needed)
        pairs = zip(computed, needed, strict=True)
        return None, *[grad if is_needed else None for grad, is_needed in pairs]


def _recorded(call: StepCall, selection: Wanted, changing: list[bool]) -> list[bool]:
    """Return which results have a gradient if plain torch runs the steps one after the other."""
    output, new = call.compiled.recorded(selection, tuple(changing))
    finals = list(new)
    if any(before and not now for before, now in zip(changing, new, strict=True)):
        # The final state of an empty sequence is its initial one.
        lengths = call.offsets.diff() if call.lengths is None else call.lengths
        has_empty = not bool(lengths.all())
        finals = [now or (before and has_empty) for before, now in zip(changing, new, strict=True)]
    unchanged = list(selection.unchanged)
    flags = [output] if call.need_output else []
    flags += _in_order(call.compiled, finals, unchanged)
    if call.need_states:
        flags += _in_order(call.compiled, list(new), unchanged)
    return flags
