"""Balancing of bins, by a heap and by rounds, against the naive rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raglane.data.order import batches


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12))
def test_each_goes_to_the_part_with_the_least(given: list[int], parts: int) -> None:
    sizes = np.sort(np.array(given, np.int64))[::-1]
    sums, wanted, before = [0] * parts, [], []
    for size in sizes.tolist():
        part = sums.index(min(sums))
        wanted.append(part)
        before.append(sums[part])
        sums[part] += size
    for way in (batches._by_heap, batches._by_rounds, batches.balance):
        chosen, had = way(sizes, parts)
        assert chosen.tolist() == wanted
        assert had.tolist() == before


@pytest.mark.parametrize("bins", [23, 24, 64])
def test_rounds_and_a_heap_choose_the_same_bins(bins: int) -> None:
    sizes = np.sort(np.random.default_rng(0).integers(1, 500, 3000))[::-1]
    for rounds, heap in zip(batches._by_rounds(sizes, bins), batches._by_heap(sizes, bins), strict=True):
        assert np.array_equal(rounds, heap)
