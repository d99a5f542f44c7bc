"""Trainings for ``rl.fit`` and ``raglane train``: from the sources of data to the model card."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from raglane._utils.files import write_file
from raglane._utils.messages import argument, count_of, quote
from raglane.data.dataset import Dataset
from raglane.errors import ArgumentError, DataError, DivergedError
from raglane.report.figures import curves
from raglane.runs.advice import advise
from raglane.runs.card import DataParts, about, write_card
from raglane.runs.configuration import run_config
from raglane.runs.dry_run import try_run
from raglane.runs.parts import Log, read_parts
from raglane.runs.progress import LoggingWatcher, check_logger
from raglane.runs.sources import SavedSource, SequenceSource, Sources, check_default
from raglane.training.checkpoint import read_model
from raglane.training.folder import (
    DESCRIPTION,
    IS_BACK,
    LAST,
    claimed,
    find,
    to_resume,
)
from raglane.training.inference import evaluate, pick_device, steps_ahead
from raglane.training.job import RunDescription, TrainingResult, load_description, refuse_diverged
from raglane.training.machine import plan_batches
from raglane.training.own_cell import check_named, is_own
from raglane.training.run import check_settings, run_job
from raglane.training.settings import Settings, left_to_plan, task_defaults, without_task
from raglane.training.state import TrainingState, load_state
from raglane.training.tasks import CLASSES, settle

# The settings that may change when a run is resumed; they do not affect finished epochs.
_CHANGEABLE = (
    "epochs",
    "patience",
    "device",
    "processes",
    "engine",
    "threads",
    "workers",
    "logger",
    "checkpoint_minutes",
)

# The least number of sequences whose labels are doubted as classes.
_FEW = 10


class Trained(NamedTuple):
    """A finished or stopped training: its result, final settings, sequences and sources."""

    result: TrainingResult
    settings: Settings
    parts: DataParts
    sources: Sources
    advice: str | None


def train_run(
    sources: Sources | None,
    chosen: Mapping[str, Any],
    columns: Mapping[str, Any],
    out: Path | None,
    *,
    name_folder: Callable[[Settings], Path] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    log: Log,
    watch: Callable[[str], Any],
) -> Trained:
    """Train with the chosen settings, or resume the run in ``out``; ``sources`` None selects its
    own data.

    ``chosen`` may leave the size of batches to the planner, and the task to the labels. If ``out``
    is None, ``name_folder`` returns the folder; without it the model is kept in memory. A dry run
    ends after one batch, and writes nothing.
    """
    # Also `auto`, which is no longer among the choices then.
    fixed = set(chosen)
    chosen, plans = left_to_plan(chosen)
    before = None
    with ExitStack() as stack:
        if resume:
            if overwrite:
                got = f"True, with {argument('resume', True)}"
                raise ArgumentError("overwrite", got, "False to resume a run", "leave one out")
            out = to_resume(out)
            if stack.enter_context(claimed(out, resume=True)):
                log(IS_BACK)
            before = load_description(out)
            refuse_diverged(before, out)
            settings, sources = _resumed(before, out, chosen, columns, sources)
            _check(settings)
            records = sources.training.open(settings.task)
        else:
            sources = sources or Sources(SequenceSource(None, None).chosen(columns))
            claim = partial(claimed, overwrite=overwrite, dry_run=dry_run)
            if out is not None:
                stack.enter_context(claim(out))
            sources = sources.with_parsed({})
            settings, records = _opened(sources.training, chosen, log)
            if out is None and name_folder is not None:
                out = name_folder(settings)
                stack.enter_context(claim(out))
        sources, records, note = sources.by_characters(records, settings.task)
        # Its columns would stay in memory during the training.
        sources = sources.with_parsed(None)
        for line in (*role_lines(records), *filter(None, [note])):
            log(line)
        training, validation, test = read_parts(sources, records, settings, log)
        if plans is not None:
            settings, line = _planned(settings, training, plans)
            log(line)
        if before is None:
            settings = _settled(settings, training, validation, fixed, log)
        _report_too_long(settings, training, log)
        data = _saved_data(sources, before)
        parts = DataParts(training, validation, test, data.get("path"), in_memory=not data)
        if dry_run:
            try_run(settings, parts, out, log)
            nothing = TrainingResult(None, settings.terms.metric, TrainingState())
            return Trained(nothing, settings, parts, sources, None)
        watcher = watch(settings.terms.metric)
        if settings.logger is not None and out is not None:
            watcher = LoggingWatcher(settings, out, watcher)
        result, advice = _watched(
            settings, parts, out, before, watcher, data, sources.training.found_in(training)
        )
        return Trained(result, settings, parts, sources, advice)


def _saved_data(sources: Sources, before: RunDescription | None) -> dict[str, Any]:
    """Return the description of the data, for a resumed training; {} for data in memory."""
    if sources.training.held is None:
        return asdict(SavedSource.of(*sources))
    return {} if before is None else dict(before.data)


def role_lines(records: Dataset) -> list[str]:
    """Return two lines on the roles of the columns, and the other notes of the reader."""
    about = [*records.roles.rows, *records.roles.columns]
    lines = [note for note in records.notes if note not in about]
    if records.roles.columns:
        lines.insert(0, "; ".join(records.roles.columns))
    if records.roles.rows:
        elements = count_of(int(records.element_counts.sum()), "element")
        count = f"{count_of(len(records), 'sequence')}, {elements}"
        lines.insert(0, f"{count}: {'; '.join(records.roles.rows)}")
    return lines


def _settled(
    settings: Settings,
    training: Dataset,
    validation: Dataset | None,
    chosen: Container[str],
    log: Log,
) -> Settings:
    """Return the settings of a new run with everything that was left to the data."""
    settings, lines = settle(settings, training, validation, chosen)
    for line in (*lines, *CLASSES[settings.task].notes(training, validation, settings)):
        log(line)
    return settings


def _watched(
    settings: Settings,
    parts: DataParts,
    folder: Path | None,
    before: RunDescription | None,
    watcher: Any,
    data: Mapping[str, Any],
    columns: Mapping[str, Any],
) -> tuple[TrainingResult, str | None]:
    """Train, and draw the history even if training diverges; at the end, write the model card and
    return advice.
    """
    config = run_config(settings, data)
    more: dict[str, Any] = {"data": data, "columns": columns, "test": parts.test, "config": config}
    try:
        result = run_job(
            settings, parts.training, parts.validation, folder, before, callback=watcher, **more
        )
    except DivergedError:
        if (
            folder is not None
            and find(folder, DESCRIPTION).is_file()
            and load_description(folder).diverged is not None
        ):
            reached = TrainingResult(
                folder, settings.terms.metric, load_state(find(folder, LAST))[0]
            )
            _draw_curves(folder, reached, about(parts, settings))
        raise
    finally:
        if watcher is not None:
            watcher.close()
    if folder is not None:
        return result, close_run(folder, settings, result, parts)
    if result.stopped_by is not None or parts.validation is None:
        return result, None
    saved = read_model(result.best, Path("a run in memory"))
    validation = parts.validation
    device = pick_device(settings.device)
    evaluation = evaluate(saved, validation, device=device, horizon=steps_ahead(saved, validation))
    return result, advise(settings, result, evaluation, "validation", parts.training)


def close_run(
    folder: Path, settings: Settings, result: TrainingResult, parts: DataParts
) -> str | None:
    """Draw the history of a run and, unless it was stopped, write its model card; return advice on
    it.
    """
    _draw_curves(folder, result, about(parts, settings))
    return write_card(folder, settings, result, parts) if result.stopped_by is None else None


def _draw_curves(folder: Path, result: TrainingResult, title: str) -> None:
    if result.state.history:
        png = curves(result.state.history, result.metric, title, result.state.best_epoch)
        write_file(folder / "curves.png", png)


def _check(settings: Settings) -> None:
    check_settings(settings)
    check_logger(settings.logger)


def _opened(
    source: SequenceSource, chosen: Mapping[str, Any], log: Log
) -> tuple[Settings, Dataset]:
    """Return the settings and the sequences; an omitted task is guessed from the labels and the
    loss.
    """
    if "task" in chosen or source.is_default:
        settings = _settings(chosen, log)
        check_default(source, settings)
        _check(settings)
        return settings, source.open(settings.task)
    _check(without_task(chosen))
    records, task = guessed(source, chosen.get("loss"), log)
    return _settings({**chosen, "task": task}, log), records


def _settings(chosen: Mapping[str, Any], log: Log) -> Settings:
    """Return the settings of a new run, whose defaults are those of its task."""
    settings = Settings(**task_defaults(chosen))
    if settings.bidirectional and "bidirectional" not in chosen:
        forwards = argument("bidirectional", False)
        log(f"directions: 2, because tags may depend on what follows; {forwards} for live streams")
    return settings


def guessed(source: SequenceSource, loss: str | None, log: Log) -> tuple[Dataset, str]:
    """Return the sequences, and the task guessed from their labels and the loss."""
    records, task = source.guess(loss)
    labels = records.labels if records.is_in_memory else None
    if (
        task == "classify"
        and labels
        and len(labels) >= _FEW
        and (different := len(set(labels))) > 0.9 * len(labels)
    ):
        if records.label_kinds == ("whole numbers",):
            got = f"{different:,} different whole numbers for {count_of(len(labels), 'sequence')}"
            rule = "classes that repeat"
            fix = f"pass {argument('task', 'regress')} for numbers to predict"
            raise DataError("labels", got, rule, f"{fix}, or {argument('task', 'classify')}")
        texts = argument("task", "transcribe")
        log(
            f"labels: {different:,} different ones; to predict their characters or words, pass {texts}"
        )
    if task != "classify":
        log(f"task: {task} (guessed; {argument('task')} chooses)")
    return records, task


def _resumed(
    before: RunDescription,
    folder: Path,
    chosen: Mapping[str, Any],
    columns: Mapping[str, Any],
    other_sources: Sources | None,
) -> tuple[Settings, Sources]:
    """Return the settings and sources of a resumed run: its own, with the allowed changes."""
    layer = chosen.get("cell")
    cell = layer if isinstance(layer, str) and is_own(layer) else None
    # A user-defined cell must be that of the run, and is not compared as text.
    check_named(before.settings.cell, cell)
    chosen = {name: value for name, value in chosen.items() if name != "cell" or cell is None}
    settings = replace(before.settings, **_changes_of(folder, asdict(before.settings), chosen))
    if not before.data:
        if other_sources is None:
            rule = "a run with data in files; this one was trained in Python, on data in memory"
            fix = f"resume it in Python: rl.fit(data, output={str(folder)!r}, resume=True)"
            raise ArgumentError("resume", quote(str(folder)), rule, fix)
        return settings, other_sources
    saved = SavedSource.load(folder, before.data)
    training = saved.source(saved.path)
    _changes_of(folder, training.stored, training.chosen(columns).stored)
    named = other_sources or Sources(training)

    def part(source: SequenceSource | None, path: str | None) -> SequenceSource | None:
        if source is None:
            return None if path is None else saved.source(path)
        return of_run(source)

    def of_run(source: SequenceSource) -> SequenceSource:
        return replace(source.chosen(saved.columns), format=source.format or saved.format)

    return settings, Sources(
        of_run(named.training),
        part(named.validation, saved.validation),
        part(named.test, saved.test),
    )


def _changes_of(
    folder: Path, before: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the given settings that differ from a run's, or raise if they may not change."""
    changes = {name: value for name, value in values.items() if value != before[name]}
    refused = next((name for name in changes if name not in _CHANGEABLE), None)
    if refused is not None:
        rule = (
            f"the value of the run, as for all settings but {', '.join(map(argument, _CHANGEABLE))}"
        )
        got = f"{changes[refused]!r}, and the run in {str(folder)!r} was started with another value"
        raise ArgumentError(
            refused, got, rule, f"leave {argument(refused)} out, or start a new run"
        )
    return changes


def _planned(settings: Settings, training: Dataset, what: str) -> tuple[Settings, str]:
    """Return the settings with the planner's batches, and the reason as a line."""
    settings, why = plan_batches(settings, training, what)
    kind = "of similar lengths" if settings.bucket else "in random order"
    size = count_of(settings.batch_size, "sequence")
    if what == "batch_elements":
        size = f"up to {count_of(settings.batch_elements or 0, 'element')}"
    return settings, f"batches: {size} {kind}. {why}"


def _report_too_long(settings: Settings, training: Dataset, log: Log) -> None:
    """Print the number of sequences that exceed a batch."""
    most = settings.batch_elements
    words = {"drop": "left out", "chunk": "cut into chunks", "alone": "batches of their own"}
    if most is not None and settings.too_long in words:
        count = int((training.lengths.numpy() > most).sum())
        what = words[settings.too_long]
        log(f"longer than a batch of {most:,} elements: {count_of(count, 'sequence')}, {what}")
