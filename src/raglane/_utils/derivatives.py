"""Gradients of what a kernel computes, by autograd through the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def view_of(tensor: Tensor | None, keep: bool = True) -> Tensor | None:
    """Return a view, to which no gradient flows from a tensor that was computed from this one.

    Without ``keep`` it is also detached from the graph of its tensor.
    """
    if tensor is None:
        return None
    view = tensor.view_as(tensor)
    return view if keep else view.detach().requires_grad_(view.requires_grad)


def gradients_of(
    results: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    keep: bool,
) -> list[Tensor | None]:
    """Return the gradients of weighted results, None for inputs on which none depends.

    With ``keep`` they are differentiable.
    """
    pairs = [
        (result, weight)
        for result, weight in zip(results, weights, strict=True)
        if weight is not None and result is not None and result.requires_grad
    ]
    leaves = [
        (index, tensor)
        for index, tensor in enumerate(inputs)
        if tensor is not None and tensor.requires_grad and pairs
    ]
    gradients: list[Tensor | None] = [None] * len(inputs)
    if leaves:
        computed = torch.autograd.grad(
            [result for result, _ in pairs],
            [tensor for _, tensor in leaves],
            [weight for _, weight in pairs],
            create_graph=keep,
            allow_unused=True,
        )
        for (index, _), gradient in zip(leaves, computed, strict=True):
            gradients[index] = gradient
    return gradients
