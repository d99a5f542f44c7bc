"""Operations that depend on parameters only: recorded while a step is traced, and replayed before each run.

Most of it only moves numbers: a matrix is turned, a gain is read as it is, two biases are added. Then each known tensor
is made of pieces of the parameters, and so are the gradients of these, without autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Known:
    """A tensor that is computed from parameters alone: which of all that are, parameters first."""

    index: int


@dataclass(frozen=True)
class Call:
    """An operation of torch on known tensors."""

    function: Any  # None for a constant, which is the only argument
    args: tuple[Any, ...]  # with :class:`Known` for tensors
    kwargs: dict[str, Any]
    count: int = 1  # of results

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
    """A known tensor whose numbers are sums of adjacent numbers of parameters."""

    pieces: tuple[tuple[int, int, int], ...]  # of each summand the parameter, and where it begins and ends there
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
    """Of each known tensor, the pieces of parameters that it is made of; None where it is computed in another way."""
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
    if call.function is not torch.ops.aten.add.Tensor or call.kwargs or len(call.args) != 2:
        return None
    parts = [found[part.index] if type(part) is Known else None for part in call.args]
    one, other = parts
    if one is None or other is None or one.shape != other.shape:
        return None
    return Moved((*one.pieces, *other.pieces), one.shape)


@dataclass(frozen=True)
class ParameterOps:
    """What a program reads that is computed from parameters alone, and how."""

    calls: list[Call]  # empty where all is moved
    vectors: list[int]  # which known tensors they are, laid flat
    weights: list[int]  # the same of the weights, (groups, rows, depth) each
    moved: list[Moved] | None  # the pieces of the vectors, and then of the weights, where all are made of pieces

    def of(self, leaves: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The vectors and the weights that a program reads, for the parameters as they are now."""
        known = list(leaves)
        if self.moved is not None:
            made, count = [part.of(known) for part in self.moved], len(self.vectors)
            return [part.reshape(-1) for part in made[:count]], made[count:]
        for call in self.calls:
            call.run(known)
        return [known[index].reshape(-1) for index in self.vectors], [known[index] for index in self.weights]


class ParameterValues:
    """The vectors and weights of one call, of which some have a gradient, and the way back to the parameters."""

    def __init__(self, ops: ParameterOps, leaves: tuple[Tensor, ...], wishes: tuple[Any, ...]) -> None:
        self._moved = ops.moved
        if ops.moved is not None:
            self._leaves: list[Tensor] = [part.detach() for part in leaves]
            self.vectors, self.weights = ops.of(self._leaves)
            wanted = [any(wishes[leaf] for leaf, _, _ in part.pieces) for part in ops.moved]
        else:  # it has a graph of its own, which the backward pass ends with
            with torch.enable_grad():
                self._leaves = [
                    part.detach().requires_grad_(bool(wish)) for part, wish in zip(leaves, wishes, strict=True)
                ]
                vectors, weights = ops.of(self._leaves)
            self._ends = [*vectors, *weights]
            self.vectors, self.weights = [part.detach() for part in vectors], [part.detach() for part in weights]
            wanted = [part.requires_grad for part in self._ends]
        count = len(self.vectors)
        self.wanted = tuple(wanted[:count]), tuple(wanted[count:])

    def gradients(self, made: Mapping[int, Tensor]) -> list[Tensor | None]:
        """The gradients of the parameters, from those of the vectors and then the weights, by their place."""
        found: list[Tensor | None] = [None] * len(self._leaves)
        if self._moved is not None:
            for place, gradient in made.items():
                self._moved[place].give(gradient, self._leaves, found)
            return found
        wished = [part for part in self._leaves if part.requires_grad]
        if not made or not wished:
            return found
        pairs = [(self._ends[place], gradient) for place, gradient in made.items()]
        rest = iter(gradients(pairs, wished, keep=True))
        return [next(rest) if part.requires_grad else None for part in self._leaves]


class _Seed(torch.autograd.Function):
    """Zero, whose gradient for each of its inputs is given: a graph starts here."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *parts: Tensor) -> Tensor:
        ctx.grads = grads
        return parts[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return None, *ctx.grads


def gradients(pairs: list[tuple[Tensor, Tensor]], wished: list[Tensor], *, keep: bool = False) -> list[Tensor | None]:
    """The gradients of some tensors, from results and theirs."""
    if not pairs:
        return [None] * len(wished)
    with torch.enable_grad():
        seed = _Seed.apply([grad for _, grad in pairs], *[part for part, _ in pairs])  # type: ignore[no-untyped-call]
    return list(torch.autograd.grad(seed, wished, retain_graph=keep, allow_unused=True))
