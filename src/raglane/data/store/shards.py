"""Shards: the Arrow files of a converted folder, of bounded size.

A shard is one Arrow batch, whose offsets and values NumPy and torch can use in place. Tokens and
labels are dictionary arrays: 4 bytes each, with each word stored once.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.files import whole_file
from raglane._utils.messages import quote, require
from raglane.data.prepare.statistics import Statistics
from raglane.data.records import Records, offsets_of
from raglane.data.sources.files import check_readable
from raglane.data.sources.ipc import (
    CHANNELS,
    DESCRIPTION,
    LENGTHS,
    STATISTICS,
    Blocks,
    damaged,
    described,
    opened,
    readable,
    verify_file,
)
from raglane.data.store.fragments import Fragment, Index, Store, StoreLayout, fragment_in, values_in
from raglane.data.typed.arrays import Array, Entries, Integers
from raglane.errors import DataError

# Bytes of a shard: large, so that few files are open, but small enough for memory.
SHARD = 1 << 27

# The most elements for 32-bit offsets.
_MOST = 2**31 - 1

# The most bytes of offsets and labels that are copied into memory, and of values that are mapped.
# Larger values are read per batch: 256 sequences of 8 elements of 2 GB take 0.8 ms when read, 0.3
# ms when all is mapped, and 2.5 to 3 ms when pages are mapped and released.
_COPIED = _MAPPED = 1 << 29


def bytes_of(records: Records) -> int:
    """Return the approximate bytes of records in a shard."""
    per_element, per_sequence = _widths(records)
    return per_element * len(records.values) + per_sequence * len(records)


def _widths(records: Records) -> tuple[int, int]:
    """Return the approximate bytes per element, and further bytes per sequence."""
    per_element = 4 * max(len(records.channels), 1)
    per_sequence = 12
    if records.tags is not None:
        per_element += 4
    for feature in records.features:
        if feature.per_sequence:
            per_sequence += 4
        else:
            per_element += 4
    if records.targets is not None:
        target = 8 * max(len(records.targets.names), 1)
        if records.targets.per_element:
            per_element += target
        else:
            per_sequence += target
    return per_element, per_sequence


def bounded(records: Records, most: int) -> Iterator[Records]:
    """Split records into runs of about ``most`` bytes; a larger sequence is one run."""
    if bytes_of(records) <= most:
        yield records
        return
    per_element, per_sequence = _widths(records)
    ends = records.offsets[1:] * per_element + per_sequence * np.arange(1, len(records) + 1)
    edges = [0, *(np.flatnonzero(np.diff((ends - 1) // most)) + 1).tolist(), len(records)]
    for start, end in pairwise(edges):
        yield records.select(np.arange(start, end))


def write_shard(
    path: Path, pieces: Sequence[Records], layout: StoreLayout, names: dict[str, str]
) -> None:
    """Write records as one Arrow file, atomically."""
    arrow = require("pyarrow", "data")
    ipc = require("pyarrow.ipc", "data")
    table = _table(pieces, layout, names)
    with (
        whole_file(path) as file,
        ipc.new_file(arrow.PythonFile(file, "w"), table.schema) as writer,
    ):
        writer.write_batch(table)


def _table(pieces: Sequence[Records], layout: StoreLayout, names: dict[str, str]) -> Any:
    arrow = require("pyarrow", "data")
    offsets = offsets_of(np.concatenate([records.lengths for records in pieces]))
    lists = arrow.ListArray if offsets[-1] <= _MOST else arrow.LargeListArray
    starts = arrow.array(offsets.astype(np.int32) if offsets[-1] <= _MOST else offsets)
    metadata = {}
    if not layout.is_tokens:
        metadata = {CHANNELS: json.dumps(layout.channels).encode()}
    columns = {names["sequence"]: lists.from_arrays(starts, _values(pieces, layout))}
    if layout.has_tags:
        tags = [records.tags for records in pieces if records.tags is not None]
        columns[names["label"]] = lists.from_arrays(starts, _words(np.concatenate(tags)))
    elif layout.has_labels:
        labels = chain.from_iterable(records.labels or () for records in pieces)
        columns[names["label"]] = _words(list(labels))
    columns |= _extra_columns(
        pieces, layout, names.get("label", ""), partial(lists.from_arrays, starts)
    )
    if layout.ids != "none":
        ids = chain.from_iterable(records.ids or () for records in pieces)
        columns[names["id"]] = _ids(list(ids), layout)
    fields = [
        arrow.field(name, column.type, metadata=metadata if name == names["sequence"] else None)
        for name, column in columns.items()
    ]
    return arrow.record_batch(list(columns.values()), schema=arrow.schema(fields))


def _values(pieces: Sequence[Records], layout: StoreLayout) -> Any:
    """Return the Arrow column of all tokens, or of the numbers of all channels."""
    full = [records.values for records in pieces if len(records.values)]
    if layout.is_tokens:
        return _words(np.concatenate(full) if full else np.empty(0, dtype=object))
    arrow = require("pyarrow", "data")
    numbers = np.concatenate(full).ravel() if full else np.empty(0, dtype=np.float32)
    width = max(len(layout.channels), 1)
    values = arrow.array(numbers)
    return values if width == 1 else arrow.FixedSizeListArray.from_arrays(values, width)


def _extra_columns(
    pieces: Sequence[Records], layout: StoreLayout, label: str, in_lists: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the Arrow columns of targets and features."""
    arrow = require("pyarrow", "data")
    columns: dict[str, Any] = {}
    if layout.targets != "none":
        values = np.concatenate(
            [records.targets.values for records in pieces if records.targets is not None]
        )
        if layout.targets != "numbers":
            starts = offsets_of([len(labels) for labels in values]).astype(np.int32)
            words = [label for labels in values for label in labels]
            entries = arrow.ListArray.from_arrays(
                arrow.array(starts), arrow.array(words, arrow.string())
            )
        else:
            entries = arrow.array(values.ravel())
            if values.shape[1] > 1:
                entries = arrow.FixedSizeListArray.from_arrays(entries, values.shape[1])
        columns[label] = in_lists(entries) if layout.targets_per_element else entries
    for index, (name, per_sequence, is_numbers) in enumerate(layout.features):
        values = np.concatenate([records.features[index].values for records in pieces])
        entries = (
            arrow.array(values)
            if is_numbers
            else arrow.array(values, arrow.string()).dictionary_encode()
        )
        columns[name] = entries if per_sequence else in_lists(entries)
    return columns


def _words(words: Entries | Sequence[str]) -> Any:
    arrow = require("pyarrow", "data")
    return arrow.array(words, arrow.string()).dictionary_encode()


def _ids(ids: Sequence[str | int], layout: StoreLayout) -> Any:
    arrow = require("pyarrow", "data")
    try:
        return arrow.array(ids, arrow.int64() if layout.ids == "numbers" else arrow.string())
    except OverflowError as error:
        odd = next(name for name in ids if isinstance(name, int) and not -(2**63) <= name < 2**63)
        raise DataError(
            "ids", quote(odd), "integers of 64 bits", "write the ids as strings"
        ) from error


@dataclass(frozen=True, eq=False)
class Shards(Store):
    """The Arrow files of a converted folder, mapped into memory; small offsets and labels are
    copied.
    """

    folder: Path
    shards: list[dict[str, Any]]
    names: dict[str, Any]
    layout: StoreLayout
    checksums: dict[str, str]
    _mapped: dict[int, mmap.mmap] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> tuple[Shards, str]:
        """Return the shards of a folder, and the task for which it was converted."""
        description = described(folder)
        try:
            layout = StoreLayout.from_config(description)
            shards = description["shards"]
            names = description["columns"]
            return cls(folder, shards, names, layout, description["checksums"]), description["task"]
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(folder / DESCRIPTION) from error

    @property
    def sizes(self) -> list[int]:
        """The number of sequences of each shard."""
        return [shard["sequences"] for shard in self.shards]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels in the source."""
        return self.layout.label_kinds

    def name(self, number: int) -> str:
        """Return the path of a shard."""
        return str(self.folder / self.shards[number]["file"])

    def load(self, number: int) -> Fragment:
        """Return the arrays of a file, without a copy."""
        shard = self.shards[number]
        path = self.folder / shard["file"]
        mapped = self._mapped[number] = _map(path)
        blocks = Blocks(path, memoryview(mapped), shard["checksums"])
        # Before Arrow reads it.
        blocks.verify_outside(*shard["values"])
        batch = _batch_in(path, mapped)
        with readable(path, "Arrow"):
            arrays = fragment_in(batch, self.layout, self.names)
        offsets = arrays.offsets
        values = arrays.values
        labels = arrays.labels
        if sum(self.sizes) * 8 <= _COPIED:
            # Then a row only maps the pages of its values, a third of all.
            offsets = np.array(offsets)
            labels = labels if labels is None or self.layout.has_tags else np.array(labels)
        has_all = len(offsets) == shard["sequences"] + 1 and len(values) == shard["elements"]
        # Otherwise rows could be outside of the file.
        if (
            not has_all
            or offsets[0] != 0
            or offsets[-1] != len(values)
            or (np.diff(offsets) < 0).any()
        ):
            raise damaged(path)
        fragment = _MappedFragment(**{**vars(arrays), "offsets": offsets, "labels": labels})
        is_large = (
            sum(shard["elements"] for shard in self.shards) * values.itemsize * _width(values)
            > _MAPPED
        )
        fragment.locate(path if is_large else None, mapped, blocks)
        return fragment

    def lengths(self) -> Array:
        """Return the lengths from their file, which is mapped into memory."""
        path = self.folder / LENGTHS
        verify_file(path, self.checksums[LENGTHS])
        try:
            # Copy-on-write, because torch warns of read-only arrays.
            lengths: Array = np.load(path, mmap_mode="c")
        except (OSError, ValueError) as error:
            raise damaged(path) from error
        if lengths.shape != (sum(self.sizes),) or lengths.dtype.kind != "i":
            raise damaged(path)
        return np.asarray(lengths)

    def statistics(self) -> Statistics:
        """Return the statistics from their file."""
        path = self.folder / STATISTICS
        verify_file(path, self.checksums[STATISTICS])
        try:
            return Statistics.from_config(json.loads(path.read_bytes()))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise damaged(path) from error

    def drop(self) -> None:
        """Release the mapped pages, which stay in the system's cache."""
        for mapped in self._mapped.values():
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict[str, Any]:
        # Another process may have another working directory.
        return {**self.__dict__, "folder": self.folder.absolute(), "_mapped": {}}


def _width(values: Array) -> int:
    return int(values.shape[1]) if values.ndim == 2 else 1


class _MappedFragment(Fragment):
    """A fragment whose values are verified when they are first read, from the mapping or, if large,
    from the file.
    """

    _start: int  # of the values in the file
    _blocks: Blocks
    _file: int | None = None

    def locate(self, path: Path | None, mapped: mmap.mmap, blocks: Blocks) -> None:
        """Set the location of the values."""
        if path is not None and hasattr(os, "pread"):  # not Windows
            descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            object.__setattr__(self, "_file", descriptor)
        object.__setattr__(self, "_start", _position_in(mapped, self.values))
        object.__setattr__(self, "_blocks", blocks)

    def cut(self, starts: Integers, lengths: Integers, elements: Index) -> Array:
        """Return the values of some sequences, concatenated."""
        size = self.values.itemsize * _width(self.values)
        begins = starts * size + self._start
        counts = lengths * size
        self._blocks.verify(begins, begins + counts)
        if self._file is None or isinstance(elements, slice):
            return super().cut(starts, lengths, elements)
        spans = zip(counts.tolist(), begins.tolist(), strict=True)
        content = b"".join([os.pread(self._file, count, start) for count, start in spans])
        return np.frombuffer(content, dtype=self.values.dtype).reshape(
            int(lengths.sum()), *self.values.shape[1:]
        )


def _map(path: Path) -> mmap.mmap:
    if not path.exists():
        raise damaged(path)
    check_readable(path)
    with readable(path, "Arrow"), path.open("rb") as file:
        # Arrow's own mapping cannot release its pages.
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise damaged(path, "0 bytes") from error


def _batch_in(path: Path, mapped: mmap.mmap) -> Any:
    arrow = require("pyarrow", "data")
    with readable(path, "Arrow"):
        batch = opened(arrow.BufferReader(arrow.py_buffer(mapped))).get_batch(0)
        batch.validate()
        return batch


def _position_in(mapped: mmap.mmap, values: Array) -> int:
    """Return the position in a file of values that are mapped from it."""
    return int(values.ctypes.data - np.frombuffer(mapped, dtype=np.uint8).ctypes.data)


def span_in(path: Path, sequence: str, layout: StoreLayout) -> tuple[int, int]:
    """Return the first byte and the end of the values in a shard."""
    mapped = _map(path)
    values = values_in(_batch_in(path, mapped).column(sequence), layout)
    begin = _position_in(mapped, values) if values.size else 0
    return begin, begin + values.nbytes


def offsets_in(path: Path, sequence: str) -> Array:
    """Return the offsets of the sequences in a shard, without a copy."""
    return _batch_in(path, _map(path)).column(sequence).offsets.to_numpy()
