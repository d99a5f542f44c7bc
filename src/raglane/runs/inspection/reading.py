"""Reads data for an inspection: all formats of ``raglane.data``, and text files of lengths.

Text files of lengths and Parquet files are read in pieces, to limit memory.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import argument, count_of, quote, require
from raglane.data.conversion import Progress
from raglane.data.formats import FORMATS, japanese_vowels
from raglane.data.formats import read as read_records
from raglane.data.formats.base import check_readable, check_text, data_error
from raglane.data.formats.ipc import is_converted, read_parquet
from raglane.data.formats.table import Chosen, choose
from raglane.data.fragments import Layout
from raglane.data.missing import BLOCKS
from raglane.data.records import TASKS, Columns, Records, note_single
from raglane.data.statistics import FeatureCounts, Statistics
from raglane.errors import DataError
from raglane.runs.sources import DEFAULT_DATA

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Feature:
    """A channel, and the number of its elements that are NaN or infinite."""

    name: str
    missing: int


@dataclass(frozen=True)
class Labels:
    """The counts of labels, which belong to sequences or elements."""

    of: str
    counts: dict[str, int]


@dataclass(frozen=True, eq=False)
class Contents:
    """The lengths and statistics of a file."""

    name: str
    path: Path | None
    lengths: _Integers
    kind: str
    features: tuple[Feature, ...] = ()
    vocabulary: int | None = None
    labels: Labels | None = None
    notes: tuple[str, ...] = ()
    beside: Mapping[str, FeatureCounts] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """The number of missing values in all numeric columns."""
        counted = sum(counts.missing for counts in self.beside.values() if counts.channel is not None)
        return counted + sum(feature.missing for feature in self.features)

    def inputs(self, missing: str = "error") -> tuple[int, list[int]]:
        """Return the number of channels that a model reads, and the number of categories of each embedding."""
        # If values are missing, training adds a flag for each channel.
        each = 2 if self.missing and missing == "error" else BLOCKS[missing]
        words = [counts.categories + 1 for counts in self.beside.values() if counts.categories is not None]
        numbers = len(self.beside) - len(words) + len(self.features)
        tokens = [self.vocabulary or 1] if self.kind != "features" and self.beside else []
        return each * numbers, words + tokens


def data_name(path: Path | None) -> str:
    """Return the name of data for titles."""
    return DEFAULT_DATA if path is None else path.resolve().name or str(path)


def labels_of(of: str, counts: Mapping[str, int]) -> Labels:
    """Return labels sorted by descending count, then alphabetically."""
    return Labels(of, dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def contents_of(records: Records, path: Path | None) -> Contents:
    """Return the contents of records in memory."""
    return _contents(path, records.lengths, Statistics.of(records), Layout.of(records), records.notes)


def contents_of_folder(path: Path) -> Contents:
    """Return the contents of a converted folder from its statistics, without reading the data."""
    from raglane.data.shards import Shards

    store, _ = Shards.of(path)
    return _contents(path, store.lengths().astype(np.int64, copy=False), store.statistics(), store.layout, ())


def _contents(
    path: Path | None, lengths: _Integers, counted: Statistics, layout: Layout, notes: tuple[str, ...]
) -> Contents:
    labels, has_sets = None, layout.targets in ("sets", "sequences")
    if layout.has_labels or layout.has_tags or has_sets:
        is_element = layout.has_tags or (has_sets and layout.targets_per_element)
        labels = labels_of("element" if is_element else "sequence", counted.labels)
    features = tuple(Feature(name, channel.missing) for name, channel in counted.channels.items())
    kind, vocabulary = ("tokens", len(counted.tokens)) if layout.is_tokens else ("features", None)
    return Contents(data_name(path), path, lengths, kind, features, vocabulary, labels, notes, counted.features)


def read(
    path: Path | None, columns: Columns, format: str | None, progress: Progress, on_bad_row: str = "fail"
) -> Contents:
    """Read data for an inspection; labels are optional."""
    suffix = "" if path is None else path.suffix.lower()
    is_parquet = format == "parquet" or (format is None and suffix in FORMATS["parquet"].suffixes)
    if path is None:
        contents = contents_of(japanese_vowels()[0], None)
    elif format is None and suffix == ".txt" and not path.is_dir():
        contents = lengths_of_text(path, progress)
    elif format in (None, "arrow") and is_converted(path):
        contents = contents_of_folder(path)
    elif is_parquet and path.is_file() and on_bad_row == "fail":
        contents = _with_labels(lambda asked: lengths_of_parquet(path, asked, progress), columns)
    else:
        contents = _with_labels(
            lambda asked: contents_of(read_records(path, asked, format, on_bad_row=on_bad_row), path), columns
        )
    if (note := note_single(contents.lengths, contents.kind == "tokens")) is not None:
        contents = replace(contents, notes=(*contents.notes, note))
    if not contents.lengths.any():
        count = count_of(len(contents.lengths), "sequence")
        got = f"{count}, none of which has an element" if len(contents.lengths) else "no sequence"
        raise data_error(path or Path(contents.name), got, "at least one sequence with an element", "check the data")
    return contents


def _with_labels(read: Callable[[Columns], Contents], columns: Columns) -> Contents:
    """Read data, without labels if no label column was named and none can be found."""
    try:
        return read(columns)
    except DataError as error:
        if not columns.wants_labels or columns.label is not None:
            raise
        contents = read(replace(columns, need_labels=False))
        note = f"no labels are read: {error}"
        forecast = argument("task", "forecast")
        advice = f"to train on this data, name their column with {argument('label', of='Columns')}, or pass {forecast}"
        return replace(contents, notes=(*contents.notes, note, advice))


# The bytes of a piece of a text, and the most digits of a length.
_CHUNK, _DIGITS = 1 << 22, 9
_RULE = f"one length per line, a whole number from 0 to {10**_DIGITS - 1:,}"
_FIX = "write the number of elements of each sequence"


def lengths_of_text(path: Path, progress: Progress) -> Contents:
    """Read lengths from a text file, one per line; empty lines are ignored."""
    check_readable(path)
    size = path.stat().st_size
    parts: list[_Integers] = []
    line, done, rest = 1, 0, b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            is_first, done = done == 0, done + len(chunk)
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
    if b"\r" in block:
        # The line feed after the last carriage return may be in the next chunk.
        block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
    signs = np.frombuffer(block + b"\n", np.uint8)
    ends = np.flatnonzero(signs == ord("\n"))
    widths = np.diff(ends, prepend=-1) - 1
    digits = signs - np.uint8(ord("0"))  # other bytes wrap to 10 and above
    if np.count_nonzero(digits > 9) > len(ends) or widths.max() > _DIGITS:
        return _parse_lines(path, block, first)
    numbers = np.zeros(len(ends), np.int64)
    for place in range(int(widths.max())):
        has = widths > place
        numbers[has] += digits[ends[has] - 1 - place].astype(np.int64) * 10**place
    return numbers[widths > 0]


def _parse_lines(path: Path, block: bytes, first: int) -> _Integers:
    """Parse lines one at a time, to allow blanks and to find the invalid line."""
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


# The approximate bytes, and the most rows, of a batch of a Parquet file.
_BYTES, _ROWS = 1 << 26, 1 << 16


class _UnusualError(Exception):
    """Raised for a file that must be read as a whole, for its types or for a good message."""


def _expect(is_usual: bool) -> None:
    if not is_usual:
        raise _UnusualError


class _Tally:
    """Counts of the batches so far."""

    def __init__(self) -> None:
        self.lengths: list[_Integers] = []
        self.labels: Counter[str] = Counter()
        self.tokens: set[str] = set()
        self.is_tokens = False
        self.missing: _Integers | None = None

    def add_missing(self, entries: Any, width: int) -> None:
        """Count the entries of each channel that are not finite in float32."""
        _expect(entries.null_count == 0 and (self.missing is None or len(self.missing) == width))
        counts = np.zeros(width, np.int64)
        if require("pyarrow.types", "data").is_floating(entries.type):
            with np.errstate(over="ignore"):
                numbers = entries.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
            counts = np.asarray((~np.isfinite(numbers)).reshape(-1, width).sum(axis=0), dtype=np.int64)
        self.missing = counts if self.missing is None else self.missing + counts


def lengths_of_parquet(path: Path, columns: Columns, progress: Progress) -> Contents:
    """Read lengths, and count labels, tokens and missing values."""
    arrow, files = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    check_readable(path)
    if columns.features or columns.static:
        return contents_of(read_parquet(path, columns), path)
    try:
        # A small buffer, because pyarrow would load whole columns of all row groups.
        pieces = {"pre_buffer": False, "buffer_size": 1 << 20}
        with files.ParquetFile(path, page_checksum_verification=True, **pieces) as file:
            chosen = choose(path, file.schema_arrow, columns)
            tally = _count(file, chosen, columns, progress)
    except (_UnusualError, arrow.ArrowException, OSError, UnicodeDecodeError):
        return contents_of(read_parquet(path, columns), path)
    labels = None
    if chosen.label is not None:
        labels = labels_of("element" if columns.task == "tag" else "sequence", tally.labels)
    counts = [] if tally.missing is None else tally.missing.tolist()
    features = tuple(Feature(f"x{channel}", count) for channel, count in enumerate(counts))
    kind, vocabulary = ("tokens", len(tally.tokens)) if tally.is_tokens else ("features", None)
    lengths = np.concatenate(tally.lengths)
    return Contents(data_name(path), path, lengths, kind, features, vocabulary, labels, chosen.notes)


def _count(file: Any, chosen: Chosen, columns: Columns, progress: Progress) -> _Tally:
    rows = file.metadata.num_rows
    _expect(rows > 0 and TASKS[columns.task].label not in ("numbers", "set", "sequence"))
    names = [name for name in (chosen.sequence, chosen.label) if name is not None]
    groups = (file.metadata.row_group(place) for place in range(file.metadata.num_row_groups))
    per_row = sum(group.total_byte_size for group in groups) / rows
    tally, done = _Tally(), 0
    for batch in file.iter_batches(max(1, min(_ROWS, int(_BYTES / max(per_row, 1)))), columns=names):
        lengths = _add_sequences(tally, batch.column(chosen.sequence))
        tally.lengths.append(lengths)
        if chosen.label is not None:
            _add_labels(tally, batch.column(chosen.label), lengths, of_elements=columns.task == "tag")
        done += batch.num_rows
        progress.done(done / rows)
    return tally


def _add_sequences(tally: _Tally, column: Any) -> _Integers:
    """Count the contents of a batch of sequences, and return their lengths."""
    types, compute = require("pyarrow.types", "data"), require("pyarrow.compute", "data")
    _expect(column.null_count == 0)
    if types.is_string(column.type) or types.is_large_string(column.type):
        column = compute.utf8_split_whitespace(compute.utf8_trim_whitespace(column))
        elements, lengths = column.flatten(), _widths(column)
        # An empty text is split into one empty word.
        lengths[compute.equal(compute.list_element(column, 0), "").to_numpy(zero_copy_only=False)] = 0
        _add_tokens(tally, elements)
        tally.tokens.discard("")
        return lengths
    _expect(_is_list(column.type))
    elements, lengths = column.flatten(), _widths(column)
    if types.is_string(elements.type) or types.is_large_string(elements.type):
        _add_tokens(tally, elements)
    elif _is_list(elements.type):
        # A step is a list of channels.
        if len(elements):
            _expect(elements.null_count == 0)
            widths, entries = _widths(elements), elements.flatten()
            _expect(widths[0] > 0 and bool((widths == widths[0]).all()))
            _expect(types.is_integer(entries.type) or types.is_floating(entries.type))
            tally.add_missing(entries, int(widths[0]))
    else:
        _expect(any(test(elements.type) for test in (types.is_integer, types.is_floating, types.is_boolean)))
        tally.add_missing(elements, 1)
    return lengths


def _is_list(kind: Any) -> bool:
    types = require("pyarrow.types", "data")
    return any(test(kind) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def _widths(column: Any) -> _Integers:
    """Return the lengths of the lists of a column."""
    compute = require("pyarrow.compute", "data")
    return compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)


def _add_tokens(tally: _Tally, elements: Any) -> None:
    _expect(elements.null_count == 0)
    tally.is_tokens = True
    tally.tokens.update(elements.unique().to_pylist())


def _add_labels(tally: _Tally, column: Any, lengths: _Integers, of_elements: bool) -> None:
    types, compute = require("pyarrow.types", "data"), require("pyarrow.compute", "data")
    _expect(column.null_count == 0)
    if of_elements:
        _expect(types.is_list(column.type) or types.is_large_list(column.type))
        _expect(bool((_widths(column) == lengths).all()))
        column = column.flatten()
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kinds = types.is_string, types.is_large_string, types.is_integer, types.is_boolean
    _expect(column.null_count == 0 and any(test(column.type) for test in kinds))
    counted = compute.value_counts(column)
    words = counted.field("values").cast("large_string").to_pylist()
    tally.labels.update(dict(zip(words, counted.field("counts").to_pylist(), strict=True)))
