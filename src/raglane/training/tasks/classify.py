"""One class per sequence, or per element."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.data.preprocess import Preprocessor
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.tasks.base import Measured, Score, Task, targets_of, values_of


class Classify(Task):
    """Cross-entropy and accuracy."""

    metric = "accuracy"
    options: ClassVar[tuple[str, ...]] = ("probabilities", "top")

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of classes."""
        return preprocessor.class_count

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Compare logits ``(B or N, K)`` with the classes of the batch."""
        logits, targets = values_of(output), targets_of(batch)
        weights, smoothing = None, 0.0
        if training:
            weights = None if self.class_weights is None else self.class_weights.to(logits.device)
            smoothing = getattr(self.settings, "label_smoothing", 0.0)
        loss = F.cross_entropy(logits, targets, weights, label_smoothing=smoothing, reduction="sum")
        right = (logits.detach().argmax(-1) == targets).sum()
        return Score(loss, right, torch.as_tensor(targets.shape[0]), torch.zeros(()))

    def weigh(self, targets: Tensor) -> Tensor:
        """Weights by which each class counts the same in all, and an average element 1."""
        counts = torch.bincount(targets, minlength=self.preprocessor.class_count)
        return len(targets) / (self.preprocessor.class_count * counts.clamp(min=1).float())

    def meter(self, model: Any, records: Records | Dataset, top: int = 1) -> _Confusion:  # noqa: ARG002
        """The confusion matrix, and what follows from it."""
        return _Confusion(self.preprocessor.labels or (), top)

    def columns(
        self,
        output: Tensor,
        model: Any,  # noqa: ARG002
        *,
        probabilities: bool,
        top: int = 1,
    ) -> dict[str, list[Any]]:
        """The likeliest class, its probability and, where asked for, several of both, and the probability of each."""
        shares, labels = output.softmax(-1), self.preprocessor.labels or ()
        best, places = shares.max(dim=1) if len(shares) else (shares.new_zeros(0), torch.zeros(0, dtype=torch.int64))
        columns: dict[str, list[Any]] = {
            "prediction": [labels[place] for place in places.tolist()],
            "probability": best.tolist(),
        }
        if top > 1:
            best, places = shares.topk(min(top, len(labels)), dim=-1)
            columns["top"] = [[labels[place] for place in row] for row in places.tolist()]
            columns["top_probability"] = best.tolist()
        if probabilities:
            columns |= {f"p_{label}": shares[:, place].tolist() for place, label in enumerate(labels)}
        return columns


class _Confusion:
    """Counts of each predicted class for each true class."""

    def __init__(self, labels: tuple[str, ...], top: int) -> None:
        self.labels, self.top = labels, min(top, len(labels))
        self.among_top = 0
        self.matrix = torch.zeros((len(labels), len(labels)), dtype=torch.int64)

    def add(self, output: Tensor, batch: Batch) -> None:
        if self.top > 1:
            places = output.topk(self.top, dim=-1).indices
            self.among_top += int((places == targets_of(batch).unsqueeze(1)).sum())
        self.matrix += confusion_matrix(targets_of(batch).cpu(), output.argmax(-1).cpu(), len(self.labels))

    def measured(self) -> Measured:
        numbers = {"accuracy": accuracy(self.matrix), "macro_f1": macro_f1(self.matrix)}
        if self.top > 1:
            numbers[f"top{self.top}_accuracy"] = self.among_top / max(int(self.matrix.sum()), 1)
        return Measured(numbers, self.labels, self.matrix)


def confusion_matrix(targets: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Counts of each predicted class for each true class."""
    counts = torch.bincount(targets * classes + predictions, minlength=classes * classes)
    return counts.view(classes, classes)


def accuracy(matrix: Tensor) -> float:
    """The share of right predictions; NaN where there are none at all."""
    total = int(matrix.sum())
    return int(matrix.trace()) / total if total else float("nan")


def f1_scores(matrix: Tensor) -> Tensor:
    """The F1 score of each class, ``2 right / (true + predicted)``; NaN for a class that never occurs."""
    counts = matrix.double()
    return 2 * counts.diagonal() / (counts.sum(0) + counts.sum(1))


def macro_f1(matrix: Tensor) -> float:
    """The mean F1 score of the classes that occur in the targets or the predictions."""
    return float(f1_scores(matrix).nanmean())


class Tag(Classify):
    """As :class:`~raglane.training.tasks.classify.Classify`, with an answer for each element."""
