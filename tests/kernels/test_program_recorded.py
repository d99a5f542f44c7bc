"""Steps that write in place, and the results of a program that require gradients, as in plain torch."""

# ruff: noqa: ARG005 (a step has its arguments, whether it reads them or not)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl

pytestmark = pytest.mark.skipif(bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels")

D, H = 3, 4
Step = Callable[[Any, Tensor, Any], Any]


class Cell(nn.Module):
    def __init__(self, input_size: int = D, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.lin = nn.Linear(input_size, hidden_size, dtype=torch.float64)


class Two(Cell):
    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, H, dtype=torch.float64), torch.zeros(batch_size, H, dtype=torch.float64)


def _kept(m: Any, x: Tensor, h: Tensor) -> Any:
    before = h.clone()
    h.mul_(0.5).add_(m.lin(x))
    return before, h


def _columns(m: Any, x: Tensor, h: Tensor) -> Any:
    h[:, :2] += m.lin(x)[:, :2]
    h.view(-1).mul_(0.5)
    return h, h.clone().mul_(0.5)


def _ungraded(m: Any, x: Tensor, h: Tensor) -> Any:
    with torch.no_grad():
        h.mul_(0.5)
    h = h + m.lin(x)
    return h, h


def _input(m: Any, x: Tensor, h: Tensor) -> Any:
    x.mul_(2)
    new = m.lin(x).add_(h)
    h.zero_()
    h.add_(new, alpha=0.5)
    return new, h


def _both(m: Any, x: Tensor, state: Any) -> Any:
    one, two = state
    one.mul_(0.5).add_(m.lin(x))
    two.add_(one).tanh_()
    return two, (two, one)


PLACES: dict[str, tuple[type[Cell], Step]] = {
    "what was kept": (Cell, _kept),
    "columns and views": (Cell, _columns),
    "without gradients": (Cell, _ungraded),
    "the input": (Cell, _input),
    "the output itself": (Cell, lambda m, x, h: (h.add_(m.lin(x)), h.tanh_())),
    "two states that change places": (Two, _both),
    "one for both": (Two, lambda m, x, s: (s[1], (s[0].add_(m.lin(x)).tanh_(), s[0]))),
}
RECORDED: dict[str, tuple[type[Cell], Step]] = {
    "all": (Cell, lambda m, x, h: ((h + m.lin(x)).tanh(), (h - m.lin(x)).tanh())),
    "a constant output": (Cell, lambda m, x, h: (torch.zeros_like(h), (h + m.lin(x)).tanh())),
    "a detached output": (Cell, lambda m, x, h: (h.detach(), (h + m.lin(x)).tanh())),
    "a truth": (Cell, lambda m, x, h: ((h > 0).to(h.dtype), (h + m.lin(x)).tanh())),
    "a choice of numbers": (Cell, lambda m, x, h: (torch.where(h > 0, torch.ones_like(h), -2), (h - m.lin(x)))),
    "a sign, whose slope is zero": (Cell, lambda m, x, h: (h.sign(), (h + m.lin(x)).tanh())),
    "the state as it came": (Cell, lambda m, x, h: (h + m.lin(x), h)),
    "a state that is the input": (Cell, lambda m, x, h: (0.5 * h, x.repeat(1, 2)[:, :H])),
    "a constant state": (Cell, lambda m, x, h: (h + m.lin(x), torch.ones_like(h))),
    "a state alone": (Cell, lambda m, x, h: (m.lin(x), 0.5 * h)),
    "one after the other": (Two, lambda m, x, s: (s[1], (x.repeat(1, 2)[:, :H], s[0] * 2))),
    "the input alone": (Cell, lambda m, x, h: (x.repeat(1, 2)[:, :H], x.repeat(1, 2)[:, :H] * 2)),
    "parameters alone": (Cell, lambda m, x, h: (m.lin.bias.expand(x.shape[0], -1), 0.5 * h)),
}


def results(layer: Any, lengths: list[int], has: tuple[bool, bool], backend: str, schedule: str) -> list[Tensor]:
    """Return outputs, final states, all states, and all gradients."""
    torch.manual_seed(len(lengths))
    values = torch.randn(sum(lengths), D, dtype=torch.float64).requires_grad_(has[0])
    count = len(layer.state_sizes)
    hx = [torch.randn(1, len(lengths), H, dtype=torch.float64).requires_grad_(has[1]) for _ in range(count)]
    with rl.use_backend(backend=backend, schedule=schedule):
        batch = rl.Ragged.from_flat(values, lengths=lengths)
        out, state, states = layer(batch, tuple(hx) if count > 1 else hx[0], return_states=True)
    every = states[0] if count > 1 else (states[0],)
    found = [out.values, *(state if count > 1 else (state,)), *(part.values for part in every)]
    wished = [part for part in (values, *hx, *layer.parameters()) if part.requires_grad]
    told = [(part.sin() * place).sum() for place, part in enumerate(found, 1) if part.requires_grad]
    grads = torch.autograd.grad(sum(told), wished, allow_unused=True) if told else ()
    pairs = zip(wished, grads, strict=True) if told else []
    return [*found, *(torch.zeros_like(part) if grad is None else grad for part, grad in pairs)]


def compare(cell: type[Cell], step: Step, lengths: list[int], schedule: str, has: tuple[bool, bool], own: bool) -> None:
    layer = rl.nn.Recurrent(type("Own", (cell,), {"step": step}), D, H)
    layer.requires_grad_(own)
    if own:
        assert rl.explain(layer, rl.Ragged([torch.randn(2, D, dtype=torch.float64)])).backend == "program"
    found = results(layer, lengths, has, "program", "lanes")
    wanted = results(layer, lengths, has, "reference", schedule)
    assert [part.requires_grad for part in found] == [part.requires_grad for part in wanted]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("schedule", ["each", "packed", "lanes"])
@pytest.mark.parametrize("name", PLACES)
def test_a_step_that_writes_in_place(name: str, schedule: str) -> None:
    """Each step has its own memory, so an earlier output does not change."""
    for has in ((False, False), (True, True)):
        compare(*PLACES[name], [5, 0, 1, 3], schedule, has, True)


@pytest.mark.parametrize("lengths", [[5, 0, 1, 3], [4, 1, 2]])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("has", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded(name: str, has: tuple[bool, bool], own: bool, lengths: list[int]) -> None:
    compare(*RECORDED[name], lengths, "packed", has, own)
