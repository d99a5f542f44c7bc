"""A training from records to a folder: checked, settled, locked, and then done in one process or several."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from raglane._utils.files import as_path
from raglane._utils.messages import argument, current_flags, flags, message, require
from raglane.data.dataset import Dataset
from raglane.data.formats.pieces import skipped_lines
from raglane.data.records import Skipped
from raglane.errors import DataError, LostRankError
from raglane.training.folder import CONFIG, SKIPPED, claimed, replacing, to_resume
from raglane.training.job import (
    Job,
    RunDescription,
    TrainingResult,
    fingerprint,
    identity,
    load_description,
    refuse_diverged,
)
from raglane.training.machine import check_machine
from raglane.training.own_cell import check_named, check_place
from raglane.training.ranks import Ranks, lost, ranks_of
from raglane.training.settings import Settings
from raglane.training.state import Watcher
from raglane.training.tasks import settle
from raglane.training.trainer import Trainer

__all__ = ["RunDescription", "TrainingResult", "left_out", "load_description", "train"]


def train(
    settings: Settings,
    training: Dataset,
    validation: Dataset | None,
    folder: str | os.PathLike[str] | None,
    *,
    data: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    test: Dataset | None = None,
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
        LostRankError: one of several processes died; the run can go on from its last checkpoint.
        CheckpointError: the run cannot be read.
        MissingExtraError: safetensors is not installed.
        OSError: a file cannot be written.
    """
    check_settings(settings)
    folder = None if folder is None else as_path(folder)
    folder = to_resume(folder) if resume else folder
    with claimed(folder, resume=resume, overwrite=overwrite):
        before = load_description(folder) if folder is not None and resume else None
        if before is None:
            settings, _ = settle(settings, training)
        else:
            settings = replace(settings, loss=settings.loss or before.settings.loss)
        more: dict[str, Any] = {"data": data, "columns": columns, "test": test, "watcher": watcher, "config": config}
        return run_job(settings, training, validation, folder, before, **more)


def check_settings(settings: Settings) -> None:
    """Refuse settings that cannot be trained with here, before any data is read, which can take a while."""
    require("safetensors", "train")
    check_named(settings.cell)
    check_machine(settings)


def run_job(
    settings: Settings,
    training: Dataset,
    validation: Dataset | None,
    folder: Path | None,
    before: RunDescription | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
    test: Dataset | None = None,
    watcher: Watcher | None = None,
    config: bytes = b"",
) -> TrainingResult:
    """Train with settings that are checked and settled, in a folder that is claimed; go on from ``before``, if any."""
    given: dict[str, Any] = {"training": training, "validation": validation, "test": test, "columns": columns or {}}
    if folder is None:
        return _spread(Job(settings, **given), watcher)
    check_place(settings.cell, folder)
    files = {CONFIG: config, SKIPPED: skipped_lines(left_out(training, validation, test))}
    job = Job(
        settings,
        dict(data or {}),
        fingerprint(training, validation),
        identity=identity(training, validation),
        folder=folder,
        resume=before is not None,
        files={name: content for name, content in files.items() if content},
        **given,
    )
    if before is None:
        with replacing(folder):
            return _spread(job, watcher)
    refuse_diverged(before, folder)
    if before.fingerprint != job.fingerprint:
        got = "other data"
        rule = "continued with the same sequences, labels and order"
        fix = f"restore the data, or start again with {argument('overwrite', True)}"
        raise DataError(message("resume", got, rule, fix))
    return _spread(job, watcher)


def _spread(job: Job, watcher: Watcher | None) -> TrainingResult:
    """Do a job in this process, or in as many as its settings or torchrun say."""
    others = ranks_of()
    if others is not None:
        # For what does not go with several ranks; how many there are is not a choice of the run.
        replace(job.settings, ranks=others.count)
        return lead(job, watcher, others)
    if job.settings.engine == "ray":
        from raglane.training.ranks.on_ray import launch_on_ray

        return launch_on_ray(job, watcher)
    if job.settings.ranks == 1:
        return Trainer(job, watcher=watcher).run()
    from raglane.training.ranks.launch import launch

    return launch(job, watcher)


def left_out(*parts: Dataset | None) -> list[Skipped]:
    """The rows of all files that were left out, each once: what was held out comes from the file of the rest."""
    return list(dict.fromkeys(row for part in parts if part is not None for row in part.skipped))


def lead(job: Job, watcher: Watcher | None, ranks: Ranks) -> TrainingResult:
    """Do a training with ranks that wait for it."""
    ranks.join()
    try:
        ranks.from_first((job, current_flags()))
        result = Trainer(job, ranks, watcher).run()
        ranks.from_first(result)
        return result
    except (RuntimeError, LostRankError) as error:
        if not isinstance(error, LostRankError) and not ranks.is_lost(error):
            raise
        raise lost("a rank that has gone", job.folder) from error
    finally:
        ranks.leave()


def followed() -> TrainingResult | None:
    """Do this rank's part of a training that the first one leads; None where this process leads, or is alone."""
    ranks = ranks_of() if os.environ.get("RANK", "0") != "0" else None
    if ranks is None:
        return None
    ranks.join()
    try:
        job, names = ranks.from_first(None)
        with flags(names):
            Trainer(job, ranks).run()
        result: TrainingResult = ranks.from_first(None)
    except LostRankError:
        raise SystemExit(2) from None
    except RuntimeError as error:
        if ranks.is_lost(error):
            raise SystemExit(2) from None
        raise
    finally:
        with suppress(RuntimeError):
            ranks.leave()
    if result.stopped_by is not None:
        raise SystemExit(128 + signal.Signals(result.stopped_by))
    return result
