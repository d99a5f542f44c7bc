"""Quantiles, histograms and buckets against their definitions, and how full batches are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raglane.data.prepare.lengths import LengthCounts, bins, buckets
from raglane.runs.inspection.inspect import densities, examples

_LENGTHS = st.lists(st.integers(0, 60) | st.integers(0, 10_000_000), min_size=1, max_size=60)


@given(_LENGTHS, st.floats(0, 1))
def test_a_quantile_is_the_least_length_that_so_many_do_not_exceed(
    lengths: list[int], share: float
) -> None:
    found = LengthCounts.of(np.array(lengths)).quantile(share)
    assert found in lengths
    assert sum(length <= found for length in lengths) >= share * len(lengths) - 1e-6
    smaller = [length for length in lengths if length < found]
    assert not smaller or len(smaller) < share * len(lengths) + 1e-6


@given(_LENGTHS, st.integers(1, 40))
def test_each_sequence_is_in_one_bar_and_one_bucket(lengths: list[int], most: int) -> None:
    distribution = LengthCounts.of(np.array(lengths))
    bars = bins(distribution, most)
    # A bar of its own for empty sequences, where bars grow.
    assert 1 <= len(bars) <= most + 1
    for bar in bars:
        assert bar.count == sum(bar.low <= length <= bar.high for length in lengths)
    assert sum(bar.count for bar in bars) == len(lengths)
    assert all(one.high + 1 == other.low for one, other in pairwise(bars))
    found = buckets(distribution, most)
    assert len(found) <= most
    for bucket in found:
        inside = [length for length in lengths if bucket.low <= length <= bucket.high]
        assert (bucket.count, bucket.elements) == (len(inside), sum(inside))
        assert (min(inside), max(inside)) == (bucket.low, bucket.high)
    assert sum(bucket.count for bucket in found) == len(lengths)


def test_a_long_tail_has_bars_of_growing_width() -> None:
    lengths = np.concatenate([np.arange(1, 100), [5000]])
    for most in (1, 2, 7, 30):
        bars = bins(LengthCounts.of(lengths), most)
        widths = [bar.high - bar.low for bar in bars]
        assert widths == sorted(widths)
        assert (bars[0].low, bars[-1].high) == (1, 5000)
        assert sum(bar.count for bar in bars) == len(lengths)
    assert len({bar.high - bar.low for bar in bins(LengthCounts.of(np.arange(100)))}) == 1


def test_the_fill_of_batches_of_known_lengths() -> None:
    known = {(one.batch_size, one.order): one.density for one in densities(np.array([1, 9] * 32))}
    assert {size for size, _ in known} == {8, 16, 32, 64}
    assert known[64, "random"] == known[64, "sorted"] == 320 / 576
    assert known[8, "sorted"] == known[8, "bucketed"] == 1.0
    assert 0.5 < known[8, "random"] < 0.7


def test_the_examples_are_the_worst_the_median_and_the_best() -> None:
    lengths = np.random.default_rng(2).integers(0, 50, 64 * 9 + 5)
    for bucketed in (False, True):
        worst, median, best = examples(lengths, 64, bucketed=bucketed)
        assert (worst.name, median.name, best.name) == ("worst", "median", "best")
        assert worst.density < median.density < best.density
        for one in (worst, median, best):
            assert len(one.lengths) == 64
            assert one.density == sum(one.lengths) / (64 * max(one.lengths))
            assert list(one.lengths) == sorted(one.lengths, reverse=True)
    (single,) = examples(np.array([3, 0]), 8, bucketed=False)
    assert single.lengths == (3, 0)
