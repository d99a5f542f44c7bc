"""Index arithmetic between the flat, the padded and the packed layout of a batch.

Each layout stores element ``(sequence, step)`` in a row of a table of features:

- flat: sequence after sequence, row ``offsets[sequence] + step``;
- padded: row ``step * B + sequence``, or ``sequence * T + step`` with the batch first;
- packed: step after step, and within a step the active sequences, longest first.

A conversion takes rows by an index without repetition, or places rows at one. The functions here
compute the index, without a loop over steps or sequences, and without waiting for a device;
:mod:`raglane.segments.indexing` moves rows.

NOTE [two kinds of array]: the arithmetic is written once, for NumPy arrays and tensors. On a CPU it
runs on NumPy arrays, because the overhead of an operation, which dominates in small batches, is a
third of PyTorch's. Conversions of padded tensors run on tensors if :mod:`torch.compile` traces
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raglane._utils.tracing import index_arithmetic, never_traced
from raglane.segments import IntArray, conjugate


class _Kit(NamedTuple):
    """Functions with different names in NumPy and PyTorch: arange times a stride, and repeating
    entries by counts.
    """

    count_up: Callable[[int, int], Any]
    repeat: Callable[[Any, Any, int], Any]


_HOST = _Kit(
    lambda total, stride: np.arange(total) * stride if stride != 1 else np.arange(total),
    lambda array, counts, total: array.repeat(counts),  # noqa: ARG005
)


def _kit(device: torch.device) -> _Kit:
    return _Kit(
        lambda total, stride: torch.arange(total, device=device) * stride,
        lambda array, counts, total: torch.repeat_interleave(array, counts, output_size=total),
    )


def _packed(
    kit: _Kit, starts: Any, batch_sizes: Any, before: Any, total: int, strides: tuple[int, int]
) -> Any:
    sequence_stride, step_stride = strides
    steps = kit.count_up(batch_sizes.shape[0], step_stride)
    if starts is None:
        # Within a step the rows are evenly spaced, so each step adds one number to a range.
        if sequence_stride != 1:
            before = before * sequence_stride
        rows = kit.count_up(total, sequence_stride)
        rows += kit.repeat(steps - before, batch_sizes, total)
        return rows
    ranks = kit.count_up(total, 1)
    ranks -= kit.repeat(before, batch_sizes, total)
    rows = starts[ranks]
    rows += kit.repeat(steps, batch_sizes, total)
    return rows


def _unpacked(kit: _Kit, ranks: Any, lengths: Any, batch_sizes: Any, total: int) -> Any:
    steps = kit.count_up(total, 1)
    steps -= kit.repeat(lengths.cumsum(0) - lengths, lengths, total)
    rows = (batch_sizes.cumsum(0) - batch_sizes)[steps]
    rows += kit.repeat(ranks, lengths, total)
    return rows


def _padded(
    kit: _Kit, lengths: Any, total: int, strides: tuple[int, int], left_steps: int | None
) -> Any:
    sequence_stride, step_stride = strides
    starts = kit.count_up(lengths.shape[0], sequence_stride)
    elements = lengths.cumsum(0)
    # With padding on the left, a sequence ends at the end of its row.
    elements -= lengths if left_steps is None else left_steps
    starts -= elements if step_stride == 1 else elements * step_stride
    rows = kit.count_up(total, step_stride)
    rows += kit.repeat(starts, lengths, total)
    return rows


@index_arithmetic
def packed_rows(
    starts: IntArray | Tensor | None,
    batch_sizes: IntArray,
    strides: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Return the row of each element ``(N,)`` in packed order; ``strides`` are those of sequences
    and steps, in rows.

    ``starts`` are the rows of the first steps, longest sequence first; None if they are a stride
    apart.
    """
    before = batch_sizes.cumsum()
    total = int(before[-1]) if before.shape[0] else 0
    before -= batch_sizes
    if device.type == "cpu":
        host = starts.numpy() if isinstance(starts, Tensor) else starts
        return torch.from_numpy(_packed(_HOST, host, batch_sizes, before, total, strides))
    if isinstance(starts, np.ndarray):
        starts = send(starts, device)
    return _packed(
        _kit(device), starts, send(batch_sizes, device), send(before, device), total, strides
    )


@index_arithmetic
def unpacked_rows(
    ranks: IntArray, lengths: IntArray, batch_sizes: IntArray, total: int, device: torch.device
) -> Tensor:
    """Return the row of each element ``(N,)`` in a pack, sequence after sequence; ``ranks`` are
    those by length.
    """
    if device.type == "cpu":
        return torch.from_numpy(_unpacked(_HOST, ranks, lengths, batch_sizes, total))
    arrays = send(ranks, device), send(lengths, device), send(batch_sizes, device)
    return _unpacked(_kit(device), *arrays, total)


@index_arithmetic
def padded_rows(
    lengths: IntArray | Tensor,
    total: int,
    strides: tuple[int, int],
    left_steps: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the row of each element ``(N,)`` in a padded batch, sequence after sequence, on the
    device of ``lengths``.

    ``device`` is the one for lengths in an array. ``left_steps`` are the steps of a batch with
    padding on the left.
    """
    if isinstance(lengths, np.ndarray) and device is not None and device.type != "cpu":
        lengths = send(lengths, device)
    if isinstance(lengths, Tensor):
        if not lengths.is_cpu or torch.compiler.is_compiling():
            return _padded(_kit(lengths.device), lengths, total, strides, left_steps)
        lengths = lengths.numpy()
    return torch.from_numpy(_padded(_HOST, lengths, total, strides, left_steps))


@index_arithmetic
def inverse(permutation: Tensor) -> Tensor:
    """Return the inverse of a permutation, unchecked."""
    count = permutation.shape[0]
    if permutation.is_cpu:
        array = permutation.numpy()
        inverted = np.empty_like(array)
        inverted[array] = np.arange(count, dtype=array.dtype)
        return torch.from_numpy(inverted)
    counting = torch.arange(count, dtype=permutation.dtype, device=permutation.device)
    return torch.empty_like(permutation).index_copy_(0, permutation.long(), counting)


def send(array: IntArray, device: torch.device) -> Tensor:
    """Copy an array to a device without waiting."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


@index_arithmetic
def on_host(indices: Tensor) -> IntArray:
    """Return indices as an array; waits for a device."""
    return indices.cpu().numpy()


def shape_and_strides(
    count: int, steps: int, batch_first: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first two dimensions of a padded batch, and the strides of sequences and steps in
    rows.
    """
    return ((count, steps), (steps, 1)) if batch_first else ((steps, count), (1, count))


def rows_of(padded: Tensor, batch_first: bool) -> tuple[Tensor, tuple[int, int]]:
    """Return a padded batch as a table of rows, a view if possible, and the strides of sequences
    and steps.
    """
    outer, inner = padded.shape[:2]
    if not padded.is_contiguous() and padded.stride(1) == outer * padded.stride(0):
        # The transpose of a contiguous batch: no copy is needed.
        padded = padded.transpose(0, 1)
        batch_first = not batch_first
        inner = outer
    return padded.flatten(0, 1), (inner, 1) if batch_first else (1, inner)


class PackedLayout(NamedTuple):
    """The rows of flat values in a pack."""

    index: Tensor  # type: ignore[assignment]  # (N,) int64: row i of the pack is row index[i] of the values
    batch_sizes: (
        Tensor  # (T,) int64 on the CPU, the number of sequences that have each step; all above 0
    )
    sorted_indices: Tensor  # (B,) int64 on the device of the offsets: the sequences, longest first, ties in order


@never_traced
@index_arithmetic
def packed_layout(lengths: Tensor, offsets: Tensor) -> PackedLayout:
    """Return the packed layout of flat values; ``lengths`` are on the CPU, ``offsets`` and results
    on any device.
    """
    host: IntArray = lengths.numpy()
    order: IntArray = (-host).argsort(kind="stable")
    longest = int(host[order[0]]) if order.shape[0] else 0
    batch_sizes = conjugate(host, longest)
    sorted_indices = send(order, offsets.device)
    starts = offsets.index_select(0, sorted_indices)
    index = packed_rows(starts, batch_sizes, (0, 1), offsets.device)
    return PackedLayout(index, torch.from_numpy(batch_sizes), sorted_indices)
