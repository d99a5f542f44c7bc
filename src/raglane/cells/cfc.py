"""The closed-form continuous-time cell of Hasani et al. (Nature Machine Intelligence 4, 2022;
arXiv:2106.13898).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, masked
from raglane.errors import ArgumentError


class CfCWeights(NamedTuple):
    """The weights of one layer in one direction; ``U`` is the number of units of the backbone."""

    input: Tensor  # (U, D), or (U, D - 1) if one column of the input is the time gap
    hidden: Tensor  # (U, H)
    bias: Tensor | None  # (U,)
    heads: Tensor  # (4 * H, U), of f, g, a and b
    head_bias: Tensor | None = None  # (4 * H,)


class CfC(CellSpec):
    """A state that moves from one value to another with elapsed time (equation 2 of the paper)::

        u    = 1.7159 * tanh(0.666 * (W_x x + b_x + W_h h))         the backbone
        f, g = tanh(W_f u + b_f), and alike for g
        s    = sigmoid((W_a u + b_a) * t + W_b u + b_b)
        h'   = (1 - s) * f + s * g

    ``t`` is the time since the previous element, in column ``gap_column`` of the input, which is
    not a feature. It is 1 without such a column, and in layers above the first. ``backbone_units``
    is ``U``, by default ``H``.
    """

    gates: ClassVar[tuple[str, ...]] = ("u",)
    weights_type: ClassVar[Any] = CfCWeights

    def __init__(self, backbone_units: int | None = None, gap_column: int | None = None) -> None:
        of_units = "" if backbone_units is None else f" of {backbone_units} units"
        self.name = f"cfc{of_units}" + (
            "" if gap_column is None else f" with times in column {gap_column}"
        )
        self.backbone_units = backbone_units
        self.gap_column = gap_column
        self._above = self if gap_column is None else CfC(backbone_units)

    def above(self) -> CellSpec:
        """See :meth:`CellSpec.above`."""
        return self._above

    def shapes(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        proj_size: int = 0,  # noqa: ARG002
    ) -> Shapes:
        """See :meth:`CellSpec.shapes`; raises ArgumentError if the input lacks the gap column, or
        has only that.
        """
        if self.gap_column is not None and not 0 <= self.gap_column < input_size > 1:
            rule = f"one of the input's {input_size} columns, and not the only one"
            raise ArgumentError(
                "gap_column", str(self.gap_column), rule, "pass the index of a column, from 0"
            )
        units = self.backbone_units or hidden_size
        return {
            "weight_ih": (units, input_size - (self.gap_column is not None)),
            "weight_hh": (units, hidden_size),
            "bias_ih": (units,) if bias else None,
            "weight_heads": (4 * hidden_size, units),
            "bias_heads": (4 * hidden_size,) if bias else None,
        }

    def block(self, parameter: str, gate: str, hidden_size: int) -> slice:  # noqa: ARG002
        """See :meth:`CellSpec.block`; only the backbone reads the input."""
        return slice(0, self.backbone_units or hidden_size)

    def prepare(self, weights: CfCWeights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input products with their bias, ``(N, U)``, and one more column for time
        gaps.
        """
        column = self.gap_column
        if column is None or values.shape[1] == weights.input.shape[1]:
            return F.linear(values, weights.input, weights.bias)
        features = torch.cat([values[:, :column], values[:, column + 1 :]], 1)
        return torch.cat(
            [F.linear(features, weights.input, weights.bias), values[:, column : column + 1]], 1
        )

    def step(
        self, weights: CfCWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`; ``prepared`` is ``(R, U)`` or ``(R, U + 1)``."""
        (h,) = state
        units = weights.hidden.shape[0]
        arguments = prepared[:, :units] + F.linear(masked(h, mask), weights.hidden)
        backbone = 1.7159 * torch.tanh(0.666 * arguments)
        f, g, a, b = F.linear(backbone, weights.heads, weights.head_bias).chunk(4, 1)
        if prepared.shape[1] > units:
            a = a * prepared[:, units:]
        f = f.tanh()
        g = g.tanh()
        s = torch.sigmoid(a + b)
        h = f + s * (g - f)
        return h, (h,)
