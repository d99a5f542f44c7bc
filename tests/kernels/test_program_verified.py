"""Programs are compared with the user's module: before their first use, in the first call, and in later calls."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from raglane.kernels.program import backend
from raglane.programs import gradients

pytestmark = pytest.mark.skipif(bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels")

D, H = 3, 4
AROUND = {"scale": 0.5}
Step = Callable[[Any, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    backend._steps.clear()


class Cell(nn.Module):
    def __init__(self, input_size: int = D, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.lin, self.norm = nn.Linear(input_size, hidden_size), nn.GroupNorm(2, hidden_size)


def layer_of(step: Step) -> Any:
    """Return a layer whose state and output are the result of a function."""

    def both(module: Any, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = step(module, x_t, state)
        return state, state

    return rl.nn.Recurrent(type("Own", (Cell,), {"step": both}), D, H)


def a_batch(count: int = 5) -> rl.Ragged:
    return rl.Ragged([torch.randn((7 * index) % 5, D) for index in range(count)])


def agrees(layer: Any, batch: rl.Ragged) -> None:
    found = []
    for name in ("auto", "reference"):
        values = batch.values.clone().requires_grad_()
        with rl.use_backend(backend=name):
            out, state = layer(batch.with_values(values))
        grads = torch.autograd.grad(
            out.values.sin().sum() + state.cos().sum(), [values, *layer.cells[0].lin.parameters()]
        )
        found.append([out.values, state, *grads])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_step_that_looks_at_its_parameters() -> None:
    def told(module: Any, x: Tensor, h: Tensor) -> Tensor:
        slope = 0.5 if isinstance(module.lin.weight, nn.Parameter) else 0.1
        new: Tensor = slope * h + module.lin(x)
        return new

    layer = layer_of(told)
    agrees(layer, a_batch())
    assert rl.explain(layer, a_batch()).backend == "program"
    twin: Any = torch.compile(layer, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(twin(batch := a_batch())[0].values, layer(batch)[0].values)
    other = layer_of(lambda m, x, h: (0.5 if type(m.lin.weight) is nn.Parameter else 0.1) * h + m.lin(x))
    choice = rl.explain(other, a_batch())
    assert choice.backend == "reference"
    assert "the values of its program differ from those of torch" in choice.reason


COUNTS: list[Step] = [
    lambda m, x, h: h if x.shape[0] > 40 else h + m.lin(x),
    lambda m, x, h: h if h.size(0) % 2 else h + m.lin(x),
    lambda m, x, h: h if x.numel() > 99 else h + m.lin(x),
    lambda m, x, h: h if x.shape == (77, D) else h + m.lin(x),
    lambda m, x, h: h if x.t().contiguous().stride(0) > 99 else h + m.lin(x),
    lambda m, x, h: h / max(x.shape[0], 20) + m.lin(x),
    lambda m, x, h: h * {(77, 3): 1.0}.get((x.shape[0], x.shape[1]), 2.0) + m.lin(x),
    lambda m, x, h: h * math.sqrt(x.shape[0]) + m.lin(x),
    lambda m, x, h: h if len(str(x.shape[0])) > 2 else h + m.lin(x),
]
READS: list[Step] = [
    lambda m, x, h: h if len(x) > 40 else h + m.lin(x),
    lambda m, x, h: h if sum(1 for _ in h) > 40 else h + m.lin(x),
]
FINE: list[Step] = [
    lambda m, x, h: (2 * h.view(h.shape[0], 2, 2)).reshape(h.size(0), -1) + m.lin(x),
    lambda m, x, h: (2 * h.reshape(h.shape[0] * 2, 2)).view(h.shape) + m.lin(x),
    lambda m, x, h: h + torch.zeros(x.shape[0], H, device=x.device, dtype=x.dtype) + m.lin(x) + h.new_ones(h.shape),
    lambda m, x, h: m.norm(h) + m.lin.bias.expand(x.shape[0], -1) + m.lin(x),
    lambda m, x, h: h + m.lin(x) if x.shape[0] == h.shape[0] and x.shape[1] == D and x.is_cpu else h,
]


@pytest.mark.parametrize("step", [*COUNTS, *READS])
def test_what_depends_on_the_number_of_rows_is_refused(step: Step) -> None:
    choice = rl.explain(layer_of(step), a_batch())
    assert choice.backend == "reference"
    assert ("() of rows" if step in READS else "depends on the number of rows") in choice.reason


@pytest.mark.parametrize("step", FINE)
def test_shapes_made_of_the_number_of_rows_are_followed(step: Step) -> None:
    layer = layer_of(step)
    assert rl.explain(layer, a_batch()).backend == "program"
    agrees(layer, a_batch())


@pytest.mark.filterwarnings("error")
def test_the_first_call_is_compared_on_its_own_rows() -> None:
    """A list with one entry per row, which a trace does not see."""
    for count, rows in ((7, 5), (70, 56)):
        backend._steps.clear()
        layer = layer_of(lambda m, x, h: h - m.lin(x) if len([None] * x.shape[0]) > 40 else h + m.lin(x))
        batch = a_batch(count)
        assert int((batch.lengths > 0).sum()) == rows
        assert rl.explain(layer, batch).backend == "program"
        if rows < 40:
            agrees(layer, batch)
            continue
        with pytest.warns(UserWarning, match="'module Own' runs in plain torch from now on: the values .* differ"):
            found = layer(batch)[0].values
        with rl.use_backend(backend="reference", schedule="lanes"):
            assert torch.equal(layer(batch)[0].values, found)
        assert rl.explain(layer, batch).backend == "reference"


def test_a_program_that_no_longer_holds_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global is read when a program is made. One call of n shows that it has changed."""
    monkeypatch.setattr(backend, "_CALLS", 3)
    monkeypatch.setitem(AROUND, "scale", 0.5)
    layer, batch = layer_of(lambda m, x, h: AROUND["scale"] * h + m.lin(x)), a_batch()

    def agrees_once() -> None:
        found = layer(batch)[0].values
        with rl.use_backend(backend="reference"):
            torch.testing.assert_close(found, layer(batch)[0].values)

    for _ in range(3):
        agrees_once()
    AROUND["scale"] = 0.25
    with pytest.warns(UserWarning, match="runs in plain torch from now on"):
        agrees_once()
    monkeypatch.setattr(backend, "_warned", {"module Own"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees_once()


def test_a_wrong_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradients._RULES["tanh"]
    layer = layer_of(lambda m, x, h: (h + m.lin(x)).tanh())
    for factor in (1.0, 1.01):
        backend._steps.clear()

        def wrong(graph: Any, gradient: Any, *given: Any, by: float = factor) -> Any:
            return right(graph, graph.each("mul", gradient, by), *given)

        monkeypatch.setitem(gradients._RULES, "tanh", wrong)
        choice = rl.explain(layer, a_batch())
        assert choice.backend == ("program" if factor == 1 else "reference")
        assert ("the gradients of its program differ from those of torch" in choice.reason) == (factor != 1)
    backend._steps.clear()


def test_gradients_of_what_a_module_computed_beforehand_stay_possible() -> None:
    """A comparison leaves the user's own graph as it is."""

    class Held(Cell):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.begin = nn.Parameter(torch.randn(H))
            self.slope = self.begin.sigmoid()

        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = self.slope * state + self.lin(x_t)
            return state, state

    layer: Any = rl.nn.Recurrent(Held, D, H)
    layer(a_batch())[0].values.sum().backward()
    assert bool(layer.cells[0].begin.grad.any())
