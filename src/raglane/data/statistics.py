"""What is counted of sequences once, so that nobody has to read them again: for scaling, vocabularies and classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.records import Feature, Records

# What the variance of zeros and ones may be off, in float64.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Channel:
    """The features of a channel that are present, which means finite."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    missing: int = 0

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Channel:
        """Count ``(N,)`` float32 or float64, in float64."""
        present = np.isfinite(values)
        count = int(present.sum())
        known = np.where(present, values, 0).astype(np.float64)
        mean = known.sum() / max(count, 1)
        squares = (np.where(present, known - mean, 0) ** 2).sum()
        if not count:
            return cls(missing=len(values))
        low, high = np.where(present, values, np.inf).min(), np.where(present, values, -np.inf).max()
        return cls(count, float(mean), float(squares), float(low), float(high), len(values) - count)

    def __add__(self, other: Channel) -> Channel:
        # The parallel form of Welford's update (Chan, Golub and LeVeque 1979): sums of squares would cancel.
        count = self.count + other.count
        step, share = other.mean - self.mean, other.count / max(count, 1)
        return Channel(
            count,
            self.mean + step * share,
            self.squares + other.squares + step * step * self.count * share,
            min(self.low, other.low),
            max(self.high, other.high),
            self.missing + other.missing,
        )

    @property
    def is_binary(self) -> bool:
        """Whether every feature that is present is 0 or 1.

        Between the two a square is less than its number, so the variance is ``mean * (1 - mean)`` at the ends alone.
        """
        excess = self.mean * (1 - self.mean) - self.squares / max(self.count, 1)
        return self.low >= 0 and self.high <= 1 and abs(excess) < _ROUNDING

    @property
    def deviation(self) -> float:
        """The standard deviation, to divide by: 1 for a channel that never changes.

        Such a channel has, but for rounding, a deviation of 0: dividing by the rounding would blow up whatever differs
        from it later.
        """
        return math.sqrt(self.squares / max(self.count, 1)) if self.high > self.low else 1.0

    def to_config(self) -> list[Any]:
        """Everything as JSON values: what is not there has no least and no greatest, and JSON no infinity."""
        if not self.count:
            return [0, 0.0, 0.0, None, None, self.missing]
        return [self.count, self.mean, self.squares, self.low, self.high, self.missing]

    @classmethod
    def from_config(cls, config: Any) -> Channel:
        """The object that :meth:`to_config` described."""
        count, mean, squares, low, high, missing = config
        return cls(count, mean, squares, low, high, missing) if count else cls(missing=missing)


@dataclass(frozen=True)
class FeatureCounts:
    """What is counted of a feature beside the main column."""

    per_sequence: bool
    channel: Channel | None = None
    words: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, feature: Feature) -> FeatureCounts:
        """Count one."""
        if feature.is_numbers:
            return cls(feature.per_sequence, Channel.of(feature.values))
        return cls(feature.per_sequence, words=Counter(feature.values.tolist()))

    def __add__(self, other: FeatureCounts) -> FeatureCounts:
        channel = self.channel if other.channel is None else other.channel + (self.channel or Channel())
        return FeatureCounts(self.per_sequence, channel, self.words + other.words)

    @property
    def missing(self) -> int:
        """How many are missing."""
        return self.words[""] if self.channel is None else self.channel.missing

    @property
    def categories(self) -> int | None:
        """How many different categories there are; None for numbers."""
        return len(self.words.keys() - {""}) if self.channel is None else None

    def to_config(self) -> dict[str, Any]:
        """Everything as JSON values."""
        channel = None if self.channel is None else self.channel.to_config()
        return {"per_sequence": self.per_sequence, "channel": channel, "words": dict(self.words)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FeatureCounts:
        """The object that :meth:`to_config` described."""
        channel = None if config["channel"] is None else Channel.from_config(config["channel"])
        return cls(bool(config["per_sequence"]), channel, Counter(config["words"]))


@dataclass(frozen=True)
class Statistics:
    """What is counted of sequences.

    Attributes:
        sequences: how many.
        elements: of all of them.
        empty: sequences without an element.
        longest: elements of the longest.
        channels: of features, by name.
        tokens: how often each comes.
        labels: how often each comes, of sequences or of elements, or in the sets of either.
        targets: numbers to learn, by name.
        per_element: whether numbers or sets to learn are those of elements.
        features: beside the main column, by name.

    Example:
        >>> from raglane.data import read
        >>> found = read(["a b", "", "a"], labels=["x", "y", "x"]).statistics
        >>> found.sequences, found.empty, found.longest, dict(found.tokens), dict(found.labels)
        (3, 1, 2, {'a': 2, 'b': 1}, {'x': 2, 'y': 1})
        >>> Statistics.from_config((found + found).to_config()).tokens["a"]
        4
    """

    sequences: int = 0
    elements: int = 0
    empty: int = 0
    longest: int = 0
    channels: Mapping[str, Channel] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    targets: Mapping[str, Channel] = field(default_factory=dict)
    per_element: bool = False
    features: Mapping[str, FeatureCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Records) -> Statistics:
        """Count what a file holds."""
        lengths = records.lengths
        labels: Iterable[str] = records.labels or () if records.tags is None else records.tags.tolist()
        counts = {feature.name: FeatureCounts.of(feature) for feature in records.features}
        targets, numbers = records.targets, {}
        if targets is not None and targets.is_numbers:
            numbers = {name: Channel.of(targets.values[:, place]) for place, name in enumerate(targets.names)}
        elif targets is not None:
            labels = chain.from_iterable(targets.values)
        return cls(
            len(records),
            len(records.values),
            int((lengths == 0).sum()),
            int(lengths.max(initial=0)),
            {name: Channel.of(records.values[:, place]) for place, name in enumerate(records.channels)},
            Counter(records.values.tolist() if records.is_tokens else ()),
            Counter(labels),
            numbers,
            targets is not None and targets.per_element,
            counts,
        )

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.sequences + other.sequences,
            self.elements + other.elements,
            self.empty + other.empty,
            max(self.longest, other.longest),
            _merged(self.channels, other.channels),
            self.tokens + other.tokens,
            self.labels + other.labels,
            _merged(self.targets, other.targets),
            self.per_element or other.per_element,
            _merged(self.features, other.features),
        )

    def to_config(self) -> dict[str, Any]:
        """Everything as JSON values; :meth:`from_config` gives back an equal object."""
        return {field.name: _config_of(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Statistics:
        """The object that :meth:`to_config` described.

        Raises:
            KeyError, TypeError, ValueError: it is not such a description.
        """
        # What was converted before has neither numbers to learn nor features.
        config = {"targets": {}, "features": {}, "per_element": False, **config}
        values: dict[str, Any] = {name: int(config[name]) for name in ("sequences", "elements", "empty", "longest")}
        values |= {name: Counter(config[name]) for name in ("tokens", "labels")}
        for part, kind in (("channels", Channel), ("targets", Channel), ("features", FeatureCounts)):
            values[part] = {name: kind.from_config(counts) for name, counts in config[part].items()}
        return cls(**values, per_element=bool(config["per_element"]))


def _config_of(value: Any) -> Any:
    """What is counted as JSON values, by name where it has names."""
    if not isinstance(value, Mapping):
        return value
    return {name: counts if isinstance(counts, int) else counts.to_config() for name, counts in value.items()}


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What is counted by name in two parts, added up."""
    added = {name: ours[name] + counts if name in ours else counts for name, counts in theirs.items()}
    return {**ours, **added}
