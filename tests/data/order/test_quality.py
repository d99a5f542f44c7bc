"""The measure of shuffling of the benchmarks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from shuffling import shuffling


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
