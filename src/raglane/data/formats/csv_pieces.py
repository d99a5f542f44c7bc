"""CSV in long form piece by piece, where the rows of each sequence stand together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import check_readable, decode
from raglane.data.formats.csv import (
    entries_of,
    header_of,
    id_name_of,
    parsed,
    records_of_entries,
    text_column,
    whole_rows,
)
from raglane.data.formats.csv_table import is_plain
from raglane.data.formats.pieces import BYTES, ROWS, Piece, Start, sift
from raglane.data.records import Columns, Records
from raglane.errors import quote, require

__all__ = ["pieces"]

_Rows = npt.NDArray[np.object_]


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
    """All rows of a file in which each is a text."""
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
