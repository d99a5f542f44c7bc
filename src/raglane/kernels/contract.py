"""The input and the result of a backend, and the loops that all backends share.

These are the loops over layers and directions.

A kernel receives tensors, offsets, a cell and the name of a schedule, never a Ragged batch or a
layer. The caller can change its tensors at any time, so a backend validates a :class:`Request`
before it computes (:mod:`raglane.kernels.tensor_checks`). It allocates its results, and does not change
its input.

NOTE (isolation): the outputs, states and gradients of a sequence depend only on its own values, its
initial state and the weights. A NaN in one sequence must not reach another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane import segments
from raglane.cells.spec import CellSpec


@dataclass(slots=True, eq=False)
class Traits:
    """The facts that select a backend and a schedule, but not the sequences or their lengths."""

    cell: CellSpec
    input_size: int  # ``D`` of the first layer
    hidden_size: int
    dtype: torch.dtype  # of the values
    device: torch.device  # of the values
    need_states: bool = False
    # One entry per layer and direction, or empty if unknown. A user's module can only be traced
    # with its weights.
    weights: tuple[Any, ...] = ()
    checkpoints: bool = False  # backward recomputes the gates instead of reading saved ones


InputKind = Literal["flat", "packed", "dense"]
"""The values of an input: sequence after sequence or padded, those of a pack, or a tensor without
padding."""


class Packed(NamedTuple):
    """Layout of values that are the data of a PackedSequence without empty sequences."""

    batch_sizes: Tensor  # ``(T,)`` int64 on the CPU
    # ``(B,)`` int64, longest first; None if the sequences have that order.
    sorted_indices: Tensor | None
    unsorted_indices: Tensor | None  # its inverse


class Dense(NamedTuple):
    """Layout of values that are a tensor of three dimensions without padding."""

    batch_first: bool  # ``(B, T, D)``, or else ``(T, B, D)``


# Not frozen: a frozen dataclass takes three times as long to build, and each call builds one.
@dataclass(slots=True, eq=False)
class Request:
    """A recurrent network of one kind of cell, and its input.

    ``L`` is the number of layers, ``K`` of directions, ``B`` of sequences, ``N`` of elements.
    """

    cell: CellSpec
    values: Tensor  # ``(N, D)``, floating-point
    offsets: Tensor  # ``(B + 1,)`` int64 on the device of ``values``
    lengths: Tensor | None  # ``(B,)`` int64 on the CPU; None if the offsets are on the CPU
    # One ``(L * K, B, size)`` per state of the cell, the sequences in the caller's order; empty for
    # zeros.
    state: tuple[Tensor, ...]
    # Of each layer and direction, in torch's order: layer 0 forward, layer 0 reverse ...
    weights: tuple[Any, ...]
    layers: int = 1
    directions: int = 1
    dropout: float = 0.0  # between layers
    training: bool = False  # apply dropout
    need_output: bool = True  # return the outputs of the last layer
    need_states: bool = False  # return the states of every layer at every step
    state_sizes: tuple[int, ...] = ()  # the sizes of the states if ``state`` is empty
    # Probability of zeroing a feature of a layer's input for a whole sequence, in training.
    input_dropout: float = 0.0
    # run_layers draws dropout, because a library's own draws other numbers.
    layer_by_layer: bool = False
    # The layout of ``values`` and output if the backend supports the caller's
    # (``Backend.layouts``). Then ``offsets`` and ``lengths`` are meaningless.
    layout: Packed | Dense | None = None
    depth: int = 0  # index of this layer in its stack, for messages
    # Per layer, its weights as ``Layer.packed`` of the cpu kernels returns them.
    packed: tuple[Tensor, ...] = ()
    # Steps that backward recomputes at a time; 0 if forward saves the gates.
    checkpoint_every: int = 0

    @property
    def count(self) -> int:
        """``B``."""
        return self.offsets.shape[0] - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each state."""
        return tuple([state.shape[2] for state in self.state]) or self.state_sizes

    @property
    def lengths_cpu(self) -> Tensor:
        """The lengths on the CPU, without waiting for a device."""
        return segments.lengths_from_offsets(self.offsets) if self.lengths is None else self.lengths

    def tensors(self) -> Iterator[Tensor | None]:
        """Yield the values, states and weights; weights that are a module are left out."""
        yield self.values
        yield from self.state
        for weights in self.weights:
            if isinstance(weights, tuple):
                yield from (weight for weight in weights if isinstance(weight, Tensor))

    def initial(self, count: int | None = None) -> tuple[Tensor, ...]:
        """Return the initial state, zeros if the caller passed none."""
        if self.state:
            return self.state
        rows = self.layers * self.directions
        return zero_state(
            self.values, rows, self.count if count is None else count, self.state_sizes
        )

    def layer(self, index: int, values: Tensor) -> Request:
        """Return the request of one layer, with input ``values``."""
        rows = slice(index * self.directions, (index + 1) * self.directions)
        state = tuple([initial[rows] for initial in self.state])
        if not state and values.dtype is not self.values.dtype:
            # Under autocast the outputs of the layer below may have another dtype than the initial
            # states.
            state = zero_state(self.values, self.directions, self.count, self.state_sizes)
        return Request(
            self.cell,
            values,
            self.offsets,
            self.lengths,
            state,
            self.weights[rows],
            directions=self.directions,
            training=self.training,
            need_output=self.need_output or index < self.layers - 1,
            need_states=self.need_states,
            state_sizes=self.state_sizes,
            depth=index,
            packed=self.packed[index : index + 1],
            checkpoint_every=self.checkpoint_every,
        )

    def cast(self, dtype: torch.dtype) -> Request:
        """Return this request in autocast's dtype, which never casts float64."""

        def convert(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value if value.dtype is torch.float64 else value.to(dtype)
            if isinstance(value, tuple):
                converted = [convert(item) for item in value]
                return type(value)(*converted) if hasattr(value, "_fields") else tuple(converted)
            return value

        return replace(
            self,
            values=convert(self.values),
            state=convert(self.state),
            weights=convert(self.weights),
            packed=(),
        )


@dataclass(slots=True, eq=False)
class Result:
    """The result of a :class:`Request`, in the caller's order."""

    # Of the last layer, ``(N, K * size of the first state)``, forward then reverse in each row.
    output: Tensor | None
    # Final states, shaped like ``Request.state``. The final state of an empty sequence is its
    # initial one. The reverse direction ends at the first element.
    state: tuple[Tensor, ...]
    # Of each layer after each element, ``(N, K * size)`` each.
    states: tuple[tuple[Tensor, ...], ...] | None = None


@dataclass(slots=True, eq=False)
class DirectionResult:
    """The result of one layer in one direction; see :class:`Result`."""

    output: Tensor | None  # ``(N, size)``
    state: tuple[Tensor, ...]  # ``(B, size)`` each
    states: tuple[Tensor, ...] | None = None  # ``(N, size)`` each


def zero_state(like: Tensor, rows: int, count: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return initial states of zeros; states of one size share a tensor that stays unchanged."""
    first = like.new_zeros(rows, count, sizes[0])
    return (
        first,
        *(first if size == sizes[0] else like.new_zeros(rows, count, size) for size in sizes[1:]),
    )


class Backend(Protocol):
    """Executes cells on schedules."""

    @property
    def schedules(self) -> tuple[str, ...]:
        """The names of the supported schedules."""

    @property
    def layouts(self) -> dict[str, type]:
        """By schedule, the layout of the caller that is supported without conversion; see
        ``Request.layout``.
        """

    def refuses(self, traits: Traits, schedule: str) -> str | None:
        """Return why these traits are not supported on a schedule, a clause; None if they are."""

    def run(self, request: Request, schedule: str) -> Result:
        """Run a request for whose traits :meth:`refuses` returns None."""


# ---- layers and directions -----------------------------------------------------------------------


def run_layers(request: Request, run_layer: Callable[[Request], Result]) -> Result:
    """Run every layer on the outputs of the one below.

    Dropout is drawn here, so that it is the same on all backends: ``request.dropout`` on the output
    of every layer but the last, ``request.input_dropout`` on the input of every layer.
    """
    drops_inputs = request.training and request.input_dropout > 0
    if request.layers == 1 and not drops_inputs:
        return run_layer(request)
    values = request.values
    results = []
    for index in range(request.layers):
        if index and request.dropout > 0:
            values = F.dropout(values, request.dropout, request.training)
        if drops_inputs:
            # The same mask for all elements of a sequence.
            mask = F.dropout(values.new_ones(request.count, values.shape[1]), request.input_dropout)
            values = values * segments.spread(mask, request.offsets, values.shape[0])
        result = run_layer(request.layer(index, values))
        results.append(result)
        if result.output is not None:
            values = result.output
    return Result(
        results[-1].output,
        tuple(
            torch.cat(layers) for layers in zip(*[result.state for result in results], strict=True)
        ),
        tuple(states for result in results for states in result.states or ())
        if request.need_states
        else None,
    )


RunDirection = Callable[[Request, Any, tuple[Tensor, ...], bool], DirectionResult]
"""Runs one layer in one direction. Arguments: the layer, the direction's weights, its initial
states ``(B, size)``, and True to read each sequence from its end. Results have the order of the
values."""


def run_directions(layer: Request, run: RunDirection) -> Result:
    """Run each direction of one layer, and concatenate the results."""
    initial = layer.initial()
    results = [
        run(
            layer,
            layer.weights[direction],
            tuple([state[direction] for state in initial]),
            direction == 1,
        )
        for direction in range(layer.directions)
    ]
    outputs = [result.output for result in results if result.output is not None]
    states = [
        _join(list(directions))
        for directions in zip(*[result.states or () for result in results], strict=True)
    ]
    return Result(
        _join(outputs) if layer.need_output else None,
        tuple(
            torch.stack(directions)
            for directions in zip(*[result.state for result in results], strict=True)
        ),
        (tuple(states),) if layer.need_states else None,
    )


def _join(directions: list[Tensor]) -> Tensor:
    """Concatenate the rows of the directions; those of a single direction are not copied."""
    return directions[0] if len(directions) == 1 else torch.cat(directions, 1)
