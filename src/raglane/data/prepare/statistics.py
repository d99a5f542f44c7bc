"""Statistics of sequences, from which scales, vocabularies and classes are learned."""

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

# The rounding error of the variance of zeros and ones in float64.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Channel:
    """Statistics of the finite features of a channel, and the number of missing ones."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    missing: int = 0

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Channel:
        """Return the statistics of ``(N,)`` float32 or float64, computed in float64."""
        present = np.isfinite(values)
        count = int(present.sum())
        numbers = np.where(present, values, 0).astype(np.float64)
        mean = numbers.sum() / max(count, 1)
        squares = (np.where(present, numbers - mean, 0) ** 2).sum()
        if not count:
            return cls(missing=len(values))
        low = np.where(present, values, np.inf).min()
        high = np.where(present, values, -np.inf).max()
        return cls(count, float(mean), float(squares), float(low), float(high), len(values) - count)

    def __add__(self, other: Channel) -> Channel:
        # The parallel form of Welford's update (Chan, Golub and LeVeque 1979): sums of squares
        # would cancel.
        count = self.count + other.count
        step = other.mean - self.mean
        share = other.count / max(count, 1)
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
        """True if every finite feature is 0 or 1."""
        # Only then is the variance mean * (1 - mean): between 0 and 1 a square is less than its
        # number.
        excess = self.mean * (1 - self.mean) - self.squares / max(self.count, 1)
        return self.low >= 0 and self.high <= 1 and abs(excess) < _ROUNDING

    @property
    def deviation(self) -> float:
        """The standard deviation, or 1 for a constant channel, whose computed deviation is only
        rounding error.
        """
        return math.sqrt(self.squares / max(self.count, 1)) if self.high > self.low else 1.0

    def to_config(self) -> list[Any]:
        """Return JSON values; without features, the infinite minimum and maximum are null."""
        if not self.count:
            return [0, 0.0, 0.0, None, None, self.missing]
        return [self.count, self.mean, self.squares, self.low, self.high, self.missing]

    @classmethod
    def from_config(cls, config: Any) -> Channel:
        """Return the object that :meth:`to_config` described."""
        count, mean, squares, low, high, missing = config
        return cls(count, mean, squares, low, high, missing) if count else cls(missing=missing)


@dataclass(frozen=True)
class FeatureCounts:
    """Statistics of a feature column."""

    per_sequence: bool
    channel: Channel | None = None
    words: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, feature: Feature) -> FeatureCounts:
        """Return the statistics of a feature."""
        if feature.is_numbers:
            return cls(feature.per_sequence, Channel.of(feature.values))
        return cls(feature.per_sequence, words=Counter(feature.values.tolist()))

    def __add__(self, other: FeatureCounts) -> FeatureCounts:
        channel = (
            self.channel if other.channel is None else other.channel + (self.channel or Channel())
        )
        return FeatureCounts(self.per_sequence, channel, _counted(self.words, other.words))

    @property
    def missing(self) -> int:
        """The number of missing values."""
        return self.words[""] if self.channel is None else self.channel.missing

    @property
    def categories(self) -> int | None:
        """The number of different categories; None for numbers."""
        return len(self.words.keys() - {""}) if self.channel is None else None

    def to_config(self) -> dict[str, Any]:
        """Return JSON values."""
        channel = None if self.channel is None else self.channel.to_config()
        return {"per_sequence": self.per_sequence, "channel": channel, "words": dict(self.words)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FeatureCounts:
        """Return the object that :meth:`to_config` described."""
        channel = None if config["channel"] is None else Channel.from_config(config["channel"])
        return cls(bool(config["per_sequence"]), channel, Counter(config["words"]))


@dataclass(frozen=True)
class Statistics:
    """Statistics of sequences.

    Attributes:
        sequences: the number of sequences.
        elements: the number of elements of all sequences.
        empty: the number of sequences without an element.
        longest: the number of elements of the longest sequence.
        channels: the statistics of each feature column of the elements, by name.
        tokens: the number of occurrences of each token.
        labels: the number of occurrences of each label.
        targets: the statistics of numbers to learn, by name.
        per_element: whether numbers or sets to learn are per element.
        features: the statistics of further columns, by name.

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
        """Return the statistics of records."""
        lengths = records.lengths
        labels: Iterable[str] = (
            records.labels or () if records.tags is None else records.tags.tolist()
        )
        counts = {feature.name: FeatureCounts.of(feature) for feature in records.features}
        targets = records.targets
        numbers = {}
        if targets is not None and targets.is_numbers:
            # Without a row the number of targets is unknown.
            names = targets.names if len(targets.values) else ()
            numbers = {
                name: Channel.of(targets.values[:, column]) for column, name in enumerate(names)
            }
        elif targets is not None:
            labels = chain.from_iterable(targets.values)
        return cls(
            len(records),
            len(records.values),
            int((lengths == 0).sum()),
            int(lengths.max(initial=0)),
            {
                name: Channel.of(records.values[:, column])
                for column, name in enumerate(records.channels)
            },
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
            _counted(self.tokens, other.tokens),
            _counted(self.labels, other.labels),
            _merged(self.targets, other.targets),
            self.per_element or other.per_element,
            _merged(self.features, other.features),
        )

    def to_config(self) -> dict[str, Any]:
        """Return JSON values, from which :meth:`from_config` makes an equal object."""
        return {field.name: _config_of(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Statistics:
        """Return the object that :meth:`to_config` described.

        Raises:
            KeyError, TypeError, ValueError: not such a description.
        """
        # Folders of earlier versions have neither numbers to learn nor features.
        config = {"targets": {}, "features": {}, "per_element": False, **config}
        values: dict[str, Any] = {
            name: int(config[name]) for name in ("sequences", "elements", "empty", "longest")
        }
        values |= {name: Counter(config[name]) for name in ("tokens", "labels")}
        for field_name, kind in (
            ("channels", Channel),
            ("targets", Channel),
            ("features", FeatureCounts),
        ):
            values[field_name] = {
                name: kind.from_config(counts) for name, counts in config[field_name].items()
            }
        return cls(**values, per_element=bool(config["per_element"]))


def _config_of(value: Any) -> Any:
    """Return a number, or statistics by name, as JSON values."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: counts if isinstance(counts, int) else counts.to_config()
        for name, counts in value.items()
    }


def _counted(ours: Counter[str], theirs: Counter[str]) -> Counter[str]:
    """Return the sum of counts; ``+`` would visit every entry of a vocabulary in Python for each
    piece of a file.
    """
    counts = ours.copy()
    counts.update(theirs)
    return counts


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of statistics by name."""
    return {
        **ours,
        **{
            name: ours[name] + counts if name in ours else counts for name, counts in theirs.items()
        },
    }
