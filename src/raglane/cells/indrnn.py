"""The independently recurrent network of Li et al. (2018, arXiv:1803.04831)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights, seen
from raglane.cells.spec import States, Stepped


class IndRNN(ElementwiseSpec):
    """Units with one recurrent weight each::

        h' = activation(W x + b + u * h)

    The recurrence of a unit does not depend on other units.
    """

    gates: ClassVar[tuple[str, ...]] = ("h",)
    recurrent_gates: ClassVar[int] = 1

    def __init__(self, nonlinearity: Literal["relu", "tanh"]) -> None:
        self.name = f"indrnn_{nonlinearity}"
        self._activation = torch.tanh if nonlinearity == "tanh" else torch.relu

    def initialise(self, parameter: str, tensor: Tensor, hidden_size: int) -> None:
        """See :meth:`CellSpec.initialise`; recurrent weights are from 0 to 1, so that states remain
        bounded.
        """
        if parameter == "weight_hh":
            nn.init.uniform_(tensor, 0.0, 1.0)
        else:
            super().initialise(parameter, tensor, hidden_size)

    def step(
        self,
        weights: ElementwiseWeights,
        prepared: Tensor,
        state: States,
        mask: Tensor | None = None,
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        (h,) = state
        h = self._activation(prepared + seen(weights, h, mask))
        return h, (h,)
