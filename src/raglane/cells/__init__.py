"""The cells: each has one file and one line in :data:`CELLS`.

- ``spec``: what all cells have; ``elementwise``: the cells whose state meets no matrix
- ``module``: a user's module as a cell
- ``regularised``: a cell with dropout on its state, zoneout, or resets
"""

from __future__ import annotations

from raglane.cells.cfc import CfC
from raglane.cells.coupled_lstm import CoupledLSTM
from raglane.cells.elman import Elman
from raglane.cells.gru import GRU
from raglane.cells.grud import GRUD
from raglane.cells.indrnn import IndRNN
from raglane.cells.layernorm import LayerNormGRU, LayerNormLSTM
from raglane.cells.lstm import LSTM
from raglane.cells.mingru import MinGRU
from raglane.cells.minlstm import MinLSTM
from raglane.cells.peephole_lstm import PeepholeLSTM
from raglane.cells.qrnn import QRNN
from raglane.cells.slstm import SLSTM
from raglane.cells.spec import CellSpec, Weights
from raglane.cells.sru import SRU

__all__ = [
    "CELLS",
    "GRU",
    "GRUD",
    "LSTM",
    "QRNN",
    "SLSTM",
    "SRU",
    "CellSpec",
    "CfC",
    "CoupledLSTM",
    "Elman",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "MinGRU",
    "MinLSTM",
    "PeepholeLSTM",
    "Weights",
]

CELLS: dict[str, CellSpec] = {
    cell.name: cell
    for cell in (
        Elman("tanh"),
        Elman("relu"),
        LSTM(),
        PeepholeLSTM(),
        CoupledLSTM(),
        LayerNormLSTM(),
        GRU(),
        GRU(reset_after=False),
        LayerNormGRU(),
        SLSTM(),
        GRUD(),
        CfC(),
        IndRNN("relu"),
        IndRNN("tanh"),
        SRU(),
        QRNN(),
        MinGRU(),
        MinLSTM(),
    )
}
"""Every cell by its name."""
