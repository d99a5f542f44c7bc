"""The gated delta rule of Qwen3-Next, Qwen3.5, OLMo Hybrid and Kimi Linear."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.kernels.cpu.gated_norm import GatedNorm
from raglane.kernels.cpu.recurrences import wide
from raglane.kernels.cpu.steps import AttentionStep
from raglane.nn.mixers.plain import has_hooks
from raglane.nn.mixers.row_functions import softplus, unit
from raglane.nn.porting.transformers.base import Mixer
from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.porting.transformers.memory import Memory
from raglane.nn.recurrences.loops import decay_rates

# By the names of transformers.
ACTIVATIONS: dict[str, Any] = {"silu": F.silu, "swish": F.silu, "gelu": F.gelu, "relu": F.relu}


class DeltaMixer(Mixer):
    """The mixer of Qwen3.5, with a projection for each part."""

    has_attention = True
    # The attributes of the norm and of the last projection.
    ends: ClassVar[tuple[str, str]] = ("norm", "out_proj")

    def _stepped(self, rows: Tensor, memory: Memory, norm: Any = None) -> Tensor | None:  # noqa: ARG002
        states = memory.states(rows.dtype)
        norm_of_heads, out = [self._modules[name] for name in self.ends]
        is_silu = {self.activation, getattr(norm_of_heads, "activation", "")} <= {"silu", "swish"}
        if states is None or not is_silu or has_hooks(norm_of_heads):
            return None
        convolution = self.conv1d
        size = self.head_k_dim
        step = AttentionStep(
            parts=(
                *(convolution.weight, convolution.bias, self.dt_bias, self.A_log, None),
                norm_of_heads.weight,
            ),
            key_heads=self.key_dim // size,
            heads=self.value_dim // self.head_v_dim,
            key_size=size,
            value_size=self.head_v_dim,
            firsts=(0, self.key_dim, 2 * self.key_dim),
            norm_groups=self.value_dim // self.head_v_dim,
            norm_eps=norm_of_heads.variance_epsilon,
            unit=True,
            delta=True,
            scale=size**-0.5,
            beta_scale=2.0 if getattr(self, "allow_neg_eigval", False) else 1.0,
        )
        mixed, gate, betas, dt = self._project(rows)
        y = step.run(mixed, gate.flatten(2), dt, betas, *states)
        return None if y is None else out(y)

    def _mix(self, rows: Tensor, layout: BatchLayout, memory: Memory) -> Tensor:  # noqa: ARG002
        mixed, gate, betas, steps = self._project(rows)
        mixed = ACTIVATIONS[self.activation](memory.convolve(mixed.flatten(0, 1), self.conv1d))
        size = self.head_k_dim
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = [unit(wide(each.unflatten(1, (-1, size))), 1e-6) for each in (q, k)]
        # One copy, which backward reads too.
        v = wide(v.unflatten(1, (-1, self.head_v_dim))).contiguous()
        gains = betas.flatten(0, 1).sigmoid().to(v.dtype)
        if getattr(self, "allow_neg_eigval", False):
            gains = gains * 2
        decays = self._decays(steps.flatten(0, 1).to(v.dtype))
        y = memory.attend(q, k, v, decays, gains, scale=size**-0.5, delta=True)
        norm, out = [self._modules[name] for name in self.ends]
        y = _normed(norm, y, gate.reshape(y.shape))
        return out(y.flatten(1).unflatten(0, rows.shape[:2]))

    def _project(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the input of the convolution, the gate, betas and step sizes."""
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return tuple([getattr(self, name)(rows) for name in names])

    def _decays(self, steps: Tensor) -> Tensor:
        """Return the logarithms of decays, of heads or of keys."""
        dt = steps + self.dt_bias.to(steps.dtype)
        return softplus(dt) * decay_rates(self.A_log)


class InterleavedDeltaMixer(DeltaMixer):
    """The mixer of Qwen3-Next, whose projections have the parts of each head of keys together."""

    def _project(self, rows: Tensor) -> tuple[Tensor, ...]:
        parts = self.fix_query_key_value_ordering(self.in_proj_qkvz(rows), self.in_proj_ba(rows))
        q, k, v, gate, betas, steps = parts
        return torch.cat([part.flatten(2) for part in (q, k, v)], -1), gate, betas, steps


class OlmoDeltaMixer(DeltaMixer):
    """The mixer of OLMo Hybrid."""

    ends = ("o_norm", "o_proj")

    def _project(self, rows: Tensor) -> tuple[Tensor, ...]:
        mixed = torch.cat([self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)], -1)
        return mixed, self.g_proj(rows), self.b_proj(rows), self.a_proj(rows)


class KimiMixer(OlmoDeltaMixer):
    """The mixer of Kimi Linear, with a decay for each key, which a module of its own computes."""

    key_dim = value_dim = property(lambda self: self.qkv_dim)
    head_k_dim = head_v_dim = property(lambda self: self.head_dim)

    def g_proj(self, rows: Tensor) -> Tensor:
        """Return the gate, in place of the module of OLMo Hybrid."""
        return self.g_b_proj(self.g_a_proj(rows))

    def a_proj(self, rows: Tensor) -> Tensor:
        """Return the logarithms of decays."""
        return self.forget_gate(rows)

    def _stepped(self, rows: Tensor, memory: Memory, norm: Any = None) -> Tensor | None:  # noqa: ARG002
        return None

    def _decays(self, steps: Tensor) -> Tensor:
        return steps


def _normed(norm: Any, y: Tensor, gate: Tensor) -> Tensor:
    """Return the heads ``(N, H, V)`` after their norm, times the gate."""
    if has_hooks(norm) or not type(norm).__name__.startswith("Qwen3") or norm.activation != "silu":
        result: Tensor = norm(y.to(gate.dtype).flatten(0, 1), gate.flatten(0, 1))
        return result.unflatten(0, y.shape[:2])
    _, heads, _ = y.shape
    gated = GatedNorm(heads, norm.variance_epsilon, is_silu=True)
    return gated(y.flatten(1), gate.flatten(1), norm.weight.repeat(heads)).view_as(gate)
