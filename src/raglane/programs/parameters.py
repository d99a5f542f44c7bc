"""Operations that depend on parameters only: recorded while a step is traced, and replayed before
each run.

Most of them only move numbers, e.g. transpose a matrix or add two biases. If all do, each tensor is
assembled from slices of parameters, and gradients are too, without autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Known:
    """A tensor computed only from parameters, by its index among these tensors, parameters
    first.
    """

    index: int


@dataclass(frozen=True)
class Call:
    """An operation of torch on tensors computed from parameters."""

    function: Any  # None for a constant, the only argument
    args: tuple[Any, ...]  # with :class:`Known` for tensors
    kwargs: dict[str, Any]
    count: int = 1  # of results

    def run(self, known: list[Tensor]) -> None:
        """Append the results to the known tensors."""
        if self.function is None:
            is_here = not known or known[0].is_cpu
            known.append(self.args[0] if is_here else _placed(self.args[0], known[0].device))
            return
        args = [filled(part, known) for part in self.args]
        found = self.function(
            *args, **{name: filled(part, known) for name, part in self.kwargs.items()}
        )
        known.extend((found,) if isinstance(found, Tensor) else found)


@lru_cache(maxsize=256)
def _placed(constant: Tensor, device: torch.device) -> Tensor:
    """Return a constant on a device, copied once."""
    return constant.to(device)


def filled(part: Any, known: list[Tensor]) -> Any:
    """Return an argument with known values in place of their numbers."""
    if type(part) is Known:
        return known[part.index]
    if type(part) is torch.device and known:
        return known[0].device
    if isinstance(part, list | tuple):
        return type(part)([filled(item, known) for item in part])
    return part


class Slices(NamedTuple):
    """A known tensor that is a sum of slices of parameters."""

    pieces: tuple[
        tuple[int, int, int], ...
    ]  # of each summand the parameter, and the bounds of the slice
    shape: tuple[int, ...]

    def of(self, leaves: Sequence[Tensor]) -> Tensor:
        """Compute the tensor from parameters."""
        total: Tensor | None = None
        for leaf, begin, end in self.pieces:
            part = leaves[leaf]
            if part.shape != self.shape:
                part = (part if part.numel() == end - begin else part.view(-1)[begin:end]).view(
                    self.shape
                )
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def give(self, gradient: Tensor, leaves: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Add a gradient of the tensor to the gradients of the parameters."""
        for index, (leaf, begin, end) in enumerate(self.pieces):
            like = leaves[leaf]
            # Parameters keep their gradients, which the caller may change in-place.
            gradient = gradient.clone() if index else gradient
            if end - begin == like.numel():
                own = gradient if gradient.shape == like.shape else gradient.reshape(like.shape)
            else:
                own = torch.zeros_like(like, memory_format=torch.contiguous_format)
                own.view(-1)[begin:end] = gradient.reshape(-1)
            before = grads[leaf]
            grads[leaf] = own if before is None else before + own


def slices_of(calls: Sequence[Call], values: Sequence[Tensor], leaves: int) -> list[Slices | None]:
    """Return the slices of parameters of each known tensor, or None if it is computed in another
    way.
    """
    roots = {index: index for index in range(leaves) if values[index].is_contiguous()}
    found = [_piece(values, roots, index) for index in range(leaves)]
    for call in calls:
        first = call.args[0]
        is_view = call.function is not None and call.function.is_view and type(first) is Known
        is_view = (
            is_view and call.function is not torch.ops.aten.detach.default
        )  # which has no gradient
        for index in range(len(found), len(found) + call.count):
            if is_view and first.index in roots:
                roots[index] = roots[first.index]
            found.append(_piece(values, roots, index) or _sum(call, found))
    return found


def _piece(values: Sequence[Tensor], roots: dict[int, int], index: int) -> Slices | None:
    """Return a parameter, or adjacent numbers of one, as a slice."""
    value = values[index]
    root = values[roots.get(index, index)]
    begin = (
        value.data_ptr() - root.data_ptr()
    ) // value.element_size()  # outside, if a reshape has copied
    if index not in roots or not value.is_contiguous() or not 0 <= begin < root.numel():
        return None
    return Slices(((roots[index], begin, begin + value.numel()),), tuple(value.shape))


def _sum(call: Call, found: Sequence[Slices | None]) -> Slices | None:
    if call.function is not torch.ops.aten.add.Tensor or call.kwargs or len(call.args) != 2:
        return None
    parts = [found[part.index] if type(part) is Known else None for part in call.args]
    one, other = parts
    if one is None or other is None or one.shape != other.shape:
        return None
    return Slices((*one.pieces, *other.pieces), one.shape)


class ParameterOps(NamedTuple):
    """The vectors and weights of a program that are computed only from parameters."""

    calls: list[Call]  # empty if all are slices
    vectors: list[int]  # indices of known tensors, which are flattened
    weights: list[int]  # indices of known tensors (groups, rows, depth)
    moved: list[Slices] | None  # of the vectors, then of the weights, if all are slices

    def of(self, leaves: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the vectors and weights of a program from parameters."""
        known = list(leaves)
        if self.moved is not None:
            made = [part.of(known) for part in self.moved]
            count = len(self.vectors)
            return [part if part.dim() == 1 else part.view(-1) for part in made[:count]], made[
                count:
            ]
        for call in self.calls:
            call.run(known)
        return [known[index].reshape(-1) for index in self.vectors], [
            known[index] for index in self.weights
        ]


class ParameterValues:
    """The vectors and weights of one call, and the gradients of the parameters from theirs."""

    def __init__(
        self, ops: ParameterOps, leaves: tuple[Tensor, ...], wishes: tuple[Any, ...]
    ) -> None:
        self._moved = ops.moved
        if ops.moved is not None:
            self._leaves: list[Tensor] = [part.detach() for part in leaves]
            self.vectors, self.weights = ops.of(self._leaves)
            wanted = [any(wishes[leaf] for leaf, _, _ in part.pieces) for part in ops.moved]
        else:  # a separate graph of autograd, the last part of the backward pass
            with torch.enable_grad():
                self._leaves = [
                    part.detach().requires_grad_(bool(wish))
                    for part, wish in zip(leaves, wishes, strict=True)
                ]
                vectors, weights = ops.of(self._leaves)
            self._ends = [*vectors, *weights]
            self.vectors = [part.detach() for part in vectors]
            self.weights = [part.detach() for part in weights]
            wanted = [part.requires_grad for part in self._ends]
        count = len(self.vectors)
        self.wanted = tuple(wanted[:count]), tuple(wanted[count:])

    def gradients(self, made: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Return the gradients of the parameters, from those of the vectors, then the weights, by
        place.
        """
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
    """A zero whose gradients of its inputs are given."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *parts: Tensor) -> Tensor:
        ctx.grads = grads
        return parts[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return None, *ctx.grads


def gradients(
    pairs: list[tuple[Tensor, Tensor]], wished: list[Tensor], *, keep: bool = False
) -> list[Tensor | None]:
    """Return the gradients of tensors, from pairs of a result and its gradient."""
    if not pairs:
        return [None] * len(wished)
    with torch.enable_grad():
        seed = _Seed.apply([grad for _, grad in pairs], *[part for part, _ in pairs])  # type: ignore[no-untyped-call]
    return list(torch.autograd.grad(seed, wished, retain_graph=keep, allow_unused=True))
