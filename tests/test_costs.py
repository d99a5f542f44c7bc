"""rl.cost: the examples that explain the problem, every kind of lengths, and every wrong one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.schedules import Cost, cost


def test_multiplications_and_additions() -> None:
    costs = cost([9, 8, 6, 4, 3, 2])
    for name in ("padded", "masked"):
        assert (costs[name].multiplications, costs[name].additions) == (54, 48)
    for name in ("each", "packed", "lanes"):
        assert (costs[name].multiplications, costs[name].additions) == (32, 26)
    assert {name: one.steps for name, one in cost([9, 8, 6, 4, 3, 2], lanes=2).items()} == {
        "each": 32,
        "padded": 9,
        "masked": 9,
        "packed": 9,
        "lanes": 16,
    }


@given(lengths=st.lists(st.integers(0, 9), max_size=12))
def test_costs_are_those_of_the_product_with_a_column(lengths: list[int]) -> None:
    longest = max(lengths, default=0)
    real = [max(length - 1, 0) for length in lengths]
    costs = cost(lengths)
    assert costs["packed"].multiplications == sum(lengths)
    assert costs["packed"].additions == sum(real)
    assert costs["padded"].multiplications == longest * len(lengths)
    assert costs["padded"].additions == max(longest - 1, 0) * len(lengths)
    for one in costs.values():
        assert one.waste == one.elements - sum(lengths)
        assert one.elements == one.multiplications


@pytest.mark.parametrize(
    "lengths",
    [
        (4, 0, 2),
        np.array([4, 0, 2], dtype=np.uint8),
        *(torch.tensor([4, 0, 2]).to(dtype) for dtype in (torch.uint8, torch.int64, torch.uint32)),
        SimpleNamespace(lengths=np.array([4, 0, 2])),
        [torch.tensor(4), torch.tensor(0), torch.tensor(2)],
        rl.Ragged.from_flat(torch.zeros(6, 3), lengths=[4, 0, 2]),
    ],
)
def test_lengths_of_every_kind(lengths: Any) -> None:
    assert cost(lengths) == cost([4, 0, 2])


@pytest.mark.parametrize(
    "lengths", [[], (), np.array([]), torch.tensor([], dtype=torch.int32), [0], [0, 0]]
)
def test_nothing_costs_nothing(lengths: Any) -> None:
    for one in cost(lengths).values():
        assert (one.steps, one.elements, one.waste, one.multiplications, one.additions) == (
            0,
            0,
            0,
            0,
            0,
        )


@pytest.mark.parametrize(
    ("lengths", "kind", "words"),
    [
        ([3, -1, 2], ArgumentError, "lengths must be at least 0, got -1 at index 1"),
        ([2**62] * 4, ArgumentError, "64-bit"),
        ([3.0, 1.0], ArgumentTypeError, r"lengths must be integers.*, got torch\.float32"),
        ([[3, 1], [2, 2]], ShapeError, r"lengths must be .*got shape \(2, 2\)"),
        (5, ShapeError, r"lengths must be .*got shape \(\)"),
        ("3, 1", ArgumentTypeError, "lengths must be .*got a str that is not an array of numbers"),
        (None, ArgumentTypeError, "lengths must be .*got a NoneType"),
        ([torch.zeros(3, 2), torch.zeros(1, 2)], ArgumentTypeError, r"rl\.Ragged"),
    ],
)
def test_wrong_lengths(lengths: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        cost(lengths)


def test_repr_reads_well() -> None:
    assert repr(cost([1200, 1])["padded"]) == (
        "Cost(padded: 1,200 steps, 2,400 elements of which 1,199 waste, 2,400 multiplications, 2,398 additions)"
    )
    with pytest.raises(AttributeError):
        cost([1])["padded"].steps = 3  # type: ignore[misc]
    assert isinstance(cost([1])["lanes"], Cost)
