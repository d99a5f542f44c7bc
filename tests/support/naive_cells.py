"""Naive versions of all cells: one sequence, one step, one gate at a time, as in the papers.

They share only names and the types of weights with :mod:`raglane.cells`: neither the order of the
gates, nor rearranged formulas, nor products that are prepared for all elements at once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane.kernels.contract import Request, Result

State = tuple[Tensor, ...]


class _Place(NamedTuple):
    """The inputs of the equations of one step."""

    weights: Any
    x: Tensor
    h: Tensor
    c: Tensor
    mask: Tensor | None
    clip: float | None
    states: State = ()
    """All states; the first is ``h``, and the last is ``c``."""

    def read(self, state: Tensor) -> Tensor:
        """Return a state as weights read it, with dropout."""
        return state if self.mask is None else self.mask * state

    def rows(self, tensor: Tensor | None, gate: int) -> Tensor | float:
        """Return a gate's block of rows, or 0 if there is no such parameter."""
        size = self.c.shape[0]
        return 0.0 if tensor is None else tensor[gate * size : (gate + 1) * size]

    def limit(self, argument: Tensor) -> Tensor:
        """Clip the argument of an activation, if the cell clips."""
        if self.clip is None:
            return argument
        return torch.where(
            argument > self.clip,
            self.clip,
            torch.where(argument < -self.clip, -self.clip, argument),
        )

    def from_input(self, gate: int) -> Tensor:
        """``W x``."""
        return self.rows(self.weights.input, gate) @ self.x  # type: ignore[operator]

    def from_state(self, gate: int) -> Tensor:
        """``W h``."""
        return self.rows(self.weights.hidden, gate) @ self.read(self.h)  # type: ignore[operator]

    def from_both(self, gate: int) -> Tensor:
        """``W x + b + W h + b``, for cells that multiply the state by a matrix."""
        biases = self.rows(self.weights.input_bias, gate) + self.rows(
            self.weights.hidden_bias, gate
        )
        return self.from_input(gate) + self.from_state(gate) + biases

    def from_input_alone(self, gate: int) -> Tensor:
        """``W x + b``, for element-wise cells."""
        return self.from_input(gate) + self.rows(self.weights.bias, gate)


def _sigmoid(argument: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-argument))


def _relu(argument: Tensor) -> Tensor:
    return argument * (argument > 0)


def _normalised(argument: Tensor) -> Tensor:
    mean = argument.sum() / argument.numel()
    variance = ((argument - mean) ** 2).sum() / argument.numel()
    return (argument - mean) / torch.sqrt(variance + 1e-5)


def _elman(at: _Place, activation: Callable[[Tensor], Tensor]) -> State:
    return (activation(at.limit(at.from_both(0))),)


def _lstm(at: _Place) -> State:
    i = _sigmoid(at.limit(at.from_both(0)))
    f = _sigmoid(at.limit(at.from_both(1)))
    g = torch.tanh(at.limit(at.from_both(2)))
    o = _sigmoid(at.limit(at.from_both(3)))
    c = f * at.c + i * g
    h = o * torch.tanh(c)
    return (h if at.weights.projection is None else at.weights.projection @ h), c


def _peephole_lstm(at: _Place) -> State:
    peephole_i, peephole_f, peephole_o = (at.rows(at.weights.peephole, index) for index in range(3))
    i = _sigmoid(at.limit(at.from_both(0) + peephole_i * at.c))
    f = _sigmoid(at.limit(at.from_both(1) + peephole_f * at.c))
    g = torch.tanh(at.limit(at.from_both(2)))
    c = f * at.c + i * g
    o = _sigmoid(at.limit(at.from_both(3) + peephole_o * c))
    return o * torch.tanh(c), c


def _coupled_lstm(at: _Place) -> State:
    f = _sigmoid(at.limit(at.from_both(0)))
    g = torch.tanh(at.limit(at.from_both(1)))
    o = _sigmoid(at.limit(at.from_both(2)))
    c = f * at.c + (1 - f) * g
    return o * torch.tanh(c), c


def _layernorm_products(at: _Place) -> tuple[list[Tensor], list[Tensor]]:
    """Return the arguments of each gate from the input and from the state, normalized over all
    gates.
    """
    weights, count = at.weights, at.weights.input.shape[0] // at.c.shape[0]
    pairs = [
        (weights.input_gain, weights.input_bias, _normalised(weights.input @ at.x)),
        (weights.hidden_gain, weights.hidden_bias, _normalised(weights.hidden @ at.read(at.h))),
    ]
    of_input, of_state = (
        [at.rows(gain * product, gate) + at.rows(bias, gate) for gate in range(count)]
        for gain, bias, product in pairs
    )
    return of_input, of_state  # type: ignore[return-value]


def _layernorm_lstm(at: _Place) -> State:
    of_input, of_state = _layernorm_products(at)
    i, f, g, o = (own + other for own, other in zip(of_input, of_state, strict=True))
    c = _sigmoid(f) * at.c + _sigmoid(i) * torch.tanh(g)
    return _sigmoid(o) * torch.tanh(
        at.weights.memory_gain * _normalised(c) + at.rows(at.weights.memory_bias, 0)
    ), c


def _gru(at: _Place) -> State:
    r = _sigmoid(at.limit(at.from_both(0)))
    z = _sigmoid(at.limit(at.from_both(1)))
    of_state = at.from_state(2) + at.rows(at.weights.hidden_bias, 2)
    n = torch.tanh(at.limit(at.from_input(2) + at.rows(at.weights.input_bias, 2) + r * of_state))
    return ((1 - z) * n + z * at.h,)


def _gru_reset_before(at: _Place) -> State:
    r = _sigmoid(at.limit(at.from_both(0)))
    z = _sigmoid(at.limit(at.from_both(1)))
    of_state = at.rows(at.weights.hidden, 2) @ (r * at.read(at.h))  # type: ignore[operator]
    biases = at.rows(at.weights.input_bias, 2) + at.rows(at.weights.hidden_bias, 2)
    n = torch.tanh(at.limit(at.from_input(2) + of_state + biases))
    return ((1 - z) * n + z * at.h,)


def _layernorm_gru(at: _Place) -> State:
    of_input, of_state = _layernorm_products(at)
    r = _sigmoid(of_input[0] + of_state[0])
    z = _sigmoid(of_input[1] + of_state[1])
    n = torch.tanh(of_input[2] + r * of_state[2])
    return ((1 - z) * n + z * at.h,)


def _slstm(at: _Place) -> State:
    _, c, n, m = at.states
    size, width = at.h.shape[0], at.weights.hidden.shape[1]
    heads, gates = at.read(at.h).split(width), []
    for gate in range(4):
        of_state = [
            at.weights.hidden[gate * size + unit] @ heads[unit // width] for unit in range(size)
        ]
        gates.append(at.from_input_alone(gate) + torch.stack(of_state))
    i, f, z, o = gates
    # The states without the stabilizer exp(m), by which they are divided.
    take, keep = torch.exp(i), _sigmoid(f)
    memory = keep * (c * torch.exp(m)) + take * torch.tanh(z)
    normaliser = keep * (n * torch.exp(m)) + take
    level = torch.where((n == 0) | (i > torch.log(keep) + m), i, torch.log(keep) + m)
    return (
        _sigmoid(o) * memory / normaliser,
        memory * torch.exp(-level),
        normaliser * torch.exp(-level),
        level,
    )


def _grud(at: _Place) -> State:
    weights, x, h = at.weights, at.x, at.h
    if weights.value_decay is None:
        inputs = x
    else:
        channels = len(x) // 3
        seen = []
        for channel in range(channels):
            present, elapsed = 1 - x[channels + channel], x[2 * channels + channel]
            bias = 0.0 if weights.value_decay_bias is None else weights.value_decay_bias[channel]
            decay = torch.exp(-_relu(weights.value_decay[channel] * elapsed + bias))
            seen.append(x[channel] * (decay if present < 1 else 1.0))
        inputs = torch.cat([torch.stack(seen), 1 - x[channels : 2 * channels]])
        bias = 0.0 if weights.state_decay_bias is None else weights.state_decay_bias
        h = h * torch.exp(-_relu(weights.state_decay @ x[2 * channels :] + bias))
    read = h if at.mask is None else at.mask * h

    def gate(index: int, state: Tensor) -> Tensor:
        rows = slice(index * len(h), (index + 1) * len(h))
        argument: Tensor = weights.input[rows] @ inputs + weights.hidden[rows] @ state
        return argument + at.rows(weights.bias, index)

    r, z = _sigmoid(gate(0, read)), _sigmoid(gate(1, read))
    return ((1 - z) * torch.tanh(gate(2, r * read)) + z * h,)


def _cfc(at: _Place) -> State:
    weights = at.weights
    argument = weights.input @ at.x + weights.hidden @ at.read(at.h)
    backbone = 1.7159 * torch.tanh(
        0.666 * (argument if weights.bias is None else argument + weights.bias)
    )
    answers: Tensor = weights.heads @ backbone
    f, g, a, b = (answers if weights.head_bias is None else answers + weights.head_bias).view(4, -1)
    s = _sigmoid(a + b)
    return ((1 - s) * torch.tanh(f) + s * torch.tanh(g),)


def _indrnn(at: _Place, activation: Callable[[Tensor], Tensor]) -> State:
    return (activation(at.from_input_alone(0) + at.weights.recurrent * at.read(at.h)),)


def _sru(at: _Place) -> State:
    # n is the first gate and has no bias, so the biases of f and r are the first and the second.
    f = _sigmoid(
        at.from_input(1)
        + at.rows(at.weights.recurrent, 0) * at.read(at.c)
        + at.rows(at.weights.bias, 0)
    )
    r = _sigmoid(
        at.from_input(2)
        + at.rows(at.weights.recurrent, 1) * at.read(at.c)
        + at.rows(at.weights.bias, 1)
    )
    past = at.x if at.weights.skip is None else at.weights.skip @ at.x
    c = f * at.c + (1 - f) * at.from_input(0)
    return r * c + (1 - r) * past, c


def _qrnn(at: _Place) -> State:
    n = torch.tanh(at.from_input_alone(0))
    f = _sigmoid(at.from_input_alone(1))
    o = _sigmoid(at.from_input_alone(2))
    c = f * at.c + (1 - f) * n
    return o * c, c


def _mingru(at: _Place) -> State:
    z = _sigmoid(at.from_input_alone(0))
    return ((1 - z) * at.h + z * at.from_input_alone(1),)


def _minlstm(at: _Place) -> State:
    f = _sigmoid(at.from_input_alone(0))
    i = _sigmoid(at.from_input_alone(1))
    return ((f * at.h + i * at.from_input_alone(2)) / (f + i),)


NAIVE_STEPS: dict[str, Callable[[_Place], State]] = {
    "rnn_tanh": lambda at: _elman(at, torch.tanh),
    "rnn_relu": lambda at: _elman(at, _relu),
    "lstm": _lstm,
    "peephole_lstm": _peephole_lstm,
    "coupled_lstm": _coupled_lstm,
    "layernorm_lstm": _layernorm_lstm,
    "gru": _gru,
    "gru_reset_before": _gru_reset_before,
    "layernorm_gru": _layernorm_gru,
    "slstm": _slstm,
    "grud": _grud,
    "cfc": _cfc,
    "indrnn_relu": lambda at: _indrnn(at, _relu),
    "indrnn_tanh": lambda at: _indrnn(at, torch.tanh),
    "sru": _sru,
    "qrnn": _qrnn,
    "mingru": _mingru,
    "minlstm": _minlstm,
}
"""By the names of :data:`raglane.cells.CELLS`; a new cell needs a naive version here."""


def naive_step(
    name: str,
    weights: Any,
    x_t: Tensor,
    state: State,
    mask: Tensor | None = None,
    clip: float | None = None,
) -> State:
    """Compute one step of one sequence: ``x (D,)`` and a vector per state to the new states, the
    first the output.

    If the only state is ``h``, it is also passed as ``c``.
    """
    return NAIVE_STEPS[name](_Place(weights, x_t, state[0], state[-1], mask, clip, state))


def naive_run(
    name: str,
    weights: Any,
    values: Tensor,
    state: State,
    reverse: bool = False,
    clip: float | None = None,
) -> tuple[State, State]:
    """Return states after every element of a sequence ``(T, D)``, the outputs first, and its final
    states.
    """
    reached: list[State] = []
    for x_t in reversed(values.unbind()) if reverse else values.unbind():
        state = naive_step(name, weights, x_t, state, clip=clip)
        reached.append(state)
    if reverse:
        reached.reverse()
    empty = tuple(part.new_zeros(0, part.shape[0]) for part in state)
    return tuple(map(torch.stack, zip(*reached, strict=True))) or empty, state


def naive_network(request: Request, clip: float | None = None) -> Result:
    """Run all layers and directions of a request, one sequence at a time, without dropout."""
    bounds = request.offsets.tolist()
    values, finals, histories = request.values, [], []
    for layer in range(request.layers):
        directions: list[list[Tensor]] = [[] for _ in request.state]
        for direction in range(request.directions):
            index = layer * request.directions + direction
            runs = [
                naive_run(
                    request.cell.name,
                    request.weights[index],
                    values[begin:end],
                    tuple(part[index, sequence] for part in request.state),
                    reverse=direction == 1,
                    clip=clip,
                )
                for sequence, (begin, end) in enumerate(pairwise(bounds))
            ]
            for which, part in enumerate(request.state):
                nothing = part.new_zeros(0, part.shape[2])
                directions[which].append(
                    torch.cat([nothing, *(states[which] for states, _ in runs)])
                )
            finals.append(
                [torch.stack(parts) for parts in zip(*(final for _, final in runs), strict=True)]
            )
        histories.append(tuple(torch.cat(parts, 1) for parts in directions))
        values = histories[-1][0]
    final = (
        tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
        if len(bounds) > 1
        else request.state
    )
    return Result(values, final, tuple(histories))
