"""The gated recurrent unit of Cho et al. (2014, arXiv:1406.1078), reset before or after the product.

The paper resets the state before the product with ``W_hn``; in PyTorch and cuDNN the product comes first, so that
one product serves all three gates.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped, Weights, bounded, clipped, masked


class GRU(CellSpec):
    """Three gates, one state; equal to :class:`torch.nn.GRU`::

        r, z = sigmoid(W_rx x + b_rx + W_rh h + b_rh), and alike for z
        n    = tanh(W_nx x + b_nx + r * (W_nh h + b_nh))
        h'   = (1 - z) * n + z * h

    With the reset before the product, as in the paper, ``n = tanh(W_nx x + b_nx + W_nh (r * h) + b_nh)``.

    Args:
        reset_after: reset after the product (Keras' ``reset_after``, ``linear_before_reset`` of the ONNX operator GRU).
        clip: hold the arguments of ``r``, ``z`` and ``n``, each the whole sum, between ``-clip`` and ``clip``, as that
            operator can.

    Example:
        >>> cell, weights = GRU(), Weights(torch.zeros(6, 3), torch.zeros(6, 2))
        >>> prepared = cell.prepare(weights, torch.zeros(5, 3), torch.tensor([0, 5]))
        >>> output, (h,) = cell.step(weights, prepared, (torch.ones(5, 2),))
        >>> output[0].tolist()
        [0.5, 0.5]
    """

    gates: ClassVar[tuple[str, ...]] = ("r", "z", "n")

    def __init__(self, reset_after: bool = True, clip: float | None = None) -> None:
        self.name = clipped("gru" if reset_after else "gru_reset_before", clip)
        self._reset_after = reset_after
        self._clip = clip

    def prepare(self, weights: Weights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """The input products and the input's bias: ``(N, D)`` to ``(N, 3 * H)``."""
        # The hidden bias stays with the step: the candidate's part of it is scaled by the reset gate.
        return F.linear(values, weights.input, weights.input_bias)

    def step(self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """One step: ``(R, 3 * H)`` and ``((R, H),)`` to the output ``(R, H)``, which is the new state."""
        (h,) = state
        read = masked(h, mask)
        x_r, x_z, x_n = prepared.chunk(3, 1)
        if self._reset_after:
            h_r, h_z, h_n = F.linear(read, weights.hidden, weights.hidden_bias).chunk(3, 1)
            r = torch.sigmoid(bounded(x_r + h_r, self._clip))
            candidate = x_n + r * h_n
        else:
            rows = [2 * h.shape[1], h.shape[1]]
            to_gates, to_candidate = weights.hidden.split(rows)
            biases = (None, None) if weights.hidden_bias is None else weights.hidden_bias.split(rows)
            h_r, h_z = F.linear(read, to_gates, biases[0]).chunk(2, 1)
            r = torch.sigmoid(bounded(x_r + h_r, self._clip))
            candidate = x_n + F.linear(r * read, to_candidate, biases[1])
        z = torch.sigmoid(bounded(x_z + h_z, self._clip))
        n = torch.tanh(bounded(candidate, self._clip))
        # The same as (1 - z) * n + z * h, with one product less.
        h = n + z * (h - n)
        return h, (h,)
