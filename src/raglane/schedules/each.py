"""One sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane.schedules.base import Count, Schedule, Table, real_count
from raglane.segments import offsets_from_lengths, positions, segment_ids


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
