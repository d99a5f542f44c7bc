"""The functions of :mod:`torch.nn.utils.rnn`; the package's docstring lists the differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.tracing import never_recorded, refuse_jit_trace
from raglane.packing.convert import flatten_packed, flatten_padded
from raglane.packing.flat_values import lengths_of_packed
from raglane.packing.layouts import (
    inverse,
    packed_rows,
    padded_rows,
    rows_of,
    send,
    shape_and_strides,
)
from raglane.packing.pack_checks import (
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
from raglane.segments import IntArray, conjugate
from raglane.segments.indexing import place_joined_rows, place_rows, take_rows

# Narrower rows, or fewer numbers, are placed row by row, which is faster than concatenating
# sequences and padding.
_WIDE = 8
_MANY = 65536

_IN_A_TRACE = "trace the function of torch.nn.utils.rnn in its place, or use torch.compile"
P = ParamSpec("P")
R = TypeVar("R")


def _never_recorded(function: Callable[P, R]) -> Callable[P, R]:
    """:func:`never_recorded`, with the function that a trace can record."""
    return never_recorded(function, _IN_A_TRACE)


# -- the order of a pack
# -----------------------------------------------------------------------------------------------


def _rank_on_host(
    lengths: IntArray, steps: int, enforce_sorted: bool
) -> tuple[IntArray, IntArray | None]:
    """Return batch sizes and order; None for the caller's order without empty sequences."""
    count = lengths.shape[0]
    order: IntArray | None = None
    if not count:
        return lengths, None if enforce_sorted else lengths
    if enforce_sorted:
        if np.count_nonzero(lengths[1:] > lengths[:-1]):
            raise_unsorted(lengths)
        low = int(lengths[-1])
        high = int(lengths[0])
        if low <= 0:
            order = np.arange(count, dtype=np.int64)
    else:
        order = (-lengths).argsort(kind="stable")
        low = int(lengths[order[-1]])
        high = int(lengths[order[0]])
    check_range(low, high, steps)
    return conjugate(lengths, high), order


def _rank_on_device(
    lengths: Tensor, steps: int, enforce_sorted: bool
) -> tuple[IntArray, Tensor | None]:
    """Do what :func:`_rank_on_host` does on a device, with one copy, also of facts to check."""
    count = lengths.shape[0]
    if not count:
        return np.empty(0, dtype=np.int64), None if enforce_sorted else lengths
    # Clamped, because the lengths are checked later, and a wrong one must not write out of bounds
    # here.
    counts = lengths.new_zeros(steps + 1)
    counts.index_add_(0, lengths.clamp(0, steps), torch.ones_like(lengths))
    low, high = lengths.aminmax()
    rises = (lengths[1:] > lengths[:-1]).sum()
    copied: IntArray = (
        torch.cat([count - counts[:steps].cumsum(0), torch.stack([low, high, rises])]).cpu().numpy()
    )
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
    """Return a pack of rows; ``starts`` are the first rows of the sequences, longest first."""
    index = packed_rows(starts, batch_sizes, strides, rows.device)
    unsorted_indices = None if sorted_indices is None else inverse(sorted_indices)
    # _make skips the checks of the constructor, which take a noticeable time in a small batch.
    return PackedSequence._make(
        (take_rows(rows, index), torch.from_numpy(batch_sizes), sorted_indices, unsorted_indices)
    )


def invert_permutation(permutation: Tensor | None) -> Tensor | None:
    """Return the inverse of a permutation: ``unsorted_indices`` for ``sorted_indices``, and vice
    versa.

    Args:
        permutation: ``(B,)`` of any integer dtype, which contains each of ``0 ... B - 1`` once, or
            None. The values are checked only on a CPU, because a check on a device would wait.

    Returns:
        ``(B,)`` with the same dtype and device; None for None.

    Raises:
        ArgumentTypeError: ``permutation`` is not a tensor.
        ShapeError: it is not one-dimensional, not of integers, or not a permutation.

    Example:
        >>> invert_permutation(torch.tensor([2, 0, 1]))
        tensor([1, 2, 0])
    """
    refuse_jit_trace("a call of invert_permutation", fix=_IN_A_TRACE)
    return None if permutation is None else inverse(read_permutation(permutation))


# -- padded <-> packed
# -------------------------------------------------------------------------------------------------


@_never_recorded
def pack_padded_sequence(
    input: Tensor,
    lengths: Tensor | Iterable[int],
    batch_first: bool = False,
    enforce_sorted: bool = True,
) -> PackedSequence:
    """Pack a padded batch.

    With lengths on the host, no device is waited for. With lengths on a device, one copy to the
    host waits: it has the batch sizes, which a PackedSequence keeps on the host, and three numbers
    to check the lengths.

    Args:
        input: ``(T, B, *features)``, or ``(B, T, *features)`` with ``batch_first``; any dtype.
        lengths: B integers from 0 to ``T``, of any integer dtype, in a list, a tuple or a tensor on
            any device.
        batch_first: True if ``input`` is ``(B, T, *features)``.
        enforce_sorted: True to require lengths in decreasing order. Then the pack has no
            ``sorted_indices``, unless a sequence is empty: then they are ``0 ... B - 1``, so that
            the number of sequences is not lost.

    Returns:
        The pack. ``sorted_indices`` lists the sequences longest first, ties in the caller's order.

    Raises:
        ArgumentTypeError: ``input`` is not a tensor, or ``lengths`` are not numbers.
        ShapeError: ``input`` has fewer than two dimensions, or ``lengths`` are not B integers from
            0 to T, or not in decreasing order with ``enforce_sorted``.

    Example:
        >>> packed = pack_padded_sequence(torch.tensor([[1, 2, 3], [3, 4, 0]]), [3, 2], batch_first=True)
        >>> packed.data, packed.batch_sizes
        (tensor([1, 3, 2, 4, 3]), tensor([2, 2, 1]))
    """
    batch_first = read_flag("batch_first", batch_first)
    enforce_sorted = read_flag("enforce_sorted", enforce_sorted)
    count, steps = read_padded(input, "input", batch_first)
    checked = read_padded_lengths(lengths, count, batch_first)
    rows, strides = rows_of(input, batch_first)
    order: IntArray | Tensor | None
    if isinstance(checked, np.ndarray):
        batch_sizes, order = _rank_on_host(checked, steps, enforce_sorted)
        sorted_indices = None if order is None else send(order, input.device)
    else:
        batch_sizes, order = _rank_on_device(checked, steps, enforce_sorted)
        order = sorted_indices = None if order is None else order.to(input.device)
    return _pack(
        rows, None if order is None else order * strides[0], strides, batch_sizes, sorted_indices
    )


@_never_recorded
def pad_packed_sequence(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pad a pack.

    Waits once for ``sorted_indices`` on a device, because the lengths are returned on the CPU in
    the caller's order.

    Args:
        sequence: the pack.
        batch_first: True to return ``(B, T, *features)``.
        padding_value: the value of the padding.
        total_length: ``T``; the longest length if None.

    Returns:
        ``(T, B, *features)`` or ``(B, T, *features)``, contiguous, and lengths ``(B,)`` int64 on
        the CPU, both in the order in which the sequences were packed.

    Raises:
        ArgumentTypeError: ``sequence`` is not a pack, ``padding_value`` not a number, or
            ``total_length`` not an integer.
        ShapeError: ``total_length`` is below the longest length, or the pack is inconsistent.

    Example:
        >>> packed = pack_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])])
        >>> pad_packed_sequence(packed, batch_first=True)
        (tensor([[1, 2, 3],
                [3, 4, 0]]), tensor([3, 2]))
    """
    batch_sizes, sorted_indices, count = read_packed(sequence, "sequence")
    batch_first = read_flag("batch_first", batch_first)
    steps = read_total_length(total_length, batch_sizes.shape[0], count)
    data = sequence.data
    fill = read_padding_value(padding_value)
    shape, strides = shape_and_strides(count, steps, batch_first)
    lengths, order = lengths_of_packed(batch_sizes, sorted_indices, count, "sequence")
    starts: IntArray | Tensor | None = order if data.is_cpu else sorted_indices
    if starts is not None:
        starts = starts * strides[0]
    index = packed_rows(starts, batch_sizes, strides, data.device)
    padded = place_rows(data, index, count * steps, fill).view(*shape, *data.shape[1:])
    return padded, torch.from_numpy(lengths)


# -- lists of sequences
# ------------------------------------------------------------------------------------------------


@_never_recorded
def pad_sequence(
    sequences: Tensor | Iterable[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: Literal["left", "right"] = "right",
) -> Tensor:
    """Stack sequences of different lengths, padded to the longest.

    Args:
        sequences: B tensors ``(L, *features)`` of one dtype and device, ``L`` at least 0; or one
            tensor ``(B, L, *features)`` of sequences with equal lengths.
        batch_first: True to return ``(B, T, *features)``.
        padding_value: the value of the padding.
        padding_side: the side of the padding, ``"right"`` or ``"left"``.

    Returns:
        ``(T, B, *features)`` or ``(B, T, *features)``, contiguous.

    Raises:
        ArgumentTypeError: ``sequences`` is not an iterable of tensors, or ``padding_value`` not a
            number.
        ShapeError: there is no sequence, or trailing shapes, dtypes or devices differ.

    Example:
        >>> pad_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])], batch_first=True)
        tensor([[1, 2, 3],
                [3, 4, 0]])
    """
    tensors, lengths = read_sequences(sequences)
    batch_first = read_flag("batch_first", batch_first)
    left = read_padding_side(padding_side)
    fill = read_padding_value(padding_value)
    # As a float: torch raises if it is outside the range of an integer dtype, but wraps an integer
    # around.
    fill = fill if isinstance(fill, complex) else float(fill)
    return _stack(tensors, lengths, fill, batch_first, left)


def _stack(
    sequences: tuple[Tensor, ...], lengths: IntArray, fill: float, batch_first: bool, left: bool
) -> Tensor:
    """Stack sequences, padded to the longest."""
    count = len(sequences)
    steps = int(lengths[lengths.argmax()])
    features = sequences[0].shape[1:]
    try:
        width = math.prod(features)
        if batch_first and width >= _WIDE and width * count * steps >= _MANY:
            return torch.cat(_with_padding(sequences, steps - lengths, fill, left)).view(
                count, steps, *features
            )
        shape, strides = shape_and_strides(count, steps, batch_first)
        index = padded_rows(
            lengths, int(lengths.sum()), strides, steps if left else None, sequences[0].device
        )
        return place_joined_rows(sequences, index, count * steps, fill).view(*shape, *features)
    except (RuntimeError, TypeError):
        raise_unfit(sequences)
        raise  # the sequences are right; e.g. memory is exhausted


def _with_padding(
    sequences: tuple[Tensor, ...], missing: IntArray, fill: float, left: bool
) -> list[Tensor]:
    """Return sequences and their paddings alternately; concatenated, they are the padded batch."""
    # Expanded views of one number need no memory.
    padding = sequences[0].new_full((), fill).expand(int(missing.sum()), *sequences[0].shape[1:])
    pieces = [padding] * (2 * len(sequences))
    pieces[left::2] = sequences
    pieces[not left :: 2] = padding.split_with_sizes(missing.tolist())
    return pieces


def _split(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """Return flat values as a list; "unsafe" allows in-place operations, which is safe because the
    whole is dropped.
    """
    return list(values.unsafe_split_with_sizes(lengths.tolist())) if lengths.shape[0] else []


@_never_recorded
def unpad_sequence(
    padded_sequences: Tensor, lengths: Tensor | Iterable[int], batch_first: bool = False
) -> list[Tensor]:
    """Split a batch with padding on the right into its sequences.

    Lengths on a device are copied to the host once, because they are the shapes of the result.

    Args:
        padded_sequences: ``(T, B, *features)``, or ``(B, T, *features)`` with ``batch_first``; not
            modified.
        lengths: B integers from 0 to ``T``, of any integer dtype, in a list, a tuple or a tensor on
            any device.
        batch_first: True if ``padded_sequences`` is ``(B, T, *features)``.

    Returns:
        B tensors ``(L, *features)``, copies of the data.

    Raises:
        ArgumentTypeError: ``padded_sequences`` is not a tensor, or ``lengths`` are not numbers.
        ShapeError: ``lengths`` are not B integers from 0 to T.

    Example:
        >>> unpad_sequence(torch.tensor([[1, 2, 3], [3, 4, 0]]), [3, 2], batch_first=True)
        [tensor([1, 2, 3]), tensor([3, 4])]
    """
    batch_first = read_flag("batch_first", batch_first)
    flat = flatten_padded(padded_sequences, lengths, batch_first, argument="padded_sequences")
    return _split(flat.values, flat.lengths_cpu())


@_never_recorded
def pack_sequence(
    sequences: Tensor | Iterable[Tensor], enforce_sorted: bool = True
) -> PackedSequence:
    """Pack sequences of different lengths, without waiting for a device.

    Args:
        sequences: B tensors ``(L, *features)`` of one dtype and device, ``L`` at least 0.
        enforce_sorted: True to require lengths in decreasing order; see
            :func:`pack_padded_sequence`.

    Returns:
        The pack, as from :func:`pack_padded_sequence`.

    Raises:
        ArgumentTypeError: ``sequences`` is not an iterable of tensors.
        ShapeError: there is no sequence, trailing shapes, dtypes or devices differ, or the lengths
            are not in decreasing order with ``enforce_sorted``.

    Example:
        >>> packed = pack_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])])
        >>> packed.data, packed.batch_sizes
        (tensor([1, 3, 2, 4, 3]), tensor([2, 2, 1]))
    """
    enforce_sorted = read_flag("enforce_sorted", enforce_sorted)
    tensors, lengths = read_sequences(sequences)
    batch_sizes, order = _rank_on_host(lengths, int(lengths[lengths.argmax()]), enforce_sorted)
    try:
        flat = torch.cat(tensors)
    except (RuntimeError, TypeError):
        raise_unfit(tensors)
        raise
    starts: IntArray = lengths.cumsum() - lengths
    starts, sorted_indices = (
        (starts, None) if order is None else (starts[order], send(order, flat.device))
    )
    return _pack(flat, starts, (0, 1), batch_sizes, sorted_indices)


@_never_recorded
def unpack_sequence(packed_sequences: PackedSequence) -> list[Tensor]:
    """Split a pack into its sequences; waits once for a device, like :func:`pad_packed_sequence`.

    Args:
        packed_sequences: the pack.

    Returns:
        B tensors ``(L, *features)`` in the order in which they were packed, copies of the data.

    Raises:
        ArgumentTypeError: ``packed_sequences`` is not a pack.
        ShapeError: the pack is inconsistent.

    Example:
        >>> unpack_sequence(pack_sequence([torch.tensor([1, 2, 3]), torch.tensor([3, 4])]))
        [tensor([1, 2, 3]), tensor([3, 4])]
    """
    flat = flatten_packed(packed_sequences, "packed_sequences")
    return _split(flat.values, flat.lengths_cpu())
