"""The interface of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from raglane.data.dataset import Dataset
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import ArgumentError
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.settings import ModelSettings


@dataclass(frozen=True)
class Score:
    """Sums over the targets of a batch, each a 0-d tensor."""

    # With a gradient.
    loss: Tensor
    metric: Tensor
    # The number of targets.
    count: Tensor
    # The metric of the baseline; 0 without one.
    baseline: Tensor


@dataclass(frozen=True)
class Measured:
    """The results of an evaluation, except the loss."""

    # Metrics and baselines by name, the most important one first.
    numbers: dict[str, float]
    # The classes or labels of ``confusion`` or ``table``.
    labels: tuple[str, ...] = ()
    # ``(K, K)`` int64, with a row per true class.
    confusion: Tensor | None = None
    # Rows with the same keys, the first of which is a name: per label, per target or per step.
    table: tuple[dict[str, Any], ...] = ()
    # Pairs of true and predicted numbers for a picture.
    points: tuple[tuple[float, float], ...] = field(default=(), repr=False)


class Meter(Protocol):
    """Accumulates measurements over batches."""

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add a batch and the outputs of the model ``(B or N, K)`` for it, on one device."""

    def measured(self) -> Measured:
        """Return the measurements of all batches."""


class Task(ABC):
    """Output size, loss, metrics and predictions of a task. A new task is a subclass, registered in
    ``CLASSES``.

    Losses and metrics are computed of flat values, so each element counts once, and padding does
    not exist.

    Args:
        preprocessor: classes, scales and names, fitted to the training data.
        settings: the :class:`Settings` of a training, or the :class:`ModelSettings` of a stored
            model.

    Attributes:
        metric: the name of the metric in the history.
        baseline: the name of the rule that the metric is compared with, or None.
        options: the options of predictions that exist for the task: probabilities, top, horizon,
            beam_size, n_best.
        kept: buffers of the model with an entry per output, by name, with their initial value.
        class_weights: ``(K,)``, the weight of each class in the training loss, or None.
        model: the model, for tasks whose loss depends on its decoder.

    Raises:
        DataError: the data does not fit the task.

    Example:
        >>> from raglane.training.tasks import CLASSES
        >>> CLASSES["multilabel"].options
        ('probabilities',)
    """

    options: ClassVar[tuple[str, ...]] = ()
    kept: ClassVar[dict[str, float]] = {}

    def __init__(self, preprocessor: Preprocessor, settings: ModelSettings) -> None:
        self.preprocessor = preprocessor
        self.settings = settings
        self.metric = settings.terms.metric
        self.baseline = settings.terms.baseline
        self.class_weights: Tensor | None = None
        self.model: Any = None

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """Return the number of outputs of the head, by default one per class or label."""
        return preprocessor.class_count

    @abstractmethod
    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Return the loss and metric of a batch, as sums over its targets.

        Args:
            output: of the model.
            batch: a batch with targets.
            training: True for the training loss, with class weights and label smoothing.
        """

    def weigh(self, targets: Tensor) -> Tensor:
        """Return balanced class weights ``(K,)`` for the targets of the training data."""
        raise NotImplementedError

    @abstractmethod
    def meter(self, model: Any, records: Dataset) -> Meter:
        """Return an empty meter for an evaluation on ``records``.

        A task with the option ``top`` has a parameter ``top`` here and in :meth:`columns`, the
        number of classes.
        """

    @abstractmethod
    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:
        """Return the columns of a table of predictions.

        Args:
            output: outputs of :meth:`answer` on the CPU, with a row per sequence or element.
            model: the model that computed them.
            probabilities: True for a column per class.
        """

    @property
    def is_per_element(self) -> bool:
        """True if each element has a prediction; a language model or forecast predicts only after
        the end.
        """
        return bool(self.preprocessor.per_element) and "horizon" not in self.options

    def answer(self, model: Any, inputs: Ragged, horizon: int) -> Tensor:  # noqa: ARG002
        """Return the outputs for a batch, for :meth:`columns`.

        Args:
            model: a :class:`SequenceModel`.
            inputs: whole sequences.
            horizon: the number of elements to forecast, for tasks with this option.
        """
        return values_of(model(inputs))

    def predict(
        self,
        model: Any,
        batches: Iterable[Ragged],
        *,
        horizon: int = 1,
        probabilities: bool = False,
        **options: Any,
    ) -> dict[str, list[Any]]:
        """Return the columns of a table of predictions for batches of whole sequences.

        Args:
            model: a :class:`SequenceModel`.
            batches: whole sequences, on the device of the model.
            horizon: the number of elements to forecast, for tasks with this option.
            probabilities: True for a column per class.
            **options: the other options that the task has.
        """
        outputs = [self.answer(model, inputs, horizon).cpu() for inputs in batches]
        answers = torch.cat(outputs) if outputs else torch.zeros(0, model.config.output_size)
        return self.columns(answers, model, probabilities=probabilities, **options)

    @staticmethod
    def notes(training: Dataset, validation: Dataset | None, settings: ModelSettings) -> list[str]:  # noqa: ARG004
        """Return lines for the user about the targets of a training."""
        return []

    def ahead(
        self,
        model: Any,  # noqa: ARG002
        batches: Iterable[Ragged],  # noqa: ARG002
        horizon: int,
        origins: int = 1,  # noqa: ARG002
    ) -> tuple[dict[str, Any], ...]:
        """Return the errors per step of forecasts of the last ``horizon`` elements of each
        sequence, as table rows.

        Args:
            model: a :class:`SequenceModel`.
            batches: whole sequences, on the device of the model.
            horizon: the number of elements to forecast.
            origins: the number of forecasts of each sequence; each begins ``horizon`` elements
                before the next.

        Raises:
            ArgumentError: the task does not forecast.
            DataError: no sequence is long enough.
        """
        rule = "left out in an evaluation except for the task forecast"
        raise ArgumentError("horizon", f"{horizon}", rule, "leave it out")

    def tune(self, model: Any, answers: list[Tensor], batches: list[Batch]) -> None:  # noqa: B027
        """Set the buffers of the model that ``kept`` names by its outputs for the validation data.

        Args:
            model: the model.
            answers: its outputs ``(M, K)`` for each batch, on the CPU.
            batches: the batches, with targets.
        """

    def check(self, records: Dataset) -> None:  # noqa: B027
        """Raise a :class:`~raglane.errors.DataError` if the loss cannot be computed for some
        data.
        """


def values_of(output: Tensor | Ragged) -> Tensor:
    """Return the outputs of a model as a tensor, with a row per sequence or element."""
    return output.values if isinstance(output, Ragged) else output
