"""The file formats of sequences: one file each, and one line in ``FORMATS``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from raglane._utils.checks import check_choice
from raglane._utils.files import as_path, check_file
from raglane._utils.messages import count_of, printable, quote, shorten
from raglane.data.assemble.pieces import ON_BAD_ROW, Piece, read_kept
from raglane.data.records import LISTS, ROLES, Columns, Records, RoleNotes, note_empty
from raglane.data.sources import arff, conll, csv, folder, ipc, jsonl, npz, others, sheet, text, ts
from raglane.data.sources.files import Format, Parsed, open_error, suffix_of, unused_notes
from raglane.errors import DataError

__all__ = ["FORMATS", "Format", "by_suffix", "pick", "pieces", "read"]

_ARROW = (".arrow", ".arrows", ".feather", ".ipc")

FORMATS: dict[str, Format] = {
    "ts": Format("ts", (".ts",), ts.read, ts.pieces),
    "parquet": Format("parquet", (".parquet", ".pq"), ipc.read_parquet, ipc.parquet_pieces, ROLES),
    "arrow": Format("arrow", _ARROW, ipc.read, ipc.pieces, ROLES),
    "jsonl": Format(
        "jsonl", (".jsonl", ".ndjson", ".json"), jsonl.read, jsonl.pieces, ROLES, jsonl.parse
    ),
    "npz": Format("npz", (".npz",), npz.read, npz.pieces, ROLES),
    "csv": Format(
        "csv",
        (".csv", ".tsv", ".psv", ".tab", ".dat", ".data"),
        csv.read,
        csv.pieces,
        ROLES,
        csv.parse,
    ),
    "arff": Format("arff", (".arff",), arff.read, arff.pieces, ROLES),
    "xlsx": Format("xlsx", (".xlsx", ".xlsm"), sheet.read, sheet.pieces, ROLES),
    "conll": Format("conll", conll.SUFFIXES, conll.read, conll.pieces, conll.ROLES),
    "text": Format("text", (".txt",), text.read, text.pieces),
    "folder": Format("folder", (), folder.read, folder.pieces, ROLES),
}

# The maximum length of a note in characters.
_NOTE = 400


def read(
    path: str | os.PathLike[str],
    columns: Columns | None = None,
    format: str | None = None,
    *,
    on_bad_row: str = "raise",
    parsed: dict[Path, Parsed] | None = None,
) -> Records:
    """Read a file or a folder as records; ``parsed`` keeps a parsed file for the next call."""
    path = as_path(path)
    columns = Columns() if columns is None else columns
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
    chosen = pick(path, format)

    def records_of(asked: Columns) -> Records:
        if on_bad_row == "skip":
            return read_kept(chosen, path, asked)
        if parsed is None or chosen.parse is None:
            return chosen.read(path, asked)
        if path not in parsed:
            parsed[path] = chosen.parse(path, asked)
        return parsed[path](asked)

    try:
        records = records_of(columns)
    except DataError as error:
        parts = _between_commas(columns, error)
        if parts is None:
            raise
        columns = parts
        records = records_of(columns)
    notes = [
        *records.notes,
        *unused_notes(columns, chosen.roles, f"the format {chosen.name}", records),
    ]
    repeated = 0 if records.ids is None else len(records.ids) - len(set(records.ids))
    if repeated:
        verb = "repeats" if repeated == 1 else "repeat"
        notes.append(f"{count_of(repeated, 'sequence')} {verb} the id of another one")
    if columns.task == "classify" and (note := note_empty(records)):
        notes.append(note)
    roles = RoleNotes(*map(_printed, records.roles))
    return replace(records, notes=_printed(notes), roles=roles)


def _between_commas(columns: Columns, error: DataError) -> Columns | None:
    """Return columns in which a name that is no column is several names, between its commas; None
    if the error is about something else.
    """
    changes: dict[str, Any] = {}
    for role in LISTS:
        names: tuple[str, ...] = getattr(columns, role) or ()
        parts = [
            name.split(",") if "," in name and f"no column {quote(name)}" in str(error) else [name]
            for name in names
        ]
        if len(parts) < sum(map(len, parts)):
            changes[role] = tuple(part.strip() for several in parts for part in several)
    return replace(columns, **changes) if changes else None


def pieces(
    path: Path, columns: Columns, format: str | None, start: tuple[int, ...]
) -> Iterator[Piece]:
    """Yield the records of a file or a folder in pieces, from a position on."""
    chosen = pick(path, format)
    if not any("," in name for role in LISTS for name in getattr(columns, role) or ()):
        return chosen.pieces(path, columns, start)
    try:
        for piece in islice(chosen.pieces(path, columns, start), 1):
            piece.read(0, 1)
    except DataError as error:
        columns = _between_commas(columns, error) or columns
    return chosen.pieces(path, columns, start)


def _printed(notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(shorten(printable(note), _NOTE) for note in notes)


def pick(path: Path, format: str | None = None) -> Format:
    """Return the format of a name, or else of a path."""
    if str(path) == "-":
        others.check_suffix(path)
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
    known = by_suffix(path)
    if known is not None and known.name != "text":
        return known
    others.check_suffix(path)
    name = others.format_of_content(path)
    if name is not None:
        return FORMATS[name]
    if known is not None:
        return known
    suffixes = ", ".join(suffix for each in FORMATS.values() for suffix in each.suffixes)
    raise others.unknown(path, suffixes)


def by_suffix(path: PurePath) -> Format | None:
    """Return the format of a file's suffix, or None."""
    return next((format for format in FORMATS.values() if suffix_of(path) in format.suffixes), None)
