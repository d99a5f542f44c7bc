"""The recurrence ``h = a h + x`` of each channel, e.g. of a real-gated linear recurrent unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.nn.recurrences.loops import attention_loop
from raglane.nn.recurrences.recurrence_operator import attend
from raglane.packing.layouts import inverse, packed_layout


def accumulate(
    x: Tensor,
    log_decay: Tensor,
    offsets: Tensor,
    resets: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``h`` after each element, ``(N, E)``, and the final states, ``(B, E)``.

    On a CPU the steps are multiply-adds of all sequences that have one, in place.

    Args:
        x: ``(N, E)``, of the dtype of sums.
        log_decay: the logarithms of ``a``, ``(N, E)``.
        offsets: ``(B + 1,)``.
        resets: bools ``(N,)``: ``h`` is zeros before each element with True.
        initial: ``(B, E)``, or None for zeros.
    """
    tensors = [x, log_decay, *([] if initial is None else [initial])]
    is_recorded = records_operators() or are_transformed(tensors) or has_tangent(tensors)
    if is_recorded or not x.is_cpu:
        return _by_attention(x, log_decay, offsets, resets, initial, attend)
    start = initial
    if start is None:
        start = x.new_zeros(offsets.shape[0] - 1, x.shape[1])
    # An element with a reset begins a sequence of its own, whose state is zeros.
    whole, starts = offsets, start
    if resets is not None:
        fresh = resets.nonzero().squeeze(1)
        begins, order = torch.cat([offsets[:-1], fresh]).sort(stable=True)
        whole = torch.cat([begins, offsets[-1:]])
        zeros = x.new_zeros(1, x.shape[1]).expand(fresh.shape[0], -1)
        starts = torch.cat([start, zeros]).index_select(0, order)
    output: Tensor = _Accumulation.apply(x, log_decay, starts, whole)  # type: ignore[no-untyped-call]
    is_empty = offsets[1:] == offsets[:-1]
    if x.shape[0] == 0:
        return output, start
    last = output.index_select(0, (offsets[1:] - 1).clamp(min=0))
    return output, torch.where(is_empty.unsqueeze(1), start, last)


def _by_attention(
    x: Tensor,
    log_decay: Tensor,
    offsets: Tensor,
    resets: Tensor | None,
    initial: Tensor | None,
    run: Any,
) -> tuple[Tensor, Tensor]:
    """Return the results of linear attention with a head for each channel."""
    ones = x.new_ones(x.shape[0], 1, 1)
    state = None if initial is None else initial[:, :, None, None]
    tensors = (ones, ones, x.unsqueeze(2), log_decay, None, None, state, None, None)
    output, final, *_ = run(tensors, offsets, resets, 1.0, False, 0.0)
    return output.squeeze(2), final[:, :, 0, 0]


class _Accumulation(torch.autograd.Function):
    """The states after all elements of sequences, step by step, the longest sequence first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_decay: Tensor, initial: Tensor, offsets: Tensor) -> Tensor:
        layout = packed_layout(offsets.diff(), offsets)
        index, order = layout[0], layout[2]
        sizes = layout[1].tolist()
        decay = log_decay.index_select(0, index).exp_()
        rows = x.index_select(0, index)
        state = initial.index_select(0, order)
        begin = 0
        for size in sizes:
            output = rows[begin : begin + size]
            state = output.addcmul_(decay[begin : begin + size], state[:size])
            begin += size
        result = rows.index_select(0, inverse(index))
        ctx.sizes = sizes
        ctx.save_for_backward(x, log_decay, initial, offsets, index, order, decay, rows)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, log_decay, initial, offsets, index, order, decay, rows = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [each.view_as(each) for each in (x, log_decay, initial)]
            rows, logs, state = inputs
            output, _ = _by_attention(rows, logs, offsets, None, state, attention_loop)
            chosen = [each for each in inputs if each.requires_grad]
            gradients = iter(torch.autograd.grad(output, chosen, grad, create_graph=True))
            return *[next(gradients) if each.requires_grad else None for each in inputs], None
        upstream = grad.index_select(0, index)
        earlier = torch.empty_like(rows)
        end = rows.shape[0]
        later = 0  # the sequences of the next step
        for place, size in reversed(list(enumerate(ctx.sizes))):
            begin = end - size
            if later:
                after = slice(end, end + later)
                upstream[begin : begin + later].addcmul_(decay[after], upstream[after])
            before = ctx.sizes[place - 1] if place else 0
            state = rows[begin - before : begin] if place else initial.index_select(0, order)
            earlier[begin:end] = state[:size]
            end = begin
            later = size
        products = upstream * decay
        first = ctx.sizes[0] if ctx.sizes else 0
        of_initial = torch.zeros_like(initial).index_copy_(0, order[:first], products[:first])
        back = inverse(index)
        of_decay = products.mul_(earlier).index_select(0, back)
        return upstream.index_select(0, back), of_decay, of_initial, None
