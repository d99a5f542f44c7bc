"""The interface of a schedule, lengths in and a table of rows out; and the schedules.

A schedule decides in which order the elements of a batch are computed, and side by side with which others. It sees
lengths alone. The values of the batch never move for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import check_whole
from raglane.segments import conjugate, offsets_from_lengths, positions, segment_ids


@dataclass(frozen=True, eq=False)
class Table:
    """Which sequence computes which step in which row, at each time of the run.

    Flat, ordered by time, then by row. ``S`` is the number of times, ``E`` the number of elements computed, padding
    included where the schedule computes it: there ``step >= length``. All tensors are int64, on the CPU.

    NOTE (rows): a sequence begins at step 0 and computes one step at each following time, always in the same row,
    until it is done. A row serves one sequence at a time. The reference kernel relies on both.
    """

    time_offsets: Tensor  # ``(S + 1,)``: what runs at time ``t`` stands at ``time_offsets[t]:time_offsets[t + 1]``
    sequence: Tensor  # ``(E,)``, the number of the sequence in the caller's order
    step: Tensor  # ``(E,)``, the step of that sequence
    row: Tensor  # ``(E,)``, the row of the running batch

    @property
    def steps(self) -> int:
        """``S``, the number of times: how many steps run one after the other."""
        return self.time_offsets.shape[0] - 1

    @property
    def elements(self) -> int:
        """``E``, the number of elements computed, padding included."""
        return self.sequence.shape[0]

    @property
    def rows_per_step(self) -> Tensor:
        """``(S,)`` int64: how many rows compute at each time."""
        return self.time_offsets.diff()

    def waste(self, lengths: Tensor) -> int:
        """How many of the elements computed do not exist: their step lies past the end of their sequence."""
        return int((self.step >= lengths[self.sequence]).sum())


@dataclass(frozen=True)
class Count:
    """The size of a schedule's table, known without building it."""

    steps: int  # how many steps run one after the other
    elements: int  # elements computed, padding included
    waste: int  # how many of them do not exist
    sequences: int  # how many sequences compute at least one element, real or not


class Schedule(ABC):
    """An order in which the elements of a batch are computed."""

    name: str  # the schedule's key in :data:`raglane.schedules.SCHEDULES`
    holds_state: bool = False  # whether a row keeps its state where it runs past the end of its sequence

    @abstractmethod
    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:
        """Say which sequence computes which step in which row, without a loop over sequences or elements."""

    @abstractmethod
    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:
        """The numbers of :meth:`table`, without building it: cheap for millions of sequences."""

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:
        """The rows of :meth:`table` over time, as runs of equal ones; a schedule may know them without building it."""
        rows, steps = torch.unique_consecutive(self.table(lengths, lanes).rows_per_step, return_counts=True)
        return rows, steps


def longest(lengths: Tensor) -> int:
    """The largest of ``lengths``, 0 where there is none."""
    return int(lengths.max()) if lengths.shape[0] else 0


def longest_first(lengths: Tensor) -> Tensor:
    """The sequences in the order of their lengths, the longest first; of equal ones the caller's first stands first."""
    return torch.argsort(lengths, descending=True, stable=True)


def real_count(lengths: Tensor, steps: int) -> Count:
    """The count of a schedule that computes every element once, and nothing else."""
    return Count(steps, int(lengths.sum()), 0, int(lengths.count_nonzero()))


class Each(Schedule):
    """One sequence after the other in the caller's order, each alone in the only row: the naive loop.

    No waste, and nothing side by side: as many steps as there are elements.
    """

    name = "each"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:  # noqa: ARG002
        """As :meth:`Schedule.table`; ``S`` is ``N``, and every row is row 0."""
        offsets, total = offsets_from_lengths(lengths), int(lengths.sum())
        return Table(
            torch.arange(total + 1, device="cpu"),
            segment_ids(offsets, total),
            positions(offsets, total),
            torch.zeros(total, dtype=torch.int64, device="cpu"),
        )

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:  # noqa: ARG002
        """As :meth:`Schedule.count`."""
        return real_count(lengths, int(lengths.sum()))

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """As :meth:`Schedule.phases`."""
        total = lengths.sum().reshape(1)
        return torch.ones_like(total), total


class Padded(Schedule):
    """Every sequence, one per row in the caller's order, for as many steps as the longest has.

    What lies past a length is computed and cut away (truncation), as when PyTorch runs a padded tensor. An empty
    sequence has a row like every other.
    """

    name = "padded"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:  # noqa: ARG002
        """As :meth:`Schedule.table`; ``E`` is ``B`` times the longest length."""
        rows, steps = lengths.shape[0], longest(lengths)
        row = torch.arange(rows, device="cpu").repeat(steps)
        step = torch.arange(steps, device="cpu").repeat_interleave(rows)
        return Table(torch.arange(steps + 1, device="cpu") * rows, row, step, row)

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:  # noqa: ARG002
        """As :meth:`Schedule.count`."""
        rows, steps = lengths.shape[0], longest(lengths)
        elements = rows * steps
        return Count(steps, elements, elements - int(lengths.sum()), rows if steps else 0)

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """As :meth:`Schedule.phases`."""
        rows, steps = lengths.shape[0], longest(lengths)
        return torch.tensor([rows], device="cpu"), torch.tensor([steps], device="cpu")


class Masked(Padded):
    """The rows and steps of :class:`Padded`, with a mask that holds ended rows' states.

    Known as a "dynamic" or masked recurrent network, and what Keras and Flax do: the last state of a row is the
    state after the sequence's own last element, so nothing has to be cut to find it.
    """

    name = "masked"
    holds_state = True


class Packed(Schedule):
    """At step ``t``, the sequences longer than ``t``, the longest in row 0: the order of a PackedSequence.

    No waste, and as many steps as the longest sequence has; the rows grow fewer with each one that ends. Of equal
    lengths the caller's first stands first.
    """

    name = "packed"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:  # noqa: ARG002
        """As :meth:`Schedule.table`; ``E`` is ``N``."""
        steps, total = longest(lengths), int(lengths.sum())
        rows_per_step = torch.from_numpy(conjugate(lengths.numpy(), steps))
        time_offsets = offsets_from_lengths(rows_per_step)
        row = positions(time_offsets, total)
        return Table(time_offsets, longest_first(lengths)[row], segment_ids(time_offsets, total), row)

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:  # noqa: ARG002
        """As :meth:`Schedule.count`."""
        return real_count(lengths, longest(lengths))

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """As :meth:`Schedule.phases`."""
        ends, ending = torch.unique(lengths, return_counts=True)
        rows = lengths.shape[0] - ending.cumsum(0) + ending
        return rows, torch.diff(ends, prepend=ends.new_zeros(1))


DEFAULT_LANES = 16
"""Rows of the schedule ``lanes`` where the caller names none; never more than there are sequences to run."""

# As many sequences of one length as it takes for handing them out at once to cost less than one by one.
_LONG_RUN = 100

_Integers = npt.NDArray[np.int64]


class Lanes(Schedule):
    """``R`` rows that run all the time: a row whose sequence has ended takes the next one that waits, at once.

    The sequences wait longest first, of equal lengths the caller's first first, and where several rows are free the
    lowest takes the next. Once none waits, a row that has ended computes nothing more, so there is no waste. The
    number of steps is that of the row that ends last.
    """

    name = "lanes"

    def table(self, lengths: Tensor, lanes: int | None = None) -> Table:
        """As :meth:`Schedule.table`; ``E`` is ``N``. Sorting its elements costs ``N log N``."""
        rows = _rows(lengths, lanes)
        order = longest_first(lengths)[: int(lengths.count_nonzero())]
        waiting = lengths[order]
        slots, steps = _assign(waiting.numpy(), rows)
        total = int(waiting.sum())
        offsets = offsets_from_lengths(waiting)
        taken = segment_ids(offsets, total)
        step = positions(offsets, total)
        slot, by_time = torch.sort(torch.from_numpy(slots)[taken] + step * rows)
        rows_per_step = torch.bincount(slot // rows, minlength=steps)
        return Table(offsets_from_lengths(rows_per_step), order[taken[by_time]], step[by_time], slot % rows)

    def count(self, lengths: Tensor, lanes: int | None = None) -> Count:
        """As :meth:`Schedule.count`; the number of steps has no closed form, so the rows are followed."""
        rows = _rows(lengths, lanes)
        waiting = -np.sort(-lengths.numpy())[: int(lengths.count_nonzero())]
        return real_count(lengths, _assign(waiting, rows)[1])

    def phases(self, lengths: Tensor, lanes: int | None = None) -> tuple[Tensor, Tensor]:
        """As :meth:`Schedule.phases`, at the cost of :meth:`count`."""
        rows = _rows(lengths, lanes)
        waiting = -np.sort(-lengths.numpy())[: int(lengths.count_nonzero())]
        slots, _ = _assign(waiting, rows)
        begins = slots // rows
        # A lane that takes the next sequence at once does not change how many run.
        times, place = np.unique(np.concatenate((begins, begins + waiting)), return_inverse=True)
        changes = np.bincount(place[: len(waiting)], minlength=len(times))
        changes -= np.bincount(place[len(waiting) :], minlength=len(times))
        alive, kept = changes.cumsum()[:-1], changes[:-1] != 0
        kept[:1] = True
        starts = np.flatnonzero(kept)
        lasting = np.diff(np.append(times[:-1][starts], times[-1:]))
        return torch.from_numpy(alive[starts]), torch.from_numpy(lasting)


def _rows(lengths: Tensor, lanes: int | None) -> int:
    """The number of rows: what was asked for, or the default, but no more than there are sequences to run."""
    fix = f"pass an int of at least 1, or None for {DEFAULT_LANES}"
    rows = DEFAULT_LANES if lanes is None else check_whole("lanes", lanes, 1, fix)
    return min(rows, max(1, int(lengths.count_nonzero())))


def _assign(waiting: _Integers, rows: int) -> tuple[_Integers, int]:
    """Follow the rows through the run: when and in which row each sequence starts.

    A row that is free from time ``f`` on is written as one number, its slot ``f * rows + row``: the smallest slot
    is the row that takes the next sequence, the lowest of those that are free first.
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
            # Of several values for one row, the last is the one that stays: its latest.
            latest[taken % rows] = taken + width
            free = sorted(latest.tolist())
    return slots, max(free) // rows


def _earliest(free: _Integers, width: int, wanted: int) -> _Integers:
    """The first slots at which ``wanted`` sequences of one length start, all of them found at once.

    A row with the free slot ``s`` can take them at ``s``, ``s + width``, ``s + 2 * width`` ... Cut the slots into
    windows of ``width``, the first one starting at the smallest: from the window of its free slot on, a row has one
    slot in each, always at the same place. So to sort the rows by that place once is to sort all slots.
    """
    first_window, place = np.divmod(free - free.min(), width)
    by_place = np.argsort(place)
    first_window = first_window[by_place]
    # With w windows, the r rows of the smallest first windows have w * r - sum(those) slots, or fewer where one
    # of them has not begun; the best r is exact. So the smallest w that is enough for any r is enough.
    before = np.sort(first_window).cumsum()
    windows = int((-(-(wanted + before) // np.arange(1, free.shape[0] + 1))).min())
    window = np.arange(windows)[:, None]
    slots: _Integers = (free.min() + window * width + place[by_place])[window >= first_window]
    return slots[:wanted]
