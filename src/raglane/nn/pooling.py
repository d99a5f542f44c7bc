"""Poolings from one vector per element to one per sequence. The vector of an empty sequence is
zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from raglane import segments
from raglane._utils.checks import check_choice, check_count, check_dtype, check_fits, check_flag
from raglane._utils.messages import quote
from raglane._utils.tracing import records_operators
from raglane.errors import ArgumentError, ShapeError
from raglane.native.library import missing_kernels
from raglane.nn.linear import RowLinear
from raglane.nn.recurrent.any_cell import Recurrent
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged

_PLAIN = ("last", "first", "mean", "max", "logsumexp")


class Pooling(nn.Module):
    """A pooling without parameters: a reduction over the steps of each sequence, as a module.

    ``last`` and ``first`` take one element; the others are computed per feature. ``logsumexp``, a
    smooth maximum, grows with the length: for L equal elements it is the element plus ``log(L)``.
    For a bidirectional layer use ``layer.final(out, state)`` instead of ``last``, whose backward
    half has read only one element.

    Args:
        name: ``"last"``, ``"first"``, ``"mean"``, ``"max"`` or ``"logsumexp"``.

    Raises:
        ArgumentError: the name is unknown.

    Example:
        >>> Pooling("max")(Ragged([torch.tensor([[4., 1.], [3., 2.]]), torch.empty(0, 2)])).tolist()
        [[4.0, 2.0], [0.0, 0.0]]
    """

    def __init__(self, name: Literal["last", "first", "mean", "max", "logsumexp"]) -> None:
        super().__init__()
        self.name = check_choice("name", name, _PLAIN, 'for "attention" build an AttentionPooling')

    def forward(self, batch: Ragged) -> Tensor:
        """Pool each sequence.

        Args:
            batch: ``(N, *features)``.

        Returns:
            ``(B, *features)``; zeros for an empty sequence.

        Raises:
            ArgumentTypeError: ``batch`` is not a Ragged, or contains integers for ``mean`` and
                ``logsumexp``.
        """
        check_ragged("batch", batch)
        if self.name == "logsumexp" and _answers(self, batch):
            return _run_so_far(running(self.name, batch.values[:1].numel(), batch.dtype), batch)
        return self.pool(batch)

    if TYPE_CHECKING:

        def __call__(self, batch: Ragged) -> Tensor: ...  # noqa: D102

    def pool(self, batch: Ragged) -> Tensor:
        """Call the method of a batch."""
        if self.name in ("last", "first"):
            pooled: Tensor = getattr(batch, self.name)()
            return pooled
        method: Callable[..., Tensor] = getattr(batch, "amax" if self.name == "max" else self.name)
        return method(1, empty=0.0)

    def extra_repr(self) -> str:
        """Return the name of the pooling."""
        return repr(self.name)


class AttentionPooling(nn.Module):
    """Weighted sums over the elements of each sequence, with weights computed from the elements.

    The self-attention of Lin et al. 2017, "A structured self-attentive sentence embedding"
    (arXiv:1703.03130, equation 6). An element ``x`` has the scores ``query @ tanh(hidden @ x)``,
    one per head; the softmax of a head's scores over the steps of a sequence gives the weights. In
    the paper each head weighs all F features, so the result has ``num_heads * F``. Here a head
    weighs its own block of ``F / num_heads`` features, as in multi-head attention, so the result has F. With
    one head both are the same.

    Args:
        embed_dim: F, the number of features of an element.
        num_heads: the number of weights per element; it must divide F.
        bias: True for ``hidden`` with a bias, as in hierarchical attention networks (Yang et al.
            2016, "Hierarchical attention networks for document classification", equation 5).
        device, dtype: of the parameters.

    Attributes:
        hidden: a linear layer, weight ``(F, F)``.
        query: a linear layer without bias, weight ``(num_heads, F)``.

    Raises:
        ArgumentError: ``embed_dim`` or ``num_heads`` is not a whole number of at least 1,
            ``num_heads`` does not divide ``embed_dim``, or ``dtype`` is not floating-point.
        ArgumentTypeError: ``bias`` is not a bool.

    Example:
        >>> pooling = AttentionPooling(6, num_heads=2)
        >>> batch = Ragged([torch.randn(4, 6), torch.empty(0, 6), torch.randn(2, 6)])
        >>> pooling(batch).shape, pooling(batch)[1].tolist()
        (torch.Size([3, 6]), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        >>> pooling.weights(batch).values.shape
        torch.Size([6, 2])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = check_count("embed_dim", embed_dim)
        self.num_heads = check_count("num_heads", num_heads)
        check_flag("bias", bias)
        check_dtype(dtype)
        if embed_dim % num_heads != 0:
            rule = f"a divisor of embed_dim, {embed_dim}"
            fix = f"pass a divisor of {embed_dim}"
            raise ArgumentError("num_heads", quote(num_heads), rule, fix)
        self.hidden = RowLinear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.query = RowLinear(embed_dim, num_heads, bias=False, device=device, dtype=dtype)

    def weights(self, batch: Ragged) -> Ragged:
        """Return the weight of each element in each head, ``(N, num_heads)``; they add up to 1 in each
        sequence.

        Args:
            batch: ``(N, F)``.

        Raises:
            ArgumentTypeError: ``batch`` is not a Ragged.
            ShapeError: elements have the wrong size, dtype or device.
        """
        check_ragged("batch", batch)
        if tuple(batch.feature_shape) != (self.embed_dim,):
            rule = f"elements of {self.embed_dim} features"
            fix = "build the pooling with the number of features of its input"
            raise ShapeError("batch", f"elements of shape {tuple(batch.feature_shape)}", rule, fix)
        check_fits("batch", batch.values, self.hidden.weight)
        return batch.map(lambda values: self.query(torch.tanh(self.hidden(values)))).softmax(1)

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
        if _answers(self, batch) and tuple(batch.feature_shape) == (self.embed_dim,):
            check_fits("batch", batch.values, self.hidden.weight)
            return _run_so_far(running(self, self.embed_dim, batch.dtype), batch)
        weights = self.weights(batch).values.unsqueeze(-1)
        # Not the method, which torch.compile does not trace under a default device.
        blocks = torch.unflatten(
            batch.values, -1, (self.num_heads, self.embed_dim // self.num_heads)
        )
        return segments.sum(weights * blocks, batch.offsets).flatten(1)

    if TYPE_CHECKING:

        def __call__(self, batch: Ragged) -> Tensor: ...  # noqa: D102

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.embed_dim}, num_heads={self.num_heads}"


# ---- poolings of the elements so far -------------------------------------------------------------


class _Running(nn.Module):
    """A cell whose output is the pooling of the elements so far."""

    def __init__(
        self, width: int, dtype: torch.dtype, starts: tuple[tuple[int, float], ...]
    ) -> None:
        super().__init__()
        self.input_size = self.hidden_size = width
        # of each state its size and its numbers before the first element
        self.dtype = dtype
        self.starts = starts

    def initial_state(self, count: int) -> tuple[Tensor, ...]:
        """Return the states before the first element."""
        return tuple(
            [
                torch.full((count, size), start, dtype=self.dtype, device="cpu")
                for size, start in self.starts
            ]
        )


class _First(_Running):
    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, seen = state
        value = torch.where(seen > 0, value, x)
        return value, (value, torch.ones_like(seen))


class _Mean(_Running):
    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        # In the blocks of segments.sum.
        total, block, count = state
        block = block + x
        count = count + 1
        reached = total + block
        is_full = count % segments.BLOCK == 0
        state = torch.where(is_full, reached, total), torch.where(is_full, 0.0, block), count
        return reached / count, state


class _Max(_Running):
    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        largest = torch.maximum(state[0], x)
        return largest, (largest,)


class _LogSumExp(_Running):
    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        before, total = state
        largest = torch.maximum(before, x)
        # An infinite maximum is not subtracted, which would give NaN.
        shift = torch.where(largest.abs() == float("inf"), torch.zeros_like(largest), largest)
        total = total * torch.exp(before - shift) + torch.exp(x - shift)
        return torch.log(total) + shift, (largest, total)


class _WeightedSum(_Running):
    """The weighted sum of :class:`AttentionPooling`, scaled when the largest score changes."""

    def __init__(self, pooling: AttentionPooling, dtype: torch.dtype) -> None:
        heads = pooling.num_heads
        features = pooling.embed_dim
        super().__init__(features, dtype, ((heads, -torch.inf), (heads, 0.0), (features, 0.0)))
        self.hidden = pooling.hidden
        self.query = pooling.query

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        before, total, summed = state
        scores = self.query(torch.tanh(self.hidden(x)))
        largest = torch.maximum(before, scores)
        factor = torch.exp(before - largest)
        new = torch.exp(scores - largest)
        total = total * factor + new
        blocks = x.unflatten(1, (scores.shape[1], -1)) * new.unsqueeze(2)
        summed = summed.unflatten(1, (scores.shape[1], -1)) * factor.unsqueeze(2) + blocks
        summed = summed.flatten(1)
        value = summed.unflatten(1, (scores.shape[1], -1)) / total.unsqueeze(2)
        return value.flatten(1), (largest, total, summed)


@lru_cache(maxsize=64)
def _plain_running(name: str, width: int, dtype: torch.dtype) -> Recurrent:
    if name == "first":
        return Recurrent(_First(width, dtype, ((width, 0.0), (1, 0.0))))
    if name == "mean":
        return Recurrent(_Mean(width, dtype, ((width, 0.0), (width, 0.0), (1, 0.0))))
    if name == "max":
        return Recurrent(_Max(width, dtype, ((width, -torch.inf),)))
    return Recurrent(_LogSumExp(width, dtype, ((width, -torch.inf), (width, 0.0))))


def running(pooling: str | AttentionPooling, width: int, dtype: torch.dtype) -> Recurrent:
    """Return a layer of the poolings so far; ``pooling`` is a name or a module."""
    return (
        _plain_running(pooling, width, dtype)
        if isinstance(pooling, str)
        else Recurrent(_WeightedSum(pooling, dtype))
    )


def _answers(pooling: nn.Module, batch: Ragged) -> bool:
    """Return True if a pooling is computed per element, with the same bits as for a stream."""
    return (
        not records_operators()  # first, because the number of elements may be symbolic
        and not pooling.training
        and not torch.is_grad_enabled()
        and batch.values.is_cpu
        and batch.dtype in (torch.float32, torch.float64)
        and batch.values.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not missing_kernels()
    )


def _run_so_far(layer: Recurrent, batch: Ragged) -> Tensor:
    """Return the last output of a layer for each sequence; zeros for an empty one."""
    return (
        layer(batch._like(batch.values.reshape(batch.values.shape[0], -1)))[0]
        .last()
        .reshape(-1, *batch.feature_shape)
    )


def _plain(name: Any, features: int, *, device: Any = None, dtype: Any = None) -> Pooling:  # noqa: ARG001
    return Pooling(name)


POOLINGS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(_plain, name) for name in _PLAIN},
    "attention": AttentionPooling,
}
"""By name, functions ``(features, *, device, dtype)`` that build a pooling from ``(N, F)`` to ``(B,
F)``."""
