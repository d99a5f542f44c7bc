"""Which columns of which rows the operands of an operation are, and whether rows stay apart.

While a step is traced, a tensor is an int64 tensor of its shape, its *marks*: of each number, which row it belongs to
and which column of the graph it is. So torch itself does what moves numbers, views and their aliases included. The rows
are as many as :attr:`raglane.programs.trace.Tracer.rows`; all must be treated alike, and must not meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raglane.programs.graph import DEPENDS, Columns, Refused

__all__ = ["FREE", "SHIFT", "Aligned", "RowsMeet", "align", "free", "marks_of"]

SHIFT = 40
"""A mark is the row, shifted by so many bits, and the column."""
_MASK = (1 << SHIFT) - 1
FREE = 1 << 20
"""The row of a number that is the same for all rows."""


class RowsMeet(Refused):
    """Rows of the batch meet in an operation."""


def marks_of(columns: Columns, rows: int) -> Tensor:
    """The marks ``(rows, w)`` of columns that each row has for itself.

    Example:
        >>> marks_of(np.arange(2), 3).shape
        torch.Size([3, 2])
    """
    return torch.from_numpy((np.arange(rows)[:, None] << SHIFT) | np.asarray(columns)[None])


def free(columns: Columns) -> Tensor:
    """The marks ``(w,)`` of columns that all rows share."""
    return torch.from_numpy((FREE << SHIFT) | np.asarray(columns))


class Aligned:
    """Operands side by side: what one row sees of them.

    Attributes:
        columns: of each operand ``(K, n)``, what the first row has, followed by what belongs to no row.
        chosen: which of all entries these are.
    """

    def __init__(self, operands: Sequence[Columns], places: list[Columns], free_places: Columns, count: int) -> None:
        kept = free_places
        if len(free_places):
            # What all rows share is computed once, however often it was repeated.
            shared = np.concatenate([part[free_places] for part in operands], 1)
            _, first, self._which = np.unique(shared, axis=0, return_index=True, return_inverse=True)
            order = np.argsort(first)
            kept = free_places[first[order]]
            self._which = np.argsort(order)[self._which.reshape(-1)]
        self.chosen = np.concatenate([places[0], kept]) if places else kept
        self.columns = [part[self.chosen] & _MASK for part in operands]
        self._places, self._free, self._count = places, free_places, count

    def marks(self, results: Columns) -> Tensor:
        """The marks ``(count, n)`` of results ``(K, n)`` that were computed from the operands."""
        marks = np.empty((self._count, results.shape[1]), np.int64)
        own = len(self._places[0]) if self._places else 0
        for row, places in enumerate(self._places):
            marks[places] = (row << SHIFT) | results[:own]
        if len(self._free):
            marks[self._free] = (FREE << SHIFT) | results[own:][self._which]
        return torch.from_numpy(marks)


def align(operands: Sequence[Tensor], rows: int) -> Aligned:
    """Find what one row sees of operands.

    Args:
        operands: marks, ``(count, n)`` each: entry by entry, the numbers that are to meet in an operation.
        rows: how many rows there are.

    Example:
        >>> align([marks_of(np.arange(2), 3).reshape(-1, 1)], 3).columns[0].tolist()
        [[0], [1]]
    """
    arrays = [part.numpy() for part in operands]
    count = arrays[0].shape[0]
    owners = [part >> SHIFT for part in arrays]
    row = np.minimum.reduce([part.min(1) if part.shape[1] else np.full(count, FREE) for part in owners])
    if any(((part != row[:, None]) & (part != FREE)).any() for part in owners):
        raise RowsMeet("rows of the batch meet")
    free_places = np.flatnonzero(row == FREE)
    if len(free_places) == count:
        return Aligned(arrays, [], free_places, count)
    places = [np.flatnonzero(row == index) for index in range(rows)]
    for part in arrays:
        first = part[places[0]] & _MASK
        for others in places[1:]:
            if len(others) != len(places[0]) or not np.array_equal(part[others] & _MASK, first):
                raise Refused(f"it does not treat all rows of the batch alike, {DEPENDS}")
    return Aligned(arrays, places, free_places, count)
