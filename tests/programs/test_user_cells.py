"""Cells as users write them, as programs: each gives what plain torch does, or is refused with the
reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from own_cells import Fixed, Halved, Moved, Whole
from raglane.cells.module import ModuleCell
from raglane.native import library
from raglane.programs.compiled import Wanted
from raglane.programs.graph import Refused
from raglane.programs.step import Step
from traced_cells import Sized, agree, compiled_of, module_cell

Stepping = Callable[[Any, Tensor, Any], Any]


class Mlp(Sized):
    """Several linear layers in a row, with a layer norm, and an activation that is held as a
    value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(9, 7), nn.Linear(7, 6), nn.Linear(6, 4)
        self.norm, self.act = nn.LayerNorm(7), F.gelu

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state + self.third(
            torch.tanh(self.second(self.act(self.norm(self.first(torch.cat([x_t, state], 1))))))
        )
        return torch.softmax(state, 1), state


class Blocks(Sized):
    """Block-diagonal products, written in three ways, a group norm and a matrix that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(0.5 * torch.randn(2, 2, 2))
        self.shared = nn.Linear(2, 2)
        self.norm = nn.GroupNorm(2, 4)
        self.input = nn.Linear(5, 4)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        heads = state.view(-1, 2, 2)
        one = torch.einsum("bhd,hnd->bhn", heads, self.inner).flatten(1)
        other = torch.matmul(heads.unsqueeze(2), self.inner).squeeze(2).reshape(-1, 4)
        twice = x_t[:, :2].repeat(1, 2).view(-1, 2, 2)
        third = self.shared(heads).flatten(1) + torch.einsum(
            "bhd,hnd->bhn", twice, self.inner
        ).flatten(1)
        fourth = torch.bmm(heads.transpose(0, 1), self.inner).transpose(0, 1).reshape(state.shape)
        state = self.norm(one - 0.5 * other + torch.sigmoid(third) * fourth + self.input(x_t))
        return heads.amax(2).repeat_interleave(2, 1) + state, state


class Several(Sized):
    """Three states of different sizes, one of them never changed; parameters shared between gates;
    buffers.
    """

    output_size = 3

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.register_buffer("rates", torch.tensor([0.1, 0.5, 0.9, 0.99]))
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))
        self.plain = torch.tensor([2.0], dtype=torch.float64)
        self.scale, self.taps = 0.25, [torch.ones(4, dtype=torch.float64)]
        self.mixing = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(batch_size, size, dtype=torch.float64) for size in (4, 2, 3))

    def step(self, x_t: Tensor, state: Any) -> Any:
        h, pair, fixed = state
        gate = torch.sigmoid(self.gate(x_t) + F.linear(h[:, self.order], self.gate.weight[:, :4]))
        h = (
            self.rates * h
            + (1 - gate) * self.mixing(h).tanh() * self.plain
            + self.taps[0] * self.scale
        )
        first, second = pair.chunk(2, 1)
        pair = torch.cat([second + h[:, :1], F.softplus(first)], 1)
        return F.pad(pair, (0, 1), value=0.5) * fixed, (h, pair, fixed)


class Places(Sized):
    """Operations in place, on views too, and what holds constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 8)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.linear(x_t)
        gates[:, 4:].mul_(2.0)[:, :2].add_(1.0)
        one, two = gates.sigmoid().split(4, 1)
        new = torch.zeros_like(state)
        new[:, :2] = state[:, 2:]
        new += one * two + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) / torch.arange(
            1, 5
        )
        new = torch.where(new > 0, new, 0.3 * new).clamp(-2, 2)
        return new.flip(1).roll(1, 1), new


class Fast(Sized):
    """Each row has a matrix of its own, as fast weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(5, 6)

    def initial_state(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 4, dtype=torch.float64)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        key, value, query = self.input(x_t).view(-1, 3, 2).unbind(1)
        matrix = torch.baddbmm(0.9 * state.view(-1, 2, 2), value.unsqueeze(2), key.unsqueeze(1))
        read = torch.bmm(matrix, query.unsqueeze(2)).squeeze(2)
        return torch.cat([read, F.normalize(read, dim=1)], 1), matrix.flatten(1)


class Functions(Sized):
    """Every function of one number, and every reduction."""

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        a = 0.3 * state + x_t[:, :4]
        b = a.abs() + 0.1
        new = (
            a.exp()
            + a.expm1()
            + b.log()
            + b.log1p()
            + b.sqrt()
            + b.rsqrt()
            + b.reciprocal()
            + a.erf()
            + a.relu()
        )
        new = (
            new
            + a.sign()
            + F.silu(a)
            + F.mish(a)
            + F.elu(a)
            + F.selu(a)
            + F.leaky_relu(a)
            + F.hardtanh(a)
        )
        # Not hardsigmoid: torch's own gradient has a sixth of float32 in it.
        new = new + F.hardswish(a) + F.logsigmoid(a) + F.softsign(a) + F.threshold(a, 0.1, 0.2)
        new = (
            new
            + F.gelu(a, approximate="tanh")
            + F.relu6(a)
            + a**2
            + a**3
            + a**4
            + b**0.5
            + b**-1
            + torch.exp2(a)
        )
        new = new + torch.lerp(a, b, 0.3) + torch.lerp(a, b, b) + torch.addcmul(a, a, b, value=2)
        new = new + torch.addcdiv(a, a, b) + torch.maximum(a, b) - torch.minimum(a, 0.5 * b) + 1 / b
        new = new + a.clamp(min=-0.1) + a.clamp(max=0.2)
        new = (
            new
            + torch.logaddexp(a, b)
            + (2 - a)
            + torch.where((a > 0) & ~(a > 1) | (a < -1), a, b)
            + a.lt(b) * b
        )
        new = new + a.masked_fill(a > 0.5, 0.25) + F.layer_norm(a, (4,)) + F.rms_norm(a, (4,))
        new = (
            new + F.glu(torch.cat([a, b], 1), 1) + a.sin() + a.cos() + a.tan() + a.sinh() + a.cosh()
        )
        new = new + b**1.5 + b**-2 + b**b + 2**a + a.relu() ** 1.5
        new = (
            new
            + a.floor() * a
            + a.ceil() * b
            + (9 * a).round() * a
            + a.trunc()
            + a.frac()
            + F.celu(a, 0.5)
        )
        new = (
            new
            + F.softshrink(a)
            + F.hardshrink(a, 0.1)
            + F.tanhshrink(a)
            + torch.remainder(a, b)
            + torch.fmod(a, b)
        )
        new = new + a.cumsum(1) * b + (a.view(-1, 2, 2).cumsum(2) * b.view(-1, 2, 2)).flatten(1)
        new = (
            new
            + F.prelu(a, a.new_full((1,), 0.25))
            + F.softplus(a, 4, 2)
            + a.logit(0.1)
            + b.log2()
            + b.log10()
        )
        new = (
            new
            + torch.add(a, 2, alpha=3)
            + torch.rsub(a, b, alpha=0.5)
            + torch.where(a.isnan(), b, a)
        )
        new = new + (9 * a).round().bool() * b
        new = new + (b.view(-1, 2, 1, 2).cumsum(1) * a.view(-1, 2, 1, 2)).flatten(1)
        new = (
            new + torch.where((a > 0) ^ (b > 1), a, b) + torch.div(a, b, rounding_mode="floor") * a
        )
        kept = (
            new.sum(1, keepdim=True)
            + a.prod(1, keepdim=True)
            + new.mean(1, keepdim=True)
            + a.amax(1, True)
        )
        kept = kept + a.amin(1, True) + a.std(1, keepdim=True) + a.var(1, keepdim=True)
        kept = kept + a.max(1, keepdim=True)[0] + a.norm(dim=1)[:, None]
        kept = kept + a.norm(1, 1, True) + a.view(-1, 2, 2).sum((2, 1), True).flatten(1)
        kept = (
            kept
            + torch.logsumexp(a, 1, True)
            + F.log_softmax(a, 1)[:, :1]
            + F.softmin(a, 1)[:, 1:2]
        )
        new = 0.01 * (new + kept)
        return new.tanh(), new


class Convolutions(Sized):
    """Convolutions in one and two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(2, 4, 2, stride=2, padding=1, groups=2)
        self.two = nn.Conv2d(2, 2, (2, 3), padding=(1, 2), dilation=(1, 2), bias=False)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        one = self.one(torch.cat([x_t, state[:, :1]], 1).view(-1, 2, 3)).tanh()
        two = self.two(state.view(-1, 2, 1, 2)).sigmoid()
        state = 0.5 * state + one.mean(2) + two.flatten(2).sum(2).repeat(1, 2)
        return state.sin(), state


@pytest.mark.parametrize(
    "make",
    [Mlp, Blocks, Several, Places, Fast, Functions, Convolutions, Whole, Moved, Halved, Fixed],
)
def test_a_program_gives_what_plain_torch_does(make: Any) -> None:
    module = (make(5, 4) if make in (Whole, Moved, Halved) else make()).double()
    cell = module_cell(module)
    sizes = (4, 4) if make is Moved else cell.state_sizes(0)
    if make is Moved:
        cell.is_tuple, cell._sizes = True, sizes
    width, prepares = 3 if make is Fixed else 5, make is not Whole
    agree(cell, module, sizes, cell.output_size, need_states=True, width=width, prepares=prepares)


def test_a_size_is_not_taken_for_the_number_of_rows() -> None:
    module = _cell(lambda m, x, h: ((new := m.linear(x) + h / h.shape[1]), new))
    module.hidden_size, module.linear = 11, nn.Linear(5, 11).double()
    agree(module_cell(module), module, (11,), 11)


def _cell(step: Stepping, **parts: Any) -> Any:
    """A module with such a step."""
    made = type("Own", (Sized,), {"step": step})()
    made.linear = nn.Linear(5, 4).double()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def _hooked() -> nn.Module:
    module = nn.Linear(5, 4).double()
    module.register_forward_hook(lambda *_: None)
    return module


OUTSIDE = torch.ones(4, dtype=torch.float64)


def _clipped(module: Any, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state + module.linear(x_t)
    state.detach().clamp_(-99.0, 99.0)
    return state, state


class _Own(torch.autograd.Function):
    """A gradient of one's own, which differs where it is large."""

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:  # noqa: ARG004
        return state.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return grad.clamp(-99, 99)


_OWN: Any = _Own.apply


# ruff: noqa: ARG005 (a step has its arguments, whether it reads them or not)
REFUSED: list[tuple[str, Stepping, dict[str, Any]]] = [
    ("alike", lambda m, x, h: (h, h if x.flatten()[0] > 0 else -h), {}),
    ("depend on the numbers", lambda m, x, h: (h, h * float(m.linear.bias[0])), {}),
    ("random numbers", lambda m, x, h: (h, F.dropout(h)), {}),
    ("random numbers", lambda m, x, h: (h, h + random.random() + np.random.random()), {}),
    (
        "alpha or beta",
        lambda m, x, h: (h, torch.addmm(h, h, m.linear.weight[:, :4], alpha=0.5)),
        {},
    ),
    ("rows of the batch meet", lambda m, x, h: (h, h @ h.T @ h), {}),
    ("rows of the batch meet", lambda m, x, h: (h, h + h.flip(0)), {}),
    ("takes unbind() of rows", lambda m, x, h: (h, torch.stack(h.unbind(-2))), {}),
    ("has hooks", lambda m, x, h: (h, m.inner(x)), {"inner": _hooked()}),
    ("operation cumprod", lambda m, x, h: (h, h.cumprod(1)), {}),
    ("no parameter, buffer or attribute", lambda m, x, h: (h, h + OUTSIDE), {}),
    ("in place", lambda m, x, h: (h, h + m.linear.bias.add_(1.0)), {}),
    # Bounds that random numbers never reach, so that no comparison tells.
    ("a detached tensor", _clipped, {}),
    ("without gradients", lambda m, x, h: (h, _OWN(h)), {}),
    ("changes torch.float64 to torch.float32", lambda m, x, h: (h, h.float().double()), {}),
    ("it reads __array__ of a tensor", lambda m, x, h: (h, h + np.asarray(h)), {}),
    ("raised TypeError", lambda m, x, h: (h, h + None), {}),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_steps_that_cannot_be_programs_are_refused_with_the_reason(index: int) -> None:
    reason, step, parts = REFUSED[index]
    module = _cell(step, **parts)
    before = (
        torch.get_rng_state(),
        module.linear.bias.clone(),
        random.getstate(),
        np.random.get_state(),
    )
    with pytest.raises(Refused) as refused:
        compiled_of(module_cell(module), module, (4,), 4)
    assert reason in refused.value.reason
    # And nothing was touched.
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], module.linear.bias)
    np.testing.assert_equal((random.getstate(), np.random.get_state()), before[2:])


Known = Callable[[Any], Tensor]


class Parameters(Sized):
    """Parameters whose numbers stand in memory one after the other, and in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(2))
        self.single = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.wide = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(4, 3, dtype=torch.float64).t())
        self.cube = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.every = nn.Parameter(torch.randn(8, dtype=torch.float64)[::2])
        self.square = nn.Parameter(torch.randn(4, 4, dtype=torch.float64).t())
        self.register_buffer("fixed", torch.randn(4, dtype=torch.float64))
        self.of: Known
        self.input = nn.Linear(5, 4, dtype=torch.float64)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = (0.5 * state + self.input(x_t) + self.of(self)).tanh()
        return state, state


# Which of them are nothing but sums of numbers of parameters, as they lie in memory.
SUMS: dict[str, tuple[Known, bool]] = {
    "a parameter": (lambda m: m.one, True),
    "two": (lambda m: m.one + m.two, True),
    "a parameter and a buffer": (lambda m: m.one + m.fixed, True),
    "two rows": (lambda m: m.wide[1] + m.wide[2], True),
    "parts of two": (lambda m: m.one[1:2] + m.two[3:], True),
    "with a factor": (lambda m: torch.add(m.one, m.two, alpha=0.25), False),
    "and a constant": (
        lambda m: m.one + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
        False,
    ),
    "and a number": (lambda m: m.one + 0.25, False),
    "and one for all": (lambda m: m.one + m.single, False),
    "and what is computed": (lambda m: m.one + m.two.exp(), False),
    "a sum and what is computed": (lambda m: m.one + m.two + m.one.sin(), False),
    "a row of what is turned": (lambda m: m.turned[1], False),
    "a column": (lambda m: m.cube[:, 1] + m.one, False),
    "of a wider memory": (lambda m: m.every, False),
}


@pytest.mark.parametrize("name", SUMS)
def test_constants_outside_of_the_loop(name: str) -> None:
    module = Parameters()
    module.of, is_moved = SUMS[name]
    compiled = agree(module_cell(module), module, (4,), 4, need_states=True)
    assert (compiled.trace.parameters.moved is not None) == is_moved


def test_detached_values_have_no_gradient() -> None:
    module = Parameters()
    for of in (lambda m: m.one + m.two.detach(), lambda m: m.one.detach() + m.one):
        module.of = of
        agree(module_cell(module), module, (4,), 4)


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "as it is": lambda m, h: h @ m.square,
    "turned": lambda m, h: h @ m.square.t(),
    "read twice": lambda m, h: F.silu(h @ m.square),
    "times its first column": lambda m, h: (found := (h @ m.square).sin()) * found[:, :1],
    "both": lambda m, h: h @ m.square + (h @ m.square.t()).tanh(),
    "a wide one, turned": lambda m, h: (h @ m.turned.t()).repeat(1, 2)[:, :4],
    "every other column": lambda m, h: (h[:, :3] @ m.wide)[:, :2].repeat(1, 2),
    "a part": lambda m, h: (h[:, :2] @ m.wide[1:, ::2]).repeat(1, 2),
    "from the left": lambda m, h: torch.addmm(m.one.unsqueeze(1), m.square, h.t()).t(),
    "one for several rows": lambda m, h: torch.matmul(
        h.view(-1, 4, 1, 1),
        m.square[:2, :1, None].expand(h.shape[0], 2, 1, 1)[:, torch.tensor([0, 0, 0, 1])],
    ).flatten(1),
    "a copy for each row, as it is and turned": lambda m, h: (
        (rows := h.view(-1, 2, 1, 2))
        @ (own := m.square.view(2, 2, 4)[..., :2].expand(h.shape[0], 2, 2, 2))
        + rows @ own.mT
    ).flatten(1),
    "as one of many": lambda m, h: torch.einsum(
        "bhd,hnd->bhn", h.view(-1, 2, 2), m.square.view(2, 2, 4)[..., ::2].mT
    ).flatten(1),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("has_operators", [True, False])
def test_weights_of_any_strides(
    name: str, has_operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_operators:
        monkeypatch.setattr(library, "operators", lambda: None)
    module: Any = Parameters()
    module.square = nn.Parameter(
        torch.randn(4, 4, dtype=torch.float64).t()
        if name != "as one of many"
        else module.square.data.contiguous()
    )
    module.of = lambda _: torch.zeros(4, dtype=torch.float64)
    run = PRODUCTS[name]
    module.step = lambda x_t, state: ((new := (run(module, state) + module.input(x_t)).tanh()), new)
    agree(module_cell(module), module, (4,), 4, need_states=True)


def test_an_operand_of_more_whole_results_than_pieces() -> None:
    """They are copied side by side."""
    module: Any = Parameters()
    module.join = nn.Linear(20 * 4, 4, dtype=torch.float64)

    def step(x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        mixed = module.input(x_t) + state
        joined = torch.cat([torch.tanh(mixed * (1 + part)) for part in range(20)], 1)
        new = module.join(joined).tanh()
        return new, new

    module.of = lambda _: 0
    module.step = step
    agree(module_cell(module), module, (4,), 4)


@pytest.mark.parametrize(
    ("spread", "reduces"),
    [(lambda gate: gate.repeat(1, 2), False), (lambda gate: gate.repeat_interleave(2, 1), True)],
)
def test_gradients_of_repeated_columns(spread: Callable[[Tensor], Tensor], reduces: bool) -> None:
    """Adjacent columns are added, others are reduced: not added one by one."""
    module: Any = Parameters()
    module.gates, module.peephole = (
        nn.Linear(5, 8).double(),
        nn.Parameter(torch.randn(8, dtype=torch.float64)),
    )

    def step(x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gates = torch.sigmoid(module.gates(x_t) + spread(state) * module.peephole)
        return (state := gates[:, :4] * state + gates[:, 4:]), state

    module.step = step
    compiled = agree(module_cell(module), module, (4,), 4)
    flags = [
        (True,) * len(nodes)
        for nodes in (compiled.elements, compiled.vectors, compiled.trace.parameters.weights)
    ]
    program = compiled.backward(Wanted(True, False, flags[0], (), *flags[1:])).lowered.program
    assert ("row_sum" in [instruction.operation for instruction in program.instructions]) == reduces


def test_every_fact_of_a_step_is_a_part_of_its_key() -> None:
    module = Parameters()
    module.of = SUMS["two"][0]
    facts: dict[str, Any] = {"output_size": 4, "state_sizes": (4,), "is_tuple": False}
    changes: list[dict[str, Any]] = [
        {},
        {"output_size": 3},
        {"state_sizes": (4, 4)},
        {"is_tuple": True},
    ]
    cells = [ModuleCell(module, **facts | change) for change in changes]
    rests = [(6, (4,), 4, torch.float64), (5, (3,), 4, torch.float64)]
    rests += [(5, (4,), 3, torch.float64), (5, (4,), 4, torch.float32)]
    seen = [Step(cell, module, 5, (4,), 4, torch.float64) for cell in cells]
    seen += [Step(cells[0], module, *rest) for rest in rests]
    assert len({step.key for step in seen}) == len(seen)
    module.eval()
    assert seen[0].key != Step(cells[0], module, 5, (4,), 4, torch.float64).key
