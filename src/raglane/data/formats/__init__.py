"""The formats that sequences are read from: one file each, and one line in ``FORMATS``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from raglane._utils.checks import check_choice, check_kind
from raglane._utils.files import as_path, check_file
from raglane._utils.messages import printable, quote, shorten
from raglane.data.formats import csv, ipc, jsonl, text, ts
from raglane.data.formats.base import Format, columns_argument, data_error, open_error
from raglane.data.formats.pieces import ON_BAD_ROW, read_kept
from raglane.data.formats.ts import japanese_vowels
from raglane.data.records import LISTS, ROLES, Columns, Records, note_empty

__all__ = ["FORMATS", "Format", "japanese_vowels", "pick", "read"]

_ARROW = (".arrow", ".arrows", ".feather", ".ipc")

_TABLE = ("sequence", "label", "id", *LISTS)

FORMATS: dict[str, Format] = {
    "ts": Format("ts", (".ts",), ts.read, ts.pieces),
    "parquet": Format("parquet", (".parquet", ".pq"), ipc.read_parquet, ipc.parquet_pieces, _TABLE),
    "arrow": Format("arrow", _ARROW, ipc.read, ipc.pieces, _TABLE),
    "jsonl": Format("jsonl", (".jsonl", ".ndjson"), jsonl.read, jsonl.pieces, _TABLE),
    "csv": Format("csv", (".csv",), csv.read, csv.pieces, (*_TABLE, "time")),
    "text": Format("text", (".txt",), text.read, text.pieces),
    "folder": Format("folder", (), text.read_folder, text.folder_pieces),
}

# Characters of a note: it may list all columns of a file.
_NOTE = 400


def read(
    path: str | os.PathLike[str],
    columns: Columns | None = None,
    format: str | None = None,
    *,
    on_bad_row: str = "fail",
) -> Records:
    r"""Read sequences from a file or a folder.

    Args:
        path: a ``.ts``, Parquet, Arrow, JSON lines, CSV or text file, a folder that was converted, or a folder of text
            files, one per class.
        columns: which columns hold what; None guesses, for the task ``"classify"``.
        format: a key of ``FORMATS``; None goes by the suffix, and by whether ``path`` is a folder.
        on_bad_row: ``"fail"``, or ``"skip"`` to leave out rows that break a rule; ``skipped`` lists them.

    Returns:
        What the file holds, as it was written; ``notes`` says what was guessed, what was left out, which named column
        the format lacks, and how many sequences with a label are empty.

    Raises:
        DataError: the path is missing, unreadable, empty or of an unknown suffix; it is neither a file nor a folder but
            a FIFO, a socket or a device, which might never end; or its content breaks a rule.
        ArgumentError: ``format`` is not one of ``FORMATS``, or ``on_bad_row`` neither of the two.
        ArgumentTypeError: ``path`` is not a path, or ``columns`` not a :class:`~raglane.data.Columns`.
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
    path, columns = as_path(path), Columns() if columns is None else columns
    check_kind("columns", columns, Columns, "an object of Columns, or None", "pass e.g. rl.data.Columns(label=...)")
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
    chosen = pick(path, format)
    records = read_kept(chosen, path, columns) if on_bad_row == "skip" else chosen.read(path, columns)
    notes = [*records.notes, *_not_used(chosen, columns)]
    if columns.task == "classify" and (note := note_empty(records)):
        notes.append(note)
    return replace(records, notes=tuple(shorten(printable(note), _NOTE) for note in notes))


def _not_used(format: Format, columns: Columns) -> list[str]:
    """A note on columns that were named, and that the format lacks."""
    given = [role for role in ROLES if getattr(columns, role) is not None]
    named = [columns_argument(role) for role in given if role not in format.roles]
    return [f"not used, since the format {format.name} has no such column: {', '.join(named)}"] if named else []


def pick(path: Path, format: str | None = None) -> Format:
    """The format that was named, or the one of a path."""
    try:
        check_file(path)
    except IsADirectoryError:
        pass
    except OSError as error:
        raise open_error(path, error) from error
    if format is not None:
        return FORMATS[check_choice("format", format, tuple(FORMATS), "pass one of these, or None")]
    if path.is_dir():
        return FORMATS["arrow" if ipc.is_converted(path) else "folder"]
    for known in FORMATS.values():
        if path.suffix.lower() in known.suffixes:
            return known
    suffixes = ", ".join(suffix for known in FORMATS.values() for suffix in known.suffixes)
    got = f"the suffix {quote(path.suffix)}" if path.suffix else "no suffix"
    rule = f"a file with one of the suffixes {suffixes}, or a folder of .txt files"
    raise data_error(path, got, rule, "rename or convert the file")
