from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import raglane as rl
from raglane.data import BatchLimit
from raglane.planner.calibration import Calibration
from raglane.planner.rows import Row, largest_batch

BEST = Row("cpu", "lanes", 8, None, False, "float32", 1, 10, 1000, 0, 1e-3, 1e-4, 1e-4, 1e-4, 1e-4, 5000, 1.0, False)
LENGTHS = torch.tensor([3, 5, 0, 12])


def _found(memory: float, memory_of: list[float], best: Row = BEST, *, runs: bool = False) -> tuple[int, int | None]:
    known = Calibration({}, {best.way: np.array(memory_of)}, {})
    return largest_batch(rl.nn.LSTM(3, 4), LENGTHS, best, known, memory, 1000, runs=runs)


def test_memory_follows_a_straight_line() -> None:
    # 1,000 of weights, 500 per call, 40 per element and 50 per sequence, of which one has 5 elements on average.
    assert _found(11_500, [500, 40, 50]) == (200, None)
    assert _found(1000, [500, 40, 50]) == (0, None)


def test_padding_takes_memory_too() -> None:
    padded = replace(BEST, backend="torch", schedule="padded", elements=2000, waste=1000)
    assert _found(11_500, [500, 20, 50], padded) == (200, None)


def test_no_limit_of_memory_is_no_error() -> None:
    assert _found(float("inf"), [0, 0, 0])[0] == 2**62


def test_what_was_found_is_run() -> None:
    layer = rl.nn.LSTM(3, 4)
    found = rl.plan([3, 5, 9, 12] * 20, layer, memory=2 << 20, batch_sizes=[8], threads=[1], backends=["cpu"])
    assert found.most_bytes is not None
    assert found.most_elements > 1000
    assert found.memory_limit == BatchLimit(elements=found.most_elements)
    assert replace(found, ranks=3).memory_limit == BatchLimit(elements=3 * found.most_elements)
    assert found.most_bytes == pytest.approx(2 << 20, rel=0.1)
    assert f"up to {found.most_elements:,} elements (one was run: " in str(found)


def test_what_would_take_too_long_is_not_run() -> None:
    slow = replace(BEST, train_seconds=1e6)
    assert _found(2 << 20, [500, 40, 50], slow, runs=True)[1] is None
    assert _found(1e15, [500, 40, 50], runs=True)[1] is None
    # 200 elements with as much padding: 20 s and 40 s, at so many for each that exists.
    padded = replace(BEST, backend="torch", schedule="padded", elements=2000, waste=1000)
    held = [_found(11_500, [500, 20, 50], replace(padded, train_seconds=s), runs=True)[1] for s in (100.0, 200.0)]
    assert held[0] is not None
    assert held[1] is None
