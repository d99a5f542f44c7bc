"""Which torch functions and modules take a Ragged, and what the others say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import raglane as rl
from raglane.errors import ArgumentTypeError, RaglaneError, ShapeError


def a_batch(*features: int) -> rl.Ragged:
    return rl.Ragged([torch.randn(length, *features) for length in (3, 0, 2)])


ELEMENTWISE: list[Callable[[Any], Any]] = [
    torch.relu,
    torch.tanh,
    F.gelu,
    lambda x: F.leaky_relu(x, 0.2),
    lambda x: x * 2,
    lambda x: 2 - x,
    lambda x: x / 3,
    lambda x: 1 / x,
    lambda x: x**2,
    lambda x: x + x,
    lambda x: -x,
    lambda x: abs(x),
    lambda x: x > 0,
    lambda x: x == x,
    lambda x: ~(x > 0),
    lambda x: (x > 0) & (x < 1),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: torch.clamp(x, -0.1, 0.1),
    lambda x: torch.maximum(x, torch.zeros(4)),
    lambda x: torch.arange(4.0) * x,
    lambda x: torch.tensor(2.0) - x,
    lambda x: x % 2,
    lambda x: x // 2,
    lambda x: torch.zeros_like(x),
]

FEATURES: list[Callable[[Any], Any]] = [
    nn.Linear(4, 5),
    nn.LayerNorm(4),
    nn.RMSNorm(4),
    nn.Softmax(dim=-1),
    lambda x: torch.log_softmax(x, -1),
    lambda x: torch.sum(x, dim=-1),
    lambda x: torch.mean(x, -1, keepdim=True),
    lambda x: torch.cat([x, x * 2], dim=-1),
    lambda x: torch.cat((x, x), -1),
    lambda x: F.normalize(x, dim=-1),
    lambda x: torch.argmax(x, dim=-1),
    lambda x: torch.flip(x, (-1,)),
    nn.GLU(),
    nn.PReLU(),
    nn.Dropout(0.5).eval(),
    nn.Identity(),
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
    model = nn.Sequential(nn.Embedding(10, 6), nn.Dropout(0.1), nn.Linear(6, 3))
    tokens = rl.Ragged([torch.tensor([1, 2]), torch.tensor([3])])
    result = model(tokens)
    assert result.values.shape == (3, 3)
    result.values.sum().backward()
    embedding = model[0]
    assert isinstance(embedding, nn.Embedding)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.abs().sum() > 0


def test_gradients_flow_through_operators() -> None:
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def function(flat: torch.Tensor) -> torch.Tensor:
        batch = rl.Ragged.from_flat(flat, lengths=[3, 2])
        applied: Any = torch.tanh(cast(Any, batch * 2 + torch.ones(2, dtype=torch.float64)))
        return cast(torch.Tensor, applied.values)

    assert torch.autograd.gradcheck(function, values)


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
        (lambda r: torch.softmax(r, 0), "counted from the end"),
        (lambda r: torch.mean(r, dim=-2), "counted from the end"),
        (lambda r: torch.flip(r, (0,)), r"r\.reverse\(\)"),
        (lambda r: torch.roll(r, 1), r"r\.shift"),
        (lambda r: torch.cat([r, r]), r"a\.concat\(b\)"),
        (lambda r: torch.stack([r, r]), "join batches"),
        (lambda r: torch.matmul(r, torch.ones(4)), "linear"),
        (lambda r: torch.reshape(r, (-1,)), r"r\.map"),
        (lambda r: F.cross_entropy(r, torch.zeros(5).long()), r"rl\.nn\.losses\.cross_entropy"),
        (lambda r: F.conv1d(r, torch.ones(1, 1, 1)), r"r\.to_padded\(\)"),
        (lambda r: torch.relu_(r), "Ragged"),
        (lambda r: torch.add(r, 1, out=torch.empty(5, 4)), "immutable"),
        (lambda r: F.linear(torch.ones(4), r), "only as its input"),
        (lambda r: F.layer_norm(r, (5, 4)), "2 feature dimension"),
        (lambda r: nn.LSTM(4, 2)(r), r"rl\.nn"),
        (lambda r: r.shape, r"r\.values"),
        (lambda r: r.unsqueeze(0), r"r\.map"),
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
    ],
)
def test_refuses_what_does_not_fit(call: Callable[[rl.Ragged], Any], says: str) -> None:
    with pytest.raises(ShapeError, match=says) as caught:
        call(a_batch(4))
    assert isinstance(caught.value, RaglaneError)


def test_linear_needs_a_feature() -> None:
    with pytest.raises(ArgumentTypeError, match="unsqueeze"):
        nn.Linear(1, 2)(a_batch())


def test_map_must_keep_the_elements() -> None:
    with pytest.raises(ShapeError, match="one row for each of the 5"):
        a_batch(4).map(lambda values: values[1:])
