"""A text file: each line is a sequence of characters, words or bytes, with no label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from raglane.data.formats.base import columns_argument, data_error, decode, read_bytes
from raglane.data.formats.pieces import Line, Piece, Start, line_pieces, lines_of
from raglane.data.records import Columns, Records, offsets_of
from raglane.data.splitting import split_texts

__all__ = ["filled_lines", "kept_lines", "pieces", "read", "texts_of"]


def filled_lines(path: Path) -> list[str]:
    """The lines of a text that hold something, without white space at their ends, an accident of typing."""
    return list(filter(None, map(str.strip, decode(path, read_bytes(path)).split("\n"))))


def kept_lines(path: Path, start: Start = ()) -> Iterator[Line]:
    """The same lines, as they are written, of which few are in memory at once; from a byte and a line on."""
    # A line of other white space than a text in ASCII has is blank, too.
    return (line for line in lines_of(path, start) if line.content.decode(errors="replace").strip())


def texts_of(path: Path, lines: Sequence[Line]) -> list[str]:
    """Some of them without white space at their ends."""
    return [decode(path, line.content, line.number).strip() for line in lines]


def read(path: Path, columns: Columns) -> Records:
    """Read a text file."""
    lines = filled_lines(path)
    _check_asked(path, columns)
    return _records(path, lines, columns)


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The same piece by piece; a piece begins at a byte, in a line."""
    _check_asked(path, columns)

    def records(lines: Sequence[Line]) -> Records:
        return _records(path, texts_of(path, lines), columns)

    yield from line_pieces(kept_lines(path, start), records, lambda line: (line.end, line.number + 1))


def _check_asked(path: Path, columns: Columns) -> None:
    """Refuse a task that needs labels."""
    if columns.wants_labels:
        rule = f"the task {columns.task} needs labels, and a line of a text has none"
        fix = f"pass {columns_argument('task', 'language')}, or a folder with a text per class"
        raise data_error(path, "a text file", rule, fix)


def _records(path: Path, lines: Sequence[str], columns: Columns) -> Records:
    """Lines, cut into tokens."""
    split = columns.split or "characters"
    tokens, lengths = split_texts(lines, split)
    notes = (f"a line is a sequence, split into {split}",)
    return Records(tokens, offsets_of(lengths), source=path, notes=notes, columns=columns.with_split(split))
