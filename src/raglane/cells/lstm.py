"""Long short-term memory.

Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9 (1997), with the forget gate of
Gers, Schmidhuber and Cummins, "Learning to forget", Neural Computation 12 (2000), without peepholes, and with the
projection of Sak, Senior and Beaufays (2014, arXiv:1402.1128) where asked for.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, Weights, bounded, clipped, masked


class LSTM(CellSpec):
    """Four gates, two states; equal to :class:`torch.nn.LSTM`::

        i, f, o = sigmoid(W_ix x + b_ix + W_ih h + b_ih), and alike for f and o
        g       = tanh(W_gx x + b_gx + W_gh h + b_gh)
        c'      = f * c + i * g
        h'      = o * tanh(c')              or, with a projection, W_hr (o * tanh(c'))

    Args:
        clip: hold the arguments of all four between ``-clip`` and ``clip``, as the ONNX operator LSTM can. ``tanh(c')``
            takes the memory as it is.

    Example:
        >>> cell, weights = LSTM(), Weights(torch.zeros(8, 3), torch.zeros(8, 2))
        >>> prepared = cell.prepare(weights, torch.zeros(5, 3), torch.tensor([0, 5]))
        >>> output, (h, c) = cell.step(weights, prepared, (torch.zeros(5, 2), torch.ones(5, 2)))
        >>> output.shape, c[0].tolist()
        (torch.Size([5, 2]), [0.5, 0.5])
    """

    gates: ClassVar[tuple[str, ...]] = ("i", "f", "g", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")

    def __init__(self, clip: float | None = None) -> None:
        self.name = clipped("lstm", clip)
        self._clip = clip

    def shapes(self, input_size: int, hidden_size: int, bias: bool = True, proj_size: int = 0) -> Shapes:
        """See :meth:`CellSpec.shapes`; a projection has one weight more, and the gates read what it gives."""
        shapes = super().shapes(input_size, hidden_size, bias)
        if proj_size:
            shapes |= {"weight_hh": (4 * hidden_size, proj_size), "weight_hr": (proj_size, hidden_size)}
        return shapes

    def state_sizes(self, hidden_size: int, proj_size: int = 0) -> tuple[int, ...]:
        """``(P, H)``: ``h`` has the projection's size where there is one, ``c`` always the hidden size."""
        return (proj_size or hidden_size, hidden_size)

    def step(self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """One step: ``(R, 4 * H)`` and ``((R, P), (R, H))`` to the output ``(R, P)`` and the new states."""
        h, c = state
        gates = bounded(torch.addmm(prepared, masked(h, mask), weights.hidden.t()), self._clip)
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        if weights.projection is not None:
            h = F.linear(h, weights.projection)
        return h, (h, c)
