"""Elements that move within their sequence, or add up along it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.tracing import is_exporting
from raglane.segments.index import positions, repeated
from raglane.segments.indexing import take_rows
from raglane.segments.reductions import scalar, spread

__all__ = ["cumsum", "reverse", "reverse_index", "shift"]


class _Cumsum(torch.autograd.Function):
    """A running sum by doubling: after round ``r`` an element holds the sum of the ``2 ** r`` before it.

    One running sum over all values, less what stood at each sequence's start, would be one pass, but it
    rounds like the sum of the whole batch and lets a NaN reach every later sequence.
    """

    @staticmethod
    def forward(values: Tensor, position: Tensor, longest: int, backwards: bool) -> Tensor:
        result = values.clone()
        shape = (-1,) + (1,) * (values.dim() - 1)
        step = 1
        while step < longest:
            # Row i takes row i - step where both belong to one sequence, which position >= step says; the sum
            # from the other end is the transpose of that: row i - step takes row i.
            mask = (position[step:] >= step).view(shape)
            if backwards:
                result[:-step] += torch.where(mask, result[step:], 0)
            else:
                result[step:] += torch.where(mask, result[:-step], 0)
            step *= 2
        return result

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, Tensor, int, bool],
        output: Tensor,  # noqa: ARG004
    ) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.longest, ctx.backwards = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (position,) = ctx.saved_tensors
        return _Cumsum.apply(grad, position, ctx.longest, not ctx.backwards), None, None, None  # type: ignore[no-untyped-call]


def cumsum(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """The running sum over the steps of each sequence."""
    if not (values.is_floating_point() or values.is_complex()):
        values = values.long()
    result: Tensor = _Cumsum.apply(values, positions(offsets, values.shape[0]), longest, False)  # type: ignore[no-untyped-call]
    return result


def reverse_index(offsets: Tensor, total: int) -> Tensor:
    """The index that turns every sequence around: an index for :func:`take_rows`, its own inverse."""
    ends = offsets[:-1] + offsets[1:] - 1
    mirrored = repeated(ends, offsets.diff(), total)
    return mirrored - torch.arange(total, device=offsets.device)


def reverse(values: Tensor, offsets: Tensor) -> Tensor:
    """Every sequence from its end to its start."""
    return take_rows(values, reverse_index(offsets, values.shape[0]))


def shift(values: Tensor, offsets: Tensor, steps: int, fill: float = 0.0) -> Tensor:
    """Move every sequence by ``steps``, and write ``fill`` where nothing moves in; lengths stay."""
    total = values.shape[0]
    position = positions(offsets, total)
    remaining = position if steps >= 0 else spread(offsets.diff(), offsets, total) - 1 - position
    kept = remaining >= abs(steps)
    moved = _moved(values, steps)
    shape = (-1,) + (1,) * (values.dim() - 1)
    return torch.where(kept.view(shape), moved, scalar(fill, values.dtype))


def _moved(values: Tensor, steps: int) -> Tensor:
    """The rows by so many places further on; what moves in at the end is anything."""
    if not is_exporting():
        return values.roll(steps, 0)
    # The graph of roll divides by the number of rows, and asks whether there are any.
    total, more = values.shape[0], values.new_zeros(abs(steps), *values.shape[1:])
    if steps >= 0:
        return torch.cat((more, values)).narrow(0, 0, total)
    return torch.cat((values, more)).narrow(0, -steps, total)
