"""``rl.fit``: training in Python."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack, get_type_hints

import numpy as np
import torch

from raglane._utils.checks import check_flag, check_kind
from raglane._utils.files import as_path
from raglane._utils.json import checked, rule_of
from raglane._utils.messages import nearest, quote, require
from raglane._utils.options import options as described
from raglane.data.dataset import Dataset
from raglane.errors import ArgumentTypeError
from raglane.runs.options import FitOptions
from raglane.runs.progress import BarWatcher, CallingWatcher
from raglane.runs.run import Run
from raglane.runs.sources import SequenceSource, Sources
from raglane.runs.training import train_run
from raglane.training.checkpoint import load_model, read_model
from raglane.training.job import TrainingResult
from raglane.training.own_cell import name_cell
from raglane.training.run import follow
from raglane.training.settings import Settings


def fit(
    data: Any,
    labels: Any = None,
    *,
    validation: Any = None,
    test: Any = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    format: str | None = None,
    progress: bool | None = None,
    callback: Callable[[dict[str, float]], bool | None] | None = None,
    **options: Unpack[FitOptions],
) -> Run:
    """Train a model, as ``raglane train`` does.

    Args:
        data: a file or folder, or sequences in memory: a list, a generator, an array, a table, a
            Ragged (see :func:`raglane.data.read`).
        labels: one entry per sequence, if ``data`` has none.
        validation: the data whose loss selects the best epoch, as ``data`` or ``(data, labels)``;
            None holds a part of the training data out.
        test: the default data of :meth:`Run.evaluate`, as ``data`` or ``(data, labels)``.
        output: the folder of the run. None keeps the model in memory; :meth:`Run.save` can write it.
        resume: continue the run in ``output`` with the same data and settings.
        overwrite: replace the run in ``output`` when the new one has its first checkpoint.
        format: the format of a file; None detects it from the suffix.
        progress: show a progress bar; None shows it on a terminal and in a notebook.
        callback: a function that is called after each epoch with its losses and metrics, a dict
            with the columns of ``curves.csv``. If it returns True, training stops; the best epoch
            so far is kept. With several ``processes`` training continues.
        **options: the fields of :class:`~raglane.training.settings.Settings`, and the columns
            ``sequence``, ``label``, ``id``, ``time`` and ``features``. ``batch_size`` or
            ``batch_elements`` may be ``"auto"``.

    Returns:
        The run with its best model. Ctrl-C saves the run in ``output``, which can be resumed, and
        raises KeyboardInterrupt.

    Raises:
        ArgumentTypeError: an unknown option, or data or an option of the wrong type.
        ArgumentError: an option or the folder is invalid.
        DataError: the data is invalid.
        DivergedError: training diverged; ``output`` contains the best model so far.
        MissingExtraError: safetensors is not installed.
        OSError: a file cannot be written.

    Example:
        >>> import raglane as rl
        >>> run = rl.fit([[0.1, 0.4, 0.9], [0.8, 0.2]] * 4, ["up", "down"] * 4, epochs=40, hidden_size=8)
        >>> run.notes[1]
        'validation: 1 sequence, 10 % of the training sequences, stratified by label, seed 0, without 1 of 2 classes'
        >>> run.evaluate([[0.2, 0.3, 0.8]], ["up"])["accuracy"]
        1.0
    """
    with _own_state(options.get("device")):
        result = follow()
    if result is not None:
        return _run_of(result, (), None)
    chosen, columns = _split_options(options)
    if isinstance(chosen.get("cell"), str):
        chosen["cell"] = name_cell(chosen["cell"])
    check_flag("resume", resume)
    check_flag("overwrite", overwrite)
    if progress is not None:
        check_flag("progress", progress)
    if callback is not None:
        rule = "a function of the losses and metrics of an epoch"
        check_kind("callback", callback, Callable, rule, "pass e.g. print, or leave it out")
    source = SequenceSource(None, format).chosen(columns)
    validated = None if validation is None else source.of(*_pair(validation), "validation")
    tested = None if test is None else source.of(*_pair(test), "test")
    notes: list[str] = []
    with _own_state(options.get("device")):
        trained = train_run(
            Sources(source.of(data, labels), validated, tested),
            chosen,
            columns,
            None if output is None else as_path(output),
            resume=resume,
            overwrite=overwrite,
            log=notes.append,
            watch=lambda metric: _watcher(metric, progress, callback),
        )
    if trained.result.stopped_by is not None:
        # After saving, the signal has its usual effect.
        signal.raise_signal(trained.result.stopped_by)
    notes += [] if trained.advice is None else [trained.advice]
    return _run_of(trained.result, tuple(notes), None if test is None else trained.parts.test)


def _run_of(result: TrainingResult, notes: tuple[str, ...], test: Dataset | None) -> Run:
    """Return the run of a training."""
    folder = result.folder
    saved = (
        load_model(folder)
        if folder is not None
        else read_model(result.best, Path("a run in memory"))
    )
    return Run(saved, folder, result, notes, test)


def _split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the columns among the options."""
    settings = [field.name for field in fields(Settings)]
    columns = list(SequenceSource(None, None).stored)
    unknown = next((name for name in options if name not in (*settings, *columns)), None)
    if unknown is not None:
        near = nearest(unknown, [*settings, *columns, *(fit.__kwdefaults__ or ())])
        fix = f"pass {near}" if near else "see raglane.training.settings.Settings"
        rule = "an option of raglane.training.settings.Settings, or a column"
        raise ArgumentTypeError("options", quote(unknown), rule, fix)
    chosen = {name: _typed(name, value) for name, value in options.items() if name in settings}
    return chosen, {name: value for name, value in options.items() if name in columns}


def _typed(name: str, value: Any) -> Any:
    """Return the value of a setting, or raise if it has the wrong type."""
    plain = value
    if isinstance(value, np.generic):
        plain = value.item()
    elif isinstance(value, tuple):
        plain = list(value)
    if plain is not None and plain == described(Settings)[name].also:
        return plain
    try:
        return checked(get_type_hints(Settings)[name], plain, name)
    except ValueError as error:
        raise ArgumentTypeError(
            name, quote(plain), rule_of(error), "convert it, or leave it out"
        ) from error


def _pair(data: Any) -> tuple[Any, Any]:
    """Return data and labels of a validation or test part."""
    return data if isinstance(data, tuple) and len(data) == 2 else (data, None)


@contextmanager
def _own_state(device: Any) -> Iterator[None]:
    """Restore the states of random generators and the number of threads."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and device != "cpu" else []
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _watcher(metric: str, progress: bool | None, callback: Any) -> Any:
    """Return the watcher of a training: a bar, a call of the user's function, both or None."""
    bar = _bar(metric, progress)
    return bar if callback is None else CallingWatcher(bar, callback)


def _bar(metric: str, progress: bool | None) -> BarWatcher | None:
    """Return a progress bar if it is requested, or shown by default."""
    is_interactive = (sys.stdout is not None and sys.stdout.isatty()) or "ipykernel" in sys.modules
    if not (is_interactive if progress is None else progress):
        return None
    try:
        require("rich", "cli")
    except ImportError:
        if progress:
            raise
        return None
    return BarWatcher(metric)
