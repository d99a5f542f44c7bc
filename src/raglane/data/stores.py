"""Parts that lie in files: the shards of a folder that was converted, and the row groups of Parquet files."""

from __future__ import annotations

import json
import mmap
import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.beside import lists_of
from raglane.data.formats.base import check_readable
from raglane.data.formats.integrity import Blocks, damaged, verify_file
from raglane.data.formats.ipc import DESCRIPTION, LENGTHS, STATISTICS, described, opened, readable
from raglane.data.formats.table import Chosen, choose, records_of
from raglane.data.layout import Layout, layout_in
from raglane.data.locations import is_url, open_location
from raglane.data.parts import Part, Store, list_lengths
from raglane.data.records import Columns
from raglane.data.statistics import Statistics
from raglane.errors import require

__all__ = ["Groups", "Shards", "offsets_in", "span_in"]

# Bytes of the offsets and labels of all sequences up to which they are copied into memory; and bytes of all values up
# to which they are mapped. Beyond them what a batch needs is read: 256 sequences of 8 elements, of 2 GB, take 0.8 ms
# so, 0.3 ms where all of it is mapped, and 2.5 to 3 ms where pages must be mapped and given back for it.
_COPIED = _MAPPED = 1 << 29


@dataclass(frozen=True, eq=False)
class Shards(Store):
    """The Arrow files of a folder that was converted, mapped into memory; offsets and labels are copied while small.

    Attributes:
        folder: of the files.
        shards: ``file`` and ``sequences`` of each.
        names: of the columns, by their roles.
        layout: of all.
    """

    folder: Path
    shards: list[dict[str, Any]]
    names: dict[str, Any]
    layout: Layout
    checksums: dict[str, str]
    _mapped: dict[int, mmap.mmap] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> tuple[Shards, str]:
        """The shards of a folder, and the task that it was converted for."""
        description = described(folder)
        try:
            layout = layout_in(description)
            shards, names = description["shards"], description["columns"]
            return cls(folder, shards, names, layout, description["checksums"]), description["task"]
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(folder / DESCRIPTION) from error

    @property
    def sizes(self) -> list[int]:
        """As the description says."""
        return [shard["sequences"] for shard in self.shards]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """As they were when they were converted."""
        return self.layout.label_kinds

    def load(self, number: int) -> Part:
        """The arrays of a file, without a copy."""
        shard = self.shards[number]
        path = self.folder / shard["file"]
        mapped = self._mapped[number] = _map(path)
        blocks = Blocks(path, memoryview(mapped), shard["checksums"])
        # Before Arrow reads any of it.
        blocks.verify_outside(*shard["values"])
        batch = _batch_in(path, mapped)
        with readable(path, "Arrow"):
            sequences = batch.column(self.names["sequence"])
            offsets, words = sequences.offsets.to_numpy(), None
            values = _values_of(sequences, self.layout)
            if self.layout.is_tokens:
                words = tuple(sequences.values.dictionary.to_pylist())
            labels, label_words = None, ()
            if self.layout.has_labels or self.layout.has_tags:
                column = batch.column(self.names["label"])
                column = column.values if self.layout.has_tags else column
                labels, label_words = column.indices.to_numpy(), tuple(column.dictionary.to_pylist())
            ids = batch.column(self.names["id"]) if "id" in self.names else None
            beside = lists_of(batch, self.layout, self.names.get("label"))
        if sum(self.sizes) * 8 <= _COPIED:
            # A row then touches the pages of its values alone: two thirds less to be mapped for it.
            offsets = np.array(offsets)
            labels = labels if labels is None or self.layout.has_tags else np.array(labels)
        has_all = len(offsets) == shard["sequences"] + 1 and len(values) == shard["elements"]
        # Else rows would be cut out of other memory.
        if not has_all or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise damaged(path)
        part = _ReadPart(offsets, values, words, labels, label_words, self.layout, ids, beside)
        is_large = sum(shard["elements"] for shard in self.shards) * values.itemsize * _width(values) > _MAPPED
        part.lies_in(path if is_large else None, mapped, blocks)
        return part

    def lengths_of_all(self) -> npt.NDArray[Any]:
        """From the file beside the shards, which is mapped into memory."""
        path = self.folder / LENGTHS
        verify_file(path, self.checksums[LENGTHS])
        try:
            # Copied where it is written to, which nobody does: so torch need not be told that nobody may.
            lengths: npt.NDArray[Any] = np.load(path, mmap_mode="c")
        except (OSError, ValueError) as error:
            raise damaged(path) from error
        if lengths.shape != (sum(self.sizes),) or lengths.dtype.kind != "i":
            raise damaged(path)
        return np.asarray(lengths)

    def statistics(self) -> Statistics:
        """From the file beside the shards."""
        path = self.folder / STATISTICS
        verify_file(path, self.checksums[STATISTICS])
        try:
            return Statistics.from_config(json.loads(path.read_bytes()))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise damaged(path) from error

    def name(self, number: int) -> str:
        """The file."""
        return str(self.folder / self.shards[number]["file"])

    def drop(self) -> None:
        """The pages stay in the system's cache, so that most are back at once."""
        for mapped in self._mapped.values():
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict[str, Any]:
        # Another process may stand in another folder.
        return {**self.__dict__, "folder": self.folder.absolute(), "_mapped": {}}


def _width(values: npt.NDArray[Any]) -> int:
    return int(values.shape[1]) if values.ndim == 2 else 1


class _ReadPart(Part):
    """A part whose values are verified as they are read: where they are mapped, or from the file if it is large."""

    _place: int
    _blocks: Blocks
    _file: int | None = None

    def lies_in(self, path: Path | None, mapped: mmap.mmap, blocks: Blocks) -> None:
        """Set where the values are."""
        if path is not None:
            descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            object.__setattr__(self, "_file", descriptor)
        object.__setattr__(self, "_place", _place_in(mapped, self.values))
        object.__setattr__(self, "_blocks", blocks)

    def cut(
        self,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        elements: npt.NDArray[np.int64] | slice,
    ) -> npt.NDArray[Any]:
        """The values of some sequences, one after the other."""
        size = self.values.itemsize * _width(self.values)
        begins, counts = starts * size + self._place, lengths * size
        self._blocks.verify(begins, begins + counts)
        if self._file is None or isinstance(elements, slice):
            return super().cut(starts, lengths, elements)
        wanted = zip(counts.tolist(), begins.tolist(), strict=True)
        content = b"".join([os.pread(self._file, count, start) for count, start in wanted])
        found = np.frombuffer(content, dtype=self.values.dtype)
        return found.reshape(int(lengths.sum()), *self.values.shape[1:])


def _map(path: Path) -> mmap.mmap:
    """A shard, mapped into memory."""
    if not path.exists():
        raise damaged(path)
    check_readable(path)
    with readable(path, "Arrow"), path.open("rb") as file:
        # Not Arrow's own mapping, whose pages nobody can give back.
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise damaged(path, "0 bytes") from error


def _batch_in(path: Path, mapped: mmap.mmap) -> Any:
    """The one batch of a shard."""
    arrow = require("pyarrow", "data")
    with readable(path, "Arrow"):
        batch = opened(arrow.BufferReader(arrow.py_buffer(mapped))).get_batch(0)
        batch.validate()
        return batch


def _values_of(sequences: Any, layout: Layout) -> npt.NDArray[Any]:
    """The values of the column of sequences: features ``(N, C)``, or the places of tokens ``(N,)``."""
    if layout.is_tokens:
        places: npt.NDArray[Any] = sequences.values.indices.to_numpy()
        return places
    width = max(len(layout.channels), 1)
    flat = sequences.values.flatten() if width > 1 else sequences.values
    values: npt.NDArray[Any] = flat.to_numpy().reshape(-1, width)
    return values


def _place_in(mapped: mmap.mmap, values: npt.NDArray[Any]) -> int:
    """The byte of a file at which values begin that lie in it."""
    return int(values.ctypes.data - np.frombuffer(mapped, dtype=np.uint8).ctypes.data)


def span_in(path: Path, sequence: str, layout: Layout) -> tuple[int, int]:
    """The bytes of a file of :func:`~raglane.data.shards.write_shard` that hold its values: the first, and the end."""
    mapped = _map(path)
    values = _values_of(_batch_in(path, mapped).column(sequence), layout)
    begin = _place_in(mapped, values) if values.size else 0
    return begin, begin + values.nbytes


def offsets_in(path: Path, sequence: str) -> npt.NDArray[Any]:
    """The offsets of the column of sequences in a file of :func:`~raglane.data.shards.write_shard`, without a copy."""
    offsets: npt.NDArray[Any] = _batch_in(path, _map(path)).column(sequence).offsets.to_numpy()
    return offsets


@dataclass(frozen=True, eq=False)
class Groups(Store):
    """The row groups of a Parquet file, which are read when they are needed.

    Attributes:
        location: of the file, also a URL.
        columns: that were asked for.
    """

    location: str
    columns: Columns
    _file: dict[str, Any] = field(default_factory=dict)

    def _open(self) -> tuple[Any, Chosen]:
        """The file, which stays open in this process, and its columns."""
        if not self._file:
            parquet = require("pyarrow.parquet", "data")
            path, stack = Path(self.location), ExitStack()
            if not is_url(self.location):
                check_readable(path)
            with readable(path, "Parquet"):
                source = stack.enter_context(open_location(self.location))
                small = {"pre_buffer": False, "buffer_size": 1 << 20}
                file = parquet.ParquetFile(source, page_checksum_verification=True, **small)
                chosen = choose(path, file.schema_arrow, self.columns)
            self._file.update(file=file, chosen=chosen, stack=stack)
        return self._file["file"], self._file["chosen"]

    @property
    def sizes(self) -> list[int]:
        """As the end of the file says."""
        metadata = self._open()[0].metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """As the type of the column says."""
        file, chosen = self._open()
        return chosen.label_kinds(file.schema_arrow, self.columns.task)

    def load(self, number: int) -> Part:
        """The records of a row group, taken apart."""
        file, chosen = self._open()
        path = Path(self.location)
        with readable(path, "Parquet"):
            table = file.read_row_group(number, columns=chosen.names, use_threads=False)
            return Part.of(records_of(path, table, chosen, self.columns, first=sum(self.sizes[:number])))

    def lengths(self, number: int) -> npt.NDArray[Any]:
        """Of the column of sequences alone."""
        file, chosen = self._open()
        with readable(Path(self.location), "Parquet"):
            table = file.read_row_group(number, columns=[chosen.sequence], use_threads=False)
            found = list_lengths(table.column(chosen.sequence))
        return super().lengths(number) if found is None else found

    def name(self, number: int) -> str:
        """The file and the group."""
        return f"{self.location}, row group {number}"

    @property
    def is_cheap(self) -> bool:
        """What is read of Parquet is in memory."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        location = self.location if is_url(self.location) else os.path.abspath(self.location)
        return {**self.__dict__, "location": location, "_file": {}}
