"""The GRU with decay for missing values: Che et al. (Scientific Reports 8, 2018;
arXiv:1606.01865).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, masked
from raglane.errors import ArgumentError


class GRUDWeights(NamedTuple):
    """The weights of one layer in one direction, with ``C`` channels.

    In layers above the first ``input`` is ``(3 * H, D)``, without decays.
    """

    input: Tensor  # (3 * H, 2 * C), of the values and of the marks of those present
    hidden: Tensor  # (3 * H, H)
    bias: Tensor | None = None  # (3 * H,)
    value_decay: Tensor | None = None  # (C,)
    value_decay_bias: Tensor | None = None  # (C,)
    state_decay: Tensor | None = None  # (H, C)
    state_decay_bias: Tensor | None = None  # (H,)


class GRUD(CellSpec):
    """A GRU whose missing values and state decay with the time since a channel was observed::

        d_x  = exp(-max(0, w_x * t + b_x))
        d_h  = exp(-max(0, W_h t + b_h))
        x^   = x where it is present, d_x * x where it is missing
        h^   = d_h * h
        r, z = sigmoid(W_rx x^ + V_r m + b_r + W_rh h^), and alike for z
        n    = tanh(W_nx x^ + V_n m + b_n + W_nh (r * h^))
        h'   = (1 - z) * n + z * h^

    An element has three blocks of columns, made by :func:`raglane.data.mark_missing`: ``x``, the
    last observed value or 0; ``1 - m``, 1 if the value is missing, else 0; and ``t``, the time
    since the channel was last observed before this element. In the paper a value decays to the
    channel's mean, which is 0 here, and ``z`` and ``1 - z`` are exchanged. Layers above the first
    are GRUs with the reset before the product.
    """

    name = "grud"
    gates: ClassVar[tuple[str, ...]] = ("r", "z", "n")
    weights_type: ClassVar[Any] = GRUDWeights

    def __init__(self, is_first: bool = True) -> None:
        self._is_first = is_first
        self._above = GRUD(is_first=False) if is_first else self

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
        """See :meth:`CellSpec.shapes`; raises ArgumentError unless each channel has three
        columns.
        """
        first = self._is_first
        if first and input_size % 3:
            rule = (
                "a multiple of 3: for each channel its value, a mark if it is missing, "
                "and the time since it was seen"
            )
            fix = "make the columns with rl.data.mark_missing(batch)"
            raise ArgumentError("input_size", str(input_size), rule, fix)
        channels = input_size // 3
        rows = 3 * hidden_size
        return {
            "weight_ih": (rows, 2 * channels if first else input_size),
            "weight_hh": (rows, hidden_size),
            "bias_ih": (rows,) if bias else None,
            "weight_dx": (channels,) if first else None,
            "bias_dx": (channels,) if first and bias else None,
            "weight_dh": (hidden_size, channels) if first else None,
            "bias_dh": (hidden_size,) if first and bias else None,
        }

    def initialise(self, parameter: str, tensor: Tensor, hidden_size: int) -> None:
        """See :meth:`CellSpec.initialise`; decays start positive, since negative ones have no
        effect or gradient.
        """
        if parameter in ("weight_dx", "weight_dh"):
            nn.init.uniform_(tensor, 0.0, hidden_size**-0.5)
        elif parameter in ("bias_dx", "bias_dh"):
            nn.init.zeros_(tensor)
        else:
            super().initialise(parameter, tensor, hidden_size)

    def prepare(self, weights: GRUDWeights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input products with their bias, ``(N, 3 * H)``, and in the first layer the
        decay ``(N, H)``.
        """
        if weights.value_decay is None or weights.state_decay is None:
            return F.linear(values, weights.input, weights.bias)
        x, absent, elapsed = values.chunk(3, 1)
        slope = elapsed * weights.value_decay
        if weights.value_decay_bias is not None:
            slope = slope + weights.value_decay_bias
        seen = torch.where(absent > 0, x * torch.exp(-slope.relu()), x)
        products = F.linear(torch.cat([seen, 1 - absent], 1), weights.input, weights.bias)
        decay = F.linear(elapsed, weights.state_decay, weights.state_decay_bias)
        return torch.cat([products, torch.exp(-decay.relu())], 1)

    def step(
        self, weights: GRUDWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`; ``prepared`` is ``(R, 4 * H)`` in the first layer, else ``(R,
        3 * H)``.
        """
        (h,) = state
        size = h.shape[1]
        if prepared.shape[1] > 3 * size:
            h = h * prepared[:, 3 * size :]
        read = masked(h, mask)
        r, z = torch.sigmoid(prepared[:, : 2 * size] + read @ weights.hidden[: 2 * size].t()).chunk(
            2, 1
        )
        n = torch.tanh(
            prepared[:, 2 * size : 3 * size] + (r * read) @ weights.hidden[2 * size :].t()
        )
        h = n + z * (h - n)
        return h, (h,)
