"""The cells: one file each, and one line each in :data:`CELLS`."""

from __future__ import annotations

from raglane.cells.elman import Elman
from raglane.cells.gru import GRU
from raglane.cells.lstm import LSTM
from raglane.cells.spec import CellSpec, Weights

__all__ = ["CELLS", "CellSpec", "Weights"]

CELLS: dict[str, CellSpec] = {
    cell.name: cell
    for cell in (
        Elman("tanh"),
        Elman("relu"),
        LSTM(),
        GRU(),
    )
}
"""Every cell by its name. A new cell is one file beside this one, and one line here."""
