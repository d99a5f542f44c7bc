"""Training from Python: ``rl.fit``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raglane._utils.checks import check_flag
from raglane._utils.reading import as_path
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, ArgumentTypeError, argument, message, nearest, quote, require
from raglane.runs.guessing import LABELLED, guess_task
from raglane.runs.logs import check_logger
from raglane.runs.run import Run
from raglane.runs.sources import (
    ColumnNames,
    SavedSource,
    Source,
    chosen_columns,
)
from raglane.runs.steps import changes_of, divide, planned, run_training, without_own_cell
from raglane.training.checkpoint import load_model, read_model
from raglane.training.folder import at_work, check_folder
from raglane.training.job import TrainingResult, load_description, refuse_diverged
from raglane.training.machine import check_machine
from raglane.training.own_cell import name_cell
from raglane.training.settings import Settings, left_to_plan
from raglane.training.stored import build, rule_of
from raglane.training.tasks import TASKS, settle

__all__ = ["fit"]


def fit(
    data: Any,
    labels: Any = None,
    *,
    validation: Any = None,
    test: Any = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    format: str | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Run:
    """Train a model, as ``raglane train`` does.

    Args:
        data: a file or folder, or what a program holds: a list of sequences, an array, a table, a Ragged (see
            :func:`raglane.data.records_from`).
        labels: one entry per sequence, where ``data`` does not have them.
        validation: what decides which epoch is best: as ``data``, or ``(data, labels)``. None holds a part out.
        test: what :meth:`Run.evaluate` measures on if it is given no data: as ``data``, or ``(data, labels)``.
        out: the folder of the run. None keeps the model in memory alone; :meth:`Run.save` writes it later.
        resume: go on with the run in ``out``, on the same data, with its settings.
        overwrite: replace the run in ``out``, once the new one has a checkpoint.
        format: of a file; None goes by the suffix.
        progress: whether to show a bar; None shows one on a terminal and in a notebook.
        **options: those of the command, by the names of :class:`~raglane.training.settings.Settings` (``layer`` is
            ``--cell``), and for columns ``sequence``, ``label``, ``id``, ``time`` and ``features``. ``batch_size``
            or ``batch_elements`` may be ``"auto"``.

    Returns:
        The run, with its best model. Ctrl-C ends a training as it ends a program; what is in ``out`` is saved, and can
        go on.

    Raises:
        ArgumentTypeError: an option that there is not, or data or an option of the wrong kind.
        ArgumentError: an option or the folder breaks a rule.
        DataError: the data cannot be used.
        DivergedError: the loss ran away; in ``out`` the best model until then is kept.
        MissingExtraError: safetensors is not installed.
        OSError: a file cannot be written.

    Example:
        >>> import raglane as rl
        >>> run = rl.fit([[0.1, 0.4, 0.9], [0.8, 0.2]] * 4, ["up", "down"] * 4, epochs=40, hidden=8)
        >>> run.notes[-1]
        'validation: 1 sequence, 10 % of the training sequences, stratified by label, seed 0'
        >>> run.evaluate([[0.2, 0.3, 0.8]], ["up"])["accuracy"]
        1.0
    """
    if os.environ.get("RANK", "0") != "0":
        followed = _followed()
        if followed is not None:
            return followed
    chosen, columns, plans = _sorted(options)
    if isinstance(chosen.get("layer"), str):
        chosen["layer"] = name_cell(chosen["layer"])
    folder = None if out is None else as_path(out)
    check_flag("resume", resume)
    check_flag("overwrite", overwrite)
    is_guessed = not resume and "task" not in options
    # A loss may say more about the task than the labels do.
    loss = chosen.pop("loss", None) if is_guessed else None
    settings, source, kept = _beginning(folder, chosen, columns, format, resume)
    check_machine(settings)
    check_logger(settings.logger)
    if folder is not None:
        check_folder(folder, resume=resume, overwrite=overwrite)
    if is_guessed:
        records, task = _guessed(data, labels, source, loss)
        settings = _settings(settings.to_config() | {"task": task, "loss": loss})
    else:
        records = _open(data, labels, source, settings.task)
    given = None if validation is None else _read_part(validation, source, settings.task, "validation")
    tested = None if test is None else _read_part(test, source, settings.task, "test")
    kept = kept or _origin(data, source, validation, test)
    training, held_out, notes = divide(records, given, settings, _name(data), _name(validation))
    if not resume:
        settings, settled = settle(settings, training)
        notes = notes if settled is None else (*notes, settled)
    if plans is not None:
        settings, line = planned(settings, training, plans)
        notes = (*notes, line)
    with _own_state(settings):
        result = _train(
            settings, training, held_out, folder, kept, source.found_in(records), tested, resume, overwrite, progress
        )
    if result.stopped_by is not None:
        # What is saved is saved: from here on the signal does what it does everywhere.
        signal.raise_signal(result.stopped_by)
    return _run_of(result, (*records.notes, *notes), tested)


def _followed() -> Run | None:
    """The run that another process leads, where torchrun has started this one beside it: it reads no data."""
    from raglane.training.ranks.elsewhere import follow
    from raglane.training.ranks.group import ranks_of

    ranks = ranks_of()
    if ranks is None or ranks.is_first:
        return None
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            result = follow(ranks)
    finally:
        torch.set_num_threads(threads)
    return _run_of(result, (), None)


def _run_of(result: TrainingResult, notes: tuple[str, ...], test: Records | None) -> Run:
    """The run that a training has made."""
    folder = result.folder
    saved = load_model(folder) if folder is not None else read_model(result.best, Path("a run in memory"))
    return Run(saved, folder, result, notes, test)


def _train(
    settings: Settings,
    training: Records | Dataset,
    validation: Records | Dataset | None,
    folder: Path | None,
    data: Mapping[str, Any],
    columns: Mapping[str, Any],
    test: Records | None,
    resume: bool,
    overwrite: bool,
    progress: bool | None,
) -> TrainingResult:
    """Train, with a bar where one is wanted."""
    with at_work(folder) if folder is not None else nullcontext():
        return run_training(
            settings,
            training,
            validation,
            folder,
            data=data,
            columns=columns,
            resume=resume,
            overwrite=overwrite,
            test=test,
            watcher=_bar(settings, progress),
        )


# ---------------------------------------------------------------------------------------------------------------
# What a call asks for
# ---------------------------------------------------------------------------------------------------------------


def _sorted(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """The settings among the options, the columns among them, and which is to be planned."""
    settings, columns = [[field.name for field in fields(kind)] for kind in (Settings, ColumnNames)]
    unknown = next((name for name in options if name not in (*settings, *columns)), None)
    if unknown is not None:
        near = nearest(unknown, [*settings, *columns])
        fix = f"pass {near}, perhaps" if near else "see raglane.training.settings.Settings"
        rule = "an option of raglane.training.settings.Settings, or a column"
        raise ArgumentTypeError(message("options", quote(unknown), rule, fix))
    chosen = {name: value for name, value in options.items() if name in settings}
    chosen, plans = left_to_plan(chosen)
    return chosen, chosen_columns({name: value for name, value in options.items() if name in columns}), plans


def _beginning(
    folder: Path | None, chosen: Mapping[str, Any], columns: Mapping[str, Any], format: str | None, resume: bool
) -> tuple[Settings, Source, Mapping[str, Any]]:
    """The settings, how files are read, and where the data of a run that goes on came from."""
    if not resume:
        return _settings(chosen), Source(None, format, ColumnNames(**columns)), {}
    if folder is None:
        raise ArgumentError(message("out", "None", "to go on needs the folder of a run", f"give {argument('out')}"))
    check_folder(folder, resume=True)
    description = load_description(folder)
    refuse_diverged(description, folder)
    chosen = without_own_cell(description.settings.layer, chosen)
    names = SavedSource.load(folder, description.data).columns if description.data else ColumnNames(**columns)
    changes = changes_of(folder, description.settings, chosen)
    settings = _settings(description.settings.to_config() | changes)
    changes_of(folder, names, columns)
    return settings, Source(None, format, names), description.data


def _settings(chosen: Mapping[str, Any]) -> Settings:
    """Settings of values that a program gives, which may be of any kind."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in chosen.items()}
    try:
        return build(Settings, plain, "options")
    except ArgumentError:
        raise
    except ValueError as error:
        # The words for a file that somebody has edited are not those for a program.
        name = str(error).removeprefix("options.").partition(" = ")[0]
        fix = "convert it, or leave it out"
        raise ArgumentTypeError(message(name, quote(plain.get(name)), rule_of(error), fix)) from error


def _guessed(data: Any, labels: Any, source: Source, loss: Any) -> tuple[Records | Dataset, str]:
    """Records, and the task that their labels, and a loss, are for."""
    if isinstance(data, Records):
        records = _read(data, labels, source, "classify", "data") if labels is not None else data
        if records.targets is not None:
            return records, "regress" if records.targets.is_numbers else "multilabel"
        return records, "tag" if records.labels is None and records.tags is not None else "classify"
    if isinstance(data, (str, os.PathLike)) and labels is None:
        return replace(source, path=as_path(data)).guess(loss)
    return guess_task(lambda task: _read(data, labels, source, task, "data"), LABELLED, loss)


def _open(data: Any, labels: Any, source: Source, task: str) -> Records | Dataset:
    """Records of what was given, but a folder that was converted is not read."""
    if isinstance(data, (str, os.PathLike)) and labels is None:
        return replace(source, path=as_path(data)).open(task)
    return _read(data, labels, source, task, "data")


def _read(data: Any, labels: Any, source: Source, task: str, name: str) -> Records:
    """Records of what was given."""
    if not isinstance(data, (str, os.PathLike)):
        return source.take(data, labels, task)
    if labels is not None:
        rule = "a file has its labels in a column"
        raise ArgumentTypeError(message("labels", f"labels beside a file as {name}", rule, "name it, as label='kind'"))
    return replace(source, path=as_path(data)).read(task)


def _read_part(given: Any, source: Source, task: str, name: str) -> Records:
    """Another part: as the data, or a pair of data and labels."""
    data, labels = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    return _read(data, labels, source, task, name)


def _name(data: Any) -> str:
    return str(data) if isinstance(data, (str, os.PathLike)) else "memory"


def _origin(data: Any, source: Source, validation: Any, test: Any) -> dict[str, Any]:
    """Where the data comes from, as run.json keeps it; nothing where it is in memory."""

    def text(path: Any) -> str | None:
        return str(Path(path).absolute()) if isinstance(path, (str, os.PathLike)) else None

    if text(data) is None:
        return {}
    saved = SavedSource(text(data), source.format, source.columns, text(validation), text(test))
    return asdict(saved)


# ---------------------------------------------------------------------------------------------------------------
# Manners in somebody else's program
# ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _own_state(settings: Settings) -> Iterator[None]:
    """Leave random numbers and the number of threads as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and settings.device != "cpu" else []
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _bar(settings: Settings, progress: bool | None) -> Any:
    """A bar, where somebody is looking and wants one."""
    if progress is not None:
        check_flag("progress", progress)
    if progress is None and not (sys.stdout is not None and sys.stdout.isatty()) and "ipykernel" not in sys.modules:
        return None
    if progress is False:
        return None
    try:
        require("rich", "cli")
    except ImportError:
        if progress:
            raise
        return None
    from raglane.runs.progress import BarWatcher

    return BarWatcher(TASKS[settings.task].terms(settings)[0])
