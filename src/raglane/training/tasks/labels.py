"""One class, or any number of labels, per sequence or per element."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.preprocess import Preprocessor
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

    def meter(self, model: Any, records: Dataset, top: int = 1) -> _Confusion:  # noqa: ARG002
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


class Tag(Classify):
    """As :class:`Classify`, with an answer for each element."""


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


def best_thresholds(shares: Tensor, targets: Tensor) -> Tensor:
    """For each label the probability from which on it is told, so that its F1 score is highest."""
    count, labels = shares.shape
    if count == 0:
        return torch.full((labels,), 0.5)
    ranked, order = shares.double().sort(dim=0, descending=True, stable=True)
    hits = targets.double().gather(0, order).cumsum(0)
    told = torch.arange(1, count + 1, dtype=torch.float64).unsqueeze(1)
    scores = 2 * hits / (told + hits[-1])
    # Equal probabilities cannot be told apart; below the last there is nothing, and it may itself be 0.
    below = torch.cat([ranked[1:], torch.full((1, labels), -1e-6, dtype=torch.float64)])
    scores = torch.where(below < ranked, scores, -1.0)
    place = scores.argmax(dim=0, keepdim=True)
    middle = ((ranked + below) / 2).gather(0, place).squeeze(0)
    return torch.where(hits[-1] > 0, middle, 0.5).float()


class MultiLabel(Task):
    """Binary cross-entropy of each label; thresholds are chosen on the validation part and kept with the model."""

    metric = "exact_match"
    options: ClassVar[tuple[str, ...]] = ("probabilities",)
    kept: ClassVar[dict[str, float]] = {"thresholds": 0.5}

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of labels."""
        return preprocessor.class_count

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Compare logits ``(M, K)`` with the sets of the batch; a match here is one at thresholds of a half."""
        logits, targets = values_of(output), targets_of(batch)
        weights = self.class_weights.to(logits.device) if training and self.class_weights is not None else None
        loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="sum")
        matches = ((logits.detach() > 0) == (targets > 0)).all(-1).sum() * targets.shape[1]
        return Score(loss, matches, torch.as_tensor(targets.numel()), torch.zeros(()))

    def weigh(self, targets: Tensor) -> Tensor:
        """For each label how many rows lack it for one that has it."""
        there = targets.sum(0)
        return (len(targets) - there) / there.clamp(min=1)

    def tune(self, model: Any, answers: list[Tensor], batches: list[Batch]) -> None:
        """Choose the thresholds."""
        targets = torch.cat([targets_of(batch).cpu() for batch in batches])
        model.thresholds.copy_(best_thresholds(torch.cat(answers).sigmoid(), targets))

    def meter(self, model: Any, records: Dataset) -> _Sets:  # noqa: ARG002
        """F1 scores, and those of telling every label always."""
        return _Sets(self.preprocessor.labels or (), model.thresholds.cpu())

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:
        """For each row a list of labels and, where asked for, the probability of each label."""
        shares, labels = output.sigmoid(), self.preprocessor.labels or ()
        told = (shares >= model.thresholds.cpu()).tolist()
        rows = [[label for label, is_told in zip(labels, row, strict=True) if is_told] for row in told]
        columns: dict[str, list[Any]] = {"prediction": rows}
        if probabilities:
            columns |= {f"p_{label}": shares[:, place].tolist() for place, label in enumerate(labels)}
        return columns


class _Sets:
    """Counts of each label among the targets, among the predictions, and in both."""

    def __init__(self, labels: tuple[str, ...], thresholds: Tensor) -> None:
        self.labels, self.thresholds = labels, thresholds
        self.there, self.told, self.both = (torch.zeros(len(labels), dtype=torch.float64) for _ in range(3))
        self.exact = self.count = 0

    def add(self, output: Tensor, batch: Batch) -> None:
        there = targets_of(batch).cpu() > 0
        told = output.sigmoid().cpu() >= self.thresholds
        self.there += there.sum(0)
        self.told += told.sum(0)
        self.both += (there & told).sum(0)
        self.exact += int((there == told).all(-1).sum())
        self.count += len(there)

    def measured(self) -> Measured:
        """Scores over all labels, and a row for each."""
        scores = 2 * self.both / (self.there + self.told)
        total = float(self.there.sum())
        numbers = {
            "micro_F1": 2 * float(self.both.sum()) / max(total + float(self.told.sum()), 1),
            "macro_F1": float(scores.nanmean()),
            "exact_match": self.exact / self.count if self.count else float("nan"),
            "all_labels_micro_F1": 2 * total / max(total + self.count * len(self.labels), 1),
        }
        parts = {
            "F1": scores,
            "precision": self.both / self.told,
            "recall": self.both / self.there,
            "threshold": self.thresholds.double(),
        }
        table = [
            {"label": label, **{key: float(part[place]) for key, part in parts.items()}, "count": int(count)}
            for place, (label, count) in enumerate(zip(self.labels, self.there.tolist(), strict=True))
        ]
        return Measured(numbers, self.labels, table=tuple(table))
