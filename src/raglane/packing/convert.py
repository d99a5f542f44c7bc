"""Flat values and offsets to and from padded batches and packs.

On a CPU the kernels move the rows, where they are built and nobody follows operators (:mod:`raglane.packing.rows`);
elsewhere index arithmetic does. Lengths on a device are copied to the host once, since they say how many elements there
are; so are a pack's ``sorted_indices``. Gradients flow through what moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_storage
from raglane._utils.tracing import never_traced, records_operators
from raglane.packing import rows
from raglane.packing.checks import read_padded, read_padding_side
from raglane.packing.layouts import inverse, packed_layout
from raglane.packing.rows import find_packed, find_padded, flat_to_padded
from raglane.segments import lengths_from_offsets
from raglane.segments.indexing import place_rows, take_rows


@never_traced
def pack_flat(values: Tensor, offsets: Tensor, lengths: Tensor) -> PackedSequence:
    """Flat values as a pack of all sequences, with ``sorted_indices``; ``lengths`` are on the CPU, so nothing waits."""
    index, batch_sizes, sorted_indices = packed_layout(lengths, offsets)
    return PackedSequence(take_rows(values, index), batch_sizes, sorted_indices, inverse(sorted_indices))


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
    found = find_packed(packed, argument)
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
