"""What a backend gets, and what it gives back.

A kernel sees tensors, offsets, a cell and the name of a schedule; never a Ragged batch or a layer. A backend checks a
:class:`Request` before it computes with it, for its tensors are anybody's to change (:mod:`raglane.kernels.checks`):
shapes and dtypes fit, all tensors but ``lengths`` are on one device, and there is a state for every sequence. It
allocates what it returns and changes nothing it was given.

NOTE (isolation): a sequence's outputs, states and gradients depend on its own values, its initial state and
the weights alone. A NaN in one sequence must not reach another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from raglane.cells.spec import CellSpec
from raglane.segments.plain import lengths_from_offsets

__all__ = ["Backend", "LayerResult", "NetworkLike", "Request", "Result", "Traits", "zero_state"]


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
    """

    cell: CellSpec
    input_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    need_states: bool = False


class NetworkLike(Protocol):
    """What a network is made of, whoever holds it; the attributes are :class:`Request`'s."""

    @property
    def cell(self) -> CellSpec: ...  # noqa: D102
    @property
    def weights(self) -> tuple[Any, ...]: ...  # noqa: D102
    @property
    def layers(self) -> int: ...  # noqa: D102
    @property
    def directions(self) -> int: ...  # noqa: D102
    @property
    def dropout(self) -> float: ...  # noqa: D102
    @property
    def training(self) -> bool: ...  # noqa: D102


# Built once a call, so quick to build: a frozen dataclass takes three times as long.
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
        state: the initial state: one ``(L * K, B, size)`` a state of the cell, in the order of ``cell.states``,
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

    @property
    def count(self) -> int:
        """``B``."""
        return self.offsets.shape[0] - 1

    @property
    def host_lengths(self) -> Tensor:
        """The lengths on the CPU, wherever they come from; no device is waited for."""
        return lengths_from_offsets(self.offsets) if self.lengths is None else self.lengths

    def tensors(self) -> Iterator[Tensor | None]:
        """All that may have a derivative; of weights that are no tuple of tensors nothing."""
        yield self.values
        yield from self.state
        for weights in self.weights:
            if isinstance(weights, tuple):
                yield from (part for part in weights if not isinstance(part, tuple))

    def initial(self) -> tuple[Tensor, ...]:
        """The initial state, for a backend that must have zeros where there is none."""
        if self.state:
            return self.state
        return zero_state(self.values, self.layers * self.directions, self.count, self.state_sizes)

    def cast(self, dtype: torch.dtype) -> Request:
        """This request in autocast's dtype; tensors of float64 stay, as autocast leaves them everywhere."""

        def convert(part: Any) -> Any:
            if isinstance(part, Tensor):
                return part if part.dtype is torch.float64 else part.to(dtype)
            if isinstance(part, tuple):
                converted = [convert(item) for item in part]
                return type(part)(*converted) if hasattr(part, "_fields") else tuple(converted)
            return part

        return replace(self, values=convert(self.values), state=convert(self.state), weights=convert(self.weights))


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
class LayerResult:
    """What one layer gives in one direction, in the caller's order: the parts of :class:`Result`.

    Attributes:
        output: ``(N, size)``, or None where it was not needed.
        state: the final states, one ``(B, size)`` a state of the cell; an empty one's are its initial ones.
        states: None, or one ``(N, size)`` a state of the cell.
    """

    output: Tensor | None
    state: tuple[Tensor, ...]
    states: tuple[Tensor, ...] | None = None


def zero_state(like: Tensor, rows: int, count: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Initial states of zeros; those of one size are one tensor, since nobody writes to them.

    Args:
        like: of their dtype, on their device.
        rows: layers times directions.
        count: the number of sequences.
        sizes: of the states.

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

    def refuses(self, traits: Traits, schedule: str) -> str | None:
        """Why a request of these traits cannot run here on this schedule, in a clause; None if it can."""

    def run(self, request: Request, schedule: str) -> Result:
        """Run the request. To be called only where :meth:`refuses` gives None."""
