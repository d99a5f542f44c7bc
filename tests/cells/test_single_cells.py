"""Tests of single cells: minLSTM, sLSTM, GRU-D and CfC."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from raglane import cells
from raglane.cells import CELLS
from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError

C, D, H, R, U = 2, 3, 4, 4, 5
NAN = math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("f", "i", "keep"),
    [
        (0.0, 0.0, 0.5),
        (-200.0, -200.0, 0.5),  # both gates are 0 in float32
        (-2e4, -2e4, 0.5),
        (200.0, 200.0, 0.5),
        (200.0, -200.0, 1.0),
        (-200.0, 200.0, 0.0),
        (-199.0, -200.0, 1 / (1 + torch.e**-1)),
        (-60.0, -61.0, 1 / (1 + torch.e**-1)),
        (2e4, 0.0, 2 / 3),
        (-200.0, -2e4, 1.0),
    ],
)
def test_minlstm_with_extreme_gates(
    f: float, i: float, keep: float, dtype: torch.dtype, device: torch.device
) -> None:
    cell, eps = CELLS["minlstm"], torch.finfo(dtype).eps
    prepared = torch.tensor([[f, i, 3.0]], dtype=dtype, device=device, requires_grad=True)
    before = torch.tensor([[-1.0]], dtype=dtype, device=device, requires_grad=True)
    output, _ = cell.step(ElementwiseWeights(prepared), prepared, (before,))
    assert output.item() == pytest.approx(keep * -1.0 + (1 - keep) * 3.0, abs=16 * eps)
    by_gates, by_state = torch.autograd.grad(output.sum(), [prepared, before])
    assert by_state.item() == pytest.approx(keep, abs=8 * eps)
    assert by_gates[0, 2].item() == pytest.approx(1 - keep, abs=8 * eps)
    # d keep / d f = keep (1 - keep) (1 - sigmoid(f)), and minus the same with i for i; h - n = -4.
    open_f, open_i = (torch.sigmoid(torch.tensor(gate).double()).item() for gate in (f, i))
    slope = keep * (1 - keep) * -4.0
    assert by_gates[0, :2].tolist() == pytest.approx(
        [slope * (1 - open_f), -slope * (1 - open_i)], abs=64 * eps
    )


@pytest.mark.parametrize("level", [-300.0, -80.0, 0.0, 80.0, 300.0])
def test_a_sequence_begins_with_any_input_gate(level: float) -> None:
    """The first output is that of the candidate, and all stays finite, however small or large
    exp(i) would be.
    """
    weights = cells.slstm.SLSTMWeights(torch.zeros(4, 1), torch.zeros(4, 1))
    prepared = torch.tensor([[level, 2.0, 0.3, 0.5]], requires_grad=True)
    state: Any = (torch.zeros(1, 1),) * 4
    first, state = cells.SLSTM().step(weights, prepared, state)
    wanted = torch.sigmoid(torch.tensor(0.5)) * torch.tanh(torch.tensor(0.3))
    torch.testing.assert_close(first.item(), wanted.item(), rtol=1e-6, atol=0)
    second, state = cells.SLSTM().step(weights, torch.tensor([[-level, 2.0, -0.4, 0.5]]), state)
    gradient = torch.autograd.grad(first.sum() + second.sum(), prepared)[0]
    assert all(bool(part.isfinite().all()) for part in (second, gradient, *state))
    assert state[2].item() >= 1


def test_forget_gates_begin_open_by_different_amounts() -> None:
    layer: Any = rl.nn.SLSTM(3, 6, num_heads=2)
    bias = layer.bias_ih_l0.detach().view(4, 6)
    assert bias[1].tolist() == [3.0, 4.5, 6.0] * 2
    assert not bias[[0, 2, 3]].any()


def _series(length: int) -> Tensor:
    series = torch.randn(length, C, dtype=torch.float64)
    series[torch.rand(length, C) < 0.5] = torch.nan
    return series


def _blocks(series: Tensor, gaps: Tensor) -> Tensor:
    """The three blocks by the recursion of the paper, one channel and element at a time."""
    rows = []
    last, elapsed = [0.0] * C, [0.0] * C
    for place, element in enumerate(series):
        for channel in range(C):
            if place:
                was_missing = bool(series[place - 1, channel].isnan())
                elapsed[channel] = float(gaps[place]) + (elapsed[channel] if was_missing else 0.0)
            if not element[channel].isnan():
                last[channel] = float(element[channel])
        rows.append([*last, *element.isnan().double().tolist(), *elapsed])
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 3 * C)


@pytest.mark.parametrize("is_even", [True, False])
def test_observations_are_the_papers(is_even: bool) -> None:
    batch = rl.Ragged([_series(length) for length in (5, 0, 1, 9, 2)])
    gaps = rl.Ragged(
        [
            torch.rand(length) if not is_even else torch.ones(length)
            for length in batch.lengths.tolist()
        ]
    )
    made = rl.data.mark_missing(batch, None if is_even else gaps)
    for own, series, times in zip(made.to_list(), batch.to_list(), gaps.to_list(), strict=True):
        torch.testing.assert_close(own.double(), _blocks(series, times), rtol=1e-6, atol=1e-6)
    assert torch.equal(made.offsets, batch.offsets)


def test_a_state_and_a_value_are_trusted_less_with_time() -> None:
    """The decays alone: weights that let the value and the state through as they are."""
    layer: Any = rl.nn.GRUD(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.weight_dx_l0.fill_(0.5)
        layer.weight_dh_l0.fill_(0.25)
        layer.weight_ih_l0[1, 0] = -1.0  # z = sigmoid(-x)
    element = torch.tensor([[3.0, 1.0, 2.0]], dtype=torch.float64)
    out, _ = layer(rl.Ragged([element]), torch.full((1, 1, 1), 8.0, dtype=torch.float64))
    z = 1 / (1 + math.exp(3 * math.exp(-0.5 * 2.0)))
    assert out.values.item() == pytest.approx(z * 8.0 * math.exp(-0.25 * 2.0), abs=1e-12)
    element[0, 1] = 0.0  # present: its value does not decay, the state does
    out, _ = layer(rl.Ragged([element]), torch.full((1, 1, 1), 8.0, dtype=torch.float64))
    assert out.values.item() == pytest.approx(8.0 * math.exp(-0.5) / (1 + math.exp(3)), abs=1e-12)


def test_a_layer_learns_how_fast_to_forget() -> None:
    """Every decay of a new layer has a gradient: none begins where it could never move."""
    layer: Any = rl.nn.GRUD(3 * C, H)
    out, _ = layer(rl.data.mark_missing(rl.Ragged([_series(20).float() for _ in range(4)])))
    out.values.square().sum().backward()
    assert bool(layer.weight_dx_l0.grad.ne(0).all())
    assert bool(layer.weight_dh_l0.grad.ne(0).all())


def _cfc(layer: Any, series: torch.Tensor, gap_column: int | None) -> torch.Tensor:
    """The equations, one step of one sequence at a time, on the parameters of the layer's first
    direction.
    """
    h, found = torch.zeros(H, dtype=torch.float64), []
    for element in series:
        t = 1.0 if gap_column is None else float(element[gap_column])
        x = torch.stack([part for column, part in enumerate(element) if column != gap_column])
        inner = torch.tanh(
            0.666 * (layer.weight_ih_l0 @ x + layer.bias_ih_l0 + layer.weight_hh_l0 @ h)
        )
        f, g, a, b = (layer.weight_heads_l0 @ (1.7159 * inner) + layer.bias_heads_l0).view(4, H)
        s = 1 / (1 + torch.exp(-(a * t + b)))
        h = torch.tanh(f) * (1 - s) + torch.tanh(g) * s
        found.append(h)
    return torch.stack(found)


@pytest.mark.parametrize("gap_column", [None, 0, 2, 3])
def test_times_in_any_column(gap_column: int | None) -> None:
    layer: Any = rl.nn.CfC(D + 1, H, backbone_units=U, gap_column=gap_column, dtype=torch.float64)
    batch = rl.Ragged.from_flat(torch.rand(8, D + 1, dtype=torch.float64), lengths=[3, 0, 5])
    out, _ = layer(batch)
    for own, series in zip(out.to_list(), batch.to_list(), strict=True):
        if len(series):
            torch.testing.assert_close(own, _cfc(layer, series, gap_column), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("width", [D + 1, H])
def test_layers_above_take_one_for_each_step(width: int) -> None:
    """Also where their inputs are as wide as the first layer's."""
    batch = rl.Ragged.from_flat(torch.rand(7, width, dtype=torch.float64), lengths=[4, 3])
    stack = rl.nn.CfC(width, H, num_layers=2, gap_column=1, dtype=torch.float64)
    below = rl.nn.CfC(width, H, gap_column=1, dtype=torch.float64)
    above = rl.nn.CfC(H, H, dtype=torch.float64)
    below.load_state_dict(
        {name: part for name, part in stack.state_dict().items() if name.endswith("l0")}
    )
    upper = {
        name.replace("l1", "l0"): part
        for name, part in stack.state_dict().items()
        if name.endswith("l1")
    }
    above.load_state_dict(upper)
    torch.testing.assert_close(
        stack(batch)[0].values, above(below(batch)[0])[0].values, rtol=1e-13, atol=1e-13
    )


BATCH = rl.Ragged([torch.zeros(3, C)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: rl.nn.SLSTM(3, 6, num_heads=4),
            "heads must be a divisor of the number of units, 6.*, got 4",
        ),
        (lambda: rl.nn.SLSTM(3, 6, num_heads=0), "num_heads must be .*got 0"),
        (lambda: rl.nn.GRUD(4, H), "input_size must be a multiple of 3.*, got 4"),
        (
            lambda: rl.data.mark_missing(rl.Ragged([torch.zeros(3)])),
            r"batch must be .*torch\.float32 values of shape",
        ),
        (
            lambda: rl.data.mark_missing(rl.Ragged([torch.zeros(3, C).long()])),
            r"batch must be .*torch\.int64 values",
        ),
        (lambda: rl.data.mark_missing(BATCH, rl.Ragged([torch.zeros(2)])), "gaps"),
        (lambda: rl.data.mark_missing(torch.zeros(3, C)), "batch must be "),  # type: ignore[arg-type]
        (
            lambda: rl.nn.CfC(D, H, gap_column=3),
            "gap_column must be one of the input's 3 columns.*, got 3",
        ),
        (lambda: rl.nn.CfC(1, H, gap_column=0), "gap_column must be .*got 0"),
        (lambda: rl.nn.CfC(D, H, gap_column=-1), "gap_column"),
        (lambda: rl.nn.CfC(D, H, backbone_units=0), "backbone_units must be .*got 0"),
    ],
)
def test_wrong_sizes(make: Any, words: str) -> None:
    with pytest.raises((ArgumentError, ShapeError, ArgumentTypeError), match=words):
        make()


def test_options_are_in_the_repr() -> None:
    assert repr(rl.nn.CfC(D, H, gap_column=2)) == "CfC(3, 4, gap_column=2)"
    assert repr(rl.nn.SLSTM(3, 6, num_heads=2)) == "SLSTM(3, 6, num_heads=2)"
