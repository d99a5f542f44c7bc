"""How good predictions of classes are: accuracy, macro-F1, the confusion matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def confusion_matrix(targets: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """How often each class was predicted for each."""
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
