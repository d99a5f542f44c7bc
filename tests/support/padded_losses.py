"""Every loss as sums over rows, and over a padded batch with a mask; the largest tensor of a
computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import raglane as rl
from raglane.nn import losses

CLASSES = 4
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0], dtype=torch.float64, device="cpu")
POSITIVE = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64, device="cpu")
IGNORED = 2


@dataclass(frozen=True)
class Case:
    """A loss, and the same per row.

    ``rows(predictions (M, ...), targets (M, ...))`` returns losses ``(M, *features)`` and the weight
    of each row in a mean.
    """

    call: Callable[..., Any]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    rows: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def draw_classes(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, CLASSES, dtype=torch.float64), torch.randint(0, CLASSES, (count,))


def draw_probabilities(count: int) -> tuple[Tensor, Tensor]:
    scores = torch.randn(2, count, CLASSES, dtype=torch.float64)
    return scores[0], scores[1].softmax(-1)


def draw_numbers(*features: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def draw(count: int) -> tuple[Tensor, Tensor]:
        made = 2 * torch.randn(2, count, *features, dtype=torch.float64)
        return made[0], made[1]

    return draw


def draw_labels(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, dtype=torch.float64), torch.randint(0, 2, (count, 3)).bool()


def log_normalised(x: Tensor) -> Tensor:
    return x - x.exp().sum(-1, keepdim=True).log()


def class_rows(
    log_probabilities: Tensor,
    target: Tensor,
    weighted: bool = False,
    ignore: bool = False,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    weight = (
        CLASS_WEIGHTS.to(log_probabilities)
        if weighted
        else torch.ones(CLASSES).to(log_probabilities)
    )
    chosen = torch.nn.functional.one_hot(target, CLASSES).to(log_probabilities)
    own = -(chosen * weight * log_probabilities).sum(-1)
    even = -(weight * log_probabilities).sum(-1) / CLASSES
    kept = (target != IGNORED).to(own) if ignore else torch.ones_like(own)
    return ((1 - smoothing) * own + smoothing * even) * kept, weight[target] * kept


def evenly(
    rows: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Give every row the weight 1."""

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = rows(x, y.to(x.dtype))
        return result, torch.ones_like(result).flatten(1).mean(
            1
        ) if result.dim() > 1 else torch.ones_like(result)

    return both


def huber(x: Tensor, y: Tensor) -> Tensor:
    distance = (x - y).abs()
    return torch.where(distance <= 0.7, distance**2 / 2, 0.7 * (distance - 0.35))


def binary(x: Tensor, y: Tensor, positive: Tensor | float = 1.0) -> Tensor:
    return -(positive * y * x.sigmoid().log() + (1 - y) * (-x).sigmoid().log())


CASES: dict[str, Case] = {
    "cross_entropy": Case(
        losses.cross_entropy, draw_classes, lambda x, y: class_rows(log_normalised(x), y)
    ),
    "cross_entropy, everything": Case(
        lambda x, y, **k: losses.cross_entropy(
            x, y, CLASS_WEIGHTS.to(x.device), ignore_index=IGNORED, label_smoothing=0.3, **k
        ),
        draw_classes,
        lambda x, y: class_rows(log_normalised(x), y, weighted=True, ignore=True, smoothing=0.3),
    ),
    "cross_entropy, probabilities": Case(
        lambda x, y, **k: losses.cross_entropy(x, y, CLASS_WEIGHTS.to(x.device), **k),
        draw_probabilities,
        evenly(lambda x, y: -(CLASS_WEIGHTS.to(x) * y * log_normalised(x)).sum(-1)),
    ),
    "nll_loss": Case(losses.nll_loss, draw_classes, class_rows),
    "nll_loss, everything": Case(
        lambda x, y, **k: losses.nll_loss(
            x, y, CLASS_WEIGHTS.to(x.device), ignore_index=IGNORED, **k
        ),
        draw_classes,
        lambda x, y: class_rows(x, y, weighted=True, ignore=True),
    ),
    "mse_loss": Case(losses.mse_loss, draw_numbers(3), evenly(lambda x, y: (x - y) ** 2)),
    "mse_loss, no features": Case(
        losses.mse_loss, draw_numbers(), evenly(lambda x, y: (x - y) ** 2)
    ),
    "mse_loss, two dimensions": Case(
        losses.mse_loss, draw_numbers(2, 3), evenly(lambda x, y: (x - y) ** 2)
    ),
    "l1_loss": Case(losses.l1_loss, draw_numbers(3), evenly(lambda x, y: (x - y).abs())),
    "huber_loss": Case(
        lambda x, y, **k: losses.huber_loss(x, y, 0.7, **k), draw_numbers(3), evenly(huber)
    ),
    "binary_cross_entropy": Case(
        losses.binary_cross_entropy_with_logits, draw_labels, evenly(binary)
    ),
    "binary_cross_entropy, one weight": Case(
        lambda x, y, **k: losses.binary_cross_entropy_with_logits(
            x, y, POSITIVE[1].to(x.device), **k
        ),
        draw_labels,
        evenly(lambda x, y: binary(x, y, POSITIVE[1].to(x))),
    ),
    "binary_cross_entropy, weighted": Case(
        lambda x, y, **k: losses.binary_cross_entropy_with_logits(x, y, POSITIVE.to(x.device), **k),
        draw_labels,
        evenly(lambda x, y: binary(x, y, POSITIVE.to(x))),
    ),
}

REDUCTIONS = ["mean", "sum", "sequence_mean", "none"]


def padded_loss(
    case: Case,
    batch: rl.Ragged,
    target: rl.Ragged,
    reduction: str,
    per_element: Tensor | None,
    per_sequence: Tensor | None,
) -> Tensor:
    """Compute the loss of a padded batch with a mask, and reduce each sequence in a loop."""
    x, counted_lengths = batch.to_padded(padding_value=0.3)
    y, _ = target.to_padded()
    count, steps = x.shape[:2]
    own, counts = case.rows(x.flatten(0, 1), y.flatten(0, 1))
    own, counts = own.unflatten(0, (count, steps)), counts.view(count, steps)
    mask = torch.arange(steps) < counted_lengths.view(-1, 1).to(x.device)
    weight = mask.to(x.dtype)
    if per_element is not None:
        weight = (
            rl.Ragged.from_flat(per_element, lengths=counted_lengths).to_padded()[0].to(x.dtype)
        )
    shares = torch.ones(count, dtype=x.dtype) if per_sequence is None else per_sequence.to(x.dtype)
    if reduction != "sequence_mean":
        weight = weight * shares.view(-1, 1)
    of_values = weight.view(count, steps, *[1] * (own.dim() - 2))
    if reduction == "none":
        return (own * of_values)[mask]
    if reduction == "sum":
        return (own * of_values)[mask].sum()
    own = own.flatten(2).mean(2) if own.dim() > 2 else own
    total, amount = (own * weight * mask).sum(1), (counts * weight * mask).sum(1)
    if reduction == "mean":
        return total.sum() / amount.sum() if amount.sum() > 0 else total.sum() * 0
    above, below = own.sum() * 0, own.new_zeros(())
    for b in range(count):
        if amount[b] > 0:
            above, below = above + shares[b] * total[b] / amount[b], below + shares[b]
    return above / below if below > 0 else above * 0


class _Sizes(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in pytree.tree_leaves(result):
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.numel())
        return result


def largest_tensor(function: Callable[[], Any]) -> int:
    """Return the number of elements of the largest result of an operation in ``function``."""
    sizes = _Sizes()  # type: ignore[no-untyped-call]
    with sizes:
        function()
    return sizes.largest
