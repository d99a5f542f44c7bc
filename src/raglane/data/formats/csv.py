"""CSV and other tables in long form: one row per element, and a column of ids that assigns rows to sequences.

Tabs, semicolons or bars may separate the entries if the header has no comma; numbers may then have decimal commas.
Sequences are in the order in which their ids first appear, and the rows of a sequence in the order of the time column,
or else of the file. A feature column contains numbers (an empty entry, ``NaN`` or ``NA`` is missing) or, if most
entries are words, categories. A single column, at least half of it words, contains tokens; so does the first of several
columns without numbers.

If no column is named, the id and the time column are found by their names (``id``, ``sequence_id``, ...; ``time``,
``step``, ``t``, ..., unless the entries are words). The label column is the only column of words (or else of integers)
that, to classify, is the same in all rows of a sequence; all other columns are features. A column without a name, such
as the row numbers of pandas, is left out.

A file without an id column, but with a column called ``text`` (``sentence``, ...) or named as the sequence, has a text
per row instead.

Ids are integers if all are written as integers of at most 18 digits, else texts. A feature beyond float32, such as
1e999, is infinite, and so missing.
"""

from __future__ import annotations

import io
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import count_of, quote, quote_all, require
from raglane.data.formats.arrow import arrow_types, is_list, is_text
from raglane.data.formats.base import (
    ID_NAMES,
    ROLE_NAMES,
    TIME_NAMES,
    check_named,
    check_readable,
    choose_column,
    columns_argument,
    data_error,
    decode,
    id_column,
    opened,
    read_bytes,
)
from raglane.data.formats.csv_table import check_header_once, is_plain, numbers_in, records_of_rows
from raglane.data.formats.decimals import CommaColumns, Entries
from raglane.data.formats.pieces import BYTES, ROWS, Piece, Start, sift
from raglane.data.formats.table import choose, kinds_of, records_of
from raglane.data.records import TASKS, Columns, Records
from raglane.errors import UnfitColumnError

_ID_NAMES = (*ID_NAMES, "sequence", "series", "case")

# Separators other than commas.
_OTHER_MARKS = ("\t", ";", "|")

# A column that may be a step: a prefix and a number.
_NUMBERED = re.compile(r"(.*?)(\d{1,6})")

Load = Callable[[list[str]], Any]  # returns an Arrow table with some of its columns

# Names of a column of texts in a file without ids.
_TEXTS = ("text", "sentence", "document", "question", "review")


def read(path: Path, columns: Columns) -> Records:
    """Read a CSV file in long form."""
    entries, notes = _entries_of(path)
    records = read_entries(path, entries, columns)
    return replace(records, notes=(*notes, *records.notes))


def read_entries(path: Path, entries: dict[str, Entries], columns: Columns) -> Records:
    """Read columns of texts in long form, from a file or a table."""
    present = list(entries)
    text, steps = _text_column(path, columns, present), step_columns(path, columns, entries)
    if text is not None:
        return _whole_rows(path, entries, replace(columns, sequence=text))
    if steps or columns.wide:
        return _wide_rows(path, entries, columns, steps)
    name, id_notes = id_column(path, columns, present, present, _ID_NAMES)
    if name is None and columns.task == "forecast":
        # A forecast needs no label, so the rows of a file without ids are one series.
        name, id_notes = "series", ("no id column: all rows are one series",)
        entries = {name: np.full(len(next(iter(entries.values()))), "0", dtype=object), **entries}
    name, id_notes = (name, id_notes) if name in entries else _id_column(path, columns, present)
    records = records_of_rows(path, entries, columns, name)
    # A guessed time column is not required of other files, nor is an id column.
    used = replace(records.columns, time=columns.time, id=name if name in present else None)
    return replace(records, notes=(*id_notes, *records.notes), columns=used)


def are_elements(path: Path, schema: Any, load: Load, columns: Columns) -> bool:
    """Return True if the rows of an Arrow table are elements, or sequences with a column per step."""
    kinds = kinds_of(path, schema)
    names = _scalars(kinds)
    if columns.sequence is not None or not names or any(map(is_list, kinds.values())):
        return False
    texts = {name for name in names if is_text(kinds[name])}
    # A forecast needs no id, and times of JSON are texts.
    times = {name for name in texts if name.lower() in TIME_NAMES} if columns.task == "forecast" else set()
    if columns.wide or columns.time in kinds or set(columns.features or ()) & set(kinds) - texts or texts == times:
        return True
    # Texts called "sequence" are sequences, such as those of genes.
    eligible = [name for name in names if name not in texts or name.lower() != "sequence"]
    name, _ = id_column(path, columns, names, eligible, _ID_NAMES)
    ids = None if name is None else _valid(load([name])).column(0)
    if ids is not None:
        ids = ids.cast(getattr(ids.type, "storage_type", ids.type))  # Arrow does not compare UUIDs
    # Several texts may have one id, e.g. the reviews of a user.
    documents = texts.intersection(name for name in names if name.lower() in (*ROLE_NAMES["sequence"], *_TEXTS))
    if ids is not None and len(ids.unique()) < len(ids) and not any(_are_sentences(load([own])) for own in documents):
        return True
    # Without three numbered columns, the table need not be read, and may have bytes.
    is_step = sum(map(bool, map(_NUMBERED.fullmatch, names))) > 2
    with suppress(UnfitColumnError):
        # A step of whole numbers looks like a label.
        label = choose(path, schema, columns).label
        is_step &= label not in (None, columns.label) and _NUMBERED.fullmatch(label or "") is not None
    return is_step and bool(step_columns(path, columns, _written(path, load(names))))


def entries_of(path: Path, schema: Any, load: Load, columns: Columns) -> dict[str, Entries] | None:
    """Return the entries of an Arrow table as texts, or None if a row is a sequence in a list or a text."""
    is_long = are_elements(path, schema, load, columns)
    return _written(path, load(_scalars(kinds_of(path, schema)))) if is_long else None


def _scalars(kinds: Mapping[str, Any]) -> list[str]:
    return [name for name, kind in kinds.items() if not arrow_types().is_nested(kind)]


def _valid(table: Any) -> Any:
    """Return a table after a test of its buffers, because Arrow reads wrong offsets without one."""
    table.validate(full=True)
    return table


def _are_sentences(table: Any) -> bool:
    """Return True if most texts of a column have several words."""
    texts = _valid(table).column(0).drop_null().to_pylist()
    return 2 * sum(" " in text.strip() for text in texts) > len(texts)


def _written(path: Path, table: Any) -> dict[str, Entries]:
    """Return the entries of an Arrow table as texts."""
    if _valid(table).num_rows == 0:
        raise data_error(path, "no rows", "a file with at least one sequence", "check the file")
    entries = {}
    for name in table.column_names:
        if re.match(r"(dictionary<values=)?(large_|fixed_size_)?binary(_view)?\b", str(table.column(name).type)):
            rule = "a table of texts, numbers and booleans"
            raise data_error(path, f"bytes in the column {quote(name)}", rule, "decode them, e.g. with .str.decode()")
        words = ["" if value is None or value != value else str(value) for value in table.column(name).to_pylist()]
        entries[str(name)] = np.array(words, dtype=object)
    return entries


def _text_column(path: Path, columns: Columns, present: list[str]) -> str | None:
    """Return the column of texts if each row is a whole sequence, or None if there are ids."""
    if columns.sequence is not None:
        return columns.sequence
    texts = [name for name in present if name.lower() in _TEXTS]
    id_name, _ = id_column(path, columns, present, present, _ID_NAMES)
    if id_name is None and len(texts) != 1 and TASKS[columns.task].label == "sequence" and columns.features is None:
        others = (columns.label, *(columns.static or ()))
        others = others if columns.label is not None else (*others, *ROLE_NAMES["label"])
        free = [name for name in present if name not in others]
        return choose_column(path, "sequence", free, "column of texts", present)[0]
    return texts[0] if id_name is None and len(texts) == 1 else None


def _id_column(path: Path, columns: Columns, present: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return the id column and notes; raise a DataError without one."""
    name, notes = id_column(path, columns, present, present, _ID_NAMES)
    if name is None:
        got = f"no id column among {quote_all(present)}"
        rule = f"a file with a column of ids, called {', '.join(_ID_NAMES)}"
        texts = f"if each row is a text, name its column with {columns_argument('sequence')}"
        series = f"if all rows are one series, pass {columns_argument('task', 'forecast')}"
        raise data_error(path, got, rule, f"name it with {columns_argument('id')}; {texts}; {series}")
    return name, notes


def step_columns(path: Path, columns: Columns, entries: Mapping[str, Entries]) -> list[str]:
    """Return the columns that are the steps of rows, if each row is a sequence of numbers; else []."""
    if columns.wide and columns.features:
        return list(columns.features)
    id_name, _ = id_column(path, columns, entries, entries, _ID_NAMES)
    roles = {id_name, columns.label, columns.time, *(columns.static or ())}
    free = [name for name in entries if name not in roles and name.lower() not in ROLE_NAMES["label"]]
    found = sorted((match[1], int(match[2]), name) for name in free if (match := _NUMBERED.fullmatch(name)))
    steps = [name for _, _, name in found]
    numbered = [(found[0][0], found[0][1] + place) for place in range(len(found))]
    is_numbered = len(found) > 2 and numbered == [(prefix, number) for prefix, number, _ in found]
    if not columns.wide:
        is_chosen = columns.features or columns.sequence or columns.time
        has_times = any(name.lower() in TIME_NAMES for name in entries)
        is_wide = columns.task != "forecast" if id_name is None else _is_distinct(entries[id_name])
        if not is_numbered or is_chosen or has_times or not is_wide:
            return []
    # A step with a word by mistake is refused later.
    most = 0.5 if columns.wide and is_numbered else 0.0
    numbers = [name for name in (steps if is_numbered else free) if numbers_in(entries[name])[1].mean() <= most]
    return numbers if columns.wide or numbers == steps else []


def _is_distinct(ids: Entries) -> bool:
    return len(set(ids)) == len(ids)


def _wide_rows(path: Path, entries: dict[str, Entries], columns: Columns, steps: list[str], first: int = 0) -> Records:
    """Read rows that are a sequence each, with a step per column; empty entries at the end of a row are no steps."""
    for name in steps:
        check_named(path, "features", name, entries)
    if not steps:
        raise data_error(path, "no column of numbers", "a file whose columns of numbers are steps", "check the file")
    table = np.stack([entries[name] for name in steps], axis=1)
    count = len(table)
    filled = table != ""
    lengths = np.maximum(np.where(filled.any(1), len(steps) - filled[:, ::-1].argmax(1), 0), 1)
    rows = np.repeat(np.arange(count), lengths)
    id_name, notes = id_column(path, columns, entries, entries, _ID_NAMES)
    if id_name is not None and not _is_distinct(entries[id_name]):
        twice = Counter(entries[id_name].tolist()).most_common(1)[0][0]
        fix = "remove a row, or rename it"
        raise data_error(path, f"the id {quote(twice)} twice", "a file with one row per id", fix)
    numbers = np.array([str(row) for row in range(first, first + count)], dtype=object)
    value = f"{steps[0]} to {steps[-1]}"
    long = {id_name or "id": (numbers if id_name is None else entries[id_name])[rows]}
    long[value] = table[np.arange(len(steps)) < lengths[:, None]]
    long |= {name: entry[rows] for name, entry in entries.items() if name not in (*steps, id_name)}
    records = records_of_rows(path, long, replace(columns, features=(value,), time=None), id_name or "id", rows + first)
    note = f"each row is a sequence, whose steps are the columns {value}"
    used = replace(records.columns, features=tuple(steps), time=columns.time, id=columns.id, wide=True)
    return replace(records, notes=(*notes, note, *records.notes[1:]), columns=used)


def _whole_rows(path: Path, entries: dict[str, Entries], columns: Columns, first: int = 0) -> Records:
    """Read rows that are a text each, with a label and static features, as an Arrow table."""
    arrow = require("pyarrow", "data")
    check_header_once(path, entries, range(first, first + len(next(iter(entries.values())))))
    table: dict[str, Any] = {name: arrow.array(entry.tolist(), "string") for name, entry in entries.items()}
    numeric = {columns.label: "a finite number"} if TASKS[columns.task].label == "numbers" else {}
    words = list(columns.categorical or ())
    for name in columns.static or ():
        if name not in words and name in entries and numbers_in(entries[name])[1].mean() > 0.5:
            words.append(name)
        elif name not in words:
            numeric[name] = "a number, or a word in a column of words"
    for column, rule in numeric.items():
        if column is not None and column in entries:
            numbers, odd = numbers_in(entries[column])
            if odd.any():
                row = int(odd.argmax())
                got = f"{quote(entries[column][row])} in data row {first + row}"
                fix = "correct it, or remove the row"
                raise data_error(path, f"{got}, column {quote(column)}", f"a file with {rule}", fix)
            table[column] = arrow.array(numbers)
    columns = replace(columns, categorical=tuple(words) or None)
    rows = arrow.table(table)
    chosen = choose(path, rows.schema, columns)
    records = records_of(path, rows.select(chosen.names), chosen, columns, first=first)
    note = f"each row is a sequence, the text of {quote(chosen.sequence)}"
    return replace(records, notes=(note, *records.notes), label_kinds=None)


def _entries_of(path: Path) -> tuple[dict[str, Entries], tuple[str, ...]]:
    """Return the entries of each column as texts, and notes on omitted columns."""
    content = read_bytes(path)
    # pandas decodes the file too, but does not report the place of an invalid byte.
    decode(path, content)
    rows = next(_parsed(path, io.BytesIO(content), None))
    header = _header_of(path, rows)
    if len(rows) == 1:
        raise data_error(path, "a header and no rows", "a file with at least one sequence", "check the file")
    nameless = header.count("")
    notes = (f"left out, because they have no name: {count_of(nameless, 'column')}",) if nameless else ()
    return {name: rows[1:, place] for place, name in enumerate(header) if name}, notes


def _parsed(path: Path, content: IO[bytes], size: int | None) -> Iterator[Entries]:
    """Yield the rows of an open file, the header first, in arrays of ``size`` rows, or in one."""
    pandas = require("pandas", "data")
    first = content.readline()
    # Excel reads, and some programs write, a first line that names the separator.
    named = re.fullmatch(r'\ufeff?"?sep=(.)"?\s*', first.decode(errors="replace"), re.IGNORECASE)
    # A comma, unless the header has only others.
    guess = next((mark for mark in _OTHER_MARKS if mark.encode() in first and b"," not in first), ",")
    mark = named[1] if named else guess
    content.seek(len(first) if named else 0)
    # The header is read as a row, because pandas would rename repeated and empty names, and truncate longer rows.
    options: dict[str, Any] = {"header": None, "dtype": object, "keep_default_na": False, "encoding": "utf-8-sig"}
    options["skipinitialspace"] = True  # as in "id, time, label"; spaces in quotes are part of an entry
    commas = CommaColumns()
    try:
        with pandas.read_csv(content, sep=mark, chunksize=size or sys.maxsize, **options) as reader:
            for frame in reader:
                # Only the missing ends of short rows are NaN.
                rows = frame.fillna("").to_numpy(dtype=object)
                yield rows if mark == "," else commas.mark(rows)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError) as error:
        what = "rows of several sizes" if isinstance(error, pandas.errors.ParserError) else "an empty file"
        got = f"{what} ({' '.join(str(error).split()).rpartition('C error: ')[2].rstrip('.')})"
        raise data_error(path, got, "a file with one entry per column in each row", "correct the file") from error


def _header_of(path: Path, rows: Entries) -> list[str]:
    """Return the names of the columns, some of which may be empty."""
    header = [str(name).strip() for name in rows[0]] if len(rows) else []
    counts = Counter(header)
    twice = next((name for name in header if name and counts[name] > 1), None)
    if twice is not None:
        raise data_error(path, f"two columns {quote(twice)}", "a file with columns of different names", "rename one")
    return header


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces of whole sequences; a position is a data row.

    A first pass checks whether the rows of each sequence are consecutive. If not, the file is read whole, because its
    last row may belong to its first sequence.
    """
    _check_bytes(path)
    header = _header_of(path, next(_chunks(path), np.empty((0, 0), dtype=object)))
    names = [name for name in header if name]
    entries = _entries_of(path)[0] if columns.wide or sum(map(bool, map(_NUMBERED.fullmatch, names))) > 2 else {}
    is_long = not columns.wide and not (entries and step_columns(path, columns, entries))
    if is_long and _text_column(path, columns, names) is None:
        id_name, _ = _id_column(path, columns, names)
        place = header.index(id_name)
        is_consecutive, has_numbers = _survey_ids(_chunks(path), place)
        if is_consecutive:
            file = _File(path, header, place, columns, has_numbers)
            if start:
                # The first rows decide how the others are read.
                for piece in islice(file.pieces(0), 1):
                    deque(sift(piece, []), maxlen=0)
            yield from file.pieces(start[0] if start else 0)
            return
    if not start:
        yield from entry_pieces(path, entries or _entries_of(path)[0], columns)


def _row_piece(path: Path, entries: dict[str, Entries], columns: Columns, steps: list[str]) -> Piece:
    """Return the rows of a file with a sequence per row as one piece."""
    count = len(next(iter(entries.values())))

    def read(low: int, high: int) -> Records:
        rows = {name: entry[low:high] for name, entry in entries.items()}
        is_text = columns.sequence is not None
        return _whole_rows(path, rows, columns, low) if is_text else _wide_rows(path, rows, columns, steps, low)

    return Piece(count, read, (count,), lambda row: f"data row {row}")


def entry_pieces(path: Path, entries: dict[str, Entries], columns: Columns) -> Iterator[Piece]:
    """Yield the sequences of columns of texts as one piece."""
    names = list(entries)
    text, steps = _text_column(path, columns, names), step_columns(path, columns, entries)
    if text is not None or steps or columns.wide:
        yield _row_piece(path, entries, replace(columns, sequence=text), steps)
        return
    name, _ = _id_column(path, columns, names)
    yield _File(path, names, names.index(name), columns, all(map(is_plain, entries[name]))).regrouped(entries)


@dataclass(frozen=True)
class _File:
    """A file that is read in pieces: its columns, the place of the ids, and whether all ids are numbers."""

    path: Path
    header: list[str]
    place: int
    columns: Columns
    has_numbers: bool
    # The columns of the first rows, and whether they contain tokens; later rows are read in the same way.
    settled: list[tuple[Columns, bool]] = field(default_factory=list)

    def pieces(self, start: int) -> Iterator[Piece]:
        """Yield pieces from a data row on."""
        for first, rows in _whole_sequences(_chunks(self.path), self.place, start):
            yield self._piece(rows, np.arange(first, first + len(rows)), first + len(rows))

    def regrouped(self, entries: dict[str, Entries]) -> Piece:
        """Return all rows, sorted by sequence, as one piece."""
        codes, _ = require("pandas", "data").factorize(entries[self.header[self.place]])
        order = np.argsort(codes, kind="stable")
        rows = np.stack([entries[name][order] if name else np.full(len(order), "") for name in self.header], axis=1)
        return self._piece(rows, order, len(rows))

    def _piece(self, rows: Entries, numbers: npt.NDArray[np.int64], end: int) -> Piece:
        """Return a piece of whole sequences; ``numbers`` are those of the rows in the file."""
        starts = _run_starts(rows[:, self.place])
        bounds = np.append(starts, len(rows))

        def place(row: int) -> str:
            return f"data row {numbers[starts[row]]} (id {quote(rows[starts[row], self.place])})"

        def read(low: int, high: int) -> Records:
            here = slice(bounds[low], bounds[high])
            entries = {name: rows[here, column] for column, name in enumerate(self.header) if name}
            columns, is_tokens = self.settled[0] if self.settled else (self.columns, None)
            name = self.header[self.place]
            records = records_of_rows(self.path, entries, columns, name, numbers[here], is_tokens)
            if not self.settled:
                self.settled.append((records.columns, records.is_tokens))
            return records if self.has_numbers else replace(records, ids=tuple(map(str, records.ids or ())))

        return Piece(len(starts), read, (end,), place)


def _chunks(path: Path) -> Iterator[Entries]:
    """Yield the rows of a file in chunks, the header first."""
    with opened(path) as file:
        yield from _parsed(path, file, ROWS)


def _whole_sequences(chunks: Iterator[Entries], place: int, start: int) -> Iterator[tuple[int, Entries]]:
    """Yield data rows from ``start`` on, in runs of whole sequences, each with the number of its first row."""
    number, first = 0, start
    held: Entries | None = None
    for count, chunk in enumerate(chunks):
        if held is not None:
            # The last sequence may continue in this chunk.
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


def _run_starts(ids: Entries) -> npt.NDArray[np.int64]:
    """Return 0 and the places where an id differs from the previous one."""
    return np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])


def _survey_ids(chunks: Iterator[Entries], place: int) -> tuple[bool, bool]:
    """Return whether the rows of each sequence are consecutive, and whether all ids are whole numbers."""
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
    # Eight bytes per sequence. If two ids have the same hash, the file is read whole.
    every = np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, dtype=np.uint64)
    return not bool((every[1:] == every[:-1]).any()), has_numbers


def _check_bytes(path: Path) -> None:
    """Raise a DataError with the line of the first byte that is not UTF-8 text."""
    check_readable(path)
    line, rest = 1, b""
    with opened(path) as file:
        while chunk := file.read(BYTES):
            # Chunks may split characters, so whole lines are decoded.
            block, newline, rest = (rest + chunk).rpartition(b"\n")
            decode(path, block, line)
            line += block.count(b"\n") + len(newline)
    decode(path, rest, line)
