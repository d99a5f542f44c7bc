"""The independently recurrent network of Li et al. (2018, arXiv:1803.04831)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights, seen
from raglane.cells.spec import States, Stepped


class IndRNN(ElementwiseSpec):
    """Each unit remembers itself alone, by one weight::

        h' = activation(W x + b + u * h)

    Args:
        nonlinearity: ``"relu"`` or ``"tanh"``; the cell's name is ``indrnn_relu`` or ``indrnn_tanh``.

    Example:
        >>> cell, weights = IndRNN("relu"), ElementwiseWeights(torch.eye(2), torch.tensor([1.0, -1.0]))
        >>> output, (h,) = cell.step(weights, torch.zeros(3, 2), (torch.ones(3, 2),))
        >>> output[0].tolist()
        [1.0, 0.0]
    """

    gates: ClassVar[tuple[str, ...]] = ("h",)
    recurrent_gates: ClassVar[int] = 1

    def __init__(self, nonlinearity: Literal["relu", "tanh"]) -> None:
        self.name = f"indrnn_{nonlinearity}"
        self._activation = torch.tanh if nonlinearity == "tanh" else torch.relu

    def initialise(self, parameter: str, tensor: Tensor, hidden_size: int) -> None:
        """See :meth:`CellSpec.initialise`; the recurrent weights from 0 to 1, where units remember and stay bounded."""
        if parameter == "weight_hh":
            nn.init.uniform_(tensor, 0.0, 1.0)
        else:
            super().initialise(parameter, tensor, hidden_size)

    def step(self, weights: ElementwiseWeights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """One step: ``(R, H)`` and ``((R, H),)`` to the output ``(R, H)``, which is the new state."""
        (h,) = state
        h = self._activation(prepared + seen(weights, h, mask))
        return h, (h,)
