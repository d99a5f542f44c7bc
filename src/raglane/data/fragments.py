"""Parts of a dataset: some sequences as NumPy arrays, which lie in a file where they can, and where parts come from."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.layout import Layout
from raglane.data.records import Feature, Records, Targets, offsets_of
from raglane.data.statistics import Channel, Statistics
from raglane.errors import require

Index = npt.NDArray[np.int64] | slice
Rows = Callable[[Index], npt.NDArray[Any]]
"""From the places of sequences or elements to what stands there."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some sequences, flat; the words of tokens and labels stand once each."""

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


@dataclass(frozen=True, eq=False)
class Beside:
    """Columns of some sequences, of which rows are taken when they are needed."""

    layout: Layout
    targets: Rows | None = None
    features: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, records: Records) -> Beside:
        """Those of records in memory."""
        targets = None if records.targets is None else records.targets.values.__getitem__
        features = tuple(feature.values.__getitem__ for feature in records.features)
        return cls(Layout.of(records), targets, features)

    def cut(self, rows: npt.NDArray[np.int64], elements: Index) -> tuple[Targets | None, tuple[Feature, ...]]:
        """What some sequences have."""
        layout, targets = self.layout, None
        if self.targets is not None:
            values = self.targets(elements if layout.targets_per_element else rows)
            targets = Targets(values, per_element=layout.targets_per_element, names=layout.target_names)
        kinds = zip(layout.features, self.features, strict=True)
        return targets, tuple(
            Feature(name, take(rows if per_sequence else elements), per_sequence)
            for (name, per_sequence, _), take in kinds
        )


# ---------------------------------------------------------------------------------------------------------------
# In a shard
# ---------------------------------------------------------------------------------------------------------------


def columns_beside(
    parts: Sequence[Records], layout: Layout, label: str, in_lists: Callable[[Any], Any]
) -> dict[str, Any]:
    """Arrow columns of what records have beside values and classes."""
    arrow = require("pyarrow", "data")
    columns: dict[str, Any] = {}
    if layout.targets != "none":
        values = np.concatenate([records.targets.values for records in parts if records.targets is not None])
        if layout.targets == "sets":
            starts = offsets_of([len(labels) for labels in values]).astype(np.int32)
            words = [label for labels in values for label in labels]
            entries = arrow.ListArray.from_arrays(arrow.array(starts), arrow.array(words, arrow.string()))
        else:
            entries = arrow.array(values.ravel())
            if values.shape[1] > 1:
                entries = arrow.FixedSizeListArray.from_arrays(entries, values.shape[1])
        columns[label] = in_lists(entries) if layout.targets_per_element else entries
    for place, (name, per_sequence, is_numbers) in enumerate(layout.features):
        values = np.concatenate([records.features[place].values for records in parts])
        entries = arrow.array(values) if is_numbers else arrow.array(values, arrow.string()).dictionary_encode()
        columns[name] = entries if per_sequence else in_lists(entries)
    return columns


def lists_of(batch: Any, layout: Layout, label: str | None) -> Beside:
    """What a batch of a shard has beside values and classes; numbers lie in the file."""
    targets: Rows | None = None
    if layout.targets != "none":
        column = batch.column(label)
        column = column.values if layout.targets_per_element else column
        if layout.targets == "sets":
            targets = partial(words_of_sets, column.offsets.to_numpy(), column.values)
        else:
            flat = column.flatten() if len(layout.target_names) > 1 else column
            targets = flat.to_numpy().reshape(-1, len(layout.target_names)).__getitem__
    features: list[Rows] = []
    for name, per_sequence, is_numbers in layout.features:
        column = batch.column(name)
        column = column if per_sequence else column.values
        if is_numbers:
            features.append(column.to_numpy(zero_copy_only=False).__getitem__)
        else:
            words = np.array(column.dictionary.to_pylist(), dtype=object)
            features.append(partial(_words_at, column.indices.to_numpy(), words))
    return Beside(layout, targets, tuple(features))


def words_of_sets(starts: npt.NDArray[Any], words: Any, index: Index) -> npt.NDArray[np.object_]:
    """The sets of labels at some places, ``(M,)`` object."""
    ends, begins = starts[1:][index], starts[:-1][index]
    found = np.empty(len(begins), dtype=object)
    pairs = zip(begins.tolist(), ends.tolist(), strict=True)
    found[:] = [tuple(words.slice(start, end - start).to_pylist()) for start, end in pairs]
    return found


def _words_at(places: npt.NDArray[Any], words: npt.NDArray[np.object_], index: Index) -> npt.NDArray[np.object_]:
    return np.asarray(words[places[index]], dtype=object)


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
        """What the labels are, in the words of :func:`~raglane.data.records.kinds_of`; () where there are none."""
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
