"""The base of the element-wise cells: no matrix multiplies the state, so a unit depends only on its
own past.

All products are input products, computed for all elements at once. The time loop has only a few
operations per unit.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, Shapes, masked


class ElementwiseWeights(NamedTuple):
    """The weights of one layer in one direction; ``V`` is the number of gates that read the
    state.
    """

    input: Tensor  # (G * H, D)
    recurrent: Tensor | None = None  # (V * H,), the factors of the state
    bias: Tensor | None = None  # (G * H,)
    skip: Tensor | None = None  # (H, D), projects an input of another size to that of the output


def seen(weights: ElementwiseWeights, state: Tensor, mask: Tensor | None) -> Tensor:
    """Return the state times its factors, for the gates that read it: ``(R, H)`` to ``(R, V *
    H)``.
    """
    recurrent = cast(Tensor, weights.recurrent)
    read = masked(state, mask)
    return recurrent * read.repeat(1, recurrent.shape[0] // read.shape[1])


class ElementwiseSpec(CellSpec):
    """A cell whose recurrence is element-wise.

    Its weights are ``input (G * H, D)``; ``recurrent (V * H,)``, the factors of the state; ``bias
    (G * H,)``; and ``skip (H, D)``, a projection of the input. All but the first may be None.

    Attributes:
        recurrent_gates: ``V``, the number of gates that read the state.
        skips: True if the output contains the input itself, projected if it has another size.

    Example:
        >>> from raglane.cells import CELLS
        >>> CELLS["sru"].shapes(3, 4)["weight_skip"], CELLS["sru"].shapes(4, 4)["weight_skip"]
        ((4, 3), None)
    """

    weights_type: ClassVar[Any] = ElementwiseWeights
    recurrent_gates: ClassVar[int] = 0
    skips: ClassVar[bool] = False

    @property
    def reads_state(self) -> bool:  # type: ignore[override]
        """True if a gate reads the state."""
        return self.recurrent_gates > 0

    def shapes(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        proj_size: int = 0,  # noqa: ARG002
    ) -> Shapes:
        """See :meth:`CellSpec.shapes`."""
        rows = len(self.gates) * hidden_size
        return {
            "weight_ih": (rows, input_size),
            "weight_hh": (self.recurrent_gates * hidden_size,) if self.recurrent_gates else None,
            "bias_ih": (rows,) if bias else None,
            "weight_skip": (hidden_size, input_size)
            if self.skips and input_size != hidden_size
            else None,
        }

    def prepare(self, weights: ElementwiseWeights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input products with their bias, ``(N, G * H)``."""
        return F.linear(values, weights.input, weights.bias)
