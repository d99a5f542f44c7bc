"""The functions of :mod:`torch.nn.utils.rnn`; the package's docstring says what they add to it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.tracing import never_traced
from raglane.packing.checks import (
    check_range,
    raise_unfit,
    raise_unsorted,
    read_flag,
    read_packed,
    read_padded,
    read_padded_lengths,
    read_padding_side,
    read_padding_value,
    read_permutation,
    read_sequences,
    read_total_length,
)
from raglane.packing.convert import flatten_packed, flatten_padded
from raglane.packing.layouts import inverse, packed_rows, padded_rows, rows_of, send, shape_and_strides
from raglane.packing.rows import lengths_of_packed
from raglane.segments import IntArray, conjugate
from raglane.segments.indexing import place_joined_rows, place_rows, take_rows

# Narrower rows, and fewer numbers, are sooner placed row by row than cut out and joined as blocks of a sequence.
_WIDE = 8
_MANY = 65536


# -- the order of a pack -----------------------------------------------------------------------------------------------


def _rank_on_host(lengths: IntArray, steps: int, enforce_sorted: bool) -> tuple[IntArray, IntArray | None]:
    """The batch sizes of a pack, and its order, which is None where it is the caller's and none is empty."""
    count = lengths.shape[0]
    order: IntArray | None = None
    if not count:
        return lengths, None if enforce_sorted else lengths
    if enforce_sorted:
        if np.count_nonzero(lengths[1:] > lengths[:-1]):
            raise_unsorted(lengths)
        low, high = int(lengths[-1]), int(lengths[0])
        if low <= 0:
            order = np.arange(count, dtype=np.int64)
    else:
        order = (-lengths).argsort(kind="stable")
        low, high = int(lengths[order[-1]]), int(lengths[order[0]])
    check_range(low, high, steps)
    return conjugate(lengths, high), order


def _rank_on_device(lengths: Tensor, steps: int, enforce_sorted: bool) -> tuple[IntArray, Tensor | None]:
    """The same for lengths on a device: one copy brings the batch sizes and all that the checks need."""
    count = lengths.shape[0]
    if not count:
        return np.empty(0, dtype=np.int64), None if enforce_sorted else lengths
    # Clamped, because a wrong length must not write past the counts before the check has seen it.
    counts = lengths.new_zeros(steps + 1)
    counts.index_add_(0, lengths.clamp(0, steps), torch.ones_like(lengths))
    low, high = lengths.aminmax()
    rises = (lengths[1:] > lengths[:-1]).sum()
    copied: IntArray = torch.cat([count - counts[:steps].cumsum(0), torch.stack([low, high, rises])]).cpu().numpy()
    if enforce_sorted and copied[-1]:
        raise_unsorted(lengths)
    check_range(int(copied[-3]), int(copied[-2]), steps)
    batch_sizes = copied[: copied[-2]]
    if not enforce_sorted:
        return batch_sizes, torch.sort(lengths, stable=True, descending=True).indices
    return batch_sizes, None if copied[-3] else torch.arange(count, device=lengths.device)


def _pack(
    rows: Tensor,
    starts: IntArray | Tensor | None,
    strides: tuple[int, int],
    batch_sizes: IntArray,
    sorted_indices: Tensor | None,
) -> PackedSequence:
    """Take the elements from rows, given where each sequence starts, longest first."""
    index = packed_rows(starts, batch_sizes, strides, rows.device)
    unsorted_indices = None if sorted_indices is None else inverse(sorted_indices)
    # _make leaves out the checks of the constructor, which hold here and take a while in a small batch.
    return PackedSequence._make(
        (take_rows(rows, index), torch.from_numpy(batch_sizes), sorted_indices, unsorted_indices)
    )


def invert_permutation(permutation: Tensor | None) -> Tensor | None:
    """The permutation that undoes another: ``sorted_indices`` to ``unsorted_indices`` and back.

    Args:
        permutation: ``(B,)`` of any integer dtype, holding each of ``0 ... B - 1`` once, or None. This is checked
            on a CPU only; on a device the check would wait.

    Returns:
        ``(B,)``, same dtype and device; None for None.

    Raises:
        ArgumentTypeError: not a tensor.
        ShapeError: not one-dimensional, not of integers, or not a permutation.

    Example:
        >>> invert_permutation(torch.tensor([2, 0, 1]))
        tensor([1, 2, 0])
    """
    return None if permutation is None else inverse(read_permutation(permutation))


# -- padded <-> packed -------------------------------------------------------------------------------------------------


@never_traced
def pack_padded_sequence(
    input: Tensor,
    lengths: Tensor | Iterable[int],
    batch_first: bool = False,
    enforce_sorted: bool = True,
) -> PackedSequence:
    """Pack a padded batch.

    Lengths on the host make no device wait. Lengths on a device stay there; what is copied to the host, once, is
    what a PackedSequence holds on the host, its batch sizes, together with the three numbers that say whether the
    lengths are valid.

    Args:
        input: ``(T, B, *features)``, or ``(B, T, *features)`` with ``batch_first``; any dtype.
        lengths: B integers from 0 to ``T``, of any integer dtype, in a list, a tuple or a tensor on any device.
        batch_first: which of the two shapes ``input`` has.
        enforce_sorted: whether the lengths must fall. If so, the pack has no ``sorted_indices``, unless a sequence
            is empty: then they count up, so that the number of sequences is not lost.

    Returns:
        the pack. ``sorted_indices`` lists the sequences longest first, ties in the caller's order.

    Raises:
        ArgumentTypeError: ``input`` is not a tensor, ``lengths`` not numbers.
        ShapeError: fewer than two dimensions, not B lengths, a length below 0 or above T, lengths that are not
            integers, or that rise under ``enforce_sorted``.

    Example:
        >>> packed = pack_padded_sequence(torch.tensor([[1, 2, 3], [3, 4, 0]]), [3, 2], batch_first=True)
        >>> packed.data, packed.batch_sizes
        (tensor([1, 3, 2, 4, 3]), tensor([2, 2, 1]))
    """
    batch_first, enforce_sorted = read_flag("batch_first", batch_first), read_flag("enforce_sorted", enforce_sorted)
    count, steps = read_padded(input, "input", batch_first)
    given = read_padded_lengths(lengths, count, batch_first)
    rows, strides = rows_of(input, batch_first)
    order: IntArray | Tensor | None
    if isinstance(given, np.ndarray):
        batch_sizes, order = _rank_on_host(given, steps, enforce_sorted)
        sorted_indices = None if order is None else send(order, input.device)
    else:
        batch_sizes, order = _rank_on_device(given, steps, enforce_sorted)
        order = sorted_indices = None if order is None else order.to(input.device)
    return _pack(rows, None if order is None else order * strides[0], strides, batch_sizes, sorted_indices)


@never_traced
def pad_packed_sequence(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pad a pack.

    On a device this waits once, for ``sorted_indices``, where the pack has them: the lengths in the caller's order
    are wanted on the host.

    Args:
        sequence: the pack; with ``sorted_indices`` it has as many sequences as they list.
        batch_first: whether the result is ``(B, T, *features)``.
        padding_value: the value of the padding.
        total_length: ``T``; the longest length if None.

    Returns:
        ``(T, B, *features)`` or ``(B, T, *features)``, contiguous, and lengths ``(B,)`` int64 on the CPU, both in
        the order in which the sequences were packed.

    Raises:
        ArgumentTypeError: ``sequence`` is not a pack, ``padding_value`` not a number, ``total_length`` not an integer.
        ShapeError: ``total_length`` is below the longest length, or the parts of the pack do not fit together.

    Example:
        >>> packed = pack_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])])
        >>> pad_packed_sequence(packed, batch_first=True)
        (tensor([[1, 2, 3],
                [3, 4, 0]]), tensor([3, 2]))
    """
    batch_sizes, sorted_indices, count = read_packed(sequence, "sequence")
    batch_first = read_flag("batch_first", batch_first)
    steps = read_total_length(total_length, batch_sizes.shape[0], count)
    data, fill = sequence.data, read_padding_value(padding_value)
    shape, strides = shape_and_strides(count, steps, batch_first)
    lengths, order = lengths_of_packed(batch_sizes, sorted_indices, count, "sequence")
    starts: IntArray | Tensor | None = order if data.is_cpu else sorted_indices
    if starts is not None:
        starts = starts * strides[0]
    index = packed_rows(starts, batch_sizes, strides, data.device)
    padded = place_rows(data, index, count * steps, fill).view(*shape, *data.shape[1:])
    return padded, torch.from_numpy(lengths)


# -- lists of sequences ------------------------------------------------------------------------------------------------


@never_traced
def pad_sequence(
    sequences: Tensor | Iterable[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Stack sequences of different lengths, padded to the longest.

    Args:
        sequences: B tensors ``(L, *features)`` of one dtype and device, ``L`` at least 0; or one tensor
            ``(B, L, *features)``, whose sequences are of one length.
        batch_first: whether the result is ``(B, T, *features)``.
        padding_value: the value of the padding.
        padding_side: ``"right"`` or ``"left"``, where the padding stands.

    Returns:
        ``(T, B, *features)`` or ``(B, T, *features)``, contiguous.

    Raises:
        ArgumentTypeError: ``sequences`` is not an iterable of tensors, ``padding_value`` not a number.
        ShapeError: no sequence, or trailing shapes, dtypes or devices that differ.

    Example:
        >>> pad_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])], batch_first=True)
        tensor([[1, 2, 3],
                [3, 4, 0]])
    """
    parts, lengths = read_sequences(sequences)
    batch_first = read_flag("batch_first", batch_first)
    left, fill = read_padding_side(padding_side), read_padding_value(padding_value)
    # As a float a value outside the range of an integer dtype is refused, where an integer would be wrapped.
    fill = fill if isinstance(fill, complex) else float(fill)
    return _stack(parts, lengths, fill, batch_first, left)


def _stack(sequences: tuple[Tensor, ...], lengths: IntArray, fill: float, batch_first: bool, left: bool) -> Tensor:
    """Lay sequences side by side, padded to the longest."""
    count, steps = len(sequences), int(lengths[lengths.argmax()])
    features = sequences[0].shape[1:]
    try:
        width = math.prod(features)
        if batch_first and width >= _WIDE and width * count * steps >= _MANY:
            return torch.cat(_with_padding(sequences, steps - lengths, fill, left)).view(count, steps, *features)
        shape, strides = shape_and_strides(count, steps, batch_first)
        index = padded_rows(lengths, int(lengths.sum()), strides, steps if left else None, sequences[0].device)
        return place_joined_rows(sequences, index, count * steps, fill).view(*shape, *features)
    except (RuntimeError, TypeError):
        raise_unfit(sequences)
        raise  # nothing wrong with the sequences: out of memory, for instance


def _with_padding(sequences: tuple[Tensor, ...], missing: IntArray, fill: float, left: bool) -> list[Tensor]:
    """Sequences and what they miss in turn: one after the other they are the padded batch, in a single pass."""
    # Expanded: views of one number, however much padding there is.
    padding = sequences[0].new_full((), fill).expand(int(missing.sum()), *sequences[0].shape[1:])
    pieces = [padding] * (2 * len(sequences))
    pieces[left::2] = sequences
    pieces[not left :: 2] = padding.split_with_sizes(missing.tolist())
    return pieces


def _split(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """Flat values as a list; "unsafe" lets each be changed in place, which is safe since nobody has the whole."""
    return list(values.unsafe_split_with_sizes(lengths.tolist())) if lengths.shape[0] else []


@never_traced
def unpad_sequence(
    padded_sequences: Tensor, lengths: Tensor | Iterable[int], batch_first: bool = False
) -> list[Tensor]:
    """Cut a padded batch, padded on the right, into its sequences.

    Lengths on a device are copied to the host once: they are the shapes of the result.

    Args:
        padded_sequences: ``(T, B, *features)``, or ``(B, T, *features)`` with ``batch_first``. Not changed.
        lengths: B integers from 0 to ``T``, of any integer dtype, in a list, a tuple or a tensor on any device.
        batch_first: which of the two shapes.

    Returns:
        B tensors ``(L, *features)``; copies, not views.

    Raises:
        ArgumentTypeError: ``padded_sequences`` is not a tensor, ``lengths`` not numbers.
        ShapeError: lengths that do not fit the batch.

    Example:
        >>> unpad_sequence(torch.tensor([[1, 2, 3], [3, 4, 0]]), [3, 2], batch_first=True)
        [tensor([1, 2, 3]), tensor([3, 4])]
    """
    batch_first = read_flag("batch_first", batch_first)
    flat = flatten_padded(padded_sequences, lengths, batch_first, argument="padded_sequences")
    return _split(flat.values, flat.host_lengths())


@never_traced
def pack_sequence(sequences: Tensor | Iterable[Tensor], enforce_sorted: bool = True) -> PackedSequence:
    """Pack sequences of different lengths. Does not wait for a device.

    Args:
        sequences: B tensors ``(L, *features)`` of one dtype and device, ``L`` at least 0.
        enforce_sorted: whether the lengths must fall; see :func:`pack_padded_sequence`.

    Returns:
        the pack, as :func:`pack_padded_sequence` gives it.

    Raises:
        ArgumentTypeError: ``sequences`` is not an iterable of tensors.
        ShapeError: no sequence, trailing shapes, dtypes or devices that differ, or lengths that rise under
            ``enforce_sorted``.

    Example:
        >>> packed = pack_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])])
        >>> packed.data, packed.batch_sizes
        (tensor([1, 3, 2, 4, 3]), tensor([2, 2, 1]))
    """
    enforce_sorted = read_flag("enforce_sorted", enforce_sorted)
    parts, lengths = read_sequences(sequences)
    batch_sizes, order = _rank_on_host(lengths, int(lengths[lengths.argmax()]), enforce_sorted)
    try:
        flat = torch.cat(parts)
    except (RuntimeError, TypeError):
        raise_unfit(parts)
        raise
    starts: IntArray = lengths.cumsum() - lengths
    if order is None:
        return _pack(flat, starts, (0, 1), batch_sizes, None)
    return _pack(flat, starts[order], (0, 1), batch_sizes, send(order, flat.device))


@never_traced
def unpack_sequence(packed_sequences: PackedSequence) -> list[Tensor]:
    """Cut a pack into its sequences. On a device this waits once, as :func:`pad_packed_sequence` does.

    Args:
        packed_sequences: the pack.

    Returns:
        B tensors ``(L, *features)``, in the order in which they were packed; copies, not views.

    Raises:
        ArgumentTypeError: not a pack.
        ShapeError: its parts do not fit together.

    Example:
        >>> unpack_sequence(pack_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])]))
        [tensor([1, 2, 3]), tensor([3, 4])]
    """
    flat = flatten_packed(packed_sequences, "packed_sequences")
    return _split(flat.values, flat.host_lengths())
