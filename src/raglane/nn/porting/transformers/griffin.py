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
        x = memory.convolve(block.linear_x(rows).flatten(0, 1), block.conv_1d)
        is_fresh = memory.is_empty or layout.resets is not None
        begins = layout.begins(memory.is_empty) if is_fresh else None
        y = memory.accumulate(*_scanned(block.rg_lru, x, begins))
        gate = block.act_fn(block.linear_y(rows))
        return apply_to(block.linear_out, y.to(x.dtype) * gate.flatten(0, 1), rows).unflatten(
            0, rows.shape[:2]
        )


def _scanned(unit: Any, x: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what each element adds to the state, divided by the logarithms of squared decays, and
    these, below 0, both ``(N, E)``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    # Both gates by one product, (H, N, 2 S).
    weight = torch.cat([unit.input_gate_weight, unit.recurrent_gate_weight], 2)
    bias = torch.cat([unit.input_gate_bias, unit.recurrent_gate_bias], 1).unsqueeze(1)
    heads = x.unflatten(1, (weight.shape[0], -1))
    gates = torch.baddbmm(bias, heads.transpose(0, 1), weight).sigmoid_().transpose(0, 1)
    of_input, of_state = gates.to(wide).chunk(2, 2)
    rates = -16.0 * F.softplus(unit.recurrent_param.to(wide)).view(heads.shape[1:])
    # A quotient by them needs a number below 0. The decay of a first element has no effect but on
    # its factor, which is 1.
    most = rates.new_full((1, 1, 1), -2 * least_step(wide))
    if begins is not None:
        most = torch.where(begins.view(-1, 1, 1), -80.0, most)
    logs = torch.addcmul(most, of_state, rates).flatten(1)
    factor = bounded_root(-expm1(logs))
    inputs = (heads.to(wide) * of_input).flatten(1)
    return inputs.mul_(factor).div_(logs), logs
