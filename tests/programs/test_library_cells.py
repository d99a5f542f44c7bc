"""Every cell of the library and every regulariser as a program."""

from __future__ import annotations

import pytest
import torch

from raglane.cells import CELLS, GRU, LSTM, PeepholeLSTM
from raglane.cells.regularised import Regularised, RegularisedWeights
from raglane.kernels.dispatch import BACKENDS
from random_cells import Engine, RandomCell, ask, difference, engine, naive
from traced_cells import N, agree, weights_of


@pytest.mark.usefixtures("interpreter")
def test_a_program_means_the_same_to_a_second_interpreter() -> None:
    for name in ("gru_reset_before", "layernorm_lstm", "sru"):
        cell = CELLS[name]
        agree(cell, weights_of(cell), cell.state_sizes(4), 4, width=6, need_states=True)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_gives_what_the_reference_does(name: str) -> None:
    cell = CELLS[name]
    sizes = cell.state_sizes(4)
    for need_states, bias in ((False, True), (True, False)):
        agree(cell, weights_of(cell, bias=bias), sizes, sizes[0], width=6, need_states=need_states)


def test_projections_and_clips() -> None:
    agree(CELLS["lstm"], weights_of(CELLS["lstm"], projection=3), (3, 4), 3, width=6, need_states=True)
    for cell in (LSTM(clip=0.3), GRU(clip=0.3), GRU(reset_after=False, clip=0.3), PeepholeLSTM(clip=0.3)):
        sizes = cell.state_sizes(4)
        agree(cell, weights_of(cell), sizes, sizes[0], width=6)


@pytest.mark.parametrize("name", ["lstm", "gru", "layernorm_lstm", "sru"])
def test_dropout_on_the_state_and_zoneout(name: str) -> None:
    inner = CELLS[name]
    weights, sizes = weights_of(inner), inner.state_sizes(4)
    for drops in (False, True):
        for zoneout in (None, (0.3,) * len(sizes)):
            if not drops and zoneout is None:
                continue
            cell = Regularised(inner, drops_state=drops, zoneout=zoneout)
            held = torch.bernoulli(torch.full((N, sum(sizes)), 0.4, dtype=torch.float64))
            for given in (None, held) if zoneout else (None,):
                compiled = agree(
                    cell, RegularisedWeights(weights, given), (*sizes, sizes[0]) if drops else sizes, sizes[0], width=6
                )
                # The mask is the same at all steps of a sequence, so it is no state.
                assert len(compiled.unchanged) == drops


def test_cells_that_have_nothing_to_do_keep_their_programs_small() -> None:
    compiled = agree(CELLS["lstm"], weights_of(CELLS["lstm"]), (4, 4), 4, width=6)
    program = compiled.forward(True, False, None).lowered.program
    names = [instruction.operation for instruction in program.instructions]
    assert sorted(names) == sorted([*["product"] * 2, *["sigmoid"] * 3, *["tanh"] * 2, *["mul"] * 2, "fma"])


# -- random cells ------------------------------------------------------------------------------------------------------


SEEDS = range(100)
# The reference with another order of computing than the naive loop's, and whatever runs programs here.
ENGINES: dict[str, Engine] = {
    "reference": engine(backend="reference", schedule="packed"),
    **{name: engine(backend=name) for name in BACKENDS if name == "program"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_hundred_random_cells(name: str) -> None:
    faults = []
    for seed in SEEDS:
        fault = difference(ask(seed, ENGINES[name]), ask(seed, naive))
        if fault is not None:
            faults.append(f"{RandomCell(seed)}\n{fault}")
    assert not faults, "\n\n".join(faults[:3])


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
