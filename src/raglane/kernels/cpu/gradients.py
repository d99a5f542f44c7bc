"""Gradients beside the kernels: products over all elements, and the second derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane.cells import CELLS
from raglane.kernels import reference
from raglane.kernels.contract import Request
from raglane.kernels.cpu.layer import Given, Grads, Layer, Tensors

# How many times as high as wide a matrix must be for outer to begin with its transpose; measured.
_TALL = 32


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def is_last_use() -> bool:
    """Whether the graph is freed after this backward pass, so that what was saved may be overwritten."""
    return _keeps_graph is not None and not _keeps_graph()


def spend(*tensors: Tensor) -> None:
    """Let autograd know that saved tensors were overwritten, so that no later pass reads them."""
    torch.autograd.graph.increment_version(tensors)


def outer(gates: Tensor, inputs: Tensor) -> Tensor:
    """The sum over the elements of the outer products of their rows: ``(N, G)`` and ``(N, D)`` to ``(G, D)``."""
    if inputs.shape[0] < _TALL * inputs.shape[1]:
        return torch.mm(gates.t(), inputs)
    # MKL takes a tall and narrow product a fifth to a third faster from the other side.
    return torch.mm(inputs.t(), gates).t().contiguous()


def reference_gradients(layer: Layer, offsets: Tensor, tensors: Tensors, given: Given) -> Grads:
    """All gradients by way of the reference kernel: where they are to be differentiated, or torch.func is at work.

    Args:
        layer: what was run.
        offsets: ``(B + 1,)`` int64.
        tensors: the layer's.
        given: the gradients that came in.
    """
    keep = torch.is_grad_enabled()
    # Views, so that a gradient stops here where one of them was computed from another.
    inputs: Tensors = tuple([None if part is None else part.view_as(part) for part in tensors])
    if not keep:
        inputs = tuple([None if part is None else part.detach().requires_grad_(part.requires_grad) for part in inputs])
    cell = CELLS[layer.cell]
    request = Request(
        cell,
        inputs[0],
        offsets,
        None,
        layer.initial(inputs),
        tuple([cell.weights_type(*layer.weights_of(inputs, direction)) for direction in range(layer.directions)]),
        directions=layer.directions,
        need_states=given.c_states is not None,
        state_sizes=layer.sizes,
    )
    with torch.enable_grad():
        result = reference.BACKEND.run(request, "lanes")
        c_states = None if result.states is None else result.states[0][1]
        if c_states is not None and len(layer.saved_shapes(inputs[0].shape[0])[1]) == 3:
            c_states = torch.stack(c_states.chunk(layer.directions, 1))  # as the layer gave it
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(
            (result.output, c_states, *result.state), (given.output, given.c_states, *given.final), strict=True
        )
        if tensor is not None and grad is not None and tensor.requires_grad
    ]
    leaves = [part for part in inputs if part is not None and part.requires_grad]
    found = iter(
        torch.autograd.grad(
            [tensor for tensor, _ in pairs], leaves, [grad for _, grad in pairs], create_graph=keep, allow_unused=True
        )
    )
    return tuple(next(found) if part is not None and part.requires_grad else None for part in inputs)
