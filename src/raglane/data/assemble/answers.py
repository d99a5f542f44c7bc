"""Predictions for words, in the lines of the file that has the words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raglane.data.columns import Columns
from raglane.data.roles.words import resolved
from raglane.data.sources.conll import words_of
from raglane.data.sources.files import data_error, decode, read_bytes


def filled(path: Path, columns: Columns, answers: Sequence[Sequence[str]]) -> bytes:
    """Return the lines of a file with other labels in the label column, which is added if the file
    has none.
    """
    text = decode(path, read_bytes(path))
    words = words_of(path, text)
    name = resolved(columns.label, words.names) or ""
    at = words.names.index(name) if name in words.names else len(words.names)
    labels = [str(label) for row in answers for label in row]
    if len(labels) != len(words.rows):
        got = f"{len(labels):,} labels for {len(words.rows):,} words"
        raise data_error(path, got, "a file whose words all have a label", "write .jsonl")
    lines = text.split("\n")
    for row, number, label in zip(words.rows, words.numbers, labels, strict=True):
        end = "\r" if lines[number - 1].endswith("\r") else ""
        lines[number - 1] = words.mark.join([*row[:at], label, *row[at + 1 :]]) + end
    return "\n".join(lines).encode()
