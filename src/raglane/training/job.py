"""The description of a run in ``run.json``, the job of its processes, and its result."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.files import as_path, write_file
from raglane._utils.json import read_json, reading, to_json
from raglane._utils.messages import argument, message
from raglane.data.dataset import Dataset
from raglane.data.store.hashing import sequence_hashes
from raglane.errors import DivergedError
from raglane.training.checkpoint import check_format
from raglane.training.folder import DESCRIPTION, find
from raglane.training.own_cell import named_code, take_code
from raglane.training.settings import Settings
from raglane.training.state import TrainingState
from raglane.training.stored import with_new_words

FORMAT = "raglane-run"
FORMAT_VERSION = 3
# Begins a fingerprint that is made of `Dataset.fingerprint`.
_MARK = "2-"


@dataclass(frozen=True)
class RunDescription:
    """The settings and data of a run, stored in ``run.json`` to resume it."""

    settings: Settings
    # The source of the data, as JSON values.
    data: Mapping[str, Any] = field(default_factory=dict)
    # Of the training and validation data.
    fingerprint: str = ""
    # The reason, if the run diverged.
    diverged: str | None = None
    # Of all data, independent of the validation split.
    identity: str = ""

    def write(self, folder: Path) -> None:
        """Write ``run.json`` in the folder of a run."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "settings": self.settings.to_config(),
            "data": dict(self.data),
            "fingerprint": self.fingerprint,
            "identity": self.identity,
            "diverged": self.diverged,
        }
        write_file(folder / DESCRIPTION, to_json(content))


@dataclass(frozen=True, kw_only=True)
class Job(RunDescription):
    """A validated training, as it is sent to other processes: settings, sequences and folder."""

    training: Dataset
    validation: Dataset | None = None
    # Only checked, before the first epoch.
    test: Dataset | None = None
    # The column names of a file, stored with the model.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # Locked by the process that creates the job; None keeps the best model in memory.
    folder: Path | None = None
    resume: bool = False
    # Further files for the folder, written before the first step.
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # Other processes only run the code of a user-defined cell that is sent to them.
        return {**vars(self), "code": named_code(self.settings.cell)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        take_code(state.pop("code"))
        vars(self).update(state)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training: the ``result`` of a :class:`raglane.Run`.

    Args:
        folder: of the run; None for a training in memory.
        metric: the name of the metric in the history.
        state: ``state.history`` has a dictionary of numbers per epoch; ``state.best_epoch`` (from
            1) and ``state.best_loss`` are of the best model.
        stopped_by: the number of the signal (Ctrl-C or SIGTERM) that stopped the training, which
            can be resumed; None if it is complete.
        was_complete: True if the run was resumed without epochs left to train.
        best: the files of the best model of a training in memory; empty before the first epoch is
            complete.
    """

    folder: Path | None
    metric: str
    state: TrainingState
    stopped_by: int | None = None
    was_complete: bool = False
    best: Mapping[str, bytes] = field(default_factory=dict, repr=False)


def load_description(folder: str | os.PathLike[str]) -> RunDescription:
    """Read the description in the folder of a run; raise a CheckpointError if it is missing,
    damaged or newer.
    """
    path = find(as_path(folder), DESCRIPTION)
    config = read_json(path)
    check_format(path, config, FORMAT, FORMAT_VERSION)
    config = with_new_words(config)
    with reading(path):
        settings = Settings.from_config(config["settings"])
        data = config["data"]
        digest = config["fingerprint"]
        diverged = config.get("diverged")
        identity = config.get("identity", "")
        texts = (
            isinstance(digest, str)
            and isinstance(diverged, str | None)
            and isinstance(identity, str)
        )
        if not isinstance(data, dict) or not texts:
            raise ValueError(
                "data that is not an object, or a fingerprint, identity or diverged that is not a text"
            )
    return RunDescription(settings, data, digest, diverged, identity)


def refuse_diverged(description: RunDescription, folder: Path) -> None:
    """Raise if a run to resume has diverged."""
    if description.diverged is not None:
        got = f"{str(folder)!r}, a run that diverged: {description.diverged}"
        changes = f"a smaller {argument('lr')} or with {argument('grad_clip', 1)}"
        fix = f"train again with {changes}, and {argument('overwrite', True)}; its best model can be used"
        rule = "a run that has not diverged, because it would diverge again"
        raise DivergedError(message("resume", got, rule, fix), description.diverged)


def fingerprint(*datasets: Dataset | None) -> str:
    """Return a hash of sequences, labels and their order."""
    texts = ["" if dataset is None else dataset.fingerprint for dataset in datasets]
    return _MARK + hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def is_same_data(before: RunDescription, job: Job) -> bool:
    """Return True if a run was started with the sequences, labels and order of a job.

    The fingerprints of older runs, without a mark, were other hashes; only their identity tells.
    """
    if before.fingerprint.startswith(_MARK):
        return before.fingerprint == job.fingerprint
    return before.identity == job.identity


def identity(*datasets: Dataset | None) -> str:
    """Return a hash of sequences and labels that does not depend on their order and division into
    parts.
    """
    total = 0
    count = 0
    for dataset in datasets:
        if dataset is None:
            continue
        if not dataset.is_in_memory:
            # All parts are rows of one folder, and share its statistics.
            return f"folder-{zlib.crc32(repr(dataset.statistics.to_config()).encode()):08x}"
        total += int(sequence_hashes(dataset.records).sum(dtype=np.uint64))
        count += len(dataset)
    return f"{count}-{total % 2**64:016x}"
