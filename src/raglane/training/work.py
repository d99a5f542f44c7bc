"""What a training is to do, as one value that a process can hand to another, and how one process does its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raglane._utils.files import write_file, write_folder
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, DivergedError, argument, message
from raglane.training.bookkeeper import Interrupted, Watcher
from raglane.training.checkpoint import load_weights
from raglane.training.description import RunDescription
from raglane.training.folder import BEST, CURVES, LAST
from raglane.training.loop import make_optimizer
from raglane.training.own_cell import named_code, take_code
from raglane.training.prepared import Prepared, prepare
from raglane.training.ranks.group import ALONE, Ranks, Stops
from raglane.training.settings import Settings
from raglane.training.state import TrainingState, check_optimizer, curves_csv, load_state
from raglane.training.stored import reading


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


@dataclass(frozen=True)
class Work:
    """A training that is checked and settled."""

    description: RunDescription
    training: Records | Dataset
    validation: Records | Dataset | None
    test: Records | None
    columns: Mapping[str, Any]
    folder: Path | None
    resume: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """Every choice."""
        return self.description.settings

    def __getstate__(self) -> dict[str, Any]:
        # The code of the user's own cell goes along: another process takes none that it was not handed.
        return {**vars(self), "code": named_code(self.settings.layer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        take_code(state.pop("code"))
        vars(self).update(state)


@dataclass(frozen=True)
class _Start:
    """Where a run begins: by default at its beginning."""

    state: TrainingState = field(default_factory=TrainingState)
    optimizer: dict[str, Any] | None = None
    carried: tuple[torch.Tensor, ...] = ()


def perform(
    work: Work, *, ranks: Ranks = ALONE, watcher: Watcher | None = None, stops: Stops | None = None
) -> TrainingResult:
    """Train from where a run stands to its end, or to where a signal stops it: the part of one process."""
    from raglane.training.loop import run_epochs

    settings, folder = work.settings, work.folder
    prepared = prepare(settings, work.training, work.validation, work.test, work.columns, ranks)
    start = _stored_start(prepared, settings, folder, ranks) if work.resume and folder is not None else _Start()
    state, stopped_by, best = start.state, None, {}
    if folder is not None and ranks.is_first:
        work.description.write(folder)
        for name, content in work.files.items():
            write_file(folder / name, content)
    was_complete = _is_complete(state, settings)
    if was_complete and folder is not None:
        if ranks.is_first:
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
                rare=prepared.rare,
                optimizer_state=start.optimizer,
                carried=start.carried,
                watcher=watcher,
                ranks=ranks,
                stops=stops,
            )
        except Interrupted as stop:
            stopped_by = stop.signal
        except DivergedError as error:
            if folder is not None and (folder / LAST).exists() and ranks.is_first:
                replace(work.description, diverged=error.what).write(folder)
            raise
    return TrainingResult(folder, prepared.task.metric, state, stopped_by, was_complete, best)


def _stored_start(prepared: Prepared, settings: Settings, folder: Path, ranks: Ranks) -> _Start:
    """Where the run in a folder stands: its last checkpoint, put in the model, and its best model brought up to it."""
    last = folder / LAST
    if not last.exists():
        # A run that was killed before its first checkpoint has nothing to go on from: it starts again.
        return _Start()
    state, optimizer, carried = load_state(last)
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
    if state.best_epoch == state.epoch > 0 and state.batch == 0 and ranks.is_first:
        # The process may have been killed between the two.
        write_folder(folder / BEST, prepared.files())
    return _Start(state, optimizer, carried)


def _is_complete(state: TrainingState, settings: Settings) -> bool:
    """Whether nothing is left to train; what came after the last epoch may still have been cut off."""
    is_patient = settings.patience is None or state.waited < settings.patience or state.batch > 0
    return state.epoch >= settings.epochs or not is_patient
