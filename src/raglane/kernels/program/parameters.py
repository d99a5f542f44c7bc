"""What is made of parameters before a run, by torch, and the way back to their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raglane.programs.trace import Trace

__all__ = ["Made", "gradients"]


class Made:
    """What is made of the parameters before a run, and the way back to their gradients.

    Args:
        trace: of the step.
        leaves: the parameters.
        wishes: whether the gradient of each is wanted.

    Attributes:
        vectors, weights: as :meth:`raglane.programs.trace.Trace.known` gives them.
        wanted: of which vectors, and of which weights, gradients are wanted for those of the parameters.
    """

    def __init__(self, trace: Trace, leaves: tuple[Tensor, ...], wishes: tuple[Any, ...]) -> None:
        self.moved, self.wishes = trace.moved, wishes
        if self.moved is not None:
            self.leaves: list[Tensor] = [part.detach() for part in leaves]
            self.vectors, self.weights = trace.known(self.leaves)
            wanted = [any(wishes[leaf] for leaf, _, _ in part.pieces) for part in self.moved]
        else:  # it has a graph of its own, which the backward pass ends with
            with torch.enable_grad():
                self.leaves = [
                    part.detach().requires_grad_(bool(wish)) for part, wish in zip(leaves, wishes, strict=True)
                ]
                vectors, weights = trace.known(self.leaves)
            self._ends = [*vectors, *weights]
            self.vectors, self.weights = [part.detach() for part in vectors], [part.detach() for part in weights]
            wanted = [part.requires_grad for part in self._ends]
        count = len(self.vectors)
        self.wanted = tuple(wanted[:count]), tuple(wanted[count:])

    def gradients(self, made: Mapping[int, Tensor]) -> list[Tensor | None]:
        """The gradients of the parameters, from those of the vectors and then the weights, by their place."""
        found: list[Tensor | None] = [None] * len(self.leaves)
        if self.moved is not None:
            for place, gradient in made.items():
                self.moved[place].give(gradient, self.leaves, found)
            return found
        wished = [part for part in self.leaves if part.requires_grad]
        if not made or not wished:
            return found
        pairs = [(self._ends[place], gradient) for place, gradient in made.items()]
        rest = iter(gradients(pairs, wished, keep=True))
        return [next(rest) if part.requires_grad else None for part in self.leaves]


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
    """The gradients of some tensors, from results and theirs.

    What :func:`torch.autograd.grad` does; but given gradients of results it imports half a second's worth of algebra.
    """
    with torch.enable_grad():
        seed = _Seed.apply([grad for _, grad in pairs], *[part for part, _ in pairs])  # type: ignore[no-untyped-call]
    return list(torch.autograd.grad(seed, wished, retain_graph=keep, allow_unused=True))
