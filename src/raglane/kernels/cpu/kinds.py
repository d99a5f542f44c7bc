"""Which kind of layer a cell makes."""

from __future__ import annotations

from raglane.kernels.cpu import elementwise, matrix
from raglane.kernels.cpu.gradients import Kind

__all__ = ["KINDS"]

KINDS: dict[str, Kind] = {
    **dict.fromkeys(matrix.CELLS, matrix.MatrixLayers()),
    **dict.fromkeys(elementwise.CELLS, elementwise.ElementwiseLayers()),
}
"""The kinds by the names of their cells."""
