"""The schedules: one line each in :data:`SCHEDULES`, and what each costs.

A schedule is the order in which the elements of a batch are computed. All give the same outputs, final states and
gradients; they differ in cost alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raglane._utils.checks import read_lengths
from raglane.schedules.base import DEFAULT_LANES, Count, Each, Lanes, Masked, Packed, Padded, Schedule, Table

__all__ = ["DEFAULT_LANES", "SCHEDULES", "Cost", "Count", "Schedule", "Table", "cost", "lengths_of"]

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (Each(), Padded(), Masked(), Packed(), Lanes())
}
"""Every schedule by its name, simplest first. A new one is a class in ``base.py``, and one entry here."""


@dataclass(frozen=True, repr=False)
class Cost:
    """The work of one schedule for a batch of lengths.

    Attributes:
        schedule: its name.
        steps: how many steps run one after the other, each on all rows that have one.
        elements: elements computed, padding included where the schedule computes it.
        waste: how many of them do not exist.
        multiplications: for the product of the batch of scalars with one weight column: one per element.
        additions: for the same product, which adds up each sequence: one less than multiplications for each
            sequence that computes anything. An empty sequence does so only where it is padded.

    Example:
        >>> Cost("packed", 9, 32, 0, 32, 26)
        Cost(packed: 9 steps, 32 elements of which 0 waste, 32 multiplications, 26 additions)
    """

    schedule: str
    steps: int
    elements: int
    waste: int
    multiplications: int
    additions: int

    def __repr__(self) -> str:
        return (
            f"Cost({self.schedule}: {self.steps:,} steps, {self.elements:,} elements of which {self.waste:,} waste, "
            f"{self.multiplications:,} multiplications, {self.additions:,} additions)"
        )


def cost(lengths: Any, *, lanes: int | None = None) -> dict[str, Cost]:
    """Count what each schedule would compute for sequences of these lengths.

    Nothing is run, and no schedule is built: the numbers come from sums over the lengths, so that millions of
    sequences take milliseconds. The steps of ``lanes`` alone must be followed through the run; that takes a sort of
    the lengths, and for each different length at most some 60 microseconds, however many sequences have it.

    Args:
        lengths: ``(B,)`` integers of at least 0: a list, a tuple, an array, or a tensor of any integer dtype on any
            device; or what has ``lengths``, such as a :class:`~raglane.Ragged`. From a GPU they are copied to the
            host, which waits for it.
        lanes: the number of rows of the schedule ``lanes``, at least 1; None for its default.

    Returns:
        A dict from the names of schedules to their ``Cost``: ``steps``, ``elements``, ``waste`` (computed elements
        that do not exist), ``multiplications`` and ``additions``.

    Raises:
        ArgumentTypeError: ``lengths`` or ``lanes`` are not integers.
        ShapeError: ``lengths`` has not exactly one dimension.
        ArgumentError: a length below 0, or ``lanes`` below 1.

    Example:
        >>> costs = cost([4, 6, 8, 5, 4, 3, 7, 8])
        >>> costs["padded"].elements, costs["packed"].elements
        (64, 45)
        >>> costs["padded"]
        Cost(padded: 8 steps, 64 elements of which 19 waste, 64 multiplications, 56 additions)
    """
    host = lengths_of(lengths)
    counts = {name: schedule.count(host, lanes) for name, schedule in SCHEDULES.items()}
    return {
        name: Cost(name, one.steps, one.elements, one.waste, one.elements, one.elements - one.sequences)
        for name, one in counts.items()
    }


def lengths_of(given: Any) -> Tensor:
    """The lengths of whatever has some, on the host."""
    # A Ragged keeps its lengths on the host too.
    known = getattr(given, "host_lengths", getattr(given, "lengths", given))
    return read_lengths(known)
