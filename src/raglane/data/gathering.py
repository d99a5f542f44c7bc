"""Rows out of many parts, brought together as one batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from raglane._utils.memory import mapped_bytes
from raglane.data.encoders import encode_targets
from raglane.data.fragments import Part, Store
from raglane.data.missing import how_to_fill
from raglane.data.preprocess import Preprocessor
from raglane.data.records import TASKS, Feature, Records, Targets, joined
from raglane.data.statistics import Statistics
from raglane.errors import DataError, argument, message, quote

# Bytes that parts which were read from Parquet may take before the one that was not used for longest is dropped.
_KEPT = 1 << 28
# Bytes of files that may be mapped into memory before they are given back, and after how many rows that is looked at:
# what a process maps counts as its memory.
_MAPPED, _LOOK = 1 << 29, 1 << 12

_Integers = npt.NDArray[np.int64]

Places = tuple[_Integers | None, _Integers | None]
"""What the words of a part are to a model: the place of each token in the vocabulary, of each label in the classes."""


class KeptParts:
    """The parts of several stores, one after the other; those that take memory are kept while they are used."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = tuple(stores)
        self._where = [(store, number) for store in stores for number in range(len(store.sizes))]
        sizes = [size for store in stores for size in store.sizes]
        self._ends: _Integers = np.cumsum(sizes, dtype=np.int64)
        self._forget()

    def _forget(self) -> None:
        self._parts: OrderedDict[int, Part] = OrderedDict()
        self._touched = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def find(self, rows: _Integers) -> _Integers:
        """The number of the part of each row."""
        return np.asarray(np.searchsorted(self._ends, rows, side="right"))

    def start(self, number: int) -> int:
        """The first row of a part."""
        return int(self._ends[number - 1]) if number else 0

    def get(self, number: int) -> Part:
        """A part."""
        part = self._parts.get(number)
        store, place = self._where[number]
        if part is None:
            part = store.load(place)
            self._check_layout(part, number)
            self._parts[number] = part
            self._drop_some()
        elif not store.is_cheap:
            self._parts.move_to_end(number)
        return part

    def name(self, number: int) -> str:
        """What a part is called in messages."""
        store, place = self._where[number]
        return store.name(place)

    def lengths(self) -> npt.NDArray[Any]:
        """``(B,)`` integers: the elements of each sequence."""
        found = [store.lengths_of_all() for store in self._stores]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def statistics(self) -> Statistics:
        """What is counted of all sequences: read where it stands beside them, else counted now."""
        found = [store.statistics() for store in self._stores]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            known = [self.get(number).statistics() for number in range(len(self._where))]
        return sum(known, Statistics())

    def id_of(self, row: int) -> str | int:
        """The id of a sequence; its row where it has none."""
        number = int(self.find(np.array([row]))[0])
        found = self.get(number).id_of(row - self.start(number))
        return row if found is None else found

    def describe(self, row: int) -> str:
        """How an error names a sequence: by its part, its row in it, and its id."""
        number = int(self.find(np.array([row]))[0])
        name = self.get(number).id_of(row - self.start(number))
        return f"{self.name(number)}: row {row - self.start(number)}" + ("" if name is None else f" (id {quote(name)})")

    def labels(self, rows: _Integers, places: Callable[[int], Places]) -> _Integers | None:
        """The place of each row's label among the classes; None where rows have no label of their own."""
        found = []
        for number in range(len(self._where)):
            part, (_, labels) = self.get(number), places(number)
            if part.labels is None or labels is None or part.layout.has_tags:
                return None
            found.append(labels[part.labels])
        return np.concatenate(found)[rows] if found else None

    def touch(self, rows: int) -> None:
        """Note that so many rows were looked at, and give mapped memory back now and then."""
        self._touched += rows
        if self._touched >= _LOOK:
            self._touched = 0
            if mapped_bytes() > _MAPPED:
                for store in self._stores:
                    store.drop()

    def _check_layout(self, part: Part, number: int) -> None:
        """Refuse a part that is not like the first that holds an element."""
        first = next((known for known in self._parts.values() if len(known.values)), None)
        if first is None or not len(part.values):
            return
        if first.layout.kind != part.layout.kind:
            got = f"{part.layout.kind}, after {first.layout.kind}"
            raise DataError(message(self.name(number), got, "all files are of one schema", "open them one by one"))

    def _drop_some(self) -> None:
        """Hold no more of what was read than there is room for."""
        costly = [number for number in self._parts if not self._where[number][0].is_cheap]
        held = sum(self._parts[number].values.nbytes for number in costly)
        for number in costly[:-1]:
            if held <= _KEPT:
                return
            held -= self._parts.pop(number).values.nbytes


class Gathered:
    """The flat values of some rows, and what is to be learned of them."""

    def __init__(self, parts: KeptParts, rows: _Integers, places: Callable[[int], Places]) -> None:
        self._parts, self._rows = parts, rows
        numbers = parts.find(rows)
        # Part after part, so that each is asked once; in the end all is brought into the order of the rows.
        order = np.argsort(numbers, kind="stable")
        edges = [0, *(np.flatnonzero(np.diff(numbers[order])) + 1).tolist(), len(rows)]
        groups = [(int(numbers[order[low]]), low, high) for low, high in pairwise(edges) if low < high]
        self._first = groups[0][0] if groups else None
        local = rows[order]
        starts, ends = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for number, low, high in groups:
            local[low:high] -= parts.start(number)
            offsets = parts.get(number).offsets
            starts[low:high] = offsets[local[low:high]]
            ends[low:high] = offsets[local[low:high] + 1]
        lengths = ends - starts
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        elements = _elements(starts, lengths) if len(groups) < 2 else _index(starts, lengths)
        values: list[npt.NDArray[Any]] = []
        targets: list[_Integers] = []
        beside: list[tuple[Targets | None, tuple[Feature, ...]]] = []
        for number, low, high in groups:
            source = elements if isinstance(elements, slice) else elements[bounds[low] : bounds[high]]
            try:
                found = parts.get(number).cut(starts[low:high], lengths[low:high], source)
                self._add(number, local[low:high], source, found, places(number), values, targets)
                if (there := parts.get(number).beside) is not None:
                    beside.append(there.cut(local[low:high], source))
            except DataError:
                raise
            except (IndexError, ValueError) as error:
                rule, fix = "what raglane convert wrote, whole", "delete the folder, and convert the data again"
                raise DataError(message(parts.name(number), "a damaged file", rule, fix)) from error
        self.values = _joined(values, np.zeros((0, 1), dtype=np.float32))
        self.targets = _joined(targets, np.zeros(0, dtype=np.int64)) if len(targets) == len(groups) > 0 else None
        self.has_tags = self._first is not None and parts.get(self._first).layout.has_tags
        known = [one for one, _ in beside if one is not None]
        self.sets_or_numbers = (
            replace(known[0], values=np.concatenate([one.values for one in known])) if known else None
        )
        self.features = joined([features for _, features in beside])
        self.offsets: _Integers = bounds
        if len(groups) > 1:
            self._restore(order, lengths, bounds)
        parts.touch(len(rows))

    def beside(self, preprocessor: Preprocessor, inputs: Tensor) -> Tensor:
        """Inputs with the features beside them, as a preprocessor has learned to put them there."""
        name = "data" if self._first is None else self._parts.name(self._first)
        return preprocessor.beside(inputs, self.features, self.offsets, name)

    def _add(
        self,
        number: int,
        rows: _Integers,
        source: _Integers | slice,
        found: npt.NDArray[Any],
        places: Places,
        values: list[npt.NDArray[Any]],
        targets: list[_Integers],
    ) -> None:
        """Take over what was found in a part: ``rows`` are counted in it, and ``source`` are their elements."""
        part, (tokens, labels) = self._parts.get(number), places
        if len(found):
            values.append(found if tokens is None else tokens[found])
        if labels is not None and part.labels is not None:
            targets.append(labels[part.labels[source if part.layout.has_tags else rows]])

    def _restore(self, order: _Integers, lengths: _Integers, bounds: _Integers) -> None:
        """Bring what stands part after part into the order of the rows."""
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        self.offsets = np.concatenate([[0], np.cumsum(lengths[back])])
        elements = _index(bounds[back], lengths[back])
        if len(self.values):
            self.values = self.values[elements]
        if self.targets is not None:
            self.targets = self.targets[elements if self.has_tags else back]
        if self.sets_or_numbers is not None:
            self.sets_or_numbers = self.sets_or_numbers.select(back, elements)
        self.features = tuple(feature.select(back, elements) for feature in self.features)

    def check_targets(self, task: str) -> None:
        """Refuse rows without labels, and labels that no class is for."""
        there = self.targets if TASKS[task].label == "class" else self.sets_or_numbers
        if there is None and self._first is not None:
            fix = f"name their column with {argument('label', of='Columns')}"
            raise DataError(message(self._parts.name(self._first), "no labels", f"the task {task} needs them", fix))
        if self.targets is not None and (self.targets < 0).any():
            first = int((self.targets < 0).argmax())
            row = int(np.searchsorted(self.offsets, first, side="right")) - 1 if self.has_tags else first
            got = f"one that training has not seen, in {self._parts.describe(int(self._rows[row]))}"
            rule, fix = "the labels are those of the training part", "train on data that has it, or correct it"
            raise DataError(message("label", got, rule, fix))

    def encoded(self, preprocessor: Preprocessor) -> Tensor | None:
        """Numbers or sets of labels as a model learns them, ``(M or N, T)`` float32; None where there are none."""
        if self.sets_or_numbers is None:
            return None
        records = self._without_values(self.sets_or_numbers, self.offsets, Path("data"))
        try:
            return encode_targets(preprocessor, records)
        except DataError:
            # Once more, one by one: which row of which file it is, is not known of all at once.
            for place, row in enumerate(self._rows.tolist()):
                start, end = self.offsets[place : place + 2].tolist()
                one = self.sets_or_numbers.select(np.array([place]), np.arange(start, end))
                source = Path(self._parts.describe(row))
                encode_targets(preprocessor, self._without_values(one, np.array([0, end - start]), source))
            raise

    def _without_values(self, targets: Targets, offsets: _Integers, source: Path) -> Records:
        return Records(np.zeros((int(offsets[-1]), 0), np.float32), offsets, targets=targets, source=source)

    def preprocess(self, preprocessor: Preprocessor) -> None:
        """Scale and fill features, as they were in training."""
        if len(self.values) == 0 or self._first is None:
            kind = np.int64 if preprocessor.is_tokens else np.float32
            width = preprocessor.input_size - preprocessor.features_size
            self.values = np.zeros((0,) if preprocessor.is_tokens else (0, width), dtype=kind)
            return
        layout = self._parts.get(self._first).layout
        preprocessor.check_kind(layout.channels, layout.is_tokens, self._parts.name(self._first))
        if layout.is_tokens:
            return
        if preprocessor.channels != layout.channels:
            self.values = self.values[:, [layout.channels.index(name) for name in preprocessor.channels]]
        if preprocessor.missing == "error":
            absent = ~np.isfinite(self.values)
            if absent.any():
                element = int(absent.any(axis=1).argmax())
                row = int(np.searchsorted(self.offsets, element, side="right")) - 1
                place = f"{self._parts.describe(int(self._rows[row]))}, step {element - int(self.offsets[row])}"
                fix = f"correct the data, or {how_to_fill()}"
                raise DataError(message("features", f"one that is missing, in {place}", "finite numbers", fix))
        self.values = preprocessor.scaled(self.values, self.offsets)


def _elements(starts: _Integers, lengths: _Integers) -> _Integers | slice:
    """Where the elements of sequences are: a slice, where they stand in a row, so that nothing is copied."""
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
