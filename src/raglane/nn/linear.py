"""Products whose answer to a row never depends on the rows beside it, or on the number of threads.

A library divides a matrix product among threads and into tiles as its shape suggests, and a vectorised function may
treat the end of its memory in another way. So the last bits of a row differ with the rows around it. The cpu kernels
add up a row's products in one order: what a stored model predicts is made of those.
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
# The sigmoid of this is 1, without rounding, in both dtypes.
_OPEN = 100.0


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``, each row rounded as if it were alone.

    The cpu kernels compute it on a CPU, in float32 and float64: as a minGRU whose gate is open, on sequences of one
    element each. That is twice the work of the product. Elsewhere, where the kernels are not built, under autocast and
    where torch follows what operators are called it is ``torch.nn.functional.linear``.
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
    """True if the cpu kernels compute a product; torch raises for a wrong one."""
    return (
        not records_operators()  # first: the number of rows may be a symbol
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
    """``torch.nn.Linear`` which is :func:`row_linear` outside of training, with its arguments and parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """``(*, in_features)`` to ``(*, out_features)``."""
        return super().forward(input) if self.training else row_linear(input, self.weight, self.bias)


class RowByRow(TorchFunctionMode):
    """Within it torch's products and sigmoids round each row as if it were alone: for cells that no kernel runs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call what stands for a function of torch."""
        return _ROW_BY_ROW.get(func, func)(*args, **kwargs or {})


def _addmm(start: Tensor, rows: Tensor, transposed: Tensor) -> Tensor:
    return start + row_linear(rows, transposed.t())


def _sigmoid(values: Tensor) -> Tensor:
    # torch.sigmoid rounds the last numbers of a piece of memory, which no vector fills, in another way.
    return 1 / (1 + torch.exp(-values))


_ROW_BY_ROW: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: row_linear,
    torch.addmm: _addmm,
    torch.sigmoid: _sigmoid,
    Tensor.sigmoid: _sigmoid,
}
