"""Turns a schedule's table into the indexes by which the reference kernel runs it.

They depend only on the lengths, so they are computed on the host, without a loop over sequences or
elements, and moved to the device in a few copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.schedules import Table
from raglane.segments import offsets_from_lengths, positions, reverse_index, segment_ids


class RowOrder(NamedTuple):
    """The order in which one direction reads the elements and stores their results."""

    element: Tensor  # ``(E,)``: the index of the element that is read; ``N``, one past the last, for padding
    position: Tensor  # ``(N,)``: the index, among the ``E``, at which each element is computed
    is_callers: bool  # both are ``0, 1, 2 ...``, so rows need not be moved


class Moment(NamedTuple):
    """One time of the run."""

    rows: int  # ``R``, the number of active rows
    begin: int  # the number of rows that begin a sequence
    # ``(R,)``: the source of each row's state. It indexes the rows of the previous time, followed
    # by the sequences that begin. None if no row moves: all ``R`` begin, or none begins and the
    # first ``R`` continue.
    source: Tensor | None
    real: Tensor | None  # ``(R, 1)``, True for rows of an existing element; None if all are
    ending: int  # the number of rows that compute the last element of their sequence
    ended: Tensor | None  # ``(ending,)``, those rows; None if they are all rows, or none


class Walk(NamedTuple):
    """A schedule's table as indexes on a device."""

    # One per time. A batch without elements has one without rows, so that its outputs depend on the
    # weights, whose gradients are then zeros instead of None.
    moments: list[Moment]
    orders: list[RowOrder]  # forward, reverse
    begin_order: Tensor  # the sequences in the order in which they begin
    # ``(B,)``: the index of each sequence in the order in which they end. That of an empty sequence
    # ``b`` is ``M + b`` if ``M`` end.
    final: Tensor
    has_empty: bool
    has_padding: bool


class _Host:
    """A table on the host, with facts about each of its ``E`` elements."""

    def __init__(self, table: Table, lengths: Tensor) -> None:
        self.table = table
        self.lengths = lengths
        self.offsets = offsets_from_lengths(lengths)
        self.total = int(lengths.sum())
        # The time of no rows that an empty batch still runs; see Walk.moments.
        self.time_offsets = (
            table.time_offsets if table.steps else torch.zeros(2, dtype=torch.int64, device="cpu")
        )
        self.times = self.time_offsets.shape[0] - 1
        self.time = segment_ids(self.time_offsets, table.elements)
        # The index of an element among the rows of its time; ``previous`` is that of the sequence's
        # previous step.
        self.local = torch.arange(table.elements, device="cpu") - self.time_offsets[self.time]
        self.begins = table.step == 0
        self.ends = table.step == lengths[table.sequence] - 1
        self.real = table.step < lengths[table.sequence]
        # The table's index of each (sequence, step), sequence after sequence.
        self._starts = offsets_from_lengths(
            torch.bincount(table.sequence, minlength=lengths.shape[0])
        )
        slot = self._starts[table.sequence] + table.step
        self._where = torch.empty_like(slot)
        self._where[slot] = torch.arange(table.elements, device="cpu")
        self.previous = self.local[self._where[(slot - 1).clamp(min=0)]]

    def position(self) -> Tensor:
        """Return the table's index of each existing element, ``(N,)``."""
        sequence = segment_ids(self.offsets, self.total)
        return self._where[self._starts[sequence] + positions(self.offsets, self.total)]

    def per_time(self, which: Tensor) -> Tensor:
        """Return how many elements of the mask ``(E,)`` are computed at each time, ``(S,)``."""
        return torch.bincount(self.time[which], minlength=self.times)


def walk(table: Table, lengths: Tensor, directions: int, device: torch.device) -> Walk:
    """Return the walk of a table that was made from ``lengths``, for 1 or 2 directions."""
    host = _Host(table, lengths)
    end_order = table.sequence[host.ends]
    ended = end_order.shape[0]
    final = ended + torch.arange(lengths.shape[0], device="cpu")
    final[end_order] = torch.arange(ended, device="cpu")
    begin_order, final = _move([table.sequence[host.begins], final], device)
    return Walk(
        _moments(host, device),
        _orders(host, directions, device),
        begin_order,
        final,
        has_empty=ended < lengths.shape[0],
        has_padding=table.elements > host.total,
    )


def _orders(host: _Host, directions: int, device: torch.device) -> list[RowOrder]:
    """Return the order of each direction; the reverse one reads each sequence from its end."""
    table = host.table
    total = host.total
    element = torch.where(host.real, host.offsets[table.sequence] + table.step, total)
    position = host.position()
    mirror = reverse_index(host.offsets, total)
    reverse = F.pad(mirror, (0, 1), value=total)[element], position[mirror]
    orders = [(element, position), reverse][:directions]
    moved = iter(_move([index for order in orders for index in order], device))
    callers = torch.arange(total, device="cpu")
    return [
        RowOrder(next(moved), next(moved), torch.equal(element, callers)) for element, _ in orders
    ]


def _moments(host: _Host, device: torch.device) -> list[Moment]:
    """Return all times of the run."""
    rows = host.time_offsets.diff()
    begin = host.per_time(host.begins)
    ending = host.per_time(host.ends)
    newcomer = host.begins.cumsum(0) - 1 - (begin.cumsum(0) - begin)[host.time]
    rows_before = F.pad(rows, (1, 0))[:-1]
    source = torch.where(host.begins, rows_before[host.time] + newcomer, host.previous)
    # Rows move if some but not all begin, or if none begins and some continue in another row.
    moves = (begin < rows) & ((begin > 0) | (host.per_time(source != host.local) > 0))
    leaves = (ending > 0) & (ending < rows)
    has_padding = host.per_time(~host.real) > 0
    padded_rows = host.real[has_padding[host.time]].long()
    moved = _move(
        [source[moves[host.time]], host.local[host.ends & leaves[host.time]], padded_rows], device
    )
    sources = iter(torch.split(moved[0], rows[moves].tolist()))
    ended = iter(torch.split(moved[1], ending[leaves].tolist()))
    real = iter(torch.split(moved[2].bool().view(-1, 1), rows[has_padding].tolist()))
    facts = torch.stack([rows, begin, moves, has_padding, ending, leaves], 1)
    return [
        Moment(
            row_count,
            begin_count,
            next(sources) if is_moving else None,
            next(real) if is_padded else None,
            ending_count,
            next(ended) if is_leaving else None,
        )
        for row_count, begin_count, is_moving, is_padded, ending_count, is_leaving in facts.tolist()
    ]


def _move(indexes: list[Tensor], device: torch.device) -> list[Tensor]:
    """Move indexes to the device in one copy."""
    if device.type == "cpu":
        return indexes
    return list(
        torch.split(
            torch.cat(indexes).to(device, non_blocking=True), [index.shape[0] for index in indexes]
        )
    )
