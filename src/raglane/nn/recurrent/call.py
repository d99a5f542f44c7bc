"""A layer's call: from its arguments to a request, to a backend, and back to the input's kind."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import module as _module

from raglane._utils.checks import check_fits, check_storage
from raglane._utils.tracing import (
    are_transforms_active,
    is_exporting,
    is_jit_traced,
    records_operators,
    refuse_jit_trace,
)
from raglane.cells.module import ModuleCell
from raglane.cells.spec import CellSpec
from raglane.errors import ArgumentTypeError, DispatchError, RaglaneError, ShapeError
from raglane.kernels import dispatch, program, reference
from raglane.kernels.contract import Backend, InputKind, Packed, Request, Traits, zero_state
from raglane.kernels.cpu.backend import run_layer, run_stack, run_table
from raglane.kernels.cpu.layer import Layer, find_layer, offsets_of_steps
from raglane.kernels.triton import launch
from raglane.native.library import has_cell, leave_lost_threads
from raglane.nn.recurrent.inputs import Inputs, check_input, flatten_resets, read
from raglane.nn.recurrent.packed_weights import PackedWeights, packed_weights
from raglane.nn.recurrent.regularisation import regularised
from raglane.nn.recurrent.resets import Pieces, check_lengths, check_resets, resetting, split
from raglane.nn.recurrent.stack import Stack, State, one_or_tuple, plans
from raglane.packing.flat_values import RowTable
from raglane.ragged import Ragged

# The offsets of a request whose values have another layout than the flat one.
_NO_OFFSETS = torch.empty(0, dtype=torch.int64, device="cpu")

# ---- plans ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CallPlan:
    """The values that all calls of a layer share, cached until one of ``facts`` changes."""

    facts: tuple[Any, ...]
    cell: CellSpec  # the layer's equations
    run_cell: CellSpec  # the same with regularisation
    state_sizes: tuple[int, ...]  # of ``cell``
    layers: int
    directions: int
    dropout: float  # between layers; 0 outside of training
    regularises: bool  # regularisation has an effect in this mode
    has_own_initial: bool  # without ``hx``, sequences begin with a state other than zeros
    backend: Backend
    schedule: str
    stored: PackedWeights | None  # from ``rl.pack_weights``, if this plan can use them
    # The backend validates the input and ``hx``. If it raises, they are checked again, to name the
    # layer's arguments.
    checks_late: bool
    is_jit_traced: bool  # within :func:`torch.jit.trace`
    # Each layer of the stack as one of the cpu kernels, if a call has no more parts.
    kernels: tuple[Layer, ...]
    kernel: Layer | None  # the only one of them, of a stack of one layer


def plan_of(
    layer: Stack,
    weights: tuple[Any, ...],
    data: Tensor,
    need_states: bool = False,
    kind: InputKind = "flat",
) -> CallPlan:
    """Return the layer's cached plan, or make a new one if one of its facts has changed."""
    if torch.compiler.is_compiling():
        return _make_plan(layer, (), weights, data, need_states, kind)
    settings = type(layer)._settings(layer)
    facts = (
        settings,
        len(weights),
        data.dtype,
        data.device,
        need_states,
        kind,
        layer.checkpoint_every
        and torch.is_grad_enabled(),  # without a backward pass, any backend runs the layer
        dispatch._override.get(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch._C._are_functorch_transforms_active(),
        torch._C._get_tracing_state() is None,
    )
    plan = plans.get(layer)
    # 7.0 equals 7 but is not a valid size. Not a function of its own, which every call would enter.
    input_size, hidden_size, num_layers = settings[:3]
    are_sizes = type(input_size) is type(hidden_size) is type(num_layers) is int
    if plan is None or plan.facts != facts or not are_sizes:
        plan = _make_plan(layer, facts, weights, data, need_states, kind)
        # Otherwise a kernel that cannot be compared now would be refused for good.
        if not (data.is_cuda and launch.why_not_now()):
            plans[layer] = plan
    return plan


def _make_plan(
    layer: Stack,
    facts: tuple[Any, ...],
    weights: tuple[Any, ...],
    data: Tensor,
    need_states: bool,
    kind: InputKind,
) -> CallPlan:
    layer._check_sizes(len(weights))
    cell = layer.cell
    rule = layer.regularisation
    run_cell = rule.cell(cell, layer.training)
    checkpoints = layer.checkpoint_every is not None and torch.is_grad_enabled()
    traits = Traits(
        run_cell,
        layer.input_size,
        layer.hidden_size,
        data.dtype,
        data.device,
        need_states,
        weights,
        checkpoints,
    )
    backend, schedule = dispatch.pick(traits, layer.schedule, layer.backend, kind=kind)
    if backend == "reference":
        _warn(layer, traits)
    is_cpu = backend == "cpu" and not torch.compiler.is_compiling()
    regularises = rule.acts(layer.training)
    has_own_initial = layer._has_own_initial()
    directions = 2 if layer.bidirectional else 1
    # With several layers no backend call validates all of hx, and masks are drawn in the input's
    # shape.
    is_module = isinstance(cell, ModuleCell)
    is_plain = is_cpu and not (regularises or is_module)
    checks_late = is_plain and layer.num_layers == 1
    has_more_parts = checkpoints or has_own_initial or torch.is_autocast_enabled("cpu")
    kernels: tuple[Layer, ...] = ()
    if is_plain and not has_more_parts and not is_jit_traced():
        kernels = _kernels_of(layer, cell, need_states, data.dtype)
    return CallPlan(
        facts=facts,
        cell=cell,
        run_cell=run_cell,
        state_sizes=layer.state_sizes,
        layers=layer.num_layers,
        directions=directions,
        dropout=_dropout_of(layer),
        regularises=regularises,
        has_own_initial=has_own_initial,
        backend=dispatch.BACKENDS[backend],
        schedule=schedule,
        stored=_usable_weights(layer) if is_cpu else None,
        checks_late=checks_late,
        is_jit_traced=is_jit_traced(),
        kernels=kernels,
        kernel=kernels[0] if len(kernels) == 1 and checks_late else None,
    )


def _dropout_of(layer: Stack) -> float:
    """Return the dropout between layers; 0 outside of training."""
    return layer.dropout if layer.training else 0.0


def _kernels_of(
    layer: Stack, cell: CellSpec, need_states: bool, dtype: torch.dtype
) -> tuple[Layer, ...]:
    """Return each layer of a stack as one of the cpu kernels; () if a call has more parts."""
    if need_states or (layer.num_layers > 1 and _dropout_of(layer) > 0):
        return ()
    directions = 2 if layer.bidirectional else 1
    sizes = layer.state_sizes
    kernels = [find_layer(cell.name, layer.input_size, sizes, directions, dtype, 0)]
    above = cell.above() if layer.num_layers > 1 else cell
    if not has_cell(above.name):
        return ()
    kernels += [find_layer(above.name, directions * sizes[0], sizes, directions, dtype, 0)] * (
        layer.num_layers - 1
    )
    return tuple(kernels)


def _usable_weights(layer: Stack) -> PackedWeights | None:
    """Return the packed weights of a layer, except int8 ones in training."""
    stored = packed_weights(layer)
    if stored is not None and stored.is_int8 and layer.training:
        return None
    return stored


def _warn(layer: Stack, traits: Traits) -> None:
    """Warn once per cell if plain torch runs it only because no kernel supports it."""
    is_chosen = {layer.schedule, layer.backend, *dispatch.override()} != {dispatch.AUTO}
    if is_chosen or are_transforms_active() or torch.compiler.is_compiling():
        return
    reason = program.BACKEND.why_not(traits)
    if traits.checkpoints:
        reason = "checkpoint_every has kernels for RNN, LSTM and GRU on a CPU, without state dropout, zoneout and clip"
    if reason:
        program.warn(traits.cell, reason)


# ---- a call --------------------------------------------------------------------------------------


def run(
    layer: Stack,
    input: Any,
    hx: State | None,
    lengths: Any,
    resets: Any,
    need_output: bool,
    need_states: bool,
) -> tuple[Any, ...]:
    """Run a layer, with the arguments and the result of ``RecurrentLayer.forward``."""
    inputs = read(input, lengths, layer.batch_first)
    weights = layer._weights()
    plan = plan_of(layer, weights, inputs.data, need_states, inputs.kind)
    keeps_layout = (
        inputs.layout is not None
        and resets is None
        and _keeps_layout(layer, plan, inputs, weights, hx)
    )
    if plan.is_jit_traced and not keeps_layout:
        _refuse_trace(layer)
    pieces: Pieces | Tensor | None = None
    if resets is not None:
        check_resets(resets, input)
        batch = inputs.flattened()[0]
        starts = flatten_resets(resets, lengths, layer.batch_first)
        check_lengths(batch, starts)
        pieces = _pieces_of(plan, weights, batch, starts)
    if len(plan.kernels) > 1 and pieces is None:
        result = _run_stack(plan, inputs, weights, hx, need_output)
        if result is not None:
            return result
    if not plan.checks_late:
        return _run(
            layer, plan, inputs, weights, hx, pieces, need_output, need_states, keeps_layout
        )
    try:
        is_plain = pieces is None and not records_operators()
        if plan.kernel is not None and is_plain and forward_ad._current_level < 0:
            return _run_kernel(plan.kernel, plan, inputs, weights, hx, need_output)
        return _run(layer, plan, inputs, weights, hx, pieces, need_output, need_states)
    except Exception as error:
        failed = error
    check_arguments(layer, plan, inputs, weights, hx)
    raise failed


def _pieces_of(
    plan: CallPlan, weights: tuple[Any, ...], batch: Ragged, starts: Ragged
) -> Pieces | Tensor:
    """Return the batch split where episodes start, or the starts if steps read them."""
    return starts.values if _resets_in_steps(plan, weights, batch, starts) else split(batch, starts)


def _refuse_trace(layer: Stack) -> None:
    """Raise because a trace would not record the call."""
    rule = "a layer on backend 'torch': a trace records PyTorch's own operators, and only the sizes of this batch"
    fix = (
        "use torch.export.export or torch.compile, rl.export for a file, "
        "or backend='torch' with a tensor without lengths"
    )
    refuse_jit_trace(f"a layer {type(layer).__name__}", rule, fix)


def _resets_in_steps(
    plan: CallPlan, weights: tuple[Any, ...], batch: Ragged, resets: Ragged
) -> bool:
    """Return True if steps read resets: on a GPU, where splitting would wait, and in a graph."""
    needs_pieces = plan.has_own_initial or plan.regularises or hasattr(weights[0], "prepare")
    if is_exporting() and needs_pieces:
        rule = "None in an exported graph, for a layer with an initial_state, regularisation or a prepare of its own"
        raise DispatchError(
            "resets", "a batch", rule, "make each episode a sequence before the model"
        )
    on_device = plan.backend is program.GPU and resets.device == batch.device
    return is_exporting() or (on_device and not needs_pieces)


def _has_hooks(layer: Stack) -> bool:
    """Return True if a call of a module runs more than the method of its class."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._compiled_call_impl
        or "forward" in vars(layer)
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
    )


def step(layer: Stack, x_t: Tensor, state: Any) -> tuple[Tensor, State] | None:
    """Run one step of a layer with packed weights by the fast path; None if it needs :func:`run`."""
    if torch.is_grad_enabled() or records_operators() or _has_hooks(layer):
        return None
    weights = layer._weights()
    plan = plan_of(layer, weights, x_t, kind="dense")
    if not plan.kernels or plan.stored is None or forward_ad._current_level >= 0:
        return None
    count = len(plan.state_sizes)
    states = (state,) if count == 1 else state
    packed = plan.stored.packed_for(weights)
    if not packed or not isinstance(states, tuple | list) or len(states) != count:
        return None
    leave_lost_threads()
    offsets = offsets_of_steps(x_t.shape[0] if x_t.dim() == 2 else 1)
    if plan.kernel is None:
        whole = run_stack(
            plan.kernels, offsets, x_t, tuple(states), _flat_of(weights), True, packed
        )
        return None if whole is None else (cast(Tensor, whole[0]), one_or_tuple(whole[1]))
    try:
        result = plan.kernel.forward(
            offsets,
            (x_t, *states, *weights[0]),
            need_output=True,
            save=False,
            need_c=False,
            packed=packed[0],
        )
    except RaglaneError:
        return None  # the whole call names the layer's arguments
    return cast(Tensor, result.output), one_or_tuple(result.final)


def _run_stack(
    plan: CallPlan, inputs: Inputs, weights: tuple[Any, ...], hx: Any, need_output: bool
) -> tuple[Any, Any] | None:
    """Run a stack of layers by one call of C, for inference; None if it needs :func:`_run`."""
    if not _runs_at_once(plan, hx):
        return None
    states = () if hx is None else _states_of(plan, inputs, hx)
    packed = plan.stored.packed_for(weights) if plan.stored is not None else ()
    leave_lost_threads()
    table = None if inputs.find_table is None else inputs.find_table()
    if table is not None:
        rows: Tensor | RowTable = table
        values = inputs.data
        restore = inputs.restore_layout
    else:
        batch, restore = inputs.flat or inputs.flattened()
        rows = batch._offsets
        values = batch._values
    result = run_stack(plan.kernels, rows, values, states, _flat_of(weights), need_output, packed)
    if result is None:
        return None
    output, final = result
    if not inputs.is_batched:
        final = tuple([state.squeeze(1) for state in final])
    return None if output is None else restore(output), one_or_tuple(final)


def _runs_at_once(plan: CallPlan, hx: Any) -> bool:
    """Return True if nothing records a call, and ``hx`` has the tensors of a state."""
    if torch.is_grad_enabled() or records_operators() or forward_ad._current_level >= 0:
        return False
    states = (hx,) if len(plan.state_sizes) == 1 else hx
    if hx is None or not isinstance(states, tuple | list) or len(states) != len(plan.state_sizes):
        return hx is None
    return all(isinstance(state, Tensor) for state in states)


def _flat_of(weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the weights of all layers and directions one after the other."""
    return tuple(chain.from_iterable(weights))


def _run_kernel(
    kernel: Layer,
    plan: CallPlan,
    inputs: Inputs,
    weights: tuple[Any, ...],
    hx: Any,
    need_output: bool,
) -> tuple[Any, Any]:
    """Run a call that is one layer of the cpu kernels, like :func:`_run`."""
    operands = weights[0] if plan.directions == 1 else (*weights[0], *weights[1])
    if hx is not None:
        operands = (*_states_of(plan, inputs, hx), *operands)
    ready = plan.stored.packed_for(weights) if plan.stored is not None else ()
    packed = ready[0] if ready else None
    leave_lost_threads()
    result = None
    table = None if inputs.find_table is None else inputs.find_table()
    if table is not None:
        result = run_table(kernel, table, (inputs.data, *operands), need_output, packed)
    if result is not None:
        output, final = result
        restore = inputs.restore_layout
    else:
        batch, restore = inputs.flat or inputs.flattened()
        output, final, _ = run_layer(
            kernel, batch._offsets, (batch._values, *operands), need_output, packed=packed
        )
    if not inputs.is_batched:
        final = tuple([state.squeeze(1) for state in final])
    return None if output is None else restore(output), final if len(final) > 1 else final[0]


def _run(
    layer: Stack,
    plan: CallPlan,
    inputs: Inputs,
    weights: tuple[Any, ...],
    hx: Any,
    resets: Pieces | Tensor | None,
    need_output: bool,
    need_states: bool,
    keeps_layout: bool = False,
) -> tuple[Any, ...]:
    pieces = resets if isinstance(resets, Pieces) else None
    request = prepare(
        layer, plan, inputs, weights, hx, pieces, need_output, need_states, keeps_layout
    )
    backend = plan.backend
    if isinstance(resets, Tensor):
        request = resetting(request, resets)
        if is_exporting() and backend is not program.GPU:
            backend = reference.BACKEND  # which is a loop in the graph
    if plan.regularises:
        request = regularised(layer.regularisation, plan.run_cell, request)
    elif plan.stored is not None:
        request.packed = plan.stored.packed_for(weights)
    result = backend.run(request, plan.schedule)
    batch = None
    restore = inputs.restore_layout
    if not keeps_layout:
        batch, restore = inputs.flat or inputs.flattened()
    output = None if result.output is None else restore(result.output)
    # State dropout appends its mask to the states; the result does not contain it.
    count = len(plan.state_sizes)
    state = _final_state(plan, inputs, pieces, result.state[:count])
    if batch is None or not need_states:
        return output, state
    histories = [
        one_or_tuple(tuple([batch._like(values) for values in states[:count]]))
        for states in result.states or ()
    ]
    return output, state, histories


def _final_state(
    plan: CallPlan, inputs: Inputs, pieces: Pieces | None, states: tuple[Tensor, ...]
) -> State:
    """Return the final states of the sequences, in the form in which the layer returns them."""
    if pieces is not None:
        states = tuple([pieces.leave(state, plan.directions) for state in states])
    if not inputs.is_batched:
        states = tuple([state.squeeze(1) for state in states])
    return states if len(states) > 1 else states[0]


def prepare(
    layer: Stack,
    plan: CallPlan,
    inputs: Inputs,
    weights: tuple[Any, ...],
    hx: Any,
    pieces: Pieces | None = None,
    need_output: bool = True,
    need_states: bool = False,
    keeps_layout: bool = False,
) -> Request:
    """Build the request, and check the input and ``hx`` unless the backend does so.

    ``hx`` is ``(L * K, B, size)``, or ``(L * K, size)`` for an input without a batch; None for the
    layer's own initial state. ``pieces`` is the input split at its resets.
    """
    state: tuple[Tensor, ...] = ()
    if keeps_layout:
        values = inputs.data
        offsets = _NO_OFFSETS
        lengths = None
        if hx is not None:
            _check_state(plan, hx, inputs.count if inputs.is_batched else None, values)
            state = _states_of(plan, inputs, hx)
    else:
        whole, _ = inputs.flat or inputs.flattened()
        batch = whole if pieces is None else pieces.batch
        if pieces is not None or not plan.checks_late:
            check_arguments(layer, plan, inputs, weights, hx)
        values = batch._values
        offsets = batch._offsets
        lengths = None if offsets.is_cpu else batch.lengths_cpu
        if hx is not None:
            state = _states_of(plan, inputs, hx)
            if pieces is not None:
                pairs = zip(state, _initial_states(layer, plan, batch), strict=True)
                state = tuple([pieces.enter(*pair, plan.directions) for pair in pairs])
        elif plan.has_own_initial:
            state = _initial_states(layer, plan, batch)
    return Request(
        plan.cell,
        values,
        offsets,
        lengths,
        state,
        weights,
        plan.layers,
        plan.directions,
        plan.dropout,
        layer.training,
        need_output,
        need_states,
        plan.state_sizes,
        layout=inputs.layout if keeps_layout else None,
        checkpoint_every=layer.checkpoint_every or 0,
    )


def _keeps_layout(
    layer: Stack, plan: CallPlan, inputs: Inputs, weights: tuple[Any, ...], hx: Any
) -> bool:
    """Return True if the backend supports the input's own layout, and the input is valid."""
    if plan.backend.layouts.get(plan.schedule) is not type(inputs.layout):
        return False
    if plan.regularises or (plan.has_own_initial and hx is None) or forward_ad._current_level >= 0:
        return False
    if isinstance(inputs.layout, Packed):
        sizes, order, _ = inputs.layout
        inputs.count = int(sizes[0]) if sizes.shape[0] else 0
        if not inputs.count or (order is not None and order.shape[0] != inputs.count):
            return False  # sequences of length 0, which torch's kernels do not support
        check_storage("packed.data", inputs.data)
    else:
        check_input(inputs.data)
    data = inputs.data
    like = layer._like(weights)
    if like is None or data.shape[-1] != layer.input_size or data.layout is not torch.strided:
        return False
    return data.dtype == like.dtype and data.device == like.device  # otherwise autocast casts


# ---- states --------------------------------------------------------------------------------------


def _states_of(plan: CallPlan, inputs: Inputs, hx: Any) -> tuple[Tensor, ...]:
    """Return ``hx`` as a tuple, each tensor with a batch dimension."""
    count = len(plan.state_sizes)
    states = (hx,) if count == 1 else hx
    if not isinstance(states, tuple | list) or len(states) != count:
        raise _not_a_state(plan, hx, "hx")
    return tuple(states) if inputs.is_batched else tuple([state.unsqueeze(1) for state in states])


def _not_a_state(plan: CallPlan, hx: Any, argument: str) -> ArgumentTypeError:
    names = plan.cell.states
    if argument == "hx" and _are_lengths(hx):
        rule = "the initial state" + (f" ({', '.join(names)})" if len(names) > 1 else "")
        fix = "pass lengths of a padded tensor by name, as lengths=...; a Ragged contains its own"
        return ArgumentTypeError(argument, f"whole numbers, a {type(hx).__name__}", rule, fix)
    got = "a nested tensor" if isinstance(hx, Tensor) and hx.is_nested else f"a {type(hx).__name__}"
    rule = "a tensor" if len(names) == 1 else f"a tuple ({', '.join(names)}) of tensors"
    return ArgumentTypeError(
        argument, got, rule, "pass the state that the layer returned, or None for zeros"
    )


def _are_lengths(hx: Any) -> bool:
    """Return True for one dimension of whole numbers, which no state is."""
    if isinstance(hx, list | tuple):
        return len(hx) > 0 and all(isinstance(number, int | np.integer) for number in hx)
    if isinstance(hx, np.ndarray):
        return hx.ndim == 1 and hx.dtype.kind in "iu"
    if not isinstance(hx, Tensor) or hx.is_nested or hx.dim() != 1:
        return False
    return not (hx.is_floating_point() or hx.is_complex() or hx.dtype is torch.bool)


def _initial_states(layer: Stack, plan: CallPlan, batch: Ragged) -> tuple[Tensor, ...]:
    """Return the layer's own initial states for a batch, ``(L * K, B, size)`` each."""
    if not plan.has_own_initial:
        rows = plan.layers * plan.directions
        return zero_state(batch.values, rows, batch._count, plan.state_sizes)
    initial = layer._own_initial(batch)
    _check_state(plan, initial, batch._count, batch.values, "initial_state")
    return (initial,) if len(plan.state_sizes) == 1 else tuple(initial)


def check_arguments(
    layer: Stack, plan: CallPlan, inputs: Inputs, weights: tuple[Any, ...], hx: Any
) -> None:
    """Raise if the input or ``hx`` does not fit the layer."""
    batch, _ = inputs.flattened()
    values = batch._values
    if values.dim() != 2 or values.shape[1] != layer.input_size:
        got = f"elements of shape {tuple(values.shape[1:])}"
        rule = f"elements of input_size = {layer.input_size} features"
        raise ShapeError(
            "input", got, rule, "embed or reshape it, or build the layer with another input_size"
        )
    like = layer._like(weights)
    if isinstance(like, Tensor):  # otherwise the backend raises and names the weight
        is_alike = values.dtype is like.dtype and values.device == like.device
        if not is_alike or values.layout is not torch.strided:
            check_fits("input", values, like)
    if hx is not None:
        _check_state(plan, hx, batch._count if inputs.is_batched else None, values)


def _check_state(
    plan: CallPlan, hx: Any, count: int | None, values: Tensor, argument: str = "hx"
) -> None:
    """Raise if an initial state does not fit the layer; ``count`` is None without a batch."""
    names = plan.cell.states
    states = (hx,) if len(names) == 1 else hx
    if (
        not isinstance(states, tuple | list)
        or len(states) != len(names)
        or not all(isinstance(state, Tensor) and not state.is_nested for state in states)
        or (argument == "hx" and _are_lengths(hx))
    ):
        raise _not_a_state(plan, hx, argument)
    rows = plan.layers * plan.directions
    for name, size, state in zip(names, plan.state_sizes, states, strict=True):
        shape = (rows, size) if count is None else (rows, count, size)
        if state.shape != shape:
            rule = f"of shape {shape}: layers times directions, {'' if count is None else 'sequences, '}size"
            fix = "pass one state per sequence, in the order of the batch"
            raise ShapeError(f"{argument} ({name})", f"shape {tuple(state.shape)}", rule, fix)
        check_fits(f"{argument} ({name})", state, values)
        check_storage(f"{argument} ({name})", state)
