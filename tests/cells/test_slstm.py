"""The sLSTM: heads, its authors' implementation, and numbers at which exponentials end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from cell_requests import random_weights
from looped import looped
from naive_cells import naive_step
from raglane import cells
from raglane.errors import ArgumentError

D, H, R = 3, 6, 4


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@looped("heads", [1, 2, 3, 6])
def test_heads_read_their_own_units(heads: int) -> None:
    cell = cells.SLSTM(heads)
    weights, values, mask = random_weights(cell, D, H), _randn(R, D), torch.rand(R, H, dtype=torch.float64)
    h, c, m = _randn(R, H), _randn(R, H), _randn(R, H)
    n = torch.rand(R, H, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, R])
    _, new = cell.step(weights, cell.prepare(weights, values, offsets), (h, c, n, m), mask)
    rows = [naive_step("slstm", weights, values[row], (h[row], c[row], n[row], m[row]), mask[row]) for row in range(R)]
    wanted = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    leaves = [values, h, c, n, m, *(part for part in weights if part is not None)]
    scales = [torch.randn_like(part) for part in wanted]
    torch.testing.assert_close(list(new), wanted, rtol=1e-12, atol=1e-12)
    mine = torch.autograd.grad(new, leaves, scales)
    torch.testing.assert_close(mine, torch.autograd.grad(wanted, leaves, scales), rtol=1e-11, atol=1e-11)


def test_it_is_its_authors() -> None:
    """Outputs, final states and gradients of a batch of 5 sequences of 7, in 2 heads; theirs has no input product."""
    xlstm = pytest.importorskip("xlstm.blocks.slstm.cell", reason="the package xlstm is not installed")
    config = xlstm.sLSTMCellConfig(
        hidden_size=H, num_heads=2, backend="vanilla", dtype="float32", enable_automatic_mixed_precision=True
    )
    theirs = xlstm.sLSTMCell(config).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))
    arguments = torch.randn(5, 7, 4 * H, dtype=torch.float64, requires_grad=True)
    wanted, last = theirs(arguments)  # (B, heads, T, H / heads); h, c, n, m of (B, H)

    layer: Any = rl.nn.SLSTM(4 * H, H, heads=2, dtype=torch.float64)
    gate_rows = theirs._recurrent_kernel_.view(2, 4, H // 2, H // 2).transpose(0, 1).reshape(4 * H, H // 2)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.eye(4 * H))
        layer.weight_hh_l0.copy_(gate_rows)
        layer.bias_ih_l0.copy_(theirs._bias_)
    out, state = layer(rl.Ragged(list(arguments)))
    flat = wanted.transpose(1, 2).reshape(5 * 7, H)
    torch.testing.assert_close(out.values, flat, rtol=1e-11, atol=1e-11)
    for own, other in zip(state, last, strict=True):
        torch.testing.assert_close(own[0], other, rtol=1e-11, atol=1e-11)

    scale = torch.randn_like(flat)
    mine = torch.autograd.grad(out.values, [arguments, layer.weight_hh_l0, layer.bias_ih_l0], scale)
    other = torch.autograd.grad(flat, [arguments, theirs._recurrent_kernel_, theirs._bias_], scale)
    recurrent = other[1].view(2, 4, H // 2, H // 2).transpose(0, 1).reshape(4 * H, H // 2)
    torch.testing.assert_close(mine, (other[0], recurrent, other[2]), rtol=1e-9, atol=1e-9)


@looped("level", [-300.0, -80.0, 0.0, 80.0, 300.0])
def test_a_sequence_begins_with_any_input_gate(level: float) -> None:
    """The first output is that of the candidate, and all stays finite, however small or large exp(i) would be."""
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


def test_heads_divide_the_units() -> None:
    with pytest.raises(ArgumentError, match=r"heads must be a divisor of the number of units, 6.*, got 4"):
        rl.nn.SLSTM(3, 6, heads=4)
    with pytest.raises(ArgumentError, match=r"heads must be .*got 0"):
        rl.nn.SLSTM(3, 6, heads=0)
    assert repr(rl.nn.SLSTM(3, 6, heads=2)) == "SLSTM(3, 6, heads=2)"


def test_forget_gates_begin_open_by_different_amounts() -> None:
    layer: Any = rl.nn.SLSTM(3, 6, heads=2)
    bias = layer.bias_ih_l0.detach().view(4, 6)
    assert bias[1].tolist() == [3.0, 4.5, 6.0] * 2
    assert not bias[[0, 2, 3]].any()
