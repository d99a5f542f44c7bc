"""A training run from records to a folder: fit the preprocessing, build the model, train, or go on."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raglane.data.preprocess import Preprocessor
from raglane.data.records import Records
from raglane.errors import ArgumentError, DataError, explain, require
from raglane.reading import as_path
from raglane.training.batches import BatchStore
from raglane.training.checkpoint import check_format, load_weights, model_files, read_json, to_json
from raglane.training.files import remove_leftovers, whole_folder, write_file
from raglane.training.inference import pick_device
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.settings import Settings
from raglane.training.state import TrainingState, check_optimizer, load_state
from raglane.training.stored import reading
from raglane.training.tasks import make_task

if TYPE_CHECKING:
    from raglane.training.loop import Watcher

__all__ = [
    "RUN_FILES",
    "RUN_FOLDERS",
    "RunDescription",
    "TrainingResult",
    "check_folder",
    "fingerprint",
    "load_description",
    "train",
]

FORMAT = "raglane-run"
FORMAT_VERSION = 1
DESCRIPTION = "run.json"

# Everything that a run leaves in its folder; --overwrite removes these and touches nothing else.
RUN_FILES = (DESCRIPTION, "curves.csv", "curves.png", "evaluation.json", "confusion.png", "confusion.txt")
RUN_FOLDERS = ("best", "last")


@dataclass(frozen=True)
class RunDescription:
    """What a run was started with, kept in ``run.json`` so that it can go on.

    Args:
        settings: of the training.
        data: where the data came from; JSON values, as the caller likes.
        fingerprint: of the training and validation part.

    Example:
        >>> RunDescription(Settings()).settings.cell
        'gru'
    """

    settings: Settings
    data: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    def write(self, folder: Path) -> None:
        """Write ``run.json`` in the folder of a run."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "settings": self.settings.to_config(),
            "data": dict(self.data),
            "fingerprint": self.fingerprint,
        }
        write_file(folder / DESCRIPTION, to_json(content))


@dataclass(frozen=True)
class TrainingResult:
    """What came out of a run.

    Args:
        folder: of the run.
        metric: the name of the metric in the history.
        state: history, best epoch and its loss.
        stopped_by: the number of the signal that ended it, of Ctrl-C or SIGTERM; it is saved and can go on. None if
            it ran to its end.
    """

    folder: Path
    metric: str
    state: TrainingState
    stopped_by: int | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it."""
        return self.stopped_by is not None


def load_description(folder: str | os.PathLike[str]) -> RunDescription:
    """Read what a run was started with.

    Args:
        folder: of the run.

    Raises:
        CheckpointError: there is no ``run.json``, or it is damaged or of a newer format.
    """
    path = as_path(folder) / DESCRIPTION
    config = read_json(path)
    check_format(path, config, FORMAT, FORMAT_VERSION)
    with reading(path):
        settings, data, marks = Settings.from_config(config["settings"]), config["data"], config["fingerprint"]
        if not isinstance(data, dict) or not isinstance(marks, str):
            raise ValueError("data that is no object, or a fingerprint that is no text")
    return RunDescription(settings, data, marks)


def check_folder(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse a folder that a run must not be written to, before any work is done.

    Args:
        folder: of the run.
        resume: a run is there, and goes on.
        overwrite: a run that is there may be replaced.

    Raises:
        ArgumentError: something is there that may not be touched, or nothing is there to go on with.
    """
    if resume:
        if not (folder / DESCRIPTION).is_file():
            raise ArgumentError(
                explain("resume", repr(str(folder)), "the folder of a run", "give its --out, or leave --resume out")
            )
        return
    # A run that was killed while it wrote its first file left no more than a part of it.
    part = f".{DESCRIPTION}.partial"
    # A link that leads nowhere is there, too.
    if not os.path.lexists(folder) or (folder.is_dir() and all(path.name == part for path in folder.iterdir())):
        return
    if not (folder / DESCRIPTION).is_file():
        raise ArgumentError(explain("out", repr(str(folder)), "a new folder, or that of a run", "give another --out"))
    if not overwrite:
        raise ArgumentError(
            explain(
                "out",
                f"{str(folder)!r}, where a run is already",
                "a run is not replaced unasked",
                "give another --out, --resume to go on with it, or --overwrite to replace it",
            )
        )


def fingerprint(*parts: Records | None) -> str:
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
        digest.update(np.ascontiguousarray(records.offsets).tobytes())
        for words in (records.labels, records.tags, records.values if records.is_tokens else None):
            if words is not None:
                # repr keeps ("a b",) and ("a", "b") apart.
                digest.update(repr(list(words)).encode())
        if not records.is_tokens:
            digest.update(np.ascontiguousarray(records.values).tobytes())
    return digest.hexdigest()[:16]


def train(
    settings: Settings,
    training: Records,
    validation: Records | None,
    folder: str | os.PathLike[str],
    *,
    data: Mapping[str, Any] | None = None,
    columns: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    test: Records | None = None,
    watcher: Watcher | None = None,
) -> TrainingResult:
    """Train a model and save it, or go on with a run that was stopped.

    Args:
        settings: every choice.
        training: the sequences to train on.
        validation: the sequences that decide which epoch is best; None lets the training loss decide.
        folder: of the run; made where it is missing.
        data: where the data came from, for :func:`load_description`; JSON values.
        columns: which columns of a file hold what, kept with the model.
        resume: go on from ``folder/last``, to the same result as a run that was never stopped.
        overwrite: replace a run that is in ``folder``.
        test: sequences that the model is to be measured on later; they are only checked, before the first epoch.
        watcher: told of batches and epochs.

    Returns:
        The history, and whether Ctrl-C or SIGTERM ended it. A run that fails in its first epoch leaves nothing.

    Raises:
        ArgumentError: a setting or the folder breaks a rule, or the loss is no longer finite.
        DataError: the data cannot be used, or is not what the run was started with.
        CheckpointError: the run cannot be read.
        MissingExtraError: Lightning or safetensors is not installed.
        OSError: a file cannot be written.
    """
    require("lightning.pytorch", "train")
    require("safetensors", "train")
    from raglane.training.loop import Interrupted, make_optimizer, run_epochs

    folder = as_path(folder)
    check_folder(folder, resume=resume, overwrite=overwrite)
    device = pick_device(settings.device)
    _check_machine(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    preprocessor = Preprocessor.fit(training, task=settings.task, missing=settings.missing)
    training_store = BatchStore(preprocessor.apply(training), settings.task)
    validation_store = None if validation is None else BatchStore(preprocessor.apply(validation), settings.task)
    if test is not None:
        preprocessor.apply(test)
    model = SequenceModel(_model_config(settings, preprocessor))
    marks = fingerprint(training, validation)
    state, optimizer_state, random = TrainingState(), None, None
    if resume:
        _check_same_data(folder, marks)
        last = whole_folder(folder / "last")
        # A run that was killed before its first checkpoint has nothing to go on from: it starts again.
        if last is not None:
            state, optimizer_state, random = load_state(last)
            load_weights(model, last)
            check_optimizer(optimizer_state, make_optimizer(model, settings), last)
        _check_unfinished(state, settings)
    task, stopped_by = make_task(preprocessor), None
    with _started(folder, RunDescription(settings, dict(data or {}), marks), resume=resume):
        try:
            run_epochs(
                model,
                task,
                settings,
                training_store,
                validation_store,
                state=state,
                folder=folder,
                device=device,
                model_files=lambda: model_files(model, preprocessor, columns or {}),
                optimizer_state=optimizer_state,
                random=random,
                watcher=watcher,
            )
        except Interrupted as stop:
            stopped_by = stop.signal
    return TrainingResult(folder, task.metric, state, stopped_by)


def _check_machine(settings: Settings) -> None:
    """Refuse numbers of threads and processes that would bring this machine down rather than use it."""
    most = max(64, 4 * (os.cpu_count() or 1))
    for name in ("threads", "workers"):
        count = getattr(settings, name)
        if count is not None and count > most:
            raise ArgumentError(explain(name, f"{count}", f"at most {most} on this machine", "pass a smaller number"))


def _model_config(settings: Settings, preprocessor: Preprocessor) -> ModelConfig:
    if settings.task == "forecast" and preprocessor.is_tokens:
        raise DataError(
            explain("task", "'forecast' and token sequences", "a forecast is of numbers", "use classify or tag")
        )
    chosen = settings.to_config()
    shared = {part.name: chosen[part.name] for part in fields(ModelConfig) if part.name in chosen}
    return ModelConfig(
        **shared
        | {
            "input_size": preprocessor.input_size,
            "output_size": preprocessor.class_count or len(preprocessor.channels),
            "embedding": settings.embedding if preprocessor.is_tokens else None,
        }
    )


def _check_same_data(folder: Path, marks: str) -> None:
    if load_description(folder).fingerprint != marks:
        raise DataError(
            explain(
                "resume",
                "other data than the run was started with",
                "a run goes on with the same sequences, labels and order",
                "restore the data, or start anew with --overwrite",
            )
        )


def _check_unfinished(state: TrainingState, settings: Settings) -> None:
    if state.epoch >= settings.epochs:
        raise ArgumentError(
            explain(
                "epochs",
                f"{settings.epochs}, and {state.epoch} are done",
                "a run that goes on needs an epoch to run",
                f"pass --epochs {state.epoch + 10}, say",
            )
        )


def _clear(folder: Path) -> None:
    """Remove a run that may be replaced, and nothing else."""
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
        remove_leftovers(folder / name)
    for name in RUN_FOLDERS:
        remove_leftovers(folder / name)
        for path in (folder / name, folder / f".{name}.previous"):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _started(folder: Path, description: RunDescription, *, resume: bool) -> Iterator[None]:
    """A folder that says what the run is; a new run that fails before its first checkpoint leaves nothing there."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    if resume:
        for name in (*RUN_FILES, *RUN_FOLDERS):
            remove_leftovers(folder / name)
    else:
        _clear(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        description.write(folder)
        yield
    except Exception:
        if not resume and whole_folder(folder / "last") is None:
            _clear(folder)
            for path in made:
                # One in which something else has been put stays.
                with suppress(OSError):
                    path.rmdir()
        raise
