"""Causal convolutions of each channel with its own few weights, as before linear recurrences.

An output is the sum of the element and the ``K - 1`` before it in its sequence. A state is the last
``R`` elements, oldest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raglane._utils.tracing import index_arithmetic
from raglane.kernels.cpu.recurrences import CONVOLUTION, RecurrenceCall
from raglane.nn.recurrences.recurrence_operator import Operator
from raglane.segments import owners


def _by_windows(call: RecurrenceCall) -> tuple[Tensor, ...]:
    """Return the outputs ``(N, E)`` and the final states ``(B, R, E)``: all elements gather those
    that they read, in one graph for all lengths.
    """
    x, weight, bias, initial = call.tensors
    (kept,) = call.options
    starts, ends = call.offsets[:-1], call.offsets[1:]
    sequences = torch.arange(starts.shape[0], device=x.device)
    elements = torch.arange(x.shape[0], device=x.device)
    owner = owners(ends, x.shape[0])
    # Each sequence behind its state.
    shifts = kept * (sequences + 1)
    rows = weight.new_zeros(x.shape[0] + kept * starts.shape[0], x.shape[1])
    rows = rows.index_copy(0, elements + shifts[owner], x.to(weight.dtype))
    if initial is not None:
        of_states = (starts + shifts).unsqueeze(1) - _backwards(kept, starts)
        rows = rows.index_copy(0, of_states.flatten(), initial.flatten(0, 1))

    def windows(places: Tensor, owner: Tensor, size: int) -> Tensor:
        back = _backwards(size, places)
        index = (places + shifts[owner]).unsqueeze(1) - back
        window = rows.index_select(0, index.flatten()).view(*index.shape, x.shape[1])
        if call.resets is None:
            return window
        reach = _reach(places, starts[owner], call.resets)
        return window.masked_fill((back > reach.unsqueeze(1)).unsqueeze(2), 0)

    output = (windows(elements + 1, owner, weight.shape[1]) * weight.t()).sum(1)
    output = output if bias is None else output + bias
    return output.to(x.dtype), windows(ends, sequences, kept)


def _backwards(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, 0, -1, device=like.device)


@index_arithmetic
def _reach(places: Tensor, starts: Tensor, resets: Tensor) -> Tensor:
    """Return how many elements before each place are not before a reset, of sequences that begin at
    ``starts``.
    """
    numbers = torch.arange(resets.shape[0], device=resets.device)
    latest = torch.where(resets, numbers, -1).cummax(0).values
    latest = torch.cat([latest.new_full((1,), -1), latest])[places]
    return (places - latest).masked_fill(latest < starts, torch.iinfo(torch.int64).max)


convolve_channels = Operator(
    "convolution", CONVOLUTION, _by_windows, _by_windows, "bias initial", ("int kept",)
)
