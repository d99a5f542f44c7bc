"""Reads data for an inspection: all formats of ``raglane.data``, and text files of lengths.

Text files of lengths and Parquet files are read in pieces, to limit memory.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, count_of, quote, require
from raglane.data.assemble.errors import attempt
from raglane.data.assemble.pieces import Alike
from raglane.data.assemble.streams import parquet_pieces
from raglane.data.columns import Columns, option
from raglane.data.formats import FORMATS, open_file, pick
from raglane.data.formats import read as read_records
from raglane.data.prepare.missing import BLOCKS
from raglane.data.prepare.statistics import FeatureCounts, Statistics
from raglane.data.reading import japanese_vowels
from raglane.data.records import NO_ROLES, Records, RoleNotes, note_single
from raglane.data.sources.files import check_readable, check_text, data_error
from raglane.data.sources.ipc import is_converted, readable
from raglane.data.store.conversion import Progress
from raglane.data.store.fragments import StoreLayout
from raglane.errors import DataError
from raglane.runs.sources import DEFAULT_DATA

_Integers = npt.NDArray[np.int64]


class ChannelFacts(NamedTuple):
    """A channel, and the number of its elements that are NaN or infinite."""

    name: str
    missing: int


class LabelCounts(NamedTuple):
    """The counts of labels, which belong to sequences or elements."""

    of: str
    counts: dict[str, int]


# Numbers that loggers and archives write for missing ones.
_SENTINELS = (-99, -200, -999, np.float32(-999.25), -9999, -99999)


@dataclass(frozen=True, eq=False)
class Contents:
    """The lengths and statistics of a file."""

    name: str
    path: Path | None
    lengths: _Integers
    kind: str
    features: tuple[ChannelFacts, ...] = ()
    vocabulary: int | None = None
    labels: LabelCounts | None = None
    notes: tuple[str, ...] = ()
    beside: Mapping[str, FeatureCounts] = field(default_factory=dict)
    roles: RoleNotes = NO_ROLES

    @property
    def missing(self) -> int:
        """The number of missing values in all numeric columns."""
        counted = sum(
            counts.missing for counts in self.beside.values() if counts.channel is not None
        )
        return counted + sum(feature.missing for feature in self.features)

    def inputs(self, missing: str = "raise") -> tuple[int, list[int]]:
        """Return the number of channels that a model reads, and the number of categories of each
        embedding.
        """
        # If values are missing, training adds a flag for each channel.
        each = 2 if self.missing and missing == "raise" else BLOCKS[missing]
        words = [
            counts.categories + 1
            for counts in self.beside.values()
            if counts.categories is not None
        ]
        numbers = len(self.beside) - len(words) + len(self.features)
        tokens = [self.vocabulary or 1] if self.kind != "features" and self.beside else []
        return each * numbers, words + tokens


def data_name(path: Path | None) -> str:
    """Return the name of data for titles."""
    return DEFAULT_DATA if path is None else path.resolve().name or str(path)


def labels_of(of: str, counts: Mapping[str, int]) -> LabelCounts:
    """Return labels sorted by descending count, then alphabetically."""
    return LabelCounts(of, dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def contents_of(records: Records, path: Path | None) -> Contents:
    """Return the contents of records in memory."""
    contents = _contents(path, records.lengths, Statistics.of(records), StoreLayout.of(records), ())
    contents = _noted(contents, records)
    return replace(contents, notes=(*contents.notes, *_sentinels(records)))


def _sentinels(records: Records) -> list[str]:
    """Return a line for each channel with numbers that programs write for missing ones."""
    notes = []
    for name, values in zip(records.channels, records.values.T, strict=False):
        finite = values[np.isfinite(values)]
        lowest = finite.min(initial=0)
        others = finite[finite != lowest]
        # Missing, not measured: far below all other numbers.
        if lowest in _SENTINELS and len(others) and others.min() > lowest / 2:
            count = int((finite == lowest).sum())
            share = f"{count:,} of {len(values):,} numbers of {quote(name)}"
            verb = "is" if count == 1 else "are"
            fix = "if it means missing, write an empty entry"
            notes.append(f"{share} {verb} {lowest:g}: {fix}")
    return notes


def _noted(contents: Contents, records: Records) -> Contents:
    """Return contents with the roles and the notes of records."""
    about = {*records.roles.rows, *records.roles.columns}
    notes = tuple(note for note in records.notes if note not in about)
    return replace(contents, roles=records.roles, notes=(*notes, *_note_zeros(records)))


def _note_zeros(records: Records) -> tuple[str, ...]:
    """Return the note about sequences that end in zeros, if most do."""
    full = np.flatnonzero(records.lengths > 1)
    if records.is_tokens or not len(full):
        return ()
    ends = (records.values[records.offsets[full + 1] - 1] == 0).all(axis=1)
    if 2 * ends.sum() <= len(records):
        return ()
    where = (
        f"{int(ends.sum()):,} of {count_of(len(records), 'sequence')} end in zeros in all channels"
    )
    return (f"{where}: if they are padding, write NaN there, or cut the sequences",)


def contents_of_folder(path: Path) -> Contents:
    """Return the contents of a converted folder from its statistics, without reading the data."""
    from raglane.data.store.shards import Shards

    store, _ = Shards.of(path)
    return _contents(
        path, store.lengths().astype(np.int64, copy=False), store.statistics(), store.layout, ()
    )


def _contents(
    path: Path | None,
    lengths: _Integers,
    counted: Statistics,
    layout: StoreLayout,
    notes: tuple[str, ...],
) -> Contents:
    labels = None
    has_sets = layout.targets in ("sets", "sequences")
    if layout.has_labels or layout.has_tags or has_sets:
        is_element = layout.has_tags or (has_sets and layout.targets_per_element)
        labels = labels_of("element" if is_element else "sequence", counted.labels)
    features = tuple(
        ChannelFacts(name, channel.missing) for name, channel in counted.channels.items()
    )
    kind, vocabulary = ("tokens", len(counted.tokens)) if layout.is_tokens else ("features", None)
    return Contents(
        data_name(path), path, lengths, kind, features, vocabulary, labels, notes, counted.features
    )


def read(
    path: Path | None,
    columns: Columns,
    format: str | None,
    progress: Progress,
    on_bad_row: str = "raise",
) -> Contents:
    """Read data for an inspection; labels are optional."""
    contents = _read_contents(path, columns, format, progress, on_bad_row)
    note = note_single(contents.lengths, contents.kind == "tokens")
    if note is not None:
        contents = replace(contents, notes=(*contents.notes, note))
    if not contents.lengths.any():
        count = count_of(len(contents.lengths), "sequence")
        got = f"{count}, none of which has an element" if len(contents.lengths) else "no sequence"
        raise data_error(
            path or Path(contents.name),
            got,
            "at least one sequence with an element",
            "check the data",
        )
    return contents


def _read_contents(
    path: Path | None, columns: Columns, format: str | None, progress: Progress, on_bad_row: str
) -> Contents:
    """Read data by the kind of its file or folder."""
    suffix = "" if path is None else path.suffix.lower()
    is_parquet = format == "parquet" or (format is None and suffix in FORMATS["parquet"].suffixes)
    if path is None:
        return contents_of(japanese_vowels()[0].records, None)
    if format is None and suffix == ".txt" and not path.is_dir() and _has_lengths(path):
        return lengths_of_text(path, progress)
    if format in (None, "arrow") and is_converted(path):
        return contents_of_folder(path)
    if is_parquet and path.is_file() and on_bad_row == "raise":
        return _with_labels(lambda asked: contents_of_parquet(path, asked, progress), columns)

    if on_bad_row == "raise":
        file = open_file(path, columns, format)
        return _with_labels(lambda asked: contents_of(file.records(asked), path), columns)

    def read_all(asked: Columns) -> Contents:
        return contents_of(read_records(path, asked, format, on_bad_row=on_bad_row), path)

    return _with_labels(read_all, columns)


def _has_lengths(path: Path) -> bool:
    """Return False for a table, or words with labels."""
    name = pick(path).name
    if name != "csv":
        return name == "text"
    with path.open("rb") as file:
        return file.readline().strip().isdigit()


def _with_labels(read: Callable[[Columns], Contents], columns: Columns) -> Contents:
    """Read data, without labels if no label column was named and none can be found."""
    if not columns.wants_labels or columns.label is not None:
        return read(columns)
    labelled = attempt(read, columns)
    if not isinstance(labelled, DataError):
        return labelled
    contents = read(replace(columns, need_labels=False))
    note = f"no labels are read: {labelled}"
    forecast = argument("task", "forecast")
    advice = f"to train on this data, name their column with {option('label')}, or pass {forecast}"
    return replace(contents, notes=(*contents.notes, note, advice))


# The bytes of a piece of a text.
_CHUNK = 1 << 22
# The most digits of a length.
_DIGITS = 9
_RULE = f"one length per line, a whole number from 0 to {10**_DIGITS - 1:,}"
_FIX = "write the number of elements of each sequence"


def lengths_of_text(path: Path, progress: Progress) -> Contents:
    """Read lengths from a text file, one per line; empty lines are ignored."""
    check_readable(path)
    size = path.stat().st_size
    parts: list[_Integers] = []
    line = 1
    done = 0
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            is_first = done == 0
            done = done + len(chunk)
            if is_first:
                if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    check_text(path, chunk)
                chunk = chunk.removeprefix(codecs.BOM_UTF8)
            # The last line may be incomplete, and is kept for the next chunk.
            block, newline, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > _CHUNK:
                raise _error(path, rest, line)
            if newline:
                parts.append(_numbers(path, block, line))
                line += block.count(b"\n") + 1
            progress.done(min(1.0, done / max(size, 1)))
    parts.append(_numbers(path, rest, line))
    lengths = np.concatenate(parts)
    if len(lengths) == 0:
        raise data_error(path, "no length", _RULE, _FIX)
    note = "a file of lengths has neither features nor labels"
    return Contents(data_name(path), path, lengths, "lengths", notes=(note,))


def _numbers(path: Path, block: bytes, first: int) -> _Integers:
    """Parse complete lines; `first` is the number of the first line."""
    lengths = []
    for line, written in enumerate(block.split(b"\n"), first):
        text = written.strip()
        if not text:
            continue
        if not text.isdigit() or len(text.lstrip(b"0")) > _DIGITS:
            raise _error(path, text, line)
        lengths.append(int(text))
    return np.array(lengths, dtype=np.int64)


def _error(path: Path, text: bytes, line: int) -> DataError:
    return data_error(path, quote(text[:1000].decode(errors="backslashreplace")), _RULE, _FIX, line)


def contents_of_parquet(path: Path, columns: Columns, progress: Progress) -> Contents:
    """Return the contents of a Parquet file, which is read in pieces; one with a fault is read
    again, as a whole.
    """
    check_readable(path)
    contents = attempt(_in_pieces, path, columns, progress)
    if isinstance(contents, Contents):
        return contents
    return contents_of(read_records(path, columns, "parquet"), path)


def _in_pieces(path: Path, columns: Columns, progress: Progress) -> Contents | None:
    """Return the contents of a Parquet file; None without a row."""
    alike = Alike()
    counted = Statistics()
    lengths: list[_Integers] = []
    with readable(path, "Parquet"):
        rows = require("pyarrow.parquet", "data").read_metadata(path).num_rows
    for piece in parquet_pieces(path, columns):
        records = alike.checked(piece.read(0, piece.count))
        lengths.append(records.lengths)
        counted += Statistics.of(records)
        progress.done(piece.end[0] / rows)
    if alike.layout is None:
        return None
    return _noted(_contents(path, np.concatenate(lengths), counted, alike.layout, ()), records)
