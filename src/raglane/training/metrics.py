"""How good predictions of classes are: accuracy, macro-F1, the confusion matrix."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accuracy", "confusion_matrix", "f1_scores", "macro_f1"]


def confusion_matrix(targets: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """How often each class was predicted for each.

    Example:
        >>> confusion_matrix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2).tolist()
        [[1, 1], [0, 1]]
    """
    counts = torch.bincount(targets * classes + predictions, minlength=classes * classes)
    return counts.view(classes, classes)


def accuracy(matrix: Tensor) -> float:
    """The share of right predictions; NaN where there are none at all.

    Example:
        >>> accuracy(torch.tensor([[1, 1], [0, 2]]))
        0.75
    """
    total = int(matrix.sum())
    return int(matrix.trace()) / total if total else float("nan")


def f1_scores(matrix: Tensor) -> Tensor:
    """The F1 score of each class, ``2 right / (true + predicted)``; NaN for a class that never occurs.

    Example:
        >>> f1_scores(torch.tensor([[1, 1], [0, 2]])).tolist()
        [0.6666666666666666, 0.8]
    """
    counts = matrix.double()
    return 2 * counts.diagonal() / (counts.sum(0) + counts.sum(1))


def macro_f1(matrix: Tensor) -> float:
    """The mean F1 score of the classes that occur in the targets or the predictions.

    Example:
        >>> round(macro_f1(torch.tensor([[1, 1, 0], [0, 2, 0], [0, 0, 0]])), 4)
        0.7333
    """
    return float(f1_scores(matrix).nanmean())
