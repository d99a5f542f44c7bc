"""Initialisations of recurrent layers, gate by gate, for the layers of ``rl.nn`` and of
``torch.nn``.

Each function sets parameters in place and returns the layer, so that calls can be nested::

    layer = init.forget_bias_(init.orthogonal_(rl.nn.LSTM(12, 64)))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_number, check_whole
from raglane.cells import CELLS, CellSpec
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.nn.recurrent.any_cell import Recurrent
from raglane.nn.recurrent.layer import RecurrentLayer

__all__ = ["chrono_", "forget_bias_", "orthogonal_", "xavier_uniform_"]

L = TypeVar("L", bound=nn.Module)

_TORCH_CELLS: dict[type[nn.Module], str] = {nn.RNN: "rnn_tanh", nn.LSTM: "lstm", nn.GRU: "gru"}


def orthogonal_(layer: L, gain: float = 1.0) -> L:
    """Make each gate's recurrent matrix orthogonal (Saxe et al. 2014, arXiv:1312.6120).

    Args:
        layer: a recurrent layer whose cell multiplies its state by a matrix.
        gain: a factor for the matrices.

    Returns:
        ``layer``.

    Raises:
        ArgumentTypeError: ``layer`` is not a recurrent layer.
        ArgumentError: its cell has no recurrent matrix, or ``gain`` is not a finite number of at
            least 0.

    Example:
        >>> weight = orthogonal_(rl.nn.LSTM(3, 4)).weight_hh_l0[:4]
        >>> bool(torch.allclose(weight @ weight.t(), torch.eye(4), atol=1e-6))
        True
    """
    _check_gain(gain)
    for block in _blocks(layer, "weight_hh", dimensions=2):
        nn.init.orthogonal_(block, gain)
    return layer


def xavier_uniform_(layer: L, gain: float = 1.0) -> L:
    """Draw each gate's input matrix from the uniform distribution of Glorot and Bengio (AISTATS
    2010).

    Args:
        layer: a recurrent layer.
        gain: a factor for the bound ``sqrt(6 / (D + H))``.

    Returns:
        ``layer``.

    Raises:
        ArgumentTypeError: ``layer`` is not a recurrent layer.
        ArgumentError: ``gain`` is not a finite number of at least 0.

    Example:
        >>> bool(xavier_uniform_(rl.nn.GRU(3, 9)).weight_ih_l0.abs().max() <= (6 / (3 + 9)) ** 0.5)
        True
    """
    _check_gain(gain)
    for block in _blocks(layer, "weight_ih", dimensions=2):
        nn.init.xavier_uniform_(block, gain)
    return layer


def forget_bias_(layer: L, value: float = 1.0) -> L:
    """Set the bias of the forget gates, 1 to keep them open at first (Jozefowicz et al., ICML
    2015).

    Args:
        layer: a recurrent layer with biases, whose cell has a gate ``f``.
        value: the bias; for cells with two biases, their sum.

    Returns:
        ``layer``.

    Raises:
        ArgumentTypeError: ``layer`` is not a recurrent layer.
        ArgumentError: it has no such gate or no bias, or ``value`` is not a finite number.

    Example:
        >>> forget_bias_(rl.nn.LSTM(3, 2)).bias_ih_l0[2:4].tolist()
        [1.0, 1.0]
    """
    check_number("value", value, "a finite number", math.isfinite)
    for block in _bias_of(layer, "f"):
        nn.init.constant_(block, value)
    return layer


def chrono_(layer: L, max_length: int) -> L:
    """Distribute the time constants of units over up to ``max_length`` steps (Tallec and Ollivier,
    arXiv:1804.11188).

    The bias of a forget gate is ``log(u)`` with ``u`` uniform from 1 to ``max_length - 1``. The
    bias of the input gate ``i``, if the cell has one, is the negative of it.

    Args:
        layer: a recurrent layer with biases, whose cell has a gate ``f``.
        max_length: the longest expected dependency, in steps; at least 2.

    Returns:
        ``layer``.

    Raises:
        ArgumentTypeError: ``layer`` is not a recurrent layer, or ``max_length`` not a whole number.
        ArgumentError: it has no such gate or no bias, or ``max_length`` is below 2.

    Example:
        >>> layer = chrono_(rl.nn.LSTM(3, 2), max_length=100)
        >>> bool((layer.bias_ih_l0[:2] == -layer.bias_ih_l0[2:4]).all())
        True
    """
    max_length = check_whole("max_length", max_length, 2, "pass e.g. 100")
    opened = list(_bias_of(layer, "f"))
    for block in opened:
        with torch.no_grad():
            block.uniform_(1, max_length - 1).log_()
    if "i" in _cell_of(layer).gates:
        for block, forget in zip(_bias_of(layer, "i"), opened, strict=True):
            with torch.no_grad():
                block.copy_(-forget)
    return layer


def _check_gain(gain: Any) -> None:
    check_number(
        "gain", gain, "a finite number of at least 0", lambda number: 0 <= number < math.inf
    )


def _cell_of(layer: nn.Module) -> CellSpec:
    if isinstance(layer, Recurrent):
        got = f"a Recurrent of {type(layer.cells[0]).__name__}"
        rule = "a layer with its own parameters"
        raise ArgumentTypeError(
            "layer", got, rule, "initialise the parameters of the cell's module"
        )
    if isinstance(layer, RecurrentLayer):
        return layer.cell
    for kind, name in _TORCH_CELLS.items():
        if isinstance(layer, kind):
            return CELLS[name]
    fix = "pass the layer itself"
    raise ArgumentTypeError(
        "layer", type(layer).__name__, "a recurrent layer of rl.nn or torch.nn", fix
    )


def _parameters(layer: Any, name: str) -> Iterator[Tensor]:
    """Yield the parameters of this name in every layer and direction."""
    for index in range(layer.num_layers):
        for suffix in ("", "_reverse")[: 1 + layer.bidirectional]:
            parameter = getattr(layer, f"{name}_l{index}{suffix}", None)
            if isinstance(parameter, Tensor):
                yield parameter


def _blocks(layer: Any, name: str, dimensions: int) -> Iterator[Tensor]:
    """Yield the rows of each gate in the parameters of this name."""
    cell = _cell_of(layer)
    parameters = [
        parameter for parameter in _parameters(layer, name) if parameter.dim() == dimensions
    ]
    for parameter in parameters:
        for gate in cell.gates:
            yield parameter.detach()[cell.block(name, gate, layer.hidden_size)]
    if not parameters:
        fix = "leave this initialisation out"
        raise ArgumentError("layer", f"cell {cell.name!r}", f"a cell with a matrix {name}", fix)


def _bias_of(layer: Any, gate: str) -> Iterator[Tensor]:
    """Yield a gate's bias in every layer and direction, and set a second bias to zero."""
    cell = _cell_of(layer)
    if gate not in cell.gates or not layer.bias:
        got = f"cell {cell.name!r} with gates {', '.join(cell.gates)}, bias={layer.bias}"
        fix = "choose another initialisation"
        raise ArgumentError(
            "layer", got, f"a layer whose cell has a gate {gate!r} with a bias", fix
        )
    rows = cell.block("bias_ih", gate, layer.hidden_size)
    for second in _parameters(layer, "bias_hh"):
        nn.init.zeros_(second.detach()[rows])
    for first in _parameters(layer, "bias_ih"):
        yield first.detach()[rows]
