"""The minimal LSTM of Feng et al., "Were RNNs all we needed?" (2024, arXiv:2410.01201)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights
from raglane.cells.spec import States, Stepped


class MinLSTM(ElementwiseSpec):
    """An LSTM whose gates and candidate look at the input alone, and whose gates sum to one::

        f, i = sigmoid(W_f x + b_f), and alike for i
        n    = W_n x + b_n
        h'   = (f * h + i * n) / (f + i)

    This is the paper's first form, with normalised gates; see :mod:`raglane.cells.mingru` for the second.

    Example:
        >>> cell, weights = MinLSTM(), ElementwiseWeights(torch.zeros(6, 3))
        >>> output, (h,) = cell.step(weights, torch.zeros(1, 6), (torch.ones(1, 2),))
        >>> output.tolist()
        [[0.5, 0.5]]
    """

    name = "minlstm"
    gates: ClassVar[tuple[str, ...]] = ("f", "i", "n")

    def step(self, weights: ElementwiseWeights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:  # noqa: ARG002
        """One step: ``(R, 3 * H)`` and ``((R, H),)`` to the output ``(R, H)``, which is the new state."""
        (h,) = state
        f, i, n = prepared.chunk(3, 1)
        # f / (f + i) by way of logarithms: where both gates close, they underflow together and leave 0 / 0.
        # (By torch's softplus it would be off by 2e-9 where they are nearly closed: that is a straight line beyond 20.)
        keep = torch.sigmoid(F.logsigmoid(f) - F.logsigmoid(i))
        h = n + keep * (h - n)
        return h, (h,)
