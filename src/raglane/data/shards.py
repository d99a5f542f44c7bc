"""Arrow files of a bounded size, which hold what was converted, and what each of them is made of.

A shard is one batch of Arrow, so that its offsets and values lie in the file as NumPy and torch want them. Tokens and
labels are dictionaries: 4 bytes for each, and each word once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.ipc import CHANNELS
from raglane.data.records import Columns, Records, offsets_of
from raglane.errors import DataError, message, quote, quote_all, require
from raglane.files import whole_file

__all__ = ["SHARD", "Layout", "bounded", "bytes_of", "write_shard"]

# Bytes of a shard: large enough that few are open, and small enough to be made in memory.
SHARD = 1 << 27

# Elements that 32-bit offsets reach.
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """What all shards have in common.

    Attributes:
        is_tokens: tokens rather than features.
        channels: of features.
        ids: ``"numbers"``, ``"texts"`` or ``"none"``.
        has_labels: one per sequence.
        has_tags: one label per element.
    """

    is_tokens: bool
    channels: tuple[str, ...]
    ids: str
    has_labels: bool
    has_tags: bool

    @classmethod
    def of(cls, records: Records) -> Layout:
        """The layout of some records."""
        ids = "none"
        if records.ids is not None:
            ids = "numbers" if all(isinstance(name, int) for name in records.ids) else "texts"
        has_tags = records.tags is not None
        return cls(records.is_tokens, records.channels, ids, records.labels is not None, has_tags)

    @property
    def kind(self) -> str:
        """What the elements are, in words."""
        return "tokens" if self.is_tokens else f"features ({quote_all(self.channels)})"

    def check(self, records: Records) -> None:
        """Refuse records of another layout; sequences without elements are of every kind.

        Raises:
            DataError: the records do not fit.
        """
        found = Layout.of(records)
        if len(records.values) == 0:
            found = replace(found, is_tokens=self.is_tokens, channels=self.channels)
        if found == self:
            return
        for name, here, before in (
            ("tokens or features", found.kind, self.kind),
            ("ids", found.ids, self.ids),
            ("labels per sequence", found.has_labels, self.has_labels),
            ("labels per element", found.has_tags, self.has_tags),
        ):
            if here != before:
                got = f"{name}: {here} from {records.describe_row(0)} on, after {before}"
                rule = "all files, and all rows, are of one schema"
                fix = "convert what differs by itself, or make it alike"
                raise DataError(message(f"{records.source}", got, rule, fix))

    def to_config(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "channels": list(self.channels)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Layout:
        """The object that :meth:`to_config` described."""
        return cls(**{**config, "channels": tuple(config["channels"])})

    def names(self, columns: Columns) -> dict[str, str]:
        """What the columns of a shard are called, by their roles: as in the source, where that has names.

        Example:
            >>> Layout(True, (), "texts", True, False).names(Columns(label="kind"))
            {'label': 'kind', 'id': 'id', 'sequence': 'sequence'}
        """
        wanted = {"label": columns.label, "id": columns.id, "sequence": columns.sequence}
        if not (self.has_labels or self.has_tags):
            del wanted["label"]
        if self.ids == "none":
            del wanted["id"]
        names: dict[str, str] = {}
        for role, name in wanted.items():
            # A format without such columns may be told the name of another.
            free = (one for one in (name, role, f"the {role}") if one is not None and one not in names.values())
            names[role] = next(free)
        return names


def bytes_of(records: Records) -> int:
    """About what records take in a shard."""
    elements = len(records.values) * 4 * max(len(records.channels), 1)
    return elements + 4 * len(records.values) * (records.tags is not None) + 12 * len(records)


def bounded(records: Records, most: int) -> Iterator[Records]:
    """Records cut into runs of about so many bytes, but for a sequence that is larger."""
    if bytes_of(records) <= most:
        yield records
        return
    per_element = 4 * max(len(records.channels), 1) + 4 * (records.tags is not None)
    ends = records.offsets[1:] * per_element + 12 * np.arange(1, len(records) + 1)
    number = (ends - 1) // most
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(records)]
    for start, end in pairwise(edges):
        yield records.select(np.arange(start, end))


def write_shard(path: Path, parts: Sequence[Records], layout: Layout, names: dict[str, str]) -> None:
    """Write records as one Arrow file, whole or not at all.

    Args:
        path: where to.
        parts: of one layout.
        layout: theirs.
        names: of the columns, of :meth:`Layout.names`.

    Raises:
        DataError: an id is beyond 64 bits.
        OSError: the disk is full.
    """
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
