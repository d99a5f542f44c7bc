"""A row of a plan against sums that are done by hand: a call takes as many milliseconds as rows are computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from raglane.data import BatchLimit
from raglane.planner.calibration import Calibration
from raglane.planner.model import Way
from raglane.planner.probe import MODES
from raglane.planner.rows import Epoch, Row, row_of

PADDED, PACKED = Way("reference", "padded", "float32", 1), Way("reference", "packed", "float32", 1)
# Batches of two sequences each: 4, 8, 20 and 40 elements padded, of which 3, 7, 16 and 24 exist.
BATCHES = ([2, 1], [4, 3], [10, 6], [20, 4])


def _row(way: Way, weights: list[float], *, factor: float = 1.0, ranks: int = 1, layer: int = 0) -> Row:
    lengths = [torch.tensor(batch) for batch in BATCHES]
    padded = round(sum(w * len(b) * max(b) for w, b in zip(weights, BATCHES, strict=True)))
    real = round(sum(w * sum(b) for w, b in zip(weights, BATCHES, strict=True)))
    epoch = Epoch(tuple(lengths), np.array(weights), real, padded, round(sum(weights)))
    known = Calibration(
        {(way, mode): 1e-3 / (1 + place) * (np.arange(10) == 5) for place, mode in enumerate(MODES)},
        {way: np.array([7.0, 100.0, 0.0])},
        {(way, mode): 1.0 for mode in MODES},
    )
    return row_of(way, BatchLimit(sequences=2), False, epoch, known, factor=factor, ranks=ranks, weights=layer)


def test_a_row_adds_up_its_batches() -> None:
    row = _row(PADDED, [5, 3, 1, 1])
    assert (row.batches, row.elements, row.waste) == (10, 104, 28)
    assert row.train_seconds == pytest.approx(0.104)
    assert row.infer_seconds == pytest.approx(0.052)
    packed = _row(PACKED, [5, 3, 1, 1])
    assert (packed.batches, packed.elements, packed.waste) == (10, 76, 0)
    assert packed.train_seconds == pytest.approx(0.076)


@pytest.mark.parametrize("way", [PADDED, PACKED], ids=str)
def test_a_part_of_a_list_stands_for_all_of_it(way: Way) -> None:
    """What belongs to an epoch grows with the list, and what belongs to a step does not."""
    part, whole = _row(way, [5, 3, 1, 1]), _row(way, [5, 3, 1, 1], factor=2.5)
    for name in ("batches", "elements", "waste", "train_seconds", "infer_seconds"):
        assert getattr(whole, name) == pytest.approx(2.5 * getattr(part, name)), name
    for name in ("step_p50", "step_p90", "step_max", "peak_bytes", "rank_spread"):
        assert getattr(whole, name) == getattr(part, name), name


def test_steps_are_quantiles_of_all_batches() -> None:
    """A batch counts as often as it stands for others, and a step that exists is told, no mean of several."""
    for weights, milliseconds in (
        ([5.0, 3.0, 1.0, 1.0], [4, 20, 40]),
        ([4.0, 3.0, 1.0, 2.0], [8, 40, 40]),
        ([1.0, 1.0, 1.0, 97.0], [40, 40, 40]),
        ([97.0, 1.0, 1.0, 1.0], [4, 4, 40]),
    ):
        row = _row(PADDED, weights)
        assert [1000 * s for s in (row.step_p50, row.step_p90, row.step_max)] == pytest.approx(milliseconds), weights


def test_memory_is_that_of_the_largest_batch_and_the_weights() -> None:
    assert _row(PADDED, [5, 3, 1, 1], layer=1000).peak_bytes == 1000 + 7 + 100 * 40
    assert _row(PACKED, [5, 3, 1, 1], layer=1000).peak_bytes == 1000 + 7 + 100 * 24


def test_the_slowest_of_several_is_drawn_as_often_as_it_comes() -> None:
    weights = np.array([99.0, 0.0, 0.0, 1.0])
    row = _row(PADDED, weights.tolist(), ranks=2)
    # Of two batches one is long in 2 of 100 steps: (0.98 * 4 + 0.02 * 40) / (0.99 * 4 + 0.01 * 40) = 1.08.
    assert row.rank_spread == pytest.approx(1.08, abs=0.05)
    assert row.rank_seconds == row.train_seconds * row.rank_spread
    assert replace(row, rank_spread=2.0).rank_seconds == 2 * row.train_seconds
    assert _row(PADDED, weights.tolist()).rank_spread == 1
