"""A stack of recurrent layers without its call: its settings, its weights, and the states it begins with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raglane._utils.checks import check_count, check_every
from raglane._utils.messages import message
from raglane.cells.spec import CellSpec
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.kernels.dispatch import check_names
from raglane.nn.recurrent.initial_state import LengthState
from raglane.nn.recurrent.regularisation import Regularisation
from raglane.ragged import Ragged

State = Tensor | tuple[Tensor, ...]


class Options(TypedDict, total=False):
    """The arguments of every recurrent layer besides torch's; see :class:`RecurrentLayer`."""

    schedule: str
    backend: str
    initial_state: str | torch.nn.Module
    input_dropout: float
    state_dropout: float
    weight_dropout: float
    zoneout: float | tuple[float, ...]
    checkpoint_every: int | None


OPTIONS = tuple(Options.__annotations__)
"""The names of :class:`Options`."""

_SETTINGS = (
    *("input_size", "hidden_size", "num_layers", "bidirectional", "dropout", "training", "schedule", "backend"),
    *("regularisation", "checkpoint_every", "initial_state"),
)


def settings_of(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    """A reader of all attributes on which the calls of a layer rest: those of every stack, and those named."""
    return attrgetter(*_SETTINGS, *names)


class Stack(torch.nn.Module):
    """The base of :class:`~raglane.nn.recurrent.layer.RecurrentLayer`."""

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    # On the class as well, because ``rl.accelerate`` converts layers that were built without them.
    schedule: str = "auto"
    backend: str = "auto"
    regularisation: Regularisation = Regularisation()
    initial_state: str = "zeros"
    checkpoint_every: int | None = None
    # What a call's plan rests on; read in C where that can be, since every call does.
    _settings: ClassVar[Callable[[Any], tuple[Any, ...]]] = settings_of("cell")

    @property
    @abstractmethod
    def cell(self) -> CellSpec:
        """The equations."""

    @property
    def output_size(self) -> int:
        """The features of an element of the output."""
        size = self.state_sizes[0]
        return (2 if self.bidirectional else 1) * size

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The size of each state, in the order of the cell's ``states``."""
        return self.cell.state_sizes(self.hidden_size, getattr(self, "proj_size", 0))

    @abstractmethod
    def _weights(self) -> tuple[Any, ...]:
        """The weights as they are now: one of the cell's ``weights_type`` per layer and direction, in torch's order."""

    def _like(self, weights: tuple[Any, ...]) -> Tensor | None:
        """One of the weights, for the dtype and device of all; None for a layer without any."""
        like: Tensor | None = weights[0].input
        return like

    def _check_sizes(self, count: int) -> None:
        """Raise where an attribute was changed to what this layer cannot be."""
        for name in ("input_size", "hidden_size", "num_layers"):
            check_count(name, getattr(self, name))
        if count != self.num_layers * (2 if self.bidirectional else 1):
            got = f"{self.num_layers!r}, {self.bidirectional!r}"
            rule = f"as when the layer was built, with weights for {count} layers times directions"
            fix = "build a layer of the size that you need"
            raise ArgumentError(message("num_layers, bidirectional", got, rule, fix))
        check_every(self.checkpoint_every)

    def _has_own_initial(self) -> bool:
        """Whether a sequence without a given state begins with anything but zeros."""
        return self.initial_state != "zeros"

    def _set_options(
        self,
        *,
        schedule: str = "auto",
        backend: str = "auto",
        initial_state: str | torch.nn.Module = "zeros",
        checkpoint_every: int | None = None,
        **regularisation: Any,
    ) -> None:
        """Take up the options that torch's layers do not have; the cell and its sizes are known by now."""
        for name, value in regularisation.items():
            if name not in OPTIONS:
                rule = f"an argument of torch's layer or one of {', '.join(OPTIONS)}"
                raise ArgumentTypeError(message(name, repr(value), rule, "leave it out"))
        check_names(schedule, backend)
        self.schedule, self.backend = schedule, backend
        self.checkpoint_every = check_every(checkpoint_every)
        self.regularisation = Regularisation(**regularisation)
        self.regularisation.check_fits(self.cell.states, self.cell.reads_state)
        if isinstance(initial_state, torch.nn.Module):
            self.initial_state, self.initial_module = "module", initial_state
            return
        if initial_state not in ("zeros", "learned", "lengths"):
            rule = "'zeros', 'learned', 'lengths', or a module from a Ragged batch to its initial state"
            fix = "choose one of them, or pass the state of each sequence as hx"
            raise ArgumentError(message("initial_state", repr(initial_state), rule, fix))
        self.initial_state = initial_state
        if initial_state == "zeros":
            return
        found = self._like(self._weights())
        like = torch.empty(0) if found is None else found
        rows, sizes = self.num_layers * (2 if self.bidirectional else 1), self.state_sizes
        if initial_state == "learned":
            for name, size in zip(self.cell.states, sizes, strict=True):
                self.register_parameter(f"initial_{name}", torch.nn.Parameter(like.new_zeros(rows, size)))
        if initial_state == "lengths":
            self.initial_module = LengthState(rows, sizes, like.device, like.dtype)

    def _own_initial(self, batch: Ragged) -> Any:
        """The initial state of a batch for which none is given, where it is learned."""
        if self.initial_state != "learned":
            return self.initial_module(batch)
        parts = [getattr(self, f"initial_{name}") for name in self.cell.states]
        return one_or_tuple(tuple(part.unsqueeze(1).expand(-1, batch._count, -1) for part in parts))


def one_or_tuple(parts: tuple[Any, ...]) -> Any:
    """The state of a cell with one state is that tensor, as with torch's GRU and RNN."""
    return parts if len(parts) > 1 else parts[0]


plans: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""The plans of the layers' calls; not on the layers, so that no copy and no pickle has one."""
