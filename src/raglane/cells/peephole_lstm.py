"""The LSTM with peepholes of Gers and Schmidhuber, "Recurrent nets that time and count", IJCNN
2000.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, bounded, clipped, masked


class PeepholeWeights(NamedTuple):
    """The weights of one layer in one direction."""

    input: Tensor  # (4 * H, D)
    hidden: Tensor  # (4 * H, H)
    input_bias: Tensor | None  # (4 * H,)
    hidden_bias: Tensor | None  # (4 * H,)
    peephole: Tensor  # (3 * H,), of the gates i, f and o


class PeepholeLSTM(CellSpec):
    """An LSTM whose gates also depend on the memory of their unit::

        i    = sigmoid(W_ix x + b_ix + W_ih h + b_ih + p_i * c)
        f    = sigmoid(W_fx x + b_fx + W_fh h + b_fh + p_f * c)
        g    = tanh(W_gx x + b_gx + W_gh h + b_gh)
        c'   = f * c + i * g
        o    = sigmoid(W_ox x + b_ox + W_oh h + b_oh + p_o * c')
        h'   = o * tanh(c')

    This is the ONNX operator LSTM with its input ``P``. ``clip`` bounds the arguments of the four
    gates, with their peepholes, but not that of ``tanh(c')``.
    """

    gates: ClassVar[tuple[str, ...]] = ("i", "f", "g", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")
    weights_type: ClassVar[Any] = PeepholeWeights

    def __init__(self, clip: float | None = None) -> None:
        self.name = clipped("peephole_lstm", clip)
        self._clip = clip

    def shapes(
        self, input_size: int, hidden_size: int, bias: bool = True, proj_size: int = 0
    ) -> Shapes:
        """See :meth:`CellSpec.shapes`."""
        return {
            **super().shapes(input_size, hidden_size, bias, proj_size),
            "weight_ch": (3 * hidden_size,),
        }

    def step(
        self, weights: PeepholeWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        h, c = state
        i, f, g, o = torch.addmm(prepared, masked(h, mask), weights.hidden.t()).chunk(4, 1)
        peep_i, peep_f, peep_o = weights.peephole.chunk(3)
        i = torch.sigmoid(bounded(i + peep_i * c, self._clip))
        f = torch.sigmoid(bounded(f + peep_f * c, self._clip))
        c = f * c + i * torch.tanh(bounded(g, self._clip))
        h = torch.sigmoid(bounded(o + peep_o * c, self._clip)) * torch.tanh(c)
        return h, (h, c)
