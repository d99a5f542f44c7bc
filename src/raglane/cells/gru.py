"""The gated recurrent unit of Cho et al. (2014, arXiv:1406.1078), reset after the product.

The paper resets the state before the product with ``W_hn``; here, as in PyTorch and cuDNN, the product comes
first, so that one product serves all three gates.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, Weights

__all__ = ["GRU"]


class GRU(CellSpec):
    """Three gates, one state; equal to :class:`torch.nn.GRU`::

        r, z = sigmoid(W_rx x + b_rx + W_rh h + b_rh), and alike for z
        n    = tanh(W_nx x + b_nx + r * (W_nh h + b_nh))
        h'   = (1 - z) * n + z * h

    Example:
        >>> cell, weights = GRU(), Weights(torch.zeros(6, 3), torch.zeros(6, 2))
        >>> prepared = cell.prepare(weights, torch.zeros(5, 3), torch.tensor([0, 5]))
        >>> output, (h,) = cell.step(weights, prepared, (torch.ones(5, 2),))
        >>> output[0].tolist()
        [0.5, 0.5]
    """

    name = "gru"
    gates: ClassVar[tuple[str, ...]] = ("r", "z", "n")
    states: ClassVar[tuple[str, ...]] = ("h",)

    def prepare(self, weights: Weights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """The input products and the input's bias: ``(N, D)`` to ``(N, 3 * H)``."""
        # The hidden bias stays with the step: the candidate's part of it is scaled by the reset gate.
        return F.linear(values, weights.input, weights.input_bias)

    def step(self, weights: Weights, prepared: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step: ``(R, 3 * H)`` and ``((R, H),)`` to the output ``(R, H)``, which is the new state."""
        (h,) = state
        hidden = F.linear(h, weights.hidden, weights.hidden_bias)
        r_input, z_input, n_input = prepared.chunk(3, 1)
        r_hidden, z_hidden, n_hidden = hidden.chunk(3, 1)
        r = torch.sigmoid(r_input + r_hidden)
        z = torch.sigmoid(z_input + z_hidden)
        n = torch.tanh(n_input + r * n_hidden)
        # The same as (1 - z) * n + z * h, with one product less.
        h = n + z * (h - n)
        return h, (h,)
