"""A training run from records to a folder: fit the preprocessing, build the model, train, or go on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raglane.data.records import Records
from raglane.data.statistics import Counted
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, DataError, DivergedError, argument, message, require
from raglane.files import write_file, write_folder
from raglane.reading import as_path
from raglane.training.checkpoint import check_format, load_weights
from raglane.training.folder import BEST, CONFIG, CURVES, DESCRIPTION, LAST, at_work, check_folder, find, replacing
from raglane.training.history import curves_csv
from raglane.training.prepared import Prepared, prepare
from raglane.training.settings import Settings
from raglane.training.state import TrainingState, check_optimizer, load_state
from raglane.training.stored import read_json, reading, to_json
from raglane.training.tasks import settle

if TYPE_CHECKING:
    from raglane.training.loop import Watcher

__all__ = [
    "RunDescription",
    "TrainingResult",
    "fingerprint",
    "load_description",
    "refuse_diverged",
    "train",
]

FORMAT = "raglane-run"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class RunDescription:
    """What a run was started with, kept in ``run.json`` so that it can go on.

    Args:
        settings: of the training.
        data: where the data came from; JSON values, as the caller likes.
        fingerprint: of the training and validation part.
        diverged: what was seen of a run that ran away; None of others.

    Example:
        >>> RunDescription(Settings()).settings.layer
        'gru'
    """

    settings: Settings
    data: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    diverged: str | None = None

    def write(self, folder: Path) -> None:
        """Write ``run.json`` in the folder of a run."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "settings": self.settings.to_config(),
            "data": dict(self.data),
            "fingerprint": self.fingerprint,
            "diverged": self.diverged,
        }
        write_file(folder / DESCRIPTION, to_json(content))


@dataclass(frozen=True)
class TrainingResult:
    """What came out of a run.

    Args:
        folder: of the run; None where it was trained in memory.
        metric: the name of the metric in the history.
        state: history, best epoch and its loss.
        stopped_by: the number of the signal that ended it, of Ctrl-C or SIGTERM; it is saved and can go on. None if
            it ran to its end.
        was_complete: whether it was resumed with no epoch left to run.
        best: of a run without a folder, the files of its best model, for
            ``raglane.training.checkpoint.read_model``; {} before its first epoch is done.
    """

    folder: Path | None
    metric: str
    state: TrainingState
    stopped_by: int | None = None
    was_complete: bool = False
    best: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it."""
        return self.stopped_by is not None


def load_description(folder: str | os.PathLike[str]) -> RunDescription:
    """Read what a run was started with.

    Args:
        folder: of the run.

    Raises:
        CheckpointError: ``run.json`` is missing, damaged or of a newer format.
    """
    path = find(as_path(folder), DESCRIPTION)
    config = read_json(path)
    check_format(path, config, FORMAT, FORMAT_VERSION)
    with reading(path):
        chosen = config["settings"]
        if config["format_version"] == 1 and isinstance(chosen, dict):
            # What the first version did, where its settings do not say.
            chosen = {"unknown_rate": 0.0, **chosen}
        settings, data, marks = Settings.from_config(chosen), config["data"], config["fingerprint"]
        diverged = config.get("diverged")
        if not isinstance(data, dict) or not isinstance(marks, str) or not isinstance(diverged, str | None):
            raise ValueError("data that is not an object, or a fingerprint or diverged that is not a text")
    return RunDescription(settings, data, marks, diverged)


def refuse_diverged(description: RunDescription, folder: Path) -> None:
    """Refuse to go on with a run that ran away.

    Args:
        description: of the run.
        folder: of the run, for the message.

    Raises:
        DivergedError: the run ran away.
    """
    if description.diverged is not None:
        got = f"{str(folder)!r}, a run that diverged: {description.diverged}"
        tamer = f"a smaller {argument('lr')} or with {argument('clip', 1)}"
        fix = f"train anew with {tamer}, and {argument('overwrite', True)}; the best model until then can be used"
        raise DivergedError(message("resume", got, "to go on would do the same again", fix), description.diverged)


def fingerprint(*parts: Records | Counted | None) -> str:
    """A short text that differs for different sequences, labels or order.

    Args:
        parts: of the data.

    Example:
        >>> import numpy as np
        >>> from raglane.data.records import Records, offsets_of
        >>> words = Records(np.array(["a", "b"], dtype=object), offsets_of([2]))
        >>> fingerprint(words) == fingerprint(words), fingerprint(words) == fingerprint(words, words)
        (True, False)
    """
    digest = hashlib.sha256()
    for records in parts:
        if records is None:
            continue
        if isinstance(records, Counted):
            digest.update(records.fingerprint.encode())
            continue
        digest.update(np.ascontiguousarray(records.offsets).tobytes())
        for words in (records.labels, records.tags, records.values if records.is_tokens else None):
            if words is not None:
                # repr keeps ("a b",) and ("a", "b") apart.
                digest.update(repr(list(words)).encode())
        if records.targets is not None:
            digest.update(repr(records.targets.values.tolist()).encode())
        if not records.is_tokens:
            digest.update(np.ascontiguousarray(records.values).tobytes())
        for feature in records.features:
            digest.update(repr((feature.name, feature.kind, feature.values.tolist())).encode())
    return digest.hexdigest()[:16]


def train(
    settings: Settings,
    training: Records | Dataset,
    validation: Records | Dataset | None,
    folder: str | os.PathLike[str] | None,
    *,
    data: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    test: Records | None = None,
    watcher: Watcher | None = None,
    config: bytes = b"",
) -> TrainingResult:
    """Train a model and save it, or go on with a run that was stopped.

    Args:
        settings: every choice.
        training: the sequences to train on; of a :class:`~raglane.data.Dataset` only batches are in memory.
        validation: the sequences that decide which epoch is best; None lets the training loss decide.
        folder: of the run; made where it is missing. None keeps the best model in memory and writes nothing.
        data: where the data came from, for :func:`load_description`; JSON values.
        columns: which columns of a file hold what, kept with the model.
        resume: go on from ``folder/last``, to the same result as a run that was never stopped. For a run whose
            epochs are done, finish what its process may not have come to.
        overwrite: replace a run that is in ``folder``, once the new one has a checkpoint.
        test: sequences that the model is to be measured on later; they are only checked, before the first epoch.
        watcher: told of batches and epochs.
        config: the file that repeats the run, which is kept in its folder; none where it is empty.

    Returns:
        The history, and whether Ctrl-C or SIGTERM ended it. A run that fails in its first epoch leaves nothing, and the
        run that it was to replace as it was.

    Raises:
        ArgumentError: a setting or the folder breaks a rule.
        DivergedError: the loss ran away, now or before; the best model until then is kept.
        DataError: the data cannot be used, or is not what the run was started with.
        CheckpointError: the run cannot be read.
        MissingExtraError: Lightning or safetensors is not installed.
        OSError: a file cannot be written.
    """
    require("lightning.pytorch", "train")
    require("safetensors", "train")
    if folder is None:
        if resume:
            fix = f"give {argument('folder')}"
            raise ArgumentError(message("folder", "None", "to go on needs the folder of a run", fix))
        prepared = prepare(settings, training, validation, test, columns or {})
        return _run(prepared, RunDescription(settings), None, _Start(), watcher)
    folder, rules = as_path(folder), {"resume": resume, "overwrite": overwrite}
    check_folder(folder, **rules)
    with at_work(folder):
        # Again, now that nobody else can change it.
        check_folder(folder, **rules)
        if resume:
            settings = replace(settings, loss=settings.loss or load_description(folder).settings.loss)
        else:
            settings, _ = settle(settings, training)
        prepared = prepare(settings, training, validation, test, columns or {})
        description = RunDescription(settings, dict(data or {}), fingerprint(training, validation))
        if resume:
            refuse_diverged(load_description(folder), folder)
            start = _stored_start(prepared, settings, folder, description.fingerprint)
            return _run(prepared, description, folder, start, watcher, config)
        with replacing(folder):
            return _run(prepared, description, folder, _Start(), watcher, config)


@dataclass(frozen=True)
class _Start:
    """Where a run begins: by default at its beginning."""

    state: TrainingState = field(default_factory=TrainingState)
    optimizer: dict[str, Any] | None = None
    random: dict[str, torch.Tensor] | None = None


def _stored_start(prepared: Prepared, settings: Settings, folder: Path, marks: str) -> _Start:
    """Where the run in a folder stands: its last checkpoint, put in the model, and its best model brought up to it."""
    from raglane.training.loop import make_optimizer

    _check_same_data(folder, marks)
    last = folder / LAST
    if not last.exists():
        # A run that was killed before its first checkpoint has nothing to go on from: it starts again.
        return _Start()
    state, optimizer, random = load_state(last)
    load_weights(prepared.model, last)
    check_optimizer(optimizer, make_optimizer(prepared.model, settings), last)
    with reading(last):
        order = prepared.order
        order.set_epoch(state.epoch)
        # A run of an earlier version has no order, but may have batches.
        order.load_state_dict(state.order or order.state_dict(state.batch))
        if state.batch >= max(len(order), 1):
            raise ValueError(f"{state.batch} batches of an epoch that has {len(order)}")
    if settings.epochs < state.epoch:
        done = f"{settings.epochs}, and {state.epoch} are done"
        raise ArgumentError(
            message("epochs", done, "what is done stays done", f"pass {argument('epochs', state.epoch + 10)}, say")
        )
    if state.best_epoch == state.epoch > 0 and state.batch == 0:
        # The process may have been killed between the two.
        write_folder(folder / BEST, prepared.files())
    return _Start(state, optimizer, random)


def _run(
    prepared: Prepared,
    description: RunDescription,
    folder: Path | None,
    start: _Start,
    watcher: Watcher | None,
    config: bytes = b"",
) -> TrainingResult:
    """Train from where a run stands to its end, or to where a signal stops it."""
    from raglane.training.loop import Interrupted, run_epochs

    settings, state, stopped_by = description.settings, start.state, None
    best: dict[str, bytes] = {}
    if folder is not None:
        description.write(folder)
        if config:
            write_file(folder / CONFIG, config)
    was_complete = _is_complete(state, settings)
    if was_complete and folder is not None:
        write_file(folder / CURVES, curves_csv(state.history))
    else:
        try:
            best = run_epochs(
                prepared.model,
                prepared.task,
                settings,
                prepared.training,
                prepared.order,
                prepared.validation,
                state=state,
                folder=folder,
                device=prepared.device,
                model_files=prepared.files,
                optimizer_state=start.optimizer,
                random=start.random,
                watcher=watcher,
            )
        except Interrupted as stop:
            stopped_by = stop.signal
        except DivergedError as error:
            if folder is not None and (folder / LAST).exists():
                replace(description, diverged=error.what).write(folder)
            raise
    return TrainingResult(folder, prepared.task.metric, state, stopped_by, was_complete, best)


def _is_complete(state: TrainingState, settings: Settings) -> bool:
    """Whether nothing is left to train; what came after the last epoch may still have been cut off."""
    is_patient = settings.patience is None or state.waited < settings.patience or state.batch > 0
    return state.epoch >= settings.epochs or not is_patient


def _check_same_data(folder: Path, marks: str) -> None:
    if load_description(folder).fingerprint != marks:
        raise DataError(
            message(
                "resume",
                "other data than the run was started with",
                "a run goes on with the same sequences, labels and order",
                f"restore the data, or start anew with {argument('overwrite', True)}",
            )
        )
