"""The states of a mixer in a cache of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raglane.errors import ArgumentError
from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.recurrences.depthwise import convolve_channels, last_elements, step_channels
from raglane.nn.recurrences.recurrence_operator import attend, scan_selectively


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
        weight = convolution.weight.squeeze(1)
        size = weight.shape[1]
        layout = self._layout
        inputs = self._inputs
        if inputs is not None and layout.is_step:
            latest = torch.cat([inputs[..., 1:], values.unsqueeze(2).to(inputs.dtype)], 2)
            before = latest[..., :-1].transpose(1, 2)
            output = step_channels(values, weight, convolution.bias, before)
            inputs.copy_(latest)
            return output
        earlier = layout.states(None if inputs is None else inputs.transpose(1, 2))
        places = (layout.offsets, layout.resets)
        begin = None if earlier is None else earlier[:, 1:]
        output = convolve_channels(values, weight, convolution.bias, *places, begin)
        if self._cache is not None:
            last = last_elements(values, size, *places, earlier)[: layout.shape[0]]
            self._cache.update_conv_state(last.transpose(1, 2), self._layer, conv_kernel_size=size)
        return output

    def scan(
        self, x: Tensor, dt: Tensor, rates: Tensor, inputs: Tensor, outputs: Tensor, skip: Tensor
    ) -> Tensor:
        """Return the selective scan ``(N, E)``, with softplus of the step sizes."""
        wide = rates.dtype
        initial = self._initial(wide)
        elements = [each.to(x.dtype) for each in (dt, inputs.unsqueeze(1), outputs.unsqueeze(1))]
        tensors = (x, elements[0], rates, *elements[1:], skip.to(wide), None, initial)
        limits = (float("-inf"), float("inf"))
        layout = self._layout
        output, final = scan_selectively(tensors, layout.offsets, layout.resets, True, *limits)
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
        initial = self._initial(decays.dtype)
        if initial is not None and is_transposed:
            initial = initial.transpose(2, 3)
        elements = [each.to(v.dtype) for each in (q, k)]
        tensors = (*elements, v, decays, gains, None, initial, None, None)
        layout = self._layout
        output, final, *_ = attend(tensors, layout.offsets, layout.resets, scale, delta, 0.0)
        self._end(final.transpose(2, 3) if is_transposed else final)
        return output

    def accumulate(self, x: Tensor, logs: Tensor) -> Tensor:
        """Return ``h = exp(logs / 2) h + logs x`` of each channel, for logarithms below 0."""
        layout = self._layout
        initial = self._initial(x.dtype)
        if initial is not None and layout.is_step:
            output = torch.addcmul(logs * x, (logs / 2).exp(), initial)
            self._end(output)
            return output
        one = x.new_ones(x.shape[0], 1, 1)
        state = None if initial is None else initial.unsqueeze(2)
        rates = one.new_full((x.shape[1], 1), 0.5)
        tensors = (x, logs, rates, one, one, None, None, state)
        limits = (float("-inf"), float("inf"))
        output, final = scan_selectively(tensors, layout.offsets, layout.resets, False, *limits)
        self._end(final.squeeze(2))
        return output

    def _initial(self, dtype: torch.dtype) -> Tensor | None:
        state = self._layout.states(self._state)
        # A copy where it is saved for backward, because the cache changes in place.
        return None if state is None else state.to(dtype, copy=torch.is_grad_enabled())

    def _end(self, final: Tensor) -> None:
        """Keep the final states."""
        if self._cache is not None:
            self._cache.update_recurrent_state(final[: self._layout.shape[0]], self._layer)
