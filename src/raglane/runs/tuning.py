"""A search for good settings: what it may choose from, a study of Optuna in SQLite, and its best run.

A trial is an ordinary run in ``trials/``, whose folder its process has locked. So whoever comes next knows which trials
are at work and which died; a trial that died goes on from its last checkpoint.
"""

from __future__ import annotations

import dataclasses
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
from typing import Any, get_type_hints

from raglane._utils.files import put_folder
from raglane._utils.lock import locked, turn
from raglane._utils.messages import argument, message, nearest, quote, require
from raglane.errors import ArgumentError, CheckpointError, DivergedError
from raglane.runs.card import Parts
from raglane.runs.configuration import Entry, entry_in_toml, key_of, run_config
from raglane.training.folder import LAST, check_folder, find
from raglane.training.job import identity
from raglane.training.options import check_value, options
from raglane.training.run import train
from raglane.training.settings import FORWARDS, Settings
from raglane.training.stored import checked, rule_of

STUDY, TRIALS, BEST_RUN = "study.db", "trials", "run"
"""The files of a study: the study, its trials, and the best of them."""

_NAME, _TURN = "raglane", ".turn"

SEARCHED = (
    "cell hidden_size num_layers bidirectional layer_norm initial_state pooling dropout input_dropout state_dropout "
    "weight_dropout zoneout embedding_dropout embedding batch_size batch_elements lr optimizer weight_decay grad_clip "
    "lr_schedule warmup class_weights label_smoothing unk_dropout bucket"
).split()
"""The settings that a search may choose: those that change neither the data nor what is measured."""


@dataclass(frozen=True)
class Range:
    """Numbers between two, both included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


Space = dict[str, tuple[Any, ...] | Range]
"""What to choose from, by the names of settings: some values, or a range."""


def default_space(settings: Settings, fixed: Collection[str]) -> Space:
    """What is searched where nobody says otherwise."""
    space: Space = {
        "cell": ("gru", "lstm"),
        "hidden_size": (32, 64, 128, 256),
        "num_layers": (1, 2),
        "bidirectional": (False, True),
        "pooling": ("summary", "mean", "max", "attention"),
        "dropout": Range(0.0, 0.5),
        "batch_size": (16, 32, 64, 128),
        "lr": Range(3e-4, 3e-2, log=True),
    }
    reads_forwards = settings.task in FORWARDS or settings.bptt_steps is not None or settings.layer_norm
    unfit = {"bidirectional"} if reads_forwards else set()
    if settings.task != "classify":
        unfit.add("pooling")
    if settings.batch_elements is not None:
        unfit.add("batch_size")
    return {name: values for name, values in space.items() if name not in unfit and name not in fixed}


def read_space(table: Any, where: str) -> Space:
    """What a table of TOML says."""
    if not isinstance(table, dict):
        rule = "a table of options, each with a list or a range"
        raise ArgumentError(message(where, quote(table), rule, "write [search], and lr = {low = 1e-4, high = 1e-2}"))
    known, hints = {key_of(Settings, name): name for name in SEARCHED}, get_type_hints(Settings)
    space: Space = {}
    for key, said in table.items():
        name = known.get(str(key).replace("_", "-"))
        if name is None:
            near = nearest(str(key), known)
            fix = f"write {near}" if near else f"choose among {', '.join(known)}"
            raise ArgumentError(message(where, f"the option {quote(key)}", "an option that a search can choose", fix))
        space[name] = _values(said, hints[name], name, f"{key} in {where}")
    return space


def _values(said: Any, hint: Any, name: str, where: str) -> tuple[Any, ...] | Range:
    """The values of an option, each of which it can have."""
    rule, fix = "a list of values, or {low, high}", "write [1, 2], or {low = 1, high = 2}"
    if isinstance(said, list) and said:
        values = tuple(_value(one, hint, name, where) for one in said)
        if len(set(values)) < len(values):
            raise ArgumentError(message(where, quote(said), "a list of different values", "remove the duplicate"))
        return values
    if not isinstance(said, dict) or not {"low", "high"} <= set(said) <= {"low", "high", "log"}:
        raise ArgumentError(message(where, quote(said), rule, fix))
    low, high = (_value(said[end], hint, name, where) for end in ("low", "high"))
    log = said.get("log", False)
    is_number = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
    if not is_number or not isinstance(log, bool) or low >= high or (log and low <= 0):
        rule = "two numbers, the lower first, and above 0 if log is true"
        raise ArgumentError(message(where, quote(said), rule, fix))
    return Range(low, high, log, whole=isinstance(low, int) and isinstance(high, int) and "float" not in str(hint))


def _value(value: Any, hint: Any, name: str, where: str) -> Any:
    """A value that the option can have."""
    try:
        found = checked(hint, value, name)
    except ValueError as error:
        raise ArgumentError(message(where, quote(value), rule_of(error), "correct it")) from error
    try:
        check_value("value", found, options(Settings)[name])
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    return found


def as_table(space: Space, comments: Mapping[str, str]) -> str:
    r"""A space as the table that :func:`read_space` reads."""
    lines = ["[search]"]
    for name, values in space.items():
        said: Any = values
        if isinstance(values, Range):
            said = {"low": values.low, "high": values.high} | ({"log": True} if values.log else {})
        lines.append(entry_in_toml(Entry(key_of(Settings, name), said, comment=comments.get(name, ""))))
    return "\n".join(lines)


@dataclass(frozen=True)
class Tuned:
    """How a search went."""

    best: Path | None  # the folder of the best trial, if there is one
    value: float  # its validation loss
    settings: Settings  # of the best trial
    done: int  # trials that have ended
    others: int  # processes that are still at work on the study
    stopped_by: int | None = None  # the signal that ended the search


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


@dataclass
class Search:
    """A search in a folder: until there are enough trials or time is up. It goes on with a study that is there."""

    folder: Path
    settings: Settings  # those that are fixed, and defaults
    space: Space
    parts: Parts
    data: Mapping[str, Any]  # where the parts come from, as ``run.json`` has it
    columns: Mapping[str, Any]
    trials: int  # in all, those of earlier calls and of other processes among them
    say: Callable[[str], None]
    seconds: float | None = None  # after which no trial goes on

    @cached_property
    def study(self) -> Any:
        """The study in the folder, of the same data and settings; a new one where there is none."""
        optuna, path = self._optuna, self.folder / STUDY
        wanted: dict[str, Any] = {
            "data": identity(self.parts.training, self.parts.validation),
            "settings": {name: value for name, value in self.settings.to_config().items() if name not in self.space},
            "space": {
                name: dataclasses.asdict(values) if isinstance(values, Range) else list(values)
                for name, values in sorted(self.space.items())
            },
        }
        for name in ("threads", "workers", "device", "logger"):
            wanted["settings"].pop(name, None)
        try:
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{path.absolute()}", engine_kwargs={"connect_args": {"timeout": 120}}
            )
            names = [summary.study_name for summary in optuna.get_all_study_summaries(storage)]
            if not names and any((self.folder / TRIALS).iterdir()):
                raise ValueError(f"no study in it, beside the {TRIALS} of one")
            # Another seed for each process, and for each time that it goes on: they are to try other things.
            seed = self.settings.seed
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
            self._check_same(json.loads(kept), json.loads(json.dumps(wanted)))
        return study

    def run(self) -> Tuned:
        """Search."""
        self._optuna.logging.set_verbosity(logging.ERROR)
        self._check_place()
        until = math.inf if self.seconds is None else time.monotonic() + self.seconds
        (self.folder / TRIALS).mkdir(parents=True, exist_ok=True)
        with turn(self.folder / _TURN):
            study = self.study
        stopped_by = None
        while stopped_by is None and time.monotonic() < until:
            with ExitStack() as held:
                with turn(self.folder / _TURN):
                    self._revive()
                    if self._begun >= self.trials:
                        break
                    trial = study.ask()
                    chosen = _chosen(trial, self.space)
                    place = self._place(trial, f"{trial.number:04}")
                    trial.set_user_attr("folder", place.name)
                    held.enter_context(locked(place))
                stopped_by = self._try(trial, chosen, place, until)
        with turn(self.folder / _TURN):
            return self._result(stopped_by)

    def publish(self, best: Path) -> Path:
        """Put the best trial where the run of a study is, as an ordinary run."""
        place, partial = self.folder / BEST_RUN, self.folder / f".{BEST_RUN}.partial"
        with turn(self.folder / _TURN):
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(best, partial, ignore=shutil.ignore_patterns(".*"))
            put_folder(partial, place)
        return place

    @property
    def _optuna(self) -> Any:
        return require("optuna", "tune")

    @property
    def _begun(self) -> int:
        """Trials that have ended or run."""
        return len(self._in_state("COMPLETE", "PRUNED", "RUNNING"))

    def _in_state(self, *names: str) -> list[Any]:
        """The trials in one of these states."""
        states = [self._optuna.trial.TrialState[name] for name in names]
        found: list[Any] = self.study.get_trials(deepcopy=False, states=states)
        return found

    def _place(self, trial: Any, otherwise: str) -> Path:
        """The folder of a trial."""
        return self.folder / TRIALS / str(trial.user_attrs.get("folder", otherwise))

    def _check_place(self) -> None:
        """Refuse a folder that holds something else than a study."""
        path, trials = self.folder / STUDY, self.folder / TRIALS
        if path.exists():
            return
        if trials.is_dir():
            if any(trials.iterdir()):
                raise _not_whole(path, f"no such file, beside the {TRIALS} of a study")
            return
        try:
            check_folder(self.folder)
        except ArgumentError as error:
            fix = f"name another folder with {argument('folder')}"
            got = f"{quote(str(self.folder))}, which contains something else"
            raise ArgumentError(message("folder", got, "a new folder, or that of a study", fix)) from error

    def _check_same(self, kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Refuse to go on with a study of something else."""
        fix, folder = f"pass the same, or start another study with another {argument('folder')}", str(self.folder)
        if kept["data"] != wanted["data"]:
            rule = "the folder of a study of the same sequences and labels"
            raise ArgumentError(message("folder", f"{quote(folder)}, a study of other data", rule, fix))
        for part, what in (("settings", "set"), ("space", "searched")):
            for name in {**kept[part], **wanted[part]}:
                before, now = (side[part].get(name) for side in (kept, wanted))
                if before != now:
                    got = f"{quote(now)}, but the study in {quote(folder)} was started with {quote(before)}"
                    raise ArgumentError(message(name, got, f"as at the start of the study, {what}", fix))

    def _revive(self) -> None:
        """Ask again for the trials whose processes died; their runs go on in their folders."""
        for trial in self._in_state("RUNNING"):
            place = self._place(trial, f"{trial.number:04}")
            with suppress(ArgumentError), locked(place):
                self.study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
                if trial.params:
                    self.study.enqueue_trial(dict(trial.params), user_attrs={"folder": place.name})

    def _try(self, trial: Any, chosen: Mapping[str, Any], place: Path, until: float) -> int | None:
        """Train a trial, and tell the study what came of it; or the signal that stopped it."""
        watcher = _Watcher(trial, until)
        words = ", ".join(f"{key_of(Settings, name)} {_short(value)}" for name, value in chosen.items())
        pruned = {"state": self._optuna.trial.TrialState.PRUNED}
        try:
            settings = replace(self.settings, **chosen)
            result = train(
                settings,
                self.parts.training,
                self.parts.validation,
                place,
                data=self.data,
                columns=self.columns,
                resume=(place / LAST).exists(),
                watcher=watcher,
                config=run_config(settings, self.data),
            )
            if result.stopped_by is not None:
                # Not told: whoever comes next sees that nobody is at work on it, and goes on.
                return result.stopped_by
            told, what = {"values": result.state.best_loss}, f"validation loss {result.state.best_loss:.4f}"
        except _Ended as end:
            told = {"values": watcher.best} if end.is_late and not self._in_state("COMPLETE") else pruned
            why = "out of time" if end.is_late else "worse than others, ended early"
            what = f"validation loss {watcher.best:.4f}, {why}"
        except DivergedError:
            told, what = pruned, "ran away"
        except ArgumentError as error:
            if (place / LAST).exists():
                raise
            told, what = pruned, f"left out: {error}"
        self.study.tell(trial, **told)
        self.say(f"trial {trial.number}: {what}  ({words})")
        return None

    def _result(self, stopped_by: int | None) -> Tuned:
        """How the search went."""
        complete, others = self._in_state("COMPLETE"), 0
        done = len(complete) + len(self._in_state("PRUNED"))
        for trial in self._in_state("RUNNING"):
            try:
                with locked(self._place(trial, "")):
                    pass
            except ArgumentError:
                others += 1
        if not complete:
            return Tuned(None, math.nan, self.settings, done, others, stopped_by)
        best = min(complete, key=lambda trial: float(trial.value))
        place = self._place(best, "")
        find(place, LAST)
        return Tuned(place, best.value, replace(self.settings, **best.params), done, others, stopped_by)


def _chosen(trial: Any, space: Space) -> dict[str, Any]:
    """What a trial is to try."""
    found = {}
    for name, values in space.items():
        if not isinstance(values, Range):
            found[name] = trial.suggest_categorical(name, list(values))
        elif values.whole:
            found[name] = trial.suggest_int(name, int(values.low), int(values.high), log=values.log)
        else:
            found[name] = trial.suggest_float(name, values.low, values.high, log=values.log)
    return found


def _not_whole(path: Path, got: str) -> CheckpointError:
    """The error of a study that is damaged."""
    fix = f"name another folder with {argument('folder')}"
    return CheckpointError(message(str(path), got, "an undamaged study of Raglane", fix))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
