"""Functions and modules of torch that accept a Ragged, and the messages of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import raglane as rl
from raglane.errors import ArgumentTypeError, ShapeError


def a_batch(*features: int) -> rl.Ragged:
    return rl.Ragged([torch.randn(length, *features) for length in (3, 0, 2)])


ELEMENTWISE: list[Callable[[Any], Any]] = [
    torch.relu,
    lambda x: F.leaky_relu(x, 0.2),
    lambda x: x * 2,
    lambda x: 1 / x,
    lambda x: x + x,
    lambda x: abs(x),
    lambda x: x == x,
    lambda x: (x > 0) & (x < 1),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: torch.clamp(x, -0.1, 0.1),
    lambda x: torch.maximum(x, torch.zeros(4)),
    lambda x: torch.arange(4.0) * x,
    lambda x: x // 2,
    lambda x: torch.zeros_like(x),
]

FEATURES: list[Callable[[Any], Any]] = [
    nn.Linear(4, 5),
    nn.LayerNorm(4),
    nn.Softmax(dim=-1),
    lambda x: torch.mean(x, -1, keepdim=True),
    lambda x: torch.cat([x, x * 2], dim=-1),
    lambda x: F.normalize(x, dim=-1),
    lambda x: torch.argmax(x, dim=-1),
    lambda x: torch.flip(x, (-1,)),
    nn.GLU(),
    nn.Dropout(0.5).eval(),
    nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
]


@pytest.mark.parametrize("function", [*ELEMENTWISE, *FEATURES])
def test_acts_on_the_values(function: Callable[[Any], Any]) -> None:
    batch = a_batch(4)
    result = function(batch)
    assert isinstance(result, rl.Ragged)
    torch.testing.assert_close(result.values, function(batch.values), equal_nan=True)
    assert result.offsets is batch.offsets


def test_embedding_and_a_whole_model() -> None:
    embedding = nn.Embedding(10, 6)
    model = nn.Sequential(embedding, nn.Dropout(0.1), nn.Linear(6, 3))
    result = model(rl.Ragged([[1, 2], [3]])).values
    assert result.shape == (3, 3)
    (gradient,) = torch.autograd.grad(result.sum(), embedding.weight)
    assert gradient.any(1).tolist() == [index in (1, 2, 3) for index in range(10)]


def test_inplace_modules_leave_the_batch_alone() -> None:
    batch = a_batch(4)
    before = batch.values.clone()
    result = nn.ReLU(inplace=True)(batch)
    assert torch.equal(batch.values, before)
    assert torch.equal(result.values, before.relu())


def test_equal_lengths_of_other_origin() -> None:
    left, right = a_batch(4), a_batch(4)
    assert torch.equal((left + right).values, left.values + right.values)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: torch.sum(r), r"Call r\.sum\(\)"),
        (lambda r: torch.softmax(r, 1), r"Call r\.softmax\(\)"),
        (lambda r: torch.mean(r, dim=-2), "counted from the end"),
        (lambda r: torch.flip(r, (0,)), r"r\.reverse\(\)"),
        (lambda r: torch.cat([r, r]), r"a\.concat\(b\)"),
        (lambda r: torch.matmul(r, torch.ones(4)), "linear"),
        (lambda r: F.cross_entropy(r, torch.zeros(5).long()), r"rl\.nn\.losses\.cross_entropy"),
        (lambda r: F.conv1d(r, torch.ones(1, 1, 1)), r"r\.to_padded\(\)"),
        (lambda r: torch.add(r, 1, out=torch.empty(5, 4)), "immutable"),
        (lambda r: F.linear(torch.ones(4), r), "only as its input"),
        (lambda r: F.layer_norm(r, (5, 4)), "2 feature dimension"),
        (lambda r: nn.LSTM(4, 2)(r), r"rl\.nn"),
        (lambda r: nn.Linear(1, 2)(r.map(lambda v: v[:, 0])), "unsqueeze"),
        (lambda r: r.shape, r"r\.values"),
    ],
)
def test_refuses_with_advice(call: Callable[[rl.Ragged], Any], says: str) -> None:
    with pytest.raises((ArgumentTypeError, AttributeError), match=says):
        call(a_batch(4))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: r + a_batch(4)[:1], "the same lengths"),
        (lambda r: r + rl.Ragged([torch.ones(3, 4), torch.ones(2, 4), torch.ones(0, 4)]), "length 2 for sequence 1"),
        (lambda r: r + torch.ones(5, 4), r"r\.spread"),
        (lambda r: r * r.map(lambda v: v.sum(-1)), "unsqueeze"),
        (lambda r: r.map(lambda v: v[1:]), "one row for each of the 5"),
    ],
)
def test_operands_that_do_not_fit(call: Callable[[rl.Ragged], Any], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        call(a_batch(4))
