"""``raglane train``: a model from data."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from raglane.cli import console, options
from raglane.errors import ArgumentError, message
from raglane.runs.configuration import as_toml, entries, other_entries
from raglane.runs.sources import ColumnNames, Source, Sources
from raglane.training.own_cell import label_of
from raglane.training.settings import PLANNED, Settings, left_to_plan

if TYPE_CHECKING:
    from raglane.runs.training import Trained
    from raglane.training.run import TrainingResult


@options.command
def train(
    data: options.Data = None,
    *,
    columns: options.Columns,
    format: options.Format = None,
    test: options.Test = None,
    validation: options.Validation = None,
    out: options.Out = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    choices: options.Choices,
    config: options.Config = None,  # noqa: ARG001
    show_config: options.ShowConfig = False,
    origins: options.Origins,
    quiet: options.Quiet = False,
) -> None:
    """Train a model, and save it in a folder.

    For example:

    raglane train --out runs/vowels

    raglane train names.csv --id-column row --label-column language --bidirectional

    raglane train --cell indrnn --layers 2 --pooling attention --initial-state learned

    raglane train tagged.parquet --task tag --cell lstm --bucket --patience 5

    raglane train meters.csv --task forecast --time-column hour --test later.csv

    raglane train --config runs/vowels/run.toml --seed 1 --out runs/again

    raglane train --resume --out runs/vowels
    """
    source = Source(data, format, ColumnNames(**columns))
    is_first = os.environ.get("RANK", "0") == "0"
    if show_config:
        if resume:
            rule = "a run goes on with its own settings, which its run.toml has"
            raise ArgumentError(message("--show-config", "it beside --resume", rule, "leave one out"))
        others = {"data": data, "format": format, "validation": validation, "test": test, "out": out}
        if is_first:
            _show(choices, source.columns, others | {"overwrite": overwrite, "quiet": quiet}, origins)
        return
    from raglane.runs.progress import pick_watcher
    from raglane.runs.training import train_run
    from raglane.training.run import followed

    if not is_first and followed() is not None:
        return
    _check_parts(validation, test, origins)

    def say(line: str) -> None:
        if not quiet:
            console.say(line)

    parts = [None if path is None else replace(source, path=path) for path in (validation, test)]
    trained = train_run(
        None if resume and data is None else Sources(source, *parts),
        choices,
        columns,
        out,
        name_folder=lambda settings: Path("runs") / f"{source.name}-{settings.task}-{label_of(settings.layer)}",
        resume=resume,
        overwrite=overwrite,
        say=say,
        watch=lambda metric: None if quiet else pick_watcher(metric),
    )
    _tell(trained, quiet, say)


def _check_parts(validation: Path | None, test: Path | None, origins: options.Origins) -> None:
    """Refuse parts that are not there, or are asked for twice, before the first of the data is read."""
    from raglane.data.formats.base import open_error

    if validation is not None and origins["validation_fraction"] == "option":
        rule = "the data of --validation are all that training is validated on"
        raise ArgumentError(message("validation_fraction", "it beside --validation", rule, "leave one out"))
    for part in filter(None, (validation, test)):
        try:
            os.stat(part)
        except OSError as error:
            raise open_error(part, error) from error


def settings_of(choices: options.Given) -> Settings:
    """The settings that options give, but for batches that are still to be planned."""
    return Settings(**left_to_plan(choices)[0])


def _show(
    choices: options.Given,
    columns: ColumnNames,
    others: dict[str, Any],
    origins: options.Origins,
) -> None:
    """Print every option with its value and its origin, as a file that --config reads."""
    chosen = {entry.key: entry for entry in entries(settings_of(choices), origins)}
    for name in PLANNED:
        if name in choices:
            key = name.replace("_", "-")
            chosen[key] = replace(chosen[key], value=choices[name])
    if "task" not in choices and others["data"] is not None:
        chosen["task"] = replace(chosen["task"], value=None, unset="guessed from the labels of the data")
    rest = other_entries(others, origins, out="runs/<data>-<task>-<cell>")
    listed = [*rest, *entries(columns, origins), *chosen.values()]
    console.say(*as_toml(listed).splitlines())


def _tell(trained: Trained, quiet: bool, say: Callable[[str], None]) -> None:
    """Say how a training has ended, measure its model on the test part, and say where everything is."""
    from raglane.cli.models import report, tell_skipped
    from raglane.training.checkpoint import load_model
    from raglane.training.folder import SKIPPED
    from raglane.training.inference import pick_device
    from raglane.training.run import left_out

    result, settings, parts, sources = trained
    folder = result.folder or Path()
    if result.stopped_by is not None:
        say(f"stopped in epoch {result.state.epoch + 1}, and saved")
        say(f"go on with: raglane train --resume --out {folder}")
        # What a shell reports of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM.
        raise typer.Exit(128 + result.stopped_by)
    if result.was_complete:
        more = f"pass --epochs {result.state.epoch + 10}, say, to train on"
        say(f"nothing is left to train after epoch {result.state.epoch}; {more}")
    _tell_result(result, settings, quiet, say)
    if parts.test is not None:
        device = pick_device(settings.device)
        report(folder, load_model(folder), parts.test, device=device, say=say, name="test", is_short=True)
    if sources.training.columns.on_bad_row == "skip":
        tell_skipped(len(left_out(parts.training, parts.validation, parts.test)), folder / SKIPPED, say)
    say(f"run: {folder}  (model: best; card.md and report.html say all of it)")
    if settings.task == "language":
        say(f"next: raglane sample {folder}")
    else:
        say(f"next: raglane predict {folder} DATA -o predictions.parquet")


def _tell_result(result: TrainingResult, settings: Settings, quiet: bool, say: Callable[[str], None]) -> None:
    """The best epoch, its numbers, and the baseline where there is one; and a warning where they are bad."""
    from raglane.training.state import warning
    from raglane.training.tasks import TASKS

    state = result.state
    row = state.history[state.best_epoch - 1]
    part = "validation" if "validation_loss" in row else "train"
    metric = result.metric.replace("_", " ")
    numbers = f"{part} loss {row[f'{part}_loss']:.4f}, {metric} {row[f'{part}_{result.metric}']:.3f}"
    simple = TASKS[settings.task].terms(settings)[1]
    baseline = row.get(f"{simple}_{result.metric}")
    beside = "" if baseline is None else f" ({simple}: {baseline:.3f})"
    if state.epoch < settings.epochs:
        say(f"stopped early after epoch {state.epoch}: {state.waited} without a lower validation loss")
    say(f"best: epoch {state.best_epoch}, {numbers}{beside}")
    doubt = warning(state)
    if doubt is not None and not quiet:
        console.complain(f"raglane: warning: {doubt}")
