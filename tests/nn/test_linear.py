"""The linear layer whose rows do not depend on each other: values, gradients and bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.native.library import has_cell
from raglane.nn.linear import RowByRow, RowLinear

SIZES = ((1, 1, 1), (5, 64, 9), (31, 65, 3), (256, 64, 2), (500, 300, 1), (2000, 20, 17))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(
    not has_cell("mingru"), reason="these are promises of the cpu kernels, which are not built"
)
def test_bits_depend_on_no_other_row_and_no_thread(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a GPU has no such product")
    for dtype in (torch.float32, torch.float64):
        for rows, width, size in SIZES:
            layer, x = (
                RowLinear(width, size, dtype=dtype).eval(),
                torch.randn(rows, width, dtype=dtype),
            )
            whole = layer(x)
            for threads in (1, 3, 8):
                torch.set_num_threads(threads)
                assert torch.equal(layer(x), whole)
            for row in range(0, rows, max(rows // 5, 1)):
                assert torch.equal(layer(x[row : row + 1]), whole[row : row + 1])
                assert torch.equal(layer(x[row : row + 3]), whole[row : row + 3])


def test_values_and_gradients_are_those_of_a_linear_layer() -> None:
    for has_bias in (True, False):
        layer = RowLinear(6, 4, bias=has_bias, dtype=torch.float64)
        x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
        grad = torch.randn(3, 5, 4, dtype=torch.float64)
        expected = F.linear(x, layer.weight, layer.bias)
        inputs = [x, *layer.parameters()]
        wanted = torch.autograd.grad((expected * grad).sum(), inputs)
        for found in (layer(x), layer.eval()(x)):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
            for ours, theirs in zip(
                torch.autograd.grad((found * grad).sum(), inputs), wanted, strict=True
            ):
                torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)

        def square(x: Tensor, layer: RowLinear = layer) -> Tensor:
            found: Tensor = layer(x)
            return found.square()

        assert torch.autograd.gradgradcheck(square, (x,), fast_mode=True)


def test_other_inputs_use_torchs_product() -> None:
    layer = RowLinear(6, 4).eval()
    assert layer(torch.zeros(0, 6)).shape == (0, 4)
    assert layer(torch.zeros(6)).shape == (4,)
    assert layer.bfloat16()(torch.zeros(2, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(2, 6)).dtype is torch.bfloat16
    assert torch.func.vmap(layer)(torch.zeros(3, 2, 6)).shape == (3, 2, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.zeros(2, 5))
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.zeros(2, 6, dtype=torch.float64))
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_training_uses_torchs_product() -> None:
    layer, x = RowLinear(64, 9), torch.randn(256, 64)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.usefixtures("two_threads")
def test_cells_without_a_kernel_compute_the_same_row_by_row() -> None:
    rows, weight, start = (
        torch.randn(size, dtype=torch.float64) for size in ((20, 6), (5, 6), (20, 5))
    )

    def computed() -> list[Tensor]:
        sums = [
            torch.addmm(start, rows, weight.t(), beta=b, alpha=a)
            for b, a in ((1, 1), (0.5, 2), (0, 1))
        ]
        products = [
            F.linear(rows, weight),
            start @ weight.to_sparse(),
            rows.mm(mat2=weight.t()),
            rows @ weight[0],
        ]
        return [
            *sums,
            *products,
            torch.sigmoid(input=rows),
            torch.sigmoid(rows, out=torch.empty_like(rows)),
        ]

    with RowByRow():
        found = computed()
    torch.testing.assert_close(found, computed(), rtol=1e-13, atol=1e-13)
    gates, matrix = torch.randn(50, 65), torch.randn(65, 37)
    with RowByRow():
        for function in (
            torch.sigmoid,
            Tensor.sigmoid,
            lambda rows: rows @ matrix,
            lambda rows: rows.mm(matrix),
        ):
            assert torch.equal(
                function(gates), torch.cat([function(row) for row in gates.split(1)])
            )
        assert torch.sigmoid(torch.tensor([-1e4, 1e4])).tolist() == [0.0, 1.0]
