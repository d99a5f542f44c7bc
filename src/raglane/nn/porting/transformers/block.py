"""The bases of converted blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.kernels.cpu.steps import can_step
from raglane.nn.mixers.plain import has_hooks
from raglane.nn.porting.transformers.base import Mixer, of_converted
from raglane.nn.porting.transformers.layout import layout_of
from raglane.nn.porting.transformers.memory import Memory


class SwappedBlock:
    """A block that does not pass all arguments on: numbers of sequences become the attention mask
    of its mixer.
    """

    @of_converted
    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Run the block of transformers."""
        sequences = kwargs.get("seq_idx")
        mask = attention_mask if sequences is None else sequences + 1
        return super().forward(hidden_states, mask, **kwargs)  # type: ignore[misc]


class SteppedBlock:
    """A block of a norm and a mixer, which one call of the kernels steps."""

    @of_converted
    def forward(
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """Run the block of transformers, or one step of it."""
        output = None
        if cache is not None and not kwargs and hidden_states.shape[1] == 1:
            output = self._stepped(hidden_states, cache, attention_mask)
        if output is not None:
            return output
        return super().forward(hidden_states, cache, attention_mask, **kwargs)  # type: ignore[misc]

    def _stepped(self, hidden_states: Tensor, cache: Any, mask: Any) -> Tensor | None:
        """Return the output of one element of each row; None if the kernels cannot compute it."""
        block: Any = self
        mixer = block.mixer
        is_exact = block.residual_in_fp32 and hidden_states.dtype is not torch.float32
        if is_exact or not can_step(hidden_states) or has_hooks(mixer) or has_hooks(block.norm):
            return None
        layout = layout_of(hidden_states, None, mask)
        if not layout.is_step or not isinstance(mixer, Mixer):
            return None
        return mixer._stepped(hidden_states, Memory(cache, mixer.layer_idx, layout), block.norm)
