"""Arrow files of a bounded size, which hold what was converted, and what each of them is made of.

A shard is one batch of Arrow, so that its offsets and values lie in the file as NumPy and torch want them. Tokens and
labels are dictionaries: 4 bytes for each, and each word once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.files import whole_file
from raglane.data.beside import columns_beside
from raglane.data.formats.ipc import CHANNELS
from raglane.data.layout import Layout
from raglane.data.records import Records, offsets_of
from raglane.errors import DataError, message, quote, require

__all__ = ["SHARD", "bounded", "bytes_of", "write_shard"]

# Bytes of a shard: large enough that few are open, and small enough to be made in memory.
SHARD = 1 << 27

# Elements that 32-bit offsets reach.
_MOST = 2**31 - 1


def bytes_of(records: Records) -> int:
    """About what records take in a shard."""
    per_element, per_sequence = _widths(records)
    return per_element * len(records.values) + per_sequence * len(records)


def _widths(records: Records) -> tuple[int, int]:
    """About the bytes of an element, and of a sequence besides."""
    widths = [4 * max(len(records.channels), 1) + 4 * (records.tags is not None), 12]
    for feature in records.features:
        widths[feature.per_sequence] += 4
    if records.targets is not None:
        widths[not records.targets.per_element] += 8 * max(len(records.targets.names), 1)
    return widths[0], widths[1]


def bounded(records: Records, most: int) -> Iterator[Records]:
    """Records cut into runs of about so many bytes, but for a sequence that is larger."""
    if bytes_of(records) <= most:
        yield records
        return
    per_element, per_sequence = _widths(records)
    ends = records.offsets[1:] * per_element + per_sequence * np.arange(1, len(records) + 1)
    number = (ends - 1) // most
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(records)]
    for start, end in pairwise(edges):
        yield records.select(np.arange(start, end))


def write_shard(path: Path, parts: Sequence[Records], layout: Layout, names: dict[str, str]) -> None:
    """Write records as one Arrow file, whole or not at all."""
    arrow, ipc = require("pyarrow", "data"), require("pyarrow.ipc", "data")
    table = _table(parts, layout, names)
    with whole_file(path) as file, ipc.new_file(arrow.PythonFile(file, "w"), table.schema) as writer:
        writer.write_batch(table)


def _table(parts: Sequence[Records], layout: Layout, names: dict[str, str]) -> Any:
    arrow = require("pyarrow", "data")
    offsets = offsets_of(np.concatenate([records.lengths for records in parts]))
    lists = arrow.ListArray if offsets[-1] <= _MOST else arrow.LargeListArray
    starts = arrow.array(offsets.astype(np.int32) if offsets[-1] <= _MOST else offsets)
    full = [records.values for records in parts if len(records.values)]
    metadata = {}
    if layout.is_tokens:
        values = _words(np.concatenate(full) if full else np.empty(0, dtype=object))
    else:
        width = max(len(layout.channels), 1)
        flat = np.concatenate(full).ravel() if full else np.empty(0, dtype=np.float32)
        values = arrow.array(flat)
        if width > 1:
            values = arrow.FixedSizeListArray.from_arrays(values, width)
        metadata = {CHANNELS: json.dumps(layout.channels).encode()}
    columns = {names["sequence"]: lists.from_arrays(starts, values)}
    if layout.has_tags:
        tags = [records.tags for records in parts if records.tags is not None]
        columns[names["label"]] = lists.from_arrays(starts, _words(np.concatenate(tags)))
    elif layout.has_labels:
        columns[names["label"]] = _words([label for records in parts for label in records.labels or ()])
    columns |= columns_beside(parts, layout, names.get("label", ""), lambda entries: lists.from_arrays(starts, entries))
    if layout.ids != "none":
        columns[names["id"]] = _ids([name for records in parts for name in records.ids or ()], layout)
    fields = [
        arrow.field(name, column.type, metadata=metadata if name == names["sequence"] else None)
        for name, column in columns.items()
    ]
    return arrow.record_batch(list(columns.values()), schema=arrow.schema(fields))


def _words(words: npt.NDArray[np.object_] | Sequence[str]) -> Any:
    arrow = require("pyarrow", "data")
    return arrow.array(words, arrow.string()).dictionary_encode()


def _ids(ids: Sequence[str | int], layout: Layout) -> Any:
    arrow = require("pyarrow", "data")
    try:
        return arrow.array(ids, arrow.int64() if layout.ids == "numbers" else arrow.string())
    except OverflowError as error:
        odd = next(name for name in ids if isinstance(name, int) and not -(2**63) <= name < 2**63)
        rule = "a whole number fits 64 bits, with its sign"
        raise DataError(message("ids", quote(odd), rule, "write the ids as strings")) from error
