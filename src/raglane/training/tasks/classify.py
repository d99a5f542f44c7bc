"""One class per sequence."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.data.preprocess import Preprocessor
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.metrics import accuracy, confusion_matrix, macro_f1
from raglane.training.tasks.base import Measured, Score, Task, targets_of, values_of

__all__ = ["Classify"]


class Classify(Task):
    """Cross-entropy and accuracy.

    Example:
        >>> from raglane.training.settings import ModelSettings
        >>> task = Classify(Preprocessor("classify", labels=("a", "b")), ModelSettings("classify"))
        >>> batch = Batch(Ragged([torch.ones(2, 1)]), torch.tensor([1]), torch.tensor([0]))
        >>> float(task.score(torch.tensor([[0.0, 2.0]]), batch).metric)
        1.0
    """

    metric = "accuracy"
    options: ClassVar[tuple[str, ...]] = ("probabilities",)

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of classes."""
        return preprocessor.class_count

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Compare logits ``(B or N, K)`` with the classes of the batch."""
        logits, targets = values_of(output), targets_of(batch)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        right = (logits.detach().argmax(-1) == targets).sum()
        return Score(loss, right, torch.as_tensor(targets.shape[0]), torch.zeros(()))

    def meter(self, model: Any) -> _Confusion:  # noqa: ARG002
        """The confusion matrix, and what follows from it."""
        return _Confusion(self.preprocessor.labels or ())

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """The likeliest class, its probability and, where asked for, that of each."""
        shares, labels = output.softmax(-1), self.preprocessor.labels or ()
        best, places = shares.max(dim=1) if len(shares) else (shares.new_zeros(0), torch.zeros(0, dtype=torch.int64))
        columns: dict[str, list[Any]] = {
            "prediction": [labels[place] for place in places.tolist()],
            "probability": best.tolist(),
        }
        if probabilities:
            columns |= {f"p_{label}": shares[:, place].tolist() for place, label in enumerate(labels)}
        return columns


class _Confusion:
    """How often each class was predicted for each."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.matrix = torch.zeros((len(labels), len(labels)), dtype=torch.int64)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Count a batch in."""
        self.matrix += confusion_matrix(targets_of(batch).cpu(), output.argmax(-1).cpu(), len(self.labels))

    def measured(self) -> Measured:
        """Accuracy and macro-F1."""
        numbers = {"accuracy": accuracy(self.matrix), "macro_f1": macro_f1(self.matrix)}
        return Measured(numbers, self.labels, self.matrix)
