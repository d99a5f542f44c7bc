"""Every cell of the library and random cells as programs, and programs at numbers that random ones
never are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from cell_requests import random_weights
from raglane.cells import CELLS, GRU, LSTM, PeepholeLSTM
from raglane.cells.regularised import MarkedWeights, Regularised
from raglane.kernels.dispatch import BACKENDS
from raglane.programs.compiled import Wanted
from random_cells import RandomCell, ask, difference, engine, naive
from traced_cells import N, agree


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_gives_what_the_reference_does(name: str) -> None:
    cell = CELLS[name]
    sizes = cell.state_sizes(4)
    for need_states, bias in ((False, True), (True, False)):
        agree(
            cell,
            random_weights(cell, 6, 4, bias),
            sizes,
            sizes[0],
            width=6,
            need_states=need_states,
        )


def test_projections_and_clips() -> None:
    agree(
        CELLS["lstm"],
        random_weights(CELLS["lstm"], 6, 4, projection=3),
        (3, 4),
        3,
        width=6,
        need_states=True,
    )
    for cell in (
        LSTM(clip=0.3),
        GRU(clip=0.3),
        GRU(reset_after=False, clip=0.3),
        PeepholeLSTM(clip=0.3),
    ):
        sizes = cell.state_sizes(4)
        agree(cell, random_weights(cell, 6, 4), sizes, sizes[0], width=6)


@pytest.mark.parametrize("name", ["lstm", "gru", "layernorm_lstm", "sru"])
def test_dropout_on_the_state_and_zoneout(name: str) -> None:
    inner = CELLS[name]
    weights, sizes = random_weights(inner, 6, 4), inner.state_sizes(4)
    for drops in (False, True):
        for zoneout in (None, (0.3,) * len(sizes)):
            if not drops and zoneout is None:
                continue
            cell = Regularised(inner, drops_state=drops, zoneout=zoneout)
            held = torch.bernoulli(torch.full((N, sum(sizes)), 0.4, dtype=torch.float64))
            for given in (None, held) if zoneout else (None,):
                compiled = agree(
                    cell,
                    MarkedWeights(weights, given),
                    (*sizes, sizes[0]) if drops else sizes,
                    sizes[0],
                    width=6,
                )
                # The mask is the same at all steps of a sequence, so it is no state.
                assert len(compiled.unchanged) == drops


def test_cells_that_have_nothing_to_do_keep_their_programs_small() -> None:
    compiled = agree(CELLS["lstm"], random_weights(CELLS["lstm"], 6, 4), (4, 4), 4, width=6)
    program = compiled.forward(True, False, None).lowered.program
    names = [instruction.operation for instruction in program.instructions]
    assert sorted(names) == sorted(
        [*["product"] * 2, *["sigmoid"] * 3, *["tanh"] * 2, *["mul"] * 2, "fma"]
    )
    # Nothing else writes where the product of the element is, so that it can be computed before the
    # loop.
    written = [place.block for instruction in program.instructions for place in instruction.results]
    (of_element,) = [
        one
        for one in program.instructions
        if "element" in {program.blocks[o.block].kind for o in one.operands}
    ]
    assert written.count(of_element.results[0].block) == 1
    wanted = Wanted(True, False, (True,), (), (True,), (True, True))
    backward = [
        instruction.operation
        for instruction in compiled.backward(wanted).lowered.program.instructions
    ]
    assert [backward.count(name) for name in ("product", "sigmoid", "tanh")] == [1, 0, 1]


# The reference with another order of computing than the naive loop's, and whatever runs programs
# here.
ENGINES = [engine(backend="reference", schedule="packed")]
ENGINES += [engine(backend=name) for name in BACKENDS if name == "program"]


@pytest.mark.parametrize("seed", range(16))
def test_random_cells(seed: int) -> None:
    wanted = ask(seed, naive)
    for run in ENGINES:
        assert difference(ask(seed, run), wanted) is None, RandomCell(seed)


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
        assert str(
            difference(answer._replace(gradients=answer.gradients | {name: other}), answer)
        ).startswith(name)


#
# An initial state is zeros, and a state of logarithms minus infinity: a mistake only there is wrong
# at every first step, and no comparison on random numbers detects it.


inf, nan = math.inf, math.nan
NUMBERS = [0.0, 1.0, -1.0, 0.5, -0.5, 0.3, 2.0, 3.0, -3.0, 6.0, 20.0, 1e4, -1e4, inf, -inf, nan]
ROWS = [
    *([value] * 4 for value in (0.0, 1.0, -inf, inf)),
    [1, 2, 2, 1],
    [-inf, 0, 1, -inf],
    [3, 3, -1, 2],
    [0, 0, 1, 0],
    [500, 500, 400, 300],
    [nan, 0, 1, 2],
]

ONE: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in ("logsigmoid", "softplus", "gelu", "silu", "elu", "leaky_relu", "hardtanh")
    },
    **{name: getattr(F, name) for name in ("softshrink", "hardshrink", "relu6", "softsign")},
    **{
        name: getattr(torch, name)
        for name in ("abs", "relu", "sqrt", "rsqrt", "log", "exp", "tanh", "floor", "round")
    },
    "threshold": lambda a: F.threshold(a, 0.5, 0.2),
    "clamp": lambda a: a.clamp(-1, 1),
    "power": lambda a: a**2,
    "root": lambda a: a.abs() ** 0.5,
    "lists as an index": lambda a: (
        a[:, [3, 1, -2, 0]] * a[..., (0, 0, 1, 1)] + a[:, [True, False, True, True]][:, range(1)]
    ),
    "power of a tensor": lambda a: a.abs() ** (2 * a),
    "remainder": lambda a: a % 0.1,
    "negative remainder": lambda a: a % -3.0,
    "fmod": lambda a: torch.fmod(a, 0.1),
    "remainder of a tensor": lambda a: torch.remainder(a, a.abs() + 0.3),
    "share rounded down": lambda a: torch.div(a.clamp(-1e4, 1e4), 0.1, rounding_mode="floor"),
    "share cut off": lambda a: torch.div(a, 0.1, rounding_mode="trunc"),
    "lerp": lambda a: torch.lerp(1e20 * a, torch.ones_like(a), 1.0),
    "logaddexp": lambda a: torch.logaddexp(a, 1 * a),
    "between tensors": lambda a: a.clamp(a.abs() - 1, a.abs() + 1),
    "held in place": lambda a: _held(a),
    "where": lambda a: torch.where(a > 0, a.sqrt(), -a),
}
_ONES = torch.ones(4, dtype=torch.float64)
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda a: a.amax(1, True) * _ONES,
    "first largest": lambda a: a.max(1, True)[0] * _ONES,
    "first smallest": lambda a: a.min(1, True)[0] * _ONES,
    "length": lambda a: a / (a.norm(dim=1, keepdim=True) + 1e-6),
    "normalised": lambda a: F.normalize(a, dim=1),
    "deviation": lambda a: a / (a.std(1, keepdim=True) + 1e-6),
    "cosine": lambda a: F.cosine_similarity(a, a.flip(1), 1).unsqueeze(1) + a,
    "softmax": lambda a: a.softmax(1),
    "logarithm of softmax": lambda a: (1e15 * a).log_softmax(1),
    "logarithm of a sum": lambda a: a.logsumexp(1, True) * _ONES,
    "product": lambda a: a.prod(1, True) + a,
}


def _held(a: Tensor) -> Tensor:
    """Between bounds that autograd knows nothing of."""
    a = 1.5 * a
    with torch.no_grad():
        a.clamp_(-2.0, 2.0)
    return a


class Beside(nn.Module):
    """A function of an element; a state that nothing reads."""

    input_size = hidden_size = output_size = 4

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.ones = function, _ONES

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(x_t), state


def run(function: Any, rows: Tensor, backend: Any) -> tuple[Tensor, Tensor]:
    """What a function gives, ``(R, 4)``, and its gradient."""
    x = rows.clone().requires_grad_()
    out, _ = rl.nn.Recurrent(Beside(function), backend=backend)(
        rl.Ragged.from_flat(x, lengths=[1] * len(rows))
    )
    return out.values.detach(), torch.autograd.grad(out.values.sum(), x)[0]


def agrees(functions: dict[str, Any], rows: Tensor) -> None:
    known = ~rows.isnan().any(1)
    # One by one: torch's gradient of another function, 0 times infinity, would hide them.
    for name, function in functions.items():
        (values, mine), (wanted, theirs) = (
            run(function, rows, backend) for backend in ("program", "reference")
        )
        # Where torch's own slope is no number, any will do.
        mine = torch.where(theirs.isnan(), theirs, mine)
        for part, other, what in (
            (values, wanted, name),
            (mine[known], theirs[known], f"slope of {name}"),
        ):
            torch.testing.assert_close(
                part,
                other,
                rtol=1e-9,
                atol=1e-9,
                equal_nan=True,
                msg=partial("{}: {}".format, what),
            )


def test_functions_of_a_number() -> None:
    agrees(ONE, torch.tensor(NUMBERS, dtype=torch.float64).view(-1, 4))


def test_functions_of_a_row() -> None:
    agrees(BY_ROW, torch.tensor(ROWS, dtype=torch.float64))
