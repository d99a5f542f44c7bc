"""The sLSTM of Beck et al., "xLSTM: Extended Long Short-Term Memory" (2024, arXiv:2405.04517),
section 2.2.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, masked
from raglane.errors import ArgumentError


class SLSTMWeights(NamedTuple):
    """The weights of one layer in one direction; ``K`` is the number of heads."""

    input: Tensor | None  # (4 * H, D); None if the input holds the sums of the gates
    hidden: Tensor  # (4 * H, H / K): a row reads only the units of its head
    bias: Tensor | None = None  # (4 * H,)


class SLSTM(CellSpec):
    """An LSTM with exponential gates and a normalised memory (equations 8 to 17 of the paper)::

        i, f, z, o = W x + b + R h, where R is block-diagonal: a block for each head and gate
        m' = max(log sigmoid(f) + m, i)         at the beginning of a sequence, m' = i
        c' = exp(log sigmoid(f) + m - m') * c + exp(i - m') * tanh(z)
        n' = exp(log sigmoid(f) + m - m') * n + exp(i - m')
        h' = sigmoid(o) * c' / n'

    The state ``m`` keeps the exponentials within range and cancels in the output. A sequence begins
    where ``n`` is 0; afterwards ``n`` is at least 1. Of the two forget gates in the paper, this is
    the sigmoid. Without ``input_weights`` the input is ``W x``, ``(N, 4 * H)``, gate after gate.
    """

    gates: ClassVar[tuple[str, ...]] = ("i", "f", "z", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c", "n", "m")
    weights_type: ClassVar[Any] = SLSTMWeights

    def __init__(self, num_heads: int = 1, input_weights: bool = True) -> None:
        self.name = "slstm" if num_heads == 1 else f"slstm of {num_heads} heads"
        if not input_weights:
            self.name += " without input weights"
        self.num_heads = num_heads
        self.input_weights = input_weights
        self._above = self if input_weights else SLSTM(num_heads)

    def shapes(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        proj_size: int = 0,  # noqa: ARG002
    ) -> Shapes:
        """See :meth:`CellSpec.shapes`; raises ArgumentError if ``num_heads`` does not divide the number
        of units.
        """
        if hidden_size % self.num_heads:
            rule = f"a divisor of the number of units, {hidden_size}"
            raise ArgumentError(
                "num_heads", str(self.num_heads), rule, "choose another number of heads or units"
            )
        rows = 4 * hidden_size
        if not self.input_weights and input_size != rows:
            rule = f"4 * hidden_size = {rows}, the number of gates, without input_weights"
            raise ArgumentError("input_size", str(input_size), rule, f"pass {rows}")
        return {
            "weight_ih": (rows, input_size) if self.input_weights else None,
            "weight_hh": (rows, hidden_size // self.num_heads),
            "bias_ih": (rows,) if bias else None,
        }

    def above(self) -> CellSpec:
        """See :meth:`CellSpec.above`."""
        return self._above

    def initialise(self, parameter: str, tensor: Tensor, hidden_size: int) -> None:
        """See :meth:`CellSpec.initialise`; biases are 0, and from 3 to 6 for the forget gates of
        each head.
        """
        if parameter != "bias_ih":
            super().initialise(parameter, tensor, hidden_size)
            return
        with torch.no_grad():
            tensor.zero_()
            spread = torch.linspace(
                3.0, 6.0, hidden_size // self.num_heads, dtype=tensor.dtype, device=tensor.device
            )
            tensor[self.block(parameter, "f", hidden_size)] = spread.repeat(self.num_heads)

    def prepare(self, weights: SLSTMWeights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input products with their bias, ``(N, 4 * H)``."""
        if weights.input is not None:
            return F.linear(values, weights.input, weights.bias)
        return values if weights.bias is None else values + weights.bias

    def step(
        self, weights: SLSTMWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        h, c, n, m = state
        i, f, z, o = (prepared + self._recurrent(weights.hidden, masked(h, mask))).chunk(4, 1)
        decayed = F.logsigmoid(f) + m
        m = torch.where(n == 0, i, torch.maximum(decayed, i))
        # At the beginning of a sequence m may be much smaller.
        keep = torch.exp((decayed - m).clamp(max=0.0))
        take = torch.exp(i - m)
        c = keep * c + take * z.tanh()
        n = keep * n + take
        h = o.sigmoid() * (c / n)
        return h, (h, c, n, m)

    def _recurrent(self, hidden: Tensor, h: Tensor) -> Tensor:
        """Return the products with the state, ``(R, 4 * H)``, head by head."""
        if self.num_heads == 1:
            return h @ hidden.t()
        size = hidden.shape[1]
        # (heads, size of a head, 4 * size): one product for each head.
        blocks = (
            hidden.view(4, self.num_heads, size, size)
            .permute(1, 3, 0, 2)
            .reshape(self.num_heads, size, 4 * size)
        )
        rows = h.shape[0]
        products = torch.bmm(h.reshape(rows, self.num_heads, size).transpose(0, 1), blocks)
        return (
            products.view(self.num_heads, rows, 4, size)
            .permute(1, 2, 0, 3)
            .reshape(rows, hidden.shape[0])
        )
