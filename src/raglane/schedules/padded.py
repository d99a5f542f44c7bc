"""Every row up to the longest: padded, and masked."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane.schedules.base import Count, Schedule, Table, longest


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
