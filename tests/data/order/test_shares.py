"""Work shared out: both ways against the rule, stated naively."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raglane.data.order import batches as shares


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 12))
def test_each_goes_to_the_part_with_the_least(given: list[int], parts: int) -> None:
    sizes = np.sort(np.array(given, np.int64))[::-1]
    sums, wanted, before = [0] * parts, [], []
    for size in sizes.tolist():
        part = sums.index(min(sums))
        wanted.append(part)
        before.append(sums[part])
        sums[part] += size
    for way in (shares._by_heap, shares._by_rounds, shares.balance):
        chosen, had = way(sizes, parts)
        assert chosen.tolist() == wanted
        assert had.tolist() == before


def test_many_parts_are_shared_out_by_rounds() -> None:
    sizes = np.sort(np.random.default_rng(0).integers(1, 500, 3000))[::-1]
    for parts in (23, 24, 64):
        chosen, before = shares.balance(sizes, parts)
        wanted, had = shares._by_heap(sizes, parts)
        assert np.array_equal(chosen, wanted)
        assert np.array_equal(before, had)
