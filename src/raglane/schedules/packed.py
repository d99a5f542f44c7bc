"""The rows that still have a step, the longest sequence first."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane.schedules.base import Count, Schedule, Table, longest, longest_first, real_count
from raglane.segments import conjugate, offsets_from_lengths, positions, segment_ids


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
