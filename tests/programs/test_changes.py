"""A change between two calls changes the key of a step, or the step is refused; and the table of
docs/add-a-cell.md.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from raglane.programs.graph import DEPENDS, Refused, Unkept
from raglane.programs.keys import lasting_key
from raglane.programs.step import Survey
from raglane.schedules import SCHEDULES


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Options:
    slope: float = 0.5

    def applied(self, a: Any) -> Any:
        return self.slope * a


class Mixin:
    slope = 0.5


def scale(a: Any, by: float = 0.5, *, more: float = 0.0) -> Any:
    return by * a + more


def other(a: Any, by: float = 0.25, *, more: float = 0.0) -> Any:
    return by - a * more


Pair = collections.namedtuple("Pair", "first second")


def closed(slope: float) -> Callable[[Any], Any]:
    def of(a: Any) -> Any:
        return slope * a

    return of


def a_cell() -> Any:
    """Return a cell with its own class, functions and attributes of all kinds that a step may
    read.
    """
    mixin = type("Mixin", (Mixin,), {"slope": 0.5})

    def step(
        module: Any, x_t: Tensor, state: Tensor, factor: float = 0.5, *, more: float = 0.0
    ) -> Any:
        state = factor * state + module.linear(x_t) + more
        return state, state

    body: dict[str, Any] = {
        "step": step,
        "none": None,
        "members": {1, 2},
        "options": Options(),
        "slope": property(lambda _: 0.5),
        "static": staticmethod(types.FunctionType(scale.__code__, globals(), "scale", (0.5,))),
    }
    cell: Any = type("Own", (nn.Module, mixin), body)()
    cell.linear = nn.Linear(3, 4)
    cell.held = {"a": [1, (2.0, None)]}
    cell.config = Options()
    cell.kind, cell.pair, cell.size = Kind.ONE, Pair(1, [2]), torch.Size([2])
    cell.array, cell.whole = np.ones(2), np.int64(3)
    cell.call = types.FunctionType(scale.__code__, globals(), "scale", (0.5,))
    cell.closed = closed(0.5)
    cell.partial, cell.looked_up = functools.partial(scale, by=0.5), {"a": 1}.get
    cell.register_buffer("order", torch.arange(4))
    cell.bound = Options().applied
    cell.ordered = collections.OrderedDict(a=1, b=2)
    cell.zero, cell.true = 0.0, True
    return cell


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a class behind nn.Module": lambda c: setattr(type(c).__bases__[1], "slope", 0.25),
    "a class that is new among the bases": lambda c: setattr(
        type(c), "__bases__", (nn.Module, type("New", (), {"slope": 2.0}), Mixin)
    ),
    "None in the class": lambda c: setattr(type(c), "none", 0.5),
    "a set in the class": lambda c: type(c).members.add(3),
    "within an object in the class": lambda c: setattr(type(c).options, "slope", 0.25),
    "a static method's defaults": lambda c: setattr(c.static, "__defaults__", (0.25,)),
    "another class": lambda c: setattr(c, "__class__", type("New", (type(c),), {})),
    "the step's code": lambda c: setattr(type(c).step, "__code__", (lambda *_: None).__code__),
    "the step's defaults": lambda c: setattr(type(c).step, "__defaults__", (0.25,)),
    "the step's defaults by name": lambda c: setattr(type(c).step, "__kwdefaults__", {"more": 1.0}),
    "a step of its own": lambda c: setattr(c, "step", scale),
    "training": lambda c: c.eval(),
    "within a dictionary": lambda c: c.held["a"].append(3),
    "a number's kind": lambda c: c.held["a"].__setitem__(0, 1.0),
    "a truth's kind": lambda c: setattr(c, "true", 1),
    "a sign of zero": lambda c: setattr(c, "zero", -0.0),
    "the order of a dictionary": lambda c: c.ordered.move_to_end("a"),
    "within an object": lambda c: setattr(c.config, "slope", 0.25),
    "another member": lambda c: setattr(c, "kind", Kind.TWO),
    "within a named tuple": lambda c: c.pair.second.append(3),
    "an array's shape": lambda c: setattr(c, "array", c.array[None]),
    "an array's kind": lambda c: setattr(c, "array", c.array.view("i8")),
    "an array": lambda c: c.array.__setitem__(0, 2.0),
    "a scalar's kind": lambda c: setattr(c, "whole", np.int32(3)),
    "a function's code": lambda c: setattr(c.call, "__code__", other.__code__),
    "a function's attribute": lambda c: setattr(c.call, "slope", 0.25),
    "a property": lambda c: setattr(type(c), "slope", property(lambda _: 0.25)),
    "a closure": lambda c: setattr(c.closed.__closure__[0], "cell_contents", 0.25),
    "within a partial": lambda c: c.partial.keywords.update(by=0.25),
    "an operand of a partial": lambda c: setattr(
        c, "partial", functools.partial(scale, 1.0, by=0.5)
    ),
    "what a builtin is bound to": lambda c: c.looked_up.__self__.update(a=2),
    "a buffer of integers": lambda c: c.order.mul_(2),
    "the strides of a weight": lambda c: setattr(
        c.linear.weight, "data", c.linear.weight.data.t().contiguous().t()
    ),
    "what a method is bound to": lambda c: setattr(c.bound.__self__, "slope", 0.25),
    "a weight's kind": lambda c: c.linear.register_parameter("weight", None),
    "an inner module's number": lambda c: setattr(c.linear, "in_features", 4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(name: str) -> None:
    cell = a_cell()
    before, again = Survey.of(cell), Survey.of(cell)
    assert (before.key, *before.classes) == (again.key, *again.classes)
    hash((before.key, *before.classes))
    CHANGES[name](cell)
    after = Survey.of(cell)
    assert (before.key, *before.classes) != (after.key, *after.classes)


WATCHED: dict[str, Callable[[], Any]] = {
    "Named": lambda: type("Named", (dict,), {})(a=1),
    "(member_descriptor|Slotted)": lambda: type(
        "Slotted", (), {"__slots__": ("__dict__", "slope")}
    )(),
    "Bare": lambda: type("Bare", (), {"__slots__": ("slope",)})(),
    "ndarray": lambda: np.array([Options()], dtype=object),
    "defaultdict": lambda: collections.defaultdict(int),
}


@pytest.mark.parametrize("name", WATCHED)
def test_values_that_may_change_unseen_are_no_program(name: str) -> None:
    cls: Any = type("Own", (nn.Module,), {})
    for where, module in ((made := cls(), made), (cls, cls())):
        where.held = WATCHED[name]()
        with pytest.raises(
            Refused, match=f"it holds a {name}, which may change where no program can see it"
        ):
            Survey.of(module)
        del where.held


def test_values_that_contain_themselves_are_no_program() -> None:
    made: Any = nn.Module()
    made.held = held = [0.5]
    held.append(held)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="contain themselves"):
        Survey.of(made)


@pytest.mark.parametrize(
    "part", [Options(), Kind.ONE, types.SimpleNamespace(a=1), Pair(1, 2), Options]
)
def test_values_without_a_constant_have_no_key_for_another_process(part: Any) -> None:
    made: Any = nn.Linear(2, 2)
    lasting_key(Survey.of(made).key)
    made.held = part
    Survey.of(made)
    with pytest.raises(Unkept):
        lasting_key(Survey.of(made).key)


D, H = 3, 4
PAGE = Path(__file__).parents[2] / "docs" / "add-a-cell.md"


class Cell(nn.Module):
    def __init__(self, input_size: int = D, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.calls = input_size, hidden_size, 0
        self.lin, self.inner = (
            nn.Linear(input_size, hidden_size),
            nn.Linear(input_size, hidden_size),
        )
        self.norm = nn.BatchNorm1d(hidden_size, track_running_stats=False)
        self.register_buffer("count", torch.zeros(()))
        nn.init.ones_(self.lin.bias)


def _counted(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.calls += 1
    return 0.5 * h + m.lin(x) * m.calls


def _counted_in_a_buffer(m: Any, x: Tensor, h: Tensor) -> Tensor:
    m.count += 1
    return 0.5 * h + m.lin(x) * m.count


def _hooked() -> Cell:
    made = Cell()
    made.inner.register_forward_hook(lambda *given: 2 * given[2])
    return made


def test_hooks_of_all_modules_are_those_of_inner_modules() -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    with hook, pytest.raises(Refused, match="a Cell inside of it has hooks"):
        Survey.of(Cell())
    Survey.of(Cell())


def _holding() -> Cell:
    made: Any = Cell()
    made.drawn = random.Random(0)
    return made


Step = Callable[[Any, Tensor, Tensor], Tensor]
STEPS: dict[str, tuple[Callable[[], Cell], Step]] = {
    "computes row by row": (Cell, lambda m, x, h: (h + m.lin(x)).tanh()),
    "writes over its state or its input": (
        Cell,
        lambda m, x, h: h.mul_(0.5).add_(m.lin(x.mul_(2))),
    ),
    "makes shapes of `x_t.shape[0]`": (
        Cell,
        lambda m, x, h: 0.5 * h.view(x.shape[0], 2, 2).flatten(1) + m.lin(x),
    ),
    "has an operation that no program has": (Cell, lambda m, x, h: (h + m.lin(x)).atan()),
    "has a part without gradients": (
        Cell,
        lambda m, x, h: 0.5 * h + torch.no_grad()(torch.tanh)(m.lin(x)),
    ),
    "has hooks on an inner module": (_hooked, lambda m, x, h: 0.5 * h + m.inner(x)),
    "decides by a number of its parameters": (
        Cell,
        lambda m, x, h: h + m.lin(x) if m.lin.bias[0] > 0 else h,
    ),
    "holds what may change unseen": (_holding, lambda m, x, h: (h + m.lin(x)).tanh()),
    "takes a mean over the batch": (Cell, lambda m, x, h: 0.5 * h + m.lin(x - x.mean(0))),
    "normalises over the batch": (
        Cell,
        lambda m, x, h: 0.5 * h + m.norm(torch.cat([m.lin(x), h * 0]))[: len(h)],
    ),
    "decides by a number of the batch": (
        Cell,
        lambda m, x, h: 0.5 * h + m.lin(x) * (2 if x[0, 0].item() > 0 else 1),
    ),
    "decides by the number of rows": (
        Cell,
        lambda m, x, h: 0.5 * h + m.lin(x) if x.shape[0] > 2 else h,
    ),
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


@pytest.mark.skipif(bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels")
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
    assert all(torch.allclose(part, found[0], atol=1e-5) for part in found) == (on_all == "equal")
