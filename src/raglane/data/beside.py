"""What a part of a dataset has beside values and classes: numbers or sets of labels to learn, and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.features import Feature
from raglane.data.layout import Layout
from raglane.data.records import Records, offsets_of
from raglane.data.targets import Targets
from raglane.errors import require

__all__ = ["Beside", "columns_beside", "lists_of", "words_of_sets"]

Index = npt.NDArray[np.int64] | slice
Rows = Callable[[Index], npt.NDArray[Any]]
"""From the places of sequences or elements to what stands there."""


@dataclass(frozen=True, eq=False)
class Beside:
    """Columns of some sequences, of which rows are taken when they are needed.

    Attributes:
        layout: says what they are.
        targets: gives numbers ``(M, T)`` float64, or sets ``(M,)`` object; None where there are none.
        features: give the entries of each feature of the layout.
    """

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
