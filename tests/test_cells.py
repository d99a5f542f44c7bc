"""Cells: one step against PyTorch's own cells, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raglane.cells import CELLS, CellSpec, Weights
from raglane.cells.spec import summed_bias

D, H, P, R = 3, 5, 2, 4

# What PyTorch calls each cell. A new cell of our own is compared elsewhere, with a construction of its own.
TORCH_CELLS: dict[str, Any] = {
    "rnn_tanh": lambda **options: nn.RNNCell(D, H, nonlinearity="tanh", **options),
    "rnn_relu": lambda **options: nn.RNNCell(D, H, nonlinearity="relu", **options),
    "lstm": lambda **options: nn.LSTMCell(D, H, **options),
    "gru": lambda **options: nn.GRUCell(D, H, **options),
}


def _weights(module: Any) -> Weights:
    return Weights(
        module.weight_ih,
        module.weight_hh,
        module.bias_ih if module.bias else None,
        module.bias_hh if module.bias else None,
    )


def _step(
    cell: CellSpec, weights: Weights, values: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    offsets = torch.tensor([0, 1, values.shape[0]], device=values.device)
    return cell.step(weights, cell.prepare(weights, values, offsets), state)


def _randn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def test_every_cell_is_compared() -> None:
    assert set(TORCH_CELLS) == set(CELLS)
    assert all(cell.name == name for name, cell in CELLS.items())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_step_is_torchs(name: str, bias: bool, device: torch.device) -> None:
    cell = CELLS[name]
    module = TORCH_CELLS[name](bias=bias, device=device, dtype=torch.float64)
    values = _randn(R, D, device=device)
    state = tuple(_randn(R, size, device=device) for size in cell.state_sizes(H))
    output, new = _step(cell, _weights(module), values, state)
    wanted = module(values, state if len(state) > 1 else state[0])
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    torch.testing.assert_close(new, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(output, wanted[0], rtol=0, atol=1e-14)

    leaves = [values, *state, *module.parameters()]
    weighting = [torch.randn_like(part) for part in wanted]
    ours = torch.autograd.grad(new, leaves, weighting)
    theirs = torch.autograd.grad(wanted, leaves, weighting)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_lstm_with_projection_is_torchs(device: torch.device) -> None:
    module: Any = nn.LSTM(D, H, proj_size=P, device=device, dtype=torch.float64)
    weights = Weights(
        module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0, module.weight_hr_l0
    )
    cell = CELLS["lstm"]
    assert cell.state_sizes(H, P) == (P, H)
    values = _randn(R, D, device=device)
    state = tuple(_randn(R, size, device=device) for size in (P, H))
    output, new = _step(cell, weights, values, state)
    wanted, wanted_state = module(values.unsqueeze(0), tuple(part.unsqueeze(0) for part in state))
    torch.testing.assert_close(output, wanted[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(new, tuple(part[0] for part in wanted_state), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", CELLS)
def test_sizes_and_names(name: str) -> None:
    cell = CELLS[name]
    sizes = cell.state_sizes(H)
    assert len(sizes) == len(cell.states)
    assert cell.states[0] == "h"
    assert len(set(cell.gates)) == len(cell.gates)
    module = TORCH_CELLS[name]()
    assert module.weight_ih.shape == (len(cell.gates) * H, D)


@pytest.mark.parametrize("name", CELLS)
def test_a_step_changes_nothing_it_was_given(name: str) -> None:
    cell = CELLS[name]
    module = TORCH_CELLS[name](dtype=torch.float64)
    values = torch.randn(R, D, dtype=torch.float64)
    state = tuple(torch.randn(R, size, dtype=torch.float64) for size in cell.state_sizes(H))
    before = [values.clone(), *(part.clone() for part in state)]
    with torch.no_grad():
        _step(cell, _weights(module), values, state)
    assert all(torch.equal(a, b) for a, b in zip(before, [values, *state], strict=True))


@pytest.mark.parametrize("name", CELLS)
def test_a_step_of_no_rows(name: str) -> None:
    cell = CELLS[name]
    weights = _weights(TORCH_CELLS[name]())
    state = tuple(torch.zeros(0, size) for size in cell.state_sizes(H))
    prepared = cell.prepare(weights, torch.zeros(0, D), torch.tensor([0]))
    output, new = cell.step(weights, prepared, state)
    assert output.shape == (0, H)
    assert [part.shape for part in new] == [part.shape for part in state]


@pytest.mark.parametrize("name", CELLS)
def test_rows_do_not_look_at_each_other(name: str, device: torch.device) -> None:
    cell = CELLS[name]
    weights = _weights(TORCH_CELLS[name](device=device, dtype=torch.float64))
    values = _randn(R, D, device=device)
    state = tuple(_randn(R, size, device=device) for size in cell.state_sizes(H))
    clean, _ = _step(cell, weights, values, state)
    with torch.no_grad():
        values[1] = torch.nan
        state[0][1] = torch.inf
    dirty, _ = _step(cell, weights, values, state)
    others = [0, 2, 3]
    torch.testing.assert_close(dirty[others], clean[others], rtol=0, atol=1e-14)
    (gradient,) = torch.autograd.grad(dirty[others].sum(), values)
    assert bool(gradient[others].isfinite().all())


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_stays_itself(name: str, dtype: torch.dtype, device: torch.device) -> None:
    cell = CELLS[name]
    module = TORCH_CELLS[name](device=device, dtype=dtype)
    values = torch.randn(R, D, device=device, dtype=dtype)
    state = tuple(torch.randn(R, size, device=device, dtype=dtype) for size in cell.state_sizes(H))
    output, new = _step(cell, _weights(module), values, state)
    assert {output.dtype, *(part.dtype for part in new)} == {dtype}
    exact, _ = _step(cell, _weights(module.double()), values.double(), tuple(part.double() for part in state))
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)


def test_summed_bias() -> None:
    weight, one, two = torch.zeros(1, 1), torch.tensor([1.0]), torch.tensor([2.0])
    assert summed_bias(Weights(weight, weight)) is None
    assert summed_bias(Weights(weight, weight, one)) is one
    assert summed_bias(Weights(weight, weight, None, two)) is two
    both = summed_bias(Weights(weight, weight, one, two))
    assert both is not None
    assert both.tolist() == [3.0]
