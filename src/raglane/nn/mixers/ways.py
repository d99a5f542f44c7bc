"""The ways in which a block computes rows: one step of each sequence in plain torch, or whole
sequences on the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane import segments
from raglane._utils.tracing import records_operators
from raglane.kernels.cpu.recurrences import wide
from raglane.nn.mixers import row_functions
from raglane.nn.mixers.gated_decay import accumulate, decayed_inputs
from raglane.nn.mixers.plain import has_hooks
from raglane.nn.recurrences.depthwise import convolve_channels
from raglane.nn.recurrences.loops import attention_step, selective_step, step_sizes
from raglane.nn.recurrences.recurrence_operator import attend, scan_selectively
from raglane.nn.recurrent.packed_weights import packed_product

Limits = tuple[float, float]


class Scan(NamedTuple):
    """The arguments of a selective scan; see :func:`raglane.nn.selective_scan`."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    dt_bias: Tensor | None = None
    softplus: bool = False
    limits: Limits = (-torch.inf, torch.inf)


class AttentionArguments(NamedTuple):
    """The arguments of linear attention; see :func:`raglane.nn.linear_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    gain: Tensor | None = None
    log_gain: Tensor | None = None
    scale: float = 1.0
    delta: bool = False
    eps: float = 1e-6


class Decay(NamedTuple):
    """The arguments of an RG-LRU: its inputs ``(R, E)``, gates without biases and sigmoids, their
    biases, and the rates ``(E,)``.
    """

    x: Tensor
    entry: Tensor
    recurrent: Tensor
    entry_bias: Tensor
    recurrent_bias: Tensor
    rates: Tensor


class Way:
    """How a block computes rows ``(R, ...)``, here one step of each sequence; states are ``(B, size)``."""

    # One call of the kernels may run a whole block: one element of each sequence, without gradients.
    is_one_step = False

    def linear(self, module: nn.Module, values: Tensor) -> Tensor:
        """Call a linear module."""
        result: Tensor = module(values)
        return result

    def product(self, values: Tensor, weight: Tensor, *, is_turned: bool = False) -> Tensor:
        """Return ``values @ weight.T``; a weight ``(G, M, D)``, with ``is_turned`` ``(G, D, M)``,
        multiplies groups of columns.
        """
        return row_functions.product(values, weight.transpose(-1, -2) if is_turned else weight)

    def derived(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return a function of parameters of the block, which other arguments follow.

        A step of a block reads the parameters themselves and such results, no other tensor.
        """
        return function(*arguments)

    def convolve(
        self, values: Tensor, convolution: nn.Conv1d, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Convolve each channel with the elements before; return the outputs and the new state."""
        weight = wide(convolution.weight.squeeze(1))
        earlier = state.unflatten(1, (weight.shape[1] - 1, weight.shape[0]))
        window = torch.cat([wide(earlier), wide(values).unsqueeze(1)], 1)
        output = (window * weight.t()).sum(1)
        output = output if convolution.bias is None else output + convolution.bias
        return output.to(values.dtype), window[:, 1:].flatten(1).to(state.dtype)

    def scan(self, parts: Scan, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run a selective scan; return the outputs and the new state."""
        h = wide(state).reshape(-1, *parts.A.shape)
        output, final = self._scan(parts, h)
        return output, final.flatten(1).to(state.dtype)

    def attend(
        self, parts: AttentionArguments, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run linear attention; return the outputs and the new states."""
        heads = parts.v.shape[1]
        shape = (heads, parts.k.shape[2], parts.v.shape[2])
        shapes = (shape, shape[:2], shape[:1])
        opened = [
            wide(state).reshape(state.shape[0], *shape)
            for state, shape in zip(states, shapes, strict=False)
        ]
        output, finals = self._attend(parts, tuple(opened))
        closed = [
            final.flatten(1).to(state.dtype) for final, state in zip(finals, states, strict=True)
        ]
        return output, tuple(closed)

    def _scan(self, parts: Scan, state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, rates, inputs, outputs, skip, bias, softplus, limits = parts
        delta = step_sizes(wide(dt), bias, softplus, *limits)
        output, (state,) = selective_step([x, delta, inputs, outputs], (state,), rates, skip)
        return output.to(x.dtype), state

    def _attend(
        self, parts: AttentionArguments, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        *elements, scale, delta, eps = parts
        output, states = attention_step(elements, states, scale, delta, eps)
        return output.to(parts.v.dtype), states

    def decay(
        self, parts: Decay, states: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run an RG-LRU; return the outputs and the new states."""
        state, has_begun = states
        logs, inputs = decayed_inputs(*parts, 1 - wide(has_begun).squeeze(1))
        h = (-logs).exp() * wide(state) + inputs
        return h.to(parts.x.dtype), (h.to(state.dtype), torch.ones_like(has_begun))

    sigmoid = staticmethod(torch.sigmoid)
    tanh = staticmethod(torch.tanh)
    root = staticmethod(torch.sqrt)
    scaled = staticmethod(torch.mul)
    shifted = staticmethod(torch.add)

    def softplus(self, values: Tensor) -> Tensor:
        """Return ``log(1 + exp(values))``."""
        return step_sizes(values, None, True, -torch.inf, torch.inf)

    def silu(self, values: Tensor) -> Tensor:
        """Return ``values * sigmoid(values)``."""
        return values * self.sigmoid(values)

    def gelu(self, values: Tensor) -> Tensor:
        """Return the Gaussian error linear unit by a hyperbolic tangent."""
        return F.gelu(values, approximate="tanh")

    def log_sigmoid(self, values: Tensor) -> Tensor:
        """Return ``-log(1 + exp(-values))``."""
        return -self.softplus(-values)

    def capped(self, values: Tensor, cap: float) -> Tensor:
        """Return numbers between ``-cap`` and ``cap``, by a hyperbolic tangent."""
        return cap * self.tanh(values / cap)

    def normed(self, values: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Divide by the root of the mean square of the last dimension, ``(N, ..., P)``.

        ``weight`` has a number for each column of ``(N, columns)``, or of the last dimension.
        """
        exact = wide(values)
        mean = self._sums(exact * exact) / values.shape[-1]
        result = (exact / self.root(mean + eps)).to(values.dtype)
        if weight is None:
            return result
        columns = result.reshape(-1, weight.shape[0])
        return self.scaled(columns, weight).view(result.shape)

    def unit(self, values: Tensor, eps: float) -> Tensor:
        """Divide by the root of the sum of squares of the last dimension."""
        exact = wide(values)
        return (exact / self.root(self._sums(exact * exact) + eps)).to(values.dtype)

    def centred(self, values: Tensor) -> Tensor:
        """Subtract the mean of the last dimension."""
        exact = wide(values)
        return (exact - self._sums(exact) / values.shape[-1]).to(values.dtype)

    def _sums(self, values: Tensor) -> Tensor:
        return values.sum(-1, keepdim=True)


STEPS = Way()

# Up to so many rows, a packed weight, which one thread multiplies, takes less time.
_FEW = 64


class Whole(Way):
    """All elements of whole sequences, ``(N, ...)``; the bits of a sequence depend on no other."""

    sigmoid = staticmethod(row_functions.sigmoid)  # type: ignore[assignment]
    tanh = staticmethod(row_functions.tanh)  # type: ignore[assignment]
    root = staticmethod(row_functions.root)  # type: ignore[assignment]
    _sums = staticmethod(row_functions.sums)  # type: ignore[assignment]
    silu = staticmethod(row_functions.silu)  # type: ignore[assignment]
    gelu = staticmethod(row_functions.gelu)  # type: ignore[assignment]
    softplus = staticmethod(row_functions.softplus)  # type: ignore[assignment]
    scaled = staticmethod(row_functions.scaled)  # type: ignore[assignment]
    shifted = staticmethod(row_functions.shifted)  # type: ignore[assignment]

    def __init__(self, offsets: Tensor, count: int) -> None:
        self._offsets = offsets
        self._count = count
        # In steps and on streams.
        self.is_one_step = (
            not torch.is_grad_enabled()
            and not records_operators()
            and count == offsets.shape[0] - 1 <= _FEW
            and offsets.tolist() == [*range(count + 1)]
        )

    def linear(self, module: nn.Module, values: Tensor) -> Tensor:
        """See :class:`Way`."""
        if type(module) is nn.Linear and not has_hooks(module):
            is_short = values.shape[0] <= _FEW and not torch.is_grad_enabled()
            packed = packed_product(module) if is_short and not records_operators() else None
            if packed is None or not values.shape[0]:
                return row_functions.product(values, module.weight, module.bias)
            output = packed.apply(wide(values).contiguous()).to(values.dtype)
            return output if module.bias is None else output + module.bias
        return super().linear(module, values)

    def convolve(
        self, values: Tensor, convolution: nn.Conv1d, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Way`."""
        weight = wide(convolution.weight.squeeze(1))
        bias = None if convolution.bias is None else wide(convolution.bias)
        kept = weight.shape[1] - 1
        initial = wide(state).unflatten(1, (kept, weight.shape[0]))
        tensors = (values, weight, bias, initial)
        output, final = convolve_channels(tensors, self._offsets, None, kept)
        return output, final.flatten(1).to(state.dtype)

    def _scan(self, parts: Scan, state: Tensor) -> tuple[Tensor, Tensor]:
        *tensors, softplus, limits = parts
        operands = (*tensors, state)
        output, final = scan_selectively(operands, self._offsets, None, softplus, *limits)
        return output, final

    def _attend(
        self, parts: AttentionArguments, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        *elements, scale, delta, eps = parts
        operands = (*elements, *states, *[None] * (3 - len(states)))
        output, *finals = attend(operands, self._offsets, None, scale, delta, eps)
        return output, tuple(finals[: len(states)])

    def decay(
        self, parts: Decay, states: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :class:`Way`."""
        state, has_begun = states
        has_elements = (self._offsets.diff() > 0).unsqueeze(1)
        index = segments.segment_ids(self._offsets, self._count)
        is_first = segments.positions(self._offsets, self._count) == 0
        fresh = (1 - wide(has_begun).squeeze(1)).index_select(0, index) * is_first
        output, final = accumulate((*parts, fresh, wide(state)), self._offsets, None)
        return output, (final.to(state.dtype), has_begun.masked_fill(has_elements, 1))
