"""The schedules: a file for each (padded and masked share one), and one line each in :data:`SCHEDULES`.

A schedule is the order in which the elements of a batch are computed. All give the same outputs, final states and
gradients; they differ in cost alone.
"""

from __future__ import annotations

from raglane.schedules.base import Count, Schedule, Table
from raglane.schedules.each import Each
from raglane.schedules.lanes import DEFAULT_LANES, Lanes
from raglane.schedules.packed import Packed
from raglane.schedules.padded import Masked, Padded

__all__ = ["DEFAULT_LANES", "SCHEDULES", "Count", "Schedule", "Table"]

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Each(),
        Padded(),
        Masked(),
        Packed(),
        Lanes(),
    )
}
"""Every schedule by its name, simplest first. A new one is one file beside this one, and one line here."""
