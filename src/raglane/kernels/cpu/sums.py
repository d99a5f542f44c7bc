"""Sums over all elements, which gradients of parameters are: of outer products of rows, and of rows."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from raglane.errors import ArgumentError, message
from raglane.kernels.cpu.tensors import checked_rows
from raglane.native.library import DTYPES, call, program_preamble
from raglane.native.memory import address

__all__ = ["outer_products"]

# raglane_outer: fifteen numbers.
_pack = struct.Struct("=15q").pack


def outer_products(
    left: Tensor, right: Tensor | None, *, groups: int = 1, sums: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The sum over the elements of the outer products of their rows, and of the rows of ``left``.

    A sum takes its terms in the order of memory, so its bits are the same on any number of threads.

    Args:
        left: ``(N, groups * G)``, float32, float64 or bfloat16; any columns of a wider tensor.
        right: ``(N, groups * D)`` of the same dtype; None where only the rows are to be summed.
        groups: parts of a row that have an outer product each.
        sums: whether the rows of ``left`` are summed.

    Returns:
        ``(groups, G, D)``, None without ``right``; and ``(groups * G,)``, None where it was not asked for.

    Example:
        >>> left, right = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> outer_products(left, right, sums=True)
        (tensor([[[1., 2.]]]), tensor([3.]))
    """
    left = _rows("left", left, None, None)
    count, columns = left.shape
    if right is not None:
        right = _rows("right", right, count, left.dtype)
    wide = columns if right is None else right.shape[1]
    if groups < 1 or columns % groups or wide % groups or not columns or not wide:
        got = f"{groups} for {columns} and {wide} columns"
        raise ArgumentError(message("groups", got, "a number that divides both", "cut off what does not belong to any"))
    shape = (groups, columns // groups, wide // groups)
    to = None if right is None else torch.empty(shape, dtype=left.dtype, device="cpu")
    total = torch.empty(columns, dtype=left.dtype, device="cpu") if sums else None
    abi, isa, dtype, flags, threads = program_preamble(left.dtype)
    fields = _pack(
        abi,
        isa,
        dtype,
        flags & 1,
        threads,
        count,
        *shape,
        left.stride(0),
        0 if right is None else right.stride(0),
        left.data_ptr(),
        address(right),
        address(to),
        address(total),
    )
    call("raglane_outer_products", fields)
    return to, total


def _rows(name: str, part: Any, count: int | None, dtype: torch.dtype | None) -> Tensor:
    """Rows that C can read, as many and of the dtype that is asked for."""
    try:
        rows, columns = part.shape
    except (AttributeError, TypeError, ValueError):
        rows, columns = (0 if count is None else count), 0
    return checked_rows(
        name, part, (rows if count is None else count, columns), tuple(DTYPES) if dtype is None else (dtype,)
    )
