"""The simple recurrent network of Elman, "Finding structure in time", Cognitive Science 14 (1990)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped, Weights, bounded, clipped, masked


class Elman(CellSpec):
    """One matrix product, one activation; equal to :class:`torch.nn.RNN`::

        h' = activation(W_ih x + b_ih + W_hh h + b_hh)

    Args:
        nonlinearity: ``"tanh"`` or ``"relu"``; the cell's name is ``rnn_tanh`` or ``rnn_relu``.
        clip: hold the activation's argument between ``-clip`` and ``clip``, as the ONNX operator RNN can.

    Example:
        >>> cell, weights = Elman("tanh"), Weights(torch.eye(2), torch.zeros(2, 2))
        >>> prepared = cell.prepare(weights, torch.zeros(3, 2), torch.tensor([0, 1, 3]))
        >>> output, (h,) = cell.step(weights, prepared, (torch.ones(3, 2),))
        >>> output.shape, h is output
        (torch.Size([3, 2]), True)
    """

    gates: ClassVar[tuple[str, ...]] = ("h",)

    def __init__(self, nonlinearity: Literal["tanh", "relu"], clip: float | None = None) -> None:
        self.name = clipped(f"rnn_{nonlinearity}", clip)
        self._clip = clip
        self._activation = torch.tanh if nonlinearity == "tanh" else torch.relu

    def step(self, weights: Weights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """One step: ``(R, H)`` and ``((R, H),)`` to the output ``(R, H)``, which is the new state."""
        (h,) = state
        h = self._activation(bounded(torch.addmm(prepared, masked(h, mask), weights.hidden.t()), self._clip))
        return h, (h,)
