"""Fragments: flat arrays of some sequences, in memory or mapped from a file; their layout, and
their stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import quote, quote_all
from raglane.data.columns import Columns
from raglane.data.prepare.statistics import Statistics
from raglane.data.records import Feature, Records, Targets, as_objects, kinds_of
from raglane.data.typed.arrays import Array, Entries, Integers
from raglane.errors import DataError
from raglane.tasks import TASKS

Index = Integers | slice
Rows = Callable[[Index], Array]
"""A function from indices of sequences or elements to their entries."""


# The kinds of targets in the description of a converted folder.
_KINDS = {"numbers": "numbers", "set": "sets", "sequence": "sequences"}


@dataclass(frozen=True)
class StoreLayout:
    """The kind of the columns, which all shards share."""

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
    def of(cls, records: Records) -> StoreLayout:
        """Return the layout of records."""
        ids = "none"
        if records.ids is not None:
            ids = "numbers" if all(isinstance(name, int) for name in records.ids) else "texts"
        has_tags = records.tags is not None
        targets = records.targets
        return cls(
            records.is_tokens,
            records.channels,
            ids,
            records.labels is not None,
            has_tags,
            "none" if targets is None else _KINDS[targets.kind],
            targets is not None and targets.per_element,
            () if targets is None else targets.names,
            tuple(
                (feature.name, feature.per_sequence, feature.is_numbers)
                for feature in records.features
            ),
            _label_kinds(records),
        )

    @property
    def kind(self) -> str:
        """The kind of the elements, in words."""
        inputs = "tokens" if self.is_tokens else f"features ({quote_all(self.channels)})"
        return (
            inputs
            if not self.features
            else f"{inputs} with {quote_all(name for name, _, _ in self.features)}"
        )

    @property
    def learned(self) -> str:
        """The numbers, sets or sequences to learn, in words."""
        names = f" ({quote_all(self.target_names)})" if self.target_names else ""
        return f"{self.targets}{names} per {'element' if self.targets_per_element else 'sequence'}"

    @property
    def may_lack_labels(self) -> bool:
        """True if rows may be valid without a label: sets and sequences of labels may be empty."""
        return self.targets in ("sets", "sequences")

    def serves(self, task: str) -> bool:
        """Return True if there are labels of the kind that a task learns."""
        terms = TASKS[task]
        if terms.label == "class":
            return self.has_tags if terms.per == "element" else self.has_labels
        return terms.label is None or self.targets == _KINDS[terms.label]

    def check(self, records: Records, first: str = "") -> None:
        """Raise if records have another layout; sequences without elements fit any kind."""
        layout = StoreLayout.of(records)
        if len(records.values) == 0:
            layout = replace(layout, is_tokens=self.is_tokens, channels=self.channels)
        if layout == self:
            return
        if records.label_kinds is not None:
            check_labels(layout.label_kinds, str(records.source), self.label_kinds, first)
        for name, here, before in (
            ("tokens or features", layout.kind, self.kind),
            ("ids", layout.ids, self.ids),
            ("labels per sequence", layout.has_labels, self.has_labels),
            ("labels per element", layout.has_tags, self.has_tags),
            ("targets", layout.learned, self.learned),
            ("features", quote(layout.features), quote(self.features)),
        ):
            if here != before:
                got = f"{name}: {here} from {records.describe_row(0)} on, after {before}"
                fix = "convert the other data separately, or change its schema"
                raise DataError(
                    f"{records.source}", got, "data with one schema for all files and rows", fix
                )

    def to_config(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "channels": list(self.channels)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StoreLayout:
        """Return the object that :meth:`to_config` described; other entries are ignored."""
        entries = {field.name: config[field.name] for field in fields(cls)}
        names = {name: tuple(entries[name]) for name in ("channels", "target_names", "label_kinds")}
        return cls(**{**entries, **names, "features": tuple(map(tuple, entries["features"]))})

    def names(self, columns: Columns) -> dict[str, str]:
        """Return the names of a shard's columns by their roles: those of the source, if it has
        names.
        """
        roles = {"label": columns.label, "id": columns.id, "sequence": columns.sequence}
        if not (self.has_labels or self.has_tags or self.targets != "none"):
            del roles["label"]
        if self.ids == "none":
            del roles["id"]
        names: dict[str, str] = {}
        taken = {name for name, _, _ in self.features}
        for role, name in roles.items():
            # Columns may name a column that a format does not have.
            free = [f"the {role}", role] if name is None else [f"the {role}", role, name]
            while free[-1] in names.values() or free[-1] in taken:
                free.pop()
            names[role] = free[-1]
        return names


def _label_kinds(records: Records) -> tuple[str, ...]:
    """Return the kinds of the labels in the source, or by their spelling if the source has only
    texts.
    """
    if records.label_kinds is not None:
        return records.label_kinds
    if records.targets is None:
        return kinds_of(records.labels or () if records.tags is None else records.tags.tolist())
    if records.targets.ordered and records.columns.label_split is not None:
        return ("texts",)
    return (
        () if records.targets.is_numbers else kinds_of(chain.from_iterable(records.targets.values))
    )


def check_labels(kinds: tuple[str, ...], source: str, before: tuple[str, ...], first: str) -> None:
    """Raise if labels have no kind in common with those before: 1, "1" and 1.0 would be three
    labels, or one.
    """
    if kinds and before and not set(kinds) & set(before):
        got = f"labels that are {' and '.join(kinds)}, after {' and '.join(before)}"
        got += f" in {first}" if first and first != source else ""
        rule = "data with labels of one kind in all files"
        raise DataError(source, got, rule, "write them in one way, or read the files separately")


@dataclass(frozen=True, eq=False)
class Fragment:
    """Flat arrays of some sequences; each token and label is stored once."""

    layout: StoreLayout
    # (B + 1,) int32 or int64.
    offsets: Array
    # (N, C) float32 features, or (N,) integers, indices into `words`.
    values: Array
    words: tuple[str, ...] | None = None
    # (B,) or, per element, (N,) integers, indices into `label_words`.
    labels: Array | None = None
    label_words: tuple[str, ...] = ()
    # One per sequence: an Arrow array or a tuple.
    ids: Any = None
    # Numbers (M, T) float64, or sets (M,) object, to learn.
    targets: Rows | None = None
    features: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, records: Records) -> Fragment:
        """Return records as a fragment."""
        values, words = _encoded(records.values) if records.is_tokens else (records.values, None)
        labels = None
        label_words = tuple[str, ...]()
        if (classes := records.labels if records.tags is None else records.tags) is not None:
            labels, label_words = _encoded(classes)
        targets = None if records.targets is None else records.targets.values.__getitem__
        features = tuple(feature.values.__getitem__ for feature in records.features)
        layout = StoreLayout.of(records)
        return cls(
            layout,
            records.offsets,
            values,
            words,
            labels,
            label_words,
            records.ids,
            targets,
            features,
        )

    def cut(self, starts: Integers, lengths: Integers, elements: Index) -> Array:  # noqa: ARG002
        """Return the values of some sequences, concatenated."""
        return np.asarray(self.values[elements])

    def targets_of(self, rows: Integers, elements: Index) -> Targets | None:
        """Return the numbers or sets to learn of some sequences."""
        if self.targets is None:
            return None
        per_element = self.layout.targets_per_element
        values = self.targets(elements if per_element else rows)
        is_ordered = self.layout.targets == "sequences"
        return Targets(values, per_element, self.layout.target_names, is_ordered)

    def features_of(self, rows: Integers, elements: Index) -> tuple[Feature, ...]:
        """Return the feature columns of some sequences."""
        return tuple(
            Feature(name, take(rows if per_sequence else elements), per_sequence)
            for (name, per_sequence, _), take in zip(
                self.layout.features, self.features, strict=True
            )
        )

    def id_of(self, row: int) -> str | int | None:
        """Return the id of a sequence, or None."""
        if self.ids is None:
            return None
        return self.ids[row] if isinstance(self.ids, tuple) else self.ids[row].as_py()


def _encoded(words: Iterable[str]) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Return the index of each word among the distinct words, and these in order of first
    occurrence.
    """
    every = list(words)
    table = {word: index for index, word in enumerate(dict.fromkeys(every))}
    return np.fromiter(map(table.__getitem__, every), dtype=np.int32, count=len(every)), tuple(
        table
    )


def fragment_in(batch: Any, layout: StoreLayout, names: dict[str, Any]) -> Fragment:
    """Return a batch of a shard as a fragment without a copy; ``names`` are those of its
    columns.
    """
    sequences = batch.column(names["sequence"])
    words = None
    if layout.is_tokens:
        words = tuple(sequences.values.dictionary.to_pylist())
    labels = None
    label_words = tuple[str, ...]()
    if layout.has_labels or layout.has_tags:
        column = batch.column(names["label"])
        column = column.values if layout.has_tags else column
        labels = column.indices.to_numpy()
        label_words = tuple(column.dictionary.to_pylist())
    ids = batch.column(names["id"]) if "id" in names else None
    targets = (
        None if layout.targets == "none" else _targets_in(batch.column(names["label"]), layout)
    )
    features = tuple(_feature_in(batch.column(name), *kind) for name, *kind in layout.features)
    offsets = sequences.offsets.to_numpy()
    values = values_in(sequences, layout)
    return Fragment(layout, offsets, values, words, labels, label_words, ids, targets, features)


def values_in(sequences: Any, layout: StoreLayout) -> Array:
    """Return the values of a shard's column of sequences: features ``(N, C)``, or indices of tokens
    ``(N,)``.
    """
    if layout.is_tokens:
        return sequences.values.indices.to_numpy()
    width = max(len(layout.channels), 1)
    flat = sequences.values.flatten() if width > 1 else sequences.values
    return flat.to_numpy().reshape(-1, width)


def _targets_in(column: Any, layout: StoreLayout) -> Rows:
    column = column.values if layout.targets_per_element else column
    if layout.targets != "numbers":
        return partial(_sets_at, column.offsets.to_numpy(), column.values)
    flat = column.flatten() if len(layout.target_names) > 1 else column
    return flat.to_numpy().reshape(-1, len(layout.target_names)).__getitem__


def _sets_at(starts: Array, words: Any, index: Index) -> Entries:
    """Return the sets of labels at some indices, ``(M,)`` object."""
    ends = starts[1:][index]
    begins = starts[:-1][index]
    pairs = zip(begins.tolist(), ends.tolist(), strict=True)
    return as_objects([tuple(words.slice(start, end - start).to_pylist()) for start, end in pairs])


def _feature_in(column: Any, per_sequence: bool, is_numbers: bool) -> Rows:
    column = column if per_sequence else column.values
    if is_numbers:
        return column.to_numpy(zero_copy_only=False).__getitem__
    return partial(
        _words_at, column.indices.to_numpy(), np.array(column.dictionary.to_pylist(), dtype=object)
    )


def _words_at(numbers: Array, words: Entries, index: Index) -> Entries:
    return np.asarray(words[numbers[index]], dtype=object)


class Store(ABC):
    """A source of fragments."""

    # True if loaded fragments take little memory, so that all can be cached.
    is_cheap = True
    # The records, if they are in memory.
    in_memory: Records | None = None

    @property
    @abstractmethod
    def sizes(self) -> list[int]:
        """The number of sequences of each fragment."""

    @property
    @abstractmethod
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels, see :func:`~raglane.data.records.kinds_of`; () without
        labels.
        """

    @abstractmethod
    def name(self, number: int) -> str:
        """Return the name of a fragment in messages."""

    def records(self, number: int) -> Records:
        """Return a fragment as records; not implemented by stores that override ``load``."""
        raise NotImplementedError

    def load(self, number: int) -> Fragment:
        """Return a fragment."""
        return Fragment.of(self.records(number))

    def statistics(self) -> Statistics:
        """Return the statistics of all sequences."""
        return sum(
            (Statistics.of(self.records(number)) for number in range(len(self.sizes))), Statistics()
        )

    def lengths(self) -> Array:
        """Return the number of elements of each sequence, ``(B,)`` int32 or int64."""
        lengths = [self.lengths_of(number) for number in range(len(self.sizes))]
        every = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int32)
        return every.astype(np.int32 if every.max(initial=0) < 2**31 else np.int64, copy=False)

    def lengths_of(self, number: int) -> Array:
        """Return the lengths of one fragment, ``(B,)`` integers."""
        return self.records(number).lengths

    def drop(self) -> None:  # noqa: B027
        """Release the pages of mapped files; they are read again on demand."""
