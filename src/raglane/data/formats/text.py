"""A text file: each line is a sequence of characters, words or bytes, with no label; and a folder of them.

In a folder each file is a class, named by its stem. Files other than ``*.txt``, hidden files and subfolders are left
out with a note, and so are the texts that describe a data set and are not part of it: ``README.txt``, ``SOURCE.txt``,
``LICENSE.txt`` and the like, in capitals. A ``*.txt`` that is not a file, such as a link to what is not there, is
refused: a class would be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from raglane._utils.messages import quote
from raglane.data.formats.base import columns_argument, data_error, decode, has_utf8, open_error, read_bytes
from raglane.data.formats.pieces import Line, Piece, Start, line_pieces, lines_of
from raglane.data.records import Columns, Records, offsets_of
from raglane.data.splitting import split_texts

# What can be learned of texts, one file per class.
_TASKS = ("classify", "forecast", "language")

# Listed, not "every name in capitals": a class may well be called LOC or NUM.
_ABOUT = ("README", "SOURCE", "SOURCES", "LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS", "CHANGES", "CITATION")


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
    if columns.wants_labels:
        rule = f"a file with labels, for the task {columns.task}"
        fix = f"pass {columns_argument('task', 'language')}, or a folder with a text per class"
        raise data_error(path, "a text file", rule, fix)


def _records(path: Path, lines: Sequence[str], columns: Columns, classes: Sequence[str] | None = None) -> Records:
    """Lines, cut into tokens; those of a folder have classes, and notes of the folder's own."""
    split = columns.split or "characters"
    notes = (f"a line is a sequence, split into {split}",) if classes is None else ()
    labels = tuple(classes) if classes is not None and columns.wants_labels else None
    tokens, lengths = split_texts(lines, split)
    return Records(
        tokens, offsets_of(lengths), labels=labels, source=path, notes=notes, columns=columns.with_split(split)
    )


def read_folder(path: Path, columns: Columns) -> Records:
    """Read a folder of text files."""
    _check_folder(path, columns)
    texts, left_out = _texts_in(path)
    lines: list[str] = []
    counts: list[int] = []
    for text in texts:
        # White space around a line can tell the class, which filled_lines cuts off.
        found = filled_lines(text)
        lines += found
        counts.append(len(found))
    if not lines:
        raise data_error(path, "texts of blank lines only", "a file with a sequence per line", "check the files")
    many = "1 class" if len(texts) == 1 else f"{len(texts)} classes"
    notes = [f"{many}, one per file; a sequence is the {columns.split or 'characters'} of a line"]
    if left_out:
        notes.append(f"left out: {', '.join(left_out)}")
    classes = np.repeat(np.array([text.stem for text in texts], dtype=object), counts)
    return replace(_records(path, lines, columns, classes.tolist()), notes=tuple(notes))


def folder_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The same piece by piece; a piece begins in a text, at a byte, in a line."""
    _check_folder(path, columns)
    texts, _ = _texts_in(path)
    first, *within = start or (0,)
    for number, text in enumerate(texts):
        if number >= first:
            yield from _pieces_of(path, text, number, columns, tuple(within) if number == first else ())


def _pieces_of(path: Path, text: Path, number: int, columns: Columns, start: Start) -> Iterator[Piece]:

    def records(lines: Sequence[Line]) -> Records:
        return _records(path, texts_of(text, lines), columns, [text.stem] * len(lines))

    lines = kept_lines(text, start)
    yield from line_pieces(lines, records, lambda line: (number, line.end, line.number + 1), f"{text.name}, ")


def _check_folder(path: Path, columns: Columns) -> None:
    if columns.task in _TASKS:
        return
    rule = "data of another format, since a folder has one class per sequence"
    if columns.task == "tag":
        rule = "data with a label per element, for tagging"
    fix = f"pass {columns_argument('task', 'classify')}, or another format"
    raise data_error(path, f"a folder for the task {columns.task}", rule, fix)


def _texts_in(path: Path) -> tuple[list[Path], list[str]]:
    """The files that hold sequences, and the names of what is left out."""
    try:
        entries = sorted(path.iterdir())
    except NotADirectoryError as error:
        raise data_error(path, "a file", "a folder, in this format", "pass the folder") from error
    except OSError as error:
        raise open_error(path, error) from error
    texts = [
        entry
        for entry in entries
        if entry.suffix == ".txt" and not entry.name.startswith(".") and entry.stem not in _ABOUT and not entry.is_dir()
    ]
    if not texts:
        got = f"{len(entries)} entries, none of them a text" if entries else "an empty folder"
        raise data_error(path, got, "a folder with one .txt file per class", "add them, or pass a file")
    odd = next((entry.name for entry in texts if not has_utf8(entry.name)), None)
    if odd is not None:
        raise data_error(
            path,
            f"a file named {quote(odd)}",
            "a folder whose files are named after the classes, in UTF-8",
            "rename the file",
        )
    kept = set(texts)
    return texts, [entry.name for entry in entries if entry not in kept]
