"""Columns that are the steps of a row, each row being a sequence.

Their names are numbered (``t0``, ``t1``, ...), or dates. Names of several prefixes with the same
numbers, such as ``x0``, ``y0``, ``x1``, ``y1``, are channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raglane._utils.messages import quote_all
from raglane.data.columns import Columns
from raglane.data.roles.facts import Facts
from raglane.data.roles.rules import parts_of
from raglane.data.typed import dates
from raglane.data.typed.column import written
from raglane.data.typed.names import (
    ROLE_NAMES,
    TIME_NAMES,
)

# A column that may be a step: a prefix and a number.
NUMBERED = re.compile(r"(.*?)(\d{1,6})")

# The least number of steps that are guessed.
_LEAST = 3


class StepName(NamedTuple):
    """The name of a column that may be a step, and its parts."""

    prefix: str
    number: int
    name: str


@dataclass(frozen=True)
class StepColumns:
    """The columns of the steps, in order: one tuple per channel, and the names of the channels.

    ``are_numbered`` tells whether other data may have more steps or fewer.
    """

    columns: tuple[tuple[str, ...], ...] = ()
    channels: tuple[str, ...] = ()
    are_numbered: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return tuple(name for channel in self.columns for name in channel)

    @property
    def span(self) -> str:
        """The first and the last column, for notes."""
        return f"{self.columns[0][0]} to {self.columns[-1][-1]}"


NO_STEPS = StepColumns()


def steps_of(facts: Facts, columns: Columns, ids: Sequence[str]) -> StepColumns:
    """Return the columns that are the steps of rows, if each row is a sequence; else none."""
    named = list(columns.features or ()) if columns.wide else []
    if named:
        return _named_steps(facts, named)
    if not columns.wide and _has_other_roles(facts, columns):
        return NO_STEPS
    free = _free(facts, columns, ids)
    numbered = _numbered(facts, free, is_named=columns.wide)
    if numbered.columns and (columns.wide or _may_be_rows(facts, columns, ids, numbered)):
        return numbered
    days = _dated(free)
    if days.columns and not _numberless(facts, days.names):
        return days
    numbers = tuple(name for name in free if not _numberless(facts, [name]))
    return StepColumns((numbers,), ("",)) if numbers and columns.wide else NO_STEPS


def _free(facts: Facts, columns: Columns, ids: Sequence[str]) -> list[str]:
    """Return the columns without another role."""
    times = parts_of(columns.time, facts) if columns.time is not None else ()
    roles = {*ids, columns.label, *times, *(columns.static or ())}
    labels = ROLE_NAMES["label"]
    return [name for name in facts if name not in roles and name.lower() not in labels]


def _numberless(facts: Facts, names: Iterable[str]) -> bool:
    """Return True if an entry of the columns is a word."""
    return any(facts.share_of_words(name) > 0 for name in names)


def unused_steps(facts: Facts, columns: Columns) -> StepColumns:
    """Return the columns that would be steps with ``wide``, of a series whose columns they are."""
    if columns.features or columns.task != "forecast":
        return NO_STEPS
    return _numbered(facts, _free(facts, columns, ()), is_named=False)


def row_id(facts: Facts, columns: Columns, steps: StepColumns) -> str | None:
    """Return the column with a name per row, if it is the only one of words before the steps."""
    first = facts.names.index(steps.columns[0][0])
    words = [
        name
        for name in facts.names[:first]
        if facts.share_of_words(name) > 0.5 and name != columns.label
    ]
    return words[0] if len(words) == 1 and facts.is_unique(words[0]) else None


def _has_other_roles(facts: Facts, columns: Columns) -> bool:
    has_times = any(name.lower() in TIME_NAMES for name in facts)
    return bool(columns.features or columns.sequence or columns.time or has_times)


def _may_be_rows(facts: Facts, columns: Columns, ids: Sequence[str], steps: StepColumns) -> bool:
    """Return True if each row may be a sequence: it has an id of its own, or a label."""
    if ids:
        return facts.is_unique(*ids)
    return columns.task != "forecast" or row_id(facts, columns, steps) is not None


def _step_names(names: Sequence[str]) -> list[StepName]:
    matches = ((NUMBERED.fullmatch(name), name) for name in names)
    return sorted(StepName(match[1], int(match[2]), name) for match, name in matches if match)


def _named_steps(facts: Facts, named: list[str]) -> StepColumns:
    """Return the steps that were named: all of them, or the first of each channel."""
    starts = [NUMBERED.fullmatch(name) for name in named]
    firsts = [start for start in starts if start is not None]
    prefixes = [start[1] for start in firsts]
    if len(firsts) < len(named) or len(set(prefixes)) < len(named):
        return StepColumns((tuple(named),), ("",))
    numbered = _step_names(facts.names)
    last = max((step.number for step in numbered if step.prefix in prefixes), default=-1)
    channels = []
    for start in firsts:
        later = {step.number: step.name for step in numbered if step.prefix == start[1]}
        digits = len(start[2])
        # Other data may have more steps, or fewer.
        numbers = range(int(start[2]), last + 1)
        names = tuple(later.get(number, f"{start[1]}{number:0{digits}}") for number in numbers)
        channels.append(names or (start[0],))
    labels = tuple(prefixes) if len(prefixes) > 1 else ("",)
    return StepColumns(tuple(channels), labels, are_numbered=True)


def _numbered(facts: Facts, free: Sequence[str], *, is_named: bool) -> StepColumns:
    """Return columns with the same numbers, without a gap, for each prefix."""
    candidates = _step_names(free)
    if len(candidates) < _LEAST:
        return NO_STEPS
    # A step with a word by mistake is refused later.
    numbers = [step for step in candidates if facts.share_of_words(step.name) <= 0.5]
    if not is_named and _numberless(facts, (step.name for step in numbers)):
        return NO_STEPS
    by_prefix: dict[str, list[StepName]] = {}
    for step in numbers:
        by_prefix.setdefault(step.prefix, []).append(step)
    first = numbers[0].number if numbers else 0
    count = len(numbers) // max(len(by_prefix), 1)
    expected = list(range(first, first + count))
    is_regular = all([step.number for step in each] == expected for each in by_prefix.values())
    if not is_regular or count < _LEAST:
        return NO_STEPS
    # The channels are in the order of the file.
    prefixes = sorted(by_prefix, key=lambda prefix: facts.names.index(by_prefix[prefix][0].name))
    names = tuple(tuple(step.name for step in by_prefix[prefix]) for prefix in prefixes)
    return StepColumns(names, tuple(prefixes) if len(prefixes) > 1 else ("",), are_numbered=True)


def _dated(free: Sequence[str]) -> StepColumns:
    """Return columns whose names are dates, in the order of the dates."""
    days = {name: _day_of(name) for name in free if dates.is_date(_day_of(name))}
    names = tuple(days)
    if len(names) < _LEAST:
        return NO_STEPS
    column = written(list(days.values()))
    form = dates.format_of(column.entries)
    if isinstance(form, (dates.Ambiguous, dates.Contradiction)):
        # The columns are in the order of the file.
        return StepColumns((names,), ("",))
    times = dates.parsed(column.entries, form)
    order = np.argsort(times.to_numpy(), kind="stable")
    return StepColumns((tuple(names[index] for index in order.tolist()),), ("",))


def _day_of(name: str) -> str:
    """Return a name as a date; R writes X2015.07.25."""
    return name[1:].replace(".", "-") if name.startswith("X") else name


def described(steps: StepColumns) -> str:
    """Return the note about the columns that are steps."""
    if len(steps.columns) == 1:
        return f"each row is a sequence, whose steps are the columns {steps.span}"
    count = len(steps.columns[0])
    return (
        f"each row is a sequence of {count} steps of the {len(steps.channels)} channels "
        f"{quote_all(steps.channels)}, in the columns {steps.span}"
    )
