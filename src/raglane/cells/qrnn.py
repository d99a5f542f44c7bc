"""The pooling of quasi-recurrent networks, Bradbury et al. (2016, arXiv:1611.01576), "fo-pooling"."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights
from raglane.cells.spec import States, Stepped


class QRNN(ElementwiseSpec):
    """A gated memory and an output gate, both of the input alone::

        n    = tanh(W_n x + b_n)
        f, o = sigmoid(W_f x + b_f), and alike for o
        c'   = f * c + (1 - f) * n
        h'   = o * c'

    The products are convolutions of width one: wider ones are a matter of the input, before the layer.
    Nothing looks at the state ``h``: it is the output, kept so that the last one can be read as for every cell.

    Example:
        >>> import torch
        >>> cell, weights = QRNN(), ElementwiseWeights(torch.zeros(6, 2))
        >>> output, (h, c) = cell.step(weights, torch.zeros(1, 6), (torch.zeros(1, 2), torch.ones(1, 2)))
        >>> output.tolist(), c.tolist()
        ([[0.25, 0.25]], [[0.5, 0.5]])
    """

    name = "qrnn"
    gates: ClassVar[tuple[str, ...]] = ("n", "f", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")

    def step(self, weights: ElementwiseWeights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:  # noqa: ARG002
        """One step: ``(R, 3 * H)`` and ``((R, H), (R, H))`` to the output ``(R, H)`` and the new states."""
        _, c = state
        n, f, o = prepared.chunk(3, 1)
        n = n.tanh()
        c = n + f.sigmoid() * (c - n)
        h = o.sigmoid() * c
        return h, (h, c)
