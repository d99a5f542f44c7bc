"""What the layers of one kind of cell have in common: torch's arguments, and parameters named as torch's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from raglane.cells import CellSpec
from raglane.nn.arguments import check_count, check_dropout, check_dtype, check_flag
from raglane.nn.functional import Network
from raglane.nn.layer import RecurrentLayer

__all__ = ["CellLayer"]

# What is shown of a layer where it is not this, in this order.
_DEFAULTS: dict[str, Any] = {
    "num_layers": 1,
    "bias": True,
    "batch_first": False,
    "dropout": 0.0,
    "bidirectional": False,
}


class CellLayer(RecurrentLayer):
    """A stack of one kind of cell, with the parameters that its ``shapes`` name: ``weight_ih_l0`` and so on.

    Args:
        input_size: features of an element.
        hidden_size: units of a layer and direction.
        num_layers: layers on top of each other.
        bias: whether there are biases.
        batch_first: whether padded tensors are ``(B, T, D)``.
        dropout: the probability that an element of a layer's output is zeroed before the next layer reads it.
        bidirectional: also run from the end to the start.
        device, dtype: of the parameters.
        **options: those of every layer, :class:`raglane.nn.layer.RecurrentLayer`, and what the cell takes.

    Raises:
        ArgumentError: an argument out of its range.
        ArgumentTypeError: one that the layer does not have.
    """

    # The cell's own arguments, with their defaults.
    _own: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.input_size = check_count("input_size", input_size)
        self.hidden_size = check_count("hidden_size", hidden_size)
        self.num_layers = check_count("num_layers", num_layers)
        self.bias = check_flag("bias", bias)
        self.batch_first = check_flag("batch_first", batch_first)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.dropout = check_dropout(dropout)
        check_dtype(dtype)
        own = {name: options.pop(name, default) for name, default in self._own.items()}
        self._cell = cell = self._make_cell(**own)
        for name, value in own.items():
            setattr(self, name, value)
        directions = 2 if bidirectional else 1
        self._all_weights: list[list[str]] = []  # as torch's layers have it
        for index in range(num_layers):
            width = input_size if index == 0 else directions * cell.state_sizes(hidden_size)[0]
            for suffix in ("", "_reverse")[:directions]:
                shapes = cell.shapes(width, hidden_size, bias)
                self._all_weights.append([f"{name}_l{index}{suffix}" for name in shapes])
                for name, shape in shapes.items():
                    parameter = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(f"{name}_l{index}{suffix}", parameter)
        self.reset_parameters()
        self._set_options(**options)

    @staticmethod
    @abstractmethod
    def _make_cell(**own: Any) -> CellSpec:
        """The equations, from the cell's own arguments."""

    @property
    def cell(self) -> CellSpec:
        """The equations."""
        return self._cell

    def reset_parameters(self) -> None:
        """Fill all parameters anew, as the cell has it."""
        # Not those of a module that makes the initial states, which knows itself how to begin.
        for name, parameter in self.named_parameters(recurse=False):
            kind, _, _ = name.rpartition("_l")
            if kind:
                self._cell.initialise(kind, parameter.detach(), self.hidden_size)

    def extra_repr(self) -> str:
        """Torch's line, with what was chosen of the rest."""
        defaults = _DEFAULTS | self._own
        chosen = [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        parts = [str(self.input_size), str(self.hidden_size), *chosen, super().extra_repr()]
        return ", ".join(part for part in parts if part)

    def _network(self) -> Network:
        """The layer's description for the kernels, with the weights as they are now."""
        weights = tuple(self._weights())
        return self._describe(weights, weights[0].input, self._cell.state_sizes(self.hidden_size))

    def _weights(self) -> Iterator[Any]:
        """One layer and direction after the other, read by name: parametrizations and functional_call replace them."""
        for names in self._all_weights:
            yield self._cell.weights_type(*[getattr(self, name) for name in names])
