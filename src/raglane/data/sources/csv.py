"""CSV in long form: one row per element, and a column of ids that assigns rows to sequences.

Tabs, semicolons or bars may separate the entries if the header has no comma; numbers may then have
decimal commas. Sequences are in the order in which their ids first appear, and the rows of a
sequence in the order of the time column, or else of the file. A feature column contains numbers (an
empty entry, ``NaN`` or ``NA`` is missing) or, if most entries are words, categories. A single
column, at least half of it words, contains tokens; so does the first of several columns without
numbers.

If no column is named, the id and the time column are found by their names (``id``, ``sequence_id``,
...; ``time``, ``step``, ``t``, ..., unless the entries are words), or the time as the only column
of dates. The label column is the only column of words (or else of integers) that, to classify, is
the same in all rows of a sequence; all other columns are features. A column without a name, such as
the row numbers of pandas, is left out. A file whose first row is data has no header, and is
refused.

A file without an id column, but with a column called ``text`` (``sentence``, ...) or named as the
sequence, has a text per row instead.

A row that ends before the last column is refused, except in a file whose columns are steps.

Ids are integers if all are written as integers of at most 18 digits, else texts. A feature beyond
float32, such as 1e999, is infinite, and so missing.
"""

from __future__ import annotations

import io
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, count_of, quote, quote_all, require
from raglane.data.assemble.elements import records_of_rows
from raglane.data.assemble.grouping import is_plain
from raglane.data.assemble.pieces import BYTES, ROWS, Piece, Start, sift
from raglane.data.assemble.rows import read_columns, roles_of, row_piece
from raglane.data.assemble.times import joined_ids
from raglane.data.records import Columns, Records
from raglane.data.roles import Facts, Roles, Shape
from raglane.data.sources.files import (
    Parsed,
    check_readable,
    data_error,
    decode,
    is_named,
    opened,
    read_bytes,
)
from raglane.data.sources.layout import UTF16, Plain, plain
from raglane.data.sources.plain_csv import plain_columns
from raglane.data.sources.short_rows import ShortRows
from raglane.data.typed.column import Column, Written, numbers_in
from raglane.data.typed.dates import is_date
from raglane.data.typed.decimals import CommaColumns, Entries


def read(path: Path, columns: Columns) -> Records:
    """Read a CSV file in long form."""
    return parse(path, columns)(columns)


def parse(path: Path, columns: Columns) -> Parsed:
    """Parse a CSV file to typed columns, once for all tasks."""
    entries, notes = entries_of(path, columns)

    def records(asked: Columns) -> Records:
        result = read_columns(path, entries, asked)
        return replace(result, notes=(*notes, *result.notes))

    return records


def entries_of(
    path: Path, columns: Columns, content: bytes | None = None
) -> tuple[dict[str, Column], tuple[str, ...]]:
    """Return the entries of each column as texts, and notes on omitted columns; ``content`` is that
    of the file, if it is no CSV file.
    """
    content = read_bytes(path) if content is None else content

    def table_again() -> Plain:
        return plain(path, io.BytesIO(content), columns)

    table = table_again()
    if not content.startswith(UTF16):
        # pandas decodes the file too, but does not report the place of an invalid byte.
        decode(path, content)
    plain_table = plain_columns(table.file.read(), table.mark) if table.skipped == 0 else None
    if plain_table is not None:
        names, typed = plain_table
        header = _header_of(path, np.array([names], dtype=object), columns)
        pairs = zip(header, typed, strict=True)
        return {name: column for name, column in pairs if name}, _noted(header, table)
    rows = next(_parsed(path, table_again(), table_again, None))
    header = _header_of(path, rows, columns)
    if len(rows) == 1:
        raise data_error(
            path, "a header and no rows", "a file with at least one sequence", "check the file"
        )
    return _named_columns(header, rows[1:]), _noted(header, table)


def _noted(header: list[str], table: Plain) -> tuple[str, ...]:
    nameless = header.count("")
    if not nameless:
        return table.notes
    left_out = f"left out, because they have no name: {count_of(nameless, 'column')}"
    return (*table.notes, left_out)


def _named_columns(header: list[str], rows: Entries) -> dict[str, Column]:
    return {name: Written(rows[:, place]) for place, name in enumerate(header) if name}


def _parsed(
    path: Path, table: Plain, again: Callable[[], Plain], size: int | None
) -> Iterator[Entries]:
    """Yield the rows of an open file, the header first, in arrays of ``size`` rows, or in one;
    ``again`` opens it again.
    """
    pandas = require("pandas", "data")
    mark = table.mark
    # The header is read as a row, because pandas would rename repeated and empty names, and
    # truncate longer rows.
    options: dict[str, Any] = {
        "header": None,
        "dtype": object,
        "keep_default_na": False,
        "encoding": "utf-8-sig",
    }
    options["skipinitialspace"] = (
        True  # as in "id, time, label"; spaces in quotes are part of an entry
    )
    commas = CommaColumns()
    short = ShortRows(again)
    try:
        with pandas.read_csv(
            table.file, sep=mark, chunksize=size or sys.maxsize, **options
        ) as reader:
            for frame in reader:
                rows = short.mark(frame.fillna("").to_numpy(dtype=object))
                yield rows if mark == "," else commas.mark(rows)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError) as error:
        what = (
            "rows of several sizes"
            if isinstance(error, pandas.errors.ParserError)
            else "an empty file"
        )
        got = f"{what} ({' '.join(str(error).split()).rpartition('C error: ')[2].rstrip('.')})"
        raise data_error(
            path, got, "a file with one entry per column in each row", "correct the file"
        ) from error


def _header_of(path: Path, rows: Entries, columns: Columns) -> list[str]:
    """Return the names of the columns, some of which may be empty, such as that of row numbers."""
    header = [str(name).strip() for name in rows[0]] if len(rows) else []
    header = [name if is_named(name, columns) else "" for name in header]
    _check_header(path, header, rows)
    counts = Counter(header)
    twice = next((name for name in header if name and counts[name] > 1), None)
    if twice is not None:
        rule = "a file with columns of different names"
        fix = "rename one, or add a header"
        raise data_error(path, f"two columns {quote(twice)}", rule, fix)
    return header


def _check_header(path: Path, header: list[str], rows: Entries) -> None:
    """Raise a DataError if the first row has data: numbers, dates, and words that are in other rows
    too.
    """
    names = [name for name in header if name]
    numbers, odd = numbers_in(np.array(names, dtype=object))
    # Columns may be called 0, 1, ..., or by the wavelengths of a spectrum, or by dates.
    steps = np.diff(numbers)
    is_numbered = names == ["0"] or (
        len(steps) and ((steps == 1).all() or (len(steps) > 2 and (steps > 0).all()))
    )
    is_numbered = is_numbered or all(map(is_date, names))
    words = [
        name for name, is_word in zip(names, odd, strict=True) if is_word and not is_date(name)
    ]
    if (
        len(words) < len(names)
        and not is_numbered
        and all(word in rows[1:, header.index(word)] for word in words)
    ):
        raise data_error(
            path,
            f"no header, but {quote_all(names)}",
            "a file with a header",
            f"add it as the first line, or pass {argument('no_header', value=True, of='Columns')}",
        )


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces of whole sequences; a position is a data row.

    A first pass checks whether the rows of each sequence are consecutive. If not, the file is read
    whole, because its last row may belong to its first sequence.
    """
    _check_bytes(path)
    rows = next(_chunks(path, columns), np.empty((0, 0), dtype=object))
    header = _header_of(path, rows, columns)
    # The first rows decide about a row per element; about steps and texts, all rows.
    roles = roles_of(path, Facts(_named_columns(header, rows[1:])), columns)
    if roles.shape is Shape.ELEMENTS and roles.id:
        places = tuple(map(header.index, roles.id))
        is_consecutive, has_numbers = _survey_ids(_chunks(path, columns), places)
        if is_consecutive:
            file = _File(path, header, places, columns, roles, has_numbers)
            if start:
                # The first rows decide how the others are read.
                for piece in islice(file.pieces(0), 1):
                    deque(sift(piece, []), maxlen=0)
            yield from file.pieces(start[0] if start else 0)
            return
    if not start:
        yield from column_pieces(path, entries_of(path, columns)[0], columns)


def column_pieces(path: Path, table: Mapping[str, Column], columns: Columns) -> Iterator[Piece]:
    """Yield the sequences of typed columns as one piece."""
    roles = roles_of(path, Facts(table), columns)
    if roles.shape is not Shape.ELEMENTS:
        yield row_piece(path, table, columns, roles)
        return
    if not roles.id:
        count = len(next(iter(table.values())))
        yield _series_piece(path, table, columns, roles, np.arange(count))
        return
    ids = joined_ids([table[name].words() for name in roles.id])
    codes, different = Written(ids).codes()
    has_numbers = all(map(is_plain, different))
    order = np.argsort(codes, kind="stable")
    names = list(table)
    places = tuple(map(names.index, roles.id))
    file = _File(path, names, places, columns, roles, has_numbers)
    ordered = {name: column.take(order) for name, column in table.items()}
    yield file.piece(ordered, order, len(order))


def _series_piece(
    path: Path,
    table: Mapping[str, Column],
    columns: Columns,
    roles: Roles,
    rows: npt.NDArray[np.int64],
) -> Piece:
    """Return one series as a piece; its rows can be left out one by one."""
    facts = Facts(table)
    words = [name for name in table if name not in roles.time and facts.share_of_words(name) > 0.5]
    numbers = [name for name in table if name not in (*roles.time, *words)]
    # A row by itself does not tell whether a column has numbers.
    settled = replace(
        columns, categorical=tuple(dict.fromkeys((*(columns.categorical or ()), *words)))
    )

    def read_rows(low: int, high: int) -> Records:
        some = {name: column.take(slice(low, high)) for name, column in table.items()}
        one_by_one = replace(settled, duplicate_times="keep")
        return records_of_rows(path, some, one_by_one, roles, rows[low:high], not numbers)

    def read(low: int, high: int) -> Records:  # noqa: ARG001
        return records_of_rows(path, table, columns, roles, rows)

    def without(bad: list[int]) -> Piece:
        kept = np.delete(np.arange(len(rows)), bad)
        some = {name: column.take(kept) for name, column in table.items()}
        return _series_piece(path, some, columns, roles, rows[kept])

    end = (len(rows),)
    elements = Piece(len(rows), read_rows, end, lambda row: f"data row {rows[row]}")
    return Piece(1, read, end, lambda _: "the series", elements, without)


@dataclass(frozen=True)
class _File:
    """A file that is read in pieces: its columns, the places of the ids, their roles, and whether
    all ids are numbers.
    """

    path: Path
    header: list[str]
    places: tuple[int, ...]
    columns: Columns
    roles: Roles
    has_numbers: bool
    # The columns of the first rows, and whether they contain tokens; later rows are read in the
    # same way.
    settled: list[tuple[Columns, bool]] = field(default_factory=list)

    def pieces(self, start: int) -> Iterator[Piece]:
        """Yield pieces from a data row on."""
        for first, rows in _whole_sequences(_chunks(self.path, self.columns), self.places, start):
            numbers = np.arange(first, first + len(rows))
            yield self.piece(_named_columns(self.header, rows), numbers, first + len(rows))

    def piece(self, table: Mapping[str, Column], numbers: npt.NDArray[np.int64], end: int) -> Piece:
        """Return a piece of whole sequences; ``numbers`` are those of the rows in the file."""
        ids = joined_ids([table[self.header[place]].words() for place in self.places])
        starts = _run_starts(ids)
        bounds = np.append(starts, len(numbers))

        def place(row: int) -> str:
            return f"data row {numbers[starts[row]]} (id {quote(ids[starts[row]])})"

        def read(low: int, high: int) -> Records:
            here = slice(int(bounds[low]), int(bounds[high]))
            rows = {name: column.take(here) for name, column in table.items()}
            columns, is_tokens = self.settled[0] if self.settled else (self.columns, None)
            records = records_of_rows(
                self.path, rows, columns, self.roles, numbers[here], is_tokens
            )
            if not self.settled:
                self.settled.append((records.columns, records.is_tokens))
            return (
                records
                if self.has_numbers
                else replace(records, ids=tuple(map(str, records.ids or ())))
            )

        return Piece(len(starts), read, (end,), place)


def _chunks(path: Path, columns: Columns) -> Iterator[Entries]:
    """Yield the rows of a file in chunks, the header first."""
    with opened(path) as file:
        table = plain(path, file, columns)
        yield from _parsed(path, table, lambda: plain(path, opened(path), columns), ROWS)


def _whole_sequences(
    chunks: Iterator[Entries], places: tuple[int, ...], start: int
) -> Iterator[tuple[int, Entries]]:
    """Yield data rows from ``start`` on, in runs of whole sequences, each with the number of its
    first row.
    """
    number = 0
    first = start
    held: Entries | None = None
    for count, chunk in enumerate(chunks):
        if held is not None:
            # The last sequence may continue in this chunk.
            cut = int(_run_starts(_ids_in(held, places))[-1])
            if cut:
                yield first, held[:cut]
                first = first + cut
                held = held[cut:]
        # The header is a row of the first chunk.
        rows = chunk[1:] if count == 0 else chunk
        number, before = number + len(rows), number
        rows = rows[max(start - before, 0) :]
        if len(rows) == 0:
            continue
        held = rows if held is None else np.concatenate([held, rows])
    if held is not None:
        yield first, held


def _ids_in(rows: Entries, places: tuple[int, ...]) -> Entries:
    """Return the id of each row."""
    if len(places) == 1:
        return rows[:, places[0]]
    return joined_ids([rows[:, place] for place in places])


def _run_starts(ids: Entries) -> npt.NDArray[np.int64]:
    """Return 0 and the places where an id differs from the previous one."""
    return np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])


def _survey_ids(chunks: Iterator[Entries], places: tuple[int, ...]) -> tuple[bool, bool]:
    """Return whether the rows of each sequence are consecutive, and whether all ids are whole
    numbers.
    """
    pandas = require("pandas", "data")
    hashes = []
    has_numbers = True
    last = None
    for count, chunk in enumerate(chunks):
        ids = _ids_in(chunk[int(count == 0) :], places)
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
    line = 1
    rest = b""
    with opened(path) as file:
        is_utf16 = file.read(2) in UTF16
        file.seek(0)
        while not is_utf16 and (chunk := file.read(BYTES)):
            # Chunks may split characters, so whole lines are decoded.
            block, newline, rest = (rest + chunk).rpartition(b"\n")
            decode(path, block, line)
            line += block.count(b"\n") + len(newline)
    decode(path, rest, line)
