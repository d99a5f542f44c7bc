"""The minimal LSTM of Feng et al., "Were RNNs all we needed?" (2024, arXiv:2410.01201)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights
from raglane.cells.spec import States, Stepped


class MinLSTM(ElementwiseSpec):
    """An LSTM whose gates and candidate depend only on the input, with gates that sum to one::

        f, i = sigmoid(W_f x + b_f), and alike for i
        n    = W_n x + b_n
        h'   = (f * h + i * n) / (f + i)

    This is the paper's first form, with normalised gates.
    """

    name = "minlstm"
    gates: ClassVar[tuple[str, ...]] = ("f", "i", "n")

    def step(
        self,
        weights: ElementwiseWeights,  # noqa: ARG002
        prepared: Tensor,
        state: States,
        mask: Tensor | None = None,  # noqa: ARG002
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        (h,) = state
        f, i, n = prepared.chunk(3, 1)
        # f / (f + i) from logarithms, because both gates may underflow, and 0 / 0 is NaN. (torch's
        # softplus, which is linear beyond 20, would cause an error of 2e-9 for gates that are
        # nearly closed.)
        keep = torch.sigmoid(F.logsigmoid(f) - F.logsigmoid(i))
        h = n + keep * (h - n)
        return h, (h,)
