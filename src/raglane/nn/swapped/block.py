"""The base of converted blocks, which do not pass all arguments on to their mixer."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Block:
    """A block that passes numbers of sequences on as the attention mask of its mixer."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Run the block of transformers."""
        block: Any = self
        if isinstance(block, Block):
            sequences = kwargs.get("seq_idx")
            mask = attention_mask if sequences is None else sequences + 1
            return super().forward(hidden_states, mask, **kwargs)  # type: ignore[misc]
        # As in Mixer.forward.
        return type(block).forward(block, hidden_states, attention_mask, **kwargs)
