"""Every cell of the library and every regulariser as a program."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from raglane.cells import CELLS, GRU, LSTM, PeepholeLSTM
from raglane.cells.regularised import Regularised, RegularisedWeights
from traced_cells import N, agree, weights_of


@pytest.mark.usefixtures("interpreter")
def test_a_program_means_the_same_to_a_second_interpreter() -> None:
    for name in ("gru_reset_before", "layernorm_lstm", "sru"):
        cell = CELLS[name]
        agree(cell, weights_of(cell), cell.state_sizes(4), 4, width=6, need_states=True)


@looped("name", CELLS)
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


@looped("name", ["lstm", "gru", "layernorm_lstm", "sru"])
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
