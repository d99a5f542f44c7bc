"""What a model is trained for: the loss, the metric and the baseline of each task.

Losses and metrics are taken over the flat values, so each real element counts once and nothing else counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.data.preprocess import Preprocessor
from raglane.errors import ArgumentError, message
from raglane.ragged import Ragged
from raglane.training.batches import Batch

__all__ = ["Classes", "Forecast", "Score", "Task", "make_task"]


@dataclass(frozen=True)
class Score:
    """Sums over a batch, each a 0-d tensor.

    Args:
        loss: the sum of the losses, with a gradient.
        metric: the sum of what the metric averages.
        count: how many were summed.
        baseline: the metric's sum for the baseline; 0 where there is none.
    """

    loss: Tensor
    metric: Tensor
    count: Tensor
    baseline: Tensor

    @property
    def mean_loss(self) -> Tensor:
        """What the optimizer makes smaller; 0 for a batch of empty sequences."""
        return self.loss / self.count.clamp(min=1)


class Task(Protocol):
    """What the training loop asks of a task."""

    metric: str
    baseline: str | None

    def score(self, output: Tensor | Ragged, batch: Batch) -> Score:
        """Compare a model's output with the targets of its batch."""


class Classes:
    """One class per sequence (``classify``) or per element (``tag``): cross-entropy and accuracy.

    Example:
        >>> batch = Batch(Ragged([torch.ones(2, 1)]), torch.tensor([1]), torch.tensor([0]))
        >>> float(Classes().score(torch.tensor([[0.0, 2.0]]), batch).metric)
        1.0
    """

    metric = "accuracy"
    baseline: str | None = None

    def score(self, output: Tensor | Ragged, batch: Batch) -> Score:
        """Compare logits ``(B or N, K)`` with the classes of the batch."""
        logits = output.values if isinstance(output, Ragged) else output
        targets = _targets(batch)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        right = (logits.detach().argmax(-1) == targets).sum()
        return Score(loss, right, torch.as_tensor(targets.shape[0]), torch.zeros(()))


class Forecast:
    """The next element: squared error of scaled channels, and the mean absolute error in the data's units.

    Channels beyond those of the data say "was missing"; what was missing is not a target.

    Args:
        scale: ``(C,)`` float32, the unit of each channel, by which the data was divided.

    Example:
        >>> batch = Batch(Ragged([torch.tensor([[1.0]])]), torch.tensor([[4.0]]), torch.tensor([0]))
        >>> score = Forecast(torch.tensor([10.0])).score(Ragged([torch.tensor([[3.0]])]), batch)
        >>> float(score.loss), float(score.metric), float(score.baseline)
        (1.0, 10.0, 30.0)
    """

    metric = "MAE"
    baseline: str | None = "persistence"

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def score(self, output: Tensor | Ragged, batch: Batch) -> Score:
        """Compare forecasts ``(N, C)`` with the elements that came."""
        forecasts = output.values if isinstance(output, Ragged) else output
        channels = self.scale.shape[0]
        targets = _targets(batch)
        known = targets[:, :channels]
        # All ones where the data has no flags.
        real = 1 - targets[:, channels : 2 * channels] if targets.shape[1] > channels else torch.ones_like(known)
        # In float64: the data's units can be so large that their products are infinite in float32.
        scale = self.scale.to(known.device).double()
        error = (forecasts - known) * real
        change = (batch.inputs.values[:, :channels] - known) * real
        return Score(
            error.square().sum(),
            (error.detach().abs() * scale).sum(),
            real.sum(),
            (change.abs() * scale).sum(),
        )


def _targets(batch: Batch) -> Tensor:
    if batch.targets is None:
        raise ArgumentError(
            message("batch", "sequences without targets", "a score needs targets", "give data with labels")
        )
    return batch.targets


def make_task(preprocessor: Preprocessor) -> Task:
    """The task that a preprocessor was made for.

    Args:
        preprocessor: knows the task, and the scale of the channels.
    """
    if preprocessor.task == "forecast":
        # Without scaling the data's units are those of the loss.
        scale = preprocessor.std or (1.0,) * len(preprocessor.channels)
        return Forecast(torch.tensor(scale, dtype=torch.float32))
    return Classes()
