"""The rows of a CSV file that stand together by sequence: their features, and what is to be learned of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, quote, quote_all, require
from raglane.data.formats.arrow import labels_in
from raglane.data.formats.base import TIME_NAMES, choose_column, columns_argument, data_error, named_column
from raglane.data.records import TASKS, TIME_GAP, Columns, Feature, Targets, as_float32, offsets_of, place_of
from raglane.errors import DataError

# How a missing number is written.
_MISSING = ("", "nan", "na", "n/a", "null", "none", "?")


@dataclass(frozen=True)
class Table:
    """A file whose rows stand together by sequence."""

    path: Path
    entries: dict[str, npt.NDArray[np.object_]]
    rows: npt.NDArray[np.int64]
    """For each row here, its row in the file, from 0."""
    offsets: npt.NDArray[np.int64]
    ids: tuple[str | int, ...]
    time: str | None = None
    """The column that orders the rows."""

    def place(self, row: int) -> str:
        """A row in words."""
        return f"data row {self.rows[row]} (id {quote(self.ids[place_of(self.offsets, row)[0]])})"

    def refuse(
        self, wrong: npt.NDArray[np.bool_], name: str, rule: str, fix: str, got: str = "{}", after: str = ""
    ) -> None:
        """Raise for the first entry of a column that is wrong; ``got`` has room for it."""
        if wrong.any():
            row = int(wrong.argmax())
            entry = got.format(quote(self.entries[name][row]))
            raise data_error(self.path, f"{entry} in {self.place(row)}, column {quote(name)}{after}", rule, fix)

    def constant(self, name: str) -> npt.NDArray[np.bool_]:
        """For each row, whether the entry is that of the first row of its sequence."""
        entries = self.entries[name]
        first = np.repeat(entries[self.offsets[:-1]], np.diff(self.offsets))
        return np.asarray(entries == first, dtype=np.bool_)


def group(
    path: Path,
    entries: dict[str, npt.NDArray[np.object_]],
    columns: Columns,
    id_name: str,
    time: str | None,
    rows: npt.NDArray[np.int64] | None = None,
) -> Table:
    """Bring the rows of each sequence together, in the order of the time column if there is one."""
    pandas = require("pandas", "data")
    codes, ids = pandas.factorize(entries[id_name])
    rows = np.arange(len(codes)) if rows is None else rows
    blank = ids == ""
    if blank.any():
        row = int((codes == int(blank.argmax())).argmax())
        got = f"an empty entry in data row {rows[row]}, column {quote(id_name)}"
        raise data_error(path, got, "a file with an id in each row", "fill it, or remove the row")
    if time is None:
        order = np.argsort(codes, kind="stable")
    else:
        times = read_times(path, entries[time], time)
        order = np.lexsort((times, codes))
    offsets = offsets_of(np.bincount(codes, minlength=len(ids)))
    sorted_entries = {name: entry[order] for name, entry in entries.items()}
    table = Table(path, sorted_entries, rows[order], offsets, _as_ids(ids), time)
    if time is not None:
        sorted_times, sorted_codes = times[order], codes[order]
        again = (np.diff(sorted_times) == 0) & (np.diff(sorted_codes) == 0)
        if again.any():
            row = int(again.argmax()) + 1
            got = f"the time {quote(table.entries[time][row])} again in {table.place(row)}"
            feature = f"if it is a feature, declare it with {columns_argument('features')}"
            fix = f"remove one of the rows, or correct {quote(time)}; {feature}"
            raise data_error(path, got, "a file whose sequences have one row for each time", fix)
        refuse_contradiction(path, table.entries, columns, time, np.diff(sorted_codes) == 0)
    return table


def _as_ids(ids: Any) -> tuple[str | int, ...]:
    """Integers of 64 bits, if every id is written as one in the usual way; else strings."""
    words = [str(word) for word in ids]
    return tuple(map(int, words)) if all(map(is_plain, words)) else tuple(words)


def is_plain(word: str) -> bool:
    """Whether a word is a whole number of 64 bits, written in the usual way."""
    return word.isascii() and word.isdigit() and (word == "0" or word[0] != "0") and len(word) < 19


def numbers_in(entries: npt.NDArray[np.object_]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Cells as numbers, NaN where missing, and which of them are neither."""
    text = "".join(entries.tolist())
    # Python reads 1_5 as 15, and other scripts' digits as ours; in a file they are damage.
    if text.isascii() and "_" not in text:
        try:
            numbers = np.where(entries == "", "nan", entries).astype(np.float64)
        except ValueError:
            pass
        else:
            return numbers, np.zeros(len(entries), dtype=np.bool_)
    # Words, or missing numbers that are written in another way: slower, so each different entry is looked at once.
    pandas = require("pandas", "data")
    codes, different = pandas.factorize(entries)
    numbers = np.asarray(pandas.to_numeric(different, errors="coerce"), dtype=np.float64)
    odd = np.isnan(numbers)
    odd[odd] = [word.strip().lower() not in _MISSING for word in different[odd].tolist()]
    return numbers[codes], odd[codes]


def choose_label(table: Table, columns: Columns, free: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """The label column, if there is to be one, and the notes."""
    path = table.path
    if not columns.wants_labels:
        return None, ()
    if columns.label is not None:
        for name in label_columns(table, columns.label):
            named_column(path, "label", name, table.entries)
        return columns.label, ()
    candidates = [name for name in free if name not in (columns.features or ())]
    if TASKS[columns.task].label == "numbers":
        names = f"{columns_argument('label')}; several, as in 'x,y', are learned together"
        rule = "a file with a named label column, since any column of numbers could be it"
        raise data_error(path, f"no label column named among {quote_all(table.entries)}", rule, f"name it with {names}")
    kind = "column of words, or of integers"
    if columns.task == "classify":
        kind += ", the same in all rows of a sequence"
        candidates = [name for name in candidates if table.constant(name).all()]
    numbers = {name: numbers_in(table.entries[name]) for name in candidates}
    words = [name for name in candidates if numbers[name][1].any()]
    integers = [name for name in candidates if (np.mod(numbers[name][0], 1) == 0).all()]
    if columns.task == "classify" and not (words or integers):
        _refuse_almost(table, [name for name in free if name not in (columns.features or ())])
    label, note = choose_column(path, "label", words or integers, kind, table.entries)
    return label, (note,)


def _refuse_almost(table: Table, names: list[str]) -> None:
    """Raise for the column of words that is the same in most sequences, but not in all: the label, with a mistake."""
    count = len(table.ids)
    sequence = np.repeat(np.arange(count), np.diff(table.offsets))
    odd: dict[str, int] = {}
    for name in names:
        if numbers_in(table.entries[name])[1].any():
            odd[name] = len(np.unique(sequence[~table.constant(name)]))
    for name in sorted(odd, key=lambda name: odd[name])[:1]:
        if 2 * odd[name] <= count:
            _refuse_change(table, name)


def _refuse_change(table: Table, name: str) -> None:
    """Raise if a label changes within a sequence, naming the first row where it does."""
    same = table.constant(name)
    if same.all():
        return
    row = int((~same).argmax())
    first = table.entries[name][table.offsets[place_of(table.offsets, row)[0]]]
    fix = f"correct it, or pass {columns_argument('task', 'tag')} for a label per row"
    rule, after = "a file with one label per sequence", f", after {quote(first)}"
    table.refuse(~same, name, rule, fix, "the label {}", after)


def numbers_only(table: Table, features: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Without the columns of words, where there are numbers: one of them may be labels that nobody asked for."""
    words = [name for name in features if numbers_in(table.entries[name])[1].any()]
    if not words or len(words) == len(features):
        return features, ()
    rest = [name for name in features if name not in words]
    return rest, (f"left out, because they are not numbers: {', '.join(words)}",)


def features_of(
    table: Table, names: list[str], columns: Columns, is_tokens: bool | None
) -> tuple[npt.NDArray[Any], tuple[str, ...], tuple[Feature, ...], tuple[str, ...]]:
    """The values, ``(N, C)`` float32 or ``(N,)`` tokens; their channels; categories beside them; and the notes."""
    if not names:
        rule = "a file with at least one feature column"
        raise data_error(
            table.path, "no feature column", rule, f"add one, or name it with {columns_argument('features')}"
        )
    numbers: dict[str, npt.NDArray[np.float32]] = {}
    words: list[str] = []
    for name in names:
        found, odd = numbers_in(table.entries[name])
        has_words = _has_words(name, odd, columns, is_tokens is None)
        if len(names) == 1:
            has_words = has_words or bool(odd.mean() >= 0.5 or columns.tokens) if is_tokens is None else is_tokens
        if has_words:
            words.append(name)
        else:
            numbers[name] = _as_features(table, name, found, odd)
    if not numbers:
        first, *others = words
        values, channels = table.entries[first], tuple[str, ...]()
        notes = [f"the entries of {quote(first)} are taken as tokens"]
    else:
        values, channels, others = np.stack(list(numbers.values()), axis=1), tuple(numbers), words
        notes = [f"features: {', '.join(numbers)}"]
    if others:
        notes.append(f"features that are categories: {', '.join(others)}")
    return values, channels, tuple(Feature(name, table.entries[name]) for name in others), tuple(notes)


def _has_words(name: str, odd: npt.NDArray[np.bool_], columns: Columns, guess: bool = True) -> bool:
    """Whether a column holds words: a few among numbers are mistakes."""
    return name in (columns.categorical or ()) or (guess and bool(odd.mean() > 0.5))


def _as_features(
    table: Table, name: str, numbers: npt.NDArray[np.float64], odd: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """The numbers of a column as float32; raises for the first that is none."""
    fix = f"correct it, name the features with {columns_argument('features')}"
    fix += f", or those that are categories with {columns_argument('categorical')}"
    table.refuse(odd, name, "a file whose features are only numbers, or only words", fix)
    return as_float32(numbers)


def static_feature(table: Table, name: str, columns: Columns) -> Feature:
    """What each sequence has as a whole: the entry that is the same in all its rows."""
    rule = "a file whose features per sequence are the same in all rows of a sequence"
    fix = f"correct it, or read the column with {columns_argument('features')}"
    table.refuse(~table.constant(name), name, rule, fix, after=", after another entry")
    found, odd = numbers_in(table.entries[name])
    first = table.offsets[:-1]
    if _has_words(name, odd, columns):
        return Feature(name, table.entries[name][first], per_sequence=True)
    return Feature(name, _as_features(table, name, found, odd)[first], per_sequence=True)


def with_gaps(
    table: Table, values: npt.NDArray[Any], channels: tuple[str, ...]
) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
    """The features, and the time since the element before as one more."""
    rule = "a file of numbers with a time column, from which the time since the previous element is computed"
    if table.time is None:
        fix = f"name the column with {columns_argument('time')}"
        raise data_error(table.path, f"no time column for {argument('time_gaps', value=True, of='Columns')}", rule, fix)
    if values.dtype == object:
        got = f"tokens, and {argument('time_gaps', value=True, of='Columns')}"
        raise data_error(table.path, got, rule, "leave it out")
    gaps = gaps_between(table.entries[table.time])
    gaps[table.offsets[:-1]] = 0
    return np.concatenate([values, gaps[:, None]], axis=1), (*channels, TIME_GAP)


def labels_of(
    table: Table, columns: Columns, name: str
) -> tuple[tuple[str, ...] | None, npt.NDArray[np.object_] | None, Targets | None]:
    """The labels of the sequences or, for tagging, of the elements; or numbers or sets of labels of either."""
    if TASKS[columns.task].label != "class":
        return None, None, _targets(table, columns, name)
    entries = table.entries[name]
    table.refuse(entries == "", name, "a file with a label in each row", "fill it, or remove the row", "an empty entry")
    if columns.task == "tag":
        return None, entries, None
    _refuse_change(table, name)
    return tuple(entries[table.offsets[:-1]].tolist()), None, None


def label_columns(table: Table, label: str) -> list[str]:
    """The columns that a label names: one, or several between commas where there is none of the whole name."""
    return [label] if label in table.entries else [part.strip() for part in label.split(",")]


def _targets(table: Table, columns: Columns, label: str) -> Targets:
    """Numbers or sets of labels: per sequence where they are the same in all rows of each, else per element."""
    names = label_columns(table, label)
    per_element = not all(table.constant(name).all() for name in names)
    rows = np.arange(int(table.offsets[-1])) if per_element else table.offsets[:-1]
    if TASKS[columns.task].label == "set":
        sets = np.empty(len(rows), dtype=object)
        sets[:] = [labels_in(entry) for entry in table.entries[label][rows].tolist()]
        return Targets(sets, per_element=per_element)
    values = np.empty((len(rows), len(names)), dtype=np.float64)
    for place, name in enumerate(names):
        numbers, odd = numbers_in(table.entries[name])
        wrong = odd | ~np.isfinite(numbers)
        table.refuse(wrong, name, "a file with finite targets", "correct it, or remove the row")
        values[:, place] = numbers[rows]
    return Targets(values, per_element=per_element, names=tuple(names))


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
            fix = f"name the right one with {columns_argument('time')}"
            raise data_error(path, got, "a file with one column that orders the rows", fix)


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
        rule = "a file whose times are numbers, or dates such as 2024-01-31 or 2024-01-31T12:30:00"
        other = f"name another column with {columns_argument('time')}"
        fix = f"correct it, {other}, or remove this column if the rows are in order"
        raise data_error(path, got, rule, fix)
    return np.asarray(dates.astype("int64"))


def gaps_between(entries: npt.NDArray[np.object_]) -> npt.NDArray[np.float32]:
    """The time since the entry before, ``(rows,)``, 0 for the first: differences of numbers, or seconds of dates."""
    pandas = require("pandas", "data")
    series = pandas.Series(entries, dtype=object)
    numbers = pandas.to_numeric(series, errors="coerce")
    if np.isfinite(numbers.to_numpy(dtype=np.float64)).all():
        gaps = numbers.diff()
    else:
        gaps = pandas.to_datetime(series, format="ISO8601", utc=True).diff().dt.total_seconds()
    floats: npt.NDArray[np.float32] = gaps.fillna(0).to_numpy(dtype=np.float32)
    return floats
