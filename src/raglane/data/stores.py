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
from raglane.data.formats.base import check_readable, data_error
from raglane.data.formats.ipc import LENGTHS, STATISTICS, described, opened, readable
from raglane.data.formats.table import Chosen, choose, records_of
from raglane.data.locations import is_url, open_location
from raglane.data.parts import Part, Store, list_lengths
from raglane.data.records import Columns
from raglane.data.shards import Layout, layout_in
from raglane.data.statistics import Statistics
from raglane.errors import DataError, require

__all__ = ["Groups", "Shards", "offsets_in"]

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
    _mapped: dict[int, mmap.mmap] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> tuple[Shards, str]:
        """The shards of a folder, and the task that it was converted for.

        Raises:
            DataError: what describes the folder is damaged.
        """
        description = described(folder)
        try:
            layout = layout_in(description)
            return cls(folder, description["shards"], description["columns"], layout), description["task"]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(folder / "dataset.json") from error

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
        self._mapped[number], batch = _map(path)
        with readable(path, "Arrow"):
            sequences = batch.column(self.names["sequence"])
            offsets, values, words = sequences.offsets.to_numpy(), sequences.values, None
            if self.layout.is_tokens:
                values, words = values.indices.to_numpy(), tuple(values.dictionary.to_pylist())
            else:
                width = max(len(self.layout.channels), 1)
                flat = values.flatten() if width > 1 else values
                values = flat.to_numpy().reshape(-1, width)
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
            raise _damaged(path)
        part = _ReadPart(offsets, values, words, labels, label_words, self.layout, ids, beside)
        if sum(shard["elements"] for shard in self.shards) * values.itemsize * _width(values) > _MAPPED:
            part.read_from(path, self._mapped[number])
        return part

    def lengths_of_all(self) -> npt.NDArray[Any]:
        """From the file beside the shards, which is mapped into memory."""
        path = self.folder / LENGTHS
        try:
            # Copied where it is written to, which nobody does: so torch need not be told that nobody may.
            lengths: npt.NDArray[Any] = np.load(path, mmap_mode="c")
        except (OSError, ValueError) as error:
            raise _damaged(path) from error
        if lengths.shape != (sum(self.sizes),) or lengths.dtype.kind != "i":
            raise _damaged(path)
        return np.asarray(lengths)

    def statistics(self) -> Statistics:
        """From the file beside the shards."""
        path = self.folder / STATISTICS
        try:
            return Statistics.from_config(json.loads(path.read_bytes()))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise _damaged(path) from error

    def name(self, number: int) -> str:
        """The file."""
        return str(self.folder / self.shards[number]["file"])

    def drop(self) -> None:
        """The pages stay in the system's cache, so that most are back at once."""
        for mapped in self._mapped.values():
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}


def _width(values: npt.NDArray[Any]) -> int:
    return int(values.shape[1]) if values.ndim == 2 else 1


class _ReadPart(Part):
    """A part of which values are read from the file, once :meth:`read_from` says so."""

    _file: tuple[int, int] | None = None

    def read_from(self, path: Path, mapped: mmap.mmap) -> None:
        """Read values from now on, rather than look at them where they are mapped.

        Args:
            path: the file.
            mapped: the same, of which ``values`` are a part.
        """
        descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        beginning = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        object.__setattr__(self, "_file", (descriptor, self.values.ctypes.data - beginning))

    def cut(
        self,
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        elements: npt.NDArray[np.int64] | slice,
    ) -> npt.NDArray[Any]:
        """The values of some sequences, one after the other."""
        if self._file is None or isinstance(elements, slice):
            return super().cut(starts, lengths, elements)
        descriptor, place = self._file
        size = self.values.itemsize * _width(self.values)
        wanted = zip((lengths * size).tolist(), (starts * size + place).tolist(), strict=True)
        content = b"".join([os.pread(descriptor, count, start) for count, start in wanted])
        found = np.frombuffer(content, dtype=self.values.dtype)
        return found.reshape(int(lengths.sum()), *self.values.shape[1:])


def _damaged(path: Path) -> DataError:
    return data_error(path, "a damaged file", "what raglane convert wrote", "convert the data again")


def _map(path: Path) -> tuple[mmap.mmap, Any]:
    """An Arrow file of one batch, mapped into memory, and the batch."""
    arrow = require("pyarrow", "data")
    check_readable(path)
    with readable(path, "Arrow"), path.open("rb") as file:
        # Not Arrow's own mapping, whose pages nobody can give back.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = opened(arrow.BufferReader(arrow.py_buffer(mapped)))
        batch = reader.get_batch(0)
        batch.validate()
        return mapped, batch


def offsets_in(path: Path, sequence: str) -> npt.NDArray[Any]:
    """The offsets of the column of sequences in a file of :func:`~raglane.data.shards.write_shard`, without a copy."""
    _, batch = _map(path)
    offsets: npt.NDArray[Any] = batch.column(sequence).offsets.to_numpy()
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
        return {**self.__dict__, "_file": {}}
