"""What a step computes of its parameters alone, in a loop that knows it beforehand: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from looped import looped
from raglane.cells.module import ModuleCell
from raglane.programs.step import Step
from traced_cells import Sized, agree, compiled_of, module_cell

Known = Callable[[Any], Tensor]


class Own(Sized):
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
    "one twice": (lambda m: m.one + m.one, True),
    "three": (lambda m: m.one + m.two + m.one, True),
    "a parameter and a buffer": (lambda m: m.one + m.fixed, True),
    "a parameter and a row of another": (lambda m: m.one + m.wide[1], True),
    "two rows": (lambda m: m.wide[1] + m.wide[2], True),
    "parts of two": (lambda m: m.one[1:2] + m.two[3:], True),
    "with a factor": (lambda m: torch.add(m.one, m.two, alpha=0.25), False),
    "and a constant": (lambda m: m.one + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), False),
    "a constant and": (lambda m: torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) + m.one, False),
    "and a number": (lambda m: m.one + 0.25, False),
    "and one for all": (lambda m: m.one + m.single, False),
    "one for all, and": (lambda m: m.single + m.one, False),
    "and what is computed": (lambda m: m.one + m.two.exp(), False),
    "what is computed, and": (lambda m: m.two.exp() + m.one, False),
    "a sum and what is computed": (lambda m: m.one + m.two + m.one.sin(), False),
    "a row of what is turned": (lambda m: m.turned[1], False),
    "a column": (lambda m: m.cube[:, 1] + m.one, False),
    "a diagonal": (lambda m: m.one + m.cube.diagonal(), False),
    "of a wider memory": (lambda m: m.every, False),
    "of a wider memory, and": (lambda m: m.every + m.one, False),
    "less another": (lambda m: m.one - m.two, False),
}


@looped("name", SUMS)
def test_what_is_known_beside_the_loop(name: str) -> None:
    module = Own()
    module.of, is_moved = SUMS[name]
    compiled = agree(module_cell(module), module, (4,), 4, need_states=True)
    assert (compiled.trace.parameters.moved is not None) == is_moved


def test_what_is_detached_has_no_gradient() -> None:
    module = Own()
    for of in (lambda m: m.one + m.two.detach(), lambda m: m.one.detach() + m.one):
        module.of = of
        agree(module_cell(module), module, (4,), 4)


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "as it is": lambda m, h: h @ m.square,
    "turned": lambda m, h: h @ m.square.t(),
    "both": lambda m, h: h @ m.square + (h @ m.square.t()).tanh(),
    "a wide one, turned": lambda m, h: (h @ m.turned.t()).repeat(1, 2)[:, :4],
    "every other column": lambda m, h: (h[:, :3] @ m.wide)[:, :2].repeat(1, 2),
    "a part": lambda m, h: (h[:, :2] @ m.wide[1:, ::2]).repeat(1, 2),
    "as one of many": lambda m, h: torch.einsum(
        "bhd,hnd->bhn", h.view(-1, 2, 2), m.square.view(2, 2, 4)[..., ::2].mT
    ).flatten(1),
}


@looped("name", PRODUCTS)
def test_weights_of_any_strides(name: str) -> None:
    module: Any = Own()
    module.square = nn.Parameter(
        torch.randn(4, 4, dtype=torch.float64).t() if name != "as one of many" else module.square.data.contiguous()
    )
    module.of = lambda _: torch.zeros(4, dtype=torch.float64)
    run = PRODUCTS[name]
    module.step = lambda x_t, state: ((new := (run(module, state) + module.input(x_t)).tanh()), new)
    agree(module_cell(module), module, (4,), 4, need_states=True)


def test_every_fact_of_a_step_is_a_part_of_its_key() -> None:
    module = Own()
    module.of = SUMS["two"][0]
    facts: dict[str, Any] = {"output_size": 4, "state_sizes": (4,), "is_tuple": False}
    changes: list[dict[str, Any]] = [{}, {"output_size": 3}, {"state_sizes": (4, 4)}, {"is_tuple": True}]
    cells = [ModuleCell(module, **facts | change) for change in changes]
    rests = [(6, (4,), 4, torch.float64), (5, (3,), 4, torch.float64)]
    rests += [(5, (4,), 3, torch.float64), (5, (4,), 4, torch.float32)]
    seen = [Step(cell, module, 5, (4,), 4, torch.float64) for cell in cells]
    seen += [Step(cells[0], module, *rest) for rest in rests]
    assert len({step.key for step in seen}) == len(seen)
    module.eval()
    assert seen[0].key != Step(cells[0], module, 5, (4,), 4, torch.float64).key


def test_programs_are_made_for_what_a_call_needs() -> None:
    """A backward pass gets gradients of outputs, of all states or of none of them, and gives those that are wanted."""
    module = Own()
    module.of = SUMS["two"][0]
    compiled, *_ = compiled_of(module_cell(module), module, (4,), 4)
    made = {
        id(compiled.forward(*flags, None)) for flags in ((True, False), (False, True), (True, True), (False, False))
    }
    assert len(made) == 4
