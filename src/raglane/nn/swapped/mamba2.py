"""Mamba-2, also within models with attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.nn.swapped.base import Mixer, negative_rates
from raglane.nn.swapped.layout import Layout
from raglane.nn.swapped.memory import Memory


class Mamba2Mixer(Mixer):
    """A mixer of linear attention with a decay for each head."""

    def _mix(self, rows: Tensor, layout: Layout, memory: Memory) -> Tensor:  # noqa: ARG002
        mixer: Any = self
        groups = mixer.n_groups
        sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        gate, mixed, steps = self._project(rows).split(sizes, -1)
        mixed = mixer.act(memory.convolve(mixed.flatten(0, 1), mixer.conv1d))
        of_group = groups * mixer.ssm_state_size
        x, keys, queries = mixed.split([mixer.intermediate_size, of_group, of_group], -1)
        rates = negative_rates(mixer.A_log, x)
        dt = steps.flatten(0, 1).to(rates.dtype) + mixer.dt_bias.to(rates.dtype)
        # Unlike torch's softplus, which is the identity above 20.
        dt = torch.logaddexp(dt, torch.zeros_like(dt)).clamp(*mixer.time_step_limit)
        x, queries, keys = [
            values.unflatten(1, (count, -1))
            for values, count in ((x, mixer.num_heads), (queries, groups), (keys, groups))
        ]
        x = x.to(rates.dtype)
        y = memory.attend(queries, keys, x, dt * rates, dt, is_transposed=True)
        y = (y + mixer.D.to(y.dtype).unsqueeze(1) * x).flatten(1).to(gate.dtype)
        return mixer.out_proj(self._gated(y.unflatten(0, rows.shape[:2]), gate))

    def _project(self, rows: Tensor) -> Tensor:
        mixer: Any = self
        projected: Tensor = mixer.in_proj(rows)
        return projected

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        mixer: Any = self
        normalised: Tensor = mixer.norm(y, gate)
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
        mixer: Any = self
        return super()._project(rows * mixer.ssm_in_multiplier) * mixer.mup_vector

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        mixer: Any = self
        return super()._gated(y, gate) if mixer.mamba_rms_norm else y * F.silu(gate)
