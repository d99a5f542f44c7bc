"""Initial states that a layer makes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raglane.ragged import Ragged


class LengthState(nn.Module):
    """The initial state as a learned function of how long a sequence is: affine in ``log(1 + length)``.

    What a layer with ``initial_state="lengths"`` begins with; at first it is zeros.

    Args:
        rows: layers times directions.
        sizes: the size of each state.
        device, dtype: of the parameters.

    Example:
        >>> state = LengthState(rows=1, sizes=(4,))
        >>> state(Ragged([torch.randn(5, 3), torch.randn(2, 3)])).shape
        torch.Size([1, 2, 4])
    """

    def __init__(self, rows: int, sizes: tuple[int, ...], device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.slope = nn.Parameter(torch.zeros(rows, 1, sum(sizes), device=device, dtype=dtype))
        self.intercept = nn.Parameter(torch.zeros(rows, 1, sum(sizes), device=device, dtype=dtype))

    def forward(self, batch: Ragged) -> Tensor | tuple[Tensor, ...]:
        """The initial states of a batch.

        Args:
            batch: ``B`` sequences; only their lengths are read.

        Returns:
            ``(rows, B, size)``, a tuple where there are several states.
        """
        scale = batch.lengths.to(self.slope.dtype).log1p().view(1, -1, 1)
        states = (self.intercept + self.slope * scale).split(list(self.sizes), 2)
        return tuple(states) if len(states) > 1 else states[0]

    def extra_repr(self) -> str:
        """The sizes."""
        return f"rows={self.slope.shape[0]}, sizes={self.sizes}"
