"""The states of a mixer in a cache of transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from raglane.errors import ArgumentError
from raglane.kernels.cpu.recurrences import wide
from raglane.nn.mixers.gated_decay import accumulate
from raglane.nn.mixers.ways import Decay
from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.recurrences.depthwise import convolve_channels
from raglane.nn.recurrences.recurrence_operator import Operator, attend, scan_selectively


class Memory:
    """Runs the parts of a mixer that have states, which begin and end in its layer of a cache.

    The cache has the last inputs of a convolution, ``(B, E, K)``, oldest first.
    """

    def __init__(self, cache: Any, layer: int, layout: BatchLayout) -> None:
        self._cache = cache
        self._layer = layer
        self._layout = layout
        self._inputs: Tensor | None = None
        self._state: Tensor | None = None
        if cache is None:
            return
        if cache.is_recording_past(layer):
            rule = "a cache that is not rolled back: a recurrence has no states of earlier steps"
            fix = "generate without speculative decoding, or call rl.to_torch(model) first"
            raise ArgumentError("cache", "a cache that records its past", rule, fix)
        self._inputs = cache.get_conv_state(layer, state_idx=0)
        self._state = cache.get_recurrent_state(layer, state_idx=0)

    @property
    def is_empty(self) -> bool:
        """True if all rows begin with zeros."""
        return self._inputs is None

    def states(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return the inputs of the convolution and the state in the cache; None if there are none
        of a dtype.
        """
        inputs, state = self._inputs, self._state
        if inputs is None or state is None or inputs.dtype is not dtype or state.dtype is not dtype:
            return None
        return inputs, state

    def convolve(self, values: Tensor, convolution: nn.Conv1d) -> Tensor:
        """Return the convolution ``(N, E)`` of each channel."""
        weight = wide(convolution.weight.squeeze(1))
        bias = None if convolution.bias is None else wide(convolution.bias)
        size = weight.shape[1]
        inputs = self._initial(self._inputs, weight.dtype)
        initial = None if inputs is None else inputs.transpose(1, 2)
        output, final = self._run(convolve_channels, (values, weight, bias, initial), size)
        if self._cache is not None:
            last = final[: self._layout.shape[0]].transpose(1, 2).to(values.dtype)
            self._cache.update_conv_state(last, self._layer, conv_kernel_size=size)
        return output

    def scan(
        self, x: Tensor, dt: Tensor, rates: Tensor, inputs: Tensor, outputs: Tensor, skip: Tensor
    ) -> Tensor:
        """Return the selective scan ``(N, E)``, with softplus of the step sizes."""
        initial = self._initial(self._state, rates.dtype)
        elements = [each.to(x.dtype) for each in (dt, inputs.unsqueeze(1), outputs.unsqueeze(1))]
        tensors = (x, elements[0], rates, *elements[1:], skip.to(rates.dtype), None, initial)
        output, final = self._run(scan_selectively, tensors, True, -math.inf, math.inf)
        self._end(final)
        return output

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decays: Tensor,
        gains: Tensor,
        *,
        scale: float = 1.0,
        delta: bool = False,
        is_transposed: bool = False,
    ) -> Tensor:
        """Return linear attention ``(N, H, V)``; states are ``(B, H, K, V)``, or transposed."""
        initial = self._initial(self._state, decays.dtype)
        if initial is not None and is_transposed:
            initial = initial.transpose(2, 3)
        elements = [each.to(v.dtype) for each in (q, k)]
        tensors = (*elements, v, decays, gains, None, initial, None, None)
        output, final, *_ = self._run(attend, tensors, scale, delta, 0.0)
        self._end(final.transpose(2, 3) if is_transposed else final)
        return output

    def accumulate(self, parts: Decay) -> Tensor:
        """Return the recurrence of an RG-LRU ``(N, E)``."""
        layout = self._layout
        fresh = None
        if self.is_empty or layout.resets is not None:
            fresh = layout.begins(self.is_empty).to(parts.rates.dtype)
        initial = self._initial(self._state, parts.rates.dtype)
        output, final = self._run(accumulate, (*parts, fresh, initial))
        self._end(final)
        return output

    def _run(
        self, recurrence: Operator, tensors: tuple[Any, ...], *options: Any
    ) -> tuple[Tensor, ...]:
        return recurrence(tensors, self._layout.offsets, self._layout.resets, *options)

    def _initial(self, state: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        state = self._layout.states(state)
        # A copy where it is saved for backward, because the cache changes in place.
        return None if state is None else state.to(dtype, copy=torch.is_grad_enabled())

    def _end(self, final: Tensor) -> None:
        """Keep the final states."""
        if self._cache is not None:
            self._cache.update_recurrent_state(final[: self._layout.shape[0]], self._layer)
