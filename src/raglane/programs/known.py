"""What a step computes from its parameters alone: noted while it is traced, and computed again before each run.

Most of it only moves numbers: a matrix is turned, a gain is read as it is, two biases are added. Then each known tensor
is made of pieces of the parameters, and so are the gradients of these, without autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "Known", "Moved", "moved"]


@dataclass(frozen=True)
class Known:
    """A tensor that is computed from parameters alone: which of all that are, parameters first."""

    index: int


@dataclass(frozen=True)
class Call:
    """An operation of torch on known tensors.

    Attributes:
        function: such as ``torch.ops.aten.t.default``; None for a constant.
        args, kwargs: its arguments, with :class:`Known` for tensors; of a constant, the tensor.
        count: of its results.

    Example:
        >>> known = [torch.ones(2, 3)]
        >>> Call(torch.ops.aten.t.default, (Known(0),), {}).run(known)
        >>> known[1].shape
        torch.Size([3, 2])
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int = 1

    def run(self, known: list[Tensor]) -> None:
        """Append the results to what is known."""
        if self.function is None:
            known.append(self.args[0])
            return
        args = [_filled(part, known) for part in self.args]
        found = self.function(*args, **{name: _filled(part, known) for name, part in self.kwargs.items()})
        known.extend((found,) if isinstance(found, Tensor) else found)


def _filled(part: Any, known: list[Tensor]) -> Any:
    if type(part) is Known:
        return known[part.index]
    if isinstance(part, list | tuple):
        return type(part)([_filled(item, known) for item in part])
    return part


@dataclass(frozen=True)
class Moved:
    """A known tensor whose numbers are sums of numbers of parameters, side by side.

    Attributes:
        pieces: of each summand the parameter, and where its numbers begin and end there.
        shape: of the tensor.

    Example:
        >>> bias = Moved(((0, 2, 4), (1, 0, 2)), (2,))
        >>> bias.of([torch.arange(4.0), torch.ones(3)])
        tensor([3., 4.])
    """

    pieces: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]

    def of(self, leaves: Sequence[Tensor]) -> Tensor:
        """The tensor, for the parameters as they are now."""
        total: Tensor | None = None
        for leaf, begin, end in self.pieces:
            part = leaves[leaf]
            if part.shape != self.shape:
                is_whole = part.numel() == end - begin
                part = part.reshape(self.shape) if is_whole else part.reshape(-1)[begin:end].view(self.shape)
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def give(self, gradient: Tensor, leaves: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Add its gradient to those of the parameters, of which there may be none so far."""
        for leaf, begin, end in self.pieces:
            like = leaves[leaf]
            if end - begin == like.numel():
                own = gradient.reshape(like.shape)
            else:
                own = torch.zeros_like(like, memory_format=torch.contiguous_format)
                own.view(-1)[begin:end] = gradient.reshape(-1)
            before = grads[leaf]
            grads[leaf] = own if before is None else before + own


def moved(calls: Sequence[Call], values: Sequence[Tensor], leaves: int) -> list[Moved | None]:
    """Of each known tensor, the pieces of parameters that it is made of; None where it is computed in another way.

    Example:
        >>> values = [torch.zeros(2, 3), torch.zeros(1, 2, 3)]
        >>> moved([Call(torch.ops.aten.unsqueeze.default, (Known(0), 0), {})], values, 1)[1].pieces
        ((0, 0, 6),)
    """
    roots = {index: index for index in range(leaves) if values[index].is_contiguous()}
    found = [_piece(values, roots, index) for index in range(leaves)]
    for call in calls:
        first = call.args[0]
        is_view = call.function is not None and call.function.is_view and type(first) is Known
        is_view = is_view and call.function is not torch.ops.aten.detach.default  # which has no gradient
        for index in range(len(found), len(found) + call.count):
            if is_view and first.index in roots:
                roots[index] = roots[first.index]
            found.append(_piece(values, roots, index) or _sum(call, found))
    return found


def _piece(values: Sequence[Tensor], roots: dict[int, int], index: int) -> Moved | None:
    """A parameter, or numbers of it that stand side by side."""
    value = values[index]
    if index not in roots or not value.is_contiguous() or not value.numel():
        return None
    begin = int(value.storage_offset()) - int(values[roots[index]].storage_offset())
    return Moved(((roots[index], begin, begin + value.numel()),), tuple(value.shape))


def _sum(call: Call, found: Sequence[Moved | None]) -> Moved | None:
    """Two tensors of the same shape, added."""
    if call.function is not torch.ops.aten.add.Tensor or call.kwargs or len(call.args) != 2:
        return None
    parts = [found[part.index] if type(part) is Known else None for part in call.args]
    one, other = parts
    if one is None or other is None or one.shape != other.shape:
        return None
    return Moved((*one.pieces, *other.pieces), one.shape)
