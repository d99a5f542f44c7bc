"""The truth: any cell on any schedule, in plain torch, differentiable twice.

A schedule's table is followed as it stands: at each time, the rows that compute take one step side by side.
The input products of all elements are computed before the first step, and the outputs are brought into the
caller's order after the last. What depends on lengths alone is worked out on the host, from the host's lengths,
and moves to the device once, as indexes; nothing comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from raglane._utils.tracing import are_transforms_active, index_arithmetic, is_exporting
from raglane.cells.spec import CellSpec
from raglane.kernels import graph
from raglane.kernels.checks import check
from raglane.kernels.contract import DirectionResult, Request, Result, Traits, run_directions, run_layers
from raglane.kernels.walk import Moment, Order, Walk, walk
from raglane.schedules import SCHEDULES
from raglane.segments.indexing import take_rows


class ReferenceBackend:
    """Executes every cell on every schedule, on any device and floating-point dtype that PyTorch computes with.

    Under :func:`torch.autocast` values, states and weights are cast once, before the first step, as PyTorch's own
    recurrent layers do: all that comes out has autocast's dtype. float64 is left alone.
    """

    schedules = tuple(SCHEDULES)
    layouts: ClassVar[dict[str, type]] = {}

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`."""
        return None

    def run(self, request: Request, schedule: str) -> Result:
        """Run the request as the table of ``schedule`` says."""
        if torch.compiler.is_dynamo_compiling():
            # As many steps as the schedule has: traced, the loop would be compiled anew for every batch.
            untraced: Callable[[Request, str], Result] = torch.compiler.disable(_run)
            return untraced(request, schedule)
        return _run(request, schedule)


BACKEND = ReferenceBackend()
"""The one instance; it keeps nothing between runs."""


def _run(request: Request, schedule: str) -> Result:
    request = check(request)
    device = request.values.device
    run_layer: Callable[[Request], Result]
    if is_exporting():
        # A graph has no loop over as many steps as a batch happens to have: whatever the schedule, it is an operator.
        run_layer = partial(graph.run_layer, graph.table_of(request.offsets, request.values.shape[0]))
    else:
        ready = _plan(schedule, request.host_lengths, request.directions, device)
        run_layer = partial(run_directions, run=partial(_run_direction, ready, SCHEDULES[schedule].holds_state))
    if request.cell.follows_autocast:
        return run_layers(request, run_layer)
    # Asking whether it is enabled is an error on a device that has no autocast, such as meta.
    if not (torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)):
        return run_layers(request, run_layer)
    request = request.cast(torch.get_autocast_dtype(device.type))
    with torch.autocast(device.type, enabled=False):
        return run_layers(request, run_layer)


@index_arithmetic
def _plan(schedule: str, lengths: Tensor, directions: int, device: torch.device) -> Walk:
    """What depends on the lengths alone."""
    return walk(SCHEDULES[schedule].table(lengths), lengths, directions, device)


# ---- one layer in one direction -------------------------------------------------------------------------------------


def run_direction(layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool) -> DirectionResult:
    """Run one layer in one direction by itself, in lanes; the layer's own weights and state are not looked at."""
    ready = _plan("lanes", layer.host_lengths, 2 if reverse else 1, layer.values.device)
    return _run_direction(ready, SCHEDULES["lanes"].holds_state, layer, weights, state, reverse)


def _run_direction(
    ready: Walk, holds_state: bool, layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """Walk the table once; see :class:`~raglane.kernels.contract.RunDirection`."""
    order = ready.orders[int(reverse)]
    prepared = _prepare(ready, order, layer.cell, weights, layer.values, layer.offsets)
    fresh = zip(*(_newcomers(ready, initial) for initial in state), strict=True)
    walked = _Walked(tuple(initial[:0] for initial in state), [], [], [])
    walk_part = partial(_walk_part, layer, weights, holds_state)
    # Torch's checkpoints hang on what is saved, of which transformations have their own idea.
    is_plain = torch.is_grad_enabled() and not are_transforms_active() and forward_ad._current_level < 0
    every = layer.checkpoint_every if is_plain else 0
    for begin in range(0, len(ready.moments), every or len(ready.moments)):
        part = slice(begin, begin + every if every else None)
        moments = ready.moments[part]
        given = [next(fresh) for moment in moments if moment.begin]
        if every:
            ran = checkpoint(
                walk_part, moments, prepared[part], given, walked.rows, use_reentrant=False, preserve_rng_state=False
            )
        else:
            ran = walk_part(moments, prepared[part], given, walked.rows)
        walked.outputs.extend(ran.outputs)
        walked.history.extend(ran.history)
        walked.finals.extend(ran.finals)
        walked = walked._replace(rows=ran.rows)
    return DirectionResult(
        _callers_order(order, walked.outputs) if layer.need_output else None,
        tuple(_final(ready, initial, [parts[index] for parts in walked.finals]) for index, initial in enumerate(state)),
        tuple(_callers_order(order, list(parts)) for parts in zip(*walked.history, strict=True))
        if layer.need_states
        else None,
    )


class _Walked(NamedTuple):
    """What some times of a walk give."""

    rows: tuple[Tensor, ...]  # the states of the last time's rows
    outputs: list[Tensor]  # of each time, where needed
    history: list[tuple[Tensor, ...]]  # the states of each time, where needed
    finals: list[tuple[Tensor, ...]]  # of each time at which sequences end, their final states


def _walk_part(
    layer: Request,
    weights: Any,
    holds_state: bool,
    moments: list[Moment],
    prepared: tuple[Tensor, ...],
    given: list[tuple[Tensor, ...]],
    rows: tuple[Tensor, ...],
) -> _Walked:
    """Walk some times of the table, from the states of the rows before and those of the sequences that begin."""
    fresh = iter(given)
    walked = _Walked(rows, [], [], [])
    for moment, row_inputs in zip(moments, prepared, strict=True):
        rows = _enter(moment, rows, fresh)
        output, new = layer.cell.step(weights, row_inputs, rows)
        if moment.real is not None:
            # NOTE (padding): what padding computes never reaches another step. A row past its end keeps its
            # state, or starts from zero again and again: run on from its own garbage it could overflow, and the
            # zero gradients that come back would turn into NaN.
            is_real = moment.real
            past = rows if holds_state else tuple(torch.zeros_like(part) for part in new)
            new = tuple(torch.where(is_real, a, b) for a, b in zip(new, past, strict=True))
        rows = new
        if layer.need_output:
            walked.outputs.append(output)
        if layer.need_states:
            walked.history.append(new)
        if moment.ending:
            ended = moment.ended
            walked.finals.append(new if ended is None else tuple(take_rows(part, ended) for part in new))
    return walked._replace(rows=rows)


def _prepare(
    ready: Walk, order: Order, cell: CellSpec, weights: Any, values: Tensor, offsets: Tensor
) -> tuple[Tensor, ...]:
    """What the cell prepares for all elements, cut into the rows of each time."""
    if ready.has_padding:
        # Padding reads zeros, as in a padded tensor: one more sequence, of one element.
        values = torch.cat([values, values.new_zeros(1, values.shape[1])])
        offsets = torch.cat([offsets, offsets[-1:] + 1])
    prepared = cell.prepare(weights, values, offsets)
    if ready.has_padding:
        prepared = prepared.index_select(0, order.element)
    elif not order.is_callers:
        prepared = take_rows(prepared, order.element)
    return torch.split(prepared, [moment.rows for moment in ready.moments])


def _newcomers(ready: Walk, initial: Tensor) -> Iterator[Tensor]:
    """The initial states ``(B, size)`` in the order in which they are needed, cut into those of each time."""
    # Cut once: a slice per time would cost a gradient as large as the whole for each of them.
    ordered = take_rows(initial, ready.begin_order)
    return iter(torch.split(ordered, [moment.begin for moment in ready.moments if moment.begin]))


def _enter(moment: Moment, rows: tuple[Tensor, ...], fresh: Iterator[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The states with which the rows of a time start: those of the time before, and those that begin."""
    if moment.begin:
        newcomers = next(fresh)
        if moment.source is None:
            return newcomers
        rows = tuple(torch.cat(pair) for pair in zip(rows, newcomers, strict=True))
    if moment.source is not None:
        source = moment.source
        return tuple(take_rows(part, source) for part in rows)
    if rows[0].shape[0] == moment.rows:
        return rows
    return tuple(part[: moment.rows] for part in rows)


def _callers_order(order: Order, parts: list[Tensor]) -> Tensor:
    """What was computed at all times, as ``(N, size)`` in the order of the values."""
    computed = torch.cat(parts)
    return computed if order.is_callers else take_rows(computed, order.place)


def _final(ready: Walk, initial: Tensor, ended: list[Tensor]) -> Tensor:
    """The final states ``(B, size)`` in the caller's order; an empty sequence's is its initial one."""
    pool = [*ended, initial] if ready.has_empty or not ended else ended
    return take_rows(torch.cat(pool), ready.final)
