"""A text file: each line is a sequence of characters, words or bytes, with no label."""

from __future__ import annotations

from pathlib import Path

from raglane.data.formats.base import columns_argument, data_error, decode, read_bytes
from raglane.data.records import Columns, Records, offsets_of
from raglane.data.splitting import split_texts

__all__ = ["lines_of", "read"]


def lines_of(path: Path) -> list[str]:
    """The lines of a text that hold something, without white space at their ends, an accident of typing.

    Args:
        path: the file, in UTF-8.

    Raises:
        DataError: the file is missing, empty, or not UTF-8.
    """
    return list(filter(None, map(str.strip, decode(path, read_bytes(path)).split("\n"))))


def read(path: Path, columns: Columns) -> Records:
    """Read a text file.

    Args:
        path: the file.
        columns: of these only the task and ``split`` matter; None splits into characters.

    Raises:
        DataError: the file is no text, or the task needs labels.
    """
    lines = lines_of(path)
    if columns.wants_labels:
        rule = f"the task {columns.task} needs labels, and a line of a text has none"
        fix = f"pass {columns_argument('task', 'language')}, or a folder with a text per class"
        raise data_error(path, "a text file", rule, fix)
    split = columns.split or "characters"
    tokens, lengths = split_texts(lines, split)
    notes = (f"a line is a sequence, split into {split}",)
    return Records(tokens, offsets_of(lengths), source=path, notes=notes, columns=columns.with_split(split))
