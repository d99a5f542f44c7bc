"""Poolings from one vector per element to one per sequence. The vector of an empty sequence is zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raglane import segments
from raglane._utils.checks import check_choice, check_count, check_dtype, check_fits, check_kind
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.linear import RowLinear
from raglane.ragged import Ragged

_PLAIN: dict[str, Callable[[Ragged], Tensor]] = {
    "last": Ragged.last,
    "first": Ragged.first,
    "mean": Ragged.mean,
    "max": Ragged.max,
    "logsumexp": Ragged.logsumexp,
}


def _check_batch(batch: Any) -> None:
    fix = "wrap it with rl.Ragged(sequences) or rl.Ragged.from_padded(padded, lengths)"
    check_kind("batch", batch, Ragged, "a Ragged", fix)


class Pooling(nn.Module):
    """A pooling without parameters: the method of :class:`~raglane.Ragged` of that name, as a module.

    ``last`` and ``first`` take one element; the others are computed per feature. ``logsumexp``, a smooth maximum, grows
    with the length: for L equal elements it is the element plus ``log(L)``. For a bidirectional layer use
    ``layer.summary(out, state)`` instead of ``last``, whose backward half has read only one element.

    Args:
        name: ``"last"``, ``"first"``, ``"mean"``, ``"max"`` or ``"logsumexp"``.

    Raises:
        ArgumentError: the name is unknown.

    Example:
        >>> Pooling("max")(Ragged([torch.tensor([[4., 1.], [3., 2.]]), torch.empty(0, 2)])).tolist()
        [[4.0, 2.0], [0.0, 0.0]]
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = check_choice("name", name, tuple(_PLAIN), 'for "attention" build an AttentionPooling')

    def forward(self, batch: Ragged) -> Tensor:
        """Pool each sequence.

        Args:
            batch: ``(N, *features)``.

        Returns:
            ``(B, *features)``; zeros for an empty sequence.

        Raises:
            ArgumentTypeError: ``batch`` is not a Ragged, or contains integers for ``mean`` and ``logsumexp``.
        """
        _check_batch(batch)
        return _PLAIN[self.name](batch)

    def extra_repr(self) -> str:
        """Return the name of the pooling."""
        return repr(self.name)


class AttentionPooling(nn.Module):
    """Weighted sums over the elements of each sequence, with weights computed from the elements.

    The self-attention of Lin et al. 2017, "A structured self-attentive sentence embedding" (arXiv:1703.03130, equation
    6). An element ``x`` has the scores ``query @ tanh(hidden @ x)``, one per head; the softmax of a head's scores over
    the steps of a sequence gives the weights. In the paper each head weighs all F features, so the result has
    ``heads * F``. Here a head weighs its own block of ``F / heads`` features, as in multi-head attention, so the result
    has F. With one head both are the same.

    Args:
        features: F, the number of features of an element.
        heads: the number of weights per element; it must divide F.
        device, dtype: of the parameters.

    Attributes:
        hidden: a linear layer without bias, weight ``(F, F)``.
        query: a linear layer without bias, weight ``(heads, F)``.

    Raises:
        ArgumentError: ``features`` or ``heads`` is not a whole number of at least 1, ``heads`` does not divide
            ``features``, or ``dtype`` is not floating-point.

    Example:
        >>> pooling = AttentionPooling(6, heads=2)
        >>> batch = Ragged([torch.randn(4, 6), torch.empty(0, 6), torch.randn(2, 6)])
        >>> pooling(batch).shape, pooling(batch)[1].tolist()
        (torch.Size([3, 6]), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        >>> pooling.weights(batch).values.shape
        torch.Size([6, 2])
    """

    def __init__(
        self,
        features: int,
        heads: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = check_count("features", features)
        self.heads = check_count("heads", heads)
        check_dtype(dtype)
        if features % heads != 0:
            rule = f"a divisor of features, {features}"
            raise ArgumentError(message("heads", quote(heads), rule, f"pass a divisor of {features}"))
        self.hidden = RowLinear(features, features, bias=False, device=device, dtype=dtype)
        self.query = RowLinear(features, heads, bias=False, device=device, dtype=dtype)

    def weights(self, batch: Ragged) -> Ragged:
        """Return the weight of each element in each head, ``(N, heads)``; they add up to 1 in each sequence.

        Args:
            batch: ``(N, F)``.

        Raises:
            ArgumentTypeError: ``batch`` is not a Ragged.
            ShapeError: elements have the wrong size, dtype or device.
        """
        _check_batch(batch)
        if tuple(batch.features) != (self.features,):
            rule = f"elements of {self.features} features"
            fix = "build the pooling with the number of features of its input"
            raise ShapeError(message("batch", f"elements of shape {tuple(batch.features)}", rule, fix))
        check_fits("batch", batch.values, self.hidden.weight)
        return batch.map(lambda values: self.query(torch.tanh(self.hidden(values)))).softmax()

    def forward(self, batch: Ragged) -> Tensor:
        """Pool each sequence.

        Args:
            batch: ``(N, F)``.

        Returns:
            ``(B, F)``; zeros for an empty sequence.

        Raises:
            ArgumentTypeError: ``batch`` is not a Ragged.
            ShapeError: elements have the wrong size, dtype or device.
        """
        weights = self.weights(batch).values.unsqueeze(-1)
        blocks = batch.values.unflatten(-1, (self.heads, self.features // self.heads))
        return segments.sum(weights * blocks, batch.offsets).flatten(1)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.features}, heads={self.heads}"


def _plain(name: str, features: int, *, device: Any = None, dtype: Any = None) -> Pooling:  # noqa: ARG001
    return Pooling(name)


POOLINGS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(_plain, name) for name in _PLAIN},
    "attention": AttentionPooling,
}
"""By name, functions ``(features, *, device, dtype)`` that build a pooling from ``(N, F)`` to ``(B, F)``."""
