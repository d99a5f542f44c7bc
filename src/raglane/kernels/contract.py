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
    """All that may decide which backend and schedule run a network: never how many sequences, or how long.

    Attributes:
        cell: the equations.
        input_size: ``D`` of the first layer.
        hidden_size: ``H``.
        dtype: of the values.
        device: of the values.
        need_states: whether every layer's states at every step are wanted.
        weights: what the cell reads, one for each layer and direction; nothing where nobody knows. A user's module says
            only so what it computes.
        checkpoints: whether what backward needs is to be computed again rather than kept.
    """

    cell: CellSpec
    input_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    need_states: bool = False
    weights: tuple[Any, ...] = ()
    checkpoints: bool = False


class Packed(NamedTuple):
    """How the values of a request lie that are the data of a PackedSequence, in which every sequence has an element.

    Attributes:
        batch_sizes: ``(T,)`` int64 on the CPU.
        sorted_indices: ``(B,)`` int64, the sequences from the longest on; None where they stand in that order.
        unsorted_indices: its inverse, or None.
    """

    batch_sizes: Tensor
    sorted_indices: Tensor | None
    unsorted_indices: Tensor | None


class Dense(NamedTuple):
    """How the values of a request lie that are a tensor of three dimensions in which every element is real.

    Attributes:
        batch_first: whether it is ``(B, T, D)``, or else ``(T, B, D)``.
    """

    batch_first: bool


# Built once per call, so quick to build: a frozen dataclass takes three times as long.
@dataclass(slots=True, eq=False)
class Request:
    """A recurrent network of one kind of cell, and the batch to run it on.

    ``L`` is the number of layers, ``K`` the number of directions, ``B`` the number of sequences, ``N`` the
    number of elements.

    Attributes:
        cell: the equations.
        values: ``(N, D)`` of a floating-point dtype.
        offsets: ``(B + 1,)`` int64 on the device of ``values``.
        lengths: ``(B,)`` int64 on the CPU, the host's own copy: nothing need be read back from a device. None where the
            offsets are on the CPU themselves: they say it.
        state: the initial state: one ``(L * K, B, size)`` per state of the cell, in the order of ``cell.states``,
            the sequences in the caller's order. Empty for zeros, see :meth:`initial`.
        weights: ``L * K`` of the cell's ``weights_type``, in torch's order: layer 0 forward, layer 0 reverse, layer 1
            forward ...
        layers: ``L``.
        directions: ``K``, 1 or 2.
        dropout: the probability that an element of a layer's output is zeroed before the next layer reads it.
        training: whether dropout acts.
        need_output: False where nobody reads the outputs of the last layer, so that they need not be built.
        need_states: whether every layer's states at every step are wanted.
        state_sizes: the size of each state, where ``state`` does not tell.
        input_dropout: the probability that a feature of every layer's input is zeroed for a whole sequence, in
            training.
        layer_by_layer: whether no backend may run several layers at once, because what is dropped between them must be
            drawn there: a library's own dropout draws other numbers than the other backends.
        layout: None; or how ``values`` lie, if a backend is given a batch as it came, in one of its own ``layouts``.
            ``offsets`` and ``lengths`` say nothing then, and the output lies as ``values`` do.
        depth: which layer of a stack this one is, where it is one of several; for messages.
        packed: nothing, or of each layer what the cpu backend made of its weights beforehand, see
            :meth:`raglane.kernels.cpu.layer.Layer.packed`.
        checkpoint_every: 0 where what backward needs of every step is kept; else how many steps are computed again at a
            time.
    """

    cell: CellSpec
    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    state: tuple[Tensor, ...]
    weights: tuple[Any, ...]
    layers: int = 1
    directions: int = 1
    dropout: float = 0.0
    training: bool = False
    need_output: bool = True
    need_states: bool = False
    state_sizes: tuple[int, ...] = ()
    input_dropout: float = 0.0
    layer_by_layer: bool = False
    layout: Packed | Dense | None = None
    depth: int = 0
    packed: tuple[Tensor, ...] = ()
    checkpoint_every: int = 0

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
    """What a backend gives for a :class:`Request`, all of it in the caller's order.

    Attributes:
        output: ``(N, K * size of the first state)``, the last layer's outputs, forward then reverse in each
            row; None where the request did not need it.
        state: the final states, shaped like ``Request.state``; an empty sequence's are its initial ones. The
            reverse direction's are those after the sequence's first element.
        states: None unless asked for; else, for each layer, for each state of the cell, ``(N, K * size)``:
            the state after each element.
    """

    output: Tensor | None
    state: tuple[Tensor, ...]
    states: tuple[tuple[Tensor, ...], ...] | None = None


@dataclass(slots=True, eq=False)
class DirectionResult:
    """What one layer gives in one direction, in the caller's order: the parts of :class:`Result`.

    Attributes:
        output: ``(N, size)``, or None where it was not needed.
        state: the final states, one ``(B, size)`` per state of the cell; an empty sequence's are its initial ones.
        states: None, or one ``(N, size)`` per state of the cell.
    """

    output: Tensor | None
    state: tuple[Tensor, ...]
    states: tuple[Tensor, ...] | None = None


def zero_state(like: Tensor, rows: int, count: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Initial states of zeros; those of one size are one tensor, since nobody writes to them.

    Example:
        >>> [tuple(part.shape) for part in zero_state(torch.zeros(1), 2, 5, (3, 4))]
        [(2, 5, 3), (2, 5, 4)]
    """
    first = like.new_zeros(rows, count, sizes[0])
    return (first, *(first if size == sizes[0] else like.new_zeros(rows, count, size) for size in sizes[1:]))


class Backend(Protocol):
    """What executes a cell on a schedule."""

    @property
    def name(self) -> str:
        """The backend's key in ``BACKENDS``."""

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


class RunDirection(Protocol):
    """One layer in one direction."""

    def __call__(self, layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool, /) -> DirectionResult:
        """Run it.

        Args:
            layer: one layer, in all its directions.
            weights: those of this direction.
            state: its initial states, one ``(B, size)`` per state of the cell.
            reverse: whether each sequence is read from its end; what comes back is in the order of the values.

        Returns:
            An output where ``layer.need_output``, ``states`` where ``layer.need_states``.
        """


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
