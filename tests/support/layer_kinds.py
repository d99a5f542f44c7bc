"""Every kind of layer of ``rl.nn`` that has a cell of its own, and what its cell's formulas make of its parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import raglane as rl
from naive_cells import naive_network
from raglane.cells import CELLS
from raglane.kernels.contract import Request, Result

__all__ = ["GATED", "KINDS", "D", "H", "Kind", "build", "parts", "random_state", "truth_of"]

D, H = 5, 4


class Kind(NamedTuple):
    """A class, what tells it from others of the class, and the key of its equations in CELLS."""

    layer: str
    cell: str
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        return self.cell


KINDS = [
    Kind("RNN", "rnn_tanh"),
    Kind("RNN", "rnn_relu", {"nonlinearity": "relu"}),
    Kind("LSTM", "lstm"),
    Kind("PeepholeLSTM", "peephole_lstm"),
    Kind("CoupledLSTM", "coupled_lstm"),
    Kind("LayerNormLSTM", "layernorm_lstm"),
    Kind("GRU", "gru"),
    Kind("GRU", "gru_reset_before", {"reset_after": False}),
    Kind("LayerNormGRU", "layernorm_gru"),
    Kind("IndRNN", "indrnn_relu"),
    Kind("IndRNN", "indrnn_tanh", {"nonlinearity": "tanh"}),
    Kind("SRU", "sru"),
    Kind("QRNN", "qrnn"),
    Kind("MinGRU", "mingru"),
    Kind("MinLSTM", "minlstm"),
]
GATED = [kind for kind in KINDS if kind.layer in ("RNN", "LSTM", "PeepholeLSTM", "CoupledLSTM", "GRU")]
"""Those that can clip the arguments of their gates."""


def build(kind: Kind, *args: Any, units: int = H, **kwargs: Any) -> Any:
    """A layer of this kind in float64, from 5 features to 4 units."""
    return getattr(rl.nn, kind.layer)(D, units, *args, **{"dtype": torch.float64, **kind.options, **kwargs})


def parts(state: Any) -> tuple[Any, ...]:
    """The tensors of a state, or the batches of its history, whether a layer has one or several."""
    return tuple(state) if isinstance(state, tuple | list) else (state,)


def random_state(layer: Any, count: int) -> Any:
    """An initial state as the layer takes it, that wants gradients."""
    rows, like = layer.num_layers * (2 if layer.bidirectional else 1), layer.weight_ih_l0
    sizes = layer.cell.state_sizes(layer.hidden_size)
    made = tuple(torch.randn(rows, count, size, dtype=torch.float64).to(like).requires_grad_() for size in sizes)
    return made if len(made) > 1 else made[0]


def truth_of(kind: Kind, layer: Any, batch: rl.Ragged, hx: Any, clip: float | None = None) -> Result:
    """The formulas on the layer's parameters, found by their names."""
    cell = CELLS[kind.cell]
    weights = tuple(
        cell.weights_type(*(getattr(layer, f"{name}_l{index}{suffix}", None) for name in cell.shapes(D, H)))
        for index in range(layer.num_layers)
        for suffix in ("", "_reverse")[: 2 if layer.bidirectional else 1]
    )
    request = Request(
        cell,
        batch.values,
        batch.offsets,
        batch.host_lengths,
        parts(hx),
        weights,
        layers=layer.num_layers,
        directions=2 if layer.bidirectional else 1,
    )
    return naive_network(request, clip=clip)
