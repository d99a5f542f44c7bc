"""A layer of the cpu kernels as a function that PyTorch can differentiate, twice, and compile.

The time loops are the kernels'. The large products of the backward pass, which are not sequential, are torch's. A
second derivative goes through the reference kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from raglane.cells import CELLS
from raglane.cells.spec import Weights
from raglane.kernels import reference
from raglane.kernels.contract import Request
from raglane.kernels.cpu.library import Gradients, Layer, Saved, gate_stride, layer_backward, layer_forward

__all__ = ["run_layer"]

# How many times as high as wide a matrix must be for _outer to begin with its transpose; measured.
_TALL = 32

# Gradients of everything a layer reads, in the order (values, *initial, *weights); None where there is none.
_Grads = tuple[Tensor | None, ...]


def run_layer(layer: Layer, need_output: bool) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Run one layer.

    Args:
        layer: the layer and its batch.
        need_output: whether the output must be built.

    Returns:
        The output ``(N, K * P)``, or None where it was not needed; and the final states, ``(K, B, size)`` each.
    """
    tensors = (layer.values, *layer.initial, *layer.weights)
    needs_grad = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors)
    if torch.compiler.is_compiling():
        parts = _forward_op(layer.cell, layer.values, layer.offsets, *_padded(layer), need_output, needs_grad)
        return (parts[0] if need_output else None), parts[1 : 1 + len(layer.initial)]
    if not needs_grad:
        final, _, output = layer_forward(layer.contiguous(), need_output, save=False)
        return output, final
    output, *states = _Recurrence.apply(layer.cell, layer.offsets, len(layer.initial), *tensors)  # type: ignore[no-untyped-call]
    return (output if need_output else None), tuple(states)


# ---------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------


class _Recurrence(torch.autograd.Function):
    """One layer in all directions; inputs are (cell, offsets, number of states, values, *initial, *weights)."""

    @staticmethod
    def forward(ctx: Any, cell: str, offsets: Tensor, states: int, *tensors: Any) -> tuple[Tensor, ...]:
        layer = Layer(cell, tensors[0], offsets, tensors[1 : 1 + states], tensors[1 + states :])
        final, kept, _ = layer_forward(layer.contiguous(), need_output=True, save=True)
        saved = cast(Saved, kept)
        ctx.cell, ctx.states = cell, states
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(offsets, *saved, *tensors)
        return saved.output, *final

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *grad_final: Tensor | None) -> tuple[Any, ...]:
        offsets, output, gates, cells, *tensors = ctx.saved_tensors
        states = ctx.states
        layer = Layer(ctx.cell, tensors[0], offsets, tuple(tensors[1 : 1 + states]), tuple(tensors[1 + states :]))
        if torch.is_grad_enabled():  # create_graph: the gradient is to be differentiated again
            return None, None, None, *_reference_gradients(layer, grad_output, grad_final)
        wanted = ctx.needs_input_grad[3:]
        saved = Saved(output, gates, cells)
        return None, None, None, *_gradients(layer, saved, grad_output, grad_final, wanted, overwrite=_is_last_use())


def _is_last_use() -> bool:
    """Whether the graph is freed after this backward pass, so that what was saved may be overwritten."""
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return kept is not None and not kept()


def _gradients(
    layer: Layer,
    saved: Saved,
    grad_output: Tensor | None,
    grad_final: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
    *,
    overwrite: bool,
) -> _Grads:
    """All gradients that are wanted, in the order (values, *initial, *weights)."""
    layer = layer.contiguous()
    walked = layer_backward(
        layer,
        saved,
        None if grad_output is None else grad_output.contiguous(),
        tuple(None if part is None else part.contiguous() for part in grad_final),
        overwrite=overwrite,
    )
    states = len(layer.initial)
    grad_values: Tensor | None = None
    grad_weights: list[Tensor | None] = []
    for direction in range(layer.directions):
        begin = 5 * direction
        weights = Weights(*layer.weights[begin : begin + 5])  # type: ignore[arg-type]
        gates = walked.gates[direction]
        if wanted[0]:
            grad_values = _input_gradient(gates, weights.input, grad_values)
        first = 1 + states + begin
        grad_weights += _weight_gradients(layer, walked, direction, weights, wanted[first : first + 5])
    return grad_values, *walked.initial, *grad_weights


def _input_gradient(gates: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    """The gates' gradients x ``W_ih``, added to ``total``, the other direction's."""
    gates = gates[:, : weight.shape[0]]
    return torch.mm(gates, weight) if total is None else total.addmm_(gates, weight)


def _outer(gates: Tensor, inputs: Tensor) -> Tensor:
    """The sum over the elements of the outer products of their rows: ``(N, G)`` and ``(N, D)`` to ``(G, D)``."""
    if inputs.shape[0] < _TALL * inputs.shape[1]:
        return torch.mm(gates.t(), inputs)
    # MKL takes a tall and narrow product a fifth to a third faster from the other side.
    return torch.mm(inputs.t(), gates).t().contiguous()


def _weight_gradients(
    layer: Layer, walked: Gradients, direction: int, weights: Weights, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of one direction's five weights."""
    gates, previous = walked.gates[direction], walked.previous[direction]
    rows, hidden_size = weights.input.shape[0], weights.hidden.shape[0] // len(CELLS[layer.cell].gates)
    result: list[Tensor | None] = [None] * 5
    split = gates.shape[1] > rows  # GRU: the candidate's two products have gradients of their own
    if wanted[0]:
        result[0] = _outer(gates[:, :rows], layer.values)
    if wanted[1]:
        result[1] = (
            torch.cat([_outer(gates[:, : 2 * hidden_size], previous), _outer(gates[:, rows:], previous)])
            if split
            else _outer(gates, previous)
        )
    if wanted[2] or wanted[3]:
        sums = gates.sum(0)
        result[2] = sums[:rows] if wanted[2] else None
        if wanted[3]:
            result[3] = torch.cat([sums[: 2 * hidden_size], sums[rows:]]) if split else sums.clone()
    if wanted[4] and walked.projected is not None and walked.unprojected is not None:
        result[4] = torch.mm(walked.projected[direction].t(), walked.unprojected[direction])
    return result


def _reference_gradients(layer: Layer, grad_output: Tensor | None, grad_final: tuple[Tensor | None, ...]) -> _Grads:
    """The same gradients by way of the reference kernel, so that they can be differentiated."""
    # Views, so that a gradient stops here where one of them was computed from another.
    inputs = [None if part is None else part.view_as(part) for part in (layer.values, *layer.initial, *layer.weights)]
    states = len(layer.initial)
    directions = layer.directions
    request = Request(
        CELLS[layer.cell],
        inputs[0],  # type: ignore[arg-type]
        layer.offsets,
        layer.offsets.diff(),
        tuple(inputs[1 : 1 + states]),  # type: ignore[arg-type]
        tuple(Weights(*inputs[1 + states + 5 * d :][:5]) for d in range(directions)),  # type: ignore[arg-type]
        directions=directions,
    )
    result = reference.BACKEND.run(request, "lanes")
    pairs = [
        (tensor, grad)
        for tensor, grad in zip((result.output, *result.state), (grad_output, *grad_final), strict=True)
        if tensor is not None and grad is not None and tensor.requires_grad
    ]
    given = [part for part in inputs if part is not None and part.requires_grad]
    found = iter(
        torch.autograd.grad(
            [tensor for tensor, _ in pairs], given, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return tuple(next(found) if part is not None and part.requires_grad else None for part in inputs)


# ---------------------------------------------------------------------------------------------------------------
# The same as operators, for torch.compile
# ---------------------------------------------------------------------------------------------------------------

# An operator's arguments are fixed in number: an LSTM's two states and two directions of five weights.
_TENSORS = "Tensor h, Tensor? c, " + ", ".join(f"Tensor? w{index}" for index in range(10))


def _padded(layer: Layer) -> tuple[Tensor | None, ...]:
    """States and weights, with None for those that the layer does not have."""
    states = (*layer.initial, None)[:2]
    return (*states, *layer.weights, *([None] * (10 - len(layer.weights))))


def _layer_of(cell: str, values: Tensor, offsets: Tensor, padded: tuple[Tensor | None, ...]) -> Layer:
    """What :func:`_padded` took apart."""
    states = tuple(part for part in padded[:2] if part is not None)
    weights = padded[2:] if padded[7] is not None else padded[2:7]
    return Layer(cell, values, offsets, states, weights)


@torch.library.custom_op(
    "raglane::recurrence",
    mutates_args=(),
    schema=f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, bool need_output, bool save)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _recurrence_op(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Output, final h, final c, saved gates, saved cells; what there is not is empty."""
    *padded, need_output, save = rest
    layer = _layer_of(cell, values, offsets, tuple(padded)).contiguous()
    final, saved, output = layer_forward(layer, need_output, save)
    nothing = [values.new_empty(0) for _ in range(4)]
    output = nothing.pop() if output is None else output
    c = final[1] if len(final) > 1 else nothing.pop()
    gates, cells = (saved.gates, saved.cells) if saved is not None else (nothing.pop(), nothing.pop())
    return output, final[0], c, gates, cells


@_recurrence_op.register_fake
def _(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    h, c, _, hidden, *_ = rest
    need_output, save = rest[-2:]
    total, count, is_lstm = values.shape[0], h.shape[0], c is not None
    hidden_size = hidden.shape[0] // len(CELLS[cell].gates)
    stride = gate_stride(cell, hidden_size) if cell in ("lstm", "gru") else 0
    return (
        values.new_empty(total, count * h.shape[2]) if need_output or save else values.new_empty(0),
        h.new_empty(h.shape),
        c.new_empty(c.shape) if is_lstm else values.new_empty(0),
        values.new_empty(count, total, stride) if save else values.new_empty(0),
        values.new_empty(count, total, hidden_size if is_lstm else 0) if save else values.new_empty(0),
    )


@torch.library.custom_op(
    "raglane::recurrence_backward",
    mutates_args=(),
    schema=f"(str cell, Tensor values, Tensor offsets, {_TENSORS}, Tensor output, Tensor gates, Tensor cells,"
    " Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, bool[] wanted) -> Tensor[]",
)
def _backward_op(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:
    """The gradients of (values, h, c, ten weights); those not wanted are empty."""
    padded, saved, grads, wanted = rest[:12], Saved(*rest[12:15]), rest[15:18], rest[18]
    layer = _layer_of(cell, values, offsets, padded)
    states = len(layer.initial)
    kept = (wanted[0], *wanted[1 : 1 + states], *wanted[3 : 3 + len(layer.weights)])
    found = _gradients(layer, saved, grads[0], grads[1 : 1 + states], kept, overwrite=False)
    by_place: list[Tensor | None] = [found[0], *found[1 : 1 + states], *([None] * (2 - states)), *found[1 + states :]]
    by_place += [None] * (13 - len(by_place))
    return [
        values.new_empty(0) if grad is None or not want else grad for grad, want in zip(by_place, wanted, strict=True)
    ]


@_backward_op.register_fake
def _(cell: str, values: Tensor, offsets: Tensor, *rest: Any) -> list[Tensor]:  # noqa: ARG001
    parts, wanted = (values, *rest[:12]), rest[18]
    return [
        part.new_empty(part.shape) if want and part is not None else values.new_empty(0)
        for part, want in zip(parts, wanted, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    cell, values, offsets, *rest = inputs
    ctx.cell = cell
    ctx.wanted = [part is not None and part.requires_grad for part in (values, *rest[:12])]
    ctx.save_for_backward(values, offsets, *rest[:12], output[0], output[3], output[4])


def _op_backward(ctx: Any, grad_output: Any, grad_h: Any, grad_c: Any, *_: Any) -> tuple[Any, ...]:
    values, offsets, *rest = ctx.saved_tensors
    is_lstm = rest[1] is not None
    found = _backward_op(ctx.cell, values, offsets, *rest, grad_output, grad_h, grad_c if is_lstm else None, ctx.wanted)
    grads = [grad if want else None for grad, want in zip(found, ctx.wanted, strict=True)]
    return None, grads[0], None, *grads[1:], None, None


_recurrence_op.register_autograd(_op_backward, setup_context=_setup_context)
_forward_op = _recurrence_op
