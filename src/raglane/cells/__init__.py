"""The cells: each has one file and one line in :data:`CELLS`.

spec.py is the base class of cells, with their weights and states; elementwise.py that of cells
whose recurrence is element-wise (indrnn.py, sru.py, qrnn.py, mingru.py, minlstm.py).

elman.py, lstm.py, gru.py: as in torch. peephole_lstm.py, coupled_lstm.py, layernorm.py: variants
of them. slstm.py: exponential gates. grud.py: missing values. cfc.py: elapsed time.

regularised.py adds dropout on states, zoneout and resets to a cell; module.py is a cell of the
user, in plain torch.
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
