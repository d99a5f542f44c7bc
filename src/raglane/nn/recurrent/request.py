"""From a layer's call to a request for a backend, and back: the whole way of every call, in :func:`run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane._utils.checks import check_fits, check_storage
from raglane._utils.tracing import is_jit_traced
from raglane.errors import ArgumentTypeError, DispatchError, ShapeError, message
from raglane.kernels.contract import Packed, Request, Result, zero_state
from raglane.kernels.cpu.layer import Layer
from raglane.kernels.cpu.recurrence import run_known
from raglane.nn.recurrent.inputs import Inputs, flatten_marks, read
from raglane.nn.recurrent.plan import Plan, plan_of
from raglane.nn.recurrent.regularisation import regularised
from raglane.nn.recurrent.resets import Pieces, check_marks, split
from raglane.ragged import Ragged

if TYPE_CHECKING:
    from raglane.nn.recurrent.layer import RecurrentLayer

__all__ = ["State", "one_or_tuple", "prepare", "run"]

State = Tensor | tuple[Tensor, ...]

# What stands for the offsets of a request whose values lie in another layout than the flat one.
_NOWHERE = torch.empty(0, dtype=torch.int64, device="cpu")


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
    pieces: Pieces | None = None
    known: Result | None = None
    if resets is not None:
        check_marks(resets, input)
        pieces = split(inputs.batch, flatten_marks(resets, lengths, layer.batch_first))
    elif plan.known is not None and not need_states:
        known = _run_known(plan, plan.known, inputs, weights, hx, need_output)
    if known is not None:
        result = known
    else:
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
    """
    whole = inputs.batch
    _check_values(layer, weights, whole.values)
    batch = whole if pieces is None else pieces.batch
    values, offsets = batch.values, batch.offsets
    state: tuple[Tensor, ...] = ()
    if hx is not None:
        state = _given_state(plan, hx, inputs, whole._count, whole.values)
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


def _run_known(
    plan: Plan, known: Layer, inputs: Inputs, weights: tuple[Any, ...], hx: Any, need_output: bool
) -> Result | None:
    """Run what needs no request, since the plan says all but the tensors, and they are what the layer wants.

    Where they are not, there is no result: a request is checked one by one, and says what is wrong.
    """
    state: tuple[Any, ...] = ()
    if hx is not None:
        state = (hx,) if len(plan.state_sizes) == 1 else hx
        # None would be read as a parameter that a layer does not have.
        # No part at all would be read as zeros.
        if not isinstance(state, tuple) or not state or not all(isinstance(part, Tensor) for part in state):
            return None
        if not inputs.is_batched:
            if any(part.dim() != 2 or part.is_nested for part in state):
                return None
            state = tuple([part.unsqueeze(1) for part in state])
    elif plan.begins:
        return None
    batch = inputs.batch
    own = weights[0] if len(weights) == 1 else (*weights[0], *weights[1])
    packed = None if plan.kept is None else plan.kept.packed_for(weights)
    return run_known(known, batch._offsets, (batch._values, *state, *own), need_output, packed[0] if packed else None)


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
        state = _given_state(plan, hx, inputs, inputs.count, inputs.data)
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


def _given_state(plan: Plan, hx: Any, inputs: Inputs, count: int, values: Tensor) -> tuple[Tensor, ...]:
    """The caller's initial state, checked: one ``(L * K, B, size)`` each, also where the input has no batch."""
    if inputs.is_batched:
        return _check_state(plan, hx, count, values)
    return tuple([part.unsqueeze(1) for part in _check_state(plan, hx, None, values)])


def _check_state(plan: Plan, hx: Any, count: int | None, values: Tensor, argument: str = "hx") -> tuple[Tensor, ...]:
    """Check an initial state."""
    names = plan.cell.states
    given = (hx,) if len(names) == 1 else hx
    if (
        not isinstance(given, tuple | list)
        or len(given) != len(names)
        or not all(isinstance(part, Tensor) and not part.is_nested for part in given)
    ):
        is_nested = isinstance(hx, Tensor) and hx.is_nested
        raise ArgumentTypeError(
            message(
                argument,
                "a nested tensor" if is_nested else f"a {type(hx).__name__}",
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
