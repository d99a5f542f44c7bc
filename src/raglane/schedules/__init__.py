"""The table of schedules, :data:`SCHEDULES`, and their costs.

A schedule is the order in which the elements of a batch are computed. All schedules give the same outputs, final states
and gradients, at different costs.
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
"""All schedules by name, simplest first. A new one is a class in ``base.py`` and an entry here."""


@dataclass(frozen=True, repr=False)
class Cost:
    """The work of one schedule for a batch of lengths.

    Attributes:
        schedule: its name.
        steps: the number of sequential steps, each of which computes all active rows.
        elements: the number of computed elements, computed padding included.
        waste: the number of computed padding elements.
        multiplications: of the dot product of each sequence of scalars with a weight vector: one per element.
        additions: of these dot products: ``elements`` minus the number of sequences that compute an element. An empty
            sequence computes elements only if it is padded.

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
    """Count the work of each schedule for sequences of these lengths.

    The numbers are computed from sums over the lengths, so millions of sequences take milliseconds. Only ``lanes`` is
    simulated, which takes a sort of the lengths and at most about 60 microseconds per distinct length.

    Args:
        lengths: ``(B,)`` integers of at least 0: a list, a tuple, an array, or a tensor of any integer dtype on any
            device; or an object with ``lengths``, such as a :class:`~raglane.Ragged`. Lengths on a GPU are waited for.
        lanes: the number of rows of the schedule ``lanes``, at least 1; None for its default.

    Returns:
        A :class:`Cost` for each schedule, by its name, in the order of SCHEDULES.

    Raises:
        ArgumentTypeError: ``lengths`` or ``lanes`` are not integers.
        ShapeError: ``lengths`` does not have exactly one dimension.
        ArgumentError: a length is below 0, or ``lanes`` is below 1.

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


def lengths_of(source: Any) -> Tensor:
    """Return lengths, or those of a batch, on the CPU."""
    # A Ragged on a device has its lengths on the CPU too, as ``host_lengths``.
    return read_lengths(getattr(source, "host_lengths", getattr(source, "lengths", source)))
