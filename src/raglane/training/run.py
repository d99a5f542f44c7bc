"""Runs a training in one process or several, with its folder locked."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from raglane._utils.files import as_path
from raglane._utils.messages import argument, current_flags, flags, require
from raglane.data.assemble.pieces import skipped_lines
from raglane.data.dataset import Dataset
from raglane.data.records import Skipped
from raglane.errors import DataError, LostRankError
from raglane.training.folder import CONFIG, SKIPPED, claimed, replacing, to_resume
from raglane.training.job import (
    Job,
    RunDescription,
    TrainingResult,
    fingerprint,
    identity,
    is_same_data,
    load_description,
    refuse_diverged,
)
from raglane.training.machine import check_machine
from raglane.training.own_cell import check_named, check_outside
from raglane.training.ranks import Ranks, lost, ranks_of
from raglane.training.settings import Settings
from raglane.training.state import Callback
from raglane.training.tasks import settle
from raglane.training.trainer import Trainer

__all__ = ["RunDescription", "TrainingResult", "left_out", "load_description", "train"]


def train(
    settings: Settings,
    training: Dataset,
    validation: Dataset | None,
    folder: str | os.PathLike[str] | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> TrainingResult:
    """Train a model and store it, or resume a run; ``options`` are those of :func:`run_job`.

    A run that fails in its first epoch leaves no files.
    """
    check_settings(settings)
    folder = None if folder is None else as_path(folder)
    folder = to_resume(folder) if resume else folder
    with claimed(folder, resume=resume, overwrite=overwrite):
        before = load_description(folder) if folder is not None and resume else None
        if before is None:
            settings, _ = settle(settings, training, validation)
        else:
            old = before.settings
            chosen = {name: getattr(settings, name) or getattr(old, name) for name in _SETTLED}
            settings = replace(settings, **chosen)
        return run_job(settings, training, validation, folder, before, **options)


# The settings that `settle` chooses.
_SETTLED = ("loss", "season", "bptt_steps", "epochs", "patience", "lr_schedule")


def check_settings(settings: Settings) -> None:
    """Raise if settings cannot be used on this machine; called before the data is read, which can
    take long.
    """
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
    callback: Callback | None = None,
    config: bytes = b"",
) -> TrainingResult:
    """Train with validated settings in a locked folder, in this process or in several; or resume
    the run ``before``.

    ``columns`` is stored with the model, ``data`` in ``run.json``, and ``config`` as ``run.toml``.
    ``folder=None`` returns the best model in memory. ``test`` is only checked.
    """
    datasets: dict[str, Any] = {
        "training": training,
        "validation": validation,
        "test": test,
        "columns": columns or {},
    }
    if folder is None:
        return _launch(Job(settings, **datasets), callback)
    check_outside(settings.cell, folder)
    files = {CONFIG: config, SKIPPED: skipped_lines(left_out(training, validation, test))}
    job = Job(
        settings,
        dict(data or {}),
        fingerprint(training, validation),
        identity=identity(training, validation),
        folder=folder,
        resume=before is not None,
        files={name: content for name, content in files.items() if content},
        **datasets,
    )
    if before is None:
        with replacing(folder):
            return _launch(job, callback)
    refuse_diverged(before, folder)
    if not is_same_data(before, job):
        got = "other data than the run was started with"
        rule = "the same sequences, labels and order"
        raise DataError(
            "resume",
            got,
            rule,
            f"restore the data, or start a new run with {argument('overwrite', True)}",
        )
    return _launch(job, callback)


def _launch(job: Job, callback: Callback | None) -> TrainingResult:
    """Run a job in this process, or in the processes of torchrun, Ray or ``settings.processes``."""
    others = ranks_of()
    if others is not None:
        # Validates the settings for this number of ranks, which is not a setting of the run.
        replace(job.settings, processes=others.count)
        return lead(job, callback, others)
    if job.settings.engine == "ray":
        from raglane.training.ranks.ray_workers import launch_on_ray

        return launch_on_ray(job, callback)
    if job.settings.processes == 1:
        return Trainer(job, callback=callback).run()
    from raglane.training.ranks.launch import launch

    return launch(job, callback)


def left_out(*datasets: Dataset | None) -> list[Skipped]:
    """Return the skipped rows of all data, without duplicates: split parts share the rows of their
    file.
    """
    return list(
        dict.fromkeys(row for dataset in datasets if dataset is not None for row in dataset.skipped)
    )


def lead(job: Job, callback: Callback | None, ranks: Ranks) -> TrainingResult:
    """Run a training as the first of several ranks, which wait for its job."""
    ranks.join()
    try:
        ranks.from_first((job, current_flags()))
        result = Trainer(job, ranks, callback).run()
        ranks.from_first(result)
        return result
    except (RuntimeError, LostRankError) as error:
        if not isinstance(error, LostRankError) and not ranks.is_lost(error):
            raise
        raise lost("a rank that died", job.folder) from error
    finally:
        ranks.leave()


def follow() -> TrainingResult | None:
    """Run the job of the first rank, if this process is another rank of torchrun; else return
    None.
    """
    ranks = ranks_of() if os.environ.get("RANK", "0") != "0" else None
    if ranks is None:
        return None
    ranks.join()
    try:
        job, names = ranks.from_first(None)
        with flags(names):
            Trainer(job, ranks).run()
        result: TrainingResult = ranks.from_first(None)
    except (LostRankError, RuntimeError) as error:
        if isinstance(error, LostRankError) or ranks.is_lost(error):
            raise SystemExit(2) from None
        raise
    finally:
        with suppress(RuntimeError):
            ranks.leave()
    if result.stopped_by is not None:
        raise SystemExit(128 + signal.Signals(result.stopped_by))
    return result
