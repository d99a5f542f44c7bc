"""The pooling of quasi-recurrent networks, Bradbury et al. (2016, arXiv:1611.01576),
"fo-pooling".
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from raglane.cells.elementwise import ElementwiseSpec, ElementwiseWeights
from raglane.cells.spec import States, Stepped


class QRNN(ElementwiseSpec):
    """A gated memory and an output gate that depend only on the input::

        n    = tanh(W_n x + b_n)
        f, o = sigmoid(W_f x + b_f), and alike for o
        c'   = f * c + (1 - f) * n
        h'   = o * c'

    The products are convolutions of width one. No gate reads the state ``h``, which is the output.
    """

    name = "qrnn"
    gates: ClassVar[tuple[str, ...]] = ("n", "f", "o")
    states: ClassVar[tuple[str, ...]] = ("h", "c")

    def step(
        self,
        weights: ElementwiseWeights,  # noqa: ARG002
        prepared: Tensor,
        state: States,
        mask: Tensor | None = None,  # noqa: ARG002
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        _, c = state
        n, f, o = prepared.chunk(3, 1)
        n = n.tanh()
        c = n + f.sigmoid() * (c - n)
        h = o.sigmoid() * c
        return h, (h, c)
