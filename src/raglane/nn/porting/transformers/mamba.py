"""Mamba, and FalconMamba, which normalises the step sizes, B and C."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from raglane.kernels.cpu.steps import MambaStep, parts_of_mamba
from raglane.nn.mixers.plain import are_products, has_hooks
from raglane.nn.porting.transformers.base import Mixer, apply_to
from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.porting.transformers.memory import Memory
from raglane.nn.recurrences.loops import decay_rates


class MambaMixer(Mixer):
    """A mixer of a selective scan."""

    def _stepped(self, rows: Tensor, memory: Memory, norm: Any = None) -> Tensor | None:
        modules: dict[str, Any] = self._modules
        linears = [modules[name] for name in _LINEARS]
        norms: list[Any] = [modules.get(name) for name in _NORMS]
        eps = _eps_of(norms)
        states = memory.states(rows.dtype)
        is_silu = getattr(self, "activation", "") in ("silu", "swish")
        if states is None or eps is None or not is_silu or not are_products(linears):
            return None
        parts = [
            *parts_of_mamba(linears, modules["conv1d"], self.A_log, self.D),
            *(None if type(each).__name__ in _WEIGHTLESS else each.weight for each in norms),
        ]
        if norm is None:
            return MambaStep([*parts, None], True, eps).run(rows, *states)
        eps_of_norm = norm.variance_epsilon
        return MambaStep([*parts, norm.weight], True, eps, eps_of_norm, True).run(rows, *states)

    def _mix(self, rows: Tensor, layout: BatchLayout, memory: Memory) -> Tensor:  # noqa: ARG002
        x, gate = self.in_proj(rows).flatten(0, 1).chunk(2, -1)
        x = self.act(memory.convolve(x, self.conv1d))
        size = self.ssm_state_size
        parts = apply_to(self.x_proj, x, rows).split([self.time_step_rank, size, size], -1)
        steps, inputs, outputs = [
            self._modules[name](values) if name in self._modules else values
            for name, values in zip(_NORMS, parts, strict=True)
        ]
        dt = apply_to(self.dt_proj, steps, rows)
        y = memory.scan(x, dt, decay_rates(self.A_log), inputs, outputs, self.D)
        return self.out_proj((y * F.silu(gate)).unflatten(0, rows.shape[:2]))


_LINEARS = ("in_proj", "x_proj", "dt_proj", "out_proj")
_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


_WEIGHTLESS = ("NoneType", "FalconMambaWeightlessRMSNorm")
# The attribute of a norm that is added to a mean square.
_EPS = {"FalconMambaWeightlessRMSNorm": "eps", "JambaRMSNorm": "variance_epsilon"}


def _eps_of(norms: list[Any]) -> float | None:
    """Return the number that three norms add to mean squares, below 0 without norms; None if the
    kernels cannot compute them.
    """
    if norms == [None] * 3:
        return -1.0
    name = _EPS.get(type(norms[0]).__name__)
    kinds = {type(norm) for norm in norms}
    if name is None or len(kinds) > 1 or any(has_hooks(norm) for norm in norms):
        return None
    eps: float = getattr(norms[0], name)
    return eps


class JambaMixer(MambaMixer):
    """A mixer in a model with attention, which passes its arguments on."""

    has_attention = True
