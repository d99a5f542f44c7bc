"""Permutations that are evaluated at a place: that they are permutations, and that they look like random ones."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np

from raglane.data.order.order import Permutation, key_of, shuffle


def test_every_number_comes_once() -> None:
    for count in (0, 1, 2, 5, 65_536, 65_537, 70_001, 300_000):
        places = np.arange(count)
        found = Permutation(key_of(1, count), count)(places)
        assert np.array_equal(np.sort(found), places)


def test_a_place_alone_is_the_place_among_others() -> None:
    for count in (100, 100_000, 10**15):
        permutation = Permutation(5, count)
        places = np.array([0, 7, 99, 50, count - 1])
        assert permutation(places).tolist() == [int(permutation(places[[row]])[0]) for row in range(5)]
        assert permutation(places).max() < count


def test_all_orders_of_a_few_are_as_likely() -> None:
    draws = 4000
    seen = Counter(tuple(shuffle(key_of(seed), 4).tolist()) for seed in range(draws))
    expected = draws / 24
    squares = sum((seen[order] - expected) ** 2 for order in permutations(range(4))) / expected
    # Chi-squared with 23 degrees of freedom: 49.7 is passed by chance once in a thousand lists of seeds.
    assert squares < 49.7


def _squares(one: np.ndarray, other: np.ndarray, count: int) -> float:
    """Pearson's statistic of 16 x 16 cells, about 225 +- 21 where two permutations know nothing of each other."""
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
        # A number and its place, the number beside it, one a row of the network further, and that of the epoch before.
        others = (places, np.roll(found, 1), np.roll(found, 317), before)
        statistics += [_squares(found, other, count) for other in others]
        before = found
    # A random permutation has one fixed point on average, and as many as a Poisson variable.
    assert 20 <= sum(fixed) <= 65
    assert abs(np.mean(statistics) - 225) < 10
    assert max(statistics) < 225 + 5 * 21.2
