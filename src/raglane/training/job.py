"""A run as its folder describes it, the job that its processes share, and its result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raglane._utils.files import as_path, write_file
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import DivergedError, argument, message
from raglane.training.checkpoint import check_format
from raglane.training.folder import DESCRIPTION, find
from raglane.training.own_cell import named_code, take_code
from raglane.training.settings import Settings
from raglane.training.state import TrainingState
from raglane.training.stored import read_json, reading, to_json

FORMAT = "raglane-run"
FORMAT_VERSION = 2


@dataclass(frozen=True)
class RunDescription:
    """What a run was started with, kept in ``run.json`` so that it can go on.

    Args:
        settings: of the training.
        data: where the data came from; JSON values, as the caller likes.
        fingerprint: of the training and validation part.
        identity: of the data as a whole, whatever was held out; "" of runs before there was one.
        diverged: what was seen of a run that ran away; None of others.

    Example:
        >>> RunDescription(Settings()).settings.layer
        'gru'
    """

    settings: Settings
    data: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    diverged: str | None = None
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
    """A training that is checked and settled, as one process hands it to others: with its sequences and its folder."""

    training: Records | Dataset
    validation: Records | Dataset | None = None
    # Only checked against the model.
    test: Records | None = None
    # Of a file, by what they hold; kept with the model.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # Locked by the process that made the job; None keeps the best model in memory.
    folder: Path | None = None
    resume: bool = False
    # Further files of the folder by name, written before the first step.
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # The code of the user's own cell goes along: another process takes none that it was not handed.
        return {**vars(self), "code": named_code(self.settings.layer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        take_code(state.pop("code"))
        vars(self).update(state)


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
        diverged, identity = config.get("diverged"), config.get("identity", "")
        texts = isinstance(marks, str) and isinstance(diverged, str | None) and isinstance(identity, str)
        if not isinstance(data, dict) or not texts:
            raise ValueError("data that is not an object, or a fingerprint, identity or diverged that is not a text")
    return RunDescription(settings, data, marks, diverged, identity)


def refuse_diverged(description: RunDescription, folder: Path) -> None:
    """Refuse to go on with a run that ran away."""
    if description.diverged is not None:
        got = f"{str(folder)!r}, a run that diverged: {description.diverged}"
        tamer = f"a smaller {argument('lr')} or with {argument('clip', 1)}"
        fix = f"train anew with {tamer}, and {argument('overwrite', True)}; the best model until then can be used"
        raise DivergedError(message("resume", got, "to go on would do the same again", fix), description.diverged)
