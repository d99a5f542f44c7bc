"""Rows divided by their lengths, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane.nn.mixers.row_functions import unit


def test_both_derivatives() -> None:
    rows = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return unit(x, 0.3)

    exact = rows / ((rows * rows).sum(-1, keepdim=True) + 0.3).sqrt()
    torch.testing.assert_close(function(rows), exact, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(function, rows)
    assert torch.autograd.gradgradcheck(function, rows)
