"""The layout of a table of texts: what separates its entries, and where its header is.

The first lines decide. The same number of entries in all of them, between tabs, bars, semicolons,
commas or spaces, makes a table. A line with one entry above the header is a title. A line below it
that has words, and no number, where the rows have numbers and dates belongs to the header, such as
units and the further levels of names that pandas writes.

A table with numbers only, whose first column has few whole numbers, is one of the UCR archive: a
label, and the steps of a sequence.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple

from raglane._utils.messages import count_of, quote
from raglane.data.columns import Columns, option
from raglane.data.sources.files import data_error, decode
from raglane.data.typed.column import MISSING

# The bytes and lines that decide.
LOOK = 1 << 18
_LINES = 200
# Separators other than commas, and that of a table between spaces.
_OTHER_MARKS = ("\t", ";", "|")
_SPACES = " "
# The most lines above the header, and below it.
_MOST_TITLES = 12
_MOST_BELOW = 3
# The fewest columns of a table of the UCR archive, and the fewest lines of a column of numbers.
_FEWEST_STEPS = 9
_FEWEST_LINES = 5
_FEWEST_WORDS = 10
# The share of equally long rows in a table.
_MOST_ALIKE = 0.6

# Excel reads, and some programs write, a first line that names the separator.
_NAMED_MARK = re.compile(r'\ufeff?"?sep=(.)"?\s*', re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"?')
# A number, a date or a time.
_is_data = re.compile(
    r"[-+.(]?\d[\d.,:/T+-]*(?:[eE][-+]?\d+)?(?:[ T]\d[\d.:+Z-]*)?[Z%)]?"
).fullmatch
_is_whole = re.compile(r"[-+]?\d+(?:\.0*)?(?:[eE][-+]?0+)?").fullmatch
_MISSING = frozenset((*MISSING, "-", "--", "missing", "unknown", "n.a.", "n.d.", "nil", "#n/a"))
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_Row = list[str]


class PlainTable(NamedTuple):
    """A table with one header, in UTF-8: the open file, and what separates its entries."""

    file: IO[bytes]
    mark: str
    # The lines of the original above the first of ``file``; -1 if a header was added.
    skipped: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _FirstLines:
    """The first lines of a table, of which ``above`` precede the header."""

    mark: str
    above: int = 0
    # The names of the columns; () for those in the line of the header.
    names: tuple[str, ...] = ()
    # The lines that ``names`` replaces, after those above.
    replaced: int = 0
    notes: tuple[str, ...] = ()


def plain(path: Path, file: IO[bytes], columns: Columns) -> PlainTable:
    """Return an open table as one with a single header, and notes about other lines.

    ``file`` is closed if the table had to be written in another way.
    """
    head = file.read(LOOK)
    notes: tuple[str, ...] = ()
    content = None
    if head.startswith(UTF16):
        content = _from_utf16(path, head + file.read())
        head = content[:LOOK]
        notes = ("the text is UTF-16",)
    text = head.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    layout = _layout_of(path, text, columns)
    is_changed = layout.names or layout.mark == _SPACES
    if content is None and not is_changed:
        file.seek(0)
        for _ in range(layout.above):
            file.readline()
        return PlainTable(file, layout.mark, layout.above, layout.notes)
    content = head + file.read() if content is None else content
    file.close()
    content = content.removeprefix(codecs.BOM_UTF8)
    decode(path, content)
    rest = content.split(b"\n", layout.above + layout.replaced)[layout.above + layout.replaced :]
    body = rest[0] if rest else b""
    mark = layout.mark
    if mark == _SPACES:
        mark = "\t"
        body = re.sub(rb"(?m)^[ \t]+|[ \t\r]+$", b"", body)
        body = re.sub(rb"[ \t]+", b"\t", body)
    if layout.names:
        body = _line(layout.names, mark) + body
    skipped = layout.above + (layout.replaced - 1 if layout.names else 0)
    return PlainTable(io.BytesIO(body), mark, skipped, (*notes, *layout.notes))


def is_table(text: str) -> bool:
    """Return True if the first lines of a text are a table, mostly of numbers."""
    lines = _first_lines(text)
    if lines and _NAMED_MARK.fullmatch(lines[0]):
        return True
    mark = _mark_of(lines)
    if mark is None:
        return len(lines) >= _FEWEST_LINES and all(map(_is_data, map(str.strip, lines[1:])))
    body = [entry for row in _body(_rows(lines, mark)) for entry in row if not _is_missing(entry)]
    return 2 * sum(map(bool, map(_is_data, body))) >= len(body) > 0


def are_numbers(text: str) -> bool:
    """Return True if the first lines of a text have only numbers, in rows of any lengths."""
    words = re.split(r"[\s|:;]+", " ".join(_first_lines(text)).strip())
    return len(words) >= _FEWEST_WORDS and all(
        _is_data(word) or _is_missing(word) for word in words
    )


def has_header(text: str) -> bool:
    """Return False if the first line of a table has numbers or dates where other lines do."""
    rows = rows_of("\n".join(_first_lines(text)))
    if len(rows) < 2:
        return True
    kinds = _are_data(_body(rows), len(rows[0]))
    return not any(map(_is_data, _entries(rows[0], kinds)))


def rows_of(text: str) -> list[_Row]:
    """Return the entries of the lines of a small table."""
    lines = list(filter(str.strip, text.split("\n")))
    mark = _mark_of(lines)
    return _rows(lines, _guess(text) if mark is None else mark)


def _from_utf16(path: Path, content: bytes) -> bytes:
    try:
        return content.decode("utf-16").encode()
    except UnicodeError as error:
        got = "a damaged text in UTF-16"
        fix = "write it again, in UTF-8"
        raise data_error(path, got, "a text in UTF-8 or UTF-16", fix) from error


def _line(names: Sequence[str], mark: str) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=mark, lineterminator="\n").writerow(names)
    return text.getvalue().encode()


def _first_lines(text: str) -> list[str]:
    """Return the whole lines at the beginning of a text; [] if a quoted entry has several."""
    lines = text.split("\n")
    # The last one may have been cut.
    lines = [line.rstrip("\r") for line in (lines[:-1] if len(lines) > 1 else lines)][:_LINES]
    return [] if any(line.count('"') % 2 for line in lines) else lines


def _rows(lines: Sequence[str], mark: str) -> list[_Row]:
    """Split lines into entries; a header may begin with a # of its own."""
    if mark == _SPACES:
        return [re.sub(r"^\s*#\s", "#", line).split() for line in lines]
    return [[entry.strip() for entry in _split(line, mark)] for line in lines]


def _split(line: str, mark: str) -> list[str]:
    if '"' not in line:
        return line.split(mark) if line.strip() else []
    row: list[str] = []
    # A very long entry is refused later.
    with suppress(csv.Error):
        row = next(csv.reader([line.replace("\r", " ")], delimiter=mark, skipinitialspace=True))
    return row


def _body(rows: Sequence[_Row]) -> list[_Row]:
    """Return rows that are below all lines of a header."""
    rows = [row for row in rows if row]
    return list(rows[max(min(_MOST_BELOW + 1, len(rows) - 2), len(rows) > 1) :])


def _mark_of(lines: Sequence[str]) -> str | None:
    """Return the separator that makes most lines equally long; None for lines of one entry."""
    filled = [line for line in lines if line.strip()]
    if not filled:
        return None
    first = _QUOTED.sub("", filled[0])
    named = [mark for mark in (",", *_OTHER_MARKS) if mark in first]
    ragged: list[str] = []
    for mark in (*named[:1], *_OTHER_MARKS, ","):
        widths = Counter(map(len, _body(_rows(filled, mark))))
        width, count = widths.most_common(1)[0]
        if width > 1 and count >= _MOST_ALIKE * widths.total():
            return mark
        if width > 1 and mark in named:
            ragged.append(mark)
    if ragged:
        return ragged[0]
    is_quoted = any('"' in line for line in filled)
    return _SPACES if not is_quoted and _are_numbers(filled) else None


def _are_numbers(lines: Sequence[str]) -> bool:
    """Return True if lines have equally many entries between spaces, at least half of them numbers."""
    body = _body(_rows(lines, _SPACES))
    if len(body[0]) < 2 or len({len(row) for row in body}) > 1:
        return False
    entries = [entry for row in body for entry in row]
    return 2 * sum(bool(_is_data(entry)) or _is_missing(entry) for entry in entries) >= len(entries)


def _is_missing(entry: str) -> bool:
    return entry.lower() in _MISSING


def _layout_of(path: Path, text: str, columns: Columns) -> _FirstLines:
    lines = _first_lines(text)
    named = _NAMED_MARK.fullmatch(lines[0]) if lines else None
    if named is not None:
        return _FirstLines(named[1], above=1)
    mark = _mark_of(lines)
    if mark is None:
        mark = _guess(text)
        return _given(path, _FirstLines(mark), [line.split(mark) for line in lines], columns)
    notes = ("the entries are separated by spaces",) if mark == _SPACES else ()
    rows = _rows(lines, mark)
    width = Counter(map(len, _body(rows))).most_common(1)[0][0]
    is_named = columns.no_header or columns.header is not None
    above = _titles(rows, width, is_named=is_named)
    lead = next((line for line in lines[:above] if line.strip()), None)
    if lead is not None:
        notes = (*notes, f"left out above the table: {count_of(above, 'line')}, {quote(lead)}")
    layout = _FirstLines(mark, above, notes=notes)
    if is_named:
        return _given(path, layout, rows[above:], columns)
    kinds = _are_data(_body(rows[above:]), width)
    if any(map(_is_data, _entries(rows[above], kinds))):
        return _archived(layout, rows[above:], columns)
    count = _count_below(rows[above:], kinds) if any(kinds) else 0
    if not count and not lines[above].startswith("#"):
        return layout
    return _joined(layout, rows[above : above + count + 1], lines[above + 1 :])


def _count_below(rows: Sequence[_Row], kinds: Sequence[bool]) -> int:
    """Return the number of lines that belong to the header, after the first."""
    header, *below = rows
    most = min(_MOST_BELOW, len(below) - 1)
    count = 0
    # The same line again is a mistake, which is refused later.
    while count < most and below[count] != header and _is_below(below, count, kinds):
        count += 1
    return count


def _guess(text: str) -> str:
    """Return a comma, unless the first line has only other separators, except in quotes."""
    first = _QUOTED.sub("", text.split("\n", 1)[0])
    return next((mark for mark in _OTHER_MARKS if mark in first and "," not in first), ",")


def _titles(rows: Sequence[_Row], width: int, *, is_named: bool) -> int:
    """Return the number of lines above the header: blank ones, and those with one entry."""
    above = 0
    while above < min(_MOST_TITLES, len(rows) - 1) and _is_title(
        rows[above], 0 if is_named else width
    ):
        above += 1
    below = rows[above:]
    kinds = _are_data(_body(below), width)
    if width < 2 or not any(kinds) or len(below[0]) != width:
        return 0
    return 0 if not is_named and any(map(_is_data, _entries(below[0], kinds))) else above


def _is_title(row: _Row, width: int) -> bool:
    is_comment = bool(row) and row[0].startswith("#") and len(row) != width
    return is_comment or sum(map(bool, row)) < 2


def _entries(row: _Row, kinds: Sequence[bool]) -> list[str]:
    """Return the entries of a row in the columns of numbers and dates."""
    return [entry for entry, is_data in zip(row, kinds, strict=False) if is_data]


def _are_data(rows: Sequence[_Row], width: int) -> list[bool]:
    """Return for each column whether its entries are numbers or dates."""
    kinds = []
    for at in range(width):
        entries = [row[at] for row in rows if len(row) > at and not _is_missing(row[at])]
        numbers = sum(map(bool, map(_is_data, entries)))
        kinds.append(bool(entries) and numbers >= 0.8 * len(entries))
    return kinds


def _is_below(rows: Sequence[_Row], count: int, kinds: Sequence[bool]) -> bool:
    """Return True for a line of the header: words and nothing else in the columns of numbers."""
    row = rows[count]
    numbers = _entries(row, kinds)
    words = [entry for entry in numbers if not _is_missing(entry)]
    if len(row) > len(kinds) or len(numbers) < 2 or not words or any(map(_is_data, words)):
        return False
    others = [(at, entry) for at, entry in enumerate(row) if entry and not kinds[at]]
    # A word that other rows have too is one of a row.
    return not any(
        entry in other[at : at + 1] for at, entry in others for other in rows[count + 1 :]
    )


def _joined(layout: _FirstLines, header: Sequence[_Row], lines: Sequence[str]) -> _FirstLines:
    """Return the layout of a header of several lines."""
    first, *below = [[*row, *[""] * (len(header[0]) - len(row))] for row in header]
    first[0] = first[0].lstrip("# ")
    # A line that names the first column only has the name of the index.
    index = next((row[0] for row in below if row[0] and not any(row[1:])), first[0])
    names = [index, *first[1:]]
    if len(set(names)) < len(names):
        levels = [row for row in (first, *below) if any(row[1:])]
        columns = [[row[at] for row in levels] for at in range(1, len(first))]
        names = [index, *("_".join(filter(None, column)) for column in columns)]
    count = len(below)
    notes = layout.notes
    if count:
        line = quote(lines[0])
        notes = (*notes, f"left out below the header: {count_of(count, 'line')}, {line}")
    return _FirstLines(layout.mark, layout.above, tuple(names), 1 + count, notes)


def _given(path: Path, layout: _FirstLines, rows: Sequence[_Row], columns: Columns) -> _FirstLines:
    """Return the layout of a table without a header, whose columns have been named."""
    if not columns.no_header and columns.header is None:
        return layout
    width = Counter(map(len, rows)).most_common(1)[0][0] if rows else 1
    names = tuple(f"c{at}" for at in range(1, width + 1))
    if columns.header is not None:
        names = tuple(name.strip() for name in columns.header.split(","))
    if len(names) != width:
        got = f"{count_of(len(names), 'name')} for {count_of(width, 'column')}"
        fix = f"pass as many with {option('header')}"
        raise data_error(path, got, "a file with one column per name", fix)
    return _FirstLines(layout.mark, layout.above, names, 0, layout.notes)


def _are_counted(rows: Sequence[_Row]) -> bool:
    """Return True if the second column counts the rows of each entry of the first: these are ids,
    and rows are elements.
    """
    long = [row for row in rows if len(row) > 1]
    alike = [(one[1], two[1]) for one, two in pairwise(long) if one[0] == two[0]]
    whole = [(int(one), int(two)) for one, two in alike if one.isdigit() and two.isdigit()]
    return len(whole) == len(alike) > 0 and all(two == one + 1 for one, two in whole)


def _archived(layout: _FirstLines, rows: Sequence[_Row], columns: Columns) -> _FirstLines:
    """Return the layout of a table of the UCR archive: labels, and steps."""
    width = len(rows[0])
    entries = [entry for row in rows for entry in row if not _is_missing(entry)]
    labels = Counter(row[0] for row in rows if row)
    is_archived = (
        columns.task == "classify"
        and layout.mark in ("\t", _SPACES)
        and width > _FEWEST_STEPS
        and all(map(_is_data, entries))
        and all(map(_is_whole, labels))
        and 2 * len(labels) <= max(len(rows), 4)
        and not all(map(str.isdigit, rows[0]))
        and not _are_counted(rows)
    )
    if not is_archived:
        return layout
    names = ("label", *(f"t{at}" for at in range(width - 1)))
    note = f"no header: the first of {width} columns is the label, the others are steps"
    return _FirstLines(layout.mark, layout.above, names, 0, (*layout.notes, note))
