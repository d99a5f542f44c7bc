"""What a file holds, as far as it matters before anything is trained: lengths, features, labels, what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import data_error
from raglane.data.fragments import Layout
from raglane.data.missing import BLOCKS
from raglane.data.records import Records
from raglane.data.statistics import FeatureCounts, Statistics
from raglane.errors import DataError, count_of

DEFAULT_NAME = "Japanese vowels"


@dataclass(frozen=True)
class Feature:
    """A feature column."""

    name: str
    missing: int


@dataclass(frozen=True)
class Labels:
    """The labels of a file."""

    of: str
    counts: dict[str, int]


@dataclass(frozen=True, eq=False)
class Contents:
    """What a file holds."""

    name: str
    path: Path | None
    lengths: npt.NDArray[np.int64]
    kind: str
    features: tuple[Feature, ...] = ()
    vocabulary: int | None = None
    labels: Labels | None = None
    notes: tuple[str, ...] = ()
    beside: Mapping[str, FeatureCounts] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Features that are NaN or infinite, in all columns of numbers."""
        counted = sum(counts.missing for counts in self.beside.values() if counts.channel is not None)
        return counted + sum(feature.missing for feature in self.features)

    def inputs(self, missing: str = "error") -> tuple[int, list[int]]:
        """What a model reads of an element."""
        # Where something is missing, training adds for each channel one that says so.
        each = 2 if self.missing and missing == "error" else BLOCKS[missing]
        words = [counts.categories + 1 for counts in self.beside.values() if counts.categories is not None]
        numbers = len(self.beside) - len(words) + len(self.features)
        tokens = [self.vocabulary or 1] if self.kind != "features" and self.beside else []
        return each * numbers, words + tokens


def data_name(path: Path | None) -> str:
    """The data in a title."""
    return DEFAULT_NAME if path is None else path.resolve().name or str(path)


def labels_of(of: str, counts: Mapping[str, int]) -> Labels:
    """Labels, the most frequent first; of those that come as often, the first in the alphabet."""
    return Labels(of, dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def contents_of(records: Records, path: Path | None) -> Contents:
    """What a reader found, counted."""
    return _contents(path, records.lengths, Statistics.of(records), Layout.of(records), records.notes)


def contents_of_folder(path: Path) -> Contents:
    """What a folder holds that was converted: from the files beside the data, which is not read."""
    from raglane.data.shards import Shards

    store, _ = Shards.of(path)
    return _contents(path, store.lengths().astype(np.int64, copy=False), store.statistics(), store.layout, ())


def _contents(
    path: Path | None,
    lengths: npt.NDArray[np.int64],
    counted: Statistics,
    layout: Layout,
    notes: tuple[str, ...],
) -> Contents:
    labels, has_sets = None, layout.targets == "sets"
    if layout.has_labels or layout.has_tags or has_sets:
        is_element = layout.has_tags or (has_sets and layout.targets_per_element)
        labels = labels_of("element" if is_element else "sequence", counted.labels)
    features = tuple(Feature(name, channel.missing) for name, channel in counted.channels.items())
    kind, vocabulary = ("tokens", len(counted.tokens)) if layout.is_tokens else ("features", None)
    return Contents(data_name(path), path, lengths, kind, features, vocabulary, labels, notes, counted.features)


def refuse_empty(contents: Contents) -> None:
    """Refuse data in which there is nothing to compute."""
    if contents.lengths.any():
        return
    count = len(contents.lengths)
    got = f"{count_of(count, 'sequence')}, none of which has an element" if count else "no sequence"
    error: DataError = data_error(
        contents.path or Path(contents.name), got, "at least one sequence has an element", "check the data"
    )
    raise error
