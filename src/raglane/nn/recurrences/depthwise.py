"""Causal convolutions of each channel with its own few weights, as before linear recurrences.

An output is the sum of the element and the ``K - 1`` before it in its sequence. Torch's convolution
of channels reorders the rows twice; here each weight is one multiply-add of rows, in blocks that
stay in the nearest cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.segments import like_rows, owners

# The numbers of a block: 128 KiB of float32.
_BLOCK = 1 << 15


def convolve_channels(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    resets: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Return the convolution ``(N, E)`` of each sequence, in the dtype of ``values``.

    Args:
        values: ``(N, E)``.
        weight: ``(E, K)``, the last column for the element itself.
        bias: ``(E,)``, or None.
        offsets: ``(B + 1,)``.
        resets: bools ``(N,)``: an element with True does not read those before it.
        before: ``(B, K - 1, E)``, the elements before each sequence; None for zeros.
    """
    if values.shape[0] == 0:
        return values
    wide = torch.promote_types(values.dtype, torch.float32)
    rows = values.to(wide)
    taps = weight.t().to(wide).contiguous()
    start = taps.new_zeros(taps.shape[1]) if bias is None else bias.to(wide)
    earlier = None if before is None else before.to(wide)
    parts = [rows, taps, start, *([] if earlier is None else [earlier])]
    is_whole = records_operators() or are_transformed(parts) or has_tangent(parts)
    if is_whole or not rows.is_cpu:
        result = _gathered(rows, taps, start, offsets, resets, earlier)
    else:
        result = _blocked(rows, taps, start, offsets, resets, earlier)
    return result.to(values.dtype)


def last_elements(
    values: Tensor, count: int, offsets: Tensor, resets: Tensor | None, before: Tensor | None
) -> Tensor:
    """Return the last elements of each sequence, ``(B, count, E)``, those of ``before`` or zeros
    where it is shorter.
    """
    sequences = offsets.shape[0] - 1
    earlier = before
    if earlier is None:
        earlier = values.new_zeros(sequences, count, values.shape[1])
    if values.shape[0] == 0:
        return earlier.to(values.dtype)
    rows = offsets[1:, None] - count + torch.arange(count, device=offsets.device)
    elements = values.index_select(0, rows.clamp(min=0).flatten()).unflatten(0, rows.shape)
    starts = offsets[:-1, None]
    columns = (rows - starts + count).clamp(max=count - 1)
    earlier = earlier.gather(1, columns.unsqueeze(2).expand(-1, -1, values.shape[1]))
    if resets is not None:
        latest = _starts(offsets, resets)[(offsets[1:] - 1).clamp(min=0)].unsqueeze(1)
        is_fresh = (latest > starts) | resets[starts.clamp(max=resets.shape[0] - 1)]
        earlier = earlier.masked_fill((is_fresh & (offsets[1:, None] > starts)).unsqueeze(2), 0)
        starts = torch.maximum(starts, latest)
    return torch.where((rows >= starts).unsqueeze(2), elements, earlier.to(values.dtype))


def step_channels(values: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    """Return the convolution of one element of each sequence, ``(B, E)``."""
    wide = torch.promote_types(values.dtype, torch.float32)
    taps = weight.t().to(wide)
    start = taps.new_zeros(taps.shape[1]) if bias is None else bias.to(wide)
    result = torch.addcmul(start, values.to(wide), taps[-1])
    for tap in range(1, taps.shape[0]):
        result = torch.addcmul(result, before[:, -tap].to(wide), taps[-1 - tap])
    return result.to(values.dtype)


def _starts(offsets: Tensor, resets: Tensor) -> Tensor:
    """Return for each element the last start of a sequence or reset, ``(N,)``."""
    total = resets.shape[0]
    places = torch.arange(total, device=offsets.device)
    is_start = resets | (offsets[owners(offsets[1:], total)] == places)
    return torch.where(is_start, places, 0).cummax(0).values


def _gathered(
    rows: Tensor,
    taps: Tensor,
    start: Tensor,
    offsets: Tensor,
    resets: Tensor | None,
    before: Tensor | None,
) -> Tensor:
    """Return the sum of gathered rows: one graph for all lengths."""
    total = rows.shape[0]
    reach = taps.shape[0] - 1
    places = torch.arange(total, device=rows.device)
    sequence = owners(offsets[1:], total)
    position = places - offsets[sequence]
    inner = position if resets is None else places - _starts(offsets, resets)
    result = torch.addcmul(start, rows, taps[-1])
    for tap in range(1, reach + 1):
        shifted = rows.index_select(0, (places - tap).clamp(min=0))
        earlier: Tensor = rows.new_zeros(())
        if before is not None:
            column = (reach + position - tap).clamp(0, reach - 1)
            earlier = before.flatten(0, 1).index_select(0, sequence * reach + column)
            if resets is not None:
                is_first = inner == position
                is_first = is_first & ~resets[offsets[sequence].clamp(max=total - 1)]
                earlier = earlier.where(is_first.unsqueeze(1), 0)
        shifted = shifted.where(like_rows(inner >= tap, shifted), earlier)
        result = torch.addcmul(result, shifted, taps[-1 - tap])
    return result


def _blocked(
    rows: Tensor,
    taps: Tensor,
    start: Tensor,
    offsets: Tensor,
    resets: Tensor | None,
    before: Tensor | None,
) -> Tensor:
    """Return the convolution of all rows as one sequence, with the rows near the starts of
    sequences replaced.
    """
    result: Tensor = _Sum.apply(rows, taps, start)  # type: ignore[no-untyped-call]
    reach = taps.shape[0] - 1
    if reach == 0:
        return result
    total, width = rows.shape
    starts = offsets[:-1]
    earlier = before
    if earlier is None:
        earlier = rows.new_zeros(1, reach, width).expand(starts.shape[0], -1, -1)
    if resets is not None:
        fresh = resets.nonzero().squeeze(1)
        starts, order = torch.cat([starts, fresh]).sort(stable=True)
        zeros = rows.new_zeros(1, reach, width).expand(fresh.shape[0], -1, -1)
        earlier = torch.cat([earlier, zeros]).index_select(0, order)
    ends = torch.cat([starts[1:], offsets[-1:]])
    near = starts.unsqueeze(1) + torch.arange(reach)
    elements = rows.index_select(0, near.clamp(max=total - 1).flatten()).unflatten(0, near.shape)
    windows = torch.cat([earlier, elements], 1)
    replaced = torch.addcmul(start, windows[:, reach:], taps[-1])
    for tap in range(1, reach + 1):
        replaced = torch.addcmul(replaced, windows[:, reach - tap : -tap], taps[-1 - tap])
    is_inside = near < ends.unsqueeze(1)
    return result.index_copy_(0, near[is_inside], replaced[is_inside])


class _Sum(torch.autograd.Function):
    """``start`` plus the sum of rows ``(N, E)``, each shifted by a step more, times a tap."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taps: Tensor, start: Tensor) -> Tensor:
        ctx.save_for_backward(rows, taps)
        result = torch.empty_like(rows)
        for first, end in _blocks(rows):
            torch.addcmul(start, rows[first:end], taps[-1], out=result[first:end])
            for tap in range(1, taps.shape[0]):
                later = max(first, tap)
                result[later:end].addcmul_(
                    rows[later - tap : max(later, end) - tap], taps[-1 - tap]
                )
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, taps = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(rows, taps, grad)
        grad = grad.contiguous()
        of_rows = torch.empty_like(rows)
        of_taps = torch.zeros_like(taps)
        of_start = taps.new_zeros(taps.shape[1])
        total = rows.shape[0]
        for first, end in _blocks(rows):
            torch.mul(grad[first:end], taps[-1], out=of_rows[first:end])
            of_taps[-1] += (grad[first:end] * rows[first:end]).sum(0)
            of_start += grad[first:end].sum(0)
            for tap in range(1, taps.shape[0]):
                last = min(end, total - tap)
                if last > first:
                    later = grad[first + tap : last + tap]
                    of_rows[first:last].addcmul_(later, taps[-1 - tap])
                    of_taps[-1 - tap] += (later * rows[first:last]).sum(0)
        return of_rows, of_taps, of_start


def _blocks(rows: Tensor) -> list[tuple[int, int]]:
    total, width = rows.shape
    size = max(16, _BLOCK // max(1, width))
    return [(first, min(total, first + size)) for first in range(0, total, size)]


def _differentiable(rows: Tensor, taps: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in operations that are differentiable."""
    total = rows.shape[0]
    of_rows = torch.zeros_like(rows)
    of_taps = []
    for tap in range(taps.shape[0]):
        later = F.pad(grad[tap:], (0, 0, 0, min(tap, total)))
        of_rows = of_rows + later * taps[-1 - tap]
        of_taps.append((later * rows).sum(0))
    return of_rows, torch.stack(of_taps[::-1]), grad.sum(0)
