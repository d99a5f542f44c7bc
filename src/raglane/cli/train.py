"""``raglane train``: a model from data."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from raglane.cli import console, options
from raglane.errors import ArgumentError, message, quote
from raglane.runs.configuration import as_toml, entries, other_entries
from raglane.runs.sources import DEFAULT_DATA, ColumnNames, SavedSource, Source
from raglane.training.own_cell import label_of
from raglane.training.settings import PLANNED, Settings, left_to_plan

if TYPE_CHECKING:
    from raglane.data.records import Records
    from raglane.data.stored_dataset import Dataset
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
    debug: options.Debug = False,  # noqa: ARG001
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
    if os.environ.get("RANK", "0") != "0":
        from raglane.training.ranks.elsewhere import follow
        from raglane.training.ranks.group import ranks_of

        ranks = ranks_of()
        if ranks is not None:
            if not show_config:
                follow(ranks)
            return
    source = Source(data, format, ColumnNames(**columns))
    if show_config:
        if resume:
            rule = "a run goes on with its own settings, which its run.toml has"
            raise ArgumentError(message("--show-config", "it beside --resume", rule, "leave one out"))
        others = {"data": data, "format": format, "validation": validation, "test": test, "out": out}
        _show(choices, source.columns, others | {"overwrite": overwrite, "quiet": quiet}, origins)
        return
    from raglane.training.folder import at_work, check_folder
    from raglane.training.machine import check_machine

    if resume:
        folder = _run_to_resume(out, overwrite)
        check_folder(folder, resume=True)
        with at_work(folder) as is_back:
            order = _resumed(folder, choices, columns, data, validation, test, quiet)
            if is_back:
                order.say(options.IS_BACK)
            _train(order)
    else:
        _check_parts(validation, test, origins)
        is_guessed = "task" not in choices and source.path is not None
        # A loss may say more about the task than the labels do.
        loss = choices.get("loss") if is_guessed else None
        settings = settings_of({**choices, "loss": None} if loss else choices)
        check_default(source, settings)
        training = None
        if is_guessed:
            if out is not None:
                check_folder(out, overwrite=overwrite)
            check_machine(settings)
            training, task = source.guess(loss)
            settings = Settings(**{**settings.to_config(), "task": task, "loss": loss})
        folder = out or Path("runs") / f"{source.name}-{settings.task}-{label_of(settings.layer)}"
        order = _Order(
            settings, source, validation, test, folder, False, overwrite, quiet, left_to_plan(choices)[1], training
        )
        check_folder(folder, overwrite=overwrite)
        with at_work(folder):
            _train(order)


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


@dataclass(frozen=True)
class _Order:
    """What one call of the command asks for."""

    settings: Settings
    source: Source
    validation: Path | None
    test: Path | None
    out: Path
    resume: bool
    overwrite: bool
    quiet: bool
    plans: str | None = None
    # What was read already, to guess the task.
    training: Records | Dataset | None = None

    def read_part(self, path: Path) -> Records:
        """Another file of the same format and columns."""
        from raglane.cli.evaluate import tell_empty

        records = replace(self.source, path=path).read(self.settings.task)
        tell_empty(records, self.settings.task, lambda line: self.say(f"{path}: {line}"))
        return records

    def data(self) -> dict[str, Any]:
        """Where the data comes from, as run.json keeps it."""

        def text(path: Path | None) -> str | None:
            return None if path is None else str(path.absolute())

        return {
            "path": text(self.source.path),
            "format": self.source.format,
            "columns": asdict(self.source.columns),
            "validation": text(self.validation),
            "test": text(self.test),
        }

    def say(self, line: str) -> None:
        """A line for the user, unless silence is asked for."""
        if not self.quiet:
            console.say(line)


def check_default(source: Source, settings: Settings) -> None:
    """Refuse a task that the default data is not for."""
    if source.path is None and settings.task != "classify":
        raise ArgumentError(
            message("task", repr(settings.task), f"the default data, {DEFAULT_DATA}, is to classify", "give DATA")
        )


def _run_to_resume(out: Path | None, overwrite: bool) -> Path:
    """The folder of the run to go on with."""
    if out is None:
        raise ArgumentError(message("out", "nothing", "--resume needs the folder of a run", "give --out"))
    if overwrite:
        raise ArgumentError(message("overwrite", "True, with --resume", "one of the two", "leave one out"))
    return out


def _resumed(
    out: Path,
    choices: options.Given,
    columns: options.Given,
    data: Path | None,
    validation: Path | None,
    test: Path | None,
    quiet: bool,
) -> _Order:
    """The order to go on with a run: its own data and settings, but for what may change."""
    from raglane.runs.steps import changes_of, without_own_cell
    from raglane.training.job import load_description, refuse_diverged

    description = load_description(out)
    refuse_diverged(description, out)
    choices = without_own_cell(description.settings.layer, choices)
    if not description.data:
        rule = "this run was started from Python, with data in memory"
        fix = f"go on from there: rl.fit(data, out={str(out)!r}, resume=True)"
        raise ArgumentError(message("resume", quote(str(out)), rule, fix))
    saved = SavedSource.load(out, description.data)
    changes = changes_of(out, description.settings, choices)
    changes_of(out, saved.columns, columns)
    source = saved.source(saved.path)
    return _Order(
        replace(description.settings, **changes),
        source if data is None else replace(source, path=data),
        validation or _path(saved.validation),
        test or _path(saved.test),
        out,
        resume=True,
        overwrite=False,
        quiet=quiet,
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _train(order: _Order) -> None:
    """Read, train, draw, evaluate and say where everything is."""
    from raglane.cli.evaluate import tell_skipped
    from raglane.runs.logs import check_logger
    from raglane.runs.progress import pick_watcher
    from raglane.runs.steps import planned, run_training
    from raglane.training.folder import SKIPPED
    from raglane.training.machine import check_machine
    from raglane.training.run import left_out
    from raglane.training.tasks import TASKS, settle

    settings = order.settings
    # Before anything is read, which can take a while.
    device = check_machine(settings)
    check_logger(settings.logger)
    training, validation = _parts(order)
    test = _test_part(order)
    if not order.resume:
        settings, note = settle(settings, training)
        if note is not None:
            order.say(note)
        order = replace(order, settings=settings)
    if order.plans is not None:
        settings, line = planned(settings, training, order.plans)
        order.say(line)
        order = replace(order, settings=settings)
    _tell_too_long(order, training)
    metric = TASKS[settings.task].terms(settings)[0]
    watcher = None if order.quiet else pick_watcher(metric)
    result = run_training(
        settings,
        training,
        validation,
        order.out,
        data=order.data(),
        columns=order.source.found_in(training),
        resume=order.resume,
        overwrite=order.overwrite,
        test=test,
        watcher=watcher,
    )
    if result.stopped_by is not None:
        order.say(f"stopped in epoch {result.state.epoch + 1}, and saved")
        order.say(f"go on with: raglane train --resume --out {order.out}")
        # What a shell reports of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM.
        raise typer.Exit(128 + result.stopped_by)
    if result.was_complete:
        more = f"pass --epochs {result.state.epoch + 10}, say, to train on"
        order.say(f"nothing is left to train after epoch {result.state.epoch}; {more}")
    _tell_result(order, result)
    if test is not None:
        from raglane.cli.evaluate import report
        from raglane.training.checkpoint import load_model

        report(order.out, load_model(order.out), test, device=device, say=order.say, name="test", is_short=True)
    if order.source.columns.on_bad_row == "skip":
        tell_skipped(len(left_out(training, validation, test)), order.out / SKIPPED, order.say)
    order.say(f"run: {order.out}  (model: best; card.md and report.html say all of it)")
    if order.settings.task == "language":
        order.say(f"next: raglane sample {order.out}")
    else:
        order.say(f"next: raglane predict {order.out} DATA -o predictions.parquet")


def _parts(order: _Order) -> tuple[Records | Dataset, Records | Dataset | None]:
    """The training and the validation part, and a note on each."""
    from raglane.runs.steps import divide

    settings = order.settings
    records = order.training or order.source.open(settings.task)
    if order.training is not None and settings.task != "classify":
        order.say(f"task: {settings.task} (guessed; --task chooses)")
    for note in records.notes:
        order.say(note)
    where = DEFAULT_DATA if order.source.path is None else str(order.source.path)
    given = None if order.validation is None else order.read_part(order.validation)
    training, validation, notes = divide(records, given, order.settings, where, str(order.validation))
    for note in notes:
        order.say(note)
    return training, validation


def _tell_too_long(order: _Order, training: Records | Dataset) -> None:
    """How many sequences do not fit into a batch, and what becomes of them."""
    import numpy as np

    from raglane.data.records import Records
    from raglane.errors import count_of

    most, words = order.settings.batch_elements, {"drop": "left out", "split": "split", "alone": "batches of their own"}
    if most is not None and order.settings.too_long in words:
        # The last element of a forecast is no input; a dataset gives the lengths of its inputs.
        targets = isinstance(training, Records) and order.settings.task == "forecast"
        count = int((np.asarray(training.lengths) - targets > most).sum())
        what = words[order.settings.too_long]
        order.say(f"longer than a batch of {most:,} elements: {count_of(count, 'sequence')}, {what}")


def _test_part(order: _Order) -> Records | None:
    """What to evaluate on at the end; read before training, so that a mistake in it shows at once."""
    if order.test is not None:
        return order.read_part(order.test)
    if order.source.path is None:
        return order.source.read(order.settings.task, part="test")
    return None


def _tell_result(order: _Order, result: TrainingResult) -> None:
    """The best epoch, its numbers, and the baseline where there is one; and a warning where they are bad."""
    from raglane.training.state import warning
    from raglane.training.tasks import TASKS

    state = result.state
    row = state.history[state.best_epoch - 1]
    part = "validation" if "validation_loss" in row else "train"
    metric = result.metric.replace("_", " ")
    numbers = f"{part} loss {row[f'{part}_loss']:.4f}, {metric} {row[f'{part}_{result.metric}']:.3f}"
    simple = TASKS[order.settings.task].terms(order.settings)[1]
    baseline = row.get(f"{simple}_{result.metric}")
    beside = "" if baseline is None else f" ({simple}: {baseline:.3f})"
    if state.epoch < order.settings.epochs:
        order.say(f"stopped early after epoch {state.epoch}: {state.waited} without a lower validation loss")
    order.say(f"best: epoch {state.best_epoch}, {numbers}{beside}")
    doubt = warning(state)
    if doubt is not None and not order.quiet:
        console.complain(f"raglane: warning: {doubt}")
