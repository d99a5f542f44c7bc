"""A search for good settings: a study of Optuna in SQLite, and its best run as an ordinary run.

A trial is an ordinary run in ``trials/``, whose folder its process has locked. So whoever comes next knows which trials
are at work and which died; a trial that died goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, CheckpointError, DivergedError, argument, message, quote, require
from raglane._utils.files import put_folder
from raglane._utils.lock import locked, turn
from raglane.runs.configuration import key_of, run_config
from raglane.runs.search import Range, Space, as_config
from raglane.training.folder import LAST, check_folder, find
from raglane.training.identity import identity
from raglane.training.run import train
from raglane.training.settings import Settings


STUDY, TRIALS, BEST_RUN = "study.db", "trials", "run"
"""What stands in the folder of a study: the study, its trials, and the best of them."""

_NAME = "raglane"
_TURN = ".turn"


@dataclass(frozen=True)
class Order:
    """What is to be searched."""

    settings: Settings
    space: Space
    training: Records | Dataset
    validation: Records | Dataset
    data: Mapping[str, Any]
    columns: Mapping[str, Any]
    trials: int
    seconds: float | None = None


@dataclass(frozen=True)
class Tuned:
    """How a search went."""

    best: Path | None
    value: float
    settings: Settings
    done: int
    others: int
    stopped_by: int | None = None


class _Ended(Exception):  # noqa: N818
    """A trial ends before its last epoch: since others were better by then, or since time is up."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.is_late = is_late


class _Watcher:
    """Tells a trial of each epoch, and ends it where it is not worth more."""

    def __init__(self, trial: Any, until: float) -> None:
        self.trial, self.until, self.best = trial, until, math.inf

    def started(self, state: Any, epochs: int, batches: int) -> None:  # noqa: ARG002
        for row in state.history:
            self._tell(row)

    def batch_done(self, epoch: int, batch: int, totals: Any) -> None:
        pass

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:  # noqa: ARG002
        self._tell(row)
        if time.monotonic() > self.until:
            raise _Ended(is_late=True)
        if self.trial.should_prune():
            raise _Ended(is_late=False)

    def _tell(self, row: dict[str, float]) -> None:
        self.best = min(self.best, row["validation_loss"])
        self.trial.report(row["validation_loss"], int(row["epoch"]))


def tune(order: Order, folder: Path, say: Callable[[str], None]) -> Tuned:
    """Search until there are enough trials or time is up; and go on with a study that is there."""
    optuna = require("optuna", "tune")
    optuna.logging.set_verbosity(logging.ERROR)
    _check_place(folder)
    until = math.inf if order.seconds is None else time.monotonic() + order.seconds
    (folder / TRIALS).mkdir(parents=True, exist_ok=True)
    with turn(folder / _TURN):
        study = _open(optuna, order, folder)
    stopped_by = None
    while stopped_by is None and time.monotonic() < until:
        with ExitStack() as held:
            with turn(folder / _TURN):
                _revive(study, folder, optuna)
                if _count(study, optuna) >= order.trials:
                    break
                trial = study.ask()
                settings = _chosen(trial, order)
                place = folder / TRIALS / trial.user_attrs.get("folder", f"{trial.number:04}")
                trial.set_user_attr("folder", place.name)
                held.enter_context(locked(place))
            stopped_by = _run(study, trial, settings, place, order, until, say, optuna)
    with turn(folder / _TURN):
        return _result(study, order, folder, stopped_by, optuna)


def publish(tuned: Tuned, folder: Path) -> Path:
    """Put the best trial where the run of a study is, as an ordinary run."""
    place, partial = folder / BEST_RUN, folder / f".{BEST_RUN}.partial"
    with turn(folder / _TURN):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(tuned.best or folder, partial, ignore=shutil.ignore_patterns(".*"))
        put_folder(partial, place)
    return place


def _check_place(folder: Path) -> None:
    """Refuse a folder that holds something else than a study."""
    path = folder / STUDY
    if not path.exists() and (folder / TRIALS).is_dir() and any((folder / TRIALS).iterdir()):
        raise _not_whole(path, f"no such file, beside the {TRIALS} of a study")
    if not path.exists() and not (folder / TRIALS).is_dir():
        try:
            check_folder(folder)
        except ArgumentError as error:
            fix = f"name another folder with {argument('folder')}"
            got = f"{quote(str(folder))}, which holds something else"
            raise ArgumentError(message("folder", got, "a folder that is new, or that of a study", fix)) from error


def _not_whole(path: Path, got: str) -> CheckpointError:
    """The error of a study that is damaged."""
    fix = f"name another folder with {argument('folder')}"
    return CheckpointError(message(str(path), got, "a study that Raglane wrote, whole", fix))


def _open(optuna: Any, order: Order, folder: Path) -> Any:
    """The study in a folder, of the same data and settings; a new one where there is none."""
    path = folder / STUDY
    wanted: dict[str, Any] = {
        "data": identity(order.training, order.validation),
        "settings": {name: value for name, value in order.settings.to_config().items() if name not in order.space},
        "space": as_config(order.space),
    }
    for name in ("threads", "workers", "device", "logger"):
        wanted["settings"].pop(name, None)
    try:
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{path.absolute()}", engine_kwargs={"connect_args": {"timeout": 120}}
        )
        names = [summary.study_name for summary in optuna.get_all_study_summaries(storage)]
        if not names and any((folder / TRIALS).iterdir()):
            raise ValueError(f"no study in it, beside the {TRIALS} of one")
        # Another seed for each process, and for each time that it goes on: they are to try other things.
        seed = order.settings.seed
        if names:
            seed += len(optuna.load_study(study_name=names[0], storage=storage).get_trials(deepcopy=False))
        study = optuna.create_study(
            study_name=_NAME,
            storage=storage,
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(seed=seed % 2**32, multivariate=True, constant_liar=True),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
        )
        kept = study.user_attrs.get("order")
    except Exception as error:
        raise _not_whole(path, quote(" ".join(str(error).split()))) from error
    if kept is None:
        study.set_user_attr("order", json.dumps(wanted, sort_keys=True))
    else:
        _check_same(json.loads(kept), json.loads(json.dumps(wanted)), folder)
    return study


def _check_same(kept: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with a study of something else."""
    fix = f"leave it as it was, or begin another study with another {argument('folder')}"
    if kept["data"] != wanted["data"]:
        got = f"{quote(str(folder))}, a study of other data"
        raise ArgumentError(message("folder", got, "a study goes on with the same sequences and labels", fix))
    for part, what in (("settings", "set"), ("space", "searched")):
        for name in {**kept[part], **wanted[part]}:
            before, now = (side[part].get(name) for side in (kept, wanted))
            if before != now:
                got = f"{quote(now)}, and the study in {quote(str(folder))} was started with {quote(before)}"
                raise ArgumentError(message(name, got, f"a study goes on with what it {what}", fix))


def _revive(study: Any, folder: Path, optuna: Any) -> None:
    """Ask again for the trials whose processes died; their runs go on in their folders."""
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        place = folder / TRIALS / trial.user_attrs.get("folder", f"{trial.number:04}")
        with suppress(ArgumentError), locked(place):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if trial.params:
                study.enqueue_trial(dict(trial.params), user_attrs={"folder": place.name})


def _count(study: Any, optuna: Any) -> int:
    """Trials that have ended or run."""
    state = optuna.trial.TrialState
    return len(study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED, state.RUNNING)))


def _chosen(trial: Any, order: Order) -> dict[str, Any]:
    """What a trial is to try."""
    found = {}
    for name, values in order.space.items():
        if not isinstance(values, Range):
            found[name] = trial.suggest_categorical(name, list(values))
        elif values.whole:
            found[name] = trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
        else:
            found[name] = trial.suggest_float(name, values.low, values.high, log=values.log)
    return found


def _run(
    study: Any,
    trial: Any,
    chosen: Mapping[str, Any],
    place: Path,
    order: Order,
    until: float,
    say: Callable[[str], None],
    optuna: Any,
) -> int | None:
    """Train a trial, and tell the study what came of it; or the signal that stopped it."""
    watcher, state = _Watcher(trial, until), optuna.trial.TrialState
    words = ", ".join(f"{key_of(Settings, name)} {_short(value)}" for name, value in chosen.items())
    pruned = {"state": state.PRUNED}
    try:
        settings = replace(order.settings, **chosen)
        result = train(
            settings,
            order.training,
            order.validation,
            place,
            data=order.data,
            columns=order.columns,
            resume=(place / LAST).exists(),
            watcher=watcher,
            config=run_config(settings, order.data),
        )
        if result.stopped_by is not None:
            # Not told: whoever comes next sees that nobody is at work on it, and goes on.
            return result.stopped_by
        told, what = {"values": result.state.best_loss}, f"validation loss {result.state.best_loss:.4f}"
    except _Ended as end:
        none = not study.get_trials(deepcopy=False, states=(state.COMPLETE,))
        told = {"values": watcher.best} if end.is_late and none else pruned
        what = (
            f"validation loss {watcher.best:.4f}, {'out of time' if end.is_late else 'worse than others, ended early'}"
        )
    except DivergedError:
        told, what = pruned, "ran away"
    except ArgumentError as error:
        if (place / LAST).exists():
            raise
        told, what = pruned, f"left out: {error}"
    study.tell(trial, **told)
    say(f"trial {trial.number}: {what}  ({words})")
    return None


def _result(study: Any, order: Order, folder: Path, stopped_by: int | None, optuna: Any) -> Tuned:
    state = optuna.trial.TrialState
    ended = study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED))
    complete = [trial for trial in ended if trial.state == state.COMPLETE]
    others = 0
    for trial in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
        try:
            with locked(folder / TRIALS / trial.user_attrs["folder"]):
                pass
        except ArgumentError:
            others += 1
    if not complete:
        return Tuned(None, math.nan, order.settings, len(ended), others, stopped_by)
    best = min(complete, key=lambda trial: trial.value)
    place = folder / TRIALS / best.user_attrs["folder"]
    find(place, LAST)
    return Tuned(place, best.value, replace(order.settings, **best.params), len(ended), others, stopped_by)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
