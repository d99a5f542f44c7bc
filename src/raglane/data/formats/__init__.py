"""The formats that sequences are read from: one file each, and one line in ``FORMATS``."""

from __future__ import annotations

import os
from pathlib import Path

from raglane.data.formats import csv, folder, jsonl, parquet, ts
from raglane.data.formats.base import Format, data_error, open_error
from raglane.data.formats.ts import japanese_vowels
from raglane.data.records import Columns, Records
from raglane.errors import ArgumentError, explain

__all__ = ["FORMATS", "Format", "japanese_vowels", "read"]

FORMATS: dict[str, Format] = {
    "ts": Format("ts", (".ts",), ts.read),
    "parquet": Format("parquet", (".parquet", ".pq"), parquet.read),
    "jsonl": Format("jsonl", (".jsonl", ".ndjson"), jsonl.read),
    "csv": Format("csv", (".csv",), csv.read),
    "folder": Format("folder", (), folder.read),
}


def read(path: str | os.PathLike[str], columns: Columns | None = None, format: str | None = None) -> Records:
    r"""Read sequences from a file or a folder.

    Args:
        path: a ``.ts``, Parquet, JSON lines or CSV file, or a folder of text files, one a class.
        columns: which columns hold what; None guesses, for the task ``"classify"``.
        format: a key of ``FORMATS``; None goes by the suffix, and by whether ``path`` is a folder.

    Returns:
        What the file holds, as it was written; ``notes`` says what was guessed.

    Raises:
        DataError: the path is missing, unreadable, empty or of an unknown suffix, or its content breaks a rule.
        ArgumentError: ``format`` is not one of ``FORMATS``.
        MissingExtraError: the format needs the ``data`` extra.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "cat.txt").write_text("tom\ntiger\n")
        ...     _ = Path(folder, "dog.txt").write_text("rex\n")
        ...     records = read(folder)
        >>> records.labels, records.lengths.tolist()
        (('cat', 'cat', 'dog'), [3, 5, 3])
    """
    path = Path(path)
    return _pick(path, format).read(path, Columns() if columns is None else columns)


def _pick(path: Path, format: str | None) -> Format:
    """The format that was named, or the one of a path."""
    try:
        path.stat()
    except OSError as error:
        raise open_error(path, error) from error
    if format is not None:
        if format not in FORMATS:
            rule = f"one of {', '.join(FORMATS)}"
            raise ArgumentError(explain("format", repr(format), rule, "pass one of these, or None"))
        return FORMATS[format]
    if path.is_dir():
        return FORMATS["folder"]
    for known in FORMATS.values():
        if path.suffix.lower() in known.suffixes:
            return known
    suffixes = ", ".join(suffix for known in FORMATS.values() for suffix in known.suffixes)
    got = f"the suffix {path.suffix!r}" if path.suffix else "no suffix"
    rule = f"the suffix says the format: {suffixes}, or a folder of .txt files"
    raise data_error(path, got, rule, "rename or convert the file")
