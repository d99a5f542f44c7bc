"""The simple recurrent unit of Lei et al. (2018, arXiv:1709.02755)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights, seen
from raglane.cells.spec import Shapes, States, Stepped


class SRU(ElementwiseSpec):
    """A gated memory, and a second gate that mixes it with the input (equations 1 to 4 of the
    paper)::

        n  = W_n x
        f  = sigmoid(W_f x + v_f * c + b_f)
        r  = sigmoid(W_r x + v_r * c + b_r)
        c' = f * c + (1 - f) * n
        h' = r * c' + (1 - r) * x           with W_s x for x where the sizes differ

    No gate reads the state ``h``, which is the output.
    """

    name = "sru"
    gates: ClassVar[tuple[str, ...]] = ("n", "f", "r")
    states: ClassVar[tuple[str, ...]] = ("h", "c")
    recurrent_gates: ClassVar[int] = 2
    skips: ClassVar[bool] = True

    def shapes(
        self, input_size: int, hidden_size: int, bias: bool = True, proj_size: int = 0
    ) -> Shapes:
        """See :meth:`CellSpec.shapes`; ``n`` has no bias."""
        shapes = super().shapes(input_size, hidden_size, bias, proj_size)
        return {**shapes, "bias_ih": (2 * hidden_size,) if bias else None}

    def block(self, parameter: str, gate: str, hidden_size: int) -> slice:
        """See :meth:`CellSpec.block`; ``n`` has no bias."""
        rows = super().block(parameter, gate, hidden_size)
        return (
            slice(rows.start - hidden_size, rows.stop - hidden_size)
            if parameter == "bias_ih"
            else rows
        )

    def prepare(self, weights: ElementwiseWeights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input products, and the input that bypasses the memory, ``(N, 4 * H)``."""
        bias = (
            None if weights.bias is None else F.pad(weights.bias, (weights.bias.shape[0] // 2, 0))
        )
        skip = values if weights.skip is None else F.linear(values, weights.skip)
        return torch.cat([F.linear(values, weights.input, bias), skip], 1)

    def step(
        self,
        weights: ElementwiseWeights,
        prepared: Tensor,
        state: States,
        mask: Tensor | None = None,
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        _, c = state
        n, f, r, skip = prepared.chunk(4, 1)
        f_seen, r_seen = seen(weights, c, mask).chunk(2, 1)
        f = torch.sigmoid(f + f_seen)
        r = torch.sigmoid(r + r_seen)
        c = n + f * (c - n)
        h = skip + r * (c - skip)
        return h, (h, c)
