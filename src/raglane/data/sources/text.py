"""Text files, with a sequence of characters, words or bytes per line, and folders of them.

A text file has no labels. In a folder each file is a class, named by its stem. Files other than
``*.txt``, hidden files, subfolders, and texts about the data such as ``README.txt``, in capitals,
are left out with a note. A ``*.txt`` that cannot be read, such as a broken link, is an error,
because its class would be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from raglane._utils.messages import quote
from raglane.data.assemble.pieces import Line, Piece, Start, line_pieces, lines_of
from raglane.data.records import Columns, Records, offsets_of
from raglane.data.sources import conll
from raglane.data.sources.files import (
    columns_argument,
    data_error,
    decode,
    has_utf8,
    open_error,
    read_bytes,
)
from raglane.data.splitting import split_texts

# The tasks for folders of texts.
_TASKS = ("classify", "forecast", "language")

# Explicit names, because a class may have a name in capitals.
ABOUT = (
    "README",
    "SOURCE",
    "SOURCES",
    "LICENSE",
    "LICENCE",
    "COPYING",
    "NOTICE",
    "AUTHORS",
    "CHANGES",
    "CITATION",
)


def _stripped_lines(path: Path) -> list[str]:
    """Return the lines of a text that are not blank, without white space at their ends."""
    return list(filter(None, map(str.strip, decode(path, read_bytes(path)).split("\n"))))


def read(path: Path, columns: Columns) -> Records:
    """Read a text file; with a label per word it is read as CoNLL."""
    if columns.task == "tag":
        return conll.read(path, columns)
    lines = _stripped_lines(path)
    _check_task(path, columns)
    return _records(lines, columns, path)


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces; a position is a byte and a line."""
    if columns.task == "tag":
        yield from conll.pieces(path, columns, start)
        return
    _check_task(path, columns)
    yield from _pieces_of(path, path, columns, start)


def _pieces_of(
    path: Path,
    text: Path,
    columns: Columns,
    start: Start,
    number: Start = (),
    label: str | None = None,
) -> Iterator[Piece]:
    """Yield the pieces of a text; ``number`` is its place in the folder ``path``, if it is in
    one.
    """

    def records(lines: Sequence[Line]) -> Records:
        texts = [decode(text, line.content, line.number).strip() for line in lines]
        return _records(texts, columns, path, None if label is None else [label] * len(lines))

    # Lines of white space beyond ASCII are blank too.
    lines = (
        line for line in lines_of(text, start) if line.content.decode(errors="replace").strip()
    )
    yield from line_pieces(lines, records, number, f"{text.name}, " if number else "")


def _check_task(path: Path, columns: Columns) -> None:
    if columns.wants_labels:
        fix = f"pass {columns_argument('task', 'language')}, or a folder with a text per class"
        raise data_error(
            path, "a text file", f"a file with labels, for the task {columns.task}", fix
        )


def _records(
    lines: Sequence[str], columns: Columns, path: Path, classes: Sequence[str] | None = None
) -> Records:
    """Split lines into tokens; ``classes`` are the labels of the lines of a folder."""
    split = columns.split or "characters"
    notes = (f"a line is a sequence, split into {split}",) if classes is None else ()
    labels = tuple(classes) if classes is not None and columns.wants_labels else None
    tokens, lengths = split_texts(lines, split)
    return Records(
        tokens,
        offsets_of(lengths),
        labels=labels,
        source=path,
        notes=notes,
        columns=replace(columns, split=split),
    )


def read_folder(path: Path, columns: Columns) -> Records:
    """Read a folder of text files."""
    _check_folder_task(path, columns)
    texts, left_out = _texts_in(path)
    lines = [_stripped_lines(text) for text in texts]
    if not any(lines):
        raise data_error(
            path, "texts of blank lines only", "a folder with at least one line", "check the files"
        )
    count = "1 class" if len(texts) == 1 else f"{len(texts)} classes"
    notes = [f"{count}, one per file; a sequence is the {columns.split or 'characters'} of a line"]
    if left_out:
        notes.append(f"left out: {', '.join(left_out)}")
    classes = np.repeat(
        np.array([text.stem for text in texts], dtype=object), list(map(len, lines))
    )
    records = _records([line for each in lines for line in each], columns, path, classes.tolist())
    return replace(records, notes=tuple(notes))


def folder_pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """Yield pieces; a position is the number of a text, a byte and a line."""
    _check_folder_task(path, columns)
    texts, _ = _texts_in(path)
    first, *within = start or (0,)
    for number, text in enumerate(texts[first:], first):
        yield from _pieces_of(
            path, text, columns, tuple(within) if number == first else (), (number,), text.stem
        )


def _check_folder_task(path: Path, columns: Columns) -> None:
    if columns.task in _TASKS:
        return
    rule = (
        "a file with a label per element"
        if columns.task == "tag"
        else f"a file, for the task {columns.task}"
    )
    fix = f"pass {columns_argument('task', 'classify')}, or another format"
    raise data_error(
        path, f"a folder for the task {columns.task}, with one class per sequence", rule, fix
    )


def _texts_in(path: Path) -> tuple[list[Path], list[str]]:
    """Return the text files of a folder, and the names of the other entries."""
    try:
        entries = sorted(path.iterdir())
    except NotADirectoryError as error:
        raise data_error(path, "a file", "a folder, for this format", "pass the folder") from error
    except OSError as error:
        raise open_error(path, error) from error
    texts = [
        entry
        for entry in entries
        if entry.suffix == ".txt"
        and not entry.name.startswith(".")
        and entry.stem not in ABOUT
        and not entry.is_dir()
    ]
    if not texts:
        got = f"{len(entries)} entries, none of them a text" if entries else "an empty folder"
        raise data_error(
            path, got, "a folder with one .txt file per class", "add them, or pass a file"
        )
    odd = next((entry.name for entry in texts if not has_utf8(entry.name)), None)
    if odd is not None:
        raise data_error(
            path, f"a file named {quote(odd)}", "a folder of file names in UTF-8", "rename the file"
        )
    kept = set(texts)
    return texts, [entry.name for entry in entries if entry not in kept]
