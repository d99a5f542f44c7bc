"""Gathers rows of many fragments into one flat batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raglane._utils.memory import mapped_bytes
from raglane._utils.messages import quote
from raglane.data.columns import Columns
from raglane.data.prepare.statistics import Statistics
from raglane.data.records import Feature, Records, Targets, joined
from raglane.data.store.fragments import Fragment, Store, StoreLayout
from raglane.data.typed.arrays import Array, Entries, Integers
from raglane.errors import DataError

# The most bytes of cached Parquet row groups; beyond it, the least recently used one is dropped.
_KEPT = 1 << 28
# The most bytes of mapped files, which count as the process's memory.
_MAPPED = 1 << 29
# The number of rows between checks of mapped files.
_LOOK = 1 << 12


class Codes(NamedTuple):
    """The numbers of the words of a fragment."""

    tokens: Integers | None  # the index in the vocabulary of each token
    labels: Integers | None  # the class of each label


class Fragments:
    """The fragments of several stores in order, with a cache of those that take memory."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = tuple(stores)
        self._where = [(store, number) for store in stores for number in range(len(store.sizes))]
        self._ends: Integers = np.cumsum(
            [size for store in stores for size in store.sizes], dtype=np.int64
        )
        self._loaded: OrderedDict[int, Fragment] = OrderedDict()
        self._touched = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": OrderedDict(), "_touched": 0}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, rows: Integers) -> Integers:
        """Return the number of the fragment of each row."""
        return np.asarray(np.searchsorted(self._ends, rows, side="right"))

    def start(self, number: int) -> int:
        """Return the first row of a fragment."""
        return int(self._ends[number - 1]) if number else 0

    def get(self, number: int) -> Fragment:
        """Return a fragment."""
        fragment = self._loaded.get(number)
        store, index = self._where[number]
        if fragment is None:
            fragment = store.load(index)
            self._check_layout(fragment, number)
            self._loaded[number] = fragment
            self._drop_some()
        elif not store.is_cheap:
            self._loaded.move_to_end(number)
        return fragment

    def of(self, row: int) -> tuple[Fragment, int, int]:
        """Return the fragment of a row, its number, and the row in it."""
        number = int(self.find(np.array([row]))[0])
        return self.get(number), number, row - self.start(number)

    def name(self, number: int) -> str:
        """Return the name of a fragment in messages."""
        store, index = self._where[number]
        return store.name(index)

    def typical(self, numbers: Sequence[int]) -> int:
        """Return the first of some fragments with an element, which determines the channels; else
        the first.
        """
        return next((number for number in numbers if len(self.get(number).values)), numbers[0])

    @property
    def layout(self) -> StoreLayout:
        """The layout of the data."""
        if not self._where:
            raise DataError("data", "no rows", "data with at least one sequence", "check the data")
        return self.get(self.typical(range(len(self._where)))).layout

    def lengths(self) -> Array:
        """Return the number of elements of each sequence, ``(B,)`` integers."""
        lengths = [store.lengths() for store in self._stores]
        return lengths[0] if len(lengths) == 1 else np.concatenate(lengths)

    def statistics(self) -> Statistics:
        """Return the statistics of all sequences: the stored ones, or else computed now."""
        return sum((store.statistics() for store in self._stores), Statistics())

    def id_of(self, row: int) -> str | int:
        """Return the id of a sequence, or its row if it has none."""
        fragment, _, index = self.of(row)
        name = fragment.id_of(index)
        return row if name is None else name

    def where(self, row: int) -> tuple[str, str]:
        """Return the source of a sequence, and its row and id in words."""
        fragment, number, index = self.of(row)
        name = fragment.id_of(index)
        return self.name(number), f"row {index}" + ("" if name is None else f" (id {quote(name)})")

    def labels(self, rows: Integers, codes: Callable[[int], Codes]) -> Integers | None:
        """Return the class of each row; None without a label per sequence."""
        classes = []
        for number in range(len(self._where)):
            fragment = self.get(number)
            labels = codes(number).labels
            if fragment.labels is None or labels is None or fragment.layout.has_tags:
                return None
            classes.append(labels[fragment.labels])
        return np.concatenate(classes)[rows] if classes else None

    def records(self, rows: Integers, columns: Columns, source: Path) -> Records:
        """Return some sequences as records."""
        tokens = dict[str, int]()
        labels = dict[str, int]()

        def codes(number: int) -> Codes:
            fragment = self.get(number)
            return Codes(
                None if fragment.words is None else _numbered(fragment.words, tokens),
                None if fragment.labels is None else _numbered(fragment.label_words, labels),
            )

        gathered = Gathered(self, rows, codes)
        layout = gathered.layout or self.layout
        values = gathered.values
        if not len(values):
            values = np.zeros((0, len(layout.channels)), dtype=np.float32)
        if layout.is_tokens:
            values = _words(tokens, gathered.values)
        classes = None if gathered.classes is None else _words(labels, gathered.classes)
        return Records(
            values,
            gathered.offsets,
            ids=None if layout.ids == "none" else tuple(map(self.id_of, rows.tolist())),
            labels=tuple(classes) if classes is not None and layout.has_labels else None,
            tags=classes if layout.has_tags else None,
            channels=layout.channels,
            source=source,
            columns=columns,
            targets=gathered.targets,
            features=gathered.features,
            label_kinds=layout.label_kinds or None,
        )

    def touch(self, rows: int) -> None:
        """Count rows that were read, and release mapped memory from time to time."""
        self._touched += rows
        if self._touched >= _LOOK:
            self._touched = 0
            if mapped_bytes() > _MAPPED:
                for store in self._stores:
                    store.drop()

    def _check_layout(self, fragment: Fragment, number: int) -> None:
        """Raise if a fragment differs in kind from the first that has an element."""
        first = next((other for other in self._loaded.values() if len(other.values)), None)
        if first is None or len(fragment.values) == 0:
            return
        for name in ("kind", "learned"):
            here = getattr(fragment.layout, name)
            before = getattr(first.layout, name)
            if here != before:
                got = f"{here}, after {before}"
                rule = "data with one schema for all files and rows"
                raise DataError(self.name(number), got, rule, "open them separately")

    def _drop_some(self) -> None:
        """Drop the least recently used fragments until the cache is small enough."""
        costly = [number for number in self._loaded if not self._where[number][0].is_cheap]
        size = sum(self._loaded[number].values.nbytes for number in costly)
        for number in costly[:-1]:
            if size <= _KEPT:
                return
            size -= self._loaded.pop(number).values.nbytes


class _FragmentRun(NamedTuple):
    """Consecutive rows that are in one fragment."""

    fragment: int
    start: int
    end: int


def _runs(fragments: Integers) -> list[_FragmentRun]:
    """Return the runs of rows by the ascending numbers of their fragments."""
    edges = [0, *(np.flatnonzero(np.diff(fragments)) + 1).tolist(), len(fragments)]
    return [
        _FragmentRun(int(fragments[low]), low, high) for low, high in pairwise(edges) if low < high
    ]


class _FragmentRows(NamedTuple):
    """The rows of a batch that are in one fragment; see :class:`Gathered`."""

    values: Array
    classes: Integers | None
    targets: Targets | None
    features: tuple[Feature, ...]


def _piece(
    fragment: Fragment,
    codes: Codes,
    values: Array,
    rows: Integers,
    elements: Integers | slice,
) -> _FragmentRows:
    """Return rows of a fragment, with numbers in place of words."""
    if len(values) and codes.tokens is not None:
        values = codes.tokens[values]
    classes = None
    if codes.labels is not None and fragment.labels is not None:
        classes = codes.labels[fragment.labels[elements if fragment.layout.has_tags else rows]]
    targets = fragment.targets_of(rows, elements)
    return _FragmentRows(values, classes, targets, fragment.features_of(rows, elements))


class Gathered:
    """Rows of all fragments as one flat batch, from which a preprocessor makes tensors."""

    # (M + 1,) int64; (N, C) float32, or (N,) int64 indices in the vocabulary.
    offsets: Integers
    values: Array
    # (M,) or (N,) int64 classes; None without labels.
    classes: Integers | None
    targets: Targets | None = None
    features: tuple[Feature, ...]
    # The layout of the first fragment with elements; None without rows.
    layout: StoreLayout | None = None
    source: str = "data"

    def __init__(self, fragments: Fragments, rows: Integers, codes: Callable[[int], Codes]) -> None:
        self._fragments = fragments
        self._rows = rows
        numbers = fragments.find(rows)
        # In the order of the fragments, so that each is read once; restored to the order of the
        # rows at the end.
        order = np.argsort(numbers, kind="stable")
        runs = _runs(numbers[order])
        local = rows[order]
        starts = np.empty(len(rows), np.int64)
        ends = np.empty(len(rows), np.int64)
        for number, low, high in runs:
            local[low:high] -= fragments.start(number)
            offsets = fragments.get(number).offsets
            starts[low:high] = offsets[local[low:high]]
            ends[low:high] = offsets[local[low:high] + 1]
        lengths = ends - starts
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        elements = _elements(starts, lengths) if len(runs) < 2 else _index(starts, lengths)
        pieces: list[_FragmentRows] = []
        for number, low, high in runs:
            indexes = elements
            if not isinstance(elements, slice):
                indexes = elements[self.offsets[low] : self.offsets[high]]
            fragment = fragments.get(number)
            fragment_codes = codes(number)
            try:
                values = fragment.cut(starts[low:high], lengths[low:high], indexes)
                pieces.append(_piece(fragment, fragment_codes, values, local[low:high], indexes))
            except DataError:
                raise
            except (IndexError, ValueError) as error:
                rule = "the file that raglane convert wrote"
                fix = "delete the folder, and convert the data again"
                raise DataError(fragments.name(number), "a damaged file", rule, fix) from error
        if runs:
            typical = fragments.typical([run.fragment for run in runs])
            self.layout = fragments.get(typical).layout
            self.source = fragments.name(typical)
        self._join(pieces)
        if len(runs) > 1:
            self._restore(order, lengths)
        fragments.touch(len(rows))

    def _join(self, pieces: Sequence[_FragmentRows]) -> None:
        """Concatenate the rows of the fragments."""
        values = [piece.values for piece in pieces if len(piece.values)]
        self.values = _joined(values, np.zeros((0, 1), dtype=np.float32))
        classes = [piece.classes for piece in pieces if piece.classes is not None]
        self.classes = None
        if len(classes) == len(pieces):
            self.classes = _joined(classes, np.zeros(0, dtype=np.int64))
        targets = [piece.targets for piece in pieces if piece.targets is not None]
        if targets:
            # Without an element the number of targets per element is unknown.
            counted = [target for target in targets if len(target.values)] or targets[:1]
            first = counted[0]
            joined_values = _joined([target.values for target in counted], first.values)
            self.targets = replace(first, values=joined_values)
        features = [piece.features for piece in pieces]
        if len(features) > 1:
            self.features = joined(features)
        else:
            self.features = features[0] if features else ()

    def _restore(self, order: Integers, lengths: Integers) -> None:
        """Restore the order of the rows from that of the fragments."""
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        elements = _index(self.offsets[:-1][back], lengths[back])
        self.offsets = np.concatenate([[0], np.cumsum(lengths[back])])
        if len(self.values):
            self.values = self.values[elements]
        if self.classes is not None and self.layout is not None:
            self.classes = self.classes[elements if self.layout.has_tags else back]
        if self.targets is not None:
            self.targets = self.targets.select(back, elements)
        self.features = tuple(feature.select(back, elements) for feature in self.features)

    def where(self, row: int) -> tuple[str, str]:
        """Return the source of a row of the batch, and the row in words."""
        return self._fragments.where(int(self._rows[row]))

    def class_word(self, row: int, step: int | None) -> str:
        """Return the label of a row, or of one of its steps."""
        fragment, _, index = self._fragments.of(int(self._rows[row]))
        labels = fragment.labels
        at = index if step is None else int(fragment.offsets[index]) + step
        return "" if labels is None else fragment.label_words[int(labels[at])]


def _numbered(words: Sequence[str], table: dict[str, int]) -> Integers:
    """Return the number of each word in a table, and add new words to it."""
    return np.array([table.setdefault(word, len(table)) for word in words], dtype=np.int64)


def _words(table: Mapping[str, int], numbers: Array) -> Entries:
    """Return the words of a table by their numbers."""
    return np.array(list(table), dtype=object)[numbers.ravel().astype(np.int64)]


def _elements(starts: Integers, lengths: Integers) -> Integers | slice:
    """Return the indices of the elements of sequences: a slice if they are contiguous, which avoids
    a copy.
    """
    if len(starts) and (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    return _index(starts, lengths)


def _index(starts: Integers, lengths: Integers) -> Integers:
    """Return the index of each element, as ``segments.element_index`` without torch's overhead per
    call.
    """
    index: Integers = np.repeat(starts + lengths - np.cumsum(lengths), lengths)
    index += np.arange(len(index))
    return index


def _joined(arrays: list[Array], nothing: Array) -> Array:
    if not arrays:
        return nothing
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
