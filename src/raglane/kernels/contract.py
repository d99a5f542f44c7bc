"""What a backend gets, and what it gives back.

A kernel sees tensors, offsets, a cell and the name of a schedule; never a Ragged batch or a layer. A backend checks a
:class:`Request` before it computes with it, since anybody may have changed its tensors (:mod:`raglane.kernels.checks`):
shapes and dtypes fit, all tensors but ``lengths`` are on one device, and there is a state for every sequence. It
allocates what it returns and changes nothing it was given.

NOTE (isolation): a sequence's outputs, states and gradients depend on its own values, its initial state and
the weights alone. A NaN in one sequence must not reach another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane import segments
from raglane.cells.spec import CellSpec


@dataclass(slots=True, eq=False)
class Traits:
    """All that may decide which backend and schedule run a network: never how many sequences, or how long."""

    cell: CellSpec
    input_size: int  # ``D`` of the first layer
    hidden_size: int
    dtype: torch.dtype  # of the values, as ``device``
    device: torch.device
    need_states: bool = False
    # What the cell reads, one for each layer and direction; nothing where nobody knows. A user's module alone says so
    # what it computes.
    weights: tuple[Any, ...] = ()
    checkpoints: bool = False  # what backward needs is to be computed again rather than kept


class Packed(NamedTuple):
    """How the values of a request lie that are the data of a PackedSequence, in which every sequence has an element."""

    batch_sizes: Tensor  # ``(T,)`` int64 on the CPU
    sorted_indices: Tensor | None  # ``(B,)`` int64, from the longest on; None where they stand in that order
    unsorted_indices: Tensor | None  # its inverse


class Dense(NamedTuple):
    """How the values of a request lie that are a tensor of three dimensions in which every element is real."""

    batch_first: bool  # ``(B, T, D)``, or else ``(T, B, D)``


# Built once per call, so quick to build: a frozen dataclass takes three times as long.
@dataclass(slots=True, eq=False)
class Request:
    """A recurrent network of one kind of cell, and the batch to run it on.

    ``L`` is the number of layers, ``K`` of directions, ``B`` of sequences, ``N`` of elements.
    """

    cell: CellSpec
    values: Tensor  # ``(N, D)``, floating-point
    offsets: Tensor  # ``(B + 1,)`` int64 on the device of ``values``
    # ``(B,)`` int64, the host's own copy: nothing is read back from a device. None where the offsets are on the CPU.
    lengths: Tensor | None
    # One ``(L * K, B, size)`` per state of the cell, the sequences in the caller's order; empty for zeros.
    state: tuple[Tensor, ...]
    weights: tuple[Any, ...]  # of each layer and direction, in torch's order: layer 0 forward, layer 0 reverse ...
    layers: int = 1
    directions: int = 1
    dropout: float = 0.0  # between layers
    training: bool = False  # dropout acts
    need_output: bool = True  # False where nobody reads the outputs of the last layer
    need_states: bool = False  # those of every layer at every step
    state_sizes: tuple[int, ...] = ()  # where ``state`` does not tell
    input_dropout: float = 0.0  # that a feature of every layer's input is zeroed for a whole sequence, in training
    # What is dropped between layers must be drawn there: a library's own dropout draws other numbers.
    layer_by_layer: bool = False
    # How ``values`` and the output lie, if a backend is given a batch as it came, in one of its own ``layouts``;
    # ``offsets`` and ``lengths`` say nothing then.
    layout: Packed | Dense | None = None
    depth: int = 0  # which layer of a stack this one is; for messages
    packed: tuple[Tensor, ...] = ()  # of each layer what ``Layer.packed`` of the cpu kernels made of its weights
    checkpoint_every: int = 0  # steps that are computed again at a time; 0 where what backward needs is kept

    @property
    def count(self) -> int:
        """``B``."""
        return self.offsets.shape[0] - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each state."""
        return tuple([part.shape[2] for part in self.state]) or self.state_sizes

    @property
    def host_lengths(self) -> Tensor:
        """The lengths on the CPU, wherever they come from; no device is waited for."""
        return segments.lengths_from_offsets(self.offsets) if self.lengths is None else self.lengths

    def tensors(self) -> Iterator[Tensor | None]:
        """All that may have a derivative; nothing of weights that are not a tuple of tensors."""
        yield self.values
        yield from self.state
        for weights in self.weights:
            if isinstance(weights, tuple):
                yield from (part for part in weights if not isinstance(part, tuple))

    def initial(self, count: int | None = None) -> tuple[Tensor, ...]:
        """The initial state, for a backend that must have zeros where there is none."""
        if self.state:
            return self.state
        rows = self.layers * self.directions
        return zero_state(self.values, rows, self.count if count is None else count, self.state_sizes)

    def layer(self, index: int, values: Tensor) -> Request:
        """One of the layers as a request of its own, which reads ``values``."""
        rows = slice(index * self.directions, (index + 1) * self.directions)
        state = tuple([part[rows] for part in self.state])
        if not state and values.dtype is not self.values.dtype:
            # Under autocast outputs may be of another dtype than what the states begin in.
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
        """This request in autocast's dtype; tensors of float64 stay, as autocast leaves them everywhere."""

        def convert(part: Any) -> Any:
            if isinstance(part, Tensor):
                return part if part.dtype is torch.float64 else part.to(dtype)
            if isinstance(part, tuple):
                converted = [convert(item) for item in part]
                return type(part)(*converted) if hasattr(part, "_fields") else tuple(converted)
            return part

        return replace(
            self, values=convert(self.values), state=convert(self.state), weights=convert(self.weights), packed=()
        )


@dataclass(slots=True, eq=False)
class Result:
    """What a backend gives for a :class:`Request`, all of it in the caller's order."""

    output: Tensor | None  # ``(N, K * size of the first state)``, of the last layer, forward then reverse in each row
    # Shaped like ``Request.state``; an empty sequence's are its initial ones, the reverse direction's those after the
    # sequence's first element.
    state: tuple[Tensor, ...]
    states: tuple[tuple[Tensor, ...], ...] | None = None  # of each layer after each element, ``(N, K * size)`` each


@dataclass(slots=True, eq=False)
class DirectionResult:
    """The parts of :class:`Result` that one layer gives in one direction."""

    output: Tensor | None  # ``(N, size)``
    state: tuple[Tensor, ...]  # ``(B, size)`` each
    states: tuple[Tensor, ...] | None = None  # ``(N, size)`` each


def zero_state(like: Tensor, rows: int, count: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Initial states of zeros; those of one size are one tensor, since nobody writes to them."""
    first = like.new_zeros(rows, count, sizes[0])
    return (first, *(first if size == sizes[0] else like.new_zeros(rows, count, size) for size in sizes[1:]))


class Backend(Protocol):
    """What executes a cell on a schedule."""

    @property
    def schedules(self) -> tuple[str, ...]:
        """The names of the schedules that it can execute."""

    @property
    def layouts(self) -> dict[str, type]:
        """By schedule, the layout (see ``Request.layout``) in which it takes a batch as it came."""

    def refuses(self, traits: Traits, schedule: str) -> str | None:
        """Why a request of these traits cannot run here on this schedule, in a clause; None if it can."""

    def run(self, request: Request, schedule: str) -> Result:
        """Run the request. To be called only where :meth:`refuses` gives None."""


# ---- layers and directions: the only loop over layers, whoever runs one of them ------------------------------------


def run_layers(request: Request, run_layer: Callable[[Request], Result]) -> Result:
    """Run every layer on the outputs of the one before.

    What training drops between layers is drawn here, so that all backends draw the same numbers: ``request.dropout`` on
    the output of every layer but the last, ``request.input_dropout`` on the input of every layer.
    """
    drops_inputs = request.training and request.input_dropout > 0
    if request.layers == 1 and not drops_inputs:
        return run_layer(request)
    values, results = request.values, []
    for index in range(request.layers):
        if index and request.dropout > 0:
            values = F.dropout(values, request.dropout, request.training)
        if drops_inputs:
            values = values * _kept_features(request, values)
        result = run_layer(request.layer(index, values))
        results.append(result)
        if result.output is not None:
            values = result.output
    return Result(
        results[-1].output,
        tuple(torch.cat(parts) for parts in zip(*[result.state for result in results], strict=True)),
        tuple(states for result in results for states in result.states or ()) if request.need_states else None,
    )


def _kept_features(request: Request, values: Tensor) -> Tensor:
    """One layer's mask for its input, ``(N, D)``: the same for all elements of a sequence."""
    kept = F.dropout(values.new_ones(request.count, values.shape[1]), request.input_dropout)
    return segments.spread(kept, request.offsets, values.shape[0])


RunDirection = Callable[[Request, Any, tuple[Tensor, ...], bool], DirectionResult]
"""Runs one layer in one direction: of the layer, that direction's weights, its initial states ``(B, size)``, and True
where each sequence is read from its end. Results are in the order of the values."""


def run_directions(layer: Request, run: RunDirection) -> Result:
    """Run each direction of one layer by itself, and put what they give side by side."""
    initial = layer.initial()
    results = [
        run(layer, layer.weights[direction], tuple([state[direction] for state in initial]), direction == 1)
        for direction in range(layer.directions)
    ]
    outputs = [result.output for result in results if result.output is not None]
    states = [_join(list(parts)) for parts in zip(*[result.states or () for result in results], strict=True)]
    return Result(
        _join(outputs) if layer.need_output else None,
        tuple(torch.stack(parts) for parts in zip(*[result.state for result in results], strict=True)),
        (tuple(states),) if layer.need_states else None,
    )


def _join(directions: list[Tensor]) -> Tensor:
    """Put the directions' rows side by side; one direction alone is not copied."""
    return directions[0] if len(directions) == 1 else torch.cat(directions, 1)
