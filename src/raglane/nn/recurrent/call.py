"""The whole way of a layer's call: from its arguments to a request for a backend, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane._utils.checks import check_fits, check_storage
from raglane._utils.messages import message
from raglane._utils.tracing import are_transforms_active, is_jit_traced
from raglane.cells.spec import CellSpec
from raglane.errors import ArgumentTypeError, DispatchError, ShapeError
from raglane.kernels import dispatch, program
from raglane.kernels.contract import Backend, Packed, Request, Traits, zero_state
from raglane.nn.recurrent.freeze import Kept, kept_of
from raglane.nn.recurrent.inputs import Inputs, flatten_marks, read
from raglane.nn.recurrent.regularisation import regularised
from raglane.nn.recurrent.resets import Pieces, check_marks, split
from raglane.nn.recurrent.stack import Stack, State, one_or_tuple, plans
from raglane.ragged import Ragged

# What stands for the offsets of a request whose values lie in another layout than the flat one.
_NOWHERE = torch.empty(0, dtype=torch.int64, device="cpu")

# ---- what the calls of a layer have in common ---------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Plan:
    """What the calls of a layer have in common: made once, and again when a fact that it rests on has changed."""

    facts: tuple[Any, ...]
    cell: CellSpec  # the layer's equations
    run_cell: CellSpec  # what regularisation makes of them
    state_sizes: tuple[int, ...]  # of ``cell``
    layers: int
    directions: int
    dropout: float  # between layers; 0 outside of training
    regularises: bool  # anything differs from the plain cell
    begins: bool  # a sequence without a given state begins with anything but zeros
    backend: Backend
    schedule: str
    kept: Kept | None  # the weights that ``rl.freeze`` has packed, where this plan can use them
    # The backend finds whatever is wrong with the input and ``hx``, which are checked in the words of the layer's
    # arguments only then.
    checks_late: bool
    is_jit_traced: bool  # :func:`torch.jit.trace` records the calls


def plan_of(
    layer: Stack, weights: tuple[Any, ...], data: Tensor, need_states: bool = False, is_dense: bool = False
) -> Plan:
    """The plan for the calls of a layer as it is now: the last one, where all that it rests on is as it was."""
    if torch.compiler.is_compiling():
        return _make_plan(layer, (), weights, data, need_states, is_dense)
    settings = type(layer)._settings(layer)
    facts = (
        settings,
        len(weights),
        data.dtype,
        data.device,
        need_states,
        is_dense,
        dispatch._override.get(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch._C._are_functorch_transforms_active(),
        torch._C._get_tracing_state() is None,
    )
    plan = plans.get(layer)
    # 7.0 is equal to 7, and no size: the first settings are input_size, hidden_size and num_layers.
    if plan is None or plan.facts != facts or not type(settings[0]) is type(settings[1]) is type(settings[2]) is int:
        plan = plans[layer] = _make_plan(layer, facts, weights, data, need_states, is_dense)
    return plan


def _make_plan(
    layer: Stack,
    facts: tuple[Any, ...],
    weights: tuple[Any, ...],
    data: Tensor,
    need_states: bool,
    is_dense: bool,
) -> Plan:
    layer._check_sizes(len(weights))
    cell, rule = layer.cell, layer.regularisation
    run_cell = rule.cell(cell, layer.training)
    sizes = layer.input_size, layer.hidden_size
    checkpoints = layer.checkpoint_every is not None
    traits = Traits(run_cell, *sizes, data.dtype, data.device, need_states, weights, checkpoints)
    backend, schedule = dispatch.pick(traits, layer.schedule, layer.backend, dense=is_dense)
    if backend == "reference":
        _warn(layer, traits)
    is_cpu, regularises = backend == "cpu" and not torch.compiler.is_compiling(), rule.acts(layer.training)
    kept = kept_of(layer) if is_cpu else None  # what is compiled is never looked at again
    return Plan(
        facts,
        cell,
        run_cell,
        layer.state_sizes,
        layer.num_layers,
        2 if layer.bidirectional else 1,
        layer.dropout if layer.training else 0.0,
        regularises,
        layer._has_own_initial(),
        dispatch.BACKENDS[backend],
        schedule,
        None if kept is not None and kept.of_int8 and layer.training else kept,
        # Of a stack no layer sees the whole of hx, and what is drawn has the shape of the input.
        is_cpu and layer.num_layers == 1 and not regularises,
        is_jit_traced(),
    )


def _warn(layer: Stack, traits: Traits) -> None:
    """Say once of a cell that plain torch runs it, where nobody chose that and no kernel can do what is asked."""
    chosen = dispatch.override()
    if {layer.schedule, layer.backend, *chosen} != {dispatch.AUTO} or are_transforms_active():
        return
    if torch.compiler.is_compiling():
        return
    reason = program.BACKEND.why_not(traits)
    if traits.checkpoints:
        reason = "checkpoint_every has kernels for RNN, LSTM and GRU on a CPU, without state dropout, zoneout and clip"
    if reason:
        program.warn(traits.cell, reason)


# ---- a call ---------------------------------------------------------------------------------------------------------


def run(
    layer: Stack, input: Any, hx: State | None, lengths: Any, resets: Any, need_output: bool, need_states: bool
) -> tuple[Any, ...]:
    """Call a layer; the arguments and what comes back are those of its ``forward``."""
    inputs = read(input, lengths, layer.batch_first)
    weights = layer._weights()
    plan = plan_of(layer, weights, inputs.data, need_states, inputs.is_dense)
    if inputs.layout is not None and resets is None and _goes_as_it_came(layer, plan, inputs, weights, hx):
        request = _prepare_as_it_came(layer, plan, inputs, weights, hx, need_output)
        result = plan.backend.run(request, plan.schedule)
        output = inputs.restore_layout(result.output) if need_output and result.output is not None else None
        return output, one_or_tuple(result.state if inputs.is_batched else _unbatched(result.state))
    if plan.is_jit_traced:
        rule = "called with torch's own operators: a trace is fixed to the sizes of one batch"
        fix = "use torch.export.export or torch.compile, or backend='torch' with a tensor without lengths"
        raise DispatchError(message("torch.jit.trace", f"a layer {type(layer).__name__}", rule, fix))
    pieces: Pieces | None = None
    if resets is not None:
        check_marks(resets, input)
        pieces = split(inputs.flattened()[0], flatten_marks(resets, lengths, layer.batch_first))
    if not plan.checks_late:
        return _run(layer, plan, inputs, weights, hx, pieces, need_output, need_states)
    try:
        return _run(layer, plan, inputs, weights, hx, pieces, need_output, need_states)
    except Exception as error:
        failed = error
    check_arguments(layer, plan, inputs, weights, hx)
    raise failed


def _run(
    layer: Stack,
    plan: Plan,
    inputs: Inputs,
    weights: tuple[Any, ...],
    hx: Any,
    pieces: Pieces | None,
    need_output: bool,
    need_states: bool,
) -> tuple[Any, ...]:
    request = prepare(layer, plan, inputs, weights, hx, pieces, need_output, need_states)
    if plan.regularises:
        request = regularised(layer.regularisation, plan.run_cell, request)
    elif plan.kept is not None:
        request.packed = plan.kept.packed_for(weights)
    result = plan.backend.run(request, plan.schedule)
    batch, restore = inputs.flat or inputs.flattened()
    # The mask that drops parts of the state is a state of its own, which the caller does not see.
    own = len(plan.state_sizes)
    output = None if result.output is None else restore(result.output)
    final = result.state[:own]
    if pieces is not None:
        final = tuple([pieces.leave(part, plan.directions) for part in final])
    if not inputs.is_batched:
        final = _unbatched(final)
    state = final if own > 1 else final[0]
    if not need_states:
        return output, state
    found = result.states or ()
    return output, state, [one_or_tuple(tuple([batch._like(part) for part in states[:own]])) for states in found]


def prepare(
    layer: Stack,
    plan: Plan,
    inputs: Inputs,
    weights: tuple[Any, ...],
    hx: Any,
    pieces: Pieces | None = None,
    need_output: bool = True,
    need_states: bool = False,
) -> Request:
    """Put the request together, and check the input and ``hx`` unless the plan leaves that to the backend.

    ``hx`` has torch's shapes, ``(L * K, B, size)``, or ``(L * K, size)`` where the input has no batch; None for the
    layer's own. ``pieces`` is the input cut at its resets.
    """
    whole, _ = inputs.flat or inputs.flattened()
    batch = whole if pieces is None else pieces.batch
    if pieces is not None or not plan.checks_late:
        check_arguments(layer, plan, inputs, weights, hx)
    values, offsets = batch._values, batch._offsets
    state: tuple[Tensor, ...] = ()
    if hx is not None:
        state = _parts_of(plan, inputs, hx)
        if pieces is not None:
            pairs = zip(state, _own_state(layer, plan, batch), strict=True)
            state = tuple([pieces.enter(*pair, plan.directions) for pair in pairs])
    elif plan.begins:
        state = _own_state(layer, plan, batch)
    return Request(
        plan.cell,
        values,
        offsets,
        None if offsets.is_cpu else batch.host_lengths,
        state,
        weights,
        plan.layers,
        plan.directions,
        plan.dropout,
        layer.training,
        need_output,
        need_states,
        plan.state_sizes,
        checkpoint_every=layer.checkpoint_every or 0,
    )


def _goes_as_it_came(layer: Stack, plan: Plan, inputs: Inputs, weights: tuple[Any, ...], hx: Any) -> bool:
    """Whether the backend takes the input in the layout in which it came, with no way through the flat one.

    Where anything is wrong, the way through the flat layout says what.
    """
    if plan.backend.layouts.get(plan.schedule) is not type(inputs.layout):
        return False
    if plan.regularises or (plan.begins and hx is None) or forward_ad._current_level >= 0:
        return False
    if isinstance(inputs.layout, Packed):
        sizes, there, _ = inputs.layout
        inputs.count = int(sizes[0]) if sizes.shape[0] else 0
        if not inputs.count or (there is not None and there.shape[0] != inputs.count):
            return False  # sequences of length 0, which torch's kernels do not know
        check_storage("packed.data", inputs.data)
    data, like = inputs.data, layer._like(weights)
    if like is None or data.shape[-1] != layer.input_size or data.layout is not torch.strided:
        return False
    return data.dtype == like.dtype and data.device == like.device  # or autocast casts


def _prepare_as_it_came(
    layer: Stack, plan: Plan, inputs: Inputs, weights: tuple[Any, ...], hx: Any, need_output: bool
) -> Request:
    """The request for an input that needs no way through the flat layout."""
    state: tuple[Tensor, ...] = ()
    if hx is not None:
        _check_state(plan, hx, inputs.count if inputs.is_batched else None, inputs.data)
        state = _parts_of(plan, inputs, hx)
    return Request(
        plan.cell,
        inputs.data,
        _NOWHERE,
        None,
        state,
        weights,
        plan.layers,
        plan.directions,
        plan.dropout,
        layer.training,
        need_output,
        state_sizes=plan.state_sizes,
        layout=inputs.layout,
    )


# ---- states ---------------------------------------------------------------------------------------------------------


def _unbatched(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Final states without the dimension of the sequences."""
    return tuple([part.squeeze(1) for part in state])


def _parts_of(plan: Plan, inputs: Inputs, hx: Any) -> tuple[Tensor, ...]:
    """The tensors of a state, as many as the cell has, each with a dimension of the sequences."""
    parts = (hx,) if len(plan.state_sizes) == 1 else hx
    if not isinstance(parts, tuple | list) or len(parts) != len(plan.state_sizes):
        raise _not_a_state(plan, hx, "hx")
    return tuple(parts) if inputs.is_batched else tuple([part.unsqueeze(1) for part in parts])


def _not_a_state(plan: Plan, hx: Any, argument: str) -> ArgumentTypeError:
    names = plan.cell.states
    got = "a nested tensor" if isinstance(hx, Tensor) and hx.is_nested else f"a {type(hx).__name__}"
    rule = "a tensor" if len(names) == 1 else f"a tuple ({', '.join(names)}) of tensors"
    return ArgumentTypeError(message(argument, got, rule, "pass the state that the layer returned, or None for zeros"))


def _own_state(layer: Stack, plan: Plan, batch: Ragged) -> tuple[Tensor, ...]:
    """The initial states of a batch for which none are given: one ``(L * K, B, size)`` each."""
    if not plan.begins:
        return zero_state(batch.values, plan.layers * plan.directions, batch._count, plan.state_sizes)
    own = layer._own_initial(batch)
    _check_state(plan, own, batch._count, batch.values, "initial_state")
    return (own,) if len(plan.state_sizes) == 1 else tuple(own)


def check_arguments(layer: Stack, plan: Plan, inputs: Inputs, weights: tuple[Any, ...], hx: Any) -> None:
    """Raise where the input or ``hx`` does not fit the layer."""
    batch, _ = inputs.flattened()
    values = batch._values
    if values.dim() != 2 or values.shape[1] != layer.input_size:
        got, rule = (
            f"elements of shape {tuple(values.shape[1:])}",
            f"a batch whose elements have input_size = {layer.input_size} features",
        )
        fix = "embed or reshape it, or build the layer with another input_size"
        raise ShapeError(message("input", got, rule, fix))
    like = layer._like(weights)
    # What is not a tensor at all the backend will find, and name.
    if isinstance(like, Tensor):
        is_alike = values.dtype is like.dtype and values.device == like.device
        if not is_alike or values.layout is not torch.strided:
            check_fits("input", values, like)
    if hx is not None:
        _check_state(plan, hx, batch._count if inputs.is_batched else None, values)


def _check_state(plan: Plan, hx: Any, count: int | None, values: Tensor, argument: str = "hx") -> None:
    """Raise where an initial state does not fit the layer; ``count`` is None for an input without a batch."""
    names = plan.cell.states
    given = (hx,) if len(names) == 1 else hx
    if (
        not isinstance(given, tuple | list)
        or len(given) != len(names)
        or not all(isinstance(part, Tensor) and not part.is_nested for part in given)
    ):
        raise _not_a_state(plan, hx, argument)
    rows = plan.layers * plan.directions
    for name, size, part in zip(names, plan.state_sizes, given, strict=True):
        wanted = (rows, size) if count is None else (rows, count, size)
        if part.shape != wanted:
            rule = f"of shape {wanted}: layers times directions, {'' if count is None else 'sequences, '}size"
            fix = "give each sequence its state, in the order of the batch"
            raise ShapeError(message(f"{argument} ({name})", f"shape {tuple(part.shape)}", rule, fix))
        check_fits(f"{argument} ({name})", part, values)
        check_storage(f"{argument} ({name})", part)
