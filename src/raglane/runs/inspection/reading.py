"""From a path to its contents: every format of ``raglane.data``, and text files that hold only lengths.

The lengths of text and Parquet files are read piece by piece: no more of millions of sequences is in memory at once.
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
from raglane.data.records import TASKS, Columns, Records
from raglane.data.statistics import FeatureCounts, Statistics
from raglane.errors import DataError

_Integers = npt.NDArray[np.int64]


DEFAULT_NAME = "Japanese vowels"


@dataclass(frozen=True)
class Feature:
    """A feature column."""

    name: str
    missing: int


@dataclass(frozen=True)
class Labels:
    """The labels of a file."""

    of: str
    counts: dict[str, int]


@dataclass(frozen=True, eq=False)
class Contents:
    """What a file holds."""

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
        """Features that are NaN or infinite, in all columns of numbers."""
        counted = sum(counts.missing for counts in self.beside.values() if counts.channel is not None)
        return counted + sum(feature.missing for feature in self.features)

    def inputs(self, missing: str = "error") -> tuple[int, list[int]]:
        """What a model reads of an element."""
        # Where something is missing, training adds for each channel one that says so.
        each = 2 if self.missing and missing == "error" else BLOCKS[missing]
        words = [counts.categories + 1 for counts in self.beside.values() if counts.categories is not None]
        numbers = len(self.beside) - len(words) + len(self.features)
        tokens = [self.vocabulary or 1] if self.kind != "features" and self.beside else []
        return each * numbers, words + tokens


def data_name(path: Path | None) -> str:
    """The data in a title."""
    return DEFAULT_NAME if path is None else path.resolve().name or str(path)


def labels_of(of: str, counts: Mapping[str, int]) -> Labels:
    """Labels, the most frequent first; of those that come as often, the first in the alphabet."""
    return Labels(of, dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def contents_of(records: Records, path: Path | None) -> Contents:
    """What a reader found, counted."""
    return _contents(path, records.lengths, Statistics.of(records), Layout.of(records), records.notes)


def contents_of_folder(path: Path) -> Contents:
    """What a folder holds that was converted: from the files beside the data, which is not read."""
    from raglane.data.shards import Shards

    store, _ = Shards.of(path)
    return _contents(path, store.lengths().astype(np.int64, copy=False), store.statistics(), store.layout, ())


def _contents(
    path: Path | None,
    lengths: _Integers,
    counted: Statistics,
    layout: Layout,
    notes: tuple[str, ...],
) -> Contents:
    labels, has_sets = None, layout.targets == "sets"
    if layout.has_labels or layout.has_tags or has_sets:
        is_element = layout.has_tags or (has_sets and layout.targets_per_element)
        labels = labels_of("element" if is_element else "sequence", counted.labels)
    features = tuple(Feature(name, channel.missing) for name, channel in counted.channels.items())
    kind, vocabulary = ("tokens", len(counted.tokens)) if layout.is_tokens else ("features", None)
    return Contents(data_name(path), path, lengths, kind, features, vocabulary, labels, notes, counted.features)


def refuse_empty(contents: Contents) -> None:
    """Refuse data in which there is nothing to compute."""
    if contents.lengths.any():
        return
    count = len(contents.lengths)
    got = f"{count_of(count, 'sequence')}, all of length 0" if count else "no sequence"
    error: DataError = data_error(
        contents.path or Path(contents.name), got, "data with at least one element", "check the data"
    )
    raise error


def read(
    path: Path | None, columns: Columns, format: str | None, progress: Progress, on_bad_row: str = "fail"
) -> Contents:
    """Read what is to be inspected; labels only where there are some."""
    suffix = "" if path is None else path.suffix.lower()
    is_parquet = format == "parquet" or (format is None and suffix in FORMATS["parquet"].suffixes)
    if path is None:
        contents = contents_of(japanese_vowels()[0], None)
    elif format is None and suffix == ".txt" and not path.is_dir():
        contents = lengths_of_text(path, progress)
    elif format in (None, "arrow") and is_converted(path):
        contents = contents_of_folder(path)
    elif is_parquet and path.is_file() and on_bad_row == "fail":  # what is not there is for the reader to refuse
        contents = _with_labels(lambda asked: lengths_of_parquet(path, asked, progress), columns)
    else:
        contents = _with_labels(
            lambda asked: contents_of(read_records(path, asked, format, on_bad_row=on_bad_row), path), columns
        )
    refuse_empty(contents)
    return contents


def _with_labels(read: Callable[[Columns], Contents], columns: Columns) -> Contents:
    """What is there, without its labels where they cannot be told; who names their column must be right."""
    try:
        return read(columns)
    except DataError as error:
        if not columns.wants_labels or columns.label is not None:
            raise
        contents = read(replace(columns, need_labels=False))
        note = f"no labels are read: {error}"
        forecast = argument("task", "forecast")
        advice = f"to train on this data, name them with {argument('label', of='Columns')}, or pass {forecast}"
        return replace(contents, notes=(*contents.notes, note, advice))


# Bytes that are read at once.
_CHUNK = 1 << 22
# Digits of a length: more make no sequence that a machine can hold.
_DIGITS = 9
_RULE = f"a file with one length per line, a whole number from 0 to {10**_DIGITS - 1:,}"
_FIX = "write only the number of elements of each sequence"


def lengths_of_text(path: Path, progress: Progress) -> Contents:
    r"""Read the lengths of sequences from a text file, one per line; empty lines are passed over."""
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
            # A line that the chunk cuts waits for the next one.
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
    note = "a file of lengths: of features and labels it says nothing"
    return Contents(data_name(path), path, lengths, "lengths", notes=(note,))


def _numbers(path: Path, block: bytes, first: int) -> _Integers:
    """The numbers of whole lines, of which the first has this number."""
    if b"\r" in block:
        # The end of the last line may have been cut from it.
        block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
    signs = np.frombuffer(block + b"\n", np.uint8)
    ends = np.flatnonzero(signs == ord("\n"))
    widths = np.diff(ends, prepend=-1) - 1
    digits = signs - np.uint8(ord("0"))  # what is no digit wraps to 10 and above
    if np.count_nonzero(digits > 9) > len(ends) or widths.max() > _DIGITS:
        return _one_by_one(path, block, first)
    numbers = np.zeros(len(ends), np.int64)
    for place in range(int(widths.max())):
        has = widths > place
        numbers[has] += digits[ends[has] - 1 - place].astype(np.int64) * 10**place
    return numbers[widths > 0]


def _one_by_one(path: Path, block: bytes, first: int) -> _Integers:
    """The numbers of lines that hold more than digits: blanks around them, or what is wrong."""
    found = []
    for line, written in enumerate(block.split(b"\n"), first):
        text = written.strip()
        if not text:
            continue
        if not text.isdigit() or len(text.lstrip(b"0")) > _DIGITS:
            raise _error(path, text, line)
        found.append(int(text))
    return np.array(found, dtype=np.int64)


def _error(path: Path, text: bytes, line: int) -> DataError:
    return data_error(path, quote(text[:1000].decode(errors="backslashreplace")), _RULE, _FIX, line)


# Bytes of a batch of rows, and rows of it at most.
_BYTES, _ROWS = 1 << 26, 1 << 16


class _UnusualError(Exception):
    """What the reader of whole files has to look at."""


class _Tally:
    """What is counted of the batches so far."""

    def __init__(self) -> None:
        self.lengths: list[_Integers] = []
        self.labels: Counter[str] = Counter()
        self.tokens: set[str] = set()
        self.is_tokens = False
        self.missing: _Integers | None = None

    def add_missing(self, counts: _Integers) -> None:
        """Count what is missing in each channel."""
        if self.missing is not None and len(self.missing) != len(counts):
            raise _UnusualError
        self.missing = counts if self.missing is None else self.missing + counts


def lengths_of_parquet(path: Path, columns: Columns, progress: Progress) -> Contents:
    """Read lengths and count labels, tokens and what is missing."""
    arrow, files = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    check_readable(path)
    if columns.features or columns.static:
        return contents_of(read_parquet(path, columns), path)
    try:
        # Read in small pieces: otherwise whole columns, of all row groups, are in memory at once.
        pieces = {"pre_buffer": False, "buffer_size": 1 << 20}
        with files.ParquetFile(path, page_checksum_verification=True, **pieces) as file:
            chosen = choose(path, file.schema_arrow, columns)
            tally = _count(file, chosen, columns, progress)
    except (_UnusualError, arrow.ArrowException, OSError, UnicodeDecodeError):
        return contents_of(read_parquet(path, columns), path)
    lengths = np.concatenate(tally.lengths)
    labels = None
    if chosen.label is not None:
        labels = labels_of("element" if columns.task == "tag" else "sequence", tally.labels)
    counts = [] if tally.missing is None else tally.missing.tolist()
    features = tuple(Feature(f"x{channel}", count) for channel, count in enumerate(counts))
    kind, vocabulary = ("tokens", len(tally.tokens)) if tally.is_tokens else ("features", None)
    return Contents(data_name(path), path, lengths, kind, features, vocabulary, labels, chosen.notes)


def _count(file: Any, chosen: Chosen, columns: Columns, progress: Progress) -> _Tally:
    """Go through the batches of rows."""
    rows = file.metadata.num_rows
    if rows == 0 or TASKS[columns.task].label in ("numbers", "set"):
        raise _UnusualError
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
    """The lengths of a batch's sequences; what is in them is counted."""
    types, compute = require("pyarrow.types", "data"), require("pyarrow.compute", "data")
    if column.null_count:
        raise _UnusualError
    if types.is_string(column.type) or types.is_large_string(column.type):
        column = compute.utf8_split_whitespace(compute.utf8_trim_whitespace(column))
        elements, lengths = column.flatten(), _widths(column)
        # A text without words is split into one empty word.
        lengths[compute.equal(compute.list_element(column, 0), "").to_numpy(zero_copy_only=False)] = 0
        _add_tokens(tally, elements)
        tally.tokens.discard("")
        return lengths
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        raise _UnusualError
    elements, lengths = column.flatten(), _widths(column)
    if types.is_string(elements.type) or types.is_large_string(elements.type):
        _add_tokens(tally, elements)
    elif types.is_integer(elements.type) or types.is_floating(elements.type) or types.is_boolean(elements.type):
        tally.add_missing(_missing(elements, 1))
    elif types.is_list(elements.type) or types.is_large_list(elements.type) or types.is_fixed_size_list(elements.type):
        _add_channels(tally, elements)
    else:
        raise _UnusualError
    return lengths


def _add_channels(tally: _Tally, steps: Any) -> None:
    """Count what is missing where a step is a list of channels."""
    if len(steps) == 0:
        return
    widths = _widths(steps) if steps.null_count == 0 else np.zeros(1, np.int64)
    if widths[0] == 0 or (widths != widths[0]).any():
        raise _UnusualError
    entries = steps.flatten()
    types = require("pyarrow.types", "data")
    if not (types.is_integer(entries.type) or types.is_floating(entries.type)):
        raise _UnusualError
    tally.add_missing(_missing(entries, int(widths[0])))


def _add_tokens(tally: _Tally, elements: Any) -> None:
    if elements.null_count:
        raise _UnusualError
    tally.is_tokens = True
    tally.tokens.update(elements.unique().to_pylist())


def _add_labels(tally: _Tally, column: Any, lengths: _Integers, of_elements: bool) -> None:
    """Count the labels of a batch."""
    types, compute = require("pyarrow.types", "data"), require("pyarrow.compute", "data")
    if column.null_count:
        raise _UnusualError
    if of_elements:
        if not (types.is_list(column.type) or types.is_large_list(column.type)):
            raise _UnusualError
        if (_widths(column) != lengths).any():
            raise _UnusualError
        column = column.flatten()
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    fits = types.is_string, types.is_large_string, types.is_integer, types.is_boolean
    if column.null_count or not any(test(column.type) for test in fits):
        raise _UnusualError
    counted = compute.value_counts(column)
    words = counted.field("values").cast("large_string").to_pylist()
    tally.labels.update(dict(zip(words, counted.field("counts").to_pylist(), strict=True)))


def _widths(column: Any) -> _Integers:
    compute = require("pyarrow.compute", "data")
    found: _Integers = compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _missing(entries: Any, width: int) -> _Integers:
    """How many entries of each channel float32 cannot hold."""
    if entries.null_count:
        raise _UnusualError
    types = require("pyarrow.types", "data")
    if not types.is_floating(entries.type):
        return np.zeros(width, np.int64)
    with np.errstate(over="ignore"):
        numbers = entries.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    absent = ~np.isfinite(numbers)
    return np.asarray(absent.reshape(-1, width).sum(axis=0), dtype=np.int64)
