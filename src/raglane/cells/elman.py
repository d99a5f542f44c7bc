"""The simple recurrent network of Elman, "Finding structure in time", Cognitive Science 14
(1990).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped, Weights, bounded, clipped, masked


class Elman(CellSpec):
    """The cell of :class:`torch.nn.RNN`::

        h' = activation(W_ih x + b_ih + W_hh h + b_hh)

    ``clip`` bounds the argument of the activation, as in the ONNX operator RNN.
    """

    gates: ClassVar[tuple[str, ...]] = ("h",)

    def __init__(self, nonlinearity: Literal["tanh", "relu"], clip: float | None = None) -> None:
        self.name = clipped(f"rnn_{nonlinearity}", clip)
        self._clip = clip
        self._activation = torch.tanh if nonlinearity == "tanh" else torch.relu

    def step(
        self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        (h,) = state
        h = self._activation(
            bounded(torch.addmm(prepared, masked(h, mask), weights.hidden.t()), self._clip)
        )
        return h, (h,)
