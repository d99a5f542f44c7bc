"""The recurrent block of RecurrentGemma, a real-gated linear recurrent unit."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from raglane.errors import ArgumentTypeError
from raglane.nn.mixers.plain import has_hooks
from raglane.nn.mixers.rglru import decay_of
from raglane.nn.mixers.row_functions import gelu
from raglane.nn.mixers.ways import STEPS
from raglane.nn.porting.transformers.base import Mixer, of_converted
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

    @of_converted
    def forward(
        self,
        input_states: Tensor,
        position_ids: Any = None,
        attention_mask: Any = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Any:
        """Return the outputs ``(B, T, D)``, and None, as the block of transformers."""
        options = {"seq_idx": kwargs.get("seq_idx"), "position_ids": position_ids}
        return super().forward(input_states, kwargs.get("cache"), **options), None

    def _mix(self, rows: Tensor, layout: BatchLayout, memory: Memory) -> Tensor:  # noqa: ARG002
        x = memory.convolve(self.linear_x(rows).flatten(0, 1), self.conv_1d)
        y = memory.accumulate(decay_of(self.rg_lru, x, STEPS))
        is_gelu = type(self.act_fn).__name__ == "GELUTanh" and not has_hooks(self.act_fn)
        gate = self.linear_y(rows)
        y = y.view(gate.shape)
        return self.linear_out(gelu(gate, y) if is_gelu else y * self.act_fn(gate))
