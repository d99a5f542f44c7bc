"""Products of all elements' rows with a weight, whose bits depend on each row alone."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from raglane.errors import ArgumentError, ShapeError, message
from raglane.kernels.cpu.programs import run
from raglane.kernels.cpu.tensors import checked_rows
from raglane.native.library import DTYPES, call, program_preamble
from raglane.native.memory import address
from raglane.programs.program import Block, Instruction, Operand, Program, Weight


def times(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight.T``, group by group."""
    if not isinstance(weight, Tensor) or weight.dim() != 3 or not weight.numel():
        got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise ShapeError(
            message("weight", got, "(groups, width, depth), none of them 0", "pass a tensor of that shape")
        )
    groups, width, depth = weight.shape
    offsets = weight.new_tensor([0, rows.shape[0]], dtype=torch.int64)
    outputs, _ = run(_program(groups, width, depth), offsets=offsets, elements=[rows], weights=[weight])
    return outputs[0]


@lru_cache(maxsize=256)
def _program(groups: int, width: int, depth: int) -> Program:
    columns = groups * width
    blocks = Block("element", groups * depth), Block("local", columns)
    made = Instruction("product", (Operand(1),), (Operand(-1), Operand(0)), columns, weight=0)
    return Program(blocks, (Weight(groups, width, depth),), (made,), ((Operand(1), columns),), ())


# raglane_outer: fifteen numbers.
_pack = struct.Struct("=15q").pack


def outer_products(
    left: Tensor, right: Tensor | None, *, groups: int = 1, sums: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The sum over the elements of the outer products of their rows, and of the rows of ``left``."""
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
    strides = left.stride(0), 0 if right is None else right.stride(0)
    addresses = [address(part) for part in (left, right, to, total)]
    call("raglane_outer_products", _pack(abi, isa, dtype, flags & 1, threads, count, *shape, *strides, *addresses))
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
