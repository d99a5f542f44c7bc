"""Products of all elements' rows with a weight, whose bits depend on each row alone."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from raglane.errors import ShapeError, message
from raglane.kernels.cpu.programs import run
from raglane.programs.program import Block, Instruction, Operand, Program, Weight

__all__ = ["times"]


def times(rows: Tensor, weight: Tensor, start: Tensor | None = None) -> Tensor:
    """``start + rows @ weight.T``, group by group.

    A sum begins with ``start`` and takes the columns of a row one by one, whatever rows are beside it. So a program
    that goes on from the results has the bits that it would have with this product in itself.

    Args:
        rows: ``(N, groups * depth)``, float32 or float64; any columns of a wider tensor.
        weight: ``(groups, width, depth)`` of any strides, such as those of ``.mT``.
        start: ``(groups * width,)``; zeros without.

    Returns:
        ``(N, groups * width)``.

    Example:
        >>> times(torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 1.0], [0.0, 3.0]]]), torch.ones(2))
        tensor([[4., 7.]])
    """
    if not isinstance(weight, Tensor) or weight.dim() != 3 or not weight.numel():
        got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise ShapeError(
            message("weight", got, "(groups, width, depth), none of them 0", "pass a tensor of that shape")
        )
    groups, width, depth = weight.shape
    program = _program(groups, width, depth, start is not None)
    offsets = weight.new_tensor([0, rows.shape[0]], dtype=torch.int64)
    outputs, _ = run(
        program, offsets=offsets, elements=[rows], vectors=[] if start is None else [start], weights=[weight]
    )
    return outputs[0]


@lru_cache(maxsize=256)
def _program(groups: int, width: int, depth: int, starts: bool) -> Program:
    columns = groups * width
    blocks = [Block("element", groups * depth), Block("local", columns)]
    start = Operand(-1)
    if starts:
        blocks.append(Block("vector", columns))
        start = Operand(2)
    made = Instruction("product", (Operand(1),), (start, Operand(0)), columns, weight=0)
    return Program(tuple(blocks), (Weight(groups, width, depth),), (made,), ((Operand(1), columns),), ())
