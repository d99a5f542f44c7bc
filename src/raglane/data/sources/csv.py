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

A file without an id column, or with another id in each row, and with a column called ``text``
(``sentence``, ...) or named as the sequence, has a text per row instead.

A row that ends before the last column is refused, except in a file whose columns are steps.

Ids are integers if all are written as integers of at most 18 digits, else texts. A feature beyond
float32, such as 1e999, is infinite, and so missing.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.messages import count_of, quote, quote_all, require
from raglane.data.columns import Columns, is_named, option
from raglane.data.sources.files import (
    BYTES,
    ROWS,
    check_readable,
    data_error,
    decode,
    opened,
    read_bytes,
)
from raglane.data.sources.layout import UTF16, PlainTable, plain
from raglane.data.sources.plain_csv import plain_blocks, plain_columns
from raglane.data.sources.short_rows import ShortRows
from raglane.data.sources.table import SourceTable
from raglane.data.typed.arrays import Bools, Entries
from raglane.data.typed.column import Column, TextColumn, numbers_in
from raglane.data.typed.dates import is_date
from raglane.data.typed.decimals import CommaColumns

# The name of a column of dates without one, and the number of rows that tell it.
_TIME = "time"
_FEW = 50


def table_of(path: Path, columns: Columns, content: bytes | None = None) -> SourceTable:
    """Return the columns of a CSV file, of texts; ``content`` is that of the file, if it is no CSV
    file.
    """
    content = read_bytes(path) if content is None else content

    def table_again() -> PlainTable:
        return plain(path, io.BytesIO(content), columns)

    table = table_again()
    is_plain = content.isascii() and b"\0" not in content
    if not is_plain and not content.startswith(UTF16):
        # pandas decodes the file too, but does not report the place of an invalid byte.
        decode(path, content)
    plain_table = plain_columns(table.file.read(), table.mark) if table.skipped == 0 else None
    if plain_table is not None:
        names, typed = plain_table
        header = header_of(path, np.array([names], dtype=object), columns)
        pairs = zip(header, typed, strict=True)
        return SourceTable(
            path, {name: column for name, column in pairs if name}, _noted(header, table)
        )
    rows = next(_parsed(path, table_again(), table_again, None))
    header = header_of(path, rows, columns)
    if len(rows) == 1:
        raise data_error(
            path, "a header and no rows", "a file with at least one sequence", "check the file"
        )
    return SourceTable(path, named_columns(header, rows[1:]), _noted(header, table))


def _noted(header: list[str], table: PlainTable) -> tuple[str, ...]:
    nameless = header.count("")
    if not nameless:
        return table.notes
    left_out = f"left out, because they have no name: {count_of(nameless, 'column')}"
    return (*table.notes, left_out)


def named_columns(header: list[str], rows: Entries) -> dict[str, Column]:
    """Return the columns with a name."""
    return {name: TextColumn(rows[:, place]) for place, name in enumerate(header) if name}


def _parsed(
    path: Path, table: PlainTable, again: Callable[[], PlainTable], size: int | None
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


def header_of(path: Path, rows: Entries, columns: Columns) -> list[str]:
    """Return the names of the columns, some of which may be empty, such as that of row numbers."""
    header = [str(name).strip() for name in rows[0]] if len(rows) else []
    header = [name if is_named(name, columns) else "" for name in header]
    dates = [at for at, name in enumerate(header) if not name and _are_dates(rows[1:, at])]
    if len(dates) == 1 and _TIME not in header:
        # The index of a table of pandas.
        header[dates[0]] = _TIME
    _check_header(path, header, rows)
    counts = Counter(header)
    twice = next((name for name in header if name and counts[name] > 1), None)
    if twice is not None:
        rule = "a file with columns of different names"
        fix = "rename one, or add a header"
        raise data_error(path, f"two columns {quote(twice)}", rule, fix)
    return header


def _are_dates(entries: Entries) -> bool:
    """Return True if the first entries are dates."""
    words = entries[:_FEW].tolist()
    return bool(words) and all(map(is_date, words))


def _words_among(names: list[str], odd: Bools) -> list[str]:
    return [name for name, is_word in zip(names, odd, strict=True) if is_word and not is_date(name)]


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
    words = _words_among(names, odd)
    repeated = [word for word in words if word in rows[1:, header.index(word)]]
    is_data = len(words) < len(names) and not is_numbered and len(repeated) == len(words)
    # A label and a text of several words, such as those of messages.
    is_text = len(repeated) == 1 and any(word.count(" ") > 1 for word in words)
    if is_data or is_text:
        raise data_error(
            path,
            f"no header, but {quote_all(names)}",
            "a file with a header",
            f"add it as the first line, or pass {option('no_header', value=True)}",
        )


def chunks(path: Path, columns: Columns) -> Iterator[Entries]:
    """Yield the rows of a file in chunks, the header first."""
    with opened(path) as file:
        table = plain(path, file, columns)
        yield from _parsed(path, table, lambda: plain(path, opened(path), columns), ROWS)


def plain_tables(
    path: Path, header: list[str], columns: Columns, some: Collection[str] = ()
) -> Iterator[dict[str, Column] | None]:
    """Yield the columns of a large plain file, or some of them, in blocks; None ends another
    one.
    """
    with opened(path) as file:
        table = plain(path, file, columns)
        is_same = table.file is file and table.skipped == 0
        mark = table.mark
    named = {at: name for at, name in enumerate(header) if name in (some or header) and name}
    for block in plain_blocks(path, mark, len(header), list(named)) if is_same else (None,):
        if block is None:
            yield None
            return
        if len(block[0]):
            yield dict(zip(named.values(), block, strict=True))


def check_bytes(path: Path) -> None:
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
            if b"\0" in block or not block.isascii():
                decode(path, block, line)
            line += block.count(b"\n") + len(newline)
    decode(path, rest, line)
