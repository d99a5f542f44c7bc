"""The LSTM with peepholes of Gers and Schmidhuber, "Recurrent nets that time and count", IJCNN 2000."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, bounded, clipped, masked


class PeepholeWeights(NamedTuple):
    """The weights of one layer in one direction.

    Attributes:
        input: ``(4 * H, D)``.
        hidden: ``(4 * H, H)``.
        input_bias: ``(4 * H,)`` or None.
        hidden_bias: ``(4 * H,)`` or None.
        peephole: ``(3 * H,)``, of the gates i, f and o.

    Example:
        >>> PeepholeWeights(torch.zeros(8, 3), torch.zeros(8, 2), None, None, torch.zeros(6)).peephole.shape
        torch.Size([6])
    """

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    peephole: Tensor


class PeepholeLSTM(CellSpec):
    """An LSTM whose gates also see the memory, each unit its own::

        i, f = sigmoid(W_ix x + b_ix + W_ih h + b_ih + p_i * c), and alike for f
        g    = tanh(W_gx x + b_gx + W_gh h + b_gh)
        c'   = f * c + i * g
        o    = sigmoid(W_ox x + b_ox + W_oh h + b_oh + p_o * c')
        h'   = o * tanh(c')

    The output gate sees the new memory. This is the LSTM of the ONNX operator with its input ``P``.

    Args:
        clip: hold the arguments of all four, peepholes included, between ``-clip`` and ``clip``, as that operator can.
            ``tanh(c')`` takes the memory as it is.

    Example:
        >>> weights = PeepholeWeights(torch.zeros(8, 3), torch.zeros(8, 2), None, None, torch.zeros(6))
        >>> output, (h, c) = PeepholeLSTM().step(weights, torch.zeros(1, 8), (torch.zeros(1, 2), torch.ones(1, 2)))
        >>> c.tolist()
        [[0.5, 0.5]]
    """

    gates: ClassVar[tuple[str, ...]] = ("i", "f", "g", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")
    weights_type: ClassVar[Any] = PeepholeWeights

    def __init__(self, clip: float | None = None) -> None:
        self.name = clipped("peephole_lstm", clip)
        self._clip = clip

    def shapes(self, input_size: int, hidden_size: int, bias: bool = True, proj_size: int = 0) -> Shapes:
        """See :meth:`CellSpec.shapes`."""
        return {**super().shapes(input_size, hidden_size, bias, proj_size), "weight_ch": (3 * hidden_size,)}

    def step(self, weights: PeepholeWeights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """One step: ``(R, 4 * H)`` and ``((R, H), (R, H))`` to the output ``(R, H)`` and the new states."""
        h, c = state
        i, f, g, o = torch.addmm(prepared, masked(h, mask), weights.hidden.t()).chunk(4, 1)
        peep_i, peep_f, peep_o = weights.peephole.chunk(3)
        i = torch.sigmoid(bounded(i + peep_i * c, self._clip))
        f = torch.sigmoid(bounded(f + peep_f * c, self._clip))
        c = f * c + i * torch.tanh(bounded(g, self._clip))
        h = torch.sigmoid(bounded(o + peep_o * c, self._clip)) * torch.tanh(c)
        return h, (h, c)
