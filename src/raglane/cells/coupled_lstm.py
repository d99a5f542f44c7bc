"""The LSTM with coupled gates, "CIFG" in Greff et al., "LSTM: a search space odyssey" (2015,
arXiv:1503.04069).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped, Weights, bounded, clipped, masked


class CoupledLSTM(CellSpec):
    """An LSTM whose input gate is one minus the forget gate::

        f, o = sigmoid(W_fx x + b_fx + W_fh h + b_fh), and alike for o
        g    = tanh(W_gx x + b_gx + W_gh h + b_gh)
        c'   = f * c + (1 - f) * g
        h'   = o * tanh(c')

    ``clip`` bounds the arguments of ``f``, ``g`` and ``o``, as in the ONNX operator LSTM with
    ``input_forget``.
    """

    gates: ClassVar[tuple[str, ...]] = ("f", "g", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")

    def __init__(self, clip: float | None = None) -> None:
        self.name = clipped("coupled_lstm", clip)
        self._clip = clip

    def step(
        self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        h, c = state
        gates = bounded(torch.addmm(prepared, masked(h, mask), weights.hidden.t()), self._clip)
        f, g, o = gates.chunk(3, 1)
        g = g.tanh()
        c = g + f.sigmoid() * (c - g)
        h = o.sigmoid() * c.tanh()
        return h, (h, c)
