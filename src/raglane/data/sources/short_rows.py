"""Rows of CSV files that end before the last column of the header.

pandas fills them up with empty entries. These are marked here, because a file is read in chunks,
and only later it is clear whether a row is an element, a text, or a sequence with a step per
column, which may be shorter.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from raglane._utils.messages import argument, count_of, quote_all
from raglane.data.sources.files import data_error
from raglane.data.sources.layout import PlainTable
from raglane.data.typed.arrays import Entries, Integers
from raglane.data.typed.column import Column, TextColumn


class _Absent(str):
    """The empty text in place of an entry that its row lacks, with the line of the row."""

    line: int


class ShortRows:
    """The short rows of a table, which is read in chunks, the header first; ``open`` opens it
    again.
    """

    def __init__(self, open: Callable[[], PlainTable]) -> None:
        self._sizes = _row_sizes(open)
        # The number of rows in the chunks so far, and in those read from ``_sizes``.
        self._count = self._read = 0

    def mark(self, rows: Entries) -> Entries:
        """Mark the missing entries of these rows."""
        first = self._count
        self._count = self._count + len(rows)
        # The last entry of a short row is empty, so that other files are not read twice.
        blank = np.flatnonzero(rows[:, -1] == "")
        marked = rows.copy() if len(blank) else rows
        for row in blank.tolist():
            line, size = self._size(first + row)
            for place in range(size, rows.shape[1]):
                entry = marked[row, place] = _Absent()
                entry.line = line
        return marked

    def _size(self, row: int) -> tuple[int, int]:
        """Return the line of a row, and the number of its entries."""
        size = next(islice(self._sizes, row - self._read, None), (0, sys.maxsize))
        self._read = row + 1
        return size


class _LineReader:
    """The lines of a text; ``last`` is the one that was read last."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.last = ""

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.last = line
            yield line


def _row_sizes(open: Callable[[], PlainTable]) -> Iterator[tuple[int, int]]:
    """Yield the line, from 1, in which each row begins, and the number of its entries."""
    table = open()
    with table.file as file:
        lines = _LineReader(io.TextIOWrapper(file, "utf-8-sig", "replace", newline=""))
        reader = csv.reader(lines, delimiter=table.mark, skipinitialspace=True)
        end = 0
        # An entry of more than 131,072 characters is an error, after which no row counts as short.
        with suppress(csv.Error):
            for row in reader:
                begin = end + 1
                end = reader.line_num
                # pandas skips blank lines.
                if len(row) > 1 or not lines.last.isspace():
                    yield begin + table.skipped, len(row)


def check_ends(path: Path, entries: Mapping[str, Column], rows: Sequence[int] | Integers) -> None:
    """Raise a DataError for the first row that lacks its last entries; ``rows`` are the numbers of
    the rows in the file.
    """
    short = _short_rows(entries)
    if not short:
        return
    row, entry = short[0]
    names = [
        name
        for name, column in entries.items()
        if isinstance(column, TextColumn) and isinstance(column.entries[row], _Absent)
    ]
    got = f"data row {rows[row]} without {quote_all(names)}"
    skip = argument("on_bad_row", "skip")
    fix = (
        f"complete the row, which may have been cut, or write its separators; {skip} leaves it out"
    )
    rule = "a row with one entry per column of the header"
    raise data_error(path, got, rule, fix, entry.line)


def note_ends(entries: Mapping[str, Column]) -> list[str]:
    """Return the note about rows that lack their last entries."""
    short = _short_rows(entries)
    if not short:
        return []
    rows = count_of(len(short), "row")
    return [f"{rows} with fewer entries than the header; the first: line {short[0][1].line}"]


def _short_rows(entries: Mapping[str, Column]) -> list[tuple[int, _Absent]]:
    """Return the rows that lack the entry of the last column, and these entries."""
    column = entries[next(reversed(list(entries)))]
    last = column.entries.tolist() if isinstance(column, TextColumn) else ()
    return [(row, entry) for row, entry in enumerate(last) if isinstance(entry, _Absent)]
