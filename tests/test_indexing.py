"""Rows taken and placed: against a loop, at every size at which the way of moving them changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from raglane.segments import indexing
from raglane.segments.indexing import place_joined_rows, place_rows, take_rows

# Rows and features of: a few numbers; many, in rows of 16, 8, 4 and 2 bytes' multiples; a result
# out of the caches.
SIZES = [
    (0, (3,)),
    (1, ()),
    (5, (2, 3)),
    (3000, (8,)),
    (3000, (6,)),
    (3001, (7,)),
    (20000, ()),
    (70000, (16,)),
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def numbers(
    count: int, features: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, *features, dtype=dtype, device=device)
    return torch.randint(
        0, 2 if dtype is torch.bool else 100, (count, *features), device=device
    ).to(dtype)


@pytest.mark.parametrize(("count", "features"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_placed_and_taken_back(
    count: int, features: tuple[int, ...], dtype: torch.dtype, fill: float, device: torch.device
) -> None:
    values = numbers(count, features, dtype, device)
    index = torch.randperm(2 * count + 3, device=device)[:count]
    placed = place_rows(values, index, 2 * count + 3, fill)
    expected = torch.full((2 * count + 3, *features), fill, dtype=dtype, device=device)
    expected[index] = values
    assert placed.dtype is dtype
    assert torch.equal(placed, expected)
    assert torch.equal(
        place_joined_rows(values.tensor_split(4), index, 2 * count + 3, fill), expected
    )
    assert torch.equal(take_rows(placed, index), values)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn])
def test_dtypes_whose_rows_torch_cannot_move(dtype: torch.dtype) -> None:
    values, index = torch.arange(3 * 9).view(3, 9).to(dtype), torch.tensor([4, 0, 2])
    expected = torch.full((5, 9), 2.0).index_copy(0, index, values.float())
    for placed in (
        place_rows(values, index, 5, 2.0),
        place_joined_rows((values[:1], values[1:]), index, 5, 2.0),
    ):
        assert placed.dtype is dtype
        assert torch.equal(placed.float(), expected)
        assert torch.equal(take_rows(placed, index).float(), values.float())


@pytest.mark.parametrize(("count", "features"), SIZES)
def test_gradients_are_those_of_advanced_indexing(
    count: int, features: tuple[int, ...], device: torch.device
) -> None:
    values = torch.randn(2 * count + 3, *features, device=device, requires_grad=True)
    index = torch.randperm(2 * count + 3, device=device)[:count]
    grad = torch.randn(count, *features, device=device)
    (ours,) = torch.autograd.grad(take_rows(values, index), values, grad)
    (theirs,) = torch.autograd.grad(values[index], values, grad)
    assert torch.equal(ours, theirs)
    small = grad.clone().requires_grad_()
    placed = place_rows(small, index, 2 * count + 3, 7.0)
    assert placed.equal(place_rows(grad, index, 2 * count + 3, 7.0))
    (ours,) = torch.autograd.grad(placed, small, values.detach())
    assert torch.equal(ours, values.detach()[index])


@pytest.mark.parametrize("few", [0, 10**6])
def test_differentiable_twice(
    few: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_FEW", few)
    values = torch.randn(6, 2, dtype=torch.float64, device=device, requires_grad=True)
    index = torch.tensor([4, 0, 3], device=device)

    def take(x: Tensor) -> Tensor:
        return take_rows(x, index) ** 2

    def place(x: Tensor) -> Tensor:
        return place_rows(x[:3], index, 5, 2.0) ** 2

    def place_joined(x: Tensor) -> Tensor:
        return place_joined_rows((x[:2], x[4:5]), index, 5, 2.0) ** 2

    for function in (take, place, place_joined):
        assert gradcheck(function, (values,))
        assert gradgradcheck(function, (values,))
        assert torch.func.jacrev(function)(values).equal(
            torch.autograd.functional.jacobian(function, values)
        )


# PyTorch itself still scripts the formulas of forward mode.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("few", [0, 10**6])
def test_forward_mode_keeps_the_tangent(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "_FEW", few)
    values, index = torch.randn(3, 4), torch.tensor([4, 0, 3])
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(
            place_rows(forward_ad.make_dual(values, values * 2), index, 5)
        ).tangent
    assert tangent is not None
    assert torch.equal(tangent[index], values * 2)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_memory_that_starts_between_wide_numbers(offset: int) -> None:
    values, index = torch.randn(20000 * 4 + offset)[offset:].view(20000, 4), torch.randperm(20000)
    for part in (values, torch._neg_view(values)):
        assert torch.equal(take_rows(place_rows(part, index, 20000), index), part)
