"""Training from Python: ``rl.fit``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch

from raglane._utils.checks import check_flag
from raglane._utils.files import as_path
from raglane._utils.messages import message, nearest, quote, require
from raglane.data.dataset import Dataset
from raglane.errors import ArgumentTypeError
from raglane.runs.progress import BarWatcher
from raglane.runs.run import Run
from raglane.runs.sources import ColumnNames, Source, Sources, chosen_columns
from raglane.runs.training import train_run
from raglane.training.checkpoint import load_model, read_model
from raglane.training.job import TrainingResult
from raglane.training.options import options as described
from raglane.training.own_cell import name_cell
from raglane.training.run import follow
from raglane.training.settings import Settings
from raglane.training.stored import checked, rule_of


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
            :func:`raglane.data.read`).
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
        >>> run = rl.fit([[0.1, 0.4, 0.9], [0.8, 0.2]] * 4, ["up", "down"] * 4, epochs=40, hidden_size=8)
        >>> run.notes[-1]
        'validation: 1 sequence, 10 % of the training sequences, stratified by label, seed 0'
        >>> run.evaluate([[0.2, 0.3, 0.8]], ["up"])["accuracy"]
        1.0
    """
    with _own_state(options.get("device")):
        result = follow()
    if result is not None:
        return _run_of(result, (), None)
    chosen, columns = _sorted(options)
    if isinstance(chosen.get("cell"), str):
        chosen["cell"] = name_cell(chosen["cell"])
    check_flag("resume", resume)
    check_flag("overwrite", overwrite)
    if progress is not None:
        check_flag("progress", progress)
    source = Source(None, format, ColumnNames(**columns))
    validated = None if validation is None else source.of(*_pair(validation), "validation")
    tested = None if test is None else source.of(*_pair(test), "test")
    notes: list[str] = []
    with _own_state(options.get("device")):
        trained = train_run(
            Sources(source.of(data, labels), validated, tested),
            chosen,
            columns,
            None if out is None else as_path(out),
            resume=resume,
            overwrite=overwrite,
            say=notes.append,
            watch=lambda metric: _bar(metric, progress),
        )
    if trained.result.stopped_by is not None:
        # What is saved is saved: from here on the signal does what it does everywhere.
        signal.raise_signal(trained.result.stopped_by)
    return _run_of(trained.result, tuple(notes), None if test is None else trained.parts.test)


def _run_of(result: TrainingResult, notes: tuple[str, ...], test: Dataset | None) -> Run:
    """The run that a training has made."""
    folder = result.folder
    saved = load_model(folder) if folder is not None else read_model(result.best, Path("a run in memory"))
    return Run(saved, folder, result, notes, test)


def _sorted(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings among the options, and the columns."""
    settings, columns = [[field.name for field in fields(kind)] for kind in (Settings, ColumnNames)]
    unknown = next((name for name in options if name not in (*settings, *columns)), None)
    if unknown is not None:
        near = nearest(unknown, [*settings, *columns])
        fix = f"pass e.g. {near}" if near else "see raglane.training.settings.Settings"
        rule = "options of raglane.training.settings.Settings, or columns"
        raise ArgumentTypeError(message("options", quote(unknown), rule, fix))
    chosen = {name: _typed(name, value) for name, value in options.items() if name in settings}
    return chosen, chosen_columns({name: value for name, value in options.items() if name in columns})


def _typed(name: str, value: Any) -> Any:
    """The value of a setting that a program gives, which may be of any kind."""
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is not None and plain == described(Settings)[name].also:
        return plain
    try:
        return checked(get_type_hints(Settings)[name], plain, name)
    except ValueError as error:
        fix = "convert it, or leave it out"
        raise ArgumentTypeError(message(name, quote(plain), rule_of(error), fix)) from error


def _pair(given: Any) -> tuple[Any, Any]:
    """Data and labels of another part."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, None)


@contextmanager
def _own_state(device: Any) -> Iterator[None]:
    """Leave random numbers and the number of threads as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and device != "cpu" else []
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _bar(metric: str, progress: bool | None) -> BarWatcher | None:
    """A bar, where somebody is looking and wants one."""
    is_seen = (sys.stdout is not None and sys.stdout.isatty()) or "ipykernel" in sys.modules
    if not (is_seen if progress is None else progress):
        return None
    try:
        require("rich", "cli")
    except ImportError:
        if progress:
            raise
        return None
    return BarWatcher(metric)
