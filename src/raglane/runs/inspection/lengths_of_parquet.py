"""The lengths of a Parquet file's sequences, batch by batch of rows: no more of it is in memory at once.

What the training reads is checked in the same way. Where something is wrong, or of a type that is rare, the reader of
``raglane.data`` reads the file as a whole: it names the row.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.ipc import read_parquet
from raglane.data.formats.base import check_readable
from raglane.data.formats.table import Chosen, choose
from raglane.data.jobs import Progress
from raglane.data.records import TASKS, Columns
from raglane.errors import require
from raglane.runs.inspection.contents import Contents, Feature, contents_of, data_name, labels_of


# Bytes of a batch of rows, and rows of it at most.
_BYTES, _ROWS = 1 << 26, 1 << 16


class _UnusualError(Exception):
    """What the reader of whole files has to look at."""


class _Tally:
    """What is counted of the batches so far."""

    def __init__(self) -> None:
        self.lengths: list[npt.NDArray[np.int64]] = []
        self.labels: Counter[str] = Counter()
        self.tokens: set[str] = set()
        self.is_tokens = False
        self.missing: npt.NDArray[np.int64] | None = None

    def add_missing(self, counts: npt.NDArray[np.int64]) -> None:
        """Count what is missing in each channel."""
        if self.missing is not None and len(self.missing) != len(counts):
            raise _UnusualError
        self.missing = counts if self.missing is None else self.missing + counts


def read(path: Path, columns: Columns, progress: Progress) -> Contents:
    """Read lengths and count labels, tokens and what is missing."""
    arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    check_readable(path)
    if columns.features or columns.static:
        return contents_of(read_parquet(path, columns), path)
    try:
        # Read in small pieces: otherwise whole columns, of all row groups, are in memory at once.
        pieces = {"pre_buffer": False, "buffer_size": 1 << 20}
        with parquet.ParquetFile(path, page_checksum_verification=True, **pieces) as file:
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


def _add_sequences(tally: _Tally, column: Any) -> npt.NDArray[np.int64]:
    """The lengths of a batch's sequences; what is in them is counted."""
    types, compute = require("pyarrow.types", "data"), require("pyarrow.compute", "data")
    if column.null_count:
        raise _UnusualError
    if types.is_string(column.type) or types.is_large_string(column.type):
        column = compute.utf8_split_whitespace(compute.utf8_trim_whitespace(column))
        elements, lengths = column.flatten(), _lengths(column)
        # A text without words is split into one empty word.
        lengths[compute.equal(compute.list_element(column, 0), "").to_numpy(zero_copy_only=False)] = 0
        _add_tokens(tally, elements)
        tally.tokens.discard("")
        return lengths
    if not (types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)):
        raise _UnusualError
    elements, lengths = column.flatten(), _lengths(column)
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
    widths = _lengths(steps) if steps.null_count == 0 else np.zeros(1, np.int64)
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


def _add_labels(tally: _Tally, column: Any, lengths: npt.NDArray[np.int64], of_elements: bool) -> None:
    """Count the labels of a batch."""
    types, compute = require("pyarrow.types", "data"), require("pyarrow.compute", "data")
    if column.null_count:
        raise _UnusualError
    if of_elements:
        if not (types.is_list(column.type) or types.is_large_list(column.type)):
            raise _UnusualError
        if (_lengths(column) != lengths).any():
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


def _lengths(column: Any) -> npt.NDArray[np.int64]:
    compute = require("pyarrow.compute", "data")
    found: npt.NDArray[np.int64] = compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _missing(entries: Any, width: int) -> npt.NDArray[np.int64]:
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
