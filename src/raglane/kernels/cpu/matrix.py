"""Layers whose weights meet the state as a matrix: RNN, LSTM and GRU.

The time loops are the kernels'. The products of the backward pass, which are not sequential, are torch's where they are
large.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, cast

import torch
from torch import Tensor

from raglane.cells.spec import Weights
from raglane.kernels.cpu.gradients import Grads, Kind, call_layer, outer, product_dtype, spend, to_dtype
from raglane.kernels.cpu.memory import Given, Layer, Saved
from raglane.native.cells import cell_facts
from raglane.native.library import library, preamble
from raglane.native.memory import address, addresses

__all__ = ["MatrixLayers", "head", "pack"]

# raglane_layer: thirteen numbers, then offsets, values, two states, ten weights, five results; then what is backward's
# alone, ten gradients of the time loop and eleven that are made after it.
pack = struct.Struct("=32q168x").pack
_pack_backward = struct.Struct("=53q").pack


def head(layer: Layer) -> tuple[int, ...]:
    """The fields of ``raglane_layer`` up to the results."""
    cell, values, offsets, initial, weights, sizes, directions, _ = layer
    return (
        *preamble(cell_facts()[cell].number, values.dtype),
        directions,
        offsets.shape[0] - 1,
        *values.shape,
        sizes[-1],
        0 if weights[4] is None else sizes[0],
        _gate_stride(cell, sizes[-1]),
        offsets.data_ptr(),
        values.data_ptr(),
        *addresses(initial, 2),
        *addresses(weights, 10),
    )


def _gate_stride(cell: str, hidden_size: int) -> int:
    """The row length of a cell's saved gates and of their gradients, see ``raglane.h``."""
    stride = cell_facts()[cell].slots * (-(-hidden_size // 16) * 16)
    # Rows of whole pages would all meet in the same few sets of a cache.
    return stride + 16 if stride % 256 == 0 else stride


class MatrixLayers(Kind):
    """See :class:`~raglane.kernels.cpu.gradients.Kind`."""

    function = "raglane_forward"
    pack = staticmethod(pack)

    def head(self, layer: Layer) -> tuple[int, ...]:
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        return head(layer)

    def saved_shapes(self, layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        count, total, sizes = layer.directions, layer.values.shape[0], layer.sizes
        stride = _gate_stride(layer.cell, sizes[-1]) if cell_facts()[layer.cell].saved else 0
        return (count, total, stride), (count, total, sizes[1] if len(sizes) > 1 else 0)

    def states(self, layer: Layer, output: Tensor, cells: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        if cells is None:
            return (output,)
        return output, cells[0] if cells.shape[0] == 1 else torch.cat(cells.unbind(), 1)

    def _backward(
        self, layer: Layer, saved: Saved, given: Given, wanted: tuple[bool, ...], *, overwrite: bool
    ) -> Grads:
        """See :class:`~raglane.kernels.cpu.gradients.Kind`."""
        within: list[Tensor | None] = []
        if _is_small(layer):
            after = 1 + len(layer.initial)
            tensors, wants = (layer.values, *layer.weights), (wanted[0], *wanted[after:])
            within = [torch.empty_like(part) if want else None for part, want in zip(tensors, wants, strict=True)]  # type: ignore[arg-type]
        walked = _walk_back(layer, saved, given, within, wanted[1 : 1 + len(layer.initial)], overwrite=overwrite)
        return (within[0], *walked.initial, *within[1:]) if within else _by_products(layer, walked, wanted)


def _is_small(layer: Layer) -> bool:
    """Whether the kernels make the gradients of values and weights as well.

    Torch's products take longer to call than to compute where there is little to do, and are faster where there is
    much. Where that begins, the kernels say.
    """
    weights = cast(Tensor, layer.weights[0]).numel() + cast(Tensor, layer.weights[1]).numel()
    kernels = library()
    return layer.values.shape[0] <= kernels.few_elements and weights <= kernels.few_weights


def _by_products(layer: Layer, walked: _Walked, wanted: tuple[bool, ...]) -> Grads:
    """The gradients of values and weights by torch's products, and those of the initial states."""
    dtype = layer.values.dtype
    wide = product_dtype(dtype)
    if wide is not dtype:
        layer = layer._replace(values=layer.values.to(wide), weights=to_dtype(layer.weights, wide))
        walked = _Walked(*to_dtype(walked[:4], wide), walked.initial)  # type: ignore[arg-type,call-arg]
        return to_dtype(_by_products(layer, walked, wanted), dtype)
    grad_values: Tensor | None = None
    grad_weights: list[Tensor | None] = []
    for direction in range(layer.directions):
        begin = 5 * direction
        weights = Weights(*layer.weights[begin : begin + 5])  # type: ignore[arg-type]
        if wanted[0]:
            grad_values = _input_gradient(walked.gates[direction], weights.input, grad_values)
        first = 1 + len(layer.initial) + begin
        grad_weights += _weight_gradients(layer, walked, direction, weights, wanted[first : first + 5])
    return grad_values, *walked.initial, *grad_weights


class _Walked(NamedTuple):
    """What the backward time loop gives.

    Attributes:
        gates: gradients of the gates' arguments, ``(K, N, S * H)`` and more columns that say nothing.
        previous: ``(K, N, P)``: ``h`` before each element.
        projected: with a projection, the gradient of ``h`` ``(K, N, P)``; else None.
        unprojected: with a projection, what it reads, ``(K, N, H)``; else None.
        initial: ``(K, B, size)`` a state.
    """

    gates: Tensor
    previous: Tensor
    projected: Tensor | None
    unprojected: Tensor | None
    initial: Grads


def _walk_back(
    layer: Layer,
    saved: Saved,
    given: Given,
    within: list[Tensor | None],
    wanted: tuple[bool, ...],
    *,
    overwrite: bool,
) -> _Walked:
    """Walk a layer back in time, and fill what there is of ``within``, the gradients of the values and all weights.

    ``wanted`` says which initial states want theirs, the rest is as for :meth:`MatrixLayers.backward`.
    """
    fields = head(layer)
    values, count = layer.values, layer.directions
    total, hidden_size, width = values.shape[0], fields[10], layer.sizes[0]
    projects = fields[11] > 0
    is_lstm = len(layer.sizes) > 1
    reuse_gates = overwrite and cell_facts()[layer.cell].saved > 0
    reuse_cells = overwrite and is_lstm and not projects and not saved.is_shared
    gates = saved.gates if reuse_gates else values.new_empty(count, total, fields[12])
    previous = saved.cells if reuse_cells else values.new_empty(count, total, width)
    projected = values.new_empty(count, total, width) if projects else None
    unprojected = values.new_empty(count, total, hidden_size) if projects else None
    initial = [torch.empty_like(part) if want else None for part, want in zip(layer.initial, wanted, strict=True)]
    call_layer(
        layer,
        "raglane_backward",
        _pack_backward(
            *fields,
            saved.output.data_ptr(),
            0,
            0,
            saved.gates.data_ptr(),
            saved.cells.data_ptr(),
            address(given.output),
            address(given.cells),
            *addresses(given.final, 2),
            gates.data_ptr(),
            previous.data_ptr(),
            address(projected),
            address(unprojected),
            *addresses(initial, 2),
            *addresses(within, 11),
        ),
    )
    if reuse_gates:
        spend(saved.gates)
    if reuse_cells:
        spend(saved.cells)
    return _Walked(gates, previous, projected, unprojected, tuple(initial))


def _input_gradient(gates: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    """The gates' gradients x ``W_ih``, added to ``total``, the other direction's."""
    gates = gates[:, : weight.shape[0]]
    return torch.mm(gates, weight) if total is None else total.addmm_(gates, weight)


def _weight_gradients(
    layer: Layer, walked: _Walked, direction: int, weights: Weights, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of one direction's five weights."""
    rows, hidden_size = weights.input.shape[0], layer.sizes[-1]
    gates = walked.gates[direction, :, : cell_facts()[layer.cell].slots * hidden_size]
    previous = walked.previous[direction]
    result: list[Tensor | None] = [None] * 5
    split = gates.shape[1] > rows  # the last gate's two products have gradients of their own: a GRU's candidate
    if wanted[0]:
        result[0] = outer(gates[:, :rows], layer.values)
    if wanted[1]:
        result[1] = (
            torch.cat([outer(gates[:, : rows - hidden_size], previous), outer(gates[:, rows:], previous)])
            if split
            else outer(gates, previous)
        )
    if wanted[2] or wanted[3]:
        sums = gates.sum(0)
        result[2] = sums[:rows] if wanted[2] else None
        if wanted[3]:
            result[3] = torch.cat([sums[: rows - hidden_size], sums[rows:]]) if split else sums.clone()
    if wanted[4] and walked.projected is not None and walked.unprojected is not None:
        result[4] = torch.mm(walked.projected[direction].t(), walked.unprojected[direction])
    return result
