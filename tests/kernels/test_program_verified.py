"""Programs compared with the user's module: before and after the first call, in place, and with
recorded gradients.
"""

# ruff: noqa: ARG005 (a step has its arguments, whether it reads them or not)

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import raglane as rl
from raglane.kernels.program import backend
from raglane.programs import gradients

pytestmark = pytest.mark.skipif(
    bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels"
)

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
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_step_that_looks_at_its_parameters() -> None:
    def told(module: Any, x: Tensor, h: Tensor) -> Tensor:
        slope = 0.5 if isinstance(module.lin.weight, nn.Parameter) else 0.1
        return slope * h + module.lin(x)

    layer = layer_of(told)
    agrees(layer, a_batch())
    assert rl.explain(layer, a_batch()).backend == "program"
    twin: Any = torch.compile(layer, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(twin(batch := a_batch())[0].values, layer(batch)[0].values)
    other = layer_of(
        lambda m, x, h: (0.5 if type(m.lin.weight) is nn.Parameter else 0.1) * h + m.lin(x)
    )
    choice = rl.explain(other, a_batch())
    assert choice.backend == "reference"
    assert "the values of its program differ from those of torch" in choice.reason
    plain, batch = layer_of(lambda m, x, h: 0.5 * h + m.lin(x)), a_batch()
    with FakeTensorMode(allow_non_fake_inputs=True):  # whose tensors have no numbers to compare
        assert rl.explain(plain, batch).backend == "program"
    wrong = layer_of(lambda m, x, h: m.lin(torch.cat([x, h], 1)))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        rl.explain(wrong, a_batch())


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
    lambda m, x, h: (
        h
        + torch.zeros(x.shape[0], H, device=x.device, dtype=x.dtype)
        + m.lin(x)
        + h.new_ones(h.shape)
    ),
    lambda m, x, h: m.norm(h) + m.lin.bias.expand(x.shape[0], -1) + m.lin(x),
    lambda m, x, h: (
        h + m.lin(x) if x.shape[0] == h.shape[0] and x.shape[1] == D and x.is_cpu else h
    ),
]


@pytest.mark.parametrize("step", [*COUNTS, *READS])
def test_steps_that_depend_on_the_number_of_rows_are_refused(step: Step) -> None:
    choice = rl.explain(layer_of(step), a_batch())
    assert choice.backend == "reference"
    assert ("() of rows" if step in READS else "depend on the number of rows") in choice.reason


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
        layer = layer_of(
            lambda m, x, h: h - m.lin(x) if len([None] * x.shape[0]) > 40 else h + m.lin(x)
        )
        batch = a_batch(count)
        assert int((batch.lengths > 0).sum()) == rows
        assert rl.explain(layer, batch).backend == "program"
        if rows < 40:
            agrees(layer, batch)
            continue
        with pytest.warns(
            UserWarning, match="'module Own' runs in plain torch from now on: the values .* differ"
        ):
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

        def wrong(gradient: Any, *operands: Any, by: float = factor) -> Any:
            return right(gradient * by, *operands)

        monkeypatch.setitem(gradients._RULES, "tanh", wrong)
        choice = rl.explain(layer, a_batch())
        assert choice.backend == ("program" if factor == 1 else "reference")
        assert ("the gradients of its program differ from those of torch" in choice.reason) == (
            factor != 1
        )
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


Stepping = Callable[[Any, Tensor, Any], Any]


class Double(Cell):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.double()


class Two(Double):
    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, H, dtype=torch.float64), torch.zeros(
            batch_size, H, dtype=torch.float64
        )


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


PLACES: dict[str, tuple[type[Double], Stepping]] = {
    "what was kept": (Double, _kept),
    "columns and views": (Double, _columns),
    "without gradients": (Double, _ungraded),
    "the input": (Double, _input),
    "the output itself": (Double, lambda m, x, h: (h.add_(m.lin(x)), h.tanh_())),
    "two states that change places": (Two, _both),
    "one for both": (Two, lambda m, x, s: (s[1], (s[0].add_(m.lin(x)).tanh_(), s[0]))),
}
RECORDED: dict[str, tuple[type[Double], Stepping]] = {
    "all": (Double, lambda m, x, h: ((h + m.lin(x)).tanh(), (h - m.lin(x)).tanh())),
    "a constant output": (Double, lambda m, x, h: (torch.zeros_like(h), (h + m.lin(x)).tanh())),
    "a detached output": (Double, lambda m, x, h: (h.detach(), (h + m.lin(x)).tanh())),
    "a truth": (Double, lambda m, x, h: ((h > 0).to(h.dtype), (h + m.lin(x)).tanh())),
    "a choice of numbers": (
        Double,
        lambda m, x, h: (torch.where(h > 0, torch.ones_like(h), -2), (h - m.lin(x))),
    ),
    "a sign, whose slope is zero": (Double, lambda m, x, h: (h.sign(), (h + m.lin(x)).tanh())),
    "the state as it came": (Double, lambda m, x, h: (h + m.lin(x), h)),
    "a state that is the input": (Double, lambda m, x, h: (0.5 * h, x.repeat(1, 2)[:, :H])),
    "a constant state": (Double, lambda m, x, h: (h + m.lin(x), torch.ones_like(h))),
    "a state alone": (Double, lambda m, x, h: (m.lin(x), 0.5 * h)),
    "one after the other": (Two, lambda m, x, s: (s[1], (x.repeat(1, 2)[:, :H], s[0] * 2))),
    "the input alone": (Double, lambda m, x, h: (x.repeat(1, 2)[:, :H], x.repeat(1, 2)[:, :H] * 2)),
    "parameters alone": (Double, lambda m, x, h: (m.lin.bias.expand(x.shape[0], -1), 0.5 * h)),
}


def results(
    layer: Any, lengths: list[int], has: tuple[bool, bool], backend: str, schedule: str
) -> list[Tensor]:
    """Return outputs, final states, all states, and all gradients."""
    torch.manual_seed(len(lengths))
    values = torch.randn(sum(lengths), D, dtype=torch.float64).requires_grad_(has[0])
    count = len(layer.state_sizes)
    hx = [
        torch.randn(1, len(lengths), H, dtype=torch.float64).requires_grad_(has[1])
        for _ in range(count)
    ]
    with rl.use_backend(backend=backend, schedule=schedule):
        batch = rl.Ragged.from_flat(values, lengths=lengths)
        out, state, states = layer.with_states(batch, tuple(hx) if count > 1 else hx[0])
    every = states[0] if count > 1 else (states[0],)
    found = [out.values, *(state if count > 1 else (state,)), *(part.values for part in every)]
    wished = [part for part in (values, *hx, *layer.parameters()) if part.requires_grad]
    told = [(part.sin() * place).sum() for place, part in enumerate(found, 1) if part.requires_grad]
    grads = torch.autograd.grad(sum(told), wished, allow_unused=True) if told else ()
    pairs = zip(wished, grads, strict=True) if told else []
    return [*found, *(torch.zeros_like(part) if grad is None else grad for part, grad in pairs)]


def compare(
    cell: type[Double],
    step: Stepping,
    lengths: list[int],
    schedule: str,
    has: tuple[bool, bool],
    own: bool,
) -> None:
    layer = rl.nn.Recurrent(type("Own", (cell,), {"step": step}), D, H)
    layer.requires_grad_(own)
    if own:
        assert (
            rl.explain(layer, rl.Ragged([torch.randn(2, D, dtype=torch.float64)])).backend
            == "program"
        )
    found = results(layer, lengths, has, "program", "lanes")
    wanted = results(layer, lengths, has, "reference", schedule)
    assert [part.requires_grad for part in found] == [part.requires_grad for part in wanted]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("schedule", ["each", "lanes"])
@pytest.mark.parametrize("name", PLACES)
def test_a_step_that_writes_in_place(name: str, schedule: str) -> None:
    """Each step has its own memory, so an earlier output does not change."""
    for has in ((False, False), (True, True)):
        compare(*PLACES[name], [5, 0, 1, 3], schedule, has, True)


@pytest.mark.parametrize(
    ("own", "lengths", "has"),
    [
        (True, [5, 0, 1, 3], (False, False)),
        (True, [4, 1, 2], (True, True)),
        (False, [4, 1, 2], (True, False)),
        (False, [5, 0, 1, 3], (False, True)),
    ],
)
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_values(name: str, has: tuple[bool, bool], own: bool, lengths: list[int]) -> None:
    compare(*RECORDED[name], lengths, "packed", has, own)
