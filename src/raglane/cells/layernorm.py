"""Layer normalisation inside the recurrence: Ba, Kiros and Hinton (2016, arXiv:1607.06450)."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane.cells.spec import CellSpec, Shapes, States, Stepped, masked

_EPSILON = 1e-5


class LayerNormWeights(NamedTuple):
    """The weights of one layer in one direction. Gains and biases follow each normalisation."""

    input: Tensor  # (G * H, D)
    hidden: Tensor  # (G * H, H)
    input_gain: Tensor  # (G * H,)
    hidden_gain: Tensor  # (G * H,)
    input_bias: Tensor | None = None  # (G * H,)
    hidden_bias: Tensor | None = None  # (G * H,)
    memory_gain: Tensor | None = None  # (H,), of an LSTM's c
    memory_bias: Tensor | None = None  # (H,)


class _LayerNormSpec(CellSpec):
    """The base of both cells: products are normalised over all gates of a row."""

    weights_type: ClassVar[Any] = LayerNormWeights

    def shapes(
        self, input_size: int, hidden_size: int, bias: bool = True, proj_size: int = 0
    ) -> Shapes:
        """See :meth:`CellSpec.shapes`."""
        shapes = super().shapes(input_size, hidden_size, bias, proj_size)
        gain = (len(self.gates) * hidden_size,)
        memory = (hidden_size,) if "c" in self.states else None
        return {
            "weight_ih": shapes["weight_ih"],
            "weight_hh": shapes["weight_hh"],
            "gain_ih": gain,
            "gain_hh": gain,
            "bias_ih": shapes["bias_ih"],
            "bias_hh": shapes["bias_hh"],
            "gain_c": memory,
            "bias_c": memory if bias else None,
        }

    def initialise(self, parameter: str, tensor: Tensor, hidden_size: int) -> None:
        """See :meth:`CellSpec.initialise`; gains are 1 and biases 0."""
        if parameter.startswith("weight"):
            super().initialise(parameter, tensor, hidden_size)
        else:
            nn.init.constant_(tensor, 1.0 if parameter.startswith("gain") else 0.0)

    def prepare(self, weights: LayerNormWeights, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the normalised input products, ``(N, G * H)``."""
        return _normalised(F.linear(values, weights.input), weights.input_gain, weights.input_bias)


class LayerNormLSTM(_LayerNormSpec):
    """An LSTM that normalises both products and the memory (equations 20 to 22 of the paper)::

        i, f, g, o = LN(W_x x) + LN(W_h h)
        c'         = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h'         = sigmoid(o) * tanh(LN(c'))

    ``LN`` normalises over all gates of an element, with a separate gain and bias in each place. The
    new state is ``c'`` before its normalisation.
    """

    name = "layernorm_lstm"
    gates: ClassVar[tuple[str, ...]] = ("i", "f", "g", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")

    def step(
        self, weights: LayerNormWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        h, c = state
        hidden = _normalised(
            F.linear(masked(h, mask), weights.hidden), weights.hidden_gain, weights.hidden_bias
        )
        i, f, g, o = (prepared + hidden).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * torch.tanh(_normalised(c, weights.memory_gain, weights.memory_bias))
        return h, (h, c)


class LayerNormGRU(_LayerNormSpec):
    """A GRU, reset after the product, that normalises both products::

        x_r, x_z, x_n = LN(W_x x)
        h_r, h_z, h_n = LN(W_h h)
        r, z = sigmoid(x_r + h_r), sigmoid(x_z + h_z)
        n    = tanh(x_n + r * h_n)
        h'   = (1 - z) * n + z * h

    ``LN`` normalises over all gates of an element, with a separate gain and bias in each place.
    """

    name = "layernorm_gru"
    gates: ClassVar[tuple[str, ...]] = ("r", "z", "n")

    def step(
        self, weights: LayerNormWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        (h,) = state
        hidden = _normalised(
            F.linear(masked(h, mask), weights.hidden), weights.hidden_gain, weights.hidden_bias
        )
        r_input, z_input, n_input = prepared.chunk(3, 1)
        r_hidden, z_hidden, n_hidden = hidden.chunk(3, 1)
        r = torch.sigmoid(r_input + r_hidden)
        z = torch.sigmoid(z_input + z_hidden)
        n = torch.tanh(n_input + r * n_hidden)
        h = n + z * (h - n)
        return h, (h,)


def _normalised(arguments: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(arguments, arguments.shape[1:], gain, bias, _EPSILON)
