"""The GRU with decay: what is missing, for how long, and layers above the first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import raglane as rl
from raglane.data.missing import fill_missing
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError

C, H = 2, 4
NAN = math.nan


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
    gaps = rl.Ragged([torch.rand(length) if not is_even else torch.ones(length) for length in batch.lengths.tolist()])
    made = rl.data.observations(batch, None if is_even else gaps)
    for own, series, times in zip(made.to_list(), batch.to_list(), gaps.to_list(), strict=True):
        torch.testing.assert_close(own.double(), _blocks(series, times), rtol=1e-6, atol=1e-6)
    assert torch.equal(made.offsets, batch.offsets)


def test_elapsed_begins_with_the_first_sequence_too() -> None:
    values = np.array([[1.0], [NAN], [NAN], [2.0], [NAN]], dtype=np.float32)
    blocks = fill_missing(values, np.array([0, 0, 3, 5]), "elapsed", np.array([7.0, 1.0, 2.0, 9.0, 0.5]))
    assert blocks.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 3], [2, 0, 0], [2, 1, 0.5]]
    assert fill_missing(np.zeros((0, 2), np.float32), np.array([0]), "elapsed").shape == (0, 6)


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


def test_layers_above_are_grus() -> None:
    batch = rl.data.observations(rl.Ragged([_series(4), _series(3)])).map(Tensor.double)
    stack: Any = rl.nn.GRUD(3 * C, 3 * C, num_layers=2, dtype=torch.float64)
    below = rl.nn.GRUD(3 * C, 3 * C, dtype=torch.float64)
    above: Any = rl.nn.GRU(3 * C, 3 * C, reset_after=False, dtype=torch.float64)
    below.load_state_dict({name: part for name, part in stack.state_dict().items() if name.endswith("l0")})
    with torch.no_grad():
        above.weight_ih_l0.copy_(stack.weight_ih_l1)
        above.weight_hh_l0.copy_(stack.weight_hh_l1)
        above.bias_ih_l0.copy_(stack.bias_ih_l1)
        above.bias_hh_l0.zero_()
    torch.testing.assert_close(stack(batch)[0].values, above(below(batch)[0])[0].values, rtol=1e-12, atol=1e-12)
    assert stack.weight_dx_l1 is None


def test_a_layer_learns_how_fast_to_forget() -> None:
    """Every decay of a new layer has a gradient: none begins where it could never move."""
    layer: Any = rl.nn.GRUD(3 * C, H)
    out, _ = layer(rl.data.observations(rl.Ragged([_series(20).float() for _ in range(4)])))
    out.values.square().sum().backward()
    assert bool(layer.weight_dx_l0.grad.ne(0).all())
    assert bool(layer.weight_dh_l0.grad.ne(0).all())


def test_what_it_refuses() -> None:
    with pytest.raises(ArgumentError, match=r"input_size must be a multiple of 3.*, got 4"):
        rl.nn.GRUD(4, H)
    batch = rl.Ragged([torch.zeros(3, C)])
    with pytest.raises(ShapeError, match=r"batch must be .*got torch\.float32 values of shape"):
        rl.data.observations(rl.Ragged([torch.zeros(3)]))
    with pytest.raises(ShapeError, match=r"batch must be .*got torch\.int64 values"):
        rl.data.observations(rl.Ragged([torch.zeros(3, C, dtype=torch.int64)]))
    with pytest.raises(ShapeError, match="gaps"):
        rl.data.observations(batch, rl.Ragged([torch.zeros(2)]))
    with pytest.raises(ShapeError, match="gaps"):
        rl.data.observations(batch, rl.Ragged([torch.zeros(3, 1)]))
    with pytest.raises(ArgumentTypeError, match="batch must be "):
        rl.data.observations(torch.zeros(3, C))  # type: ignore[arg-type]
