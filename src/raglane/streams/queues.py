"""Queues of rows, one per slot, in one block of memory: their operations on many slots have no loop
in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane.kernels.cpu.prepared import as_array

Integers = npt.NDArray[np.int64]

_FIRST = 64  # rows of a new block


class RowQueues:
    """First-in, first-out queues of rows; the caller checks the arguments.

    The rows of a queue are a linked list. A *run* is a part of it in adjacent rows of memory, so
    that a long queue is read run by run.
    """

    def __init__(self, slots: int, width: int, dtype: torch.dtype) -> None:
        self.counts = np.zeros(slots, np.int64)
        self._first = np.zeros(slots, np.int64)
        self._last = np.zeros(slots, np.int64)
        self._free = np.empty(0, np.int64)
        self._left = 0  # the number of free rows, the first of ``_free``
        self._width = width
        self._dtype = dtype
        self._rows = self.empty(0)
        self._next = self._runs = np.empty(0, np.int64)
        self._grow(0)

    def __len__(self) -> int:
        """The number of rows in all queues."""
        return len(self._free) - self._left

    def append(self, slot: int, rows: npt.NDArray[Any]) -> None:
        """Add rows ``(n, width)`` to a queue, n at least 1; bfloat16 as int16."""
        if rows.shape[0] == 1:
            self._append_one(slot, rows)
            return
        indexes = self._taken(rows.shape[0])
        self._memory[indexes] = rows
        self._link(indexes, np.zeros(1, np.int64))
        if self.counts[slot]:
            self._next[self._last[slot]] = indexes[0]
        else:
            self._first[slot] = indexes[0]
        self._last[slot] = indexes[-1]
        self.counts[slot] += rows.shape[0]

    def _append_one(self, slot: int, rows: npt.NDArray[Any]) -> None:
        if not self._left:
            self._grow(1)
        self._left -= 1
        row = self._free.item(self._left)  # item needs half the time of an index
        self._memory[row] = rows
        self._runs[row] = 1
        queued = self.counts.item(slot)
        if queued:
            self._next[self._last.item(slot)] = row
        else:
            self._first[slot] = row
        self._last[slot] = row
        self.counts[slot] = queued + 1

    def extend(self, slots: Integers, lengths: Integers | int, rows: Tensor) -> None:
        """Add ``lengths`` rows, each at least 1 (an int is 1), to each of different queues."""
        indexes = self._taken(rows.shape[0])
        self._rows.index_copy_(0, torch.from_numpy(indexes), rows)
        if isinstance(lengths, int):
            begins = ends = indexes
            self._runs[indexes] = 1
        else:
            stops = lengths.cumsum()
            starts = stops - lengths
            self._link(indexes, starts)
            begins = indexes[starts]
            ends = indexes[stops - 1]
        is_filled = self.counts[slots] > 0
        self._next[self._last[slots[is_filled]]] = begins[is_filled]
        self._first[slots[~is_filled]] = begins[~is_filled]
        self._last[slots] = ends
        self.counts[slots] += lengths

    def pop(self, slot: int) -> npt.NDArray[Any]:
        """Remove the first row of a queue; return a view, valid until rows are added. bfloat16 is
        int16.
        """
        row = self._first.item(slot)
        runs = self._runs.item(row)
        if runs > 1:
            self._runs[row + 1] = runs - 1
            self._first[slot] = row + 1
        else:
            self._first[slot] = self._next.item(row)
        self.counts[slot] -= 1
        self._free[self._left] = row
        self._left += 1
        return self._memory[row]

    def take(self, slots: Integers, lengths: Integers | int, to: Tensor) -> None:
        """Move the first ``lengths`` rows, each at least 1 (an int is 1), of different queues to
        ``to``, in order.
        """
        indexes = self._first[slots]
        if isinstance(lengths, int):
            runs = self._runs[indexes]
            after = self._next[indexes]
            if (longer := runs > 1).any():
                after[longer] = indexes[longer] + 1
                self._runs[after[longer]] = runs[longer] - 1
            self._first[slots] = after
        else:
            indexes = self._walked(slots, indexes, lengths)
        self.counts[slots] -= lengths
        torch.index_select(self._rows, 0, torch.from_numpy(indexes), out=to)
        self._release(indexes)

    def take_one(self, slot: int, count: int) -> Tensor:
        """Remove the first rows of a queue."""
        if count == 1 and self._dtype is not torch.bfloat16:
            return torch.from_numpy(self.pop(slot)[None].copy())
        rows = self.empty(count)
        if count:
            self.take(np.array([slot]), np.array([count]), rows)
        return rows

    def empty(self, count: int) -> Tensor:
        """Return memory for rows."""
        return torch.empty(count, self._width, dtype=self._dtype, device="cpu")

    def drop(self, slot: int) -> int:
        """Empty a queue; return the number of its rows."""
        count = int(self.counts[slot])
        if count == 1:
            self.pop(slot)
        elif count:
            slots = np.array([slot])
            self._release(self._walked(slots, self._first[slots], self.counts[slots]))
            self.counts[slot] = 0
        return count

    # Memory.

    def _taken(self, count: int) -> Integers:
        """Return indexes of rows that are now in use, in ascending order."""
        if count > self._left:
            self._grow(count)
        self._left -= count
        return np.sort(self._free[self._left : self._left + count])

    def _release(self, indexes: Integers) -> None:
        self._free[self._left : self._left + len(indexes)] = indexes
        self._left += len(indexes)

    def _grow(self, count: int) -> None:
        """Make room for ``count`` rows more."""
        before = len(self._free)
        size = max(_FIRST, 2 * before, before + count)
        rows = self.empty(size)
        rows[:before] = self._rows
        self._rows = rows
        self._memory = as_array(rows)
        self._next, self._runs = (
            np.append(array, np.zeros(size - before, np.int64))
            for array in (self._next, self._runs)
        )
        free = self._free[: self._left]
        self._free = np.empty(size, np.int64)
        # Low indexes are used first.
        self._free[: size - before] = np.arange(size - 1, before - 1, -1)
        self._free[size - before : size - before + len(free)] = free
        self._left += size - before

    # Lists.

    def _link(self, indexes: Integers, starts: Integers) -> None:
        """Link rows at adjacent indexes; lists begin at the positions ``starts``."""
        self._next[indexes[:-1]] = indexes[1:]
        begins = np.ones(len(indexes), bool)
        begins[1:] = np.diff(indexes) != 1
        begins[starts] = True
        where = np.flatnonzero(begins)
        self._runs[indexes[where]] = np.diff(where, append=len(indexes))

    def _walked(self, slots: Integers, current: Integers, lengths: Integers) -> Integers:
        """Return the indexes of the first ``lengths`` rows of queues, which then begin after
        them.
        """
        stops = lengths.cumsum()
        rows = np.empty(int(stops[-1]), np.int64)
        at = stops - lengths
        active = np.arange(len(slots))
        while len(active):
            first = current[active]
            begin = at[active]
            whole = self._runs[first]
            steps = np.minimum(whole, stops[active] - begin)
            within = np.arange(int(steps.sum())) - np.repeat(steps.cumsum() - steps, steps)
            rows[np.repeat(begin, steps) + within] = np.repeat(first, steps) + within
            is_cut = steps < whole
            after = first + steps
            self._runs[after[is_cut]] = (whole - steps)[is_cut]
            after[~is_cut] = self._next[after[~is_cut] - 1]
            current[active] = after
            at[active] = begin + steps
            active = active[at[active] < stops[active]]
        self._first[slots] = current
        return rows
