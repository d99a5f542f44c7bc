"""The gated norm of heads against plain torch in float64, and its bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from raglane.kernels.cpu.gated_norm import GatedNorm

EPS = 1e-6
KINDS = ["centred", "silu", "centred silu"]
SIZES = [(0, 2, 3), (1, 1, 1), (3, 2, 17), (300, 3, 5), (257, 4, 64), (2, 1, 130)]


def drawn(rows: int, heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + size)
    y = 3 * torch.randn(rows, heads, size, dtype=torch.float64) + 1
    gate, weight = [torch.randn(*shape, heads * size) for shape in ((rows,), ())]
    y, gate, weight = [each.to(dtype).requires_grad_() for each in (y, gate, weight)]
    return y, gate, weight


def gated_norm(kind: str, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    heads = y.shape[1]
    norm = GatedNorm(heads, EPS, is_centred="centred" in kind, is_silu="silu" in kind)
    return norm(y.flatten(1), gate, weight)


def plain(kind: str, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    if "centred" in kind:
        y = y - y.mean(2, keepdim=True)
    unit = y / (y.square().mean(2, keepdim=True) + EPS).sqrt()
    return unit.flatten(1) * weight * (gate if "silu" in kind else 1) / (1 + torch.exp(-gate))


def with_gradients(tensors: Sequence[Tensor], output: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    upstream = torch.randn(output.shape, dtype=torch.float64).to(output.dtype)
    return [output, *torch.autograd.grad(output, tensors, upstream)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)],
)
def test_values_and_gradients(
    sizes: tuple[int, int, int], dtype: torch.dtype, tolerance: float, kind: str
) -> None:
    tensors = drawn(*sizes, dtype)
    results = with_gradients(tensors, gated_norm(kind, *tensors))
    a, b, c = exact = [each.detach().double().requires_grad_() for each in tensors]
    # A head of one number is all noise of rounding, by 1 / sqrt(eps).
    factor = 1 if sizes[2] > 1 else EPS**-0.5
    for result, expected in zip(results, with_gradients(exact, plain(kind, a, b, c)), strict=True):
        assert result.shape == expected.shape
        scale = tolerance * factor
        torch.testing.assert_close(result.double(), expected, rtol=scale, atol=scale)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_depend_on_no_thread_and_no_row(dtype: torch.dtype) -> None:
    kind = "silu"
    tensors = drawn(3000, 4, 64, dtype)
    both = with_gradients(tensors, gated_norm(kind, *tensors))
    torch.set_num_threads(1)
    one = with_gradients(tensors, gated_norm(kind, *tensors))
    assert all(torch.equal(*pair) for pair in zip(both, one, strict=True))
    y, gate, weight = tensors
    assert torch.equal(gated_norm(kind, y[5:9], gate[5:9], weight), one[0][5:9])


def test_nan_stays_in_its_head() -> None:
    y, gate, weight = drawn(4, 3, 5, torch.float32)
    with torch.no_grad():
        y[2, 1, 3] = torch.nan
    output, of_y, of_gate, of_weight = with_gradients(
        (y, gate, weight), gated_norm("centred", y, gate, weight)
    )
    for each in (output, of_y.flatten(1), of_gate):
        expected = torch.zeros(4, 15, dtype=torch.bool)
        expected[2, 5:10] = True
        assert torch.equal(each.isnan(), expected)
    assert of_weight.isnan().tolist() == [False] * 5 + [True] * 5 + [False] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_strided_rows_and_second_derivatives(kind: str) -> None:
    y, gate, weight = drawn(3, 2, 4, torch.float64)
    wide = torch.stack([gate, gate], 2).detach()[..., 0]
    assert torch.equal(gated_norm(kind, y, wide, weight), gated_norm(kind, y, gate, weight))
    assert torch.autograd.gradgradcheck(
        lambda a, b, c: gated_norm(kind, a, b, c), (y, gate, weight)
    )


def test_transformations() -> None:
    y, gate, weight = drawn(3, 2, 4, torch.float64)
    mapped = torch.func.vmap(lambda a, b: gated_norm("centred", a, b, weight))(
        y.unsqueeze(1), gate.unsqueeze(1)
    )
    torch.testing.assert_close(mapped.squeeze(1), gated_norm("centred", y, gate, weight))
