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
class Computation:
    """An operation of torch on tensors computed from parameters."""

    function: Any  # None for a constant, the only argument
    args: tuple[Any, ...]  # with :class:`Known` for tensors
    kwargs: dict[str, Any]
    count: int = 1  # of results

    def run(self, tensors: list[Tensor]) -> None:
        """Append the results to the known tensors."""
        if self.function is None:
            is_here = not tensors or tensors[0].is_cpu
            tensors.append(self.args[0] if is_here else _placed(self.args[0], tensors[0].device))
            return
        args = [filled(argument, tensors) for argument in self.args]
        result = self.function(
            *args, **{name: filled(argument, tensors) for name, argument in self.kwargs.items()}
        )
        tensors.extend((result,) if isinstance(result, Tensor) else result)


@lru_cache(maxsize=256)
def _placed(constant: Tensor, device: torch.device) -> Tensor:
    """Return a constant on a device, copied once."""
    return constant.to(device)


def filled(argument: Any, tensors: list[Tensor]) -> Any:
    """Return an argument with known values in place of their numbers."""
    if type(argument) is Known:
        return tensors[argument.index]
    if type(argument) is torch.device and tensors:
        return tensors[0].device
    if isinstance(argument, list | tuple):
        return type(argument)([filled(item, tensors) for item in argument])
    return argument


class Slices(NamedTuple):
    """A known tensor that is a sum of slices of parameters."""

    # Of each summand the parameter, and the bounds of the slice.
    pieces: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]

    def of(self, leaves: Sequence[Tensor]) -> Tensor:
        """Compute the tensor from parameters."""
        total: Tensor | None = None
        for leaf, begin, end in self.pieces:
            piece = leaves[leaf]
            if piece.shape != self.shape:
                numbers = piece if piece.numel() == end - begin else piece.view(-1)[begin:end]
                piece = numbers.view(self.shape)
            total = piece if total is None else total + piece
        return total  # type: ignore[return-value]

    def give(self, gradient: Tensor, leaves: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Add a gradient of the tensor to the gradients of the parameters."""
        for index, (leaf, begin, end) in enumerate(self.pieces):
            like = leaves[leaf]
            # Parameters keep their gradients, which the caller may change in-place.
            gradient = gradient.clone() if index else gradient
            if end - begin == like.numel():
                share = gradient if gradient.shape == like.shape else gradient.reshape(like.shape)
            else:
                share = torch.zeros_like(like, memory_format=torch.contiguous_format)
                share.view(-1)[begin:end] = gradient.reshape(-1)
            before = grads[leaf]
            grads[leaf] = share if before is None else before + share


def slices_of(
    calls: Sequence[Computation], values: Sequence[Tensor], leaves: int
) -> list[Slices | None]:
    """Return the slices of parameters of each known tensor, or None if it is computed in another
    way.
    """
    roots = {index: index for index in range(leaves) if values[index].is_contiguous()}
    slices = [_piece(values, roots, index) for index in range(leaves)]
    for call in calls:
        first = call.args[0]
        is_view = call.function is not None and call.function.is_view and type(first) is Known
        is_view &= call.function is not torch.ops.aten.detach.default  # which has no gradient
        for index in range(len(slices), len(slices) + call.count):
            if is_view and first.index in roots:
                roots[index] = roots[first.index]
            slices.append(_piece(values, roots, index) or _sum(call, slices))
    return slices


def _piece(values: Sequence[Tensor], roots: dict[int, int], index: int) -> Slices | None:
    """Return a parameter, or adjacent numbers of one, as a slice."""
    value = values[index]
    root = values[roots.get(index, index)]
    # Outside, if a reshape has copied.
    begin = (value.data_ptr() - root.data_ptr()) // value.element_size()
    if index not in roots or not value.is_contiguous() or not 0 <= begin < root.numel():
        return None
    return Slices(((roots[index], begin, begin + value.numel()),), tuple(value.shape))


def _sum(call: Computation, slices: Sequence[Slices | None]) -> Slices | None:
    if call.function is not torch.ops.aten.add.Tensor or call.kwargs or len(call.args) != 2:
        return None
    summands = [
        slices[argument.index] if type(argument) is Known else None for argument in call.args
    ]
    first, other = summands
    if first is None or other is None or first.shape != other.shape:
        return None
    return Slices((*first.pieces, *other.pieces), first.shape)


class ParameterOps(NamedTuple):
    """The vectors and weights of a program that are computed only from parameters."""

    calls: list[Computation]  # empty if all are slices
    vectors: list[int]  # indices of known tensors, which are flattened
    weights: list[int]  # indices of known tensors (groups, rows, depth)
    moved: list[Slices] | None  # of the vectors, then of the weights, if all are slices

    def of(self, leaves: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the vectors and weights of a program from parameters."""
        tensors = list(leaves)
        count = len(self.vectors)
        if self.moved is not None:
            values = [slices.of(tensors) for slices in self.moved]
            vectors = [value if value.dim() == 1 else value.view(-1) for value in values[:count]]
            return vectors, values[count:]
        for call in self.calls:
            call.run(tensors)
        vectors = [tensors[index].reshape(-1) for index in self.vectors]
        return vectors, [tensors[index] for index in self.weights]


class ParameterValues:
    """The vectors and weights of one call, and the gradients of the parameters from theirs."""

    def __init__(
        self, ops: ParameterOps, leaves: tuple[Tensor, ...], wishes: tuple[Any, ...]
    ) -> None:
        self._moved = ops.moved
        if ops.moved is not None:
            self._leaves: list[Tensor] = [tensor.detach() for tensor in leaves]
            self.vectors, self.weights = ops.of(self._leaves)
            needs = [any(wishes[leaf] for leaf, _, _ in slices.pieces) for slices in ops.moved]
        else:  # a separate graph of autograd, the last part of the backward pass
            with torch.enable_grad():
                self._leaves = [
                    tensor.detach().requires_grad_(bool(wish))
                    for tensor, wish in zip(leaves, wishes, strict=True)
                ]
                vectors, weights = ops.of(self._leaves)
            self._ends = [*vectors, *weights]
            self.vectors = [tensor.detach() for tensor in vectors]
            self.weights = [tensor.detach() for tensor in weights]
            needs = [tensor.requires_grad for tensor in self._ends]
        count = len(self.vectors)
        self.wanted = tuple(needs[:count]), tuple(needs[count:])

    def gradients(self, computed: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Return the gradients of the parameters, from those of the vectors, then the weights, by
        their index.
        """
        grads: list[Tensor | None] = [None] * len(self._leaves)
        if self._moved is not None:
            for index, gradient in computed.items():
                self._moved[index].give(gradient, self._leaves, grads)
            return grads
        wished = [leaf for leaf in self._leaves if leaf.requires_grad]
        if not computed or not wished:
            return grads
        pairs = [(self._ends[index], gradient) for index, gradient in computed.items()]
        rest = iter(gradients(pairs, wished, keep=True))
        return [next(rest) if leaf.requires_grad else None for leaf in self._leaves]


class _Seed(torch.autograd.Function):
    """A zero whose gradients of its inputs are given."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *results: Tensor) -> Tensor:
        ctx.grads = grads
        return results[0].new_zeros(())

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
        seed = _Seed.apply([grad for _, grad in pairs], *[result for result, _ in pairs])  # type: ignore[no-untyped-call]
    return list(torch.autograd.grad(seed, wished, retain_graph=keep, allow_unused=True))
