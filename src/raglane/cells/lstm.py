"""Long short-term memory: Hochreiter and Schmidhuber, Neural Computation 9 (1997).

The forget gate is that of Gers, Schmidhuber and Cummins, Neural Computation 12 (2000), and the
projection that of Sak, Senior and Beaufays (2014, arXiv:1402.1128).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, Weights, bounded, clipped, masked


class LSTM(CellSpec):
    """The cell of :class:`torch.nn.LSTM`::

        i, f, o = sigmoid(W_ix x + b_ix + W_ih h + b_ih), and alike for f and o
        g       = tanh(W_gx x + b_gx + W_gh h + b_gh)
        c'      = f * c + i * g
        h'      = o * tanh(c')              or, with a projection, W_hr (o * tanh(c'))

    ``clip`` bounds the arguments of the four gates, but not that of ``tanh(c')``, as in the ONNX
    operator LSTM.
    """

    gates: ClassVar[tuple[str, ...]] = ("i", "f", "g", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")

    def __init__(self, clip: float | None = None) -> None:
        self.name = clipped("lstm", clip)
        self._clip = clip

    def shapes(
        self, input_size: int, hidden_size: int, bias: bool = True, proj_size: int = 0
    ) -> Shapes:
        """See :meth:`CellSpec.shapes`; with a projection, the gates read the projected state."""
        shapes = super().shapes(input_size, hidden_size, bias)
        if proj_size:
            shapes |= {
                "weight_hh": (4 * hidden_size, proj_size),
                "weight_hr": (proj_size, hidden_size),
            }
        return shapes

    def state_sizes(self, hidden_size: int, proj_size: int = 0) -> tuple[int, ...]:
        """See :meth:`CellSpec.state_sizes`; with a projection, ``h`` has its size."""
        return (proj_size or hidden_size, hidden_size)

    def step(
        self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        h, c = state
        gates = bounded(torch.addmm(prepared, masked(h, mask), weights.hidden.t()), self._clip)
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        if weights.projection is not None:
            h = F.linear(h, weights.projection)
        return h, (h, c)
