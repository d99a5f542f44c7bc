"""Arithmetic on the sequences of a batch, given as flat values and offsets, without a loop over
sequences.

A ragged batch of ``B`` sequences is ``values (N, *features)`` and ``offsets (B + 1,)``, int64 from
0 to ``N``; sequence ``b`` is ``values[offsets[b]:offsets[b + 1]]``. Functions of ``values`` are
differentiable twice. A NaN stays in its own sequence. Nothing is copied from a device to the host:
sizes that depend on the lengths are arguments, ``total`` for ``N`` and ``longest`` for the largest
length.

Arguments are not checked, and torch reads and writes out of bounds if offsets do not describe the
values. Callers compute the offsets, or check them (:func:`raglane._utils.checks.check_offsets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane._utils.tracing import (
    has_tangent,
    index_arithmetic,
    is_exporting,
    is_jit_traced,
    is_transformed,
    records_operators,
    runs_at_once,
)
from raglane.segments.indexing import take_rows

IntArray = NDArray[np.int64]

# A sum is the sum of the sums of so many elements: one float32 to which all are added would lose
# digits.
BLOCK = 512


# -- indexes
# --------------------------------------------------------------------------------------------------


@index_arithmetic
def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Return the offsets ``(B + 1,)`` int64 of lengths ``(B,)`` of any integer dtype."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


@index_arithmetic
def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Return the length of each sequence, ``(B,)``."""
    return offsets.diff()


def lengths_of(sequences: Sequence[Tensor]) -> Tensor:
    """Return the lengths of sequences, ``(B,)`` int64 on the CPU."""
    lengths = [sequence.shape[0] for sequence in sequences]
    if is_jit_traced():  # sizes are tensors, which a trace records
        return torch.stack([torch.as_tensor(length) for length in lengths])
    return torch.tensor(lengths, dtype=torch.int64, device="cpu")


def segment_ids(offsets: Tensor, total: int) -> Tensor:
    """Return the sequence of each element, ``(N,)``."""
    return (
        owners(offsets[1:], total)
        if is_exporting()
        else torch.repeat_interleave(offsets.diff(), output_size=total)
    )


def positions(offsets: Tensor, total: int) -> Tensor:
    """Return the step of each element in its sequence, ``(N,)``."""
    return torch.arange(total, device=offsets.device) - repeated(
        offsets[:-1], offsets.diff(), total
    )


def element_index(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return the indexes of the elements of slices ``[start, start + length)``, slice after slice,
    ``(total,)``.
    """
    return strided_index(starts, offsets_from_lengths(lengths), lengths, total)


def strided_index(
    starts: Tensor, offsets: Tensor, lengths: Tensor, total: int, stride: int = 1
) -> Tensor:
    """Return ``start, start + stride, ...`` of slices with the given offsets in the result."""
    places = torch.arange(total, device=starts.device)
    if stride > 1:
        places, offsets = places * stride, offsets * stride
    return places + repeated(starts - offsets[:-1], lengths, total)


def owners(ends: Tensor, total: int) -> Tensor:
    """Return :func:`segment_ids` from the ends ``(B,)`` of the sequences, by operators that ONNX
    supports.
    """
    ended = torch.zeros(total + 1, dtype=torch.int64, device=ends.device)
    return ended.index_add(0, ends, torch.ones_like(ends)).cumsum(0)[:total]


def repeated(rows: Tensor, repeats: Tensor, total: int) -> Tensor:
    """Repeat rows ``(M, *features)``, as :func:`torch.repeat_interleave`, but also in an exported
    graph.
    """
    if is_exporting():
        return rows.index_select(0, owners(repeats.cumsum(0), total))
    return torch.repeat_interleave(rows, repeats, output_size=total)


def conjugate(counts: IntArray, size: int) -> IntArray:
    """Count the ``counts`` above ``0, 1, ..., size - 1``: lengths to batch sizes of a pack, and
    back, longest first.
    """
    at_most: IntArray = np.bincount(counts, minlength=size)[:size].cumsum()
    return counts.shape[0] - at_most


# -- reductions: one row per sequence
# ---------------------------------------------------------------------------------


def like_rows(per_row: Tensor, rows: Tensor) -> Tensor:
    """Return one value per row with the dimensions of rows ``(M, *features)``."""
    return per_row.view((-1,) + (1,) * (rows.dim() - 1))


def where_empty(per_sequence: Tensor, offsets: Tensor, empty: float) -> Tensor:
    """Replace the rows of empty sequences by ``empty``."""
    is_empty = like_rows(offsets.diff() == 0, per_sequence)
    return torch.where(is_empty, per_sequence.new_full((), empty), per_sequence)


def _pick(values: Tensor, offsets: Tensor, index: Tensor, empty: float) -> Tensor:
    """Return the rows of ``values`` at ``index``, one per sequence, and ``empty`` for empty
    sequences.
    """
    if is_exporting():
        # Empty sequences read an additional row, so that one graph supports batches with and
        # without elements.
        rows = torch.cat([values, values.new_full((1, *values.shape[1:]), empty)])
        return rows.index_select(0, torch.where(offsets.diff() == 0, values.shape[0], index))
    if values.shape[0] == 0:
        # The sums are zeros that depend on values, so that a backward pass works.
        return where_empty(sum(values, offsets).to(values.dtype), offsets, empty)
    # The index of an empty sequence is that of a neighbour's element or out of bounds, so its row
    # is replaced. index_select, because take_rows does not support repeated indexes.
    rows = values.index_select(0, index.clamp(0, values.shape[0] - 1))
    return where_empty(rows, offsets, empty)


def first(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """Return the first element of each sequence, ``(B, *features)``."""
    return _pick(values, offsets, offsets[:-1], empty)


def last(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """Return the last element of each sequence, ``(B, *features)``."""
    return _pick(values, offsets, offsets[1:] - 1, empty)


def summable(values: Tensor) -> Tensor:
    """Convert integers to int64, and half precision to float32, for sums."""
    if values.dtype in (torch.float32, torch.float64):  # the commonest, in less time
        return values
    if not (values.is_floating_point() or values.is_complex()):
        return values.long()
    return values.float() if values.is_floating_point() and values.element_size() < 4 else values


def _levels(
    offsets: Tensor, lengths: Tensor, total: int, can_read: bool = False
) -> list[tuple[Tensor, int]]:
    """Return how elements are added up: the block of each and the number of blocks, then the
    sequences of these. ``can_read`` if numbers of the offsets can be read.
    """
    count = offsets.shape[0] - 1
    if not can_read:
        if is_exporting():
            return [(segment_ids(offsets, total), count)]
        can_read = not (records_operators() or is_jit_traced() or is_transformed(offsets))
    # Lengths on another device are not read, which would wait.
    if can_read and (total <= BLOCK or (offsets.is_cpu and int(lengths.max()) <= BLOCK)):
        return [(torch.repeat_interleave(lengths, output_size=total), count)]
    # As many blocks as a sequence has at any offset, of which the last may be empty.
    blocks = offsets // BLOCK + torch.arange(count + 1, device=offsets.device)
    room = total // BLOCK + count
    block = element_index(blocks[:-1] * BLOCK, lengths, total) // BLOCK
    return [(block, room), (segment_ids(blocks, room), count)]


def sum(values: Tensor, offsets: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the sum of each sequence, ``(B, *features)``; 0 if it is empty, int64 for integers and
    booleans. Callers pass the lengths if they have them.
    """
    lengths = offsets.diff() if lengths is None else lengths
    summed = summable(values)
    at_once = runs_at_once(values, offsets)
    can_write = at_once or not (torch.compiler.is_compiling() or is_transformed(values))
    for owner, count in _levels(offsets, lengths, values.shape[0], at_once):
        zeros = summed.new_zeros((count, *values.shape[1:]))
        # In place only where torch supports it, without a copy of the zeros.
        add = zeros.index_add_ if can_write else zeros.index_add
        summed = add(0, owner, summed)
    is_wider = summed.dtype is not values.dtype and values.is_floating_point()
    return summed.to(values.dtype) if is_wider else summed


def _extreme(values: Tensor, offsets: Tensor, empty: float, reduce: str) -> Tensor:
    """Return the largest (``amax``) or smallest (``amin``) element of each sequence; ties share the
    gradient evenly.
    """
    if values.dtype is torch.bool:
        return _extreme(values.to(torch.uint8), offsets, empty, reduce).bool()
    # The gradient of scatter_reduce counts a first number that equals the result as a tie; NaN
    # never does.
    start = torch.nan if values.is_floating_point() else 0
    result = values.new_full((offsets.shape[0] - 1, *values.shape[1:]), start)
    index = like_rows(segment_ids(offsets, values.shape[0]), values).expand_as(values)
    result = result.scatter_reduce(0, index, values, reduce=reduce, include_self=False)
    return where_empty(result, offsets, empty)


def max(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """Return the maximum of each sequence and feature, ``(B, *features)``."""
    return _extreme(values, offsets, empty, "amax")


def min(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """Return the minimum of each sequence and feature, ``(B, *features)``."""
    return _extreme(values, offsets, empty, "amin")


def exponentials(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``exp(value - maximum of its sequence)``, the sums of these and the maxima, as
    :func:`summable`.
    """
    wide = summable(values)
    # The maximum cancels out, so it needs no gradient. An infinite one is not subtracted, which
    # would give NaN.
    largest = max(wide.detach(), offsets)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    raised = (wide - spread(largest, offsets, values.shape[0])).exp()
    return raised, sum(raised, offsets), largest


def logsumexp(values: Tensor, offsets: Tensor, empty: float = 0.0) -> Tensor:
    """Return the log-sum-exp of each sequence, ``(B, *features)``; ``-inf`` without gradient if all
    are ``-inf``.
    """
    _, total, largest = exponentials(values, offsets)
    is_zero = total == 0
    result = total.masked_fill(is_zero, 1).log().masked_fill(is_zero, float("-inf")) + largest
    return where_empty(result.to(values.dtype), offsets, empty)


# -- one row per element
# ----------------------------------------------------------------------------------------------


def spread(per_sequence: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Repeat the value of each sequence for its elements: ``(B, *features)`` to ``(N,
    *features)``.
    """
    if not per_sequence.requires_grad:
        return per_sequence.index_select(0, segment_ids(offsets, total))
    # The backward pass is a sum.
    source = summable(per_sequence)
    for owner, _ in reversed(_levels(offsets, offsets.diff(), total)):
        source = source.index_select(0, owner)
    return source.to(per_sequence.dtype)


def softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the softmax over the steps of each sequence, ``(N, *features)`` of a floating-point
    dtype.
    """
    # A sequence of only -inf gives NaN, as in torch.softmax.
    raised, total, _ = exponentials(values, offsets)
    return (raised / spread(total, offsets, values.shape[0])).to(values.dtype)


class _Cumsum(torch.autograd.Function):
    """A running sum by doubling: after round ``r`` an element is the sum of up to ``2 ** r``
    elements to it.

    One running sum over all values, minus its value before each sequence, would take one pass, but
    would round like the sum of the whole batch, and a NaN would reach every later sequence.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, position: Tensor, longest: int, backwards: bool) -> Tensor:
        result = values.clone()
        step = 1
        while step < longest:
            # Row i adds row i - step if both are in one sequence, i.e. if position >= step. The sum
            # from the other end is the transpose: row i - step adds row i.
            mask = like_rows(position[step:] >= step, values)
            if backwards:
                result[:-step] += torch.where(mask, result[step:], 0)
            else:
                result[step:] += torch.where(mask, result[:-step], 0)
            step *= 2
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, bool], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[1])
        ctx.longest, ctx.backwards = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            _running_sum(grad, ctx.saved_tensors[0], ctx.longest, not ctx.backwards),
            None,
            None,
            None,
        )


def _running_sum(values: Tensor, position: Tensor, longest: int, backwards: bool = False) -> Tensor:
    # Dynamo refuses functions with a rule for the forward mode, so torch derives that of the
    # operations.
    run: Any = _Cumsum.forward if has_tangent([values]) else _Cumsum.apply
    summed: Tensor = run(values, position, longest, backwards)
    return summed


def cumsum(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Return the running sum over the steps of each sequence, ``(N, *features)``; int64 for
    integers and booleans.
    """
    summed = _running_sum(summable(values), positions(offsets, values.shape[0]), longest)
    return summed.to(values.dtype) if values.is_floating_point() else summed


def reverse_index(offsets: Tensor, total: int) -> Tensor:
    """Return the index ``(N,)`` that reverses every sequence."""
    ends = offsets[:-1] + offsets[1:] - 1
    return repeated(ends, offsets.diff(), total) - torch.arange(total, device=offsets.device)


def reverse(values: Tensor, offsets: Tensor) -> Tensor:
    """Return every sequence in reverse order, ``(N, *features)``."""
    return take_rows(values, reverse_index(offsets, values.shape[0]))


def shift(values: Tensor, offsets: Tensor, steps: int, fill: float = 0.0) -> Tensor:
    """Shift every sequence by ``steps``, forward if positive, and fill free steps with ``fill``."""
    total = values.shape[0]
    position = positions(offsets, total)
    remaining = position if steps >= 0 else spread(offsets.diff(), offsets, total) - 1 - position
    is_filled = like_rows(remaining >= abs(steps), values)
    return torch.where(is_filled, _moved(values, steps), values.new_full((), fill))


def _moved(values: Tensor, steps: int) -> Tensor:
    """Return the rows shifted by ``steps``; the content of free rows is arbitrary."""
    if not is_exporting():
        return values.roll(steps, 0)
    # The graph of roll divides by the number of rows, and depends on whether it is 0.
    total = values.shape[0]
    more = values.new_zeros(abs(steps), *values.shape[1:])
    if steps >= 0:
        return torch.cat((more, values)).narrow(0, 0, total)
    return torch.cat((values, more)).narrow(0, -steps, total)
