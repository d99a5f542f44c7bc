"""Rows out of many fragments, brought together as one flat batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.memory import mapped_bytes
from raglane._utils.messages import message, quote
from raglane.data.fragments import Fragment, Layout, Store
from raglane.data.records import Columns, Feature, Records, Targets, joined
from raglane.data.statistics import Statistics
from raglane.errors import DataError

# Bytes that fragments which were read from Parquet may take before the least recently used one is dropped.
_KEPT = 1 << 28
# Bytes of files that may be mapped into memory before they are given back, and after how many rows that is checked:
# mapped files count as the process's memory.
_MAPPED, _LOOK = 1 << 29, 1 << 12

_Integers = npt.NDArray[np.int64]

Places = tuple[_Integers | None, _Integers | None]
"""For each token of a fragment its place in the vocabulary, for each label its place among the classes."""


class Fragments:
    """The fragments of several stores, one after the other; those that take memory are kept while they are used."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = tuple(stores)
        self._where = [(store, number) for store in stores for number in range(len(store.sizes))]
        sizes = [size for store in stores for size in store.sizes]
        self._ends: _Integers = np.cumsum(sizes, dtype=np.int64)
        self._forget()

    def _forget(self) -> None:
        self._held: OrderedDict[int, Fragment] = OrderedDict()
        self._touched = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, rows: _Integers) -> _Integers:
        """The number of the fragment of each row."""
        return np.asarray(np.searchsorted(self._ends, rows, side="right"))

    def start(self, number: int) -> int:
        """The first row of a fragment."""
        return int(self._ends[number - 1]) if number else 0

    def get(self, number: int) -> Fragment:
        """A fragment."""
        fragment = self._held.get(number)
        store, place = self._where[number]
        if fragment is None:
            fragment = store.load(place)
            self._check_layout(fragment, number)
            self._held[number] = fragment
            self._drop_some()
        elif not store.is_cheap:
            self._held.move_to_end(number)
        return fragment

    def of(self, row: int) -> tuple[Fragment, int, int]:
        """The fragment of a row, its number, and the row in it."""
        number = int(self.find(np.array([row]))[0])
        return self.get(number), number, row - self.start(number)

    def name(self, number: int) -> str:
        """The name of a fragment in messages."""
        store, place = self._where[number]
        return store.name(place)

    def lengths(self) -> npt.NDArray[Any]:
        """``(B,)`` integers: the elements of each sequence."""
        found = [store.lengths() for store in self._stores]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def statistics(self) -> Statistics:
        """The statistics of all sequences: read if they are stored, else counted now."""
        return sum((store.statistics() for store in self._stores), Statistics())

    def id_of(self, row: int) -> str | int:
        """The id of a sequence; its row where it has none."""
        fragment, _, place = self.of(row)
        found = fragment.id_of(place)
        return row if found is None else found

    def where(self, row: int) -> tuple[str, str]:
        """The source of a sequence, and the sequence in words: its row there, and its id."""
        fragment, number, place = self.of(row)
        name = fragment.id_of(place)
        return self.name(number), f"row {place}" + ("" if name is None else f" (id {quote(name)})")

    def labels(self, rows: _Integers, places: Callable[[int], Places]) -> _Integers | None:
        """The place of each row's label among the classes; None where rows have no label of their own."""
        found = []
        for number in range(len(self._where)):
            fragment, (_, labels) = self.get(number), places(number)
            if fragment.labels is None or labels is None or fragment.layout.has_tags:
                return None
            found.append(labels[fragment.labels])
        return np.concatenate(found)[rows] if found else None

    def records(self, rows: _Integers, columns: Columns, source: Path) -> Records:
        """Return some sequences as records."""
        tokens, labels = dict[str, int](), dict[str, int]()

        def places(number: int) -> Places:
            fragment = self.get(number)
            words, classes = fragment.words, fragment.label_words
            return (
                None if words is None else _numbered(words, tokens),
                None if fragment.labels is None else _numbered(classes, labels),
            )

        gathered = Gathered(self, rows, places)
        layout = gathered.layout or self.get(0).layout
        values = gathered.values if len(gathered.values) else np.zeros((0, len(layout.channels)), dtype=np.float32)
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
        """Note that so many rows were read, and give mapped memory back now and then."""
        self._touched += rows
        if self._touched >= _LOOK:
            self._touched = 0
            if mapped_bytes() > _MAPPED:
                for store in self._stores:
                    store.drop()

    def _check_layout(self, fragment: Fragment, number: int) -> None:
        """Refuse a fragment that is not like the first that holds an element."""
        first = next((known for known in self._held.values() if len(known.values)), None)
        if first is None or not len(fragment.values):
            return
        if first.layout.kind != fragment.layout.kind:
            got = f"{fragment.layout.kind}, after {first.layout.kind}"
            raise DataError(
                message(self.name(number), got, "a file of the same schema as the first", "open them one by one")
            )

    def _drop_some(self) -> None:
        """Hold no more of what was read than there is room for."""
        costly = [number for number in self._held if not self._where[number][0].is_cheap]
        held = sum(self._held[number].values.nbytes for number in costly)
        for number in costly[:-1]:
            if held <= _KEPT:
                return
            held -= self._held.pop(number).values.nbytes


class Gathered:
    """Rows of all fragments as one flat batch, in their order: what a preprocessor makes tensors of."""

    # (M + 1,) int64; (N, C) float32, or (N,) int64 places in the vocabulary.
    offsets: _Integers
    values: npt.NDArray[Any]
    # (M,) or (N,) int64 places among the classes; None without labels.
    classes: _Integers | None
    targets: Targets | None
    features: tuple[Feature, ...]
    # Of the first fragment; None without rows.
    layout: Layout | None = None
    source: str = "data"

    def __init__(self, fragments: Fragments, rows: _Integers, places: Callable[[int], Places]) -> None:
        self._fragments, self._rows = fragments, rows
        numbers = fragments.find(rows)
        # Fragment after fragment, so that each is read once; in the end all is brought into the order of the rows.
        order = np.argsort(numbers, kind="stable")
        edges = [0, *(np.flatnonzero(np.diff(numbers[order])) + 1).tolist(), len(rows)]
        groups = [(int(numbers[order[low]]), low, high) for low, high in pairwise(edges) if low < high]
        local = rows[order]
        starts, ends = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for number, low, high in groups:
            local[low:high] -= fragments.start(number)
            offsets = fragments.get(number).offsets
            starts[low:high] = offsets[local[low:high]]
            ends[low:high] = offsets[local[low:high] + 1]
        lengths = ends - starts
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        elements = _elements(starts, lengths) if len(groups) < 2 else _index(starts, lengths)
        values: list[npt.NDArray[Any]] = []
        classes: list[_Integers] = []
        targets: list[Targets] = []
        features: list[tuple[Feature, ...]] = []
        for number, low, high in groups:
            own = elements if isinstance(elements, slice) else elements[self.offsets[low] : self.offsets[high]]
            fragment, (tokens, labels) = fragments.get(number), places(number)
            try:
                found = fragment.cut(starts[low:high], lengths[low:high], own)
                if len(found):
                    values.append(found if tokens is None else tokens[found])
                if labels is not None and fragment.labels is not None:
                    classes.append(labels[fragment.labels[own if fragment.layout.has_tags else local[low:high]]])
                if (learned := fragment.targets_of(local[low:high], own)) is not None:
                    targets.append(learned)
                features.append(fragment.features_of(local[low:high], own))
            except DataError:
                raise
            except (IndexError, ValueError) as error:
                rule, fix = "an undamaged file of raglane convert", "delete the folder, and convert the data again"
                raise DataError(message(fragments.name(number), "a damaged file", rule, fix)) from error
        if groups:
            self.layout, self.source = fragments.get(groups[0][0]).layout, fragments.name(groups[0][0])
        self.values = _joined(values, np.zeros((0, 1), dtype=np.float32))
        self.classes = _joined(classes, np.zeros(0, dtype=np.int64)) if len(classes) == len(groups) else None
        self.targets = (
            replace(targets[0], values=_joined([one.values for one in targets], targets[0].values)) if targets else None
        )
        self.features = joined(features) if len(features) > 1 else tuple(*features)
        if len(groups) > 1:
            self._restore(order, lengths)
        fragments.touch(len(rows))

    def _restore(self, order: _Integers, lengths: _Integers) -> None:
        """Bring what is in the order of the fragments into the order of the rows."""
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
        """The source of a row of the batch, and the row in words."""
        return self._fragments.where(int(self._rows[row]))

    def class_word(self, row: int, step: int | None) -> str:
        """The label of a row or of one of its steps, as it is written."""
        fragment, _, place = self._fragments.of(int(self._rows[row]))
        labels, at = fragment.labels, place if step is None else int(fragment.offsets[place]) + step
        return "" if labels is None else fragment.label_words[int(labels[at])]


def _numbered(words: Sequence[str], table: dict[str, int]) -> _Integers:
    """Return the number of each word in a table, and add new words to it."""
    return np.array([table.setdefault(word, len(table)) for word in words], dtype=np.int64)


def _words(table: Mapping[str, int], numbers: npt.NDArray[Any]) -> npt.NDArray[np.object_]:
    """Return the words of a table by their numbers."""
    words = np.empty(len(table), dtype=object)
    words[:] = list(table)
    return np.asarray(words[numbers.ravel().astype(np.int64)], dtype=object)


def _elements(starts: _Integers, lengths: _Integers) -> _Integers | slice:
    """The places of the elements of sequences: a slice if they are side by side, so that nothing is copied."""
    if len(starts) and (starts[1:] == starts[:-1] + lengths[:-1]).all():
        return slice(int(starts[0]), int(starts[-1] + lengths[-1]))
    return _index(starts, lengths)


def _index(starts: _Integers, lengths: _Integers) -> _Integers:
    """The place of each element, sequence after sequence.

    As ``element_index`` of :mod:`raglane.segments`, for arrays: a batch is too small for what torch takes per call.
    """
    before = np.cumsum(lengths) - lengths
    index: _Integers = np.repeat(starts - before, lengths)
    index += np.arange(len(index))
    return index


def _joined(parts: list[npt.NDArray[Any]], nothing: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else nothing
