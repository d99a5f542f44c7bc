"""Flat values and offsets to and from padded batches and packs.

On a CPU the kernels move the rows, where they are built and nobody follows operators (:mod:`raglane.packing.rows`);
elsewhere index arithmetic does. Lengths on a device are copied to the host once, since they say how many elements there
are; so are a pack's ``sorted_indices``. Gradients flow through what moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_storage
from raglane._utils.tracing import never_traced, records_operators
from raglane.packing import rows
from raglane.packing.checks import (
    check_permutation,
    read_packed,
    read_padded,
    read_padded_lengths_on_host,
    read_padding_side,
)
from raglane.packing.layouts import (
    inverse,
    on_host,
    packed_layout,
    padded_rows,
    rows_of,
    shape_and_strides,
    unpacked_rows,
)
from raglane.segments import IntArray, conjugate, lengths_from_offsets, offsets_from_lengths
from raglane.segments.indexing import place_rows, take_rows


@never_traced
def pack_flat(values: Tensor, offsets: Tensor, lengths: Tensor) -> PackedSequence:
    """Flat values as a pack of all sequences, with ``sorted_indices``; ``lengths`` are on the CPU, so nothing waits."""
    index, batch_sizes, sorted_indices = packed_layout(lengths, offsets)
    return PackedSequence(take_rows(values, index), batch_sizes, sorted_indices, inverse(sorted_indices))


def flat_to_padded(
    values: Tensor,
    offsets: Tensor,
    longest: int,
    batch_first: bool = False,
    padding_value: float = 0.0,
    left: bool = False,
) -> Tensor:
    """Flat values as a contiguous padded batch of ``longest`` steps, which no length may exceed; nothing waits."""
    if not left and padding_value == 0:
        placed = rows.padded_from_flat(values, offsets, longest, batch_first)
        if placed is not None:
            return placed
    count = offsets.shape[0] - 1
    shape, strides = shape_and_strides(count, longest, batch_first)
    index = padded_rows(lengths_from_offsets(offsets), values.shape[0], strides, longest if left else None)
    return place_rows(values, index, count * longest, padding_value).view(*shape, *values.shape[1:])


class Flattened(NamedTuple):
    """A batch that was taken out of another layout."""

    values: Tensor  # (N, *features), in the caller's order
    offsets: Tensor  # (B + 1,) int64 with the values
    lengths: Tensor | None  # (B,) int64 on the CPU; None where the offsets are there
    restore: Callable[[Tensor], Tensor]  # from other values to that layout, with zeros where it has no element

    def host_lengths(self) -> Tensor:
        """``(B,)`` int64 on the CPU."""
        return lengths_from_offsets(self.offsets) if self.lengths is None else self.lengths


def flatten_packed(packed: PackedSequence, argument: str = "packed") -> Flattened:
    """The elements of a PackedSequence in the caller's order, and the way back to its data."""
    if isinstance(packed, PackedSequence):
        moved = rows.flatten_packed(packed)
        if moved is not None:
            values, layout = moved
            return Flattened(values, layout.offsets, None, layout.from_flat)
    found = _find_packed(packed, argument)
    check_storage(f"{argument}.data", packed.data)
    count = found.rows.shape[0]
    values = take_rows(found.rows, found.index)
    return Flattened(values, found.offsets, found.lengths, lambda flat: place_rows(flat, found.index, count))


def flatten_padded(
    padded: Tensor, lengths: Any, batch_first: bool = False, padding_side: str = "right", argument: str = "padded"
) -> Flattened:
    """The elements of a padded batch, and the way back to a batch of its shape; errors call it ``argument``."""
    left = read_padding_side(padding_side)
    if not left:
        if records_operators():
            return _flatten_by_operators(padded, lengths, batch_first, argument)
        moved = rows.flatten_padded(padded, lengths, batch_first) if _is_padded(padded) else None
        if moved is not None:
            values, layout = moved
            return Flattened(values, layout.offsets, None, layout.from_flat)
    found = find_padded(padded, lengths, batch_first, left, argument)

    def restore(flat: Tensor) -> Tensor:
        if not padded.is_contiguous():
            steps = padded.shape[1 if batch_first else 0]
            return flat_to_padded(flat, found.offsets, steps, batch_first, left=left)
        return place_rows(flat, found.index, found.rows.shape[0]).view(*padded.shape[:2], *flat.shape[1:])

    return Flattened(take_rows(found.rows, found.index), found.offsets, found.lengths, restore)


def _is_padded(padded: Any) -> bool:
    """True for what can be a padded batch; the way by index arithmetic raises for anything else."""
    return (
        isinstance(padded, Tensor)
        and padded.layout is torch.strided
        and padded.dim() >= 2
        and not (padded.is_nested or padded.is_quantized)
    )


def _flatten_by_operators(padded: Tensor, lengths: Any, batch_first: bool, argument: str) -> Flattened:
    # To register operators takes long, and most calls need none.
    from raglane.packing import operators

    _, steps = read_padded(padded, argument, batch_first)
    values, offsets = operators.padded_to_flat(padded, torch.as_tensor(lengths), batch_first)
    return Flattened(values, offsets, None, lambda flat: operators.padded_from_flat(flat, offsets, batch_first, steps))


# -- by index arithmetic ----------------------------------------------------------------------------------------------


class Elements(NamedTuple):
    """Where the elements of a padded batch or a pack are, sequence after sequence."""

    rows: Tensor  # (M, *features), the table that holds them
    index: Tensor  # type: ignore[assignment]  # (N,) int64 with the table: the row of each element, none twice
    lengths: Tensor  # (B,) int64 on the CPU
    offsets: Tensor  # (B + 1,) int64 with the table


@never_traced
def find_padded(
    padded: Tensor, lengths: Any, batch_first: bool = False, left: bool = False, argument: str = "padded"
) -> Elements:
    """The elements of a padded batch, in a table of all its rows as they lie in memory, where that is possible."""
    count, steps = read_padded(padded, argument, batch_first)
    host = read_padded_lengths_on_host(lengths, count, steps, batch_first)
    table, strides = rows_of(padded, batch_first)
    index = padded_rows(host, int(host.sum()), strides, steps if left else None, padded.device)
    # A copy, because the caller may change the lengths that were given.
    return Elements(table, index, *_on(host.copy(), padded.device))


@never_traced
def _find_packed(packed: PackedSequence, argument: str) -> Elements:
    batch_sizes, sorted_indices, count = read_packed(packed, argument)
    data = packed.data
    lengths, order = lengths_of_packed(batch_sizes, sorted_indices, count, argument)
    ranks: IntArray = np.arange(count, dtype=np.int64)
    if order is not None:
        ranks[order] = np.arange(count, dtype=np.int64)
    index = unpacked_rows(ranks, lengths, batch_sizes, data.shape[0], data.device)
    return Elements(data, index, *_on(lengths, data.device))


def lengths_of_packed(
    batch_sizes: IntArray, sorted_indices: Tensor | None, count: int, argument: str
) -> tuple[IntArray, IntArray | None]:
    """The lengths of a pack in the caller's order, and its order on the host, where it has one; checks the order."""
    lengths = conjugate(batch_sizes, count)
    if sorted_indices is None:
        return lengths, None
    order = on_host(sorted_indices)
    check_permutation(order, f"{argument}.sorted_indices", "make the pack anew: one of its tensors was changed")
    mine = np.empty_like(lengths)
    mine[order] = lengths
    return mine, order


def _on(lengths: IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths on the host, and offsets on a device."""
    host = torch.from_numpy(lengths)
    return host, offsets_from_lengths(host).to(device, non_blocking=True)
