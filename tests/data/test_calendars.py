"""The times after a series follow its calendar."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pytest

from raglane.data.typed.calendars import following


def _dates(*texts: str) -> np.ndarray[Any, Any]:
    return np.array(texts, dtype="datetime64[s]")


@pytest.mark.parametrize(
    ("times", "after"),
    [
        # The last days of months, also those of a leap year.
        (("2024-01-31", "2024-02-29"), ("2024-03-31", "2024-04-30", "2024-05-31")),
        (("2023-12-31", "2024-01-31"), ("2024-02-29", "2024-03-31", "2024-04-30")),
        (("2023-11-30", "2023-12-31"), ("2024-01-31", "2024-02-29", "2024-03-31")),
        (("1999-12-31", "2000-12-31"), ("2001-12-31", "2002-12-31", "2003-12-31")),
        (("2024-03-31", "2024-06-30"), ("2024-09-30", "2024-12-31", "2025-03-31")),
        # A day of months, which shorter months do not have.
        (("2023-12-30", "2024-01-30"), ("2024-02-29", "2024-03-30", "2024-04-30")),
        (("2024-01-30", "2024-02-29", "2024-03-30"), ("2024-04-30", "2024-05-30", "2024-06-30")),
        (("2024-11-01", "2024-12-01"), ("2025-01-01", "2025-02-01", "2025-03-01")),
        (("2024-02-29", "2025-02-28"), ("2026-02-28", "2027-02-28", "2028-02-29")),
        # A month is missing, and a quarter.
        (("2024-05-31", "2024-06-30", "2024-08-31", "2024-09-30"), ("2024-10-31", "2024-11-30")),
        (("2023-10-01", "2024-01-01", "2024-07-01", "2024-10-01"), ("2025-01-01", "2025-04-01")),
        # Days, weeks and hours, over the end of a year.
        (("2024-12-29", "2024-12-30"), ("2024-12-31", "2025-01-01", "2025-01-02")),
        (("2024-12-16", "2024-12-23"), ("2024-12-30", "2025-01-06", "2025-01-13")),
        (("2024-01-31T22", "2024-01-31T23"), ("2024-02-01T00", "2024-02-01T01", "2024-02-01T02")),
        # A clock within the day of a month.
        (("2024-01-31T06:30", "2024-02-29T06:30"), ("2024-03-31T06:30", "2024-04-30T06:30")),
    ],
)
def test_the_next_dates(times: tuple[str, ...], after: tuple[str, ...]) -> None:
    expected = [datetime.fromisoformat(time) for time in after]
    assert following(_dates(*times), len(after)) == expected


def test_weekdays_are_followed_by_weekdays() -> None:
    days = np.arange("2024-05-01", "2024-05-18", dtype="datetime64[D]")
    after = following(days[np.is_busday(days)], 4)  # to Friday, the 17th
    assert [day.day for day in after] == [20, 21, 22, 23]
    # With a Saturday, all days count.
    assert [day.day for day in following(days, 3)] == [18, 19, 20]
    # A holiday is no weekend.
    some = np.delete(days[np.is_busday(days)], 6)
    assert [day.day for day in following(some, 2)] == [20, 21]


def test_numbers_and_series_without_a_step() -> None:
    assert following(np.array([3.0, 5.0, 7.0]), 2) == [9, 11]
    assert following(np.array([0.5, 1.0, 1.5]), 2) == [2.0, 2.5]
    assert following(np.array([2021, 2022]), 2) == [2023, 2024]
    # One gap does not change the step; without a usual one there is none.
    assert following(np.array([1, 2, 3, 9, 10]), 1) == [11]
    assert following(np.array([1.0, 2.0, 5.0, 11.0, 17.5]), 2) == [None, None]
    assert following(np.array([1.0]), 2) == [None, None]
    assert following(_dates("2024-01-31"), 1) == [None]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_the_unit_of_the_times_does_not_matter(unit: str) -> None:
    times = _dates("2024-01-31", "2024-02-29").astype(f"datetime64[{unit}]")
    assert following(times, 1) == [datetime(2024, 3, 31)]
