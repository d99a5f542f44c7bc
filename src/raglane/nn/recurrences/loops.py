"""Linear recurrences in plain torch, step by step: on any device, and differentiable any number of
times.

Tensors are flat, ``(N, ...)``, and states ``(B, ...)``. Sums have the dtype of the states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils.tracing import index_arithmetic
from raglane.kernels.cpu.recurrences import RecurrenceCall, sums_of, wide
from raglane.packing.layouts import inverse, packed_layout
from raglane.segments import like_rows

States = tuple[Tensor, ...]
Step = Callable[[list[Tensor | None], States], tuple[Tensor, States]]


class RecurrenceSteps(NamedTuple):
    """A recurrence by its steps."""

    step: Step
    elements: list[Any]
    starts: States
    # The output of a batch without elements, of the dtype of outputs.
    empty: Tensor


@dataclass(frozen=True, eq=False)
class _Order:
    """The steps of a batch: the longest sequence first."""

    index: Tensor  # ``(N,)``, the element of each row of the packed order
    back: Tensor  # its inverse
    sizes: list[int]  # sequences of each step
    order: Tensor  # ``(B,)``, the sequences, longest first
    places: Tensor  # its inverse


@index_arithmetic
def _order_of(offsets: Tensor) -> _Order:
    index, sizes, order = packed_layout(offsets.diff().cpu(), offsets)
    return _Order(index, inverse(index), sizes.tolist(), order, inverse(order))


def run_loop(steps_of: Callable[..., RecurrenceSteps], call: RecurrenceCall) -> tuple[Tensor, ...]:
    """Return the outputs of all elements and the final states."""
    steps = steps_of(call.tensors, call.offsets, *call.options)
    at = _order_of(call.offsets)
    parts = [
        [None] * len(at.sizes)
        if each is None
        else torch.split(each.index_select(0, at.index), at.sizes)
        for each in (*steps.elements, call.resets)
    ]
    states = tuple([state.index_select(0, at.order) for state in steps.starts])
    outputs = [steps.empty]
    ended: list[list[Tensor]] = [[] for _ in states]
    for number, rows in enumerate(at.sizes):
        for done, state in zip(ended, states, strict=True):
            done.append(state[rows:])
        states = tuple([state[:rows] for state in states])
        *current, reset = [each[number] for each in parts]
        if reset is not None:
            states = restarted(states, reset)
        output, states = steps.step(current, states)
        outputs.append(output)
    finals = [
        torch.cat([state, *done[::-1]]).index_select(0, at.places)
        for done, state in zip(ended, states, strict=True)
    ]
    return torch.cat(outputs).index_select(0, at.back).to(steps.empty.dtype), *finals


def restarted(states: States, resets: Tensor) -> States:
    """Return states that are zeros where there is a reset."""
    return tuple([state.masked_fill(like_rows(resets, state), 0.0) for state in states])


def selective_step(
    elements: list[Any], states: States, rates: Tensor, skip: Tensor | None
) -> tuple[Tensor, States]:
    """Return the output ``(R, E)`` of one step of a selective scan, and the state after it.

    ``elements``: x, the step sizes, B and C, ``(R, ...)``.
    """
    x_t, d_t, in_t, out_t = elements
    (state,) = states
    x_t = x_t.to(rates.dtype)
    channels, size = rates.shape
    groups = in_t.shape[1]
    of_groups = (state.shape[0], groups, channels // groups, size)
    in_t, out_t = [rows.to(rates.dtype).unsqueeze(2) for rows in (in_t, out_t)]
    decay = (d_t.unsqueeze(2) * rates).exp()
    written = ((d_t * x_t).unsqueeze(2).view(*of_groups[:3], 1) * in_t).view(state.shape)
    state = decay * state + written
    y = (state.view(of_groups) * out_t).sum(3).flatten(1)
    return y if skip is None else y + skip * x_t, (state,)


def selective_steps(
    tensors: tuple[Any, ...], offsets: Tensor, softplus: bool, least: float, most: float
) -> RecurrenceSteps:
    """Return the steps of a selective scan, whose elements are x, the step sizes, B and C.

    ``tensors``: x, dt, A, B, C, D, dt_bias and the initial state.
    """
    x, dt, rates, inputs, outputs, skip, dt_bias, initial = tensors
    channels, size = rates.shape
    delta = step_sizes(dt.to(rates.dtype), dt_bias, softplus, least, most)

    def step(elements: list[Any], states: States) -> tuple[Tensor, States]:
        return selective_step(elements, states, rates, skip)

    start = rates.new_zeros(offsets.shape[0] - 1, channels, size) if initial is None else initial
    return RecurrenceSteps(step, [x, delta, inputs, outputs], (start,), x.new_empty(0, channels))


def step_sizes(
    dt: Tensor, bias: Tensor | None, softplus: bool, least: float, most: float
) -> Tensor:
    """Return the step sizes of a selective scan."""
    delta = dt if bias is None else dt + bias
    # Unlike torch's softplus, which is the identity above 20.
    delta = torch.logaddexp(delta, torch.zeros_like(delta)) if softplus else delta
    return delta.clamp(least, most)


def decay_rates(logarithms: Tensor) -> Tensor:
    """Return the factors of step sizes that give the logarithms of decays."""
    return -wide(logarithms).exp()


def highest_exponent(dtype: torch.dtype) -> float:
    """Return a number whose exponential is just finite, with room for a sum."""
    return math.log(torch.finfo(dtype).max) - 1


def attention_step(
    elements: list[Any], states: States, scale: float, delta: bool, eps: float
) -> tuple[Tensor, States]:
    """Return the output ``(R, H, V)`` of one step of linear attention, and the states after it.

    ``elements``: q, k, v, log_decay, gain and log_gain, ``(R, ...)``, or None.
    """
    q_t, k_t, v_t, log_a, g, log_g = elements
    state, *rest = states
    q_t, k_t = [_per_head(rows.to(state.dtype), v_t.shape[1]) for rows in (q_t, k_t)]
    v_t = v_t.to(state.dtype)
    floor = None
    if log_g is not None:
        before = rest[1] if log_a is None else log_a + rest[1]
        level = torch.maximum(before, log_g)
        finite = level.masked_fill(level == -math.inf, 0.0)
        log_a = before - finite
        g = (log_g - finite).exp()
        floor = (-level).clamp(max=highest_exponent(state.dtype)).exp()
    decayed = state
    if log_a is not None:
        decay = log_a.exp()
        decay = decay.unsqueeze(2) if decay.dim() == 2 else decay
        decayed = decay.unsqueeze(3) * state
    written = v_t
    if delta:
        written = v_t - (decayed * k_t.unsqueeze(3)).sum(2)
    written = written if g is None else g.unsqueeze(2) * written
    state = decayed + k_t.unsqueeze(3) * written.unsqueeze(2)
    output = scale * (state * q_t.unsqueeze(3)).sum(2)
    if floor is None:
        return output, (state,)
    total = decay * rest[0] + g.unsqueeze(2) * k_t
    read = scale * (total * q_t).sum(2)
    output = output / (torch.maximum(read.abs(), floor) + eps).unsqueeze(2)
    return output, (state, total, level)


def _per_head(rows: Tensor, heads: int) -> Tensor:
    """Return ``(R, H, K)`` of groups ``(R, G, K)``, each of consecutive heads."""
    groups = rows.shape[1]
    return rows.unsqueeze(2).expand(-1, -1, heads // groups, -1).flatten(1, 2)


def attention_steps(
    tensors: tuple[Any, ...], offsets: Tensor, scale: float, delta: bool, eps: float
) -> RecurrenceSteps:
    """Return the steps of linear attention, whose elements are the first six tensors.

    ``tensors``: q, k, v, log_decay, gain, log_gain, and the initial state, normaliser and
    stabiliser.
    """
    q, k, v, log_decay, gain, log_gain, initial, normaliser, stabiliser = tensors
    heads, width = v.shape[1:]
    size = q.shape[2]
    count = offsets.shape[0] - 1

    def step(elements: list[Any], states: States) -> tuple[Tensor, States]:
        return attention_step(elements, states, scale, delta, eps)

    shapes = [(count, heads, size, width), (count, heads, size), (count, heads)]
    initials = (initial, normaliser, stabiliser)[: 1 if log_gain is None else 3]
    starts = tuple(
        [
            v.new_zeros(shape, dtype=sums_of(v.dtype)) if state is None else state
            for state, shape in zip(initials, shapes, strict=False)
        ]
    )
    empty = v.new_empty(0, heads, width)
    return RecurrenceSteps(step, [q, k, v, log_decay, gain, log_gain], starts, empty)
