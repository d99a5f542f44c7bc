"""The minimal gated recurrent unit of Feng et al., "Were RNNs all we needed?" (2024,
arXiv:2410.01201).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights
from raglane.cells.spec import States, Stepped


class MinGRU(ElementwiseSpec):
    """A GRU whose gate and candidate depend only on the input::

        z  = sigmoid(W_z x + b_z)
        n  = W_n x + b_n
        h' = (1 - z) * h + z * n

    This is the paper's first form. Its second form, for parallel scans, has logarithms and an
    activation of ``n``.
    """

    name = "mingru"
    gates: ClassVar[tuple[str, ...]] = ("z", "n")

    def step(
        self,
        weights: ElementwiseWeights,  # noqa: ARG002
        prepared: Tensor,
        state: States,
        mask: Tensor | None = None,  # noqa: ARG002
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        (h,) = state
        z, n = prepared.chunk(2, 1)
        h = h + torch.sigmoid(z) * (n - h)
        return h, (h,)
