"""Classification and multi-label classification."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.prepare.encoders import IGNORED_CLASS
from raglane.nn.linear import row_sigmoid
from raglane.ragged import Ragged
from raglane.training.batches import Batch, targets_of
from raglane.training.settings import Settings
from raglane.training.tasks.base import Measured, Score, Task, values_of


class Classify(Task):
    """One class per sequence: cross-entropy and accuracy."""

    options: ClassVar[tuple[str, ...]] = ("probabilities", "top")

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Return cross-entropy and accuracy of logits ``(B or N, K)``."""
        logits = values_of(output)
        targets = targets_of(batch)
        weights = (
            self.class_weights.to(logits.device)
            if training and self.class_weights is not None
            else None
        )
        smoothing = getattr(self.settings, "label_smoothing", 0.0) if training else 0.0
        loss = F.cross_entropy(logits, targets, weights, label_smoothing=smoothing, reduction="sum")
        right = (logits.detach().argmax(-1) == targets).sum()
        return Score(loss, right, torch.as_tensor(targets.shape[0]), torch.zeros(()))

    def weigh(self, targets: Tensor) -> Tensor:
        """Return weights that give all classes the same total weight, with mean 1 over the
        targets.
        """
        targets = targets[targets != IGNORED_CLASS]
        counts = torch.bincount(targets, minlength=self.preprocessor.class_count)
        return len(targets) / (self.preprocessor.class_count * counts.clamp(min=1).float())

    def meter(self, model: Any, records: Dataset, top: int = 1) -> Confusion:  # noqa: ARG002
        """Return a meter of the confusion matrix, accuracy and F1 scores."""
        return Confusion(self.preprocessor.labels or (), top)

    def columns(
        self,
        output: Tensor,
        model: Any,  # noqa: ARG002
        *,
        probabilities: bool,
        top: int = 1,
    ) -> dict[str, list[Any]]:
        """Return the likeliest class, its probability and, with the options, the top classes and
        all probabilities.
        """
        shares = output.softmax(-1)
        labels = self.preprocessor.answers
        best, classes = (
            shares.max(dim=1)
            if len(shares)
            else (shares.new_zeros(0), torch.zeros(0, dtype=torch.int64))
        )
        columns: dict[str, list[Any]] = {
            "prediction": [labels[index] for index in classes.tolist()],
            "probability": best.tolist(),
        }
        if top > 1:
            best, classes = shares.topk(min(top, len(labels)), dim=-1)
            columns["top"] = [[labels[index] for index in row] for row in classes.tolist()]
            columns["top_probability"] = best.tolist()
        if probabilities:
            columns |= {
                f"p_{label}": shares[:, index].tolist() for index, label in enumerate(labels)
            }
        return columns


class Confusion:
    """Accumulates the confusion matrix."""

    def __init__(self, labels: tuple[str, ...], top: int) -> None:
        self.labels = labels
        self.top = min(top, len(labels))
        self.among_top = 0
        self.matrix = torch.zeros((len(labels), len(labels)), dtype=torch.int64)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add a batch and its logits ``(B or N, K)``."""
        targets = targets_of(batch)
        counts = targets != IGNORED_CLASS
        targets = targets[counts]
        output = output[counts]
        if self.top > 1:
            top_classes = output.topk(self.top, dim=-1).indices
            self.among_top += int((top_classes == targets.unsqueeze(1)).sum())
        self.matrix += confusion_matrix(targets.cpu(), output.argmax(-1).cpu(), len(self.labels))

    def measured(self) -> Measured:
        """Return the scores of all batches."""
        numbers = {"accuracy": accuracy(self.matrix), "macro_f1": macro_f1(self.matrix)}
        # The share of the most frequent class.
        numbers["majority_accuracy"] = int(self.matrix.sum(1).max()) / max(
            int(self.matrix.sum()), 1
        )
        if self.top > 1:
            numbers[f"top{self.top}_accuracy"] = self.among_top / max(int(self.matrix.sum()), 1)
        return Measured(numbers, self.labels, self.matrix)


def confusion_matrix(targets: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Return the counts ``(classes, classes)`` of predicted classes for each true class."""
    return torch.bincount(targets * classes + predictions, minlength=classes * classes).view(
        classes, classes
    )


def accuracy(matrix: Tensor) -> float:
    """Return the share of correct predictions; NaN without predictions."""
    total = int(matrix.sum())
    return int(matrix.trace()) / total if total else float("nan")


def f1_scores(matrix: Tensor) -> Tensor:
    """Return the F1 score of each class, ``2 correct / (true + predicted)``; NaN for a class that
    does not occur.
    """
    counts = matrix.double()
    return 2 * counts.diagonal() / (counts.sum(0) + counts.sum(1))


def macro_f1(matrix: Tensor) -> float:
    """Return the mean F1 score of the classes that occur in targets or predictions."""
    return float(f1_scores(matrix).nanmean())


def best_thresholds(shares: Tensor, targets: Tensor) -> Tensor:
    """Return for each label the probability threshold with the highest F1 score."""
    count, labels = shares.shape
    if count == 0:
        return torch.full((labels,), 0.5)
    ranked, order = shares.double().sort(dim=0, descending=True, stable=True)
    hits = targets.double().gather(0, order).cumsum(0)
    predicted = torch.arange(1, count + 1, dtype=torch.float64).unsqueeze(1)
    scores = 2 * hits / (predicted + hits[-1])
    # No threshold separates equal probabilities. The last one may be 0, so the bound below it is
    # negative.
    below = torch.cat([ranked[1:], torch.full((1, labels), -1e-6, dtype=torch.float64)])
    scores = torch.where(below < ranked, scores, -1.0)
    best = scores.argmax(dim=0, keepdim=True)
    middle = ((ranked + below) / 2).gather(0, best).squeeze(0)
    return torch.where(hits[-1] > 0, middle, 0.5).float()


class MultiLabel(Task):
    """Any number of labels: binary cross-entropy, with thresholds chosen on the validation data."""

    options: ClassVar[tuple[str, ...]] = ("probabilities",)
    kept: ClassVar[dict[str, float]] = {"thresholds": 0.5}

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Return the loss of logits ``(M, K)``, and exact matches; during a training at thresholds
        of 0.5.
        """
        logits = values_of(output)
        targets = targets_of(batch)
        weights = (
            self.class_weights.to(logits.device)
            if training and self.class_weights is not None
            else None
        )
        loss = F.binary_cross_entropy_with_logits(
            logits, targets, pos_weight=weights, reduction="sum"
        )
        # A training chooses the thresholds at the end of an epoch, a stored model has them.
        thresholds = 0.5 if isinstance(self.settings, Settings) else self.model.thresholds
        matches = ((row_sigmoid(logits.detach()) >= thresholds) == (targets > 0)).all(
            -1
        ).sum() * targets.shape[1]
        return Score(loss, matches, torch.as_tensor(targets.numel()), torch.zeros(()))

    def weigh(self, targets: Tensor) -> Tensor:
        """Return for each label the number of rows without it per row with it."""
        positives = targets.sum(0)
        return (len(targets) - positives) / positives.clamp(min=1)

    def tune(self, model: Any, answers: list[Tensor], batches: list[Batch]) -> None:
        """Choose the thresholds on the validation data."""
        targets = torch.cat([targets_of(batch).cpu() for batch in batches])
        model.thresholds.copy_(best_thresholds(row_sigmoid(torch.cat(answers)), targets))

    def meter(self, model: Any, records: Dataset) -> _Sets:  # noqa: ARG002
        """Return a meter of F1 scores; the baseline predicts all labels."""
        return _Sets(self.preprocessor.labels or (), model.thresholds.cpu())

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:
        """Return a list of labels per row and, with the option, the probability of each label."""
        shares = row_sigmoid(output)
        labels = self.preprocessor.answers
        predicted = (shares >= model.thresholds.cpu()).tolist()
        rows = [
            [label for label, is_predicted in zip(labels, row, strict=True) if is_predicted]
            for row in predicted
        ]
        columns: dict[str, list[Any]] = {"prediction": rows}
        if probabilities:
            columns |= {
                f"p_{label}": shares[:, column].tolist() for column, label in enumerate(labels)
            }
        return columns


class _Sets:
    """Counts each label in the targets, in the predictions, and in both."""

    def __init__(self, labels: tuple[str, ...], thresholds: Tensor) -> None:
        self.labels = labels
        self.thresholds = thresholds
        self.true, self.predicted, self.both = (
            torch.zeros(len(labels), dtype=torch.float64) for _ in range(3)
        )
        self.exact = self.count = 0

    def add(self, output: Tensor, batch: Batch) -> None:
        true = targets_of(batch).cpu() > 0
        predicted = row_sigmoid(output).cpu() >= self.thresholds
        self.true += true.sum(0)
        self.predicted += predicted.sum(0)
        self.both += (true & predicted).sum(0)
        self.exact += int((true == predicted).all(-1).sum())
        self.count += len(true)

    def measured(self) -> Measured:
        """Return scores over all labels, and a row for each label."""
        scores = 2 * self.both / (self.true + self.predicted)
        total = float(self.true.sum())
        numbers = {
            "micro_f1": 2 * float(self.both.sum()) / max(total + float(self.predicted.sum()), 1),
            "macro_f1": float(scores.nanmean()),
            "exact_match": self.exact / self.count if self.count else float("nan"),
            "all_labels_micro_f1": 2 * total / max(total + self.count * len(self.labels), 1),
        }
        columns = {
            "f1": scores,
            "precision": self.both / self.predicted,
            "recall": self.both / self.true,
            "threshold": self.thresholds.double(),
        }
        table = [
            {
                "label": label,
                **{key: float(score[column]) for key, score in columns.items()},
                "count": int(count),
            }
            for column, (label, count) in enumerate(
                zip(self.labels, self.true.tolist(), strict=True)
            )
        ]
        return Measured(numbers, self.labels, table=tuple(table))
