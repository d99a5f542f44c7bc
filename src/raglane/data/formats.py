"""The file formats of sequences: one line each in ``FORMATS``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from raglane._utils.checks import check_choice
from raglane._utils.files import as_path, check_file
from raglane._utils.messages import count_of, printable, shorten
from raglane.data.assemble import streams
from raglane.data.assemble.csv_pieces import csv_pieces
from raglane.data.assemble.errors import unused_notes
from raglane.data.assemble.opened import Declared, Opened, Tabular, Texts, guess, read_as
from raglane.data.assemble.pieces import ON_BAD_ROW, Piece, read_kept
from raglane.data.columns import LISTS, NAMED, ROLES, WRITTEN, Columns
from raglane.data.records import Records, RoleNotes, note_empty
from raglane.data.roles import Refusal, Roles
from raglane.data.roles.guess import Guess
from raglane.data.sources import arff, conll, csv, folder, ipc, jsonl, npz, others, sheet, text, ts
from raglane.data.sources.files import decode, open_error, read_bytes, suffix_of
from raglane.data.sources.lines import Start

__all__ = ["FORMATS", "Format", "by_suffix", "pick", "read"]

_Pieces = Callable[[Path, Columns, Start], Iterator[Piece]]


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: the value of ``format=``, and the key in ``FORMATS``.
        suffixes: the file suffixes of the format, in lower case; () for a folder.
        open: parses an existing path, or raises a DataError.
        stream: yields the sequences in pieces, from a position on; None to parse the whole file.
        roles: the arguments of Columns that the format uses, a subset of ``ROLES``.
        row: the kind of a row, by which a task is guessed, see :class:`~raglane.tasks.TaskFacts`.
    """

    name: str
    suffixes: tuple[str, ...]
    open: Callable[[Path, Columns], Opened]
    stream: _Pieces | None = None
    roles: tuple[str, ...] = NAMED
    row: str = "sequence"

    def pieces(self, path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
        """Yield the sequences of a path in pieces, from a position on."""
        if self.stream is None:
            yield from streams.opened_pieces(self.open(path, columns), columns, start)
        else:
            yield from self.stream(path, columns, start)


def _words(path: Path, columns: Columns) -> Opened:  # noqa: ARG001
    words = conll.words_of(path, decode(path, read_bytes(path)))
    return Tabular(conll.table(words), words)


def _text(path: Path, columns: Columns) -> Opened:
    """Open a text; with a label per word it is read as CoNLL."""
    return _words(path, columns) if columns.task == "tag" else Texts(text.lines_in(path))


def _text_pieces(path: Path, columns: Columns, start: Start) -> Iterator[Piece]:
    if columns.task == "tag":
        return FORMATS["conll"].pieces(path, columns, start)
    return streams.text_pieces(path, columns, start)


def _folder(path: Path, columns: Columns) -> Opened:
    table = folder.table(path, columns)
    return Texts(text.folder_lines(path)) if table is None else Tabular(table)


def _folder_pieces(path: Path, columns: Columns, start: Start) -> Iterator[Piece]:
    files = folder.files_of(path, columns)
    if files is None:
        yield from streams.text_pieces(path, columns, start)
    elif not start:
        count = len(files.files)

        def records(low: int, high: int) -> Records:
            return read_as(Tabular(folder.table_of(files.part(low, high), columns)), columns)

        yield Piece(count, records, (count,), lambda row: files.files[row].name)


_ARROW = (".arrow", ".arrows", ".feather", ".ipc")
_CSV = (".csv", ".tsv", ".psv", ".tab", ".dat", ".data")
_JSON = (".jsonl", ".ndjson", ".json")

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format(
            "ts",
            (".ts",),
            lambda path, _: Declared(ts.series_of(path)),
            streams.ts_pieces,
            roles=(),
            row="element",
        ),
        Format(
            "parquet",
            (".parquet", ".pq"),
            lambda path, _: Tabular(ipc.parquet_table(path)),
            streams.parquet_pieces,
        ),
        Format(
            "arrow",
            _ARROW,
            lambda path, columns: Tabular(ipc.table(path, columns)),
            streams.arrow_pieces,
        ),
        Format(
            "jsonl",
            _JSON,
            lambda path, columns: Tabular(jsonl.table(path, columns)),
            streams.jsonl_pieces,
        ),
        Format("npz", (".npz",), lambda path, _: Tabular(npz.table(path))),
        Format(
            "csv",
            _CSV,
            lambda path, columns: Tabular(csv.table_of(path, columns)),
            csv_pieces,
            WRITTEN,
            row="element",
        ),
        Format("arff", (".arff",), lambda path, _: Tabular(arff.table(path)), row="element"),
        Format(
            "xlsx",
            (".xlsx", ".xlsm"),
            lambda path, columns: Tabular(sheet.table(path, columns)),
            roles=WRITTEN,
            row="element",
        ),
        Format(
            "conll",
            conll.SUFFIXES,
            _words,
            roles=("sequence", "label", "id", *LISTS),
            row="word",
        ),
        Format("text", (".txt",), _text, _text_pieces, roles=(), row="text"),
        Format("folder", (), _folder, _folder_pieces, ROLES),
    )
}

# The maximum length of a note in characters.
_NOTE = 400


@dataclass(frozen=True, eq=False)
class ParsedFile:
    """A file that is parsed once, for any task."""

    format: Format
    opened: Opened

    def records(self, columns: Columns, roles: Roles | None = None) -> Records:
        """Return the records for a task, by roles that have been decided."""
        opened = self.opened
        records = opened.records(columns, roles) if roles else read_as(opened, columns)
        used = () if isinstance(opened, Texts) else self.format.roles
        return noted(records, used, self.format, columns)

    def guess(self, columns: Columns, tasks: Sequence[str]) -> Guess | Refusal:
        """Return the first task that the labels allow, and the roles for it."""
        return guess(self.opened, columns, tasks)


def open_file(path: Path, columns: Columns, format: str | None = None) -> ParsedFile:
    """Parse a file or a folder."""
    chosen = pick(path, format)
    return ParsedFile(chosen, chosen.open(path, columns))


def read(
    path: str | os.PathLike[str],
    columns: Columns | None = None,
    format: str | None = None,
    *,
    on_bad_row: str = "raise",
) -> Records:
    """Read a file or a folder as records."""
    path = as_path(path)
    columns = Columns() if columns is None else columns
    check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
    if on_bad_row == "raise":
        return open_file(path, columns, format).records(columns)
    chosen = pick(path, format)
    pieces = chosen.pieces(path, columns)
    kept = read_kept(path, columns, lambda: read_as(chosen.open(path, columns), columns), pieces)
    return noted(kept, chosen.roles, chosen, columns)


def noted(records: Records, roles: tuple[str, ...], format: Format, columns: Columns) -> Records:
    """Return the records of a file with notes about options, ids and empty sequences."""
    unused = unused_notes(columns, roles, f"the format {format.name}", records)
    notes = [*records.notes, *unused]
    repeated = 0 if records.ids is None else len(records.ids) - len(set(records.ids))
    if repeated:
        verb = "repeats" if repeated == 1 else "repeat"
        notes.append(f"{count_of(repeated, 'sequence')} {verb} the id of another one")
    if columns.task == "classify" and (note := note_empty(records)):
        notes.append(note)
    about = RoleNotes(*map(_printed, records.roles))
    return replace(records, notes=_printed(notes), roles=about)


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
