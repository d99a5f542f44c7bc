"""CSV in long form: one row per element, and a column that says to which sequence it belongs.

Sequences come in the order in which their ids first appear, and the rows of one in the order of the time column, or of
the file where there is none. Feature columns hold numbers (an empty entry, ``NaN`` or ``NA`` is missing), or there is
one feature column, at least half of it words: tokens.

Where no column is named, the id and the time column go by their names (``id``, ``sequence_id``, ...; ``time``,
``step``, ``t``, ..., unless its entries are words), and the label column is the only column of words (of integers, if
there is none) that, to classify, is the same in all rows of a sequence; every other column is a feature. A column
without a name, such as the row numbers that pandas writes first, is left out.

A file without an id column, but with a column called ``text`` (``sentence``, ...), or with one named as the sequence,
has a text per row instead.

Ids are integers where all are written as such in at most 18 digits, else texts. A feature that float32 cannot hold,
such as 1e999, is infinite, and so is missing.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import (
    ID_NAMES,
    choose_column,
    columns_argument,
    count_of,
    data_error,
    decode,
    id_column,
    named_column,
    read_bytes,
)
from raglane.data.formats.labels import labels_in
from raglane.data.formats.table import choose, records_of
from raglane.data.formats.times import choose_time, gaps_between, read_times, refuse_contradiction
from raglane.data.records import Columns, Records, offsets_of
from raglane.data.targets import TASKS, Targets
from raglane.errors import argument, quote, quote_all, require

__all__ = [
    "header_of",
    "id_name_of",
    "is_plain",
    "parsed",
    "read",
    "read_entries",
    "records_of_entries",
    "repeats_ids",
    "text_column",
]

_ID_NAMES = (*ID_NAMES, "sequence", "series", "case")

# A column of one of these names holds texts, where no column says which rows belong together.
_TEXTS = ("text", "sentence", "document", "question", "review")

# How a missing number is written.
_MISSING = ("", "nan", "na", "n/a", "null", "none", "?")


@dataclass(frozen=True)
class _Table:
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
        sequence = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return f"data row {self.rows[row]} (id {quote(self.ids[sequence])})"

    def constant(self, name: str) -> npt.NDArray[np.bool_]:
        """For each row, whether the entry is that of the first row of its sequence."""
        entries = self.entries[name]
        first = np.repeat(entries[self.offsets[:-1]], np.diff(self.offsets))
        return np.asarray(entries == first, dtype=np.bool_)


def read(path: Path, columns: Columns) -> Records:
    """Read a CSV file in long form.

    Args:
        path: the file, UTF-8, with a header.
        columns: which columns hold what, and the task.

    Raises:
        DataError: no such column, not exactly one candidate, an entry that is not a number, a time that cannot be read,
            two rows of one time in a sequence, or a label that changes within one.
        MissingExtraError: pandas is not installed.
    """
    entries, left_out = _entries(path)
    records = read_entries(path, entries, columns)
    return replace(records, notes=(*left_out, *records.notes))


def read_entries(path: Path, entries: dict[str, npt.NDArray[np.object_]], columns: Columns) -> Records:
    """Read columns in long form, whatever they come from.

    Args:
        path: what messages call it.
        entries: by the column's name, one str per row, as a CSV file would have it; "" where there is none.
        columns: which columns hold what, and the task.

    Raises:
        DataError: as :func:`read`.
        MissingExtraError: pandas is not installed.
    """
    present = list(entries)
    text = text_column(path, columns, present)
    if text is not None:
        return _whole_rows(path, entries, replace(columns, sequence=text))
    name, id_notes = id_name_of(path, columns, present)
    records, _ = records_of_entries(path, entries, columns, name)
    return replace(records, notes=(*id_notes, *records.notes))


def text_column(path: Path, columns: Columns, present: list[str]) -> str | None:
    """The column of texts, where each row is a whole sequence; None where ids say which rows belong together."""
    if columns.sequence is not None:
        return columns.sequence
    texts = [name for name in present if name.lower() in _TEXTS]
    id_name, _ = id_column(path, columns, present, present, _ID_NAMES)
    return texts[0] if id_name is None and len(texts) == 1 else None


def id_name_of(path: Path, columns: Columns, present: list[str]) -> tuple[str, tuple[str, ...]]:
    """The column of ids, and the notes."""
    name, notes = id_column(path, columns, present, present, _ID_NAMES)
    if name is None:
        got = f"no id column among {quote_all(present)}"
        rule = f"a column says which sequence a row belongs to; its name is {', '.join(_ID_NAMES)}"
        raise data_error(path, got, rule, f"name it with {columns_argument('id')}")
    return name, notes


def records_of_entries(
    path: Path,
    entries: dict[str, npt.NDArray[np.object_]],
    columns: Columns,
    id_name: str,
    first: int = 0,
    is_tokens: bool | None = None,
) -> tuple[Records, str | None]:
    """Some rows of a file as records, and their time column.

    Args:
        path: the file.
        entries: the rows, column by column.
        columns: which columns hold what, and the task.
        id_name: the column of ids.
        first: the number of the first row in the file.
        is_tokens: whether a single feature column holds tokens; None lets the entries tell.

    Raises:
        DataError: as :func:`read`.
    """
    present = list(entries)
    time, time_note = choose_time(path, entries, columns, [name for name in present if name != id_name])
    table = _group(path, entries, columns, id_name, time, first)
    free = [name for name in present if name not in (id_name, time)]
    label, notes = _choose_label(table, columns, free)
    if columns.features:
        features = [named_column(path, "features", name, present) for name in columns.features]
    else:
        taken = {name for given in (label, columns.label) if given is not None for name in _label_columns(table, given)}
        features = [name for name in free if name not in taken]
        if not columns.wants_labels:
            features, left_out = _numbers_only(table, features)
            notes = (*notes, *left_out)
    values, channels, feature_notes = _features(table, features, columns, is_tokens)
    if columns.time_gaps:
        values, channels = _with_gaps(table, values, channels)
    labels, tags, targets = None, None, None
    if label is not None:
        labels, tags, targets = _labels(table, columns, label)
    notes = (time_note, *notes, *feature_notes)
    found = replace(columns, label=label or columns.label, id=id_name, features=tuple(features))
    return Records(values, table.offsets, table.ids, labels, tags, channels, path, notes, found, targets), time


def repeats_ids(entries: Mapping[str, Any], columns: Columns) -> bool:
    """Whether there is an id column with an id that comes twice, so that a row is an element of a sequence.

    Args:
        entries: by the column's name, one per row.
        columns: which columns hold what.

    Example:
        >>> repeats_ids({"id": [1, 1, 2], "x": [5, 6, 7]}, Columns()), repeats_ids({"id": [1, 2]}, Columns())
        (True, False)
    """
    name, _ = id_column(Path(), columns, entries, entries, _ID_NAMES)
    return name is not None and len(set(entries[name])) < len(entries[name])


def _whole_rows(path: Path, entries: dict[str, npt.NDArray[np.object_]], columns: Columns) -> Records:
    """Rows that are a text each, and its label: as a table of texts."""
    arrow = require("pyarrow", "data")
    table: dict[str, Any] = {name: arrow.array(entry.tolist(), "string") for name, entry in entries.items()}
    label = columns.label
    if label is not None and label in entries and TASKS[columns.task].label == "numbers":
        numbers, odd = _numbers(entries[label])
        if odd.any():
            got = f"{quote(entries[label][int(odd.argmax())])} in data row {int(odd.argmax())}"
            raise data_error(path, got, "a number to learn is finite", "correct it, or remove the row")
        table[label] = arrow.array(numbers)
    rows = arrow.table(table)
    chosen = choose(path, rows.schema, columns)
    records = records_of(path, rows.select(chosen.names), chosen, columns)
    each = f"each row is a sequence, the text of {quote(chosen.sequence)}"
    return replace(records, notes=(each, *records.notes))


def _entries(path: Path) -> tuple[dict[str, npt.NDArray[np.object_]], tuple[str, ...]]:
    """Every entry as it is written, column by column, and notes on the columns that are left out."""
    content = read_bytes(path)
    # pandas decodes anew, but does not say where a byte is that it cannot read.
    decode(path, content)
    rows = next(parsed(path, io.BytesIO(content), None))
    header = header_of(path, rows)
    if len(rows) == 1:
        raise data_error(path, "a header and no rows", "it must hold at least one sequence", "check the file")
    entries = {name: rows[1:, place] for place, name in enumerate(header) if name}
    nameless = header.count("")
    notes = (f"left out, because they have no name: {count_of(nameless, 'column')}",) if nameless else ()
    return entries, notes


def parsed(path: Path, content: IO[bytes], size: int | None) -> Iterator[npt.NDArray[np.object_]]:
    """The entries of an open file as they are written, the header first: ``size`` rows at a time, or all at once."""
    pandas = require("pandas", "data")
    # The header is a row like the others: pandas would rename the second of two columns of one name, name those
    # without, and cut off the entries of rows that are longer.
    options: dict[str, Any] = {"header": None, "dtype": object, "keep_default_na": False, "encoding": "utf-8-sig"}
    try:
        with pandas.read_csv(content, chunksize=size or sys.maxsize, **options) as reader:
            for frame in reader:
                # A row that is too short ends in entries that are not there at all.
                yield frame.fillna("").to_numpy(dtype=object)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError) as error:
        got = f"rows that do not fit ({' '.join(str(error).split()).rstrip('.')})"
        raise data_error(path, got, "each row has an entry for each column", "correct the file") from error


def header_of(path: Path, rows: npt.NDArray[np.object_]) -> list[str]:
    """The names of the columns, of which some may be empty."""
    header: list[str] = rows[0].tolist() if len(rows) else []
    counts = Counter(header)
    twice = next((name for name in header if name and counts[name] > 1), None)
    if twice is not None:
        raise data_error(path, f"two columns {quote(twice)}", "a column's name is its own", "rename one")
    return header


def _group(
    path: Path,
    entries: dict[str, npt.NDArray[np.object_]],
    columns: Columns,
    id_name: str,
    time: str | None,
    first: int = 0,
) -> _Table:
    """Bring the rows of each sequence together, in the order of the time column if there is one."""
    pandas = require("pandas", "data")
    codes, ids = pandas.factorize(entries[id_name])
    blank = ids == ""
    if blank.any():
        row = int((codes == int(blank.argmax())).argmax())
        got = f"an empty entry in data row {first + row}, column {quote(id_name)}"
        raise data_error(path, got, "each row has an id", "fill it, or remove the row")
    if time is None:
        order = np.argsort(codes, kind="stable")
    else:
        times = read_times(path, entries[time], time)
        order = np.lexsort((times, codes))
    offsets = offsets_of(np.bincount(codes, minlength=len(ids)))
    sorted_entries = {name: entry[order] for name, entry in entries.items()}
    table = _Table(path, sorted_entries, order + first, offsets, _as_ids(ids), time)
    if time is not None:
        sorted_times, sorted_codes = times[order], codes[order]
        again = (np.diff(sorted_times) == 0) & (np.diff(sorted_codes) == 0)
        if again.any():
            row = int(again.argmax()) + 1
            got = f"the time {quote(table.entries[time][row])} again in {table.place(row)}"
            feature = f"if it is a feature, say so with {columns_argument('features')}"
            fix = f"remove one of the rows, or correct {quote(time)}; {feature}"
            raise data_error(path, got, "a sequence has one row for each time", fix)
        refuse_contradiction(path, table.entries, columns, time, np.diff(sorted_codes) == 0)
    return table


def _as_ids(ids: Any) -> tuple[str | int, ...]:
    """Integers of 64 bits, if every id is written as one in the usual way; else strings."""
    words = [str(word) for word in ids]
    return tuple(map(int, words)) if all(map(is_plain, words)) else tuple(words)


def is_plain(word: str) -> bool:
    """Whether a word is a whole number of 64 bits, written in the usual way."""
    return word.isascii() and word.isdigit() and (word == "0" or word[0] != "0") and len(word) < 19


def _numbers(entries: npt.NDArray[np.object_]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
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


def _choose_label(table: _Table, columns: Columns, free: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """The label column, if there is to be one, and the notes."""
    path = table.path
    if not columns.wants_labels:
        return None, ()
    if columns.label is not None:
        for name in _label_columns(table, columns.label):
            named_column(path, "label", name, table.entries)
        return columns.label, ()
    candidates = [name for name in free if name not in (columns.features or ())]
    if TASKS[columns.task].label == "numbers":
        names = f"{columns_argument('label')}; several, as in 'x,y', are learned together"
        rule = "every column of numbers could be the one to learn"
        raise data_error(path, f"no label column named among {quote_all(table.entries)}", rule, f"name it with {names}")
    kind = "column of words, or of integers"
    if columns.task == "classify":
        kind += ", the same in all rows of a sequence"
        candidates = [name for name in candidates if table.constant(name).all()]
    numbers = {name: _numbers(table.entries[name]) for name in candidates}
    words = [name for name in candidates if numbers[name][1].any()]
    integers = [name for name in candidates if (np.mod(numbers[name][0], 1) == 0).all()]
    if columns.task == "classify" and not (words or integers):
        _refuse_almost(table, [name for name in free if name not in (columns.features or ())])
    label, note = choose_column(path, "label", words or integers, kind, table.entries)
    return label, (note,)


def _refuse_almost(table: _Table, names: list[str]) -> None:
    """Raise for the column of words that is the same in most sequences, but not in all: the label, with a mistake."""
    count = len(table.ids)
    sequence = np.repeat(np.arange(count), np.diff(table.offsets))
    odd: dict[str, int] = {}
    for name in names:
        if _numbers(table.entries[name])[1].any():
            odd[name] = len(np.unique(sequence[~table.constant(name)]))
    for name in sorted(odd, key=lambda name: odd[name])[:1]:
        if 2 * odd[name] <= count:
            _refuse_change(table, name)


def _refuse_change(table: _Table, name: str) -> None:
    """Raise if a label changes within a sequence, naming the first row where it does."""
    same = table.constant(name)
    if same.all():
        return
    row = int((~same).argmax())
    entries = table.entries[name]
    first = entries[table.offsets[int(np.searchsorted(table.offsets, row, side="right")) - 1]]
    got = f"the label {quote(entries[row])} in {table.place(row)}, column {quote(name)}, after {quote(first)}"
    fix = f"correct it, or pass {columns_argument('task', 'tag')} for a label per row"
    raise data_error(table.path, got, "the rows of a sequence have one label", fix)


def _numbers_only(table: _Table, features: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Without the columns of words, where there are numbers: one of them may be labels that nobody asked for."""
    words = [name for name in features if _numbers(table.entries[name])[1].any()]
    if not words or len(words) == len(features):
        return features, ()
    rest = [name for name in features if name not in words]
    return rest, (f"left out, because they are not numbers: {', '.join(words)}",)


def _features(
    table: _Table, features: list[str], columns: Columns, is_tokens: bool | None
) -> tuple[npt.NDArray[Any], tuple[str, ...], tuple[str, ...]]:
    """The values: ``(N, C)`` float32, or ``(N,)`` tokens; their channels; and the notes."""
    if not features:
        rule = "a column is left for the features"
        raise data_error(
            table.path, "no feature column", rule, f"add one, or name it with {columns_argument('features')}"
        )
    result = np.empty((int(table.offsets[-1]), len(features)), dtype=np.float32)
    for channel, name in enumerate(features):
        numbers, odd = _numbers(table.entries[name])
        # A few words among numbers are mistakes, not tokens.
        if len(features) == 1 and ((odd.mean() >= 0.5 or columns.tokens) if is_tokens is None else is_tokens):
            return table.entries[name], (), (f"the entries of {quote(name)} are taken as tokens",)
        if odd.any():
            row = int(odd.argmax())
            got = f"{quote(table.entries[name][row])} in {table.place(row)}, column {quote(name)}"
            fix = f"correct it, or say which columns are features with {columns_argument('features')}"
            raise data_error(table.path, got, "features are numbers, or one column of tokens", fix)
        # A number that float32 cannot hold becomes infinite, and is then reported or filled as missing.
        with np.errstate(over="ignore"):
            result[:, channel] = numbers
    return result, tuple(features), (f"features: {', '.join(features)}",)


def _with_gaps(
    table: _Table, values: npt.NDArray[Any], channels: tuple[str, ...]
) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
    """The features, and the time since the element before as one more."""
    rule = "the time since the element before is a feature beside numbers, in the rows of a time column"
    if table.time is None:
        fix = f"name the column with {columns_argument('time')}"
        raise data_error(table.path, f"no time column for {argument('time_gaps', value=True, of='Columns')}", rule, fix)
    if values.dtype == object:
        got = f"tokens, and {argument('time_gaps', value=True, of='Columns')}"
        raise data_error(table.path, got, rule, "leave it out")
    gaps = gaps_between(table.entries[table.time])
    gaps[table.offsets[:-1]] = 0
    return np.concatenate([values, gaps[:, None]], axis=1), (*channels, "time_gap")


def _labels(
    table: _Table, columns: Columns, name: str
) -> tuple[tuple[str, ...] | None, npt.NDArray[np.object_] | None, Targets | None]:
    """The labels of the sequences or, for tagging, of the elements; or numbers or sets of labels of either."""
    if TASKS[columns.task].label != "class":
        return None, None, _targets(table, columns, name)
    entries = table.entries[name]
    blank = entries == ""
    if blank.any():
        got = f"an empty entry in {table.place(int(blank.argmax()))}, column {quote(name)}"
        raise data_error(table.path, got, "each row has a label", "fill it, or remove the row")
    if columns.task == "tag":
        return None, entries, None
    _refuse_change(table, name)
    return tuple(entries[table.offsets[:-1]].tolist()), None, None


def _label_columns(table: _Table, label: str) -> list[str]:
    """The columns that a label names: one, or several between commas where there is none of the whole name."""
    return [label] if label in table.entries else [part.strip() for part in label.split(",")]


def _targets(table: _Table, columns: Columns, label: str) -> Targets:
    """Numbers or sets of labels: per sequence where they are the same in all rows of each, else per element."""
    names = _label_columns(table, label)
    per_element = not all(table.constant(name).all() for name in names)
    rows = np.arange(int(table.offsets[-1])) if per_element else table.offsets[:-1]
    if TASKS[columns.task].label == "set":
        sets = np.empty(len(rows), dtype=object)
        sets[:] = [labels_in(entry) for entry in table.entries[label][rows].tolist()]
        return Targets(sets, per_element=per_element)
    values = np.empty((len(rows), len(names)), dtype=np.float64)
    for place, name in enumerate(names):
        numbers, odd = _numbers(table.entries[name])
        wrong = odd | ~np.isfinite(numbers)
        if wrong.any():
            row = int(wrong.argmax())
            got = f"{quote(table.entries[name][row])} in {table.place(row)}, column {quote(name)}"
            raise data_error(table.path, got, "a number to learn is finite", "correct it, or remove the row")
        values[:, place] = numbers[rows]
    return Targets(values, per_element=per_element, names=tuple(names))
