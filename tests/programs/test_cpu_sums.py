"""Products and sums of all elements on the cpu kernels: what stands beside a loop of programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cpu_networks import LIBRARY, POISON, Use
from looped import looped
from raglane.errors import RaglaneError
from raglane.kernels.cpu.programs import outer_products, times

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2}


def expected(left: Tensor, right: Tensor, groups: int) -> Tensor:
    parts = left.double().unflatten(1, (groups, -1)), right.double().unflatten(1, (groups, -1))
    return torch.einsum("ngi,ngj->gij", *parts)


@looped("isa", LIBRARY.isas)
@pytest.mark.usefixtures("two_threads")
def test_outer_products_and_sums(isa: str, use: Use) -> None:
    use(isa, POISON)
    for count in (0, 1, 7, 700):
        for groups, columns, wide in ((1, 1, 1), (1, 33, 5), (3, 16, 64), (2, 70, 17)):
            left, right = torch.randn(count, groups * columns + 3), torch.randn(count, groups * wide + 1)
            for dtype, tolerance in TOLERANCE.items():
                # Columns of wider tensors; beside them there are no numbers.
                parts = [torch.full_like(part, torch.nan).to(dtype) for part in (left, right)]
                inner = parts[0][:, 2:-1], parts[1][:, 1:]
                inner[0].copy_(left[:, 2:-1]), inner[1].copy_(right[:, 1:])
                got, total = outer_products(*inner, groups=groups, sums=True)
                assert got is not None
                assert total is not None
                wanted, scale = expected(*inner, groups), max(1, count) ** 0.5
                torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * scale)
                torch.testing.assert_close(
                    total.double(), inner[0].double().sum(0), rtol=tolerance, atol=tolerance * scale
                )
                alone, same = outer_products(inner[0], None, sums=True)
                assert alone is None
                assert same is not None
                assert torch.equal(same, total)


def test_threads_change_no_bit() -> None:
    left, right = torch.randn(2000, 130), torch.randn(2000, 70)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(outer_products(left, right, sums=True))
    torch.set_num_threads(1)
    for one, two in zip(*found, strict=True):
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)


def test_what_does_not_fit() -> None:
    good = torch.zeros(4, 6)
    wrong: list[tuple[Any, Any, int, str]] = [
        (good[0], good, 1, "left must be .*got shape"),
        ([1.0], good, 1, "left must be .*got a list"),
        (good, torch.zeros(5, 6), 1, r"right must be .*got shape \(5, 6\)"),
        (good, good.double(), 1, "right must be .*float64.*, got "),
        (good.half(), good, 1, "left must be .*float16.*, got "),
        (good.to("meta"), good, 1, "left must be .* on meta.*, got "),
        (good, good, 4, "groups must be .*got 4 for 6 and 6 columns"),
        (good, good, 0, "groups must be .*got 0"),
        (good[:, :0], good[:, :0], 1, "groups must be .*got 1 for 0"),
    ]
    for left, right, groups, words in wrong:
        with pytest.raises(RaglaneError, match=words):
            outer_products(left, right, groups=groups)


def test_products_of_rows_by_themselves() -> None:
    for groups, width, depth in ((1, 70, 17), (3, 5, 16), (1, 1, 1)):
        rows, weight = torch.randn(300, groups * depth), torch.randn(groups, width, depth)
        wanted = torch.einsum("ngk,gwk->ngw", rows.double().unflatten(1, (groups, -1)), weight.double()).flatten(1)
        for given in (weight, weight.mT.contiguous().mT):
            together = times(rows, given)
            torch.testing.assert_close(together.double(), wanted, rtol=1e-5, atol=1e-5)
            for number in (0, 7, 299):
                assert torch.equal(times(rows[number : number + 1], given), together[number : number + 1])
    assert times(torch.zeros(0, 2), torch.ones(1, 3, 2)).shape == (0, 3)
    with pytest.raises(RaglaneError, match=r"weight must be .*got shape"):
        times(torch.zeros(2, 2), torch.zeros(3, 2))
    with pytest.raises(RaglaneError, match=r"elements\[0\] must be .*got shape"):
        times(torch.zeros(2, 3), torch.zeros(1, 3, 2))
