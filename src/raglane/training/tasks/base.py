"""The interface of a task, and the sums that it computes of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from raglane._utils.messages import message
from raglane.data.dataset import Dataset
from raglane.data.preprocess import Preprocessor
from raglane.errors import ArgumentError
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.settings import ModelSettings


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
        """The mean loss, which the optimizer makes smaller; 0 for a batch of empty sequences."""
        return self.loss / self.count.clamp(min=1)


@dataclass(frozen=True)
class Measured:
    """The measurements of a model beside its loss.

    Args:
        numbers: the metrics by name, the first one the most telling; baselines among them.
        labels: the classes or labels that ``confusion`` or ``table`` speak of.
        confusion: ``(K, K)`` int64, row the true class and column the predicted one; None where there are no classes.
        table: rows of numbers, each with the same keys, the first of them a name: per label, per target, per step.
        points: for a picture, pairs of true and predicted numbers; () where there are none.
    """

    numbers: dict[str, float]
    labels: tuple[str, ...] = ()
    confusion: Tensor | None = None
    table: tuple[dict[str, Any], ...] = ()
    points: tuple[tuple[float, float], ...] = field(default=(), repr=False)


class Meter(Protocol):
    """Adds up the answers of a model, batch by batch."""

    def add(self, output: Tensor, batch: Batch) -> None:
        """Count a batch in: the model's answers ``(B or N, K)``, and what they should be, on one device."""

    def measured(self) -> Measured:
        """The measurements of all batches so far."""


class Task(ABC):
    """All that sets one task apart. Losses and metrics are taken over flat values, so each real element counts once.

    Args:
        preprocessor: what was learned of the training part: classes, scales, names.
        settings: of the model or, with what only training uses, of the training.

    Attributes:
        metric: the name of what the history keeps beside the loss.
        baseline: the name of the simple rule that the metric is compared with; None where there is none.
        options: which options of a prediction go with the task.
        kept: what a model keeps per number of its head beside weights, by name, and what it begins with.
        class_weights: ``(K,)``, what the loss of each class counts in training; None where all count the same.
    """

    metric: str
    baseline: str | None = None
    options: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[dict[str, float]] = {}

    def __init__(self, preprocessor: Preprocessor, settings: ModelSettings) -> None:
        self.preprocessor = preprocessor
        self.settings = settings
        self.metric, self.baseline = self.terms(settings)
        self.class_weights: Tensor | None = None

    @classmethod
    def terms(cls, settings: ModelSettings) -> tuple[str, str | None]:  # noqa: ARG003
        """The names of the metric and of the baseline with some settings."""
        return cls.metric, cls.baseline

    @staticmethod
    @abstractmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """The number of outputs of the head."""

    @abstractmethod
    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Compare a model's answers with the targets of its batch.

        Args:
            output: of the model.
            batch: with targets.
            training: whether the loss is what the optimizer sees; class weights and smoothing change that one only.
        """

    def weigh(self, targets: Tensor) -> Tensor:
        """The weights of classes that make the rare count as much as the frequent.

        Args:
            targets: of the training part.
        """
        raise NotImplementedError

    @abstractmethod
    def meter(self, model: Any, records: Dataset) -> Meter:
        """An empty sum of all that an evaluation of a model on some records says.

        A task with ``top`` among its options takes it here and in :meth:`columns`: how many classes are told.
        """

    @abstractmethod
    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:
        """The columns of a table of predictions, one entry per row of the answers.

        Args:
            output: ``(rows, ...)`` on the CPU: one row per sequence or per element.
            model: that gave them.
            probabilities: whether each class has a column.
        """

    @property
    def is_per_element(self) -> bool:
        """True where each element has a prediction; a text or a forecast goes on from its end."""
        return bool(self.preprocessor.per_element) and "horizon" not in self.options

    def answer(self, model: Any, inputs: Ragged, horizon: int) -> Tensor:  # noqa: ARG002
        """The answers to one batch, as :meth:`columns` takes them.

        Args:
            model: of :class:`~raglane.training.model.SequenceModel`.
            inputs: whole sequences.
            horizon: how many elements to forecast, for the tasks that do.
        """
        return values_of(model(inputs))

    def ahead(self, model: Any, batches: Iterable[Ragged], horizon: int) -> tuple[dict[str, Any], ...]:
        """Rows of a table: how good forecasts are, step by step, of the last elements of each sequence.

        Args:
            model: of :class:`~raglane.training.model.SequenceModel`.
            batches: whole sequences, on the model's device.
            horizon: how many elements to hold back and forecast.

        Raises:
            DataError: no sequence is long enough.
        """
        raise NotImplementedError

    def tune(self, model: Any, answers: list[Tensor], batches: list[Batch]) -> None:  # noqa: B027
        """Set what the model keeps beside its weights, by its answers to the validation part.

        Args:
            model: whose buffers are written; only where the task has some in ``kept``.
            answers: ``(M, K)`` for each batch, on the CPU.
            batches: with targets.
        """

    def check(self, records: Dataset) -> None:  # noqa: B027
        """Raise a :class:`~raglane.errors.DataError` where the loss cannot be taken on some data."""


def values_of(output: Tensor | Ragged) -> Tensor:
    """The rows of a model's answers, one per sequence or per element."""
    return output.values if isinstance(output, Ragged) else output


def targets_of(batch: Batch) -> Tensor:
    """The targets of a batch."""
    if batch.targets is None:
        rule, fix = "a batch with targets", "pass data with labels"
        raise ArgumentError(message("batch", "sequences without targets", rule, fix))
    return batch.targets
