"""The table of docs/add-a-cell.md: who runs a step, whether the schedule changes its numbers, what is said of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from raglane.programs.graph import DEPENDS
from raglane.schedules import SCHEDULES

pytestmark = pytest.mark.skipif(bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels")

D, H = 3, 4
PAGE = Path(__file__).parents[2] / "docs" / "add-a-cell.md"


class Cell(nn.Module):
    def __init__(self, input_size: int = D, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.calls = input_size, hidden_size, 0
        self.lin, self.inner = nn.Linear(input_size, hidden_size), nn.Linear(input_size, hidden_size)
        self.norm = nn.BatchNorm1d(hidden_size, track_running_stats=False)
        self.register_buffer("count", torch.zeros(()))
        nn.init.ones_(self.lin.bias)


def _counted(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.calls += 1
    new: Tensor = 0.5 * h + m.lin(x) * m.calls
    return new


def _counted_in_a_buffer(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.count += 1
    new: Tensor = 0.5 * h + m.lin(x) * m.count
    return new


def _hooked() -> Cell:
    made = Cell()
    made.inner.register_forward_hook(lambda *given: 2 * given[2])
    return made


def _holding() -> Cell:
    made: Any = Cell()
    made.drawn = random.Random(0)
    return made  # type: ignore[no-any-return]


Step = Callable[[Any, Tensor, Tensor], Tensor]
STEPS: dict[str, tuple[Callable[[], Cell], Step]] = {
    "computes row by row": (Cell, lambda m, x, h: (h + m.lin(x)).tanh()),
    "writes over its state or its input": (Cell, lambda m, x, h: h.mul_(0.5).add_(m.lin(x.mul_(2)))),
    "makes shapes of `x_t.shape[0]`": (Cell, lambda m, x, h: 0.5 * h.view(x.shape[0], 2, 2).flatten(1) + m.lin(x)),
    "has an operation that no program has": (Cell, lambda m, x, h: (h + m.lin(x)).atan()),
    "has a part without gradients": (Cell, lambda m, x, h: 0.5 * h + torch.no_grad()(torch.tanh)(m.lin(x))),
    "has hooks on an inner module": (_hooked, lambda m, x, h: 0.5 * h + m.inner(x)),
    "decides by a number of its parameters": (Cell, lambda m, x, h: h + m.lin(x) if m.lin.bias[0] > 0 else h),
    "holds what may change unseen": (_holding, lambda m, x, h: (h + m.lin(x)).tanh()),
    "takes a mean over the batch": (Cell, lambda m, x, h: 0.5 * h + m.lin(x - x.mean(0))),
    "normalises over the batch": (Cell, lambda m, x, h: 0.5 * h + m.norm(torch.cat([m.lin(x), h * 0]))[: len(h)]),
    "decides by a number of the batch": (Cell, lambda m, x, h: 0.5 * h + m.lin(x) * (2 if x[0, 0].item() > 0 else 1)),
    "decides by the number of rows": (Cell, lambda m, x, h: 0.5 * h + m.lin(x) if x.shape[0] > 2 else h),
    "counts its calls": (Cell, _counted),
    "counts its calls in a buffer": (Cell, _counted_in_a_buffer),
    "draws random numbers": (Cell, lambda m, x, h: 0.5 * h + m.lin(x + torch.randn_like(x))),
}


def rows() -> dict[str, list[str]]:
    """The table, by its first column."""
    lines = PAGE.read_text().partition("| a step that |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def test_the_table_has_all_steps() -> None:
    assert list(rows()) == list(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_what_the_table_says(name: str) -> None:
    make, step = STEPS[name]
    runs_as, on_all, said = rows()[name]

    def both(module: Any, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = step(module, x_t, state)
        return state, state

    batch = rl.Ragged([torch.randn(length, D) for length in (5, 0, 1, 3, 4)])
    torch.manual_seed(1)
    cell: Any = make()
    cell.__class__ = type("Own", (Cell,), {"step": both})
    choice = rl.explain(rl.nn.Recurrent(cell), batch)
    assert {"program": "a program", "reference": "plain torch"}[choice.backend] == runs_as
    assert said.strip("`") in choice.reason
    assert (DEPENDS in choice.reason) == (on_all == "differ")
    found = []
    for schedule in SCHEDULES:
        torch.manual_seed(2)
        cell.calls = 0
        cell.count.zero_()
        with rl.use_backend(backend="reference", schedule=schedule):
            found.append(rl.nn.Recurrent(cell)(batch)[0].values.detach())
    if runs_as == "a program":
        found.append(rl.nn.Recurrent(cell)(batch)[0].values.detach())
    is_equal = all(torch.allclose(part, found[0], atol=1e-5) for part in found)
    assert is_equal == (on_all == "equal")
