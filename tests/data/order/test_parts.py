"""Sizes of batches, parts of equal work, permutations, and the measure of shuffling of the
benchmarks.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from shuffling import shuffling

from raglane.data import BatchLimit
from raglane.data.order import batches
from raglane.data.order.limit import pieces_of
from raglane.data.order.order import Permutation, key_of, shuffle
from raglane.errors import ArgumentError, ArgumentTypeError

_LENGTHS = st.lists(st.integers(0, 12), max_size=40)
_NUMBER = st.one_of(st.none(), st.integers(1, 40))


def _fits(limit: BatchLimit, lengths: list[int]) -> bool:
    return (
        (limit.sequences is None or len(lengths) <= limit.sequences)
        and (limit.elements is None or sum(lengths) <= limit.elements)
        and (limit.padded is None or len(lengths) * max(lengths) <= limit.padded)
    )


def _naive(limit: BatchLimit, lengths: list[int]) -> list[list[int]]:
    """One sequence after the other, into the last batch or a new one."""
    batches: list[list[int]] = []
    for length in lengths:
        if batches and _fits(limit, [*batches[-1], length]):
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def _cut(limit: BatchLimit, lengths: list[int], descending: bool = False) -> list[list[int]]:
    starts = limit.cut(np.array(lengths, np.int64), descending=descending).tolist()
    return [lengths[start:end] for start, end in pairwise([*starts, len(lengths)])]


@given(_LENGTHS, st.booleans(), _NUMBER, _NUMBER, _NUMBER)
@example([2] * 9, False, None, 5, None)
@example([1] * 9, False, None, 2, None)
def test_batches_are_as_large_as_can_be(
    lengths: list[int],
    descending: bool,
    sequences: int | None,
    elements: int | None,
    padded: int | None,
) -> None:
    if sequences is elements is padded is None:
        sequences = 3
    if descending:
        lengths = sorted(lengths, reverse=True)
    limit = BatchLimit(sequences, elements, padded)
    batches, naive = _cut(limit, lengths, descending), _naive(limit, lengths)
    assert [length for batch in batches for length in batch] == lengths
    assert len(batches) == len(naive)
    assert batches[:-2] == naive[:-2]
    assert all(_fits(limit, batch) or len(batch) == 1 for batch in batches)
    if len(batches) > 1:
        # The last two are even: one more would leave the last larger, or with more sequences.
        one, other = batches[-2:]
        if one == naive[-2]:
            assert len(one) == 1 or not _is_smaller(limit, one[-1:] + other, one[:-1])
        else:
            assert _is_smaller(limit, other, one)
            assert not _is_smaller(limit, one[-1:] + other, one[:-1])


def _is_smaller(limit: BatchLimit, one: list[int], other: list[int]) -> bool:
    """Return True if a batch is at most as large as another, by the limit and in sequences."""

    def share(lengths: list[int]) -> float:
        sizes = (len(lengths), sum(lengths), len(lengths) * max(lengths, default=0))
        mosts = (limit.sequences, limit.elements, limit.padded)
        return max(size / most for size, most in zip(sizes, mosts, strict=True) if most is not None)

    return share(one) <= share(other) and len(one) <= len(other) and len(other) > 0


@given(_LENGTHS, st.integers(1, 15))
def test_pieces(lengths: list[int], longest: int) -> None:
    owners, found = pieces_of(np.array(lengths, np.int64), longest)
    wanted = []
    for row, length in enumerate(lengths):
        rest = length
        while rest > longest:
            wanted.append((row, longest))
            rest -= longest
        wanted.append((row, rest))
    assert list(zip(owners.tolist(), found.tolist(), strict=True)) == wanted


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ArgumentError, "limit must be .*got no number"),
        ({"sequences": 0}, ArgumentError, "sequences must be .*got 0"),
        ({"elements": 2.0}, ArgumentTypeError, "elements must be .*got 2.0"),
        ({"padded": True}, ArgumentTypeError, "padded must be .*got True"),
        ({"elements": 3, "too_long": "keep"}, ArgumentError, "too_long must be .*got 'keep'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BatchLimit(**arguments)


@example([0, 0], 2)  # a tie of two parts
@given(st.lists(st.integers(0, 9), max_size=90), st.integers(1, 30))
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


def test_every_number_comes_once() -> None:
    for count in (0, 1, 2, 5, 65_536, 65_537, 70_001, 300_000):
        places = np.arange(count)
        assert np.array_equal(np.sort(Permutation(key_of(1, count), count)(places)), places)


def test_a_place_alone_is_the_place_among_others() -> None:
    for count in (100, 100_000, 10**15):
        permutation = Permutation(5, count)
        places = np.array([0, 7, 99, 50, count - 1])
        assert permutation(places).tolist() == [
            int(permutation(places[[row]])[0]) for row in range(5)
        ]
        assert permutation(places).max() < count


def test_all_orders_of_a_few_are_as_likely() -> None:
    draws = 4000
    seen = Counter(tuple(shuffle(key_of(seed), 4).tolist()) for seed in range(draws))
    expected = draws / 24
    squares = sum((seen[order] - expected) ** 2 for order in permutations(range(4))) / expected
    # Chi-squared with 23 degrees of freedom: 49.7 is passed by chance once in a thousand lists of
    # seeds.
    assert squares < 49.7


def _squares(one: np.ndarray, other: np.ndarray, count: int) -> float:
    """Pearson's statistic of 16 x 16 cells, about 225 +- 21 where two permutations know nothing of
    each other.
    """
    seen, _, _ = np.histogram2d(one, other, bins=16, range=((0, count), (0, count)))
    return float((seen**2).sum() / (len(one) / 256) - len(one))


def test_a_network_is_like_a_random_permutation() -> None:
    count = 100_003
    places = np.arange(count)
    fixed, statistics = [], []
    before = places
    for epoch in range(40):
        found = Permutation(key_of(3, epoch), count)(places)
        fixed.append(int((found == places).sum()))
        # A number and its place, the number beside it, one a row of the network further, and that
        # of the epoch before.
        others = (places, np.roll(found, 1), np.roll(found, 317), before)
        statistics += [_squares(found, other, count) for other in others]
        before = found
    # A random permutation has one fixed point on average, and as many as a Poisson variable.
    assert 20 <= sum(fixed) <= 65
    assert abs(np.mean(statistics) - 225) < 10
    assert max(statistics) < 225 + 5 * 21.2


def test_pairs_are_counted_as_a_loop_counts_them() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        count = int(random.integers(3, 30))
        lengths = random.integers(1, 9, count)
        epochs = []
        for _ in range(2):
            ends = np.unique(np.append(random.integers(1, count, 4), count))
            epochs.append((random.permutation(count), np.append(0, ends)))
        together = []
        for rows, bounds in epochs:
            batches = [set(rows[start:end].tolist()) for start, end in pairwise(bounds)]
            together.append({(a, b) for batch in batches for a in batch for b in batch if a < b})
        both, pairs = len(together[0] & together[1]), count * (count - 1) / 2
        wanted = len(together[1]) / pairs * len(together[0]) / both if both else 1.0
        assert shuffling(lengths, *epochs).company == pytest.approx(wanted)
