"""Rows of a CSV file, one per element, as records: order, features and labels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, quote, quote_all, require
from raglane.data import decimals
from raglane.data.decimals import Entries
from raglane.data.formats.arrow import labels_in, split_targets
from raglane.data.formats.base import (
    PERIOD_NAMES,
    ROLE_NAMES,
    TIME_NAMES,
    check_named,
    choose_column,
    columns_argument,
    data_error,
    empty_label,
    taken,
)
from raglane.data.formats.short_rows import check_ends
from raglane.data.formats.table import feature_columns
from raglane.data.records import (
    TIME_GAP,
    Columns,
    Feature,
    Records,
    Targets,
    as_float32,
    offsets_of,
    place_of,
)
from raglane.errors import DataError, UnfitColumnError
from raglane.tasks import TASKS

_Bools = npt.NDArray[np.bool_]

# Spellings of a missing number, in lower case; and of a missing id or label, which may be a word
# such as NA.
_MISSING = ("", "nan", "na", "n/a", "null", "none", "?")
_MISSING_WORDS = ("", "NaN")
# A soft hyphen, a space without width, a word joiner, and a byte order mark.
_INVISIBLE = "\u00ad\u200b\u2060\ufeff"
_is_invisible = re.compile(f"[{_INVISIBLE}]")
_has_space = re.compile(rf"[\s{_INVISIBLE}]").search
is_date = re.compile(r"(?:\d{4}-[01]\d-[0-3]\d|[0-3]\d\.[01]\d\.\d{4})(?:[T ]\d\d:.*)?").fullmatch


class _Table(NamedTuple):
    """The rows of a file, sorted by sequence."""

    path: Path
    entries: dict[str, Entries]
    # The number of each row in the file, from 0.
    rows: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    ids: tuple[str | int, ...]
    # The column that orders the rows of a sequence, and its numbers or dates.
    time: str | None
    times: npt.NDArray[Any]

    def place(self, row: int) -> str:
        """Return the description of a row."""
        return f"data row {self.rows[row]} (id {quote(self.ids[place_of(self.offsets, row)[0]])})"

    def check(
        self, wrong: _Bools, name: str, rule: str, fix: str, got: str = "{}", after: str = ""
    ) -> None:
        """Raise a DataError for the first wrong entry of a column; ``got`` is a format for it."""
        if wrong.any():
            row = int(wrong.argmax())
            entry = got.format(quote(self.entries[name][row]))
            got = f"{entry} in {self.place(row)}, column {quote(name)}{after}"
            raise data_error(self.path, got, f"a file with {rule}", fix)

    def constant(self, name: str) -> _Bools:
        """Return for each row whether its entry equals that of the first row of its sequence."""
        entries = self.entries[name]
        return np.asarray(
            entries == np.repeat(entries[self.offsets[:-1]], np.diff(self.offsets)), dtype=np.bool_
        )

    def words(self, name: str) -> Entries:
        """Return a column as texts."""
        return decimals.without_marks(self.entries[name])

    def numbers(self, name: str) -> tuple[npt.NDArray[np.float64], _Bools]:
        """Return a column as numbers, and which entries are words."""
        return numbers_in(self.entries[name])

    def label_columns(self, label: str) -> list[str]:
        """Return the columns of a label: the column of this name, or else its parts between
        commas.
        """
        return [label] if label in self.entries else [part.strip() for part in label.split(",")]


def records_of_rows(
    path: Path,
    entries: dict[str, Entries],
    columns: Columns,
    id_name: str,
    rows: npt.NDArray[np.int64] | None = None,
    is_tokens: bool | None = None,
) -> Records:
    """Make records of rows, which have the numbers ``rows`` in the file; their ``columns`` include
    the time column.
    """
    present = list(entries)
    rows = np.arange(len(entries[id_name])) if rows is None else rows
    check_ends(path, entries, rows)
    check_header_once(path, entries, rows)
    time, time_note = _choose_time(path, entries, columns, id_name)
    table = _grouped(path, entries, columns, id_name, time, rows)
    named, static = feature_columns(path, columns, present)
    free = [name for name in present if name not in (id_name, time, *static)]
    label, notes = _choose_label(table, columns, free)
    features = list(named)
    if not features:
        labels = [
            name
            for each in (label, columns.label)
            if each is not None
            for name in table.label_columns(each)
        ]
        features = [name for name in free if name not in labels]
        if not columns.wants_labels:
            features, left_out = _without_words(table, features)
            notes = (*notes, *left_out)
    values, channels, more, feature_notes = _features(table, features, columns, is_tokens)
    more = (*more, *(_static_feature(table, name, columns) for name in static))
    if columns.time_gaps:
        values, channels = _with_gaps(table, values, channels)
    classes, tags, targets = (None, None, None) if label is None else _labels(table, columns, label)
    words = tuple(feature.name for feature in more if not feature.is_numbers)
    if len(features) > 1 and values.dtype == object:
        words = (features[0], *words)
    used = replace(
        columns,
        label=label or columns.label,
        id=id_name,
        time=time,
        features=tuple(features),
        # A row is one token.
        split=None,
        categorical=tuple(dict.fromkeys((*(columns.categorical or ()), *words))) or None,
        label_split=None
        if targets is None or not targets.ordered
        else columns.label_split or "characters",
    )
    notes = (time_note, *notes, *feature_notes)
    return Records(
        values, table.offsets, table.ids, classes, tags, channels, path, notes, used, targets, more
    )


def check_header_once(
    path: Path, entries: Mapping[str, Entries], rows: Sequence[int] | npt.NDArray[np.int64]
) -> None:
    """Raise a DataError for a row that repeats the header, which happens if files were
    concatenated.
    """
    again = np.logical_and.reduce([entry == name for name, entry in entries.items()])
    if again.any():
        got = f"the header again in data row {rows[int(again.argmax())]}"
        raise data_error(path, got, "a file with one header", "remove the row")


def _grouped(
    path: Path,
    entries: dict[str, Entries],
    columns: Columns,
    id_name: str,
    time: str | None,
    rows: npt.NDArray[np.int64],
) -> _Table:
    """Sort rows by sequence, in the order of first appearance, and by time if there is a time
    column.
    """
    codes, ids = require("pandas", "data").factorize(entries[id_name])
    blank = np.isin(ids, _MISSING_WORDS)
    if blank.any():
        row = int((codes == int(blank.argmax())).argmax())
        got = f"the missing id {quote(entries[id_name][row])} in data row {rows[row]}, column {quote(id_name)}"
        raise data_error(path, got, "a file with an id in each row", "fill it, or remove the row")
    times = np.arange(len(rows)) if time is None else _times(path, entries[time], time, rows)
    order = np.lexsort((times, codes))
    offsets = offsets_of(np.bincount(codes, minlength=len(ids)))
    words = [str(word) for word in ids]
    _refuse_spaces(path, set(words), id_name)
    names: tuple[str | int, ...] = (
        tuple(map(int, words)) if all(map(is_plain, words)) else tuple(words)
    )
    sorted_entries = {name: entry[order] for name, entry in entries.items()}
    times = times[order]
    table = _Table(path, sorted_entries, rows[order], offsets, names, time, times)
    if time is not None:
        same = np.diff(codes[order]) == 0
        again = (times[1:] == times[:-1]) & same
        if again.any():
            row = int(again.argmax()) + 1
            got = f"the time {quote(table.entries[time][row])} again in {table.place(row)}"
            feature = f"if it is a feature, name it with {columns_argument('features')}"
            ids = f"if they are of several sequences, name their ids with {columns_argument('id')}"
            fix = f"remove one of the rows, or correct {quote(time)}; {ids}; {feature}"
            raise data_error(path, got, "a file with one row per time in a sequence", fix)
        if columns.time is None:
            _check_other_times(table, columns, same)
    return table


def _refuse_spaces(path: Path, words: set[str], name: str) -> None:
    """Raise a DataError for two words of a column that differ only by white space or invisible
    characters.
    """
    first = dict[str, str]()
    for word in sorted(filter(_has_space, words)):
        plain = " ".join(_is_invisible.sub("", word).split())
        other = plain if plain in words else first.setdefault(plain, word)
        if other != word:
            got = f"{quote(word)} and {quote(other)} in column {quote(name)}"
            rule = "a file whose ids and labels differ not only by white space"
            raise data_error(path, got, rule, "write them in one way")


def is_plain(word: str) -> bool:
    """Return True for the canonical decimal form of a whole number of at most 18 digits."""
    return word.isascii() and word.isdigit() and (word == "0" or word[0] != "0") and len(word) < 19


def numbers_in(entries: Entries) -> tuple[npt.NDArray[np.float64], _Bools]:
    """Return entries as numbers, NaN where missing, and which entries are neither."""
    entries = decimals.with_points(entries)
    text = "".join(entries.tolist())
    # Python accepts 1_5 and digits of other scripts; in a file they are damage.
    if text.isascii() and "_" not in text:
        with suppress(ValueError):
            return np.where(entries == "", "nan", entries).astype(np.float64), np.zeros(
                len(entries), dtype=np.bool_
            )
    # Words and other spellings of missing numbers are parsed more slowly, so each distinct entry is
    # parsed once.
    pandas = require("pandas", "data")
    codes, different = pandas.factorize(entries)
    numbers = np.asarray(pandas.to_numeric(different, errors="coerce"), dtype=np.float64)
    odd = np.isnan(numbers)
    odd[odd] = [word.strip().lower() not in _MISSING for word in different[odd].tolist()]
    return numbers[codes], odd[codes]


def _choose_label(
    table: _Table, columns: Columns, free: list[str]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the label column (None if the task has no label) and notes for the user."""
    path = table.path
    if not columns.wants_labels:
        return None, ()
    if columns.label is not None:
        for name in table.label_columns(columns.label):
            check_named(path, "label", name, table.entries)
        return columns.label, ()
    _refuse_empty_label(table, free)
    free = [name for name in free if name not in (columns.features or ())]
    if TASKS[columns.task].label == "numbers":
        fix = (
            f"name it with {columns_argument('label')}; several, as in 'x,y', are learned together"
        )
        rule = "a file with a named label column, because any column of numbers may be the label"
        raise UnfitColumnError(
            f"{path}", f"no label column named among {quote_all(table.entries)}", rule, fix
        )
    kind = "column of words, or of integers"
    candidates = free
    if columns.task == "classify":
        kind += ", the same in all rows of a sequence"
        candidates = [name for name in free if table.constant(name).all()]
    numbers = {name: table.numbers(name) for name in candidates}
    words = [name for name in candidates if numbers[name][1].any()]
    finite = [name for name in candidates if np.isfinite(numbers[name][0]).all()]
    integers = [name for name in finite if (np.rint(numbers[name][0]) == numbers[name][0]).all()]
    if columns.task == "classify" and not words:
        # Integers may be something else than the label, if a column with the name of one is nearly
        # a label.
        _check_almost_constant(
            table, [name for name in free if not integers or name.lower() in ROLE_NAMES["label"]]
        )
    label, note = choose_column(path, "label", words or integers, kind, table.entries)
    return label, (note,)


def _refuse_empty_label(table: _Table, names: list[str]) -> None:
    """Raise a DataError if all columns with the name of a label are empty, so that another column
    would be taken.
    """
    labels = [name for name in names if name.lower() in ROLE_NAMES["label"]]
    if labels and all(np.isin(table.entries[name], _MISSING_WORDS).all() for name in labels):
        raise empty_label(table.path, labels[0])


def _check_almost_constant(table: _Table, names: list[str]) -> None:
    """Raise a DataError for a column of words that has the name of a label, or is constant in most
    sequences.
    """
    count = len(table.ids)
    sequence = np.repeat(np.arange(count), np.diff(table.offsets))
    changing = {
        name: len(np.unique(sequence[~table.constant(name)]))
        for name in names
        if table.numbers(name)[1].any()
    }
    for name in sorted(changing, key=lambda name: changing[name])[:1]:
        if 2 * changing[name] <= count or name.lower() in ROLE_NAMES["label"]:
            _check_one_label(table, name)


def _check_one_label(table: _Table, name: str) -> None:
    """Raise a DataError for the first row whose label differs from that of its sequence."""
    differs = ~table.constant(name)
    if differs.any():
        row = int(differs.argmax())
        first = table.entries[name][table.offsets[place_of(table.offsets, row)[0]]]
        fix = f"correct it, or pass {columns_argument('task', 'tag')} for a label per row"
        rule = "one label in all rows of a sequence"
        after = f", after {quote(first)}"
        table.check(differs, name, rule, fix, "the label {}", after)


def _without_words(table: _Table, features: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Leave out columns of words, which may be unused labels, if there are columns of numbers."""
    words = [name for name in features if table.numbers(name)[1].any()]
    if not words or len(words) == len(features):
        return features, ()
    rest = [name for name in features if name not in words]
    return rest, (f"left out, because they are not numbers: {', '.join(words)}",)


def _features(
    table: _Table, names: list[str], columns: Columns, is_tokens: bool | None
) -> tuple[npt.NDArray[Any], tuple[str, ...], tuple[Feature, ...], tuple[str, ...]]:
    """Return values, ``(N, C)`` float32 or ``(N,)`` tokens, their channels, features of categories,
    and notes.
    """
    if not names:
        fix = f"add one, or name it with {columns_argument('features')}"
        raise data_error(
            table.path, "no feature column", "a file with at least one feature column", fix
        )
    numbers: dict[str, npt.NDArray[np.float32]] = {}
    words: list[str] = []
    for name in names:
        column, odd = table.numbers(name)
        if odd.any() and name not in (columns.categorical or ()):
            rule = (
                "decimal points, or with one decimal mark per column if the separator is no comma"
            )
            fix = "write points in all numbers, without marks of thousands; or commas, and semicolons between entries"
            fix += f"; without signs such as % and $; or name categories with {columns_argument('categorical')}"
            table.check(
                odd & decimals.have_other_marks(table.entries[name][odd].tolist()), name, rule, fix
            )
        has_words = _has_words(name, odd, columns, is_tokens is None)
        if len(names) == 1:
            has_words = (
                has_words or bool(odd.mean() >= 0.5 or columns.tokens)
                if is_tokens is None
                else is_tokens
            )
        if has_words:
            words.append(name)
        else:
            numbers[name] = _as_features(table, name, column, odd)
    if not numbers:
        first, *others = words
        values = table.words(first)
        channels = tuple[str, ...]()
        table.check(
            values == "",
            first,
            "a token in each row",
            "fill it, or remove the row",
            "the missing token {}",
        )
        notes = [f"the entries of {quote(first)} are taken as tokens"]
    else:
        values = np.stack(list(numbers.values()), axis=1)
        channels = tuple(numbers)
        others = words
        notes = [f"features: {', '.join(numbers)}"]
    if others:
        notes.append(f"features that are categories: {', '.join(others)}")
    return (
        values,
        channels,
        tuple(Feature(name, table.words(name)) for name in others),
        tuple(notes),
    )


def _has_words(name: str, odd: _Bools, columns: Columns, guess: bool = True) -> bool:
    """Return True if a column is named as categorical, or most of its entries are words."""
    return name in (columns.categorical or ()) or (guess and bool(odd.mean() > 0.5))


def _as_features(
    table: _Table, name: str, numbers: npt.NDArray[np.float64], odd: _Bools
) -> npt.NDArray[np.float32]:
    """Convert the numbers of a column; raise a DataError for the first word."""
    fix = f"correct it, name the features with {columns_argument('features')}"
    fix += f", or those that are categories with {columns_argument('categorical')}"
    table.check(odd, name, "a number, or a word in a column of words", fix)
    return as_float32(numbers)


def _static_feature(table: _Table, name: str, columns: Columns) -> Feature:
    """Read a column with one value per sequence, which is the same in all its rows."""
    rule = "the same in all rows of a sequence"
    fix = f"correct it, or pass the column as {columns_argument('features')}"
    table.check(~table.constant(name), name, rule, fix, after=", after another entry")
    numbers, odd = table.numbers(name)
    values = (
        table.words(name)
        if _has_words(name, odd, columns)
        else _as_features(table, name, numbers, odd)
    )
    return Feature(name, values[table.offsets[:-1]], per_sequence=True)


def _with_gaps(
    table: _Table, values: npt.NDArray[Any], channels: tuple[str, ...]
) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
    """Append the time since the previous element as a channel."""
    option = argument("time_gaps", value=True, of="Columns")
    if table.time is None:
        fix = f"name the column with {columns_argument('time')}"
        raise data_error(table.path, f"no time column for {option}", "data with a time column", fix)
    if values.dtype == object:
        raise data_error(
            table.path,
            f"tokens, and {option}",
            "a file of numbers, with this option",
            "leave it out",
        )
    gaps = np.diff(table.times, prepend=table.times[:1])
    gaps = (gaps / np.timedelta64(1, "s") if gaps.dtype.kind == "m" else gaps).astype(np.float32)
    gaps[table.offsets[:-1]] = 0
    return np.concatenate([values, gaps[:, None]], axis=1), (*channels, TIME_GAP)


def _labels(
    table: _Table, columns: Columns, label: str
) -> tuple[tuple[str, ...] | None, Entries | None, Targets | None]:
    """Return classes per sequence, classes per element, or targets; the others are None."""
    if TASKS[columns.task].label != "class":
        return None, None, _targets(table, columns, label)
    entries = table.words(label)
    fix = "fill it, or remove the row"
    table.check(
        np.isin(entries, _MISSING_WORDS), label, "a label in each row", fix, "the missing label {}"
    )
    _refuse_spaces(table.path, set(entries.tolist()), label)
    if columns.task == "tag":
        return None, entries, None
    _check_one_label(table, label)
    return tuple(entries[table.offsets[:-1]].tolist()), None, None


def _targets(table: _Table, columns: Columns, label: str) -> Targets:
    """Return a sequence of labels; or numbers or sets of labels, per sequence if constant in each,
    else per element.
    """
    if TASKS[columns.task].label == "sequence":
        _check_one_label(table, label)
        return split_targets(
            table.words(label)[table.offsets[:-1]].tolist(), columns.label_split or "characters"
        )
    names = table.label_columns(label)
    per_element = not all(table.constant(name).all() for name in names)
    rows = np.arange(int(table.offsets[-1])) if per_element else table.offsets[:-1]
    if TASKS[columns.task].label == "set":
        return Targets(labels_in(table.words(label)[rows].tolist()), per_element=per_element)
    values = np.empty((len(rows), len(names)), dtype=np.float64)
    for place, name in enumerate(names):
        numbers, odd = table.numbers(name)
        table.check(
            odd | ~np.isfinite(numbers), name, "a finite number", "correct it, or remove the row"
        )
        values[:, place] = numbers[rows]
    return Targets(values, per_element=per_element, names=tuple(names))


def _choose_time(
    path: Path, entries: Mapping[str, Entries], columns: Columns, id_name: str
) -> tuple[str | None, str]:
    """Return the named time column, or the first with a usual name, or None; and the note about
    it.
    """
    free = [name for name in entries if name != id_name]
    if columns.time is not None:
        return check_named(
            path, "time", columns.time, entries
        ), f"time column: {quote(columns.time)}"
    why = ""
    usual = _time_candidates(columns, free)
    others = [name for name in free if name not in (*usual, *taken(columns))]
    periods = [name for name in others if name.lower() in PERIOD_NAMES]
    dates = [name for name in others if all(map(is_date, entries[name]))]
    for name in (*usual, *periods, *(dates if len(dates) == 1 else ())):
        if name in usual and _is_words(entries[name]):
            why = why or f"{quote(name)} holds words; "
        elif name not in usual and len(
            set(zip(entries[id_name], entries[name], strict=True))
        ) < len(entries[name]):
            why = why or f"{quote(name)} has an entry twice in a sequence; "
        else:
            how = "by its name" if name in (*usual, *periods) else "the only one of dates"
            return name, f"time column: {quote(name)} ({how})"
    return (
        None,
        f"no time column: {why}rows keep the order of the file; name one with {columns_argument('time')}",
    )


def _time_candidates(columns: Columns, free: Sequence[str]) -> list[str]:
    """Return the columns with usual names of a time column, without those that were named
    otherwise.
    """
    return [
        name
        for usual in TIME_NAMES
        for name in free
        if name.lower() == usual and name not in taken(columns)
    ]


def _check_other_times(table: _Table, columns: Columns, same: _Bools) -> None:
    """Raise a DataError if another time column orders the rows differently; ``same`` marks rows of
    one sequence.
    """
    for name in _time_candidates(columns, list(table.entries)):
        if name == table.time or _is_words(table.entries[name]):
            continue
        try:
            times = _times(table.path, table.entries[name], name, table.rows)
        except DataError:
            continue  # A feature or a label, which is checked later.
        if ((times[1:] < times[:-1]) & same).any():
            got = f"the columns {quote(table.time)} and {quote(name)}, which order the rows differently"
            fix = f"name the right one with {columns_argument('time')}"
            raise data_error(table.path, got, "a file with one order of the rows", fix)


def _is_words(entries: Entries) -> bool:
    """Return True if there are non-empty entries, and none has a digit."""
    text = "\n".join(entries.tolist())
    return not text.isspace() and text != "" and re.search(r"\d", text) is None


def _times(
    path: Path, entries: Entries, name: str, rows: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Convert numbers, or dates to datetime64, to sort by; ``rows`` numbers the entries, for
    messages.
    """
    pandas = require("pandas", "data")
    series = pandas.Series(decimals.with_points(entries), dtype=object)
    # Whole numbers stay integers: float64 is not exact for nanoseconds since 1970.
    numbers = pandas.to_numeric(series, errors="coerce").to_numpy()
    if numbers.dtype.kind in "iu" or np.isfinite(numbers).all():
        return np.asarray(numbers)
    dates = _dates(series)
    if dates.isna().any():
        bad = dates.isna().to_numpy() if dates.notna().any() else ~np.isfinite(numbers)
        row = int(bad.argmax())
        got = f"{quote(entries[row])} in data row {rows[row]}, column {quote(name)}"
        rule = "a file with times that are numbers, or dates such as 2024-01-31T12:30:00, 2024-01, 2024 Q1 or 2024 Jan"
        other = f"name another column with {columns_argument('time')}"
        raise data_error(
            path, got, rule, f"correct it, {other}, or remove this one if the rows are in order"
        )
    has_zone = series.str.contains(r"\d[T ].*(?:[Zz]|[+-]\d\d:?(?:\d\d)?)$")
    if has_zone.nunique() > 1:
        got = f"{quote(entries[has_zone.argmax()])} and {quote(entries[has_zone.argmin()])} in column {quote(name)}"
        raise data_error(
            path,
            got,
            "a file whose times all have a zone, or none has",
            "add the zone, or remove it",
        )
    return np.asarray(dates.dt.tz_localize(None))


def _dates(series: Any) -> Any:
    """Return a ``pandas.Series`` of texts as dates: ISO 8601, 31.01.1970, 1970 Q1, or 1991 Jul."""
    pandas = require("pandas", "data")
    days = series.str.replace(r"^(\d\d)\.(\d\d)\.(\d{4})\b", r"\3-\2-\1", regex=True)
    months = days.str.replace(
        r"^(\d{4})\W?[Qq]([1-4])$",
        lambda found: f"{found[1]}-{3 * int(found[2]) - 2:02}",
        regex=True,
    )
    dates = pandas.to_datetime(months, errors="coerce", format="ISO8601", utc=True)
    return (
        pandas.to_datetime(series, errors="coerce", format="%Y %b", utc=True)
        if dates.isna().all()
        else dates
    )
