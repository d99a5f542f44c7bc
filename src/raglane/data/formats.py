"""The file formats of sequences: one file each, and one line in ``FORMATS``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePath

from raglane._utils.checks import check_choice
from raglane._utils.files import as_path, check_file
from raglane._utils.messages import count_of, printable, shorten
from raglane.data.assemble.pieces import ON_BAD_ROW, read_kept
from raglane.data.records import ROLES, Columns, Records, RoleNotes, note_empty
from raglane.data.sources import arff, conll, csv, folder, ipc, jsonl, npz, others, sheet, text, ts
from raglane.data.sources.files import Format, Parsed, open_error, suffix_of, unused_notes

__all__ = ["FORMATS", "Format", "by_suffix", "pick", "read"]

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
    if on_bad_row == "skip":
        records = read_kept(chosen, path, columns)
    elif parsed is None or chosen.parse is None:
        records = chosen.read(path, columns)
    else:
        if path not in parsed:
            parsed[path] = chosen.parse(path, columns)
        records = parsed[path](columns)
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
