"""The gated recurrent unit of Cho et al. (2014, arXiv:1406.1078), with the reset before or after
the product.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped, Weights, bounded, clipped, masked


class GRU(CellSpec):
    """The cell of :class:`torch.nn.GRU`::

        r, z = sigmoid(W_rx x + b_rx + W_rh h + b_rh), and alike for z
        n    = tanh(W_nx x + b_nx + r * (W_nh h + b_nh))
        h'   = (1 - z) * n + z * h

    With ``reset_after=False``, as in the paper, ``n = tanh(W_nx x + b_nx + W_nh (r * h) + b_nh)``.
    The reset after the product, as in PyTorch and cuDNN, needs only one product for all gates.
    ``clip`` bounds the arguments of the gates, as in the ONNX operator GRU.
    """

    gates: ClassVar[tuple[str, ...]] = ("r", "z", "n")

    def __init__(self, reset_after: bool = True, clip: float | None = None) -> None:
        self.name = clipped("gru" if reset_after else "gru_reset_before", clip)
        self._reset_after = reset_after
        self._clip = clip

    def prepare(self, weights: Weights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input products with the input bias, ``(N, 3 * H)``."""
        # Without the hidden bias, because the reset gate scales the candidate's part of it.
        return F.linear(values, weights.input, weights.input_bias)

    def step(
        self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
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
            biases = (
                (None, None) if weights.hidden_bias is None else weights.hidden_bias.split(rows)
            )
            h_r, h_z = F.linear(read, to_gates, biases[0]).chunk(2, 1)
            r = torch.sigmoid(bounded(x_r + h_r, self._clip))
            candidate = x_n + F.linear(r * read, to_candidate, biases[1])
        z = torch.sigmoid(bounded(x_z + h_z, self._clip))
        n = torch.tanh(bounded(candidate, self._clip))
        # Equal to (1 - z) * n + z * h, with one product less.
        h = n + z * (h - n)
        return h, (h,)
