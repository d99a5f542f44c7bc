"""The steps of a training that ``rl.fit`` and ``raglane train`` take alike, from what was read to the pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from raglane.data.dataset import held_out
from raglane.data.missing import refuse_missing
from raglane.data.records import Records
from raglane.data.stored_dataset import Dataset
from raglane.errors import ArgumentError, DivergedError, argument, count_of, message
from raglane.runs.configuration import run_config
from raglane.runs.holding_out import hold_out
from raglane.runs.logs import LoggingWatcher
from raglane.runs.sources import ColumnNames
from raglane.training.folder import DESCRIPTION, LAST, find
from raglane.training.own_cell import check_named, is_own
from raglane.training.run import TrainingResult, load_description, train
from raglane.training.settings import Settings
from raglane.training.state import load_state
from raglane.training.tasks import TASKS

# What may differ when a run goes on: nothing that would change what the epochs so far have done.
_CHANGEABLE = ("epochs", "patience", "device", "ranks", "engine", "threads", "workers", "logger")


def changes_of(folder: Path, before: Settings | ColumnNames, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that goes on is told to change."""
    known = asdict(before)
    changes = {name: value for name, value in given.items() if value != known[name]}
    refused = next((name for name in changes if name not in _CHANGEABLE), None)
    if refused is not None:
        rule = f"a run goes on with its own settings; only {', '.join(map(argument, _CHANGEABLE))} may change"
        got = f"{changes[refused]!r}, and the run in {str(folder)!r} was started with another value"
        raise ArgumentError(message(refused, got, rule, f"leave {argument(refused)} out, or start a new run"))
    return changes


def without_own_cell(stored: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run that goes on without the user's own cell, which must be the one of the run."""
    layer = given.get("layer")
    cell = layer if isinstance(layer, str) and is_own(layer) else None
    check_named(stored, cell)
    return {name: value for name, value in given.items() if name != "layer" or cell is None}


def divide(
    records: Records | Dataset, validation: Records | None, settings: Settings, where: str, validation_from: str = ""
) -> tuple[Records | Dataset, Records | Dataset | None, tuple[str, ...]]:
    """The training and the validation part, and a line on each."""
    rule = "none; the training loss decides which epoch is best"
    if validation is not None:
        rule = f"{count_of(len(validation), 'sequence')} of {validation_from}"
    if isinstance(records, Dataset):
        return _divide_stored(records, validation, settings, where, rule)
    training = records
    if validation is None and settings.validation_fraction > 0:
        if settings.missing == "error" and not records.is_tokens:
            # Before the split, after which rows have other numbers.
            refuse_missing(records)
        training, validation = hold_out(records, settings.validation_fraction, settings.seed)
        how = "stratified by label, " if records.labels is not None and settings.task == "classify" else ""
        share = f"{100 * settings.validation_fraction:g} % of the training sequences"
        rule = f"{count_of(len(validation), 'sequence')}, {share}, {how}seed {settings.seed}"
        if len(validation) == 0:
            validation, rule = None, "none: each sequence held out has a label or a tag that no other has"
    what = "tokens" if training.is_tokens else f"elements of {count_of(len(training.channels), 'channel')}"
    if training.features:
        what += f" and {', '.join(f'{feature.name} ({feature.kind})' for feature in training.features)}"
    found = f"training: {count_of(len(training), 'sequence')}, {len(training.values):,} {what}, from {where}"
    return training, validation, (found, f"validation: {rule}")


def _divide_stored(
    training: Dataset, validation: Records | Dataset | None, settings: Settings, where: str, rule: str
) -> tuple[Dataset, Records | Dataset | None, tuple[str, ...]]:
    """The same of a folder that was converted, which is not read: vocabulary, scale and classes stand beside it."""
    what = "tokens" if training.statistics.tokens else "elements"
    if validation is None and settings.validation_fraction > 0:
        classes = training.labels() if settings.task == "classify" else None
        if classes is not None:
            # In the order of their texts, as split has them: so the parts are those of data that was not converted.
            classes = np.argsort(np.argsort(np.array(training.preprocessor.labels, dtype=object)))[classes]
        mask = held_out(len(training), classes, settings.validation_fraction, settings.seed)
        training, validation = training.subset(~mask), training.subset(mask)
        share = f"{100 * settings.validation_fraction:g} % of the training sequences"
        how = "" if classes is None else "stratified by label, "
        rule = f"{count_of(len(validation), 'sequence')}, {share}, {how}seed {settings.seed}; "
        rule += "vocabulary and scale were counted of all, these too"
    # NumPy adds up 10**9 of 32 bits in half a second, torch in eighteen.
    elements = int(training.lengths.numpy().sum(dtype=np.int64))
    found = f"training: {count_of(len(training), 'sequence')}, {elements:,} {what}, batch by batch from {where}"
    return training, validation, (found, f"validation: {rule}")


def planned(settings: Settings, training: Records | Dataset, what: str = "batch_size") -> tuple[Settings, str]:
    """The settings with the batches that the planner advises, and a line on why."""
    from raglane.training.machine import plan_batches

    settings, why = plan_batches(settings, training, what)
    kind = "of similar lengths" if settings.bucket else "in random order"
    size = count_of(settings.batch_size, "sequence")
    if what == "batch_elements":
        size = f"up to {count_of(settings.batch_elements or 0, 'element')}"
    return settings, f"batches: {size} {kind}. {why}"


def _draw_curves(folder: Path, result: TrainingResult, title: str) -> None:
    """Draw the history of a run in its folder, if there is any yet."""
    from raglane._utils.files import write_file
    from raglane.report.figures import curves_png

    if result.state.history:
        png = curves_png(result.state.history, result.metric, title, result.state.best_epoch)
        write_file(folder / "curves.png", png)


def _draw_until_divergence(folder: Path, settings: Settings, title: str) -> None:
    """Draw the history of a run that ran away, where it came to a checkpoint."""
    if find(folder, DESCRIPTION).is_file() and load_description(folder).diverged is not None:
        state = load_state(find(folder, LAST))[0]
        _draw_curves(folder, TrainingResult(folder, TASKS[settings.task].terms(settings)[0], state), title)


def run_training(
    settings: Settings,
    training: Records | Dataset,
    validation: Records | Dataset | None,
    folder: Path | None,
    *,
    watcher: Any = None,
    **more: Any,
) -> TrainingResult:
    """Train, and draw the history in the run's folder, however the training ends; at its end, write the model card."""
    from raglane.runs.card import Parts, about

    data = more.get("data") or {}
    parts = Parts(training, validation, more.get("test"), data.get("path"), in_memory=not data)
    if settings.logger is not None and folder is not None:
        watcher = LoggingWatcher(settings, folder, watcher)
    try:
        config = run_config(settings, data)
        result = train(settings, training, validation, folder, watcher=watcher, config=config, **more)
    except DivergedError:
        if folder is not None:
            _draw_until_divergence(folder, settings, about(parts, settings))
        raise
    finally:
        if watcher is not None:
            watcher.close()
    if folder is not None and result.stopped_by is None:
        close_run(folder, settings, result, training, validation, more.get("test"), data)
    elif folder is not None:
        _draw_curves(folder, result, about(parts, settings))
    return result


def close_run(
    folder: Path,
    settings: Settings,
    result: TrainingResult,
    training: Records | Dataset,
    validation: Records | Dataset | None,
    test: Records | None,
    data: Mapping[str, Any],
) -> None:
    """Draw the history of a run that has come to its end, and write its model card."""
    from raglane.runs.card import Parts, about, write_card

    parts = Parts(training, validation, test, data.get("path"), in_memory=not data)
    _draw_curves(folder, result, about(parts, settings))
    write_card(folder, settings, result, parts)
