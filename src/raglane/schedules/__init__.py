"""The schedules: one line each in :data:`SCHEDULES`.

A schedule is the order in which the elements of a batch are computed. All give the same outputs, final states and
gradients; they differ in cost alone.
"""

from __future__ import annotations

from raglane.schedules.base import Count, Each, Masked, Packed, Padded, Schedule, Table
from raglane.schedules.lanes import DEFAULT_LANES, Lanes

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
"""Every schedule by its name, simplest first. A new one is a class in a file beside this one, and one line here."""
