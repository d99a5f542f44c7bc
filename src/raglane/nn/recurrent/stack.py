"""The settings, weights and initial states of a stack of recurrent layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raglane._utils.checks import check_count, check_every
from raglane.cells.spec import CellSpec
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.kernels.dispatch import check_names
from raglane.nn.recurrent.regularisation import Regularisation
from raglane.ragged import Ragged

State = Tensor | tuple[Tensor, ...]
Schedule = Literal["auto", "each", "padded", "masked", "packed", "lanes"]
BackendName = Literal["auto", "cpu", "program", "torch", "triton", "reference"]


class Options(TypedDict, total=False):
    """The keyword arguments of every recurrent layer that torch's do not have; see
    :class:`RecurrentLayer`.
    """

    schedule: Schedule
    backend: BackendName
    initial_state: Literal["zeros", "learned", "lengths"] | torch.nn.Module
    input_dropout: float
    state_dropout: float
    weight_dropout: float
    zoneout: float | tuple[float, ...]
    checkpoint_every: int | None


OPTIONS = tuple(Options.__annotations__)

_SIZES = ("input_size", "hidden_size", "num_layers")
_SETTINGS = (
    *_SIZES,
    "bidirectional",
    "dropout",
    "training",
    "schedule",
    "backend",
    "regularisation",
    "checkpoint_every",
    "initial_state",
)


def _share(name: str) -> Any:
    """Return the property of a probability of :class:`Regularisation`."""

    def read(layer: Stack) -> Any:
        return getattr(layer.regularisation, name)

    def write(layer: Stack, share: Any) -> None:
        changed = replace(layer.regularisation, **{name: share})
        changed.check_fits(layer.cell.states, layer.cell.reads_state)
        layer.regularisation = changed

    return property(read, write, doc=f"The argument ``{name}``.")


def settings_of(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads a stack's settings, which a call plan depends on, and ``names``."""
    return attrgetter(*_SETTINGS, *names)


class Stack(torch.nn.Module):
    """The base of :class:`~raglane.nn.recurrent.layer.RecurrentLayer`."""

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    # Class attributes, because layers that ``rl.accelerate`` converts have none of their own.
    schedule: str = "auto"
    backend: str = "auto"
    regularisation: Regularisation = Regularisation()
    initial_state: str | torch.nn.Module = "zeros"
    checkpoint_every: int | None = None
    input_dropout = _share("input_dropout")
    state_dropout = _share("state_dropout")
    weight_dropout = _share("weight_dropout")
    zoneout = _share("zoneout")
    # The facts of a call plan, read in every call; an attrgetter reads them in C.
    _settings: ClassVar[Callable[[Any], tuple[Any, ...]]] = settings_of("cell")
    # True if the weights depend on nothing but settings and parameters.
    _weights_are_parameters: ClassVar[bool] = False

    @property
    @abstractmethod
    def cell(self) -> CellSpec:
        """The cell that the layer runs."""

    @property
    def output_size(self) -> int:
        """The number of features of the output."""
        return (2 if self.bidirectional else 1) * self.state_sizes[0]

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """The size of each state, in the order of the cell's ``states``."""
        return self.cell.state_sizes(self.hidden_size, getattr(self, "proj_size", 0))

    @abstractmethod
    def _weights(self) -> tuple[Any, ...]:
        """Return the weights: one ``weights_type`` per layer and direction, in torch's order."""

    def _weights_in_order(self) -> Sequence[Any]:
        """Return the weights of all layers and directions, one after the other."""
        return tuple(chain.from_iterable(self._weights()))

    def _like(self, weights: tuple[Any, ...]) -> Tensor | None:
        """Return one of the weights, for its dtype and device; None for a layer without weights."""
        return weights[0].input

    def _check_sizes(self, count: int) -> None:
        """Raise if an attribute was changed to an invalid value."""
        for name in _SIZES:
            check_count(name, getattr(self, name))
        if count != self.num_layers * (2 if self.bidirectional else 1):
            got = f"{self.num_layers!r}, {self.bidirectional!r}"
            rule = f"the values that the layer was built with: it has {count} weights, one per layer and direction"
            raise ArgumentError(
                "num_layers, bidirectional", got, rule, "build a layer of these sizes"
            )
        check_every(self.checkpoint_every)

    def _has_own_initial(self) -> bool:
        """Return True if the layer's own initial state is not zeros."""
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
        """Set the options of :class:`Options`; the cell and its sizes must be set before."""
        for name, value in regularisation.items():
            if name not in OPTIONS:
                rule = f"one of torch's arguments, or one of {', '.join(OPTIONS)}"
                raise ArgumentTypeError(name, repr(value), rule, "leave it out")
        check_names(schedule, backend)
        self.schedule = schedule
        self.backend = backend
        self.checkpoint_every = check_every(checkpoint_every)
        self.regularisation = Regularisation(**regularisation)
        self.regularisation.check_fits(self.cell.states, self.cell.reads_state)
        if isinstance(initial_state, torch.nn.Module):
            self.initial_module = initial_state
            # Without registering the module twice.
            vars(self)["initial_state"] = initial_state
            return
        if initial_state not in ("zeros", "learned", "lengths"):
            rule = "'zeros', 'learned', 'lengths', or a module from a Ragged batch to its initial state"
            fix = "choose one of them, or pass the state of each sequence as hx"
            raise ArgumentError("initial_state", repr(initial_state), rule, fix)
        self.initial_state = initial_state
        if initial_state == "zeros":
            return
        weight = self._like(self._weights())
        like = torch.empty(0) if weight is None else weight
        rows = self.num_layers * (2 if self.bidirectional else 1)
        sizes = self.state_sizes
        if initial_state == "learned":
            for name, size in zip(self.cell.states, sizes, strict=True):
                self.register_parameter(
                    f"initial_{name}", torch.nn.Parameter(like.new_zeros(rows, size))
                )
        if initial_state == "lengths":
            self.initial_module = _LengthState(rows, sizes, like.device, like.dtype)

    def _own_initial(self, batch: Ragged) -> Any:
        """Return the layer's own initial state for a batch."""
        if self.initial_state != "learned":
            return self.initial_module(batch)
        states = [getattr(self, f"initial_{name}") for name in self.cell.states]
        return one_or_tuple(
            tuple(state.unsqueeze(1).expand(-1, batch._count, -1) for state in states)
        )


class _LengthState(torch.nn.Module):
    """The initial state as an affine function of ``log(1 + length)``, zeros at first.

    ``rows`` is layers times directions. ``forward`` returns ``(rows, B, size)`` per state.
    """

    def __init__(self, rows: int, sizes: tuple[int, ...], device: Any, dtype: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.slope = torch.nn.Parameter(
            torch.empty(rows, 1, sum(sizes), device=device, dtype=dtype)
        )
        self.intercept = torch.nn.Parameter(
            torch.empty(rows, 1, sum(sizes), device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to 0."""
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, batch: Ragged) -> Any:
        scale = batch.lengths.to(self.slope.dtype).log1p().view(1, -1, 1)
        return one_or_tuple((self.intercept + self.slope * scale).split(list(self.sizes), 2))


def one_or_tuple(states: tuple[Any, ...]) -> Any:
    """Return several states as a tuple, and a single one by itself, as torch's GRU and RNN do."""
    return states if len(states) > 1 else states[0]


# The call plans of layers; not attributes of the layers, so that copies and pickles have none.
plans: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
