"""Matrix products in which the bits of a row do not depend on other rows or the number of threads.

Libraries divide a product among threads and tiles by its shape, and vectorised functions compute the end of an array
differently, so the last bits of a row depend on the other rows. Predictions of a stored model are computed with the cpu
kernels instead, which add the products of a row in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raglane._utils.tracing import is_jit_traced, is_transformed, records_operators
from raglane.cells.elementwise import ElementwiseWeights
from raglane.cells.mingru import MinGRU
from raglane.kernels.contract import Request
from raglane.kernels.cpu.backend import BACKEND
from raglane.native.library import has_cell

_CELL = MinGRU()
# Its sigmoid is exactly 1 in both dtypes.
_OPEN = 100.0


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``, in which the bits of a row do not depend on other rows.

    On a CPU, in float32 and float64, the cpu kernels compute it as a minGRU with an open gate, on sequences of one
    element. This is twice the work of the product. On other devices, without the kernels, under autocast, and while
    torch records operators, it is ``torch.nn.functional.linear``.
    """
    if not _has_kernel(input, weight, bias):
        return F.linear(input, weight, bias)
    size, width = weight.shape
    rows = input.reshape(-1, width)
    gate = weight.new_full((size,), _OPEN)
    both = ElementwiseWeights(
        torch.cat([torch.zeros_like(weight), weight]),
        bias=torch.cat([gate, torch.zeros_like(gate) if bias is None else bias]),
    )
    offsets = torch.arange(rows.shape[0] + 1, device="cpu")
    request = Request(_CELL, rows, offsets, None, (), (both,), state_sizes=(size,))
    return cast(Tensor, BACKEND.run(request, "lanes").output).reshape(*input.shape[:-1], size)


def _has_kernel(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if the cpu kernels support a product; torch raises an error for an invalid one."""
    return (
        not records_operators()  # first, because the number of rows may be symbolic
        and input.is_cpu
        and input.dtype in (torch.float32, torch.float64)
        and all(part.is_cpu and part.dtype is input.dtype for part in (weight, bias) if part is not None)
        and input.numel() > 0
        and input.shape[-1:] == weight.shape[1:]
        and not torch.is_autocast_enabled("cpu")
        and not is_jit_traced()
        and not is_transformed(input)
        and has_cell(_CELL.name)
    )


class RowLinear(nn.Linear):
    """``torch.nn.Linear`` that uses :func:`row_linear` in evaluation mode."""

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(*, in_features)`` to ``(*, out_features)``."""
        return super().forward(input) if self.training else row_linear(input, self.weight, self.bias)


class RowByRow(TorchFunctionMode):
    """A context in which torch's products and sigmoids compute row by row, for cells without a kernel."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or its replacement."""
        return _ROW_BY_ROW.get(func, func)(*args, **kwargs or {})


def _addmm(start: Tensor, rows: Tensor, transposed: Tensor) -> Tensor:
    return start + row_linear(rows, transposed.t())


def row_sigmoid(values: Tensor) -> Tensor:
    """Return the sigmoid of numbers; its bits do not depend on their positions."""
    # torch.sigmoid rounds the last numbers of an array, which do not fill a vector, differently.
    return 1 / (1 + torch.exp(-values))


_ROW_BY_ROW: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: row_linear,
    torch.addmm: _addmm,
    torch.sigmoid: row_sigmoid,
    Tensor.sigmoid: row_sigmoid,
}
