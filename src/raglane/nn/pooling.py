"""One vector per sequence from one per element: the poolings, on ragged batches.

None of them sees padding: there is none. An empty sequence gives zeros, and nothing flows back through it.
"""

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
    """A pooling that learns nothing: the method of :class:`~raglane.Ragged` of that name, as a module.

    ``last`` and ``first`` take one element; ``mean``, ``max`` and ``logsumexp`` work feature by feature. The last, a
    smooth maximum, grows with the logarithm of the length: a sequence of L equal elements gives the element plus
    ``log(L)``. For the output of a bidirectional layer, ``last`` is not a summary: its backward half has seen one
    element only. Use ``layer.summary(out, state)`` there.

    Args:
        name: ``"last"``, ``"first"``, ``"mean"``, ``"max"`` or ``"logsumexp"``.

    Raises:
        ArgumentError: an unknown name.

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
            ArgumentTypeError: not a Ragged, or for ``mean`` and ``logsumexp`` integers.
        """
        _check_batch(batch)
        return _PLAIN[self.name](batch)

    def extra_repr(self) -> str:
        """The settings that ``print(module)`` shows."""
        return repr(self.name)


class AttentionPooling(nn.Module):
    """Weighted sums over the elements of each sequence, the weights learned from the elements themselves.

    The self-attention of Lin et al. 2017, "A structured self-attentive sentence embedding" (arXiv:1703.03130, equation
    6): an element ``x`` gets the scores ``query @ tanh(hidden @ x)``, one per head, and the softmax of a head's scores
    over the steps of a sequence gives the weights of its elements. In the paper a head weighs all F features, so the
    result has ``heads * F``; here it weighs its own block of ``F / heads`` of them, as in multi-head attention, and the
    result has F whatever the number of heads. With one head the two are the same.

    Args:
        features: F, the size of an element.
        heads: how many weights an element gets; divides F.
        device: where the parameters live.
        dtype: their dtype.

    Attributes:
        hidden: a linear layer without bias, weight ``(F, F)``.
        query: a linear layer without bias, weight ``(heads, F)``.

    Raises:
        ArgumentError: ``features`` or ``heads`` is not a whole number of at least 1, heads do not divide the features,
            or ``dtype`` is not floating-point.

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
            rule = f"a divisor of features, {features}, since each head weights a block of them"
            raise ArgumentError(message("heads", quote(heads), rule, f"pass a divisor of {features}"))
        self.hidden = RowLinear(features, features, bias=False, device=device, dtype=dtype)
        self.query = RowLinear(features, heads, bias=False, device=device, dtype=dtype)

    def weights(self, batch: Ragged) -> Ragged:
        """The weight of each element in each head, ``(N, heads)``; those of a head add up to 1 in each sequence.

        Args:
            batch: ``(N, F)``.

        Raises:
            ArgumentTypeError: not a Ragged.
            ShapeError: elements of the wrong size, dtype or device.
        """
        _check_batch(batch)
        if tuple(batch.features) != (self.features,):
            rule = f"a batch with one dimension of {self.features} features"
            fix = "build the pooling with the features of its input"
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
            ArgumentTypeError: not a Ragged.
            ShapeError: elements of the wrong size, dtype or device.
        """
        weights = self.weights(batch).values.unsqueeze(-1)
        blocks = batch.values.unflatten(-1, (self.heads, self.features // self.heads))
        return segments.sum(weights * blocks, batch.offsets).flatten(1)

    def extra_repr(self) -> str:
        """The settings that ``print(module)`` shows."""
        return f"{self.features}, heads={self.heads}"


def _plain(name: str, features: int, *, device: Any = None, dtype: Any = None) -> Pooling:  # noqa: ARG001
    return Pooling(name)


POOLINGS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(_plain, name) for name in _PLAIN},
    "attention": AttentionPooling,
}
"""From the name of each pooling to what builds it for elements of F features, and for a ``device`` and ``dtype``:
``(N, F)`` in, ``(B, F)`` out."""
