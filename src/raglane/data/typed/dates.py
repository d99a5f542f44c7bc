"""Dates and times in texts: which form a column has, told by the whole column.

ISO 8601, quarters (``2024 Q1``) and months (``1991 Jul``) need no format. Of dates such as
``31/01/2024`` the whole column tells whether the day or the month is first; if no number is above
12, the order is ambiguous, and a format must be named. With points the day is first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from raglane._utils.messages import require
from raglane.data.typed.arrays import Array, Entries, Integers

_CLOCK = r"(?P<hour>\d{1,2}):\d\d(?P<second>:\d\d)?(?P<fraction>[.,]\d{1,9})?"
_HALF = r"(?P<half>\s?[AaPp]\.?[Mm]\.?)?"
_ZONE = r"(?P<zone>\s?(?:Z|[+-]\d\d:?\d\d))?"
_TIME = rf"(?:(?P<gap>[T,]?\s*){_CLOCK}{_HALF}{_ZONE})?"
_iso = re.compile(r"\d{4}-[01]?\d(?:-[0-3]?\d)?(?:[T ]\d\d(?::?\d\d)?.*)?").fullmatch
_numeric = re.compile(
    rf"(?P<first>\d{{1,2}})(?P<mark>[./-])(?P<other>\d{{1,2}})(?P=mark)(?P<year>\d{{4}}|\d\d){_TIME}"
).fullmatch
_year_first = re.compile(
    rf"(?P<year>\d{{4}})(?P<mark>[./])(?P<first>\d{{1,2}})(?P=mark)(?P<other>\d{{1,2}}){_TIME}"
).fullmatch
_day_name = re.compile(
    rf"(?P<first>\d{{1,2}})(?P<mark>[ -/])(?P<month>[A-Za-z]{{3,9}})(?P=mark)(?P<year>\d{{4}}|\d\d){_TIME}"
).fullmatch
_name_day = re.compile(
    rf"(?P<month>[A-Za-z]{{3,9}})(?P<mark> )(?P<first>\d{{1,2}})(?P<comma>,?) (?P<year>\d{{4}}){_TIME}"
).fullmatch
# The tests of a date, and their formats; in the first the day or the month is first.
_FORMS = (
    (_numeric, "{}{mark}{}{mark}{year}"),
    (_year_first, "%Y{mark}%m{mark}%d"),
    (_day_name, "%d{mark}{month}{mark}{year}"),
    (_name_day, "{month}{mark}%d{comma} {year}"),
)
is_clock = re.compile(rf"{_CLOCK}{_HALF}").fullmatch
_has_zone = re.compile(r"\d[T ].*(?:[Zz]|[+-]\d\d:?(?:\d\d)?)$")
_period = re.compile(r"\d{4}\W?[Qq][1-4]|\d{4} [A-Z][a-z]{2}").fullmatch


@dataclass(frozen=True)
class Ambiguous:
    """A form of dates of which two readings are possible: the formats, and an example."""

    formats: tuple[str, str]
    example: str


@dataclass(frozen=True)
class Contradiction:
    """Entries of a column that contradict each other."""

    first: str
    other: str


def is_date(text: str) -> bool:
    """Return True for a date, with or without a time of day."""
    if (match := _numeric(text)) is not None:
        days = sorted((int(match["first"]), int(match["other"])))
        return 0 < days[0] <= 12 and days[1] <= 31
    return any(test(text) for test in (_iso, _year_first, _day_name, _name_day))


def format_of(entries: Entries) -> str | Ambiguous | Contradiction | None:
    """Return the ``strptime`` format of the dates in a column; None if they need none."""
    words = _present(entries)
    first = words[0] if words else ""
    matches = [(match, days) for test, days in _FORMS if (match := test(first)) is not None]
    if not matches:
        return None
    match, days = matches[0]
    parts = match.groupdict()
    names = {
        "mark": parts["mark"],
        "comma": parts.get("comma", ""),
        "year": "%Y" if len(parts["year"]) == 4 else "%y",
        "month": "%b" if len(parts.get("month") or "") == 3 else "%B",
    }
    clock = _clock_of(parts)
    if not days.startswith("{}"):
        return days.format(**names) + clock
    return _ordered(words, days, names, clock)


def _ordered(
    words: list[str], days: str, names: dict[str, str], clock: str
) -> str | Ambiguous | Contradiction:
    """Return the format of numeric dates, in which the day or the month is first."""
    day_first = days.format("%d", "%m", **names) + clock
    month_first = days.format("%m", "%d", **names) + clock
    matches = [match for match in map(_numeric, words) if match is not None]
    above = next((match[0] for match in matches if int(match["first"]) > 12), None)
    beneath = next((match[0] for match in matches if int(match["other"]) > 12), None)
    if above is not None and beneath is not None:
        return Contradiction(above, beneath)
    if above is not None or (beneath is None and names["mark"] == "."):
        return day_first
    if beneath is not None:
        return month_first
    return Ambiguous((day_first, month_first), words[0])


def _clock_of(parts: dict[str, Any]) -> str:
    """Return the format of a time of day after a date."""
    if parts["hour"] is None:
        return ""
    hours = "%H:%M" if not parts["half"] else "%I:%M"
    seconds = ":%S" if parts["second"] else ""
    fraction = f"{parts['fraction'][0]}%f" if parts["fraction"] else ""
    half = ""
    if parts["half"]:
        half = f"{' ' if parts['half'][0].isspace() else ''}%p"
    zone = ""
    if parts["zone"]:
        zone = f"{' ' if parts['zone'][0].isspace() else ''}%z"
    return f"{parts['gap']}{hours}{seconds}{fraction}{half}{zone}"


def parsed(entries: Entries, format: str | None) -> Any:
    """Return texts as a ``pandas.Series`` of dates in UTC, NaT for others."""
    pandas = require("pandas", "data")
    series = pandas.Series(entries, dtype=object).str.strip()
    if format is not None:
        return pandas.to_datetime(series, errors="coerce", format=format, utc=True)
    quarters = series.str.replace(
        r"^(\d{4})\W?[Qq]([1-4])$",
        lambda match: f"{match[1]}-{3 * int(match[2]) - 2:02}",
        regex=True,
    )
    dates = pandas.to_datetime(quarters, errors="coerce", format="ISO8601", utc=True)
    if dates.isna().all():
        return pandas.to_datetime(series, errors="coerce", format="%Y %b", utc=True)
    return dates


def zones_of(entries: Entries) -> tuple[str, str] | None:
    """Return a time with a zone and one without, if a column has both."""
    has_zone = np.array([_has_zone.search(word) is not None for word in entries.tolist()])
    if has_zone.all() or not has_zone.any():
        return None
    return str(entries[has_zone.argmax()]), str(entries[has_zone.argmin()])


def share_of_dates(entries: Entries) -> float:
    """Return the share of dates among the entries that are not missing; 0 without any."""
    words = _present(entries)
    return sum(map(is_date, words)) / max(len(words), 1)


def _present(entries: Entries) -> list[str]:
    stripped = (word.strip() for word in entries.tolist())
    return [word for word in stripped if word]


def gaps_in(times: Array, offsets: Integers) -> tuple[int, int, Any] | None:
    """Return the number of gaps in regular series, the row after the first, and the usual step.

    A series is regular if at least nine of ten steps are of one length, or of one number of months.
    None without a gap.
    """
    gaps = _gaps_between(np.diff(times), offsets)
    if gaps is not None or times.dtype.kind != "M":
        return gaps
    months = np.diff(times.astype("datetime64[M]"))
    # Several days of one month have no step.
    has_days = (np.delete(months, offsets[1:-1] - 1).astype(np.int64) < 1).any()
    return None if has_days else _gaps_between(months, offsets)


def _gaps_between(steps: Array, offsets: Integers) -> tuple[int, int, Any] | None:
    """Return the number of longer steps than the usual one, as :func:`gaps_in`."""
    inside = np.ones(len(steps), dtype=np.bool_)
    inside[offsets[1:-1] - 1] = False
    lengths = steps[inside]
    if len(lengths) < 10:
        return None
    values, counts = np.unique(lengths, return_counts=True)
    usual = values[counts.argmax()]
    if counts.max() < 0.9 * len(lengths) or counts.max() == len(lengths):
        return None
    is_gap = inside & (steps > usual)
    if not is_gap.any():
        return None
    return int(is_gap.sum()), int(is_gap.argmax()) + 1, usual
