"""Balancing of bins, by a heap and by rounds, against the naive rule."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raglane.data.order import batches


@given(st.lists(st.integers(0, 500), max_size=200), st.integers(1, 64))
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
