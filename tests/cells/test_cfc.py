"""The closed-form continuous-time cell: its authors' implementation, times, and layers above the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import raglane as rl
from looped import looped
from raglane.cells import CELLS
from raglane.errors import ArgumentError

D, H, U = 3, 4, 5


def _batch(lengths: list[int]) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.rand(sum(lengths), D + 1, dtype=torch.float64), lengths=lengths)


def _loop(layer: Any, series: torch.Tensor, gap_column: int | None) -> torch.Tensor:
    """The equations, one step of one sequence at a time, on the parameters of the layer's first direction."""
    h, found = torch.zeros(H, dtype=torch.float64), []
    for element in series:
        t = 1.0 if gap_column is None else float(element[gap_column])
        x = torch.stack([part for column, part in enumerate(element) if column != gap_column])
        inner = torch.tanh(0.666 * (layer.weight_ih_l0 @ x + layer.bias_ih_l0 + layer.weight_hh_l0 @ h))
        f, g, a, b = (layer.weight_heads_l0 @ (1.7159 * inner) + layer.bias_heads_l0).view(4, H)
        s = 1 / (1 + torch.exp(-(a * t + b)))
        h = torch.tanh(f) * (1 - s) + torch.tanh(g) * s
        found.append(h)
    return torch.stack(found)


@looped("gap_column", [None, 0, 2, 3])
def test_times_in_any_column(gap_column: int | None) -> None:
    layer: Any = rl.nn.CfC(D + 1, H, backbone_units=U, gap_column=gap_column, dtype=torch.float64)
    batch = _batch([3, 0, 5])
    out, _ = layer(batch)
    for own, series in zip(out.to_list(), batch.to_list(), strict=True):
        if len(series):
            torch.testing.assert_close(own, _loop(layer, series, gap_column), rtol=1e-13, atol=1e-13)


def test_it_is_its_authors() -> None:
    """Values and gradients of the cell of the package ncps, with times."""
    ncps = pytest.importorskip("ncps.torch", reason="the package ncps is not installed")
    theirs = ncps.CfCCell(D, H, backbone_units=U, backbone_layers=1).double()
    layer: Any = rl.nn.CfC(D + 1, H, backbone_units=U, gap_column=D, dtype=torch.float64)
    first = theirs.backbone[0]
    heads = [theirs.ff1, theirs.ff2, theirs.time_a, theirs.time_b]
    with torch.no_grad():
        layer.weight_ih_l0.copy_(first.weight[:, :D])
        layer.weight_hh_l0.copy_(first.weight[:, D:])
        layer.bias_ih_l0.copy_(first.bias)
        layer.weight_heads_l0.copy_(torch.cat([head.weight for head in heads]))
        layer.bias_heads_l0.copy_(torch.cat([head.bias for head in heads]))
    series = torch.rand(2, 6, D + 1, dtype=torch.float64)
    h, outputs = torch.zeros(2, H, dtype=torch.float64), []
    for step in range(6):
        h, _ = theirs(series[:, step, :D], h, series[:, step, D:])
        outputs.append(h)
    wanted = torch.stack(outputs, 1).reshape(-1, H)
    out, _ = layer(rl.Ragged(list(series)))
    torch.testing.assert_close(out.values, wanted, rtol=1e-12, atol=1e-12)
    scale = torch.randn_like(wanted)
    mine = torch.autograd.grad(out.values, [layer.weight_ih_l0, layer.weight_hh_l0, layer.weight_heads_l0], scale)
    backbone, *others = torch.autograd.grad(wanted, [first.weight, *(head.weight for head in heads)], scale)
    expected = [backbone[:, :D], backbone[:, D:], torch.cat(others)]
    for own, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("width", [D + 1, H])
def test_layers_above_take_one_for_each_step(width: int) -> None:
    """Also where their inputs are as wide as the first layer's."""
    batch = rl.Ragged.from_flat(torch.rand(7, width, dtype=torch.float64), lengths=[4, 3])
    stack = rl.nn.CfC(width, H, num_layers=2, gap_column=1, dtype=torch.float64)
    below = rl.nn.CfC(width, H, gap_column=1, dtype=torch.float64)
    above = rl.nn.CfC(H, H, dtype=torch.float64)
    below.load_state_dict({name: part for name, part in stack.state_dict().items() if name.endswith("l0")})
    upper = {name.replace("l1", "l0"): part for name, part in stack.state_dict().items() if name.endswith("l1")}
    above.load_state_dict(upper)
    torch.testing.assert_close(stack(batch)[0].values, above(below(batch)[0])[0].values, rtol=1e-13, atol=1e-13)


def test_what_it_refuses() -> None:
    with pytest.raises(ArgumentError, match=r"gap_column must be one of the input's 3 columns.*, got 3"):
        rl.nn.CfC(D, H, gap_column=3)
    with pytest.raises(ArgumentError, match=r"gap_column must be .*got 0"):
        rl.nn.CfC(1, H, gap_column=0)
    with pytest.raises(ArgumentError, match="gap_column"):
        rl.nn.CfC(D, H, gap_column=-1)
    with pytest.raises(ArgumentError, match=r"backbone_units must be .*got 0"):
        rl.nn.CfC(D, H, backbone_units=0)
    assert CELLS["cfc"].above() is CELLS["cfc"]
    assert repr(rl.nn.CfC(D, H, gap_column=2)) == "CfC(3, 4, gap_column=2)"
