"""The times of a column as numbers or ``datetime64``, and what to do with repeated ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from raglane._utils.messages import count_of, quote, require
from raglane.data.columns import option
from raglane.data.roles.rules import Refusal
from raglane.data.typed import dates, decimals
from raglane.data.typed.arrays import Array, Bools, Entries, Floats
from raglane.data.typed.column import Column
from raglane.data.typed.names import (
    NO_TIME,
)

_RULE = "a file with times that are numbers, or dates such as 2024-01-31T12:30:00, 2024-01, 2024 Q1 or 2024 Jan"


class UnreadTime(NamedTuple):
    """A row whose time cannot be read, and the refusal; ``row`` is None for the whole column."""

    refusal: Refusal
    row: int | None = None


def times_of(column: Column, name: str, format: str | None) -> Array | UnreadTime:
    """Return the times to sort rows by; ``format`` is that of ``strptime``, or None to guess it."""
    typed = column.times()
    if typed is not None:
        missing = np.isnat(typed)
        return _bad(column, name, missing) if missing.any() else typed
    numbers, odd = column.numbers()
    if format is None and not odd.any() and np.isfinite(numbers).all():
        return _exact(column, numbers)
    words = column.words()
    if format is None and dates.is_clock(next(iter(words.tolist()), "").strip()):
        rest = f"{option('time', NO_TIME)} if the rows are in order"
        both = f"name the dates too, as {option('time', f'Date,{name}')}"
        fix = f"{both}, or another column with {option('time')}, or pass {rest}"
        got = f"{quote(words[0])} in data row 0, column {quote(name)}, a time of day without a date"
        return UnreadTime(Refusal(got, _RULE, fix, {"time": NO_TIME}))
    form = format if format is not None else dates.format_of(words)
    if isinstance(form, dates.Ambiguous):
        day, month = form.formats
        got = (
            f"{quote(form.example)} in column {quote(name)}, whose days and months are all below 13"
        )
        fix = f"pass {option('time_format', day)} if the day is first, or {option('time_format', month)}"
        rule = "a file whose dates can be read in one way"
        return UnreadTime(Refusal(got, rule, fix, {"time_format": day}))
    if isinstance(form, dates.Contradiction):
        got = f"{quote(form.first)} and {quote(form.other)} in column {quote(name)}"
        fix = f"write them in one way, or pass {option('time', NO_TIME)} if the rows are in order"
        rule = "a file whose dates have one order of day and month"
        return UnreadTime(Refusal(got, rule, fix, {"time": NO_TIME}))
    series = dates.parsed(words, form)
    missing = series.isna().to_numpy()
    if missing.any():
        is_other = missing.all() and format is None
        return _bad(column, name, ~np.isfinite(numbers) if is_other else missing, format)
    zones = dates.zones_of(words)
    if zones is not None:
        got = f"{quote(zones[0])} and {quote(zones[1])} in column {quote(name)}"
        rule = "a file whose times all have a zone, or none has"
        return UnreadTime(Refusal(got, rule, "add the zone, or remove it"))
    return np.asarray(series.dt.tz_localize(None))


def _exact(column: Column, numbers: Floats) -> Array:
    """Return whole numbers as integers: float64 is not exact for nanoseconds since 1970."""
    if (np.abs(numbers) < 2**53).all():
        return numbers
    pandas = require("pandas", "data")
    series = pandas.Series(decimals.with_points(column.words()), dtype=object)
    return np.asarray(pandas.to_numeric(series, errors="coerce").to_numpy())


def _bad(column: Column, name: str, missing: Bools, format: str | None = None) -> UnreadTime:
    row = int(missing.argmax())
    got = f"{quote(column.text(row))} in data row {{row}}, column {quote(name)}"
    other = f"name another column with {option('time')}"
    rest = f"{option('time', NO_TIME)} if the rows are in order"
    rule = _RULE if format is None else f"a file with times of the form {format}"
    fix = f"correct it, {other}, or pass {rest}"
    return UnreadTime(Refusal(got, rule, fix, {"time": NO_TIME}), row)


def in_words(step: Any) -> str:
    """Return the length of a step between times for a note."""
    if not isinstance(step, np.timedelta64):
        return f"{step:g}"
    if np.datetime_data(step.dtype)[0] == "M":
        return count_of(int(step.astype(np.int64)), "month")
    seconds = step / np.timedelta64(1, "s")
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds % length == 0:
            return f"{seconds / length:g} {name}"
    return f"{seconds:g} s"


def joined_ids(columns: list[Entries]) -> Entries:
    """Return the ids of several columns as one, with a slash between their parts."""
    if len(columns) == 1:
        return columns[0]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return np.array(["/".join(map(str, row)) for row in rows], dtype=object)
