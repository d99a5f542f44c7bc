"""Statistics of sequence lengths, computed from the count of each length: quantiles, a histogram,
buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Integers = npt.NDArray[np.int64]

# The maximum number of bars of a histogram.
_BINS = 30
# The maximum number of buckets.
_BUCKETS = 8
# If the longest sequence is this many times as long as the 95th percentile, bars grow with the
# length.
_LONG = 8


@dataclass(frozen=True, eq=False)
class LengthCounts:
    """The count of each length."""

    values: _Integers
    counts: _Integers

    @classmethod
    def of(cls, lengths: _Integers) -> LengthCounts:
        """Return the distribution of some lengths, at least one."""
        return cls(*np.unique(lengths, return_counts=True))

    @property
    def count(self) -> int:
        """The number of sequences."""
        return int(self.counts.sum())

    def quantile(self, share: float) -> int:
        """Return the smallest length that at least this share of the sequences does not exceed."""
        ends = np.cumsum(self.counts)
        rank = max(1, math.ceil(share * int(ends[-1]) - 1e-9))
        return int(self.values[np.searchsorted(ends, rank)])


@dataclass(frozen=True)
class Summary:
    """The summary statistics of lengths."""

    count: int
    empty: int
    elements: int
    minimum: int
    q1: int
    median: int
    q3: int
    p95: int
    p99: int
    maximum: int
    mean: float
    density: float


def summary(lengths: LengthCounts) -> Summary:
    """Compute the summary statistics of lengths."""
    elements = int(lengths.values @ lengths.counts)
    count = lengths.count
    empty = int(lengths.counts[0]) if lengths.values[0] == 0 else 0
    low, q1, median, q3, p95, p99, high = map(lengths.quantile, (0, 0.25, 0.5, 0.75, 0.95, 0.99, 1))
    mean = elements / count
    density = elements / (count * high)
    return Summary(count, empty, elements, low, q1, median, q3, p95, p99, high, mean, density)


@dataclass(frozen=True)
class Bin:
    """A bar of a histogram: the number of sequences of length ``low`` to ``high``, both
    included.
    """

    low: int
    high: int
    count: int

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}-{self.high:,}"


def bins(lengths: LengthCounts, most: int = _BINS) -> tuple[Bin, ...]:
    """Return a histogram with bars of equal width, or of growing width if the lengths have a long
    tail.
    """
    first = int(lengths.values[0])
    last = int(lengths.values[-1])
    if last >= _LONG * max(1, lengths.quantile(0.95)):
        edges = np.unique(
            np.round(np.geomspace(max(first, 1), last + 1, most + 1)).astype(np.int64)
        )
        edges = np.concatenate([[0], edges]) if first == 0 else edges
    else:
        width = round_up((last - first + 1) / most)
        start = first // width * width
        if (last - start) // width + 1 > most:
            width = round_up(width + 1)
            start = first // width * width
        edges = np.arange(start, last + width + 1, width)
    bins_of = np.searchsorted(edges, lengths.values, side="right") - 1
    counts = np.bincount(bins_of, weights=lengths.counts, minlength=len(edges) - 1)[
        : len(edges) - 1
    ]
    bars = [
        Bin(int(low), int(high) - 1, int(count))
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    while len(bars) > 1 and bars[-1].count == 0:
        bars.pop()
    return tuple(bars)


def round_up(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least ``least``."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


@dataclass(frozen=True)
class Bucket:
    """A group of sequences of similar lengths."""

    low: int
    high: int
    count: int
    elements: int

    @property
    def density(self) -> float:
        """The density of the bucket as one padded batch; 1 if it has no elements."""
        return self.elements / (self.count * self.high) if self.high else 1.0


def buckets(lengths: LengthCounts, most: int = _BUCKETS) -> tuple[Bucket, ...]:
    """Return buckets of about equally many sequences; sequences of one length share a bucket."""
    ends = sorted({lengths.quantile((number + 1) / most) for number in range(most)})
    stops = np.searchsorted(lengths.values, ends, side="right").tolist()
    groups = []
    for start, stop in zip([0, *stops], stops, strict=False):
        values = lengths.values[start:stop]
        counts = lengths.counts[start:stop]
        groups.append(
            Bucket(int(values[0]), int(values[-1]), int(counts.sum()), int(values @ counts))
        )
    return tuple(groups)


def longest_and_elements(
    lengths: _Integers, rows: _Integers, bounds: _Integers
) -> tuple[_Integers, _Integers]:
    """Return the longest sequence and the number of elements of each batch of
    ``BatchSampler.whole``.
    """
    if len(rows) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ordered = lengths[rows]
    starts = bounds[:-1]
    return np.maximum.reduceat(ordered, starts), np.add.reduceat(ordered, starts)


def batch_density(lengths: _Integers, rows: _Integers, bounds: _Integers) -> float:
    """Return the density of an epoch's padded batches; 1 if they have no elements."""
    longest, elements = longest_and_elements(lengths, rows, bounds)
    padded = int((longest * np.diff(bounds)).sum())
    return int(elements.sum()) / padded if padded else 1.0
