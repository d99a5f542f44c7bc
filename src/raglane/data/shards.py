"""Arrow files of a bounded size, which hold what was converted, and what each of them is made of.

A shard is one batch of Arrow, so that its offsets and values lie in the file as NumPy and torch want them. Tokens and
labels are dictionaries: 4 bytes for each, and each word once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.ipc import CHANNELS
from raglane.data.records import Columns, Records, offsets_of
from raglane.data.targets import TASKS, kinds_of
from raglane.errors import DataError, message, quote, quote_all, require
from raglane.files import whole_file

__all__ = ["SHARD", "Layout", "bounded", "bytes_of", "check_labels", "layout_in", "write_shard"]

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
        targets: ``"numbers"`` or ``"sets"`` of labels to learn, or ``"none"``.
        targets_per_element: whether there is one row of them per element.
        target_names: of the numbers.
        features: beside the values: the name of each, whether there is one per sequence, and whether it is a number.
        label_kinds: what classes, or the labels of sets, were in the source; () where that is not known.
    """

    is_tokens: bool
    channels: tuple[str, ...]
    ids: str
    has_labels: bool
    has_tags: bool
    targets: str = "none"
    targets_per_element: bool = False
    target_names: tuple[str, ...] = ()
    features: tuple[tuple[str, bool, bool], ...] = ()
    label_kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Records) -> Layout:
        """The layout of some records."""
        ids = "none"
        if records.ids is not None:
            ids = "numbers" if all(isinstance(name, int) for name in records.ids) else "texts"
        has_tags, targets = records.tags is not None, records.targets
        kind = "none" if targets is None else "numbers" if targets.is_numbers else "sets"
        return cls(
            records.is_tokens,
            records.channels,
            ids,
            records.labels is not None,
            has_tags,
            kind,
            targets is not None and targets.per_element,
            () if targets is None else targets.names,
            tuple((feature.name, feature.per_sequence, feature.is_numbers) for feature in records.features),
            _label_kinds(records),
        )

    @property
    def kind(self) -> str:
        """What the elements are, in words."""
        own = "tokens" if self.is_tokens else f"features ({quote_all(self.channels)})"
        return own if not self.features else f"{own} beside {quote_all(name for name, _, _ in self.features)}"

    def serves(self, task: str) -> bool:
        """Whether there are labels of the kind that a task learns.

        Example:
            >>> Layout(True, (), "none", False, True).serves("tag"), Layout(True, (), "none", True, False).serves("tag")
            (True, False)
        """
        wanted = TASKS[task]
        if wanted.label == "class":
            return self.has_tags if wanted.per == "element" else self.has_labels
        return wanted.label is None or self.targets == ("sets" if wanted.label == "set" else "numbers")

    def check(self, records: Records, first: str = "") -> None:
        """Refuse records of another layout; sequences without elements are of every kind."""
        found = Layout.of(records)
        if len(records.values) == 0:
            found = replace(found, is_tokens=self.is_tokens, channels=self.channels)
        if found == self:
            return
        if records.label_kinds is not None:
            check_labels(found.label_kinds, str(records.source), self.label_kinds, first)
        for name, here, before in (
            ("tokens or features", found.kind, self.kind),
            ("ids", found.ids, self.ids),
            ("labels per sequence", found.has_labels, self.has_labels),
            ("labels per element", found.has_tags, self.has_tags),
            ("targets", found.targets, self.targets),
            ("targets per element", found.targets_per_element, self.targets_per_element),
            ("numbers to learn", quote_all(found.target_names), quote_all(self.target_names)),
            ("features", quote(found.features), quote(self.features)),
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
        names = {name: tuple(config.get(name, ())) for name in ("channels", "target_names", "label_kinds")}
        return cls(**{**config, **names, "features": tuple(map(tuple, config.get("features", ())))})

    def names(self, columns: Columns) -> dict[str, str]:
        """What the columns of a shard are called, by their roles: as in the source, where that has names.

        Example:
            >>> Layout(True, (), "texts", True, False).names(Columns(label="kind"))
            {'label': 'kind', 'id': 'id', 'sequence': 'sequence'}
        """
        wanted = {"label": columns.label, "id": columns.id, "sequence": columns.sequence}
        if not (self.has_labels or self.has_tags or self.targets != "none"):
            del wanted["label"]
        if self.ids == "none":
            del wanted["id"]
        names: dict[str, str] = {}
        taken = {name for name, _, _ in self.features}
        for role, name in wanted.items():
            # A format without such columns may be told the name of another.
            free = [f"the {role}", role] if name is None else [f"the {role}", role, name]
            while free[-1] in names.values() or free[-1] in taken:
                free.pop()
            names[role] = free[-1]
        return names


def _label_kinds(records: Records) -> tuple[str, ...]:
    """What the labels of records were in their source: as it has them, or as they are written."""
    if records.label_kinds is not None:
        return records.label_kinds
    if records.targets is None:
        return kinds_of(records.labels or () if records.tags is None else records.tags.tolist())
    return () if records.targets.is_numbers else kinds_of(chain.from_iterable(records.targets.values))


def check_labels(kinds: tuple[str, ...], source: str, before: tuple[str, ...], first: str) -> None:
    """Refuse labels none of which is of a kind that those before are of: 1, "1" and 1.0 would be three, or one."""
    if kinds and before and not set(kinds) & set(before):
        got = f"labels that are {' and '.join(kinds)}, after {' and '.join(before)}"
        got += f" in {first}" if first and first != source else ""
        rule = "the labels of all files are of one kind"
        raise DataError(message(source, got, rule, "write them alike, or read the files one by one"))


def layout_in(description: Mapping[str, Any]) -> Layout:
    """The layout of a folder that was converted."""
    return Layout.from_config({field.name: description[field.name] for field in fields(Layout)})


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
    # Imported here, since it is made of layouts.
    from raglane.data.beside import columns_beside

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
