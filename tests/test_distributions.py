"""Distributions of a Ragged against those of torch on each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raglane as rl
from raglane.errors import ArgumentTypeError, ShapeError

LENGTHS = [3, 0, 5, 1]


def drawn(*features: int) -> rl.Ragged:
    values = torch.randn(sum(LENGTHS), *features, dtype=torch.float64, requires_grad=True)
    return rl.Ragged.from_flat(values, lengths=LENGTHS)


def parameters(name: str) -> dict[str, rl.Ragged]:
    if name == "Normal":
        return {"loc": drawn(2), "scale": drawn(2).exp()}
    return {"logits": drawn(4) if name == "Categorical" else drawn()}


@pytest.mark.parametrize("name", ["Categorical", "Normal", "Bernoulli"])
def test_each_sequence_has_the_distribution_of_torch(name: str) -> None:
    given = parameters(name)
    own: Any = getattr(rl.distributions, name)(**given)
    torch.manual_seed(3)
    value = own.sample()
    assert value.lengths.tolist() == LENGTHS
    assert not value.requires_grad
    results = {"log_prob": own.log_prob(value), "entropy": own.entropy(), "variance": own.variance}
    for index in (0, 2, 3):  # torch's check of an empty Categorical fails
        one: Any = getattr(torch.distributions, name)(
            **{key: batch[index] for key, batch in given.items()}
        )
        expected = {
            "log_prob": one.log_prob(value[index]),
            "entropy": one.entropy(),
            "variance": one.variance,
        }
        for key, result in results.items():
            torch.testing.assert_close(result[index], expected[key], equal_nan=True)
    leaves = [batch.values for batch in given.values()]
    for gradient in torch.autograd.grad(results["log_prob"].sum(), leaves):
        assert gradient.any()


def test_parameters_are_broadcast() -> None:
    loc, scale = drawn(2), torch.rand(4, 1, 2, dtype=torch.float64) + 0.5
    own = rl.distributions.Normal(loc, scale)
    each = [torch.distributions.Normal(rows, scale[index]) for index, rows in enumerate(loc)]
    for index, one in enumerate(each):
        torch.testing.assert_close(own.log_prob(0.3)[index], one.log_prob(torch.tensor(0.3)))
    drawn_twice = rl.distributions.Normal(loc, 2).rsample()
    (gradient,) = torch.autograd.grad(drawn_twice.sum(), loc.values)
    assert torch.equal(gradient, torch.ones_like(gradient))


def test_no_elements() -> None:
    policy = rl.distributions.Categorical(logits=drawn(4)[:, :0])
    assert policy.log_prob(policy.sample()).lengths.tolist() == [0, 0, 0, 0]


def test_mistakes() -> None:
    policy = rl.distributions.Categorical(logits=drawn(4))
    with pytest.raises(ShapeError, match="value must be a batch of 4 sequences"):
        policy.log_prob(rl.Ragged([[1, 2]]))
    with pytest.raises(ArgumentTypeError, match=r"Call torch\.distributions\.Normal for tensors"):
        rl.distributions.Normal(torch.zeros(3), 1.0)
    with pytest.raises(ShapeError, match="parameters must be"):
        rl.distributions.Normal(drawn(2), drawn(2)[:, 1:])
    with pytest.raises(AttributeError, match="mood"):
        policy.mood  # noqa: B018
    for make in (
        lambda: torch.distributions.Normal(drawn(2), 1.0),
        lambda: torch.distributions.Categorical(logits=drawn(4)),
    ):
        with pytest.raises((ArgumentTypeError, AttributeError), match=r"rl\.distributions"):
            make()


@pytest.mark.parametrize("options", [{}, {"validate_args": False}])
@pytest.mark.parametrize("name", ["Categorical", "Normal", "Bernoulli"])
def test_those_of_torch_name_ours(name: str, options: dict[str, bool]) -> None:
    given = parameters(name)
    message = rf"^[^\n]+because[^\n]+[Uu]se[^\n]*{name}[^\n]+rl\.distributions[^\n]+$"
    with pytest.raises((ArgumentTypeError, AttributeError), match=message):
        getattr(torch.distributions, name)(**given, **options)
    if name == "Normal":
        with pytest.raises(ArgumentTypeError, match=message):
            torch.distributions.Normal(0.0, given["scale"], **options)
