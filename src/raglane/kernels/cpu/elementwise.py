"""Layers whose recurrence is element-wise: IndRNN, minGRU, minLSTM, QRNN and SRU.

The input products of the forward pass are the kernels' own, because a library's may round a row differently in another
batch. So are the time loops, the sums for biases and recurrent factors among them. The large products of the backward
pass are torch's.
"""

from __future__ import annotations

import struct
from typing import cast

import torch
from torch import Tensor

from raglane.cells.elementwise import ElementwiseWeights
from raglane.kernels.cpu.gradients import Grads, Kind, call_layer, outer, product_dtype, spend, to_dtype
from raglane.kernels.cpu.memory import Given, Layer, Saved
from raglane.native.cells import cell_facts
from raglane.native.library import preamble
from raglane.native.memory import address, addresses

__all__ = ["ElementwiseLayers"]

# raglane_elementwise: eleven numbers, then offsets, values, two states, eight weights, five results, ten gradients.
_pack = struct.Struct("=28q80x").pack
_pack_backward = struct.Struct("=38q").pack


class ElementwiseLayers(Kind):
    """See :class:`~raglane.kernels.cpu.gradients.Kind`."""

    function = "raglane_elementwise_forward"
    pack = staticmethod(_pack)

    def head(self, layer: Layer) -> tuple[int, ...]:
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        return (
            *preamble(cell_facts()[layer.cell].number, layer.values.dtype),
            layer.directions,
            layer.offsets.shape[0] - 1,
            *layer.values.shape,
            layer.sizes[0],
            layer.offsets.data_ptr(),
            layer.values.data_ptr(),
            *addresses(layer.initial, 2),
            *addresses(layer.weights, 8),
        )

    def saved_shapes(self, layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        total, count, size = layer.values.shape[0], layer.directions, layer.sizes[0]
        saved = cell_facts()[layer.cell].saved + (layer.weights[3] is not None)
        return (count, total, saved * size), (total, count * size if len(layer.sizes) > 1 else 0)

    def states(self, layer: Layer, output: Tensor, cells: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        return (output,) if cells is None else (output, cells)

    def _backward(
        self, layer: Layer, saved: Saved, given: Given, wanted: tuple[bool, ...], *, overwrite: bool
    ) -> Grads:
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        values, count, states = layer.values, layer.directions, len(layer.initial)
        weights = [ElementwiseWeights(*layer.weights[4 * d :][:4]) for d in range(count)]  # type: ignore[arg-type]
        rows = weights[0].input.shape[0]
        skips = cell_facts()[layer.cell].skips and weights[0].skip is None
        size = layer.sizes[0]
        width = rows if weights[0].skip is None else rows + size
        keeps = overwrite and saved.gates.numel() > 0
        gates = saved.gates if keeps else values.new_empty(count, values.shape[0], width)
        skipped = values.new_empty(count, *values.shape) if skips else None
        initial = tuple([torch.empty_like(part) for part in layer.initial])
        # One direction alone may have a bias: the kernels give the sums of both or of none.
        recurrent, bias = [
            next((values.new_empty(count, part.shape[0]) for part in parts if part is not None), None)
            for parts in ([part.recurrent for part in weights], [part.bias for part in weights])
        ]
        call_layer(
            layer,
            "raglane_elementwise_backward",
            _pack_backward(
                *self.head(layer),
                saved.output.data_ptr(),
                0,
                0,
                saved.gates.data_ptr(),
                saved.cells.data_ptr(),
                address(given.output),
                address(given.cells),
                *addresses(given.final, 2),
                gates.data_ptr(),
                address(skipped),
                *addresses(initial, 2),
                address(recurrent),
                address(bias),
            ),
        )
        if keeps:
            spend(saved.gates)
        wide = product_dtype(values.dtype)
        values, gates = values.to(wide), gates.to(wide)
        grad_values: Tensor | None = None
        found: list[Tensor | None] = []
        for d, (part, of_input) in enumerate(zip(weights, gates[..., :rows].unbind(), strict=True)):
            wants = wanted[1 + states + 4 * d :][:4]
            of_skip = None if part.skip is None else gates[d, :, rows:]
            if wanted[0]:
                grad_values = _add_product(grad_values, of_input, part.input.to(wide))
                if of_skip is not None:
                    grad_values = _add_product(grad_values, of_skip, cast(Tensor, part.skip).to(wide))
            found += [
                outer(of_input, values) if wants[0] else None,
                _of_direction(recurrent, d),
                None if part.bias is None else _of_direction(bias, d),
                outer(of_skip, values) if wants[3] and of_skip is not None else None,
            ]
        if grad_values is not None and skipped is not None:
            for part in skipped:
                grad_values += part
        return to_dtype((grad_values, *initial, *found), layer.values.dtype)


def _of_direction(sums: Tensor | None, direction: int) -> Tensor | None:
    """One direction's row, in memory that it does not share with another's: an operator must not return that."""
    return None if sums is None else sums[direction] if sums.shape[0] == 1 else sums[direction].clone()


def _add_product(total: Tensor | None, gates: Tensor, weight: Tensor) -> Tensor:
    """The gradients of products x their weights, added to ``total``."""
    return torch.mm(gates, weight) if total is None else total.addmm_(gates, weight)
