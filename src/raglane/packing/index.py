"""Index arithmetic between flat values, padded batches and packs: which rows are elements, and where they go."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.tracing import never_traced
from raglane.packing import rows
from raglane.packing.arguments import (
    read_packed,
    read_padded,
    read_padded_lengths_on_host,
    read_padding_side,
)
from raglane.packing.permutations import check_permutation
from raglane.segments.indexing import place_rows
from raglane.segments.layouts import (
    IntArray,
    conjugate,
    on_host,
    padded_rows,
    rows_of,
    unpacked_rows,
)
from raglane.segments.plain import lengths_from_offsets, offsets_from_lengths

__all__ = ["Elements", "find_packed", "find_padded", "flat_to_padded"]


class Elements(NamedTuple):
    """Where the elements of a padded batch or a pack are, sequence after sequence."""

    rows: Tensor  # ``(M, *features)``, the table that holds them
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    lengths: Tensor  # ``(B,)`` int64 on the CPU
    offsets: Tensor  # ``(B + 1,)`` int64 with the table


@never_traced
def find_packed(packed: PackedSequence, argument: str = "packed") -> Elements:
    """The elements of a PackedSequence in the caller's order; on a device, waits once for its ``sorted_indices``."""
    batch_sizes, sorted_indices, count = read_packed(packed, argument)
    data = packed.data
    lengths = conjugate(batch_sizes, count)
    ranks: IntArray = np.arange(count, dtype=np.int64)
    if sorted_indices is not None:
        order = on_host(sorted_indices)
        check_permutation(order, f"{argument}.sorted_indices", "make the pack anew: one of its tensors was changed")
        longest_first, in_order = lengths, ranks
        lengths, ranks = np.empty_like(lengths), np.empty_like(ranks)
        lengths[order] = longest_first
        ranks[order] = in_order
    index = unpacked_rows(ranks, lengths, batch_sizes, data.shape[0], data.device)
    return Elements(data, index, *_on(lengths, data.device))


def flat_to_padded(
    values: Tensor,
    offsets: Tensor,
    longest: int,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Flat values as a padded batch. Does not wait for a device; gradients flow through ``values``."""
    count = offsets.shape[0] - 1
    left = read_padding_side(padding_side)
    if not left and padding_value == 0:
        placed = rows.padded_from_flat(values, offsets, longest, batch_first)
        if placed is not None:
            return placed
    shape, strides = ((count, longest), (longest, 1)) if batch_first else ((longest, count), (1, count))
    lengths = lengths_from_offsets(offsets)
    index = padded_rows(lengths, values.shape[0], strides, longest if left else None)
    return place_rows(values, index, count * longest, padding_value).view(*shape, *values.shape[1:])


@never_traced
def find_padded(
    padded: Tensor,
    lengths: Any,
    batch_first: bool = False,
    padding_side: str = "right",
    argument: str = "padded",
) -> Elements:
    """The elements of a padded batch, all rows of which are the table: as they lie in memory, where that is possible.

    Lengths on a device are copied to the host once, since they say how many elements there are; lengths on
    the host make no device wait.
    """
    count, steps = read_padded(padded, argument, batch_first)
    host = read_padded_lengths_on_host(lengths, count, steps, batch_first)
    left = read_padding_side(padding_side)
    table, strides = rows_of(padded, batch_first)
    index = padded_rows(host, int(host.sum()), strides, steps if left else None, padded.device)
    # A copy, because the caller may change the lengths that were given.
    return Elements(table, index, *_on(host.copy(), padded.device))


def _on(lengths: IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths on the host, and offsets on a device."""
    host = torch.from_numpy(lengths)
    return host, offsets_from_lengths(host).to(device, non_blocking=True)
