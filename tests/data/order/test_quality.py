"""The measure of shuffling, on orders of which it is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from shuffling import Shuffling, shuffling

from raglane.data import BatchLimit, BatchSampler, EpochOrder

_LENGTHS = np.random.default_rng(0).integers(1, 1000, 20_000)


def _measured(order: EpochOrder) -> Shuffling:
    epochs = []
    for epoch in (0, 1):
        batches = BatchSampler(_LENGTHS, BatchLimit(sequences=20), order)
        batches.set_epoch(epoch)
        epochs.append(batches.whole())
    return shuffling(_LENGTHS, epochs[0], epochs[1])


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


def test_orders_are_ranked_as_they_shuffle() -> None:
    random, grouped = _measured(EpochOrder.random()), _measured(EpochOrder.grouped(pool=50))
    assert random == pytest.approx((1, 0, 1), abs=0.1)
    # 1,000 batches in 20 pools: a batch meets the twentieth part whose lengths are nearest, and no more.
    assert 0.01 < grouped.company < 0.05
    assert grouped[1:] == pytest.approx((0, 1), abs=0.1)
    noisy = _measured(EpochOrder.grouped(noise=0.2))
    assert noisy.company > 2 * grouped.company
    assert _measured(EpochOrder.sorted()).trend > 0.99
    assert _measured(EpochOrder.windows(1000)).travel < 0.1
