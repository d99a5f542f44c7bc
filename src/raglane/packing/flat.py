"""Flat values and offsets to and from padded batches and packs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane.indexing import place_rows, take_rows
from raglane.layouts import (
    IntArray,
    conjugate,
    inverse,
    on_host,
    packed_layout,
    padded_rows,
    rows_of,
    send,
    unpacked_rows,
)
from raglane.packing.arguments import check_permutation, read_host_lengths, read_packed, read_padded, read_padding_side
from raglane.segments.plain import lengths_from_offsets
from raglane.tracing import never_traced

__all__ = [
    "Elements",
    "find_packed",
    "find_padded",
    "flat_to_padded",
    "flatten_packed",
    "pack_flat",
    "padded_to_flat",
]


@never_traced
def pack_flat(values: Tensor, offsets: Tensor, lengths: Tensor) -> PackedSequence:
    """Flat values as a PackedSequence. Does not wait for a device; gradients flow through ``values``.

    Args:
        values: ``(N, *features)``, any dtype.
        offsets: ``(B + 1,)`` int64 on the device of ``values``.
        lengths: ``(B,)`` int64 on the CPU, each at least 0.

    Returns:
        the pack; its ``sorted_indices`` list all B sequences, its ``batch_sizes`` count those with an element.

    Example:
        >>> packed = pack_flat(torch.tensor([3, 4, 1, 2, 3]), torch.tensor([0, 2, 5]), torch.tensor([2, 3]))
        >>> packed.data.tolist(), packed.batch_sizes.tolist(), packed.sorted_indices.tolist()
        ([1, 3, 2, 4, 3], [2, 2, 1], [1, 0])
    """
    index, batch_sizes, sorted_indices = packed_layout(lengths, offsets)
    return PackedSequence(take_rows(values, index), batch_sizes, sorted_indices, inverse(sorted_indices))


class Elements(NamedTuple):
    """Where the elements of a padded batch or a pack are, sequence after sequence.

    Attributes:
        rows: ``(M, *features)``, the table that holds them.
        index: ``(N,)`` int64 with the table: the row of each element, none twice.
        lengths: ``(B,)`` int64 on the CPU.
        offsets: ``(B + 1,)`` int64 with the table.
    """

    rows: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    lengths: Tensor
    offsets: Tensor


@never_traced
def find_packed(packed: PackedSequence, argument: str = "packed") -> Elements:
    """The elements of a PackedSequence in the caller's order; its data is the table, of which no row is left out.

    On a device this waits once, for ``sorted_indices``, where the pack has them: the lengths in the caller's order
    are wanted on the host.

    Args:
        packed: as PyTorch or Raglane makes it; with ``sorted_indices`` it has as many sequences as they list.
        argument: what errors call ``packed``.

    Raises:
        ArgumentTypeError: not a PackedSequence.
        ShapeError: its parts do not fit together.

    Example:
        >>> packed = pack_flat(torch.tensor([3, 4, 1, 2, 3]), torch.tensor([0, 2, 5]), torch.tensor([2, 3]))
        >>> found = find_packed(packed)
        >>> found.index.tolist(), found.offsets.tolist()
        ([1, 3, 0, 2, 4], [0, 2, 5])
    """
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
    return Elements(data, index, torch.from_numpy(lengths), send(_offsets(lengths), data.device))


def flatten_packed(packed: PackedSequence, argument: str = "packed") -> tuple[Tensor, Tensor]:
    """A PackedSequence as flat values in the caller's order; gradients flow through its data.

    Waits for a device as :func:`find_packed` does.

    Args:
        packed: as there.
        argument: as there.

    Returns:
        ``(N, *features)``, and ``(B,)`` int64 on the CPU.

    Raises:
        ArgumentTypeError, ShapeError: as there.

    Example:
        >>> packed = pack_flat(torch.tensor([3, 4, 1, 2, 3]), torch.tensor([0, 2, 5]), torch.tensor([2, 3]))
        >>> flatten_packed(packed)
        (tensor([3, 4, 1, 2, 3]), tensor([2, 3]))
    """
    found = find_packed(packed, argument)
    return take_rows(found.rows, found.index), found.lengths


def flat_to_padded(
    values: Tensor,
    offsets: Tensor,
    longest: int,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Flat values as a padded batch. Does not wait for a device; gradients flow through ``values``.

    Args:
        values: ``(N, *features)``, any dtype.
        offsets: ``(B + 1,)`` int64 on the device of ``values``.
        longest: ``T``, the number of steps of the result; at least the largest length, which the caller promises.
        batch_first: whether the result is ``(B, T, *features)``.
        padding_value: the value of what is no element.
        padding_side: ``"right"`` or ``"left"``, where the padding stands.

    Returns:
        ``(T, B, *features)`` or ``(B, T, *features)``, contiguous.

    Example:
        >>> flat_to_padded(torch.tensor([1, 2, 3, 3, 4]), torch.tensor([0, 3, 5]), 3, batch_first=True)
        tensor([[1, 2, 3],
                [3, 4, 0]])
    """
    count = offsets.shape[0] - 1
    left = read_padding_side(padding_side)
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

    Lengths on a device are copied to the host once, since how many elements there are is theirs to say; lengths on
    the host make no device wait.

    Args:
        padded: ``(T, B, *features)``, or ``(B, T, *features)`` with ``batch_first``; any dtype.
        lengths: B integers from 0 to ``T``, in a list, a tuple or a tensor on any device.
        batch_first: which of the two shapes.
        padding_side: ``"right"`` or ``"left"``, where the padding stands.
        argument: what errors call ``padded``.

    Raises:
        ArgumentTypeError: ``padded`` is no tensor, ``lengths`` no numbers.
        ShapeError: they do not fit together.

    Example:
        >>> found = find_padded(torch.tensor([[1, 2, 3], [3, 4, 0]]), [3, 2], batch_first=True)
        >>> found.index.tolist(), found.offsets.tolist()
        ([0, 1, 2, 3, 4], [0, 3, 5])
    """
    count, steps = read_padded(padded, argument, batch_first)
    host = read_host_lengths(lengths, count, steps, batch_first)
    left = read_padding_side(padding_side)
    offsets = _offsets(host)
    rows, strides = rows_of(padded, batch_first)
    index = padded_rows(host, int(offsets[-1]), strides, steps if left else None, padded.device)
    # A copy, because the caller may change the lengths that were given.
    return Elements(rows, index, torch.from_numpy(host.copy()), send(offsets, padded.device))


def padded_to_flat(
    padded: Tensor,
    lengths: Any,
    batch_first: bool = False,
    padding_side: str = "right",
    argument: str = "padded",
) -> tuple[Tensor, Tensor, Tensor]:
    """The elements of a padded batch, flat; gradients flow through ``padded``.

    Waits for a device as :func:`find_padded` does.

    Args:
        padded: as there.
        lengths: as there.
        batch_first: as there.
        padding_side: as there.
        argument: as there.

    Returns:
        values ``(N, *features)``, lengths ``(B,)`` int64 on the CPU, offsets ``(B + 1,)`` int64 with the values.

    Raises:
        ArgumentTypeError, ShapeError: as there.

    Example:
        >>> padded_to_flat(torch.tensor([[1, 2, 3], [3, 4, 0]]), [3, 2], batch_first=True)
        (tensor([1, 2, 3, 3, 4]), tensor([3, 2]), tensor([0, 3, 5]))
    """
    found = find_padded(padded, lengths, batch_first, padding_side, argument)
    return take_rows(found.rows, found.index), found.lengths, found.offsets


def _offsets(lengths: IntArray) -> IntArray:
    """Where each sequence starts, and the end of the last."""
    offsets: IntArray = np.zeros(lengths.shape[0] + 1, dtype=np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets
