"""The recurrent block of RecurrentGemma, a real-gated linear recurrent unit."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.errors import ArgumentTypeError
from raglane.nn.mixers.row_functions import bounded_root, expm1
from raglane.nn.mixers.ways import least_step
from raglane.nn.porting.transformers.base import Mixer, apply_to
from raglane.nn.porting.transformers.layout import BatchLayout
from raglane.nn.porting.transformers.memory import Memory


class GriffinMixer(Mixer):
    """A block whose states are in the cache of its model, so that beams are reordered."""

    has_attention = True
    needs_padding = True
    added = ("layer_idx",)

    def adopt(self, name: str) -> None:
        """Keep the number of the layer, which is in its name, e.g. ``model.layers.3.block``."""
        numbers = re.findall(r"\d+", name)
        if not numbers:
            rule = "a model with that block: its states are in the model's cache"
            fix = "call rl.accelerate(model) with the whole model"
            raise ArgumentTypeError("model", f"a {type(self).__name__} alone", rule, fix)
        self.layer_idx = int(numbers[-1])

    def forward(  # type: ignore[override]
        self,
        input_states: Tensor,
        position_ids: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the outputs ``(B, T, D)``, and None, as the block of transformers."""
        block: Any = self
        if not isinstance(block, Mixer):  # as in Mixer.forward
            return type(block).forward(block, input_states, position_ids, attention_mask, **kwargs)
        options = {"seq_idx": kwargs.get("seq_idx"), "position_ids": position_ids}
        return super().forward(input_states, kwargs.get("cache"), **options), None

    def _mix(self, rows: Tensor, layout: BatchLayout, memory: Memory) -> Tensor:
        block: Any = self
        gate = block.act_fn(block.linear_y(rows))
        x = memory.convolve(block.linear_x(rows).flatten(0, 1), block.conv_1d)
        unit = block.rg_lru
        wide = torch.promote_types(x.dtype, torch.float32)
        of_input = _gates(x, unit.input_gate_weight, unit.input_gate_bias)
        of_state = _gates(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        rates = 8.0 * F.softplus(unit.recurrent_param.to(wide))
        steps = (of_state.to(wide) * rates).clamp(min=least_step(wide))
        factor = bounded_root(-expm1(-2 * steps))
        if memory.is_empty or layout.resets is not None:
            factor = torch.where(layout.begins(memory.is_empty).unsqueeze(1), 1.0, factor)
        y = memory.accumulate(x.to(wide) * of_input.to(wide) * factor, steps)
        return apply_to(block.linear_out, y.to(x.dtype) * gate.flatten(0, 1), rows).unflatten(
            0, rows.shape[:2]
        )


def _gates(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the sigmoid of products with the blocks of a matrix, ``(N, E)``."""
    heads = x.unflatten(1, (weight.shape[0], -1)).transpose(0, 1)
    return torch.baddbmm(bias.unsqueeze(1), heads, weight).transpose(0, 1).flatten(1).sigmoid()
