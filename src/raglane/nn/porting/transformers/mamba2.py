"""Mamba-2, also within models with attention."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from raglane.kernels.cpu.recurrences import wide
from raglane.kernels.cpu.steps import AttentionStep
from raglane.nn.mixers.plain import has_hooks
from raglane.nn.porting.transformers.base import Mixer
from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.porting.transformers.memory import Memory
from raglane.nn.recurrences.loops import decay_rates, step_sizes


class Mamba2Mixer(Mixer):
    """A mixer of linear attention with a decay for each head."""

    def _stepped(self, rows: Tensor, memory: Memory, norm: Any = None) -> Tensor | None:  # noqa: ARG002
        states = memory.states(rows.dtype)
        norm_of_groups = self._modules.get("norm")
        of_group = getattr(norm_of_groups, "group_size", None)
        if states is None or of_group is None or self.activation not in ("silu", "swish"):
            return None
        if has_hooks(norm_of_groups):
            return None
        # States that the first update made from those of the kernels have their order in memory.
        earlier, state = states
        is_transposed = state.is_contiguous()
        state = state if is_transposed else state.transpose(2, 3)
        width = self.intermediate_size
        keys = self.n_groups * self.ssm_state_size
        convolution = self.conv1d
        step = AttentionStep(
            parts=(
                *(convolution.weight, convolution.bias, self.dt_bias, self.A_log, self.D),
                norm_of_groups.weight,
            ),
            key_heads=self.n_groups,
            heads=self.num_heads,
            key_size=self.ssm_state_size,
            value_size=self.head_dim,
            firsts=(width + keys, width, 0),
            norm_groups=width // of_group,
            norm_eps=norm_of_groups.variance_epsilon,
            gates_first=True,
            transposed=is_transposed,
            limits=self.time_step_limit,
        )
        gate, mixed, dt = self._project(rows).split([width, self.conv_dim, self.num_heads], -1)
        y = step.run(mixed, gate, dt, None, earlier, state)
        return None if y is None else self.out_proj(y)

    def _mix(self, rows: Tensor, layout: BatchLayout, memory: Memory) -> Tensor:  # noqa: ARG002
        groups = self.n_groups
        sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
        gate, mixed, steps = self._project(rows).split(sizes, -1)
        mixed = self.act(memory.convolve(mixed.flatten(0, 1), self.conv1d))
        of_group = groups * self.ssm_state_size
        x, keys, queries = mixed.split([self.intermediate_size, of_group, of_group], -1)
        dt = wide(steps.flatten(0, 1))
        dt = step_sizes(dt, self.dt_bias.to(dt.dtype), True, *self.time_step_limit)
        x, queries, keys = [
            values.unflatten(1, (count, -1))
            for values, count in ((x, self.num_heads), (queries, groups), (keys, groups))
        ]
        x = wide(x)
        decays = dt * decay_rates(self.A_log)
        y = memory.attend(queries, keys, x, decays, dt, is_transposed=True)
        y = (y + self.D.to(y.dtype).unsqueeze(1) * x).flatten(1).to(gate.dtype)
        return self.out_proj(self._gated(y.unflatten(0, rows.shape[:2]), gate))

    def _project(self, rows: Tensor) -> Tensor:
        projected: Tensor = self.in_proj(rows)
        return projected

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        normalised: Tensor = self.norm(y, gate)
        return normalised


class BambaMixer(Mamba2Mixer):
    """A mixer in a model with attention, which passes its arguments on."""

    has_attention = True


class GraniteMixer(BambaMixer):
    """A mixer in a model whose attention gets no positions."""

    needs_mask = True


class FalconH1Mixer(BambaMixer):
    """A mixer with factors of its projections, and a norm that may be missing."""

    def _project(self, rows: Tensor) -> Tensor:
        return super()._project(rows * self.ssm_in_multiplier) * self.mup_vector

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        return super()._gated(y, gate) if self.mamba_rms_norm else y * F.silu(gate)
