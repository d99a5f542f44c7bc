"""Schedules, which map lengths to a table of rows, and their costs.

A schedule is the order in which the elements of a batch are computed, and which ones in parallel.
It depends only on the lengths, and does not move the values of the batch. All schedules give the
same outputs, final states and gradients, at different costs. :data:`SCHEDULES` has all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import check_whole, read_lengths
from raglane.segments import IntArray, conjugate, offsets_from_lengths, positions, segment_ids


@dataclass(frozen=True, eq=False)
class Table:
    """The sequence, step and row of each computed element, ordered by time, then by row.

    ``S`` is the number of times, ``E`` the number of computed elements. Computed padding has ``step
    >= length``. All tensors are int64, on the CPU.

    NOTE (rows): a sequence begins at step 0 and computes one step at each following time, always in
    the same row. A row computes one sequence at a time. The reference kernel relies on both.
    """

    time_offsets: Tensor  # ``(S + 1,)``: time ``t`` computes the elements ``time_offsets[t]:time_offsets[t + 1]``
    sequence: Tensor  # ``(E,)``, the index of the sequence in the caller's order
    step: Tensor  # ``(E,)``, the step of that sequence
    row: Tensor  # ``(E,)``, the row of the running batch

    @property
    def steps(self) -> int:
        """``S``, the number of times."""
        return self.time_offsets.shape[0] - 1

    @property
    def elements(self) -> int:
        """``E``, the number of computed elements, padding included."""
        return self.sequence.shape[0]

    @property
    def rows_per_step(self) -> Tensor:
        """The number of active rows at each time, ``(S,)`` int64."""
        return self.time_offsets.diff()

    def waste(self, lengths: Tensor) -> int:
        """Return the number of computed padding elements."""
        return int((self.step >= lengths[self.sequence]).sum())


@dataclass(frozen=True)
class Count:
    """The size of a schedule's table."""

    steps: int  # the number of times
    elements: int  # the number of computed elements, padding included
    waste: int  # the number of computed padding elements
    sequences: int  # the number of sequences that compute at least one element, padding included


class Schedule(ABC):
    """An order in which the elements of a batch are computed."""

    name: str  # the schedule's key in :data:`raglane.schedules.SCHEDULES`
    holds_state: bool = False  # True if a row keeps its state past the end of its sequence

    @abstractmethod
    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:
        """Return the table for sequences of these lengths."""

    @abstractmethod
    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:
        """Return the size of :meth:`table` without building it, fast for millions of sequences."""

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the active rows over time as runs of equal numbers: the rows, and the steps of
        each run.
        """
        rows, steps = torch.unique_consecutive(
            self.table(lengths, lanes).rows_per_step, return_counts=True
        )
        return rows, steps


def longest(lengths: Tensor) -> int:
    """Return the largest length, 0 for no sequences."""
    return int(lengths.max()) if lengths.shape[0] else 0


def _longest_first(lengths: Tensor) -> Tensor:
    """Return the indexes of the sequences, longest first, ties in the caller's order."""
    return torch.argsort(lengths, descending=True, stable=True)


def _real_count(lengths: Tensor, steps: int) -> Count:
    """Return the size of a table without padding."""
    return Count(steps, int(lengths.sum()), 0, int(lengths.count_nonzero()))


class _Each(Schedule):
    """One sequence after the other in the caller's order, in one row: the naive loop, without
    padding.
    """

    name = "each"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:  # noqa: ARG002
        offsets = offsets_from_lengths(lengths)
        total = int(lengths.sum())
        return Table(
            torch.arange(total + 1, device="cpu"),
            segment_ids(offsets, total),
            positions(offsets, total),
            torch.zeros(total, dtype=torch.int64, device="cpu"),
        )

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:  # noqa: ARG002
        return _real_count(lengths, int(lengths.sum()))

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        total = lengths.sum().reshape(1)
        return torch.ones_like(total), total


class _Padded(Schedule):
    """Every sequence in a row of its own, in the caller's order, for the steps of the longest one.

    Padding is computed and its results are dropped, as when PyTorch runs a padded tensor. Empty
    sequences have rows.
    """

    name = "padded"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:  # noqa: ARG002
        rows = lengths.shape[0]
        steps = longest(lengths)
        row = torch.arange(rows, device="cpu").repeat(steps)
        step = torch.arange(steps, device="cpu").repeat_interleave(rows)
        return Table(torch.arange(steps + 1, device="cpu") * rows, row, step, row)

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:  # noqa: ARG002
        rows = lengths.shape[0]
        steps = longest(lengths)
        elements = rows * steps
        return Count(steps, elements, elements - int(lengths.sum()), rows if steps else 0)

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        rows = lengths.shape[0]
        steps = longest(lengths)
        return torch.tensor([rows], device="cpu"), torch.tensor([steps], device="cpu")


class _Masked(_Padded):
    """The rows and steps of ``padded``, with a mask by which rows keep their state past their end.

    Keras and Flax run masked recurrent networks this way. The last state of a row is the final
    state of its sequence.
    """

    name = "masked"
    holds_state = True


class _Packed(Schedule):
    """At step ``t``, all sequences longer than ``t``, longest first, ties in the caller's order: a
    PackedSequence.

    No padding is computed. The number of rows decreases as sequences end.
    """

    name = "packed"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:  # noqa: ARG002
        steps = longest(lengths)
        total = int(lengths.sum())
        time_offsets = offsets_from_lengths(torch.from_numpy(conjugate(lengths.numpy(), steps)))
        row = positions(time_offsets, total)
        return Table(
            time_offsets, _longest_first(lengths)[row], segment_ids(time_offsets, total), row
        )

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:  # noqa: ARG002
        return _real_count(lengths, longest(lengths))

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        ends, ending = torch.unique(lengths, return_counts=True)
        rows = lengths.shape[0] - ending.cumsum(0) + ending
        return rows, torch.diff(ends, prepend=ends.new_zeros(1))


DEFAULT_LANES = 16
"""Rows of the schedule ``lanes`` by default; at most the number of non-empty sequences."""

# Number of sequences of one length from which assigning them together is faster than one by one.
_LONG_RUN = 100


class _Lanes(Schedule):
    """``R`` rows; when a sequence ends, its row takes the next one without a pause.

    Sequences are assigned longest first, ties in the caller's order, to the lowest free row. When
    none is left, ended rows are inactive, so no padding is computed. The number of steps is that of
    the row that ends last.
    """

    name = "lanes"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:
        # Sorting the elements costs ``N log N``.
        rows = _rows(lengths, lanes)
        order = _longest_first(lengths)[: int(lengths.count_nonzero())]
        waiting = lengths[order]
        slots, _ = _assign(waiting.numpy(), rows)
        total = int(waiting.sum())
        offsets = offsets_from_lengths(waiting)
        taken = segment_ids(offsets, total)
        step = positions(offsets, total)
        slot, by_time = torch.sort(torch.from_numpy(slots)[taken] + step * rows)
        rows_per_step = torch.bincount(slot // rows)
        return Table(
            offsets_from_lengths(rows_per_step), order[taken[by_time]], step[by_time], slot % rows
        )

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:
        # The number of steps has no closed form, so the rows are simulated.
        rows = _rows(lengths, lanes)
        waiting = -np.sort(-lengths.numpy())[: int(lengths.count_nonzero())]
        return _real_count(lengths, _assign(waiting, rows)[1])

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:
        rows = _rows(lengths, lanes)
        waiting = -np.sort(-lengths.numpy())[: int(lengths.count_nonzero())]
        slots, _ = _assign(waiting, rows)
        begins = slots // rows
        # A row that takes the next sequence without a pause does not change the number of active
        # rows.
        times, time_index = np.unique(
            np.concatenate((begins, begins + waiting)), return_inverse=True
        )
        changes = np.bincount(time_index[: len(waiting)], minlength=len(times))
        changes -= np.bincount(time_index[len(waiting) :], minlength=len(times))
        alive = changes.cumsum()[:-1]
        is_change = changes[:-1] != 0
        starts = np.flatnonzero(is_change)
        lasting = np.diff(np.append(times[:-1][starts], times[-1:]))
        return torch.from_numpy(alive[starts]), torch.from_numpy(lasting)


def _rows(lengths: Tensor, lanes: int | None) -> int:
    """Return the number of rows: the requested one or the default, at most the number of non-empty
    sequences.
    """
    fix = f"pass an int of at least 1, or None for {DEFAULT_LANES}"
    rows = DEFAULT_LANES if lanes is None else check_whole("lanes", lanes, 1, fix)
    return min(rows, max(1, int(lengths.count_nonzero())))


def _assign(waiting: IntArray, rows: int) -> tuple[IntArray, int]:
    """Return the slot ``time * rows + row`` at which each sequence starts, and the number of steps.

    The smallest free slot, i.e. the lowest of the rows that are free first, takes the next
    sequence.
    """
    slots = np.empty(waiting.shape, np.int64)
    free = list(range(rows))
    bounds = [0, *(np.flatnonzero(np.diff(waiting)) + 1).tolist(), waiting.shape[0]]
    for begin, end in pairwise(bounds):
        if begin == end:
            continue
        width = int(waiting[begin]) * rows
        if end - begin < _LONG_RUN:
            slots[begin:end] = [heapreplace(free, free[0] + width) for _ in range(begin, end)]
        else:
            taken = _earliest(np.array(free), width, end - begin)
            slots[begin:end] = taken
            latest = np.empty(rows, np.int64)
            latest[np.array(free) % rows] = free
            # Of several slots of a row, the last one assigned, which is its latest, remains.
            latest[taken % rows] = taken + width
            free = sorted(latest.tolist())
    return slots, max(free) // rows


def _earliest(free: IntArray, width: int, count: int) -> IntArray:
    """Return the first slots at which ``count`` sequences of one length start.

    A row with the free slot ``s`` can start them at ``s``, ``s + width``, ``s + 2 * width`` ...
    Divide the slots into windows of ``width`` from the smallest slot. From the window of its free
    slot on, a row has one slot in each window, always at the same offset in it. So one sort of the
    rows by that offset sorts all slots.
    """
    first_window, offset = np.divmod(free - free.min(), width)
    by_offset = np.argsort(offset)
    first_window = first_window[by_offset]
    # In w windows, the r rows with the smallest first windows have w * r - sum(first windows)
    # slots, or fewer if one of these begins later; the maximum over r is exact. So the smallest w
    # that suffices for any r suffices.
    before = np.sort(first_window).cumsum()
    windows = int((-(-(count + before) // np.arange(1, free.shape[0] + 1))).min())
    window = np.arange(windows)[:, None]
    slots: IntArray = (free.min() + window * width + offset[by_offset])[window >= first_window]
    return slots[:count]


# ---- the table of schedules ----------------------------------------------------------------------

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (_Each(), _Padded(), _Masked(), _Packed(), _Lanes())
}
"""All schedules by name, simplest first. A new one is a class above and an entry here."""


@dataclass(frozen=True, repr=False)
class Cost:
    """The work of one schedule for a batch of lengths.

    Attributes:
        schedule: its name.
        steps: the number of sequential steps, each of which computes all active rows.
        elements: the number of computed elements, computed padding included.
        waste: the number of computed padding elements.
        multiplications: of the dot product of each sequence of scalars with a weight vector: one
            per element.
        additions: of these dot products: ``elements`` minus the number of sequences that compute an
            element. An empty sequence computes elements only if it is padded.

    Example:
        >>> Cost("packed", 9, 32, 0, 32, 26)
        Cost(packed: 9 steps, 32 elements of which 0 waste, 32 multiplications, 26 additions)
    """

    schedule: str
    steps: int
    elements: int
    waste: int
    multiplications: int
    additions: int

    def __repr__(self) -> str:
        return (
            f"Cost({self.schedule}: {self.steps:,} steps, {self.elements:,} elements of which {self.waste:,} waste, "
            f"{self.multiplications:,} multiplications, {self.additions:,} additions)"
        )


def cost(lengths: Any, *, lanes: int | None = None) -> dict[str, Cost]:
    """Count the work of each schedule for sequences of these lengths.

    The numbers are computed from sums over the lengths, so millions of sequences take milliseconds.
    Only ``lanes`` is simulated, which takes a sort of the lengths and at most about 60 microseconds
    per distinct length.

    Args:
        lengths: ``(B,)`` integers of at least 0: a list, a tuple, an array, or a tensor of any
            integer dtype on any device; or an object with ``lengths``, such as a
            :class:`~raglane.Ragged`. Lengths on a GPU are waited for.
        lanes: the number of rows of the schedule ``lanes``, at least 1; None for its default.

    Returns:
        A :class:`Cost` for each schedule, by its name, in the order of SCHEDULES.

    Raises:
        ArgumentTypeError: ``lengths`` or ``lanes`` are not integers.
        ShapeError: ``lengths`` does not have exactly one dimension.
        ArgumentError: a length is below 0, or ``lanes`` is below 1.

    Example:
        >>> costs = cost([4, 6, 8, 5, 4, 3, 7, 8])
        >>> costs["padded"].elements, costs["packed"].elements
        (64, 45)
        >>> costs["padded"]
        Cost(padded: 8 steps, 64 elements of which 19 waste, 64 multiplications, 56 additions)
    """
    host = lengths_of(lengths)
    counts = {name: schedule.count(host, lanes) for name, schedule in SCHEDULES.items()}
    return {
        name: Cost(
            schedule=name,
            steps=count.steps,
            elements=count.elements,
            waste=count.waste,
            multiplications=count.elements,
            additions=count.elements - count.sequences,
        )
        for name, count in counts.items()
    }


def lengths_of(source: Any) -> Tensor:
    """Return lengths, or those of a batch, on the CPU."""
    # A Ragged on a device has its lengths on the CPU too, as ``lengths_cpu``.
    return read_lengths(getattr(source, "lengths_cpu", getattr(source, "lengths", source)))
