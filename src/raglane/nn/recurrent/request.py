"""From a layer's call to a request for a backend, and back: the whole way of every call, in :func:`run`.

A layer changes seldom, so it is checked and the backend chosen once: a :class:`Plan`, which holds for as long
as nothing that it was made of has changed. Tensors are another matter: each call takes them from the layer anew, and
the backend looks at them in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane.cells.spec import CellSpec
from raglane.checks import check_fits, check_storage
from raglane.errors import ArgumentTypeError, DispatchError, ShapeError, message
from raglane.kernels import dispatch, program
from raglane.kernels.contract import Backend, Packed, Request, Traits, zero_state
from raglane.nn.recurrent.inputs import Inputs, flatten_marks, read
from raglane.nn.recurrent.kept import Kept, kept_of
from raglane.nn.recurrent.regularisation import regularised
from raglane.nn.recurrent.resets import Pieces, check_marks, split
from raglane.ragged import Ragged
from raglane.tracing import are_transforms_active, is_jit_traced

if TYPE_CHECKING:
    from raglane.nn.recurrent.layer import RecurrentLayer

__all__ = ["Plan", "State", "forget_plan", "one_or_tuple", "plan_of", "prepare", "run"]

State = Tensor | tuple[Tensor, ...]

# What stands for the offsets of a request whose values lie in another layout than the flat one.
_NOWHERE = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(slots=True, eq=False)
class Plan:
    """What the calls of a layer have in common.

    Attributes:
        facts: what it was made of, and holds for.
        cell: the layer's equations.
        run_cell: what regularisation makes of them.
        state_sizes: the size of each state of ``cell``.
        layers, directions: how many of each.
        dropout: between layers; 0 outside of training.
        regularises: whether anything differs from the plain cell.
        begins: whether a sequence for which no state is given begins with anything but zeros.
        backend, schedule: who runs it, and how.
        kept: the weights that ``rl.freeze`` has packed, where this plan can use them.
    """

    facts: tuple[Any, ...]
    cell: CellSpec
    run_cell: CellSpec
    state_sizes: tuple[int, ...]
    layers: int
    directions: int
    dropout: float
    regularises: bool
    begins: bool
    backend: Backend
    schedule: str
    kept: Kept | None


# Not on the layers themselves, so that no copy, no pickle and nobody who looks through their attributes finds it.
_plans: WeakKeyDictionary[torch.nn.Module, Plan] = WeakKeyDictionary()


def plan_of(
    layer: RecurrentLayer,
    weights: tuple[Any, ...],
    data: Tensor,
    need_states: bool = False,
    is_dense: bool = False,
) -> Plan:
    """The plan for the calls of a layer as it is now: the last one, where all that it rests on is as it was.

    Args:
        layer: the layer.
        weights: the layer's, as they are now; how many there are.
        data: the input, in any layout, for its dtype and device.
        need_states: whether the states of every step are wanted.
        is_dense: whether the input is a tensor in which every element is real.

    Raises:
        ArgumentError: an attribute of the layer was changed to what it cannot be.
        DispatchError: no backend runs this.
    """
    width, size, layers = layer.input_size, layer.hidden_size, layer.num_layers
    facts = (
        layer.cell,
        width,
        size,
        layers,
        len(weights),
        getattr(layer, "proj_size", 0),
        layer.bidirectional,
        layer.dropout,
        layer.training,
        layer.schedule,
        layer.backend,
        layer.regularisation,
        layer._has_own_initial(),
        data.dtype,
        data.device,
        need_states,
        is_dense,
        dispatch.override(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        are_transforms_active(),
    )
    if torch.compiler.is_compiling():
        return _make_plan(layer, facts, weights, data, need_states, is_dense)
    plan = _plans.get(layer)
    # 7.0 is equal to 7, and no size.
    if plan is None or plan.facts != facts or not (type(width) is type(size) is type(layers) is int):
        plan = _plans[layer] = _make_plan(layer, facts, weights, data, need_states, is_dense)
    return plan


def _make_plan(
    layer: RecurrentLayer,
    facts: tuple[Any, ...],
    weights: tuple[Any, ...],
    data: Tensor,
    need_states: bool,
    is_dense: bool,
) -> Plan:
    layer._check_sizes(len(weights))
    cell, rule = layer.cell, layer.regularisation
    run_cell = rule.cell(cell, layer.training)
    traits = Traits(run_cell, layer.input_size, layer.hidden_size, data.dtype, data.device, need_states, weights)
    backend, schedule = dispatch.pick(traits, layer.schedule, layer.backend, dense=is_dense)
    if backend == "reference":
        _warn(layer, traits)
    return Plan(
        facts,
        cell,
        run_cell,
        layer.state_sizes,
        layer.num_layers,
        2 if layer.bidirectional else 1,
        layer.dropout if layer.training else 0.0,
        rule.acts(layer.training),
        layer._has_own_initial(),
        dispatch.BACKENDS[backend],
        schedule,
        _kept(layer) if backend == "cpu" else None,
    )


def _kept(layer: RecurrentLayer) -> Kept | None:
    """What was packed of the weights, where a plan can use it."""
    if torch.compiler.is_compiling():
        return None  # what is compiled is never looked at again
    kept = kept_of(layer)
    return None if kept is not None and kept.of_int8 and layer.training else kept


def _warn(layer: RecurrentLayer, traits: Traits) -> None:
    """Say once of a cell that plain torch runs it, where nobody chose that and its step cannot become a program."""
    chosen = dispatch.override()
    if {layer.schedule, layer.backend, *chosen} != {dispatch.AUTO} or are_transforms_active():
        return
    if torch.compiler.is_compiling():
        return
    reason = program.BACKEND.why_not(traits)
    if reason:
        program.warn(traits.cell, reason)


def forget_plan(layer: RecurrentLayer) -> None:
    """Make the layer's plan anew at its next call."""
    _plans.pop(layer, None)


def run(
    layer: RecurrentLayer,
    input: Any,
    hx: State | None,
    lengths: Any,
    resets: Any,
    need_output: bool,
    need_states: bool,
) -> tuple[Any, ...]:
    """Call a layer; the arguments and what comes back are those of its ``forward``."""
    inputs = read(input, lengths, layer.batch_first)
    weights = layer._weights()
    plan = plan_of(layer, weights, inputs.data, need_states, inputs.is_dense)
    if inputs.layout is not None and resets is None and _goes_as_it_came(layer, plan, inputs, weights, hx):
        request = _prepare_as_it_came(layer, plan, inputs, weights, hx, need_output)
        result = plan.backend.run(request, plan.schedule)
        output = inputs.restore_layout(result.output) if need_output and result.output is not None else None
        return output, one_or_tuple(_unbatched(inputs, result.state))
    if is_jit_traced():
        rule = "a trace holds PyTorch's own operators and the sizes of one batch: it could not run another"
        fix = "use torch.export.export or torch.compile, or backend='torch' with a tensor without lengths"
        raise DispatchError(message("torch.jit.trace", f"a layer {type(layer).__name__}", rule, fix))
    pieces = None
    if resets is not None:
        check_marks(resets, input)
        pieces = split(inputs.batch, flatten_marks(resets, lengths, layer.batch_first))
    request = prepare(layer, plan, inputs, weights, hx, pieces, need_output, need_states)
    if plan.regularises:
        request = regularised(layer.regularisation, plan.run_cell, request)
    elif plan.kept is not None:
        request.packed = plan.kept.packed_for(weights)
    result = plan.backend.run(request, plan.schedule)
    # The mask that drops parts of the state is a state of its own, which the caller does not see.
    own = len(plan.state_sizes)
    output = None if result.output is None else inputs.restore(result.output)
    final = result.state[:own]
    if pieces is not None:
        final = tuple([pieces.leave(part, plan.directions) for part in final])
    answer = (output, one_or_tuple(_unbatched(inputs, final)))
    if not need_states:
        return answer
    batch, found = inputs.batch, result.states or ()
    return (*answer, [one_or_tuple(tuple([batch._like(part) for part in states[:own]])) for states in found])


def prepare(
    layer: RecurrentLayer,
    plan: Plan,
    inputs: Inputs,
    weights: tuple[Any, ...],
    hx: Any,
    pieces: Pieces | None = None,
    need_output: bool = True,
    need_states: bool = False,
) -> Request:
    """Check an input and its initial state, and put the request together.

    Args:
        layer: the layer.
        plan: what holds for it.
        inputs: the input.
        weights: the layer's, as they are now.
        hx: the initial state, of torch's shapes, ``(L * K, B, size)``, or ``(L * K, size)`` where the input has no
            batch; a tuple where the cell has several; None for the layer's own.
        pieces: the input cut at its resets, where there are any.
        need_output: False where only the state is read.
        need_states: whether the states of every step are wanted.

    Raises:
        ArgumentTypeError: a state of the wrong kind.
        ShapeError: sizes, dtypes or devices that do not fit.
    """
    whole = inputs.batch
    _check_values(layer, weights, whole.values)
    batch = whole if pieces is None else pieces.batch
    values, offsets = batch.values, batch.offsets
    state: tuple[Tensor, ...] = ()
    if hx is not None:
        state = _check_state(plan, hx, whole._count if inputs.is_batched else None, whole.values)
        if not inputs.is_batched:
            state = tuple([part.unsqueeze(1) for part in state])
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
    )


def _goes_as_it_came(layer: RecurrentLayer, plan: Plan, inputs: Inputs, weights: tuple[Any, ...], hx: Any) -> bool:
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
    layer: RecurrentLayer, plan: Plan, inputs: Inputs, weights: tuple[Any, ...], hx: Any, need_output: bool
) -> Request:
    """The request for an input that needs no way through the flat layout."""
    state: tuple[Tensor, ...] = ()
    if hx is not None:
        state = _check_state(plan, hx, inputs.count if inputs.is_batched else None, inputs.data)
        if not inputs.is_batched:
            state = tuple([part.unsqueeze(1) for part in state])
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


def _unbatched(inputs: Inputs, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Final states, without the dimension of the sequences where the input had none."""
    return state if inputs.is_batched else tuple([part.squeeze(1) for part in state])


def one_or_tuple(parts: tuple[Any, ...]) -> Any:
    """A cell with one state has it as it is, as torch's GRU and RNN do.

    Example:
        >>> one_or_tuple((1,)), one_or_tuple((1, 2))
        (1, (1, 2))
    """
    return parts if len(parts) > 1 else parts[0]


def _check_values(layer: RecurrentLayer, weights: tuple[Any, ...], values: Tensor) -> None:
    if values.dim() != 2 or values.shape[1] != layer.input_size:
        raise ShapeError(
            message(
                "input",
                f"elements of shape {tuple(values.shape[1:])}",
                f"each element has input_size = {layer.input_size} features",
                "embed or reshape it, or build the layer with another input_size",
            )
        )
    like = layer._like(weights)
    # What is not a tensor at all the backend will find, and name.
    if isinstance(like, Tensor):
        check_fits("input", values, like)


def _own_state(layer: RecurrentLayer, plan: Plan, batch: Ragged) -> tuple[Tensor, ...]:
    """The initial states of a batch for which none are given: one ``(L * K, B, size)`` each."""
    if not plan.begins:
        return zero_state(batch.values, plan.layers * plan.directions, batch._count, plan.state_sizes)
    return _check_state(plan, layer._own_initial(batch), batch._count, batch.values, "initial_state")


def _check_state(plan: Plan, hx: Any, count: int | None, values: Tensor, argument: str = "hx") -> tuple[Tensor, ...]:
    """Check an initial state.

    Args:
        plan: of the layer.
        hx: what the caller gave.
        count: the number of sequences, or None where there is no batch.
        values: what the layer reads, for its dtype and device.
        argument: what the message calls it.

    Returns:
        One tensor per state of the cell, as they were given.

    Raises:
        ArgumentTypeError: a state of the wrong kind.
        ShapeError: sizes, dtypes or devices that do not fit.
    """
    names = plan.cell.states
    given = (hx,) if len(names) == 1 else hx
    if (
        not isinstance(given, tuple | list)
        or len(given) != len(names)
        or not all(isinstance(part, Tensor) for part in given)
    ):
        raise ArgumentTypeError(
            message(
                argument,
                f"a {type(hx).__name__}",
                "a tensor" if len(names) == 1 else f"a tuple ({', '.join(names)}) of tensors",
                "pass what the layer returned as its state, or None for zeros",
            )
        )
    rows = plan.layers * plan.directions
    for name, size, part in zip(names, plan.state_sizes, given, strict=True):
        wanted = (rows, size) if count is None else (rows, count, size)
        if part.shape != wanted:
            raise ShapeError(
                message(
                    f"{argument} ({name})",
                    f"shape {tuple(part.shape)}",
                    f"{wanted}: layers times directions, {'' if count is None else 'sequences, '}size",
                    "give each sequence its state, in the order of the batch",
                )
            )
        check_fits(f"{argument} ({name})", part, values)
        check_storage(f"{argument} ({name})", part)
    return tuple(given)
