"""A training run from records to a folder: checked, settled, locked, and then trained in one process or several."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raglane._utils.files import as_path
from raglane.data.formats.pieces import skipped_lines
from raglane.data.records import Records, Skipped
from raglane.data.statistics import Counted
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, DataError, argument, message, require
from raglane.training.bookkeeper import Watcher
from raglane.training.description import RunDescription, load_description, refuse_diverged
from raglane.training.folder import CONFIG, SKIPPED, at_work, check_folder, replacing
from raglane.training.identity import identity
from raglane.training.own_cell import check_named, check_place
from raglane.training.ranks.elsewhere import lead
from raglane.training.ranks.group import ranks_of
from raglane.training.settings import Settings
from raglane.training.tasks import settle
from raglane.training.work import TrainingResult, Work, perform

if TYPE_CHECKING:
    from raglane.training.bookkeeper import Watcher

__all__ = [
    "RunDescription",
    "TrainingResult",
    "fingerprint",
    "left_out",
    "load_description",
    "refuse_diverged",
    "train",
]


def fingerprint(*parts: Records | Counted | None) -> str:
    """A short text that differs for different sequences, labels or order."""
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
        LostRankError: one of several processes died; the run can go on from its last checkpoint.
        CheckpointError: the run cannot be read.
        MissingExtraError: safetensors is not installed.
        OSError: a file cannot be written.
    """
    require("safetensors", "train")
    check_named(settings.layer)
    if folder is None:
        if resume:
            fix = f"give {argument('folder')}"
            raise ArgumentError(message("folder", "None", "to go on needs the folder of a run", fix))
        return spread(Work(RunDescription(settings), training, validation, test, columns or {}, None), watcher)
    folder, rules = as_path(folder), {"resume": resume, "overwrite": overwrite}
    check_folder(folder, **rules)
    check_place(settings.layer, folder)
    with at_work(folder):
        # Again, now that nobody else can change it.
        check_folder(folder, **rules)
        if resume:
            settings = replace(settings, loss=settings.loss or load_description(folder).settings.loss)
        else:
            settings, _ = settle(settings, training)
        description = RunDescription(settings, dict(data or {}), fingerprint(training, validation))
        description = replace(description, identity=identity(training, validation))
        files = {CONFIG: config, SKIPPED: skipped_lines(left_out(training, validation, test))}
        files = {name: content for name, content in files.items() if content}
        work = Work(description, training, validation, test, columns or {}, folder, resume, files)
        if resume:
            refuse_diverged(load_description(folder), folder)
            _check_same_data(folder, description.fingerprint)
            return spread(work, watcher)
        with replacing(folder):
            return spread(work, watcher)


def left_out(*parts: Records | Dataset | None) -> list[Skipped]:
    """The rows of all files that were left out, each once: what was held out comes from the file of the rest."""
    return list(dict.fromkeys(row for part in parts if isinstance(part, Records) for row in part.skipped))


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


def spread(work: Work, watcher: Watcher | None = None) -> TrainingResult:
    """Do a training in this process, or in as many as its settings say."""
    others = ranks_of()
    if others is not None:
        # For what does not go with several ranks; how many there are is not a choice of the run.
        replace(work.settings, ranks=others.count)
        return lead(work, watcher, others)
    if work.settings.engine == "ray":
        from raglane.training.ranks.on_ray import launch_on_ray

        return launch_on_ray(work, watcher)
    if work.settings.ranks == 1:
        return perform(work, watcher=watcher)
    from raglane.training.ranks.launch import launch

    return launch(work, watcher)
