"""A hundred random cells, each against its equations: values and the gradients of everything."""

from __future__ import annotations

import copy

import pytest
import torch

from raglane.kernels.dispatch import BACKENDS
from random_cells import Engine, RandomCell, ask, difference, engine, naive

CELLS = range(100)
# The reference with another order of computing than the naive loop's, and whatever runs programs here.
ENGINES: dict[str, Engine] = {
    "reference": engine(backend="reference", schedule="packed"),
    **{name: engine(backend=name) for name in BACKENDS if name == "program"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_hundred_random_cells(name: str) -> None:
    faults = []
    for seed in CELLS:
        fault = difference(ask(seed, ENGINES[name]), ask(seed, naive))
        if fault is not None:
            faults.append(f"{RandomCell(seed)}\n{fault}")
    assert not faults, "\n\n".join(faults[:3])


def test_they_are_of_every_kind() -> None:
    """The grammar draws all that it can, and cells of one, two and three states."""
    drawn = [RandomCell(seed) for seed in CELLS]
    text = "\n".join(map(str, drawn))
    kinds = ["linear", "linear again", "heads", "gate(", "norm of 1", "norm of 2", "softmax", "where", "block 2", " | "]
    for kind in (*kinds, "buffer", "vector *", "vector +", "prepared", "learned", "leaky_relu", "by largest", "rsqrt"):
        assert kind in text, kind
    assert {len(cell.sizes) for cell in drawn} == {1, 2, 3}
    assert any(hasattr(part, "parametrizations") for cell in drawn for part in cell.parts)


def test_a_number_decides_a_cell() -> None:
    one, two = RandomCell(5), RandomCell(5)
    assert str(one) == str(two) != str(RandomCell(6))
    assert all(torch.equal(mine, other) for mine, other in zip(one.parameters(), two.parameters(), strict=True))
    with torch.no_grad():
        next(one.parameters()).add_(1)
    twin = copy.deepcopy(one)
    x, state = torch.ones(2, one.input_size, dtype=torch.float64), one.initial_state(2)
    assert torch.equal(twin.step(twin.prepare(x, x), state)[0], one.step(one.prepare(x, x), state)[0])


def test_a_difference_is_seen() -> None:
    answer = ask(3, naive)
    assert difference(answer, answer) is None
    for place, name in ((0, "result 0"), (-1, "result")):
        results = [part.clone() for part in answer.results]
        results[place][-1, 0] += 1e-8
        assert name in str(difference(answer._replace(results=results), answer))
    for name, gradient in answer.gradients.items():
        other = gradient.clone()
        other.view(-1)[0] += 1 + 1e-6 * float(gradient.abs().max())
        assert str(difference(answer._replace(gradients=answer.gradients | {name: other}), answer)).startswith(name)
