"""Matrix products in which the bits of a row do not depend on other rows or the number of threads.

Libraries divide a product among threads and tiles by its shape, and vectorised functions compute
the end of an array differently, so the last bits of a row depend on the other rows. Predictions of
a stored model are computed with the cpu kernels instead, which add the products of a row in one
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raglane._utils.tracing import is_jit_traced, is_transformed, records_operators
from raglane.native.library import missing_kernels
from raglane.nn.mixers.row_functions import product


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``, in which the bits of a row do not depend on other rows.

    On a CPU, in float32 and float64, it is a product of the cpu kernels. On other devices, without
    the kernels, under autocast, and while torch records operators, it is
    ``torch.nn.functional.linear``.
    """
    if not _has_kernel(input, weight, bias):
        return F.linear(input, weight, bias)
    size, width = weight.shape
    rows = input.reshape(-1, width)
    if bias is not None:
        # The kernels of streams begin a sum with the bias, which is a product with 1 here.
        rows = F.pad(rows, (1, 0), value=1.0)
        weight = torch.cat([bias.unsqueeze(1), weight], 1)
    return product(rows, weight).reshape(*input.shape[:-1], size)


def _has_kernel(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the cpu kernels support a product; torch raises for an invalid one."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    return (
        not records_operators()  # first, because the number of rows may be symbolic
        and isinstance(input, Tensor)  # not a Ragged
        and input.dtype in (torch.float32, torch.float64)
        and all(tensor.dtype is input.dtype for tensor in tensors)
        and all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors)
        and 0 not in (*input.shape, *weight.shape)
        and input.shape[-1:] == weight.shape[1:]
        and not torch.is_autocast_enabled("cpu")
        and not is_jit_traced()
        and not is_transformed(input)
        and missing_kernels() is None
    )


class RowLinear(nn.Linear):
    """``torch.nn.Linear`` that uses :func:`row_linear` in evaluation mode."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        return (
            super().forward(input) if self.training else row_linear(input, self.weight, self.bias)
        )


class RowByRow(TorchFunctionMode):
    """A context in which torch's matrix products and sigmoids compute row by row, for cells without
    a kernel.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or its replacement."""
        kwargs = kwargs or {}
        return (func if "out" in kwargs else _ROW_BY_ROW.get(func, func))(*args, **kwargs)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = alpha * row_linear(mat1, mat2.t())
    return beta * input + product if beta else product


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    return row_linear(input, other.t()) if other.dim() == 2 else torch.matmul(input, other)


def _mm(input: Tensor, mat2: Tensor) -> Tensor:
    return _matmul(input, mat2)


def row_sigmoid(input: Tensor) -> Tensor:
    """Return the sigmoid of numbers; its bits do not depend on their positions."""
    # torch.sigmoid rounds the last numbers of an array, which do not fill a vector, differently.
    return 1 / (1 + torch.exp(-input))


_ROW_BY_ROW: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: row_linear,
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid), row_sigmoid),
}
