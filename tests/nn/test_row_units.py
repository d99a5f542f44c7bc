"""Functions of rows, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.nn.mixers import row_functions
from raglane.nn.mixers.row_functions import unit


def test_both_derivatives() -> None:
    rows = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return unit(x, 0.3)

    exact = rows / ((rows * rows).sum(-1, keepdim=True) + 0.3).sqrt()
    torch.testing.assert_close(function(rows), exact, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(function, rows)
    assert torch.autograd.gradgradcheck(function, rows)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "expm1": torch.expm1,
    "softplus": lambda rows: torch.logaddexp(rows, torch.zeros_like(rows)),
    "silu": F.silu,
    "gelu": lambda rows: F.gelu(rows, approximate="tanh"),
    "scaled": lambda rows: rows * rows[0],
    "shifted": lambda rows: rows + rows[0],
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions(name: str) -> None:
    rows = (3 * torch.randn(37, 5, dtype=torch.float64)).requires_grad_()
    if name in ("scaled", "shifted"):

        def function(x: Tensor) -> Tensor:
            return getattr(row_functions, name)(x, x[0])

    else:
        function = getattr(row_functions, name)
    result = function(rows)
    exact = FUNCTIONS[name](rows)
    torch.testing.assert_close(result, exact, rtol=1e-13, atol=1e-14)
    gradients = [torch.autograd.grad(each.sum(), rows)[0] for each in (result, exact)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradgradcheck(function, rows)
    single = rows.detach().float()
    torch.testing.assert_close(function(single), FUNCTIONS[name](single), rtol=1e-5, atol=1e-6)


def test_gelu_times_a_factor() -> None:
    rows, factor = torch.randn(2, 37, 5, dtype=torch.float64, requires_grad=True).unbind()
    exact = F.gelu(rows, approximate="tanh") * factor
    torch.testing.assert_close(row_functions.gelu(rows, factor), exact, rtol=1e-13, atol=1e-14)
    inputs = [each.detach().requires_grad_() for each in (rows, factor)]
    assert torch.autograd.gradcheck(row_functions.gelu, inputs)
    assert torch.autograd.gradgradcheck(row_functions.gelu, inputs)


@pytest.mark.parametrize("bound", [1e-4, 1e-8, 0.0])
def test_a_root_with_a_bounded_derivative(bound: float) -> None:
    squares = torch.tensor([bound], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(row_functions.bounded_root(squares), squares)
    assert gradient.item() == pytest.approx(min(1000.0, 0.5 * max(bound, 1e-30) ** -0.5))
