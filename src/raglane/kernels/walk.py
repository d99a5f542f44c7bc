"""From a schedule's table to what a kernel in plain torch needs to walk it: a few indexes on the device.

Everything here depends on lengths alone, so it is worked out on the host, without a loop over sequences or
elements, and moves to the device in a few copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.schedules import Table
from raglane.segments import offsets_from_lengths, positions, reverse_index, segment_ids


@dataclass(frozen=True, eq=False)
class Order:
    """In which order one direction reads the elements, and where it leaves what it computes from them."""

    element: Tensor  # ``(E,)``: the element that is read; ``N``, one past the last, where padding is computed
    place: Tensor  # ``(N,)``: where among the ``E`` each element is computed
    is_callers: bool  # both are ``0, 1, 2 ...``, so that nothing need be moved


@dataclass(frozen=True, eq=False)
class Moment:
    """What happens at one time of the run."""

    rows: int  # ``R``, how many rows compute
    begin: int  # how many of them begin a sequence
    # ``(R,)``, what each row takes its state from: the row of the time before that it continues or, counted on from
    # that time's rows, the sequence that it begins. None where no row moves: either all ``R`` begin, or none, and the
    # first ``R`` go on.
    source: Tensor | None
    real: Tensor | None  # ``(R, 1)`` bool, which rows compute an element that exists; None where all do
    ending: int  # how many rows compute the last element of their sequence
    ended: Tensor | None  # ``(ending,)``, those rows; None where it is all rows, or none


@dataclass(frozen=True, eq=False)
class Walk:
    """A schedule's table, ready to be walked on a device; all its tensors are there."""

    # One per time; where the batch has no element, one of no rows, so that even then the outputs hang on the weights,
    # which get gradients of zero rather than none.
    moments: list[Moment]
    orders: list[Order]  # forward, reverse
    begin_order: Tensor  # the sequences in the order in which they begin
    # ``(B,)``: each sequence's place in the order in which they end or, for an empty one, its number, counted on from
    # the ``M`` that end.
    final: Tensor
    has_empty: bool
    has_padding: bool


class _Host:
    """What the parts of a walk are made from: one entry for each of the ``E`` elements computed, on the host."""

    def __init__(self, table: Table, lengths: Tensor) -> None:
        self.table, self.lengths = table, lengths
        self.offsets, self.total = offsets_from_lengths(lengths), int(lengths.sum())
        # The time of no rows that an empty batch still runs; see Walk.moments.
        self.time_offsets = table.time_offsets if table.steps else torch.zeros(2, dtype=torch.int64, device="cpu")
        self.times = self.time_offsets.shape[0] - 1
        self.time = segment_ids(self.time_offsets, table.elements)
        # The place of an element among the rows of its time; ``previous`` is that of its sequence's step before.
        self.local = torch.arange(table.elements, device="cpu") - self.time_offsets[self.time]
        self.begins = table.step == 0
        self.ends = table.step == lengths[table.sequence] - 1
        self.real = table.step < lengths[table.sequence]
        # Where each (sequence, step) stands in the table: sequence after sequence, step after step.
        self._starts = offsets_from_lengths(torch.bincount(table.sequence, minlength=lengths.shape[0]))
        slot = self._starts[table.sequence] + table.step
        self._where = torch.empty_like(slot)
        self._where[slot] = torch.arange(table.elements, device="cpu")
        self.previous = self.local[self._where[(slot - 1).clamp(min=0)]]

    def place(self) -> Tensor:
        """``(N,)``: where in the table each element that exists stands."""
        sequence = segment_ids(self.offsets, self.total)
        return self._where[self._starts[sequence] + positions(self.offsets, self.total)]

    def per_time(self, which: Tensor) -> Tensor:
        """``(S,)``: how many of the elements in ``which`` ``(E,)`` bool are computed at each time."""
        return torch.bincount(self.time[which], minlength=self.times)


def walk(table: Table, lengths: Tensor, directions: int, device: torch.device) -> Walk:
    """Prepare a table, made from ``lengths``, for its walk on a device; with 2 directions the reverse one as well."""
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


def _orders(host: _Host, directions: int, device: torch.device) -> list[Order]:
    """Each direction's order. The reverse one walks the same table over elements counted from each end."""
    table, total = host.table, host.total
    element = torch.where(host.real, host.offsets[table.sequence] + table.step, total)
    place = host.place()
    mirror = reverse_index(host.offsets, total)
    both = [(element, place), (F.pad(mirror, (0, 1), value=total)[element], place[mirror])][:directions]
    moved = iter(_move([index for pair in both for index in pair], device))
    callers = torch.arange(total, device="cpu")
    return [Order(next(moved), next(moved), torch.equal(element, callers)) for element, _ in both]


def _moments(host: _Host, device: torch.device) -> list[Moment]:
    """What happens at each time."""
    rows = host.time_offsets.diff()
    begin, ending = host.per_time(host.begins), host.per_time(host.ends)
    newcomer = host.begins.cumsum(0) - 1 - (begin.cumsum(0) - begin)[host.time]
    rows_before = F.pad(rows, (1, 0))[:-1]
    source = torch.where(host.begins, rows_before[host.time] + newcomer, host.previous)
    # Rows move where some but not all begin, and where none begins but some go on in another place.
    moves = (begin < rows) & ((begin > 0) | (host.per_time(source != host.local) > 0))
    leaves = (ending > 0) & (ending < rows)
    has_padding = host.per_time(~host.real) > 0

    moved = _move(
        [
            source[moves[host.time]],
            host.local[host.ends & leaves[host.time]],
            host.real[has_padding[host.time]].long(),
        ],
        device,
    )
    sources = iter(torch.split(moved[0], rows[moves].tolist()))
    ended = iter(torch.split(moved[1], ending[leaves].tolist()))
    real = iter(torch.split(moved[2].bool().view(-1, 1), rows[has_padding].tolist()))
    flags = zip(moves.tolist(), has_padding.tolist(), leaves.tolist(), strict=True)
    counts = zip(rows.tolist(), begin.tolist(), ending.tolist(), strict=True)
    return [
        Moment(
            row_count,
            begin_count,
            next(sources) if is_moving else None,
            next(real) if is_padded else None,
            ending_count,
            next(ended) if is_leaving else None,
        )
        for (row_count, begin_count, ending_count), (is_moving, is_padded, is_leaving) in zip(
            counts, flags, strict=True
        )
    ]


def _move(indexes: list[Tensor], device: torch.device) -> list[Tensor]:
    """Move several indexes to the device in one copy."""
    if device.type == "cpu":
        return indexes
    moved = torch.cat(indexes).to(device, non_blocking=True)
    return list(torch.split(moved, [index.shape[0] for index in indexes]))
