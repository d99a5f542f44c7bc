"""Which kind of layer a cell makes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from raglane.cells import CELLS
from raglane.cells.elementwise import ElementwiseWeights
from raglane.cells.spec import Weights
from raglane.kernels.cpu.elementwise import ElementwiseLayer
from raglane.kernels.cpu.layer import Layer, LayerSpec
from raglane.kernels.cpu.matrix import MatrixLayer
from raglane.kernels.cpu.memory import refuse
from raglane.native.memory import NO_MEMORY

__all__ = ["KINDS", "find_layer", "layer_of"]

_BY_WEIGHTS: dict[type, type[Layer]] = {Weights: MatrixLayer, ElementwiseWeights: ElementwiseLayer}

KINDS: dict[str, type[Layer]] = {
    name: _BY_WEIGHTS[cell.weights_type] for name, cell in CELLS.items() if cell.weights_type in _BY_WEIGHTS
}
"""The kinds by the names of the cells that would fit: which of them there are, :func:`~raglane.native.cells.has_cell`
asks the kernels. So this dict needs none, and ``torch.compile`` can trace through it."""


@lru_cache(maxsize=512)
def find_layer(spec: LayerSpec) -> Layer:
    """The layer that is made for this; made once."""
    return KINDS[spec.cell](spec)


def layer_of(
    cell: str,
    offsets: Any,
    tensors: tuple[Any, ...],
    weights: int,
    sizes: tuple[int, ...],
    directions: int,
    depth: int = 0,
    checkpoint_every: int = 0,
) -> Layer:
    """The layer that tensors are meant for.

    Args:
        cell: a key of ``CELLS``.
        offsets: ``(B + 1,)`` int64.
        tensors: see :data:`raglane.kernels.cpu.layer.Tensors`.
        weights: how many of them are weights.
        sizes: of the states.
        directions: ``K``.
        depth: which layer of a stack this is, for messages.
        checkpoint_every: see :class:`~raglane.kernels.cpu.layer.LayerSpec`.
    """
    try:
        values = tensors[0]
        return find_layer(LayerSpec(cell, int(values.shape[1]), sizes, directions, values.dtype, checkpoint_every))
    except NO_MEMORY:
        begin = len(tensors) - weights
        refuse(cell, offsets, tensors[0], tensors[1:begin], tensors[begin:], sizes, directions, depth)
        raise
