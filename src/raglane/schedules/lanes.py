"""A fixed number of rows, each of which takes the next sequence as soon as its own has ended."""

from __future__ import annotations

from heapq import heapreplace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import check_whole
from raglane.schedules.base import Count, Schedule, Table, longest_first, real_count
from raglane.segments import offsets_from_lengths, positions, segment_ids

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
        """As :meth:`Schedule.count`.

        The number of steps has no closed form: the rows are followed through the run. That costs a sort of the
        lengths, and for each different length at most some 60 microseconds, however many sequences have it.
        """
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
