"""One training from its data to its pictures and its card: for ``rl.fit`` and ``raglane train`` alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raglane._utils.files import write_file
from raglane.data.records import Records, note_empty
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, DivergedError, argument, count_of, message, quote
from raglane.report.figures import curves_png
from raglane.runs.card import Parts, about, write_card
from raglane.runs.configuration import run_config
from raglane.runs.holding_out import divide
from raglane.runs.progress import LoggingWatcher, check_logger
from raglane.runs.sources import ColumnNames, SavedSource, Source, Sources, check_default
from raglane.training.folder import DESCRIPTION, IS_BACK, LAST, claimed, find, to_resume
from raglane.training.job import RunDescription, TrainingResult, load_description, refuse_diverged
from raglane.training.machine import plan_batches
from raglane.training.own_cell import check_named, is_own
from raglane.training.run import check_settings, run_job
from raglane.training.settings import Settings, left_to_plan
from raglane.training.state import load_state
from raglane.training.tasks import TASKS, settle

# What may differ when a run goes on: nothing that would change what the epochs so far have done.
_CHANGEABLE = ("epochs", "patience", "device", "ranks", "engine", "threads", "workers", "logger")

Say = Callable[[str], None]


class Trained(NamedTuple):
    """A training that has ended or was stopped, with its final settings, its sequences and their sources."""

    result: TrainingResult
    settings: Settings
    parts: Parts
    sources: Sources


def train_run(
    sources: Sources | None,
    chosen: Mapping[str, Any],
    columns: Mapping[str, Any],
    out: Path | None,
    *,
    name_folder: Callable[[Settings], Path] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    say: Say,
    watch: Callable[[str], Any],
) -> Trained:
    """Train on data with the settings that were chosen, or go on with the run in ``out``; its own data for None.

    ``chosen`` may leave a size of batches to the planner, and the task to the labels. ``name_folder`` gives the folder
    where ``out`` is None; without it the model is kept in memory.
    """
    chosen, plans = left_to_plan(chosen)
    before = None
    with ExitStack() as stack:
        if resume:
            if overwrite:
                got = f"True, with {argument('resume', True)}"
                raise ArgumentError(message("overwrite", got, "one of the two", "leave one out"))
            out = to_resume(out)
            if stack.enter_context(claimed(out, resume=True)):
                say(IS_BACK)
            before = load_description(out)
            refuse_diverged(before, out)
            settings, sources = _resumed(before, out, chosen, columns, sources)
            _check(settings)
            records = sources.training.open(settings.task)
        else:
            sources = sources or Sources(Source(None, None, ColumnNames(**columns)))
            if out is not None:
                stack.enter_context(claimed(out, overwrite=overwrite))
            settings, records = _opened(sources.training, chosen, say)
            if out is None and name_folder is not None:
                out = name_folder(settings)
                stack.enter_context(claimed(out, overwrite=overwrite))
        for line in records.notes:
            say(line)
        training, validation, test = read_parts(sources, records, settings, say)
        if before is None:
            settings, note = settle(settings, training)
            if note is not None:
                say(note)
        if plans is not None:
            settings, line = _planned(settings, training, plans)
            say(line)
        _tell_too_long(settings, training, say)
        data = {} if sources.training.held is not None else asdict(SavedSource.of(*sources))
        data = data or ({} if before is None else dict(before.data))
        parts = Parts(training, validation, test, data.get("path"), in_memory=not data)
        watcher = watch(TASKS[settings.task].terms(settings)[0])
        if settings.logger is not None and out is not None:
            watcher = LoggingWatcher(settings, out, watcher)
        found = sources.training.found_in(training)
        result = _watched(settings, parts, out, before, watcher, data, found)
        return Trained(result, settings, parts, sources)


def _watched(
    settings: Settings,
    parts: Parts,
    folder: Path | None,
    before: RunDescription | None,
    watcher: Any,
    data: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> TrainingResult:
    """Train, and draw the history in the run's folder, however the training ends; at its end, write the model card."""
    config = run_config(settings, data)
    more: dict[str, Any] = {"data": data, "columns": columns, "test": parts.test, "config": config}
    try:
        result = run_job(settings, parts.training, parts.validation, folder, before, watcher=watcher, **more)
    except DivergedError:
        if folder is not None and find(folder, DESCRIPTION).is_file() and load_description(folder).diverged is not None:
            state = load_state(find(folder, LAST))[0]
            reached = TrainingResult(folder, TASKS[settings.task].terms(settings)[0], state)
            _draw_curves(folder, reached, about(parts, settings))
        raise
    finally:
        if watcher is not None:
            watcher.close()
    if folder is not None:
        close_run(folder, settings, result, parts)
    return result


def close_run(folder: Path, settings: Settings, result: TrainingResult, parts: Parts) -> None:
    """Draw the history of a run and, if it has come to its end, write its model card."""
    _draw_curves(folder, result, about(parts, settings))
    if result.stopped_by is None:
        write_card(folder, settings, result, parts)


def _draw_curves(folder: Path, result: TrainingResult, title: str) -> None:
    if result.state.history:
        png = curves_png(result.state.history, result.metric, title, result.state.best_epoch)
        write_file(folder / "curves.png", png)


# ---------------------------------------------------------------------------------------------------------------------
# Settings and sources
# ---------------------------------------------------------------------------------------------------------------------


def _check(settings: Settings) -> None:
    check_settings(settings)
    check_logger(settings.logger)


def _opened(source: Source, chosen: Mapping[str, Any], say: Say) -> tuple[Settings, Records | Dataset]:
    """The settings, and the sequences; a task that was not chosen is that which their labels, and the loss, are for."""
    if "task" in chosen or source.is_default:
        settings = Settings(**chosen)
        check_default(source, settings)
        _check(settings)
        return settings, source.open(settings.task)
    # A loss may say more about the task than the labels do.
    loss = chosen.get("loss")
    settings = Settings(**{**chosen, "loss": None})
    _check(settings)
    records, task = source.guess(loss)
    if task != "classify":
        say(f"task: {task} (guessed; {argument('task')} chooses)")
    return Settings(**{**chosen, "task": task}), records


def _resumed(
    before: RunDescription,
    folder: Path,
    chosen: Mapping[str, Any],
    columns: Mapping[str, Any],
    given: Sources | None,
) -> tuple[Settings, Sources]:
    """The settings and sources of a run that goes on: its own, but for what may change."""
    layer = chosen.get("layer")
    cell = layer if isinstance(layer, str) and is_own(layer) else None
    # Without the user's own cell, which must be the one of the run.
    check_named(before.settings.layer, cell)
    chosen = {name: value for name, value in chosen.items() if name != "layer" or cell is None}
    settings = replace(before.settings, **_changes_of(folder, before.settings, chosen))
    if not before.data:
        if given is None:
            rule = "this run was started from Python, with data in memory"
            fix = f"go on from there: rl.fit(data, out={str(folder)!r}, resume=True)"
            raise ArgumentError(message("resume", quote(str(folder)), rule, fix))
        return settings, given
    saved = SavedSource.load(folder, before.data)
    _changes_of(folder, saved.columns, columns)
    named = given or Sources(saved.source(saved.path))

    def part(source: Source | None, path: str | None) -> Source | None:
        if source is None:
            return None if path is None else saved.source(path)
        return replace(source, columns=saved.columns, format=source.format or saved.format)

    training = replace(named.training, columns=saved.columns, format=named.training.format or saved.format)
    return settings, Sources(training, part(named.validation, saved.validation), part(named.test, saved.test))


def _changes_of(folder: Path, before: Settings | ColumnNames, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that change when it goes on."""
    known = asdict(before)
    changes = {name: value for name, value in given.items() if value != known[name]}
    refused = next((name for name in changes if name not in _CHANGEABLE), None)
    if refused is not None:
        rule = f"a run goes on with its own settings; only {', '.join(map(argument, _CHANGEABLE))} may change"
        got = f"{changes[refused]!r}, and the run in {str(folder)!r} was started with another value"
        raise ArgumentError(message(refused, got, rule, f"leave {argument(refused)} out, or start a new run"))
    return changes


def read_parts(
    sources: Sources, records: Records | Dataset, settings: Settings, say: Say
) -> tuple[Records | Dataset, Records | Dataset | None, Records | None]:
    """The training, validation and test part; the last is read now, so that a mistake in it shows at once."""
    given = None if sources.validation is None else _read(sources.validation, settings, say)
    where = "" if sources.validation is None else sources.validation.where
    training, validation, notes = divide(records, given, settings, sources.training.where, where)
    for note in notes:
        say(note)
    if sources.test is not None:
        return training, validation, _read(sources.test, settings, say)
    is_default = sources.training.is_default
    return training, validation, sources.training.read(settings.task, part="test") if is_default else None


def _read(source: Source, settings: Settings, say: Say) -> Records:
    records = source.read(settings.task)
    if settings.task == "classify" and (note := note_empty(records)):
        say(f"{source.where}: {note}")
    return records


def _planned(settings: Settings, training: Records | Dataset, what: str) -> tuple[Settings, str]:
    """The settings with the batches that the planner advises, and a line on why."""
    settings, why = plan_batches(settings, training, what)
    kind = "of similar lengths" if settings.bucket else "in random order"
    size = count_of(settings.batch_size, "sequence")
    if what == "batch_elements":
        size = f"up to {count_of(settings.batch_elements or 0, 'element')}"
    return settings, f"batches: {size} {kind}. {why}"


def _tell_too_long(settings: Settings, training: Records | Dataset, say: Say) -> None:
    """Say how many sequences do not fit into a batch, and what becomes of them."""
    most, words = settings.batch_elements, {"drop": "left out", "split": "split", "alone": "batches of their own"}
    if most is not None and settings.too_long in words:
        # The last element of a forecast is no input; a dataset gives the lengths of its inputs.
        targets = isinstance(training, Records) and settings.task == "forecast"
        count = int((np.asarray(training.lengths) - targets > most).sum())
        what = words[settings.too_long]
        say(f"longer than a batch of {most:,} elements: {count_of(count, 'sequence')}, {what}")
