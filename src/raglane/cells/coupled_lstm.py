"""The LSTM with coupled gates, "CIFG" in Greff et al., "LSTM: a search space odyssey" (2015, arXiv:1503.04069)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped, Weights, bounded, clipped, masked


class CoupledLSTM(CellSpec):
    """An LSTM that forgets as much as it takes up; three gates in place of four::

        f, o = sigmoid(W_fx x + b_fx + W_fh h + b_fh), and alike for o
        g    = tanh(W_gx x + b_gx + W_gh h + b_gh)
        c'   = f * c + (1 - f) * g
        h'   = o * tanh(c')

    Args:
        clip: hold the arguments of ``f``, ``g`` and ``o`` between ``-clip`` and ``clip``, as the ONNX operator LSTM can
            with ``input_forget``, whose input gate is ``1 - f`` here. ``tanh(c')`` takes the memory as it is.

    Example:
        >>> cell, weights = CoupledLSTM(), Weights(torch.zeros(6, 3), torch.zeros(6, 2))
        >>> output, (h, c) = cell.step(weights, torch.zeros(1, 6), (torch.zeros(1, 2), torch.ones(1, 2)))
        >>> c.tolist()
        [[0.5, 0.5]]
    """

    gates: ClassVar[tuple[str, ...]] = ("f", "g", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")

    def __init__(self, clip: float | None = None) -> None:
        self.name = clipped("coupled_lstm", clip)
        self._clip = clip

    def step(self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """One step: ``(R, 3 * H)`` and ``((R, H), (R, H))`` to the output ``(R, H)`` and the new states."""
        h, c = state
        gates = bounded(torch.addmm(prepared, masked(h, mask), weights.hidden.t()), self._clip)
        f, g, o = gates.chunk(3, 1)
        g = g.tanh()
        c = g + f.sigmoid() * (c - g)
        h = o.sigmoid() * c.tanh()
        return h, (h, c)
