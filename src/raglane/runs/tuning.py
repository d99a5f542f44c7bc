"""A search for hyperparameters: the search space, an Optuna study in SQLite, and the best run.

Each trial is an ordinary run in ``trials/``, whose folder is locked by its process. Other processes
thus detect which trials run and which have died, and resume a dead trial from its last checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from raglane._utils.files import put_folder, write_file
from raglane._utils.json import checked, rule_of
from raglane._utils.lock import locked, turn
from raglane._utils.messages import argument, nearest, quote, require
from raglane._utils.options import check_value, options
from raglane.errors import ArgumentError, CheckpointError, DivergedError
from raglane.runs.card import DataParts
from raglane.runs.comparison import compare, has_model
from raglane.runs.comparison_page import comparison_page
from raglane.runs.configuration import OptionValue, entry_in_toml, key_of, run_config
from raglane.tasks import TASKS
from raglane.training.folder import LAST, REPORT, check_folder, find
from raglane.training.job import identity
from raglane.training.run import train
from raglane.training.settings import Settings
from raglane.training.state import Callback, TrainingState

STUDY = "study.db"
"""The database of a study."""

TRIALS = "trials"
"""The folder of its trials."""

BEST_RUN = "run"
"""The folder of its best run."""

_NAME = "raglane"
_TURN = ".turn"

SEARCHED = (
    "cell hidden_size num_layers bidirectional layer_norm initial_state pooling dropout input_dropout state_dropout "
    "weight_dropout zoneout embedding_dropout embedding batch_size batch_elements lr optimizer weight_decay grad_clip "
    "lr_schedule warmup class_weights label_smoothing unk_dropout bucket"
).split()
"""The settings that may be searched: those that affect neither the data nor the validation loss's
meaning."""


class Range(NamedTuple):
    """A range of numbers, including both ends."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


Space = dict[str, tuple[Any, ...] | Range]
"""A search space: values or a range for each setting."""


def default_space(settings: Settings, fixed: Collection[str]) -> Space:
    """Return the default search space."""
    space: Space = {
        "cell": ("gru", "lstm"),
        "hidden_size": (32, 64, 128, 256),
        "num_layers": (1, 2),
        "bidirectional": (False, True),
        "pooling": ("final", "mean", "max", "attention"),
        "dropout": Range(0.0, 0.5),
        "batch_size": (16, 32, 64, 128),
        "lr": Range(3e-4, 3e-2, log=True),
    }
    reads_forwards = (
        TASKS[settings.task].is_forwards or settings.bptt_steps is not None or settings.layer_norm
    )
    unfit = {"bidirectional"} if reads_forwards else set()
    if settings.task != "classify":
        unfit.add("pooling")
    if settings.batch_elements is not None:
        unfit.add("batch_size")
    return {
        name: values for name, values in space.items() if name not in unfit and name not in fixed
    }


def read_space(table: Any, where: str) -> Space:
    """Return the search space of a TOML table."""
    if not isinstance(table, dict):
        fix = "write [search], and lr = {low = 1e-4, high = 1e-2}"
        raise ArgumentError(
            where, quote(table), "a table of options, each with a list or a range", fix
        )
    keys = {key_of(Settings, name): name for name in SEARCHED}
    hints = get_type_hints(Settings)
    space: Space = {}
    for key, entry in table.items():
        name = keys.get(str(key).replace("_", "-"))
        if name is None:
            near = nearest(str(key), keys)
            fix = f"write {near}" if near else f"choose among {', '.join(keys)}"
            raise ArgumentError(
                where, f"the option {quote(key)}", "options that can be searched", fix
            )
        space[name] = _values(entry, hints[name], name, f"{key} in {where}")
    return space


def _values(entry: Any, hint: Any, name: str, where: str) -> tuple[Any, ...] | Range:
    """Return the valid values or range of an option."""
    if isinstance(entry, list) and entry:
        values = tuple(_value(value, hint, name, where) for value in entry)
        if len(set(values)) < len(values):
            rule = "a list of distinct values"
            raise ArgumentError(where, quote(entry), rule, "remove the duplicates")
        return values
    fix = "write [1, 2], or {low = 1, high = 2}"
    if not isinstance(entry, dict) or not {"low", "high"} <= set(entry) <= {"low", "high", "log"}:
        raise ArgumentError(where, quote(entry), "a list of values, or {low, high}", fix)
    low = _value(entry["low"], hint, name, where)
    high = _value(entry["high"], hint, name, where)
    log = entry.get("log", False)
    if not (_is_number(low) and _is_number(high) and low < high) or not _fits_scale(log, low):
        rule = "two numbers, the lower first, and above 0 if log is true"
        raise ArgumentError(where, quote(entry), rule, fix)
    is_whole = isinstance(low, int) and isinstance(high, int) and "float" not in str(hint)
    return Range(low, high, log, whole=is_whole)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits_scale(log: Any, low: float) -> bool:
    """Return True if ``log`` is a bool, and a logarithmic scale begins above 0."""
    return isinstance(log, bool) and (low > 0 or not log)


def _value(value: Any, hint: Any, name: str, where: str) -> Any:
    """Return a value if it is valid for an option."""
    try:
        value = checked(hint, value, name)
        check_value("value", value, options(Settings)[name])
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    except ValueError as error:
        raise ArgumentError(where, quote(value), rule_of(error), "correct it") from error
    return value


def as_table(space: Space, comments: Mapping[str, str]) -> str:
    """Return a search space as the TOML table that :func:`read_space` reads."""
    lines = ["[search]"]
    for name, values in space.items():
        value: Any = values
        if isinstance(values, Range):
            value = {"low": values.low, "high": values.high} | ({"log": True} if values.log else {})
        lines.append(
            entry_in_toml(
                OptionValue(key_of(Settings, name), value, comment=comments.get(name, ""))
            )
        )
    return "\n".join(lines)


class Tuned(NamedTuple):
    """The result of a search."""

    best: Path | None  # the folder of the best trial
    value: float  # its validation loss
    settings: Settings  # of the best trial
    done: int  # trials that have ended
    others: int  # trials that run in other processes
    stopped_by: int | None = None  # the signal that ended the search


class _Ended(Exception):  # noqa: N818
    """Ends a trial before its last epoch: it was pruned, or the time is up."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.is_late = is_late


class _Watcher(Callback):
    """Reports each epoch to Optuna, and ends a trial that is pruned or out of time."""

    def __init__(self, trial: Any, until: float) -> None:
        self.trial = trial
        self.until = until
        self.best = math.inf

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:  # noqa: ARG002
        for row in state.history:
            self._report(row)

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:  # noqa: ARG002
        self._report(row)
        if time.monotonic() > self.until:
            raise _Ended(is_late=True)
        if self.trial.should_prune():
            raise _Ended(is_late=False)

    def _report(self, row: dict[str, float]) -> None:
        if "validation_loss" not in row:
            rule = "a part whose losses a search can compare"
            raise ArgumentError(
                "validation", "data without a target", rule, "pass longer sequences"
            )
        self.best = min(self.best, row["validation_loss"])
        self.trial.report(row["validation_loss"], int(row["epoch"]))


@dataclass
class Search:
    """A search in a folder, which resumes its study, until the number of trials or the time is
    reached.
    """

    folder: Path
    settings: Settings  # fixed settings and defaults
    space: Space
    parts: DataParts
    data: Mapping[str, Any]  # the sources of the parts, as in ``run.json``
    columns: Mapping[str, Any]
    trials: int  # in total, including earlier calls and other processes
    log: Callable[[str], None]
    seconds: float | None = None  # the time limit

    @cached_property
    def study(self) -> Any:
        """The study in the folder, or a new one.

        Raises:
            ArgumentError: the study in the folder is of other data or settings.
        """
        optuna = self._optuna
        path = self.folder / STUDY
        order: dict[str, Any] = {
            "data": identity(self.parts.training, self.parts.validation),
            "settings": {
                name: value
                for name, value in self.settings.to_config().items()
                if name not in self.space
            },
            "space": {
                name: values._asdict() if isinstance(values, Range) else list(values)
                for name, values in sorted(self.space.items())
            },
        }
        for name in ("threads", "workers", "device", "logger"):
            order["settings"].pop(name, None)
        try:
            # Without a pool, whose connections nothing would close. Optuna requires SQLAlchemy.
            from sqlalchemy.pool import NullPool

            options = {"connect_args": {"timeout": 120}, "poolclass": NullPool}
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{path.absolute()}", engine_kwargs=options
            )
            names = [summary.study_name for summary in optuna.get_all_study_summaries(storage)]
            if not names and any((self.folder / TRIALS).iterdir()):
                raise ValueError(f"no study in it, but a folder {TRIALS}")
            # Each process and each resumption uses another seed, so that they draw different
            # trials.
            seed = self.settings.seed
            if names:
                seed += len(
                    optuna.load_study(study_name=names[0], storage=storage).get_trials(
                        deepcopy=False
                    )
                )
            study = optuna.create_study(
                study_name=_NAME,
                storage=storage,
                load_if_exists=True,
                sampler=optuna.samplers.TPESampler(
                    seed=seed % 2**32, multivariate=True, constant_liar=True
                ),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3),
            )
            stored = study.user_attrs.get("order")
        except Exception as error:
            raise _damaged(path, quote(" ".join(str(error).split()))) from error
        if stored is None:
            study.set_user_attr("order", json.dumps(order, sort_keys=True))
        else:
            self._check_same(json.loads(stored), json.loads(json.dumps(order)))
        return study

    def run(self) -> Tuned:
        """Run trials until the end of the search."""
        self._optuna.logging.set_verbosity(logging.ERROR)
        self._check_folder()
        until = math.inf if self.seconds is None else time.monotonic() + self.seconds
        (self.folder / TRIALS).mkdir(parents=True, exist_ok=True)
        with turn(self.folder / _TURN):
            study = self.study
        stopped_by = None
        while stopped_by is None and time.monotonic() < until:
            with ExitStack() as locks:
                with turn(self.folder / _TURN):
                    self._revive()
                    if self._begun >= self.trials:
                        break
                    trial = study.ask()
                    chosen = _suggest(trial, self.space)
                    run_folder = self._folder_of(trial)
                    trial.set_user_attr("folder", run_folder.name)
                    locks.enter_context(locked(run_folder))
                stopped_by = self._try(trial, chosen, run_folder, until)
        with turn(self.folder / _TURN):
            return self._result(stopped_by)

    def compare(self) -> Path | None:
        """Write the page that compares the trials with a model, and return it, or None without
        any.
        """
        folders = sorted(filter(has_model, (self.folder / TRIALS).iterdir()))
        if not folders:
            return None
        write_file(
            self.folder / REPORT,
            comparison_page(compare(folders), "raglane tune", self.folder.name),
        )
        return self.folder / REPORT

    def publish(self, best: Path) -> Path:
        """Copy the best trial to the folder of the study's best run, and return it."""
        target = self.folder / BEST_RUN
        partial = self.folder / f".{BEST_RUN}.partial"
        with turn(self.folder / _TURN):
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(best, partial, ignore=shutil.ignore_patterns(".*"))
            put_folder(partial, target)
        return target

    @property
    def _optuna(self) -> Any:
        return require("optuna", "tune")

    @property
    def _begun(self) -> int:
        """The number of trials that have ended or are running."""
        return len(self._in_state("COMPLETE", "PRUNED", "RUNNING"))

    def _in_state(self, *names: str) -> list[Any]:
        """Return the trials in any of the given states."""
        return self.study.get_trials(
            deepcopy=False, states=[self._optuna.trial.TrialState[name] for name in names]
        )

    def _folder_of(self, trial: Any) -> Path:
        """Return the folder of a trial."""
        return self.folder / TRIALS / str(trial.user_attrs.get("folder", f"{trial.number:04}"))

    def _check_folder(self) -> None:
        """Raise if the folder contains anything but a study."""
        path = self.folder / STUDY
        trials = self.folder / TRIALS
        if path.exists():
            return
        if trials.is_dir():
            if any(trials.iterdir()):
                raise _damaged(path, f"no such file, but a folder {TRIALS}")
            return
        try:
            check_folder(self.folder)
        except ArgumentError as error:
            if not self.folder.is_dir() or not any(self.folder.iterdir()):
                raise
            fix = f"name another folder with {argument('folder')}"
            got = f"{quote(str(self.folder))}, which contains other files"
            raise ArgumentError("folder", got, "a new folder, or that of a study", fix) from error

    def _check_same(self, stored: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        """Raise if the study in the folder is of other data, settings or search space."""
        fix = f"repeat its options, or start another study with another {argument('folder')}"
        folder = str(self.folder)
        if stored["data"] != order["data"]:
            rule = "the folder of a study of the same sequences and labels"
            raise ArgumentError("folder", f"{quote(folder)}, a study of other data", rule, fix)
        for key, rule in (
            ("settings", "the value of the study"),
            ("space", "the search space of the study"),
        ):
            for name in {**stored[key], **order[key]}:
                before, now = (side[key].get(name) for side in (stored, order))
                if before != now:
                    got = f"{quote(now)}, but the study in {quote(folder)} was started with {quote(before)}"
                    raise ArgumentError(name, got, rule, fix)

    def _revive(self) -> None:
        """Enqueue the trials of dead processes again; their runs resume in their folders."""
        for trial in self._in_state("RUNNING"):
            run_folder = self._folder_of(trial)
            with suppress(ArgumentError), locked(run_folder):
                self.study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
                if trial.params:
                    self.study.enqueue_trial(
                        dict(trial.params), user_attrs={"folder": run_folder.name}
                    )

    def _try(
        self, trial: Any, chosen: Mapping[str, Any], run_folder: Path, until: float
    ) -> int | None:
        """Train a trial and report its result to the study, or return the signal that stopped
        it.
        """
        watcher = _Watcher(trial, until)
        words = ", ".join(
            f"{key_of(Settings, name)} {_text(value)}" for name, value in chosen.items()
        )
        pruned = {"state": self._optuna.trial.TrialState.PRUNED}
        try:
            settings = replace(self.settings, **chosen)
            result = train(
                settings,
                self.parts.training,
                self.parts.validation,
                run_folder,
                data=self.data,
                columns=self.columns,
                resume=(run_folder / LAST).exists(),
                callback=watcher,
                config=run_config(settings, self.data),
            )
            if result.stopped_by is not None:
                # The trial stays "running" without a lock, so the next process resumes it.
                return result.stopped_by
            outcome = {"values": result.state.best_loss}
            text = f"validation loss {result.state.best_loss:.4f}"
        except _Ended as end:
            outcome = (
                {"values": watcher.best}
                if end.is_late and not self._in_state("COMPLETE")
                else pruned
            )
            why = "out of time" if end.is_late else "worse than others, ended early"
            text = f"validation loss {watcher.best:.4f}, {why}"
        except DivergedError:
            outcome = pruned
            text = "diverged"
        except ArgumentError as error:
            # If no other trial has a result or may get one, this error is the reason.
            if (run_folder / LAST).exists() or len(self._in_state("PRUNED")) + 1 >= self.trials:
                raise
            outcome = pruned
            text = f"left out: {error}"
        self.study.tell(trial, **outcome)
        self.log(f"trial {int(run_folder.name)}: {text}  ({words})")
        return None

    def _result(self, stopped_by: int | None) -> Tuned:
        """Return the result of the search."""
        complete = self._in_state("COMPLETE")
        others = 0
        done = len(complete) + len(self._in_state("PRUNED"))
        for trial in self._in_state("RUNNING"):
            try:
                with locked(self._folder_of(trial)):
                    pass
            except ArgumentError:
                others += 1
        if not complete:
            return Tuned(None, math.nan, self.settings, done, others, stopped_by)
        best = min(complete, key=lambda trial: float(trial.value))
        run_folder = self._folder_of(best)
        find(run_folder, LAST)
        return Tuned(
            run_folder, best.value, replace(self.settings, **best.params), done, others, stopped_by
        )


def _suggest(trial: Any, space: Space) -> dict[str, Any]:
    """Return the settings that Optuna suggests for a trial."""
    chosen = {}
    for name, values in space.items():
        if not isinstance(values, Range):
            chosen[name] = trial.suggest_categorical(name, list(values))
        elif values.whole:
            chosen[name] = trial.suggest_int(
                name, int(values.low), int(values.high), log=values.log
            )
        else:
            chosen[name] = trial.suggest_float(name, values.low, values.high, log=values.log)
    return chosen


def _damaged(path: Path, got: str) -> CheckpointError:
    fix = f"name another folder with {argument('folder')}"
    return CheckpointError(str(path), got, "a complete study that Raglane wrote", fix)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
