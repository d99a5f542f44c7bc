"""The reference backend: any cell on any schedule, in plain torch, differentiable twice.

It follows a schedule's table: at each time, all active rows compute one step. Input products of all
elements are computed before the first step, and outputs are put in the caller's order after the
last. Index arithmetic on lengths is done on the host; its results are copied to the device once,
and nothing is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from raglane._utils.tracing import (
    are_transforms_active,
    has_autocast,
    index_arithmetic,
    is_exporting,
)
from raglane.cells.spec import CellSpec
from raglane.kernels import graph
from raglane.kernels.contract import (
    DirectionResult,
    Request,
    Result,
    Traits,
    run_directions,
    run_layers,
)
from raglane.kernels.tensor_checks import check
from raglane.kernels.walk import Moment, RowOrder, Walk, walk
from raglane.schedules import SCHEDULES
from raglane.segments.indexing import take_rows


class ReferenceBackend:
    """Executes every cell on every schedule and device, in any floating-point dtype of PyTorch.

    Under :func:`torch.autocast` values, states and weights are cast once, before the first step, as
    in PyTorch's recurrent layers, so all results have autocast's dtype. float64 is not cast.
    """

    schedules = tuple(SCHEDULES)
    layouts: ClassVar[dict[str, type]] = {}

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`."""
        return None

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        if torch.compiler.is_dynamo_compiling():
            # The number of steps differs from batch to batch: a traced loop would be compiled again
            # for each.
            untraced: Callable[[Request, str], Result] = torch.compiler.disable(_run)
            return untraced(request, schedule)
        return _run(request, schedule)


BACKEND = ReferenceBackend()


def _run(request: Request, schedule: str) -> Result:
    request = check(request)
    device = request.values.device
    run_layer: Callable[[Request], Result]
    if is_exporting():
        # An exported graph cannot have a Python loop over the steps, so it ignores the schedule and
        # uses an operator.
        table = cache(partial(graph.table_of, request.offsets, request.values.shape[0]))
        run_layer = partial(graph.run_layer, table)
    else:
        plan = _plan(schedule, request.lengths_cpu, request.directions, device)
        run_layer = partial(
            run_directions, run=partial(_run_direction, plan, SCHEDULES[schedule].holds_state)
        )
    # is_autocast_enabled raises for a device without autocast, such as meta.
    is_autocast = has_autocast(device.type) and torch.is_autocast_enabled(device.type)
    if request.cell.follows_autocast or not is_autocast:
        return run_layers(request, run_layer)
    request = request.cast(torch.get_autocast_dtype(device.type))
    with torch.autocast(device.type, enabled=False):
        return run_layers(request, run_layer)


@index_arithmetic
def _plan(schedule: str, lengths: Tensor, directions: int, device: torch.device) -> Walk:
    """Return the walk of a schedule, which depends only on the lengths."""
    return walk(SCHEDULES[schedule].table(lengths), lengths, directions, device)


# ---- one layer in one direction ------------------------------------------------------------------


def run_direction(
    layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """Run one layer in one direction in lanes, on these weights and states."""
    plan = _plan("lanes", layer.lengths_cpu, 2 if reverse else 1, layer.values.device)
    return _run_direction(plan, SCHEDULES["lanes"].holds_state, layer, weights, state, reverse)


def _run_direction(
    plan: Walk,
    holds_state: bool,
    layer: Request,
    weights: Any,
    state: tuple[Tensor, ...],
    reverse: bool,
) -> DirectionResult:
    """Run one layer in one direction; see :class:`~raglane.kernels.contract.RunDirection`."""
    order = plan.orders[int(reverse)]
    prepared = _prepare(plan, order, layer.cell, weights, layer.values, layer.offsets)
    walked = _walk_all(plan, holds_state, layer, weights, state, prepared)
    # The time of an empty batch has no rows, but its states are recorded as those of other times.
    finals = walked.finals or [tuple(rows[:0] for rows in walked.rows)]
    pairs = zip(state, zip(*finals, strict=True), strict=True)
    states = None
    if layer.need_states:
        states = tuple(
            _callers_order(order, list(of_times)) for of_times in zip(*walked.history, strict=True)
        )
    return DirectionResult(
        _callers_order(order, walked.outputs) if layer.need_output else None,
        tuple(_final(plan, initial, list(ended)) for initial, ended in pairs),
        states,
    )


def _walk_all(
    plan: Walk,
    holds_state: bool,
    layer: Request,
    weights: Any,
    state: tuple[Tensor, ...],
    prepared: tuple[Tensor, ...],
) -> _Walked:
    """Run all times, in ranges that backward computes again if the layer has checkpoints."""
    # Split once: the gradient of a slice is as large as the whole tensor, and there would be one
    # per time.
    counts = [moment.begin for moment in plan.moments if moment.begin]
    initial = zip(
        *(torch.split(take_rows(rows, plan.begin_order), counts) for rows in state), strict=True
    )
    walked = _Walked(tuple(rows[:0] for rows in state), [], [], [])
    walk_range: Callable[..., _Walked] = partial(_walk_range, layer, weights, holds_state)
    # Checkpoints use hooks on saved tensors, which transformations do not support.
    can_checkpoint = (
        torch.is_grad_enabled() and not are_transforms_active() and forward_ad._current_level < 0
    )
    every = layer.checkpoint_every if can_checkpoint else 0
    if every:
        walk_range = partial(checkpoint, walk_range, use_reentrant=False, preserve_rng_state=False)
    # A checkpoint raises if a tensor among its arguments was changed in place before it is computed
    # again.
    read = torch.utils._pytree.tree_leaves(
        [layer.values, *getattr(weights, "parameters", lambda: weights)()]
    )
    size = every or len(plan.moments)
    for begin in range(0, len(plan.moments), size):
        times = slice(begin, begin + size)
        moments = plan.moments[times]
        results = walk_range(
            moments,
            prepared[times],
            [next(initial) for moment in moments if moment.begin],
            walked.rows,
            *read,
        )
        walked.outputs.extend(results.outputs)
        walked.history.extend(results.history)
        walked.finals.extend(results.finals)
        walked = walked._replace(rows=results.rows)
    return walked


class _Walked(NamedTuple):
    """Results of a range of times."""

    rows: tuple[Tensor, ...]  # the states of the rows at the last time
    outputs: list[Tensor]  # of each time, if needed
    history: list[tuple[Tensor, ...]]  # the states of each time, if needed
    # For each time at which a sequence ends, the final states of these sequences.
    finals: list[tuple[Tensor, ...]]


def _walk_range(
    layer: Request,
    weights: Any,
    holds_state: bool,
    moments: list[Moment],
    prepared: tuple[Tensor, ...],
    initial: list[tuple[Tensor, ...]],
    rows: tuple[Tensor, ...],
    *_: Any,
) -> _Walked:
    """Run a range of times from the previous states ``rows``; ``initial`` are those that begin."""
    begins = iter(initial)
    walked = _Walked(rows, [], [], [])
    for moment, row_inputs in zip(moments, prepared, strict=True):
        rows = _enter(moment, rows, begins)
        output, new = layer.cell.step(weights, row_inputs, rows)
        if moment.real is not None:
            # NOTE (padding): results of padding must not reach another step. A row past its end
            # keeps its state or restarts from zeros. If it continued from its own results it could
            # overflow, and the zero gradients of these steps would become NaN.
            is_real = moment.real
            past = rows if holds_state else tuple(torch.zeros_like(state) for state in new)
            new = tuple(torch.where(is_real, a, b) for a, b in zip(new, past, strict=True))
        rows = new
        if layer.need_output:
            walked.outputs.append(output)
        if layer.need_states:
            walked.history.append(new)
        if moment.ending:
            ended = moment.ended
            walked.finals.append(
                new if ended is None else tuple(take_rows(state, ended) for state in new)
            )
    return walked._replace(rows=rows)


def _prepare(
    plan: Walk, order: RowOrder, cell: CellSpec, weights: Any, values: Tensor, offsets: Tensor
) -> tuple[Tensor, ...]:
    """Return the cell's input products of all elements, split into the rows of each time."""
    if plan.has_padding:
        # Padding reads zeros, as in a padded tensor: one more sequence, of one element.
        values = torch.cat([values, values.new_zeros(1, values.shape[1])])
        offsets = torch.cat([offsets, offsets[-1:] + 1])
    prepared = cell.prepare(weights, values, offsets)
    if plan.has_padding:
        prepared = prepared.index_select(0, order.element)
    elif not order.is_callers:
        prepared = take_rows(prepared, order.element)
    return torch.split(prepared, [moment.rows for moment in plan.moments])


def _enter(
    moment: Moment, rows: tuple[Tensor, ...], begins: Iterator[tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Return the states from which the rows of a time start: continued or initial ones."""
    if moment.begin:
        initial = next(begins)
        if moment.source is None:
            return initial
        rows = tuple(torch.cat(pair) for pair in zip(rows, initial, strict=True))
    if moment.source is not None:
        return tuple(take_rows(state, moment.source) for state in rows)
    if rows[0].shape[0] == moment.rows:
        return rows
    return tuple(state[: moment.rows] for state in rows)


def _callers_order(order: RowOrder, of_times: list[Tensor]) -> Tensor:
    """Join the rows of all times, and return them as ``(N, size)`` in the order of the values."""
    computed = torch.cat(of_times)
    return computed if order.is_callers else take_rows(computed, order.position)


def _final(plan: Walk, initial: Tensor, ended: list[Tensor]) -> Tensor:
    """Return the final states ``(B, size)``; those of empty sequences are their initial ones."""
    pool = [*ended, initial] if plan.has_empty else ended
    return take_rows(torch.cat(pool), plan.final)
