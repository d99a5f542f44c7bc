"""The times after the end of a series, which follow its calendar."""

from __future__ import annotations

from datetime import datetime, time
from typing import Any

import numpy as np
import numpy.typing as npt

# The fewest days of which weekends are told to be left out.
_FEWEST_DAYS = 6
_FRIDAY = 4
_Dates = npt.NDArray[np.datetime64]


def following(times: npt.NDArray[Any], count: int) -> list[Any]:
    """Return the next times of a series.

    Months, quarters and years are steps of the calendar: 29 February follows 31 January, and
    31 March follows it. Days from Monday to Friday are followed by such days. Other times are
    followed in the commonest step, if it is at least half of all.

    Args:
        times: ``(L,)`` numbers or datetime64, in ascending order.
        count: the number of times.

    Returns:
        ``count`` numbers or datetimes; None in their place if the series has no usual step.

    Example:
        >>> [f"{day:%d %b}" for day in following(np.array(["2024-01-31", "2024-02-29"], "M8[D]"), 2)]
        ['31 Mar', '30 Apr']
    """
    if len(times) < 2:
        return [None] * count
    if times.dtype.kind != "M":
        return _by_step(times, count)
    dates = times.astype("datetime64[us]")
    days = dates.astype("datetime64[D]")
    clocks = dates - days
    has_one_clock = bool((clocks == clocks[0]).all())
    if has_one_clock and (monthly := _by_month(days, count)) is not None:
        following_days = monthly
    elif has_one_clock and _are_weekdays(days):
        following_days = np.busday_offset(days[-1], np.arange(1, count + 1))
    else:
        return _by_step(dates, count)
    moved: list[datetime] = (following_days + clocks[0]).astype(object).tolist()
    return moved


def without_clock(series: list[list[Any]]) -> list[list[Any]]:
    """Return dates in place of datetimes, if all are at midnight."""
    midnight = time()
    times = [each for listed in series for each in listed if isinstance(each, datetime)]
    if not times or any(each.time() != midnight for each in times):
        return series
    return [[None if each is None else each.date() for each in listed] for listed in series]


def _by_step(times: npt.NDArray[Any], count: int) -> list[Any]:
    """Return times in the commonest step."""
    steps, counts = np.unique(np.diff(times), return_counts=True)
    most = int(counts.argmax())
    if 2 * counts[most] < len(times) - 1:
        return [None] * count
    after: npt.NDArray[Any] = times[-1] + steps[most] * np.arange(1, count + 1)
    if after.dtype.kind == "f" and (after == after.round()).all():
        return list(map(int, after.tolist()))
    return list(after.tolist())


def _by_month(days: _Dates, count: int) -> _Dates | None:
    """Return days that are a number of months apart, as at least half of the series are; None if
    they are not on one day of the month.
    """
    months = days.astype("datetime64[M]")
    steps, counts = np.unique(np.diff(months).astype(np.int64), return_counts=True)
    most = int(counts.argmax())
    if steps[0] < 1 or 2 * counts[most] < len(months) - 1:
        return None
    numbers = (days - months.astype("datetime64[D]")).astype(np.int64) + 1
    lasts = _lengths_of(months)
    day = 31 if (numbers == lasts).all() else int(numbers.max())
    if (numbers != np.minimum(day, lasts)).any():
        return None
    after = months[-1] + int(steps[most]) * np.arange(1, count + 1)
    added = np.minimum(day, _lengths_of(after)) - 1
    result: _Dates = after.astype("datetime64[D]") + added
    return result


def _lengths_of(months: _Dates) -> npt.NDArray[np.int64]:
    """Return the number of days of each month."""
    ends = (months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")
    lengths: npt.NDArray[np.int64] = ends.astype(np.int64)
    return lengths


def _are_weekdays(days: _Dates) -> bool:
    """Return True for daily dates without weekends."""
    if len(days) < _FEWEST_DAYS or not np.is_busday(days).all():
        return False
    steps = np.diff(days).astype(np.int64)
    # 1970-01-01 was a Thursday.
    is_friday = (days[:-1].astype(np.int64) + 3) % 7 == _FRIDAY
    is_next = np.where(is_friday, steps == 3, steps == 1)
    return bool(is_friday.any()) and 2 * int(is_next.sum()) >= len(steps)
