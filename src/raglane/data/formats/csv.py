"""CSV in long form: one row per element, and a column that says to which sequence it belongs.

Sequences come in the order in which their ids first appear, and the rows of one in the order of the time column, or of
the file where there is none. A feature column holds numbers (an empty entry, ``NaN`` or ``NA`` is missing) or, where
most entries are words, categories. A single one, at least half of it words, holds tokens, and of several without
numbers the first does.

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
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import count_of, quote, quote_all, require
from raglane.data.formats.base import (
    ID_NAMES,
    check_readable,
    columns_argument,
    data_error,
    decode,
    id_column,
    read_bytes,
)
from raglane.data.formats.csv_table import (
    choose_label,
    choose_time,
    features_of,
    group,
    is_plain,
    label_columns,
    labels_of,
    numbers_in,
    numbers_only,
    static_feature,
    with_gaps,
)
from raglane.data.formats.pieces import BYTES, ROWS, Piece, Start, sift
from raglane.data.formats.table import beside, choose, records_of
from raglane.data.records import TASKS, Columns, Records

_ID_NAMES = (*ID_NAMES, "sequence", "series", "case")

# What separates entries in files that are called CSV as well.
_OTHER_MARKS = (";", "\t", "|")

# A column of one of these names holds texts, where no column says which rows belong together.
_TEXTS = ("text", "sentence", "document", "question", "review")

_Rows = npt.NDArray[np.object_]


def read(path: Path, columns: Columns) -> Records:
    """Read a CSV file in long form."""
    entries, left_out = entries_of(path)
    records = read_entries(path, entries, columns)
    return replace(records, notes=(*left_out, *records.notes))


def read_entries(path: Path, entries: dict[str, npt.NDArray[np.object_]], columns: Columns) -> Records:
    """Read columns in long form, whatever they come from."""
    present = list(entries)
    text = text_column(path, columns, present)
    if text is not None:
        return whole_rows(path, entries, replace(columns, sequence=text))
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
        rule = f"a file with a column for the sequence of each row, named {', '.join(_ID_NAMES)}"
        raise data_error(path, got, rule, f"name it with {columns_argument('id')}")
    return name, notes


def records_of_entries(
    path: Path,
    entries: dict[str, npt.NDArray[np.object_]],
    columns: Columns,
    id_name: str,
    rows: npt.NDArray[np.int64] | None = None,
    is_tokens: bool | None = None,
) -> tuple[Records, str | None]:
    """Some rows of a file as records, and their time column."""
    present = list(entries)
    _refuse_header(path, entries, range(len(entries[id_name])) if rows is None else rows)
    time, time_note = choose_time(path, entries, columns, [name for name in present if name != id_name])
    table = group(path, entries, columns, id_name, time, rows)
    free = [name for name in present if name not in (id_name, time)]
    named, static = beside(path, columns, present)
    label, notes = choose_label(table, columns, [name for name in free if name not in static])
    if named:
        features = list(named)
    else:
        free = [name for name in free if name not in static]
        taken = {name for given in (label, columns.label) if given is not None for name in label_columns(table, given)}
        features = [name for name in free if name not in taken]
        if not columns.wants_labels:
            features, left_out = numbers_only(table, features)
            notes = (*notes, *left_out)
    values, channels, more, feature_notes = features_of(table, features, columns, is_tokens)
    more = (*more, *(static_feature(table, name, columns) for name in static))
    if columns.time_gaps:
        values, channels = with_gaps(table, values, channels)
    labels, tags, targets = None, None, None
    if label is not None:
        labels, tags, targets = labels_of(table, columns, label)
    notes = (time_note, *notes, *feature_notes)
    words = tuple(feature.name for feature in more if not feature.is_numbers)
    if len(features) > 1 and values.dtype == object:
        words = (features[0], *words)
    categorical = tuple(dict.fromkeys((*(columns.categorical or ()), *words))) or None
    found = replace(
        columns, label=label or columns.label, id=id_name, features=tuple(features), categorical=categorical
    )
    return Records(values, table.offsets, table.ids, labels, tags, channels, path, notes, found, targets, more), time


def repeats_ids(entries: Mapping[str, Any], columns: Columns) -> bool:
    """Whether there is an id column with an id that comes twice, so that a row is an element of a sequence."""
    name, _ = id_column(Path(), columns, entries, entries, _ID_NAMES)
    return name is not None and len(set(entries[name])) < len(entries[name])


def whole_rows(path: Path, entries: dict[str, npt.NDArray[np.object_]], columns: Columns, first: int = 0) -> Records:
    """Rows that are a text each, its label, and what else it has as a whole: as a table of texts."""
    arrow = require("pyarrow", "data")
    _refuse_header(path, entries, range(first, first + len(next(iter(entries.values())))))
    table: dict[str, Any] = {name: arrow.array(entry.tolist(), "string") for name, entry in entries.items()}
    wanted = {columns.label: "a file with finite targets"} if TASKS[columns.task].label == "numbers" else {}
    words = list(columns.categorical or ())
    for name in columns.static or ():
        # The entries tell whether they are words, as those of a file with a row per element do.
        if name in words or (name in entries and numbers_in(entries[name])[1].mean() > 0.5):
            words += [] if name in words else [name]
        else:
            wanted[name] = "a file whose features are only numbers, or only words"
    for column, rule in wanted.items():
        if column is not None and column in entries:
            numbers, odd = numbers_in(entries[column])
            if odd.any():
                row = int(odd.argmax())
                got = f"{quote(entries[column][row])} in data row {first + row}"
                raise data_error(path, f"{got}, column {quote(column)}", rule, "correct it, or remove the row")
            table[column] = arrow.array(numbers)
    columns = replace(columns, categorical=tuple(words) or None)
    rows = arrow.table(table)
    chosen = choose(path, rows.schema, columns)
    if chosen.label is not None and TASKS[columns.task].label == "class":
        blank = entries[chosen.label] == ""
        if blank.any():
            got = f"an empty entry in data row {first + int(blank.argmax())}, column {quote(chosen.label)}"
            raise data_error(path, got, "a file with a label in each row", "fill it, or remove the row")
    records = records_of(path, rows.select(chosen.names), chosen, columns, first=first)
    each = f"each row is a sequence, the text of {quote(chosen.sequence)}"
    return replace(records, notes=(each, *records.notes), label_kinds=None)


def entries_of(path: Path) -> tuple[dict[str, npt.NDArray[np.object_]], tuple[str, ...]]:
    """Every entry as it is written, column by column, and notes on the columns that are left out."""
    content = read_bytes(path)
    # pandas decodes anew, but does not say where a byte is that it cannot read.
    decode(path, content)
    rows = next(parsed(path, io.BytesIO(content), None))
    header = header_of(path, rows)
    if len(rows) == 1:
        raise data_error(path, "a header and no rows", "a file with at least one sequence", "check the file")
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
        content.seek(0)
        _check_separator(path, content.readline().decode("utf-8-sig", errors="replace").strip())
        got = f"rows that do not fit ({' '.join(str(error).split()).rstrip('.')})"
        raise data_error(path, got, "a file whose rows have one entry for each column", "correct the file") from error


def header_of(path: Path, rows: npt.NDArray[np.object_]) -> list[str]:
    """The names of the columns, of which some may be empty."""
    header: list[str] = rows[0].tolist() if len(rows) else []
    if len(header) == 1:
        _check_separator(path, header[0])
    counts = Counter(header)
    twice = next((name for name in header if name and counts[name] > 1), None)
    if twice is not None:
        raise data_error(path, f"two columns {quote(twice)}", "a file whose columns have different names", "rename one")
    return header


def _check_separator(path: Path, line: str) -> None:
    """Raise where the first line has other marks between its entries than commas."""
    mark = next((mark for mark in _OTHER_MARKS if mark in line), None)
    if mark is not None and "," not in line:
        fix = f"convert it: pandas.read_csv({str(path)!r}, sep={mark!r}).to_csv('commas.csv', index=False)"
        raise data_error(path, f"entries separated by {mark!r}", "a file whose entries are separated by commas", fix)


def _refuse_header(
    path: Path, entries: Mapping[str, npt.NDArray[np.object_]], rows: Sequence[int] | npt.NDArray[np.int64]
) -> None:
    """Raise where a row is the header again, as where files were joined: its words would be data."""
    again = np.logical_and.reduce([entry == name for name, entry in entries.items()])
    if again.any():
        got = f"the header again in data row {rows[int(again.argmax())]}"
        raise data_error(path, got, "a file with one header", "remove the row")


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The pieces of a CSV file; one begins at a data row.

    The file is gone through once before, to see whether the rows of each sequence stand together. Where they do not,
    it is read whole, since what belongs to the first sequence may stand at its end.
    """
    _check_bytes(path)
    header = header_of(path, next(_rows(path), np.empty((0, 0), dtype=object)))
    names = [name for name in header if name]
    text = text_column(path, columns, names)
    if text is not None:
        # The rows of texts are read as a table, whole.
        if not start:
            yield _texts(path, replace(columns, sequence=text))
        return
    id_name, _ = id_name_of(path, columns, names)
    place = header.index(id_name)
    together, has_numbers = _look_at_ids(_rows(path), place)
    file = _File(path, header, place, columns, has_numbers)
    if together:
        if start:
            # The first rows say how the others are read.
            for piece in islice(_pieces(file, 0), 1):
                deque(sift(piece, []), maxlen=0)
        yield from _pieces(file, start[0] if start else 0)
    elif not start:
        yield _regrouped(file)


def _texts(path: Path, columns: Columns) -> Piece:
    entries, _ = entries_of(path)
    count = len(next(iter(entries.values())))

    def read(low: int, high: int) -> Records:
        return whole_rows(path, {name: entry[low:high] for name, entry in entries.items()}, columns, low)

    return Piece(count, read, (count,), lambda row: f"data row {row}")


def _regrouped(file: _File) -> Piece:
    """All rows of a file in which those of a sequence do not stand together."""
    entries, _ = entries_of(file.path)
    codes, _ = require("pandas", "data").factorize(entries[file.header[file.place]])
    order = np.argsort(codes, kind="stable")
    rows = np.stack([entries[name][order] if name else np.full(len(order), "") for name in file.header], axis=1)
    part = _Part(file, rows, order, _run_starts(rows[:, file.place]))
    return Piece(len(part.starts), part.read, (len(rows),), part.place)


def _pieces(file: _File, start: int) -> Iterator[Piece]:
    for first, rows in _whole_sequences(_rows(file.path), file.place, start):
        numbers = np.arange(first, first + len(rows))
        part = _Part(file, rows, numbers, _run_starts(rows[:, file.place]))
        yield Piece(len(part.starts), part.read, (first + len(rows),), part.place)


@dataclass(frozen=True)
class _File:
    """What is known of a file: its columns and its ids."""

    path: Path
    header: list[str]
    place: int
    columns: Columns
    has_numbers: bool
    # The columns that the first rows were read with, and whether they hold tokens: the others are read in the same way.
    known: list[tuple[Columns, bool]] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """Rows of whole sequences, which rows of the file they are, and where each sequence starts."""

    file: _File
    rows: _Rows
    numbers: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def place(self, row: int) -> str:
        """A sequence in words."""
        start = self.starts[row]
        return f"data row {self.numbers[start]} (id {quote(self.rows[start, self.file.place])})"

    def read(self, low: int, high: int) -> Records:
        """The records of some of the sequences."""
        file = self.file
        here = slice(self.starts[low], self.starts[high] if high < len(self.starts) else len(self.rows))
        rows = self.rows[here]
        entries = {name: rows[:, column] for column, name in enumerate(file.header) if name}
        asked, is_tokens = file.known[0] if file.known else (file.columns, None)
        name = file.header[file.place]
        found, time = records_of_entries(file.path, entries, asked, name, self.numbers[here], is_tokens)
        columns = replace(found.columns, time=time)
        if not file.known:
            file.known.append((columns, found.is_tokens))
        ids = found.ids if file.has_numbers else tuple(map(str, found.ids or ()))
        return replace(found, ids=ids, columns=columns)


def _rows(path: Path) -> Iterator[_Rows]:
    """The entries of a file as they are written, some rows at a time, the header first."""
    with path.open("rb") as file:
        yield from parsed(path, file, ROWS)


def _whole_sequences(chunks: Iterator[_Rows], place: int, start: int) -> Iterator[tuple[int, _Rows]]:
    """The data rows of chunks, cut where a sequence ends, each run with the number of its first row."""
    number, first = 0, start
    held: _Rows | None = None
    for count, chunk in enumerate(chunks):
        if held is not None:
            # The last sequence may go on in this chunk.
            cut = int(_run_starts(held[:, place])[-1])
            if cut:
                yield first, held[:cut]
                first, held = first + cut, held[cut:]
        # The header is a row of the first chunk.
        rows = chunk[1:] if count == 0 else chunk
        number, before = number + len(rows), number
        rows = rows[max(start - before, 0) :]
        if len(rows) == 0:
            continue
        held = rows if held is None else np.concatenate([held, rows])
    if held is not None:
        yield first, held


def _run_starts(ids: _Rows) -> npt.NDArray[np.int64]:
    """Where an id differs from the one before it; 0 first."""
    return np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])


def _look_at_ids(chunks: Iterator[_Rows], place: int) -> tuple[bool, bool]:
    """Whether the rows of each sequence stand together, and whether all ids are whole numbers."""
    pandas = require("pandas", "data")
    hashes, has_numbers, last = [], True, None
    for count, chunk in enumerate(chunks):
        ids = chunk[int(count == 0) :, place]
        if len(ids):
            different = ids[_run_starts(ids)]
            if different[0] == last:
                different = different[1:]
            last = ids[-1]
            has_numbers = has_numbers and all(map(is_plain, different))
            hashes.append(pandas.util.hash_array(different, categorize=False))
    # Eight bytes for each sequence. Two ids of one hash mean only that the file is read whole.
    every = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, dtype=np.uint64)
    return not bool((every[1:] == every[:-1]).any()), has_numbers


def _check_bytes(path: Path) -> None:
    """Refuse a file that is not text in UTF-8, naming the line."""
    check_readable(path)
    line, rest = 1, b""
    with path.open("rb") as file:
        while chunk := file.read(BYTES):
            # A character may be cut at the end of a chunk; a line feed is never part of one.
            block, newline, rest = (rest + chunk).rpartition(b"\n")
            decode(path, block, line)
            line += block.count(b"\n") + len(newline)
    decode(path, rest, line)
