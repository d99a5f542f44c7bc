"""Mamba, and FalconMamba, which normalises the step sizes, B and C."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from raglane.nn.swapped.base import Mixer, apply_to, negative_rates
from raglane.nn.swapped.layout import Layout
from raglane.nn.swapped.memory import Memory


class MambaMixer(Mixer):
    """A mixer of a selective scan."""

    def _mix(self, rows: Tensor, layout: Layout, memory: Memory) -> Tensor:  # noqa: ARG002
        mixer: Any = self
        x, gate = mixer.in_proj(rows).flatten(0, 1).chunk(2, -1)
        x = mixer.act(memory.convolve(x, mixer.conv1d))
        size = mixer.ssm_state_size
        parts = apply_to(mixer.x_proj, x, rows).split([mixer.time_step_rank, size, size], -1)
        steps, inputs, outputs = [
            mixer._modules[name](values) if name in mixer._modules else values
            for name, values in zip(_NORMS, parts, strict=True)
        ]
        dt = apply_to(mixer.dt_proj, steps, rows)
        y = memory.scan(x, dt, negative_rates(mixer.A_log, x), inputs, outputs, mixer.D)
        return mixer.out_proj((y * F.silu(gate)).unflatten(0, rows.shape[:2]))


_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class JambaMixer(MambaMixer):
    """A mixer in a model with attention, which passes its arguments on."""

    has_attention = True
