"""The tasks of models: a class for each, and a line in ``CLASSES``.

A class defines the output size, loss, measurements and table of predictions. The other facts of a
task are in :data:`raglane.tasks.TASKS`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from raglane._utils.messages import argument, count_of, quote
from raglane.data.dataset import Dataset
from raglane.data.prepare.encoders import are_whole
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import DataError
from raglane.training.batches import steps_per_epoch
from raglane.training.settings import ModelSettings, Settings
from raglane.training.tasks import season
from raglane.training.tasks.base import Measured, Meter, Score, Task
from raglane.training.tasks.labels import Classify, MultiLabel
from raglane.training.tasks.language import Language
from raglane.training.tasks.numbers import Forecast, Regress
from raglane.training.tasks.tags import Tag
from raglane.training.tasks.transcribe import Transcribe

__all__ = ["CLASSES", "Measured", "Meter", "Score", "Task", "fit", "make_task", "settle"]

CLASSES: dict[str, type[Task]] = {
    "classify": Classify,
    "tag": Tag,
    "regress": Regress,
    "multilabel": MultiLabel,
    "forecast": Forecast,
    "language": Language,
    "transcribe": Transcribe,
}
"""The class of each task."""


# Of a training whose length is left to the data: optimizer steps, epochs at most and at least, and
# the steps without improvement after which it stops.
STEPS = 2000
MOST = 300
PATIENT = 500
FEWEST = dict.fromkeys(CLASSES, 30) | {"classify": 10, "tag": 10}
# The optimizer steps of an epoch for which the batches of a few series are made smaller.
FEWEST_STEPS = 8
# The fewest and most elements of a chunk of truncated backpropagation through one series.
SHORTEST_CHUNK = 20
LONGEST_CHUNK = 100
# Differences have twice the noise of elements, which a forecast of several steps accumulates.
SEASONAL_DROPOUT = 0.3


def settle(
    settings: Settings,
    training: Dataset,
    validation: Dataset | None = None,
    chosen: Container[str] = ("batch_size", "dropout"),
) -> tuple[Settings, list[str]]:
    """Choose the loss, season, chunks, epochs and learning rate schedule that were left to the data,
    and the batch size and dropout unless their names are among the chosen ones; return lines about
    them.

    With ``epochs`` the schedule is constant, so that a run resumed with more epochs has the bits of
    a longer one.
    """
    notes = []
    if settings.task == "forecast" and settings.loss is None and _is_binary(training):
        settings = replace(settings, loss="bce")
        mse = argument("loss", "mse")
        notes.append(f"loss: bce, because all channels are 0 or 1; for squared errors: {mse}")
    settings, lines = _with_season(settings, training, validation, chosen)
    notes += lines
    if settings.bptt_steps is None and _is_one_long_series(settings, training):
        chunk = min(max(int(training.lengths[0]) // 10, SHORTEST_CHUNK), LONGEST_CHUNK)
        settings = replace(settings, bptt_steps=chunk)
        chooses = f"{argument('bptt_steps')} chooses"
        notes.append(f"chunks of {chunk} elements, because there is one long series; {chooses}")
    if "batch_size" not in chosen and _has_few_steps(settings, training):
        settings = replace(settings, batch_size=-(-len(training) // FEWEST_STEPS))
        series = count_of(settings.batch_size, "sequence")
        chooses = f"{argument('batch_size')} chooses"
        notes.append(f"batches of {series}, because there are only {len(training)}; {chooses}")
    schedule = settings.lr_schedule or ("cosine" if settings.epochs is None else "constant")
    if settings.epochs is None:
        steps = steps_per_epoch(training, settings)
        epochs = min(max(-(-STEPS // steps), FEWEST[settings.task]), MOST)
        wait = max(-(-PATIENT // steps), 5)
        patience = settings.patience or (wait if wait < epochs else None)
        settings = replace(settings, epochs=epochs, patience=patience)
        until = f", until {patience} without improvement" if patience else ""
        length = f"{epochs:,} of {count_of(steps, 'step')}{until}"
        notes.append(f"epochs: {length}; learning rate {schedule}; {argument('epochs')} chooses")
    return replace(settings, lr_schedule=schedule), notes


def _with_season(
    settings: Settings,
    training: Dataset,
    validation: Dataset | None,
    chosen: Container[str],
) -> tuple[Settings, list[str]]:
    """Choose the season that was left to the data, and the dropout of a model of differences."""
    notes = []
    if settings.season is None:
        settings, note = season.settle(settings, training, validation)
        notes += [note] if note else []
    if settings.has_season and "dropout" not in chosen:
        settings = replace(settings, dropout=SEASONAL_DROPOUT)
        chooses = f"{argument('dropout')} chooses"
        notes.append(f"dropout: {SEASONAL_DROPOUT}, because of the season; {chooses}")
    return settings, notes


def _is_one_long_series(settings: Settings, training: Dataset) -> bool:
    """Return True if the data is one series to forecast that can be cut into chunks."""
    if settings.task != "forecast" or len(training) != 1 or settings.processes > 1:
        return False
    if settings.bucket or settings.batch_elements is not None:
        return False
    return settings.initial_state != "lengths" and int(training.lengths[0]) >= 2 * SHORTEST_CHUNK


def _has_few_steps(settings: Settings, training: Dataset) -> bool:
    """Return True if an epoch of several series to forecast has few optimizer steps."""
    if settings.task != "forecast" or settings.loss == "bce" or settings.processes > 1:
        return False
    if settings.batch_elements is not None or settings.bptt_steps is not None:
        return False
    return 1 < len(training) < FEWEST_STEPS * settings.batch_size


def _is_binary(training: Dataset) -> bool:
    """Return True if all channels are 0 or 1, and not all constant."""
    channels = training.statistics.channels.values()
    are_binary = all(channel.is_binary and not channel.missing for channel in channels)
    return are_binary and any(channel.high > channel.low for channel in channels)


def fit(training: Dataset, settings: Settings) -> Preprocessor:
    """Return the preprocessor fitted to the training data, without scaling for the loss bce."""
    is_binary = settings.task == "forecast" and settings.loss_name == "bce"
    fitted = Preprocessor.fit(
        training, task=settings.task, missing=settings.missing, standardize=not is_binary
    )
    if fitted.task in ("classify", "tag") and len(fitted.labels or ()) == 1:
        got = f"only the class {quote((fitted.labels or ())[0])}"
        rule = "data of at least two classes"
        fix = "add data of another class, or check which column contains the labels"
        raise DataError(str(training.source), got, rule, fix)
    if settings.season:
        fitted = season.scaled(fitted, settings.season, training)
    is_whole = training.label_kinds == ("whole numbers",) and fitted.label_split is None
    is_whole = is_whole and are_whole(fitted.labels or ())
    return replace(fitted, whole_labels=is_whole)


def make_task(preprocessor: Preprocessor, settings: ModelSettings, model: Any = None) -> Task:
    """Return the task of a model."""
    task = CLASSES[settings.task](preprocessor, settings)
    task.model = model
    return task
