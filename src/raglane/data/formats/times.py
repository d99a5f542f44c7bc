"""The column that orders the rows of a sequence: found, or refused where its entries say no time.

A column that is called like a time is taken for one. If it were passed over where an entry cannot be read, a model
would be trained on rows in whatever order they stand. Only a column of words (no digit in any entry) is not a time,
whatever its name. Where several columns are called like times, the first orders the rows, if the others do not
contradict it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import TIME_NAMES, columns_argument, data_error, named_column
from raglane.data.records import Columns
from raglane.errors import DataError, quote, require

__all__ = ["choose_time", "gaps_between", "read_times", "refuse_contradiction"]


def choose_time(
    path: Path, entries: Mapping[str, npt.NDArray[np.object_]], columns: Columns, free: Sequence[str]
) -> tuple[str | None, str]:
    """The time column: the one named, else one whose name says so; and the note that says so."""
    if columns.time is not None:
        return named_column(path, "time", columns.time, entries), f"time column: {quote(columns.time)}"
    why = ""
    for name in _called_times(columns, free):
        if _is_words(entries[name]):
            why = why or f"{quote(name)} holds words; "
            continue
        read_times(path, entries[name], name)
        return name, f"time column: {quote(name)} (by its name)"
    return None, f"no time column: {why}rows keep the order of the file; name one with {columns_argument('time')}"


def _called_times(columns: Columns, free: Sequence[str]) -> list[str]:
    """The columns whose name says time, and that are nothing else by name; the most telling name first."""
    taken = {columns.label, columns.id, *(columns.features or ())}
    return [name for known in TIME_NAMES for name in free if name.lower() == known and name not in taken]


def refuse_contradiction(
    path: Path,
    entries: Mapping[str, npt.NDArray[np.object_]],
    columns: Columns,
    time: str,
    same: npt.NDArray[np.bool_],
) -> None:
    """Raise where a second column of times would order the rows in another way, and nobody chose between the two."""
    if columns.time is not None:
        return
    for name in _called_times(columns, list(entries)):
        if name == time or _is_words(entries[name]):
            continue
        try:
            times = read_times(path, entries[name], name)
        except DataError:
            continue  # no time, so a feature or a label, which is looked at where they are
        if ((times[1:] < times[:-1]) & same).any():
            got = f"the columns {quote(time)} and {quote(name)}, which order the rows differently"
            fix = f"name the one that does with {columns_argument('time')}"
            raise data_error(path, got, "one column orders the rows", fix)


def _is_words(entries: npt.NDArray[np.object_]) -> bool:
    """Whether there is something in the entries, and no digit."""
    text = "\n".join(entries.tolist())
    return not text.isspace() and text != "" and re.search(r"\d", text) is None


def read_times(path: Path, entries: npt.NDArray[np.object_], name: str) -> npt.NDArray[Any]:
    """Times to sort by, int64 or float64: numbers, or else dates."""
    pandas = require("pandas", "data")
    series = pandas.Series(entries, dtype=object)
    # Whole numbers stay whole: a float holds no nanoseconds since 1970.
    numbers = pandas.to_numeric(series, errors="coerce").to_numpy()
    if numbers.dtype.kind in "iu" or np.isfinite(numbers).all():
        return np.asarray(numbers)
    dates = pandas.to_datetime(series, errors="coerce", format="ISO8601", utc=True)
    if dates.isna().any():
        bad = dates.isna().to_numpy() if dates.notna().any() else ~np.isfinite(numbers)
        row = int(bad.argmax())
        got = f"{quote(entries[row])} in data row {row}, column {quote(name)}"
        rule = "times are numbers, or dates such as 2024-01-31 or 2024-01-31T12:30:00"
        other = f"name another column with {columns_argument('time')}"
        fix = f"correct it, {other}, or remove this one where the rows are in order"
        raise data_error(path, got, rule, fix)
    return np.asarray(dates.astype("int64"))


def gaps_between(entries: npt.NDArray[np.object_]) -> npt.NDArray[np.float32]:
    """The time from each entry to the next, ``(rows,)``, 0 for the first: differences of numbers, or seconds of dates.

    Example:
        >>> gaps_between(np.array(["2024-01-01T00:00", "2024-01-01T00:01"], dtype=object)).tolist()
        [0.0, 60.0]
    """
    pandas = require("pandas", "data")
    series = pandas.Series(entries, dtype=object)
    numbers = pandas.to_numeric(series, errors="coerce")
    if np.isfinite(numbers.to_numpy(dtype=np.float64)).all():
        gaps = numbers.diff()
    else:
        gaps = pandas.to_datetime(series, format="ISO8601", utc=True).diff().dt.total_seconds()
    floats: npt.NDArray[np.float32] = gaps.fillna(0).to_numpy(dtype=np.float32)
    return floats
