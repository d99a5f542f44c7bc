"""Parts of a dataset: some sequences as NumPy arrays, which lie in a file where they can, and where parts come from."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.beside import Beside
from raglane.data.formats.ipc import named, readable
from raglane.data.formats.table import Chosen, records_of
from raglane.data.layout import Layout
from raglane.data.records import Columns, Records
from raglane.data.statistics import Channel, Statistics
from raglane.errors import require

__all__ = ["Memory", "Part", "Store", "Tables", "list_lengths"]


@dataclass(frozen=True, eq=False)
class Part:
    """Some sequences, flat; the words of tokens and labels stand once each.

    Attributes:
        offsets: ``(B + 1,)`` int32 or int64.
        values: ``(N, C)`` float32 features, or ``(N,)`` integers: places in ``words``.
        words: the different tokens; None for features.
        labels: ``(B,)`` or, one per element, ``(N,)`` integers: places in ``label_words``; None where there are none.
        label_words: the different labels.
        layout: of its columns.
        ids: one per sequence, an Arrow array or a tuple; None where there are none.
        beside: numbers or sets of labels to learn, and features; None where there is nothing of the kind.

    Example:
        >>> from raglane.data.records import offsets_of
        >>> words = Records(np.array(["a", "b", "a"], dtype=object), offsets_of([2, 1]), labels=("x", "y"))
        >>> part = Part.of(words)
        >>> part.words, part.values.tolist(), part.labels.tolist()
        (('a', 'b'), [0, 1, 0], [0, 1])
    """

    offsets: npt.NDArray[Any]
    values: npt.NDArray[Any]
    words: tuple[str, ...] | None
    labels: npt.NDArray[Any] | None
    label_words: tuple[str, ...]
    layout: Layout
    ids: Any = None
    beside: Beside | None = None

    @classmethod
    def of(cls, records: Records) -> Part:
        """Records with their words taken apart."""
        values, words = records.values, None
        if records.is_tokens:
            values, words = _places(values)
        labels, label_words = None, tuple[str, ...]()
        if records.tags is not None:
            labels, label_words = _places(records.tags)
        elif records.labels is not None:
            labels, label_words = _places(np.array(records.labels, dtype=object))
        return cls(
            records.offsets, values, words, labels, label_words, Layout.of(records), records.ids, Beside.of(records)
        )

    def cut(
        self,
        starts: npt.NDArray[np.int64],  # noqa: ARG002
        lengths: npt.NDArray[np.int64],  # noqa: ARG002
        elements: npt.NDArray[np.int64] | slice,
    ) -> npt.NDArray[Any]:
        """The values of some sequences, one after the other."""
        return np.asarray(self.values[elements])

    def statistics(self) -> Statistics:
        """What is counted of the part."""
        lengths = np.diff(self.offsets)
        channels = {name: Channel.of(self.values[:, place]) for place, name in enumerate(self.layout.channels)}
        tokens, labels = _counted(self.values, self.words or ()), _counted(self.labels, self.label_words)
        empty, longest = int((lengths == 0).sum()), int(lengths.max(initial=0))
        known = Statistics(len(lengths), len(self.values), empty, longest, channels, tokens, labels)
        if self.beside is None:
            return known
        targets, features = self.beside.cut(np.arange(len(lengths)), slice(0, len(self.values)))
        return known.with_beside(targets, features)

    def id_of(self, row: int) -> str | int | None:
        """The id of a sequence, or None."""
        if self.ids is None:
            return None
        name: str | int = self.ids[row] if isinstance(self.ids, tuple) else self.ids[row].as_py()
        return name


def _places(words: npt.NDArray[np.object_]) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """The place of each word among the different ones, and these in the order in which they come."""
    arrow = require("pyarrow", "data")
    found = arrow.array(words, arrow.string()).dictionary_encode()
    return found.indices.to_numpy(), tuple(found.dictionary.to_pylist())


def _counted(places: npt.NDArray[Any] | None, words: Sequence[str]) -> Counter[str]:
    if places is None or not words:
        return Counter()
    counts = np.bincount(places, minlength=len(words)).tolist()
    return Counter({word: count for word, count in zip(words, counts, strict=True) if count})


class Store:
    """Where parts come from."""

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """Sequences of each part."""

    @abstractmethod
    def load(self, number: int) -> Part:
        """A part."""

    def lengths(self, number: int) -> npt.NDArray[Any]:
        """``(B,)`` integers: the elements of each sequence of a part."""
        return np.diff(self.load(number).offsets)

    def name(self, number: int) -> str:
        """What a part is called in messages."""
        return f"part {number}"

    def lengths_of_all(self) -> npt.NDArray[Any]:
        """``(B,)`` integers: the same of all parts."""
        found = [self.lengths(number) for number in range(len(self.sizes))]
        every = np.concatenate(found) if found else np.zeros(0, dtype=np.int32)
        is_short = every.max(initial=0) < 2**31
        return every.astype(np.int32 if is_short else np.int64, copy=False)

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """What the labels are, in the words of :func:`~raglane.data.targets.kinds_of`; () where there are none."""
        return ()

    def statistics(self) -> Statistics | None:
        """What was counted before; None where nobody has."""
        return None

    def drop(self) -> None:
        """Give back the memory into which files are mapped; they are read again where they are needed."""

    @property
    def is_cheap(self) -> bool:
        """Whether parts that are loaded take little memory of their own, so that all may be kept."""
        return True


@dataclass(frozen=True, eq=False)
class Memory(Store):
    """Records that are in memory."""

    records: Records

    @property
    def sizes(self) -> list[int]:
        """One part."""
        return [len(self.records)]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """As the records have them."""
        return Layout.of(self.records).label_kinds

    def load(self, number: int) -> Part:  # noqa: ARG002
        """The records."""
        return Part.of(self.records)

    def name(self, number: int) -> str:  # noqa: ARG002
        """The file that was read."""
        return str(self.records.source)


@dataclass(frozen=True, eq=False)
class Tables(Store):
    """Tables of Arrow, cut into runs of rows.

    Attributes:
        tables: of each part, with the file that it comes from, and the number of its first row there.
        chosen: the columns.
        columns: for the task.
    """

    tables: list[tuple[Path, int, Any]]
    chosen: Chosen
    columns: Columns

    @property
    def sizes(self) -> list[int]:
        """Rows of each."""
        return [table.num_rows for _, _, table in self.tables]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """As the type of the column says."""
        schemas = [table.schema for _, _, table in self.tables[:1]]
        return self.chosen.label_kinds(schemas[0], self.columns.task) if schemas else ()

    def load(self, number: int) -> Part:
        """Records of some rows, taken apart."""
        path, first, table = self.tables[number]
        with readable(path, "Arrow"):
            table.validate(full=True)
            records = records_of(path, table.select(self.chosen.names), self.chosen, self.columns, first=first)
            return Part.of(named(records, table, self.chosen))

    def lengths(self, number: int) -> npt.NDArray[Any]:
        """Of the offsets alone, where the column is one of lists."""
        _, _, table = self.tables[number]
        found = list_lengths(table.column(self.chosen.sequence))
        return super().lengths(number) if found is None else found

    def name(self, number: int) -> str:
        """The file and the row."""
        path, first, _ = self.tables[number]
        return f"{path}, rows from {first}"


def list_lengths(column: Any) -> npt.NDArray[Any] | None:
    """The length of each list of a column; None where it holds no lists, or a null."""
    arrow, compute = require("pyarrow", "data"), require("pyarrow.compute", "data")
    if column.null_count:
        return None
    with suppress(arrow.ArrowNotImplementedError):
        found: npt.NDArray[Any] = compute.list_value_length(column).to_numpy()
        return found
    return None
