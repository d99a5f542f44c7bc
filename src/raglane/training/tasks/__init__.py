"""The tasks of models: a class for each, and a line in ``TASKS``.

A task defines the output size, loss, metrics, baseline and table of predictions. Its requirements for the data are in
:data:`raglane.data.records.TASKS`.
"""

from __future__ import annotations

from dataclasses import replace

from raglane._utils.messages import argument, message, quote
from raglane.data.dataset import Dataset
from raglane.data.encoders import are_whole
from raglane.data.preprocess import Preprocessor
from raglane.errors import DataError
from raglane.training.settings import ModelSettings, Settings
from raglane.training.tasks.base import Measured, Meter, Score, Task
from raglane.training.tasks.labels import Classify, MultiLabel, Tag
from raglane.training.tasks.language import Language
from raglane.training.tasks.numbers import Forecast, Regress

__all__ = ["TASKS", "Measured", "Meter", "Score", "Task", "fit", "make_task", "settle"]

TASKS: dict[str, type[Task]] = {
    "classify": Classify,
    "tag": Tag,
    "regress": Regress,
    "multilabel": MultiLabel,
    "forecast": Forecast,
    "language": Language,
}
"""The tasks by name, as :data:`raglane.training.settings.TASKS` lists them."""


def settle(settings: Settings, training: Dataset) -> tuple[Settings, str | None]:
    """Choose the loss bce for a forecast of zeros and ones; return the settings, and a line about this or None."""
    if settings.task != "forecast" or settings.loss is not None or not _is_binary(training):
        return settings, None
    why = f"all channels are 0 or 1; for squared errors: {argument('loss', 'mse')}"
    return replace(settings, loss="bce"), f"loss: bce, because {why}"


def _is_binary(training: Dataset) -> bool:
    """Return True if all channels are 0 or 1, and not all constant."""
    channels = training.statistics.channels.values()
    are_binary = all(channel.is_binary and not channel.missing for channel in channels)
    return are_binary and any(channel.high > channel.low for channel in channels)


def fit(training: Dataset, settings: Settings) -> Preprocessor:
    """Return the preprocessor fitted to the training data, without scaling for the loss bce."""
    is_binary = settings.task == "forecast" and settings.loss_name == "bce"
    fitted = Preprocessor.fit(training, task=settings.task, missing=settings.missing, standardize=not is_binary)
    if fitted.task in ("classify", "tag") and len(fitted.labels or ()) == 1:
        got, rule = f"only the class {quote((fitted.labels or ())[0])}", "data of at least two classes"
        fix = "add data of another class, or check which column contains the labels"
        raise DataError(message(str(training.source), got, rule, fix))
    is_whole = training.label_kinds == ("whole numbers",) and are_whole(fitted.labels or ())
    return replace(fitted, whole_labels=is_whole)


def make_task(preprocessor: Preprocessor, settings: ModelSettings) -> Task:
    """Return the task of a model."""
    return TASKS[settings.task](preprocessor, settings)
