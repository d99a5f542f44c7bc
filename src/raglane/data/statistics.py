"""What is counted of sequences once, so that nobody has to read them again: for scaling, vocabularies and classes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.records import Columns, Records
from raglane.errors import ArgumentError, message

__all__ = ["COUNTABLE", "Channel", "Counted", "Statistics", "check_countable"]

COUNTABLE = ("classify", "tag", "forecast")
"""The tasks for data that is counted and taken batch by batch; the others need all of it in memory."""


def check_countable(task: str) -> None:
    """Refuse a task whose targets are neither counted nor kept in converted data.

    Args:
        task: a key of :data:`raglane.data.records.TASKS`.

    Raises:
        ArgumentError: it is none of ``COUNTABLE``.

    Example:
        >>> check_countable("tag")
    """
    if task not in COUNTABLE:
        rule = f"data that is converted, or taken batch by batch, is for {', '.join(COUNTABLE)}"
        fix = "read the file itself, with raglane train or rl.data.read"
        raise ArgumentError(message("task", repr(task), rule, fix))


# What the variance of zeros and ones may be off, in float64.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Channel:
    """The features of a channel that are present, which means finite.

    Attributes:
        count: of them.
        mean: of them.
        squares: the sum of their squared differences from the mean.
        low, high: the least and the greatest; infinite where there is none.
        missing: how many features are NaN or infinite.

    Example:
        >>> Channel.of(np.array([1.0, np.nan, 3.0], np.float32)) + Channel.of(np.array([5.0], np.float32))
        Channel(count=3, mean=3.0, squares=8.0, low=1.0, high=5.0, missing=1)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    missing: int = 0

    @classmethod
    def of(cls, values: npt.NDArray[np.float32]) -> Channel:
        """Count ``(N,)`` float32, in float64."""
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
        labels: how often each comes, of sequences or of elements.

    Example:
        >>> from raglane.data.records import offsets_of
        >>> words = Records(np.array(["a", "b", "a"], dtype=object), offsets_of([2, 0, 1]), labels=("x", "y", "x"))
        >>> found = Statistics.of(words)
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

    @classmethod
    def of(cls, records: Records) -> Statistics:
        """Count what a file holds."""
        lengths = records.lengths
        labels: Iterable[str] = records.labels or () if records.tags is None else records.tags.tolist()
        return cls(
            len(records),
            len(records.values),
            int((lengths == 0).sum()),
            int(lengths.max(initial=0)),
            {name: Channel.of(records.values[:, place]) for place, name in enumerate(records.channels)},
            Counter(records.values.tolist() if records.is_tokens else ()),
            Counter(labels),
        )

    def __add__(self, other: Statistics) -> Statistics:
        names = dict.fromkeys([*self.channels, *other.channels])
        nothing = Channel()
        return Statistics(
            self.sequences + other.sequences,
            self.elements + other.elements,
            self.empty + other.empty,
            max(self.longest, other.longest),
            {name: self.channels.get(name, nothing) + other.channels.get(name, nothing) for name in names},
            self.tokens + other.tokens,
            self.labels + other.labels,
        )

    def to_config(self) -> dict[str, Any]:
        """Everything as JSON values; :meth:`from_config` gives back an equal object."""
        return {
            "sequences": self.sequences,
            "elements": self.elements,
            "empty": self.empty,
            "longest": self.longest,
            # What is not there has no least and no greatest, and JSON no infinity.
            "channels": {
                name: [channel.count, channel.mean, channel.squares, channel.low, channel.high, channel.missing]
                if channel.count
                else [0, 0.0, 0.0, None, None, channel.missing]
                for name, channel in self.channels.items()
            },
            "tokens": dict(self.tokens),
            "labels": dict(self.labels),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Statistics:
        """The object that :meth:`to_config` described.

        Raises:
            KeyError, TypeError, ValueError: it is not such a description.
        """
        channels = {}
        for name, (count, mean, squares, low, high, missing) in config["channels"].items():
            channels[name] = Channel(count, mean, squares, low, high, missing) if count else Channel(missing=missing)
        sequences, elements, empty, longest = (
            int(config[name]) for name in ("sequences", "elements", "empty", "longest")
        )
        tokens, labels = Counter(config["tokens"]), Counter(config["labels"])
        return cls(sequences, elements, empty, longest, channels, tokens, labels)


class Counted(ABC):
    """Sequences that are not in memory, of which statistics are known, and which are made tensors batch by batch.

    Attributes:
        columns: what they were read with.
    """

    columns: Columns

    @property
    @abstractmethod
    def statistics(self) -> Statistics:
        """What is counted of them."""

    @abstractmethod
    def with_preprocessor(self, preprocessor: Any) -> Any:
        """The same sequences, as a preprocessor turns them into tensors."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that differs for other sequences, or another order."""
