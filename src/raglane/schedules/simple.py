"""The schedules whose rows follow from the lengths by arithmetic alone: each, padded, masked and packed."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane.schedules.base import Count, Schedule, Table, longest, longest_first, real_count
from raglane.segments import conjugate, offsets_from_lengths, positions, segment_ids


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
