"""Files piece by piece, for whoever cannot hold a whole file: some rows at a time, and where the next ones begin.

A piece holds rows that are not understood yet. Any run of them can be read by itself, so that one bad row is found, and
left out, by halves: :func:`sift` is the only place where rows are left out, whatever the format.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from raglane.data.formats.base import Format, check_readable, check_text
from raglane.data.records import Columns, Records, Skipped
from raglane.errors import DataError

__all__ = ["Line", "Piece", "Start", "line_pieces", "lines_of", "pieces_of", "sift", "whole"]

# Bytes and rows of a piece: as much as is worth one call of a library, and little beside what a program holds anyway.
BYTES, ROWS = 1 << 24, 1 << 16

# Bad rows before the first good one, of a piece, that end it.
_HOPELESS = 1_000

Start = tuple[int, ...]
"""Where in a file a piece begins; what the numbers mean is the format's business, and () is the beginning."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a file, each a whole sequence.

    Attributes:
        count: of rows.
        read: from the first row and the one after the last, counted in the piece, to their records.
        end: where the next piece begins.
        place: what a row of the piece is called: ``"row 3"``, ``"line 7"``.
    """

    count: int
    read: Callable[[int, int], Records] = field(repr=False)
    end: Start
    place: Callable[[int], str] = field(repr=False)


def pieces_of(format: Format, path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The pieces of a file: one, of all its rows, where the format has no others."""
    if format.pieces is not None:
        yield from format.pieces(path, columns, start)
    elif not start:
        yield whole(format.read(path, columns))


def whole(records: Records) -> Piece:
    """A piece of all rows of a file, which were read already."""

    def select(low: int, high: int) -> Records:
        return records.select(np.arange(low, high))

    return Piece(len(records), select, (len(records),), records.describe_row)


def sift(
    piece: Piece,
    bad: list[Skipped] | None,
    check: Callable[[Records], Records] = lambda records: records,
    location: str = "",
) -> Iterator[Records]:
    """Read a piece, in one go where every row is as it should be."""
    is_hopeful = bad is None or bool(bad)
    # Runs of rows still to be read, the first of them last: without recursion, and in the order of the file.
    runs = [(0, piece.count)]
    while runs:
        start, end = runs.pop()
        try:
            records = check(piece.read(start, end))
        except DataError as error:
            if bad is None:
                raise
            if end - start == 1:
                bad.append(Skipped(location, piece.place(start), str(error)))
                if not is_hopeful and len(bad) == _HOPELESS:
                    raise
                continue
            middle = (start + end) // 2
            runs += [(middle, end), (start, middle)]
        else:
            is_hopeful = True
            yield records


@dataclass(frozen=True)
class Line:
    """A line of a text.

    Attributes:
        number: from 1.
        content: without the end of the line.
        end: bytes of the file up to the next line.
    """

    number: int
    content: bytes
    end: int


def lines_of(path: Path, start: Start = ()) -> Iterator[Line]:
    r"""The lines of a text that are not blank, of which few are in memory at once.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.jsonl").write_bytes(b"[1]\n\n[2]")
        ...     [(line.number, line.content, line.end) for line in lines_of(Path(folder, "a.jsonl"))]
        [(1, b'[1]', 4), (3, b'[2]', 8)]
    """
    check_readable(path)
    with path.open("rb") as file:
        if not start and (mark := file.read(4)):
            # A file that begins as UTF-16 does is refused as a whole: of its lines little could be said.
            if mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                check_text(path, mark)
            file.seek(len(codecs.BOM_UTF8) if mark.startswith(codecs.BOM_UTF8) else 0)
        if start:
            file.seek(start[0])
        end = file.tell()
        for number, content in enumerate(file, start=start[1] if start else 1):
            end += len(content)
            if not content.isspace():
                yield Line(number, content.rstrip(b"\n"), end)


def line_pieces(
    lines: Iterator[Line],
    read: Callable[[Sequence[Line]], Records],
    start: Callable[[Line], Start],
    within: str = "",
) -> Iterator[Piece]:
    """Pieces of a text in which a line is a sequence."""

    def piece_of(held: Sequence[Line]) -> Piece:
        return Piece(
            len(held),
            lambda first, last: read(held[first:last]),
            start(held[-1]),
            lambda row: f"{within}line {held[row].number}",
        )

    held: list[Line] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line.content)
        if size >= BYTES or len(held) >= ROWS:
            yield piece_of(held)
            held, size = [], 0
    if held:
        yield piece_of(held)
