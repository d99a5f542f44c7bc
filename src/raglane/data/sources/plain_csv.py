"""Large CSV files in the plainest form, read by Arrow: many times faster than entry by entry.

A file is plain if no entry is quoted, no space follows a separator, all rows have the entries of
the header, and the header has only words. Every other file is left to pandas, which
gives the same entries.

Columns whose first entries are numbers with decimal points are read as numbers; their texts are
read again only if they are ids, labels or categories.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.messages import require
from raglane.data.sources.files import BYTES, opened
from raglane.data.typed.column import Column, NumberColumn, Typed, numbers_in
from raglane.data.typed.dates import is_date

# Smaller files are read by pandas: its import takes a quarter of a second, so not larger ones.
LEAST = 1 << 14
# The bytes whose lines decide which columns are numbers.
_LOOK = 1 << 16

_is_fraction = re.compile(rb"-?\d+\.\d+(?:[eE][-+]?\d+)?").fullmatch


def is_plain_csv(content: bytes, mark: str, least: int | None = None) -> bool:
    """Return True for a large file in which separators and line ends are nothing else."""
    sign = mark.encode()
    least = LEAST if least is None else least
    if len(content) < least or (mark != "," and b"," in content):
        return False
    if b'"' in content:
        return False
    # Searches for one byte are fast, and most files have neither.
    if b"\r" in content and content.count(b"\r") != content.count(b"\r\n"):
        return False
    return b" " not in content or not (sign + b" " in content or b"\n " in content)


def plain_columns(content: bytes, mark: str) -> tuple[list[str], list[Column]] | None:
    """Return the header of a plain CSV file and its columns; None for another file."""
    if not is_plain_csv(content, mark):
        return None
    body = content.removeprefix(codecs.BOM_UTF8)
    header = _header_of(body, mark)
    if header is None:
        return None
    width = len(header)
    columns = _columns(body[body.find(b"\n") + 1 :], mark, width, range(width))
    return None if columns is None or not len(columns[0]) else (header, columns)


def plain_blocks(
    path: Path, mark: str, width: int, places: Sequence[int]
) -> Iterator[list[Column] | None]:
    """Yield some of the ``width`` columns of a large plain CSV file in blocks of lines; None ends
    one that is not.

    A byte order mark or lines above the header make a file another one.
    """
    header: list[str] | None = None
    rest = b""
    with opened(path) as file:
        if file.seek(0, io.SEEK_END) < LEAST:
            yield None
            return
        file.seek(0)
        while chunk := file.read(BYTES):
            block, newline, rest = (rest + chunk).rpartition(b"\n")
            is_plain = block.isascii() and is_plain_csv(block, mark, 0) and b"\0" not in block
            if is_plain and header is None:
                header = _header_of(block + newline, mark)
                block = block[block.find(b"\n") + 1 :]
            columns = None
            if is_plain and header is not None and len(header) == width:
                columns = _columns(block + newline, mark, width, places)
            yield columns
            if columns is None:
                return
    if rest and header is not None:
        is_plain = rest.isascii() and is_plain_csv(rest, mark, 0)
        yield _columns(rest, mark, width, places) if is_plain else None


def _header_of(body: bytes, mark: str) -> list[str] | None:
    """Return the names in the first line; None if one is a number or a date."""
    header = body[: body.find(b"\n") + 1].rstrip(b"\r\n").decode().split(mark)
    words = np.array(header, dtype=object)
    if not numbers_in(words)[1].all() or any(map(is_date, header)):
        return None
    return header


def _columns(body: bytes, mark: str, width: int, places: Sequence[int]) -> list[Column] | None:
    """Return some columns of rows without a header; None if the rows have other sizes."""
    fractions = [at for at in _fractions(body, mark, width) if at in places]
    table = _table(body, mark, width, fractions, places)
    if table is None and fractions:
        # A later entry is a word.
        fractions = []
        table = _table(body, mark, width, fractions, places)
    if table is None:
        return None
    return [
        NumberColumn(column, partial(_texts, body, mark, width, at))
        if at in fractions
        else Typed(column)
        for at, column in zip(places, table.columns, strict=True)
    ]


def _fractions(body: bytes, mark: str, width: int) -> list[int]:
    """Return the columns whose entries in the first lines are numbers with decimal points."""
    lines = body[:_LOOK].split(b"\n")[: -1 if len(body) > _LOOK else None]
    rows = [line.rstrip(b"\r").split(mark.encode()) for line in lines if line]
    if any(len(row) != width for row in rows):
        return []
    return [at for at in range(width) if rows and all(_is_fraction(row[at]) for row in rows)]


def _texts(body: bytes, mark: str, width: int, at: int) -> Typed:
    """Return the entries of a column as texts."""
    table = _table(body, mark, width, (), [at])
    if table is None:
        raise ValueError("rows of other sizes")
    return Typed(table.column(0))


def _table(
    body: bytes, mark: str, width: int, fractions: Sequence[int], places: Sequence[int]
) -> Any | None:
    """Return rows as a table of texts and numbers; None if their sizes differ, or a word is among
    the numbers.
    """
    arrow = require("pyarrow", "data")
    csv = require("pyarrow.csv", "data")
    names = [str(column) for column in range(width)]
    kinds = dict.fromkeys(names, arrow.large_string())
    kinds |= {str(at): arrow.float64() for at in fractions}
    convert = csv.ConvertOptions(
        column_types=kinds,
        strings_can_be_null=False,
        null_values=[""],
        check_utf8=False,
        include_columns=[names[at] for at in places],
    )
    parse = csv.ParseOptions(delimiter=mark, quote_char=False, double_quote=False)
    try:
        table = csv.read_csv(
            arrow.py_buffer(body),
            read_options=csv.ReadOptions(column_names=names),
            parse_options=parse,
            convert_options=convert,
        )
    except arrow.ArrowInvalid:
        # A row of another size, which pandas names by its line.
        return None
    is_number = [_are_numbers(table.column(str(at))) for at in fractions]
    return table if all(is_number) else None


def _are_numbers(column: Any) -> bool:
    """Return False if an entry is read as NaN that may be another word, such as nan(7)."""
    compute = require("pyarrow.compute", "data")
    return not compute.any(compute.is_nan(column)).as_py()
