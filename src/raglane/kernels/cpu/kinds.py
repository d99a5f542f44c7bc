"""Which kind of layer a cell makes."""

from __future__ import annotations

from raglane.cells import CELLS
from raglane.cells.elementwise import ElementwiseWeights
from raglane.cells.spec import Weights
from raglane.kernels.cpu.elementwise import ElementwiseLayers
from raglane.kernels.cpu.gradients import Kind
from raglane.kernels.cpu.matrix import MatrixLayers

__all__ = ["KINDS"]

_BY_WEIGHTS: dict[type, Kind] = {Weights: MatrixLayers(), ElementwiseWeights: ElementwiseLayers()}

KINDS: dict[str, Kind] = {
    name: _BY_WEIGHTS[cell.weights_type] for name, cell in CELLS.items() if cell.weights_type in _BY_WEIGHTS
}
"""The kinds by the names of the cells that would fit: which of them there are, :func:`~raglane.native.cells.has_cell`
asks the kernels. So this dict needs none, and ``torch.compile`` can trace through it."""
