"""minLSTM where its gates are almost open or almost shut."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from raglane.cells import CELLS
from raglane.cells.elementwise import ElementwiseWeights


@looped("dtype", [torch.float32, torch.float64])
@looped(
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
def test_minlstm_with_extreme_gates(f: float, i: float, keep: float, dtype: torch.dtype, device: torch.device) -> None:
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
    wanted = [slope * (1 - open_f), -slope * (1 - open_i)]
    assert by_gates[0, :2].tolist() == pytest.approx(wanted, abs=64 * eps)


@looped("level", [-18.0, -22.0, -30.0, -36.0, -80.0])
def test_minlstm_is_exact_where_gates_are_almost_shut(level: float, device: torch.device) -> None:
    """The formula as it stands still works in float64 here, because quotients of small numbers are exact."""
    cell = CELLS["minlstm"]
    prepared = torch.tensor([[level, level - 0.7, 1.3]], dtype=torch.float64, device=device)
    before = torch.tensor([[-0.4]], dtype=torch.float64, device=device)
    f, i = torch.exp(prepared[0, 0]), torch.exp(prepared[0, 1])
    f, i = f / (1 + f), i / (1 + i)
    wanted = (f * -0.4 + i * 1.3) / (f + i)
    output, _ = cell.step(ElementwiseWeights(prepared), prepared, (before,))
    assert output.item() == pytest.approx(wanted.item(), abs=1e-14)
