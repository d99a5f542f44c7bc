"""``raglane train`` and ``raglane tune``: a model from data, and a search for good settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from raglane._utils.messages import metric_words, require
from raglane.cli import console, options
from raglane.cli.options import DEFAULT, FILE, option, read_toml
from raglane.errors import ArgumentError
from raglane.runs.configuration import as_toml, entries, key_of, other_entries
from raglane.runs.sources import SavedSource, SequenceSource, Sources, check_default
from raglane.training.own_cell import label_of, named_choice
from raglane.training.settings import PLANNED, Settings, left_to_plan, task_defaults, without_task

if TYPE_CHECKING:
    from raglane.data.dataset import Dataset
    from raglane.runs.training import Trained
    from raglane.runs.tuning import Search
    from raglane.training.run import TrainingResult


# The options that the help pages of train and tune list; --help-all lists all.
_COMMON = (
    "task cell hidden_size num_layers bidirectional dropout epochs batch_size lr patience seed device label id "
    "missing test validation format output resume overwrite dry_run config json quiet trials minutes"
)
# Those of demo, whose data is known.
_OF_DEMO = "cell hidden_size num_layers bidirectional epochs seed threads output overwrite quiet"
_GUESSED = "guessed from the labels of the data"


@partial(options.command, common=_COMMON)
def train(
    data: options.DataOrRun = None,
    *,
    columns: options.Columns,
    format: options.Format = None,
    test: options.Test = None,
    validation: options.Validation = None,
    output: options.Out = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[
        bool,
        option(
            "Read the data, build the model, run one batch, print what a training would do, and "
            "write nothing.",
            options.RUN,
            "--dry-run",
        ),
    ] = False,
    choices: options.Choices,
    config: options.Config = None,  # noqa: ARG001
    show_config: options.ShowConfig = False,
    origins: options.Origins,
    json: options.Json = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a model, and save it in a folder.

    For example:

    raglane train names.csv --output runs/names

    raglane train names.csv --dry-run

    raglane train names.csv --id-column row --label-column language --bidirectional

    raglane train gestures.ts --cell indrnn --num-layers 2 --pooling attention

    raglane train tagged.parquet --task tag --cell lstm --bucket --patience 5

    raglane train meters.csv --task forecast --time-column hour --test later.csv

    raglane train --config runs/names/run.toml --seed 1 --output runs/again

    raglane train --resume --output runs/names
    """
    if not (resume or show_config):
        _need_data(data)
    source = SequenceSource(data, format).chosen(columns)
    is_first = _is_first()
    if resume and (show_config or dry_run):
        flag = "--show-config" if show_config else "--dry-run"
        rule = "used without --resume, because run.toml has the settings of a run"
        raise ArgumentError(flag, "it with --resume", rule, "leave one out")
    if show_config:
        others: dict[str, Any] = {"data": data, "format": format}
        others |= {"validation": validation, "test": test}
        others |= {"output": output, "overwrite": overwrite, "quiet": quiet}
        if is_first:
            _show_config(source, choices, others, origins)
        return
    if is_first:
        _check_parts(validation, test, origins)
    _train(
        None if resume and data is None else _sources(source, validation, test),
        choices,
        columns,
        output,
        json,
        quiet,
        name_folder=lambda settings: (
            Path("runs") / f"{source.name}-{settings.task}-{label_of(settings.cell)}"
        ),
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
    )


@partial(options.command, common=_OF_DEMO)
def demo(
    *,
    output: Annotated[Path, options.output("Folder of the run.", show_default="runs/demo")] = Path(
        "runs/demo"
    ),
    overwrite: options.Overwrite = False,
    choices: options.Choices,
    config: options.Config = None,  # noqa: ARG001
    json: options.Json = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a model on recordings of speakers that are included, and test it: half a minute.

    The recordings are 270 of nine speakers who say two Japanese vowels; 370 others are the test
    data. All settings of raglane train are options.

    For example:

    raglane demo

    raglane demo --cell lstm --bidirectional --output runs/vowels
    """
    _train(None, choices, {}, output, json, quiet, overwrite=overwrite)


def _is_first() -> bool:
    """Return True unless this process is another rank of torchrun than the first."""
    return os.environ.get("RANK", "0") == "0"


def _need_data(data: Path | None) -> None:
    if data is None:
        fix = "pass DATA; raglane demo trains on recordings that are included"
        raise ArgumentError("data", "nothing", "a file or a folder", fix)


def _train(
    sources: Sources | None,
    choices: options.Given,
    columns: options.Given,
    output: Path | None,
    json: Path | None,
    quiet: bool,
    **more: Any,
) -> None:
    """Train, and print the result; the other ranks of torchrun run the job of the first."""
    from raglane.runs.progress import pick_watcher
    from raglane.runs.training import train_run
    from raglane.training.run import follow

    if not _is_first() and follow() is not None:
        return
    quiet = quiet or console.is_stdout(json)
    log = console.logger(quiet)
    trained = train_run(
        sources,
        choices,
        columns,
        output,
        log=log,
        watch=lambda metric: None if quiet else pick_watcher(metric),
        **more,
    )
    if more.get("dry_run"):
        return
    _print_result(trained, quiet, log)
    if json is not None:
        from raglane.cli.show import facts_of

        console.write_json(json, facts_of(trained.result.folder or Path()))


def _show_config(
    source: SequenceSource, choices: options.Given, others: dict[str, Any], origins: options.Origins
) -> None:
    """Print the options of a training, with those that the data will decide."""
    data = others["data"]
    changes: dict[str, Any] = {
        key_of(Settings, name): {"value": choices[name]} for name in PLANNED if name in choices
    }
    if "task" not in choices and data is not None:
        changes["task"] = {"value": None, "unset": _GUESSED}
    default_out = "runs/<data>-<task>-<cell>"
    settings = settings_of(choices, data)
    _print_config(settings, source, others, origins, changes, default_out)


def _sources(source: SequenceSource, *others: Path | None) -> Sources:
    """Return the sources of the training part and of the other files."""
    return Sources(
        source, *(None if path is None else replace(source, path=path) for path in others)
    )


def _check_parts(validation: Path | None, test: Path | None, origins: options.Origins) -> None:
    """Raise if a file does not exist, or two options select the validation part."""
    from raglane.data.sources.files import open_error

    if validation is not None and origins["validation_fraction"] == "option":
        raise ArgumentError(
            "validation_fraction",
            "it with --validation",
            "used without --validation",
            "leave one out",
        )
    for dataset in filter(None, (validation, test)):
        try:
            os.stat(dataset)
        except OSError as error:
            raise open_error(dataset, error) from error


def settings_of(choices: options.Given, data: Path | None) -> Settings:
    """Return the settings of options, without batches that the planner will choose."""
    chosen = left_to_plan(choices)[0]
    return Settings(**task_defaults(chosen)) if data is None else without_task(chosen)


def _print_config(
    settings: Settings,
    source: SequenceSource,
    others: Mapping[str, Any],
    origins: options.Origins,
    changes: Mapping[str, Mapping[str, Any]],
    default_out: str,
) -> None:
    """Print every option with its value and origin, as a file for --config; ``changes`` replaces
    fields of entries.
    """
    listed = {entry.key: entry for entry in entries(settings, origins)}
    listed |= {key: listed[key]._replace(**fields) for key, fields in changes.items()}
    everything = [
        *other_entries(others, origins, default_out),
        *entries(source.columns, origins),
        *entries(source, origins),
        *listed.values(),
    ]
    console.log(*as_toml(everything).splitlines())


def _print_result(trained: Trained, quiet: bool, log: Callable[[str], None]) -> None:
    """Print the end of a training, and evaluate its model on the test part."""
    from raglane.cli.models import log_skipped
    from raglane.training.folder import SKIPPED
    from raglane.training.run import left_out

    result, settings, datasets, sources, advice = trained
    folder = result.folder or Path()
    if result.stopped_by is not None:
        log(f"stopped in epoch {result.state.epoch + 1}, and saved")
        log(f"resume with: raglane train --resume --output {folder}")
        # The exit code of a shell for a signal: 130 for Ctrl-C, 143 for SIGTERM.
        raise typer.Exit(128 + result.stopped_by)
    if result.was_complete:
        more = f"pass e.g. --epochs {result.state.epoch + 10} to continue"
        log(f"training is complete at epoch {result.state.epoch}; {more}")
    _print_best(result, settings, quiet, log)
    if datasets.test is not None:
        _report_test(folder, settings, datasets.test, log)
    if sources.training.on_bad_row == "skip":
        log_skipped(
            len(left_out(datasets.training, datasets.validation, datasets.test)),
            folder / SKIPPED,
            log,
        )
    log(f"run: {folder}  (model: best; results: card.md and report.html)")
    command = (
        f"sample {folder}"
        if settings.task == "language"
        else f"predict {folder} DATA -o predictions.parquet"
    )
    log(f"next: raglane {command}")
    if advice is not None:
        log(f"note: {advice}")


def _report_test(
    folder: Path, settings: Settings, test: Dataset, log: Callable[[str], None]
) -> None:
    """Evaluate the model of a run on the test part."""
    from raglane.cli.models import report
    from raglane.training.checkpoint import load_model
    from raglane.training.inference import pick_device

    report(
        folder,
        load_model(folder),
        test,
        device=pick_device(settings.device),
        log=log,
        is_short=True,
    )


def _print_best(
    result: TrainingResult, settings: Settings, quiet: bool, log: Callable[[str], None]
) -> None:
    """Print the best epoch with its metrics and baseline, and a warning if they are bad."""
    from raglane.training.state import warning

    state = result.state
    row = state.history[state.best_epoch - 1]
    prefix = "validation" if "validation_loss" in row else "train"
    metric = metric_words(result.metric)
    numbers = f"{prefix} loss {row[f'{prefix}_loss']:.4f}, {metric} {row[f'{prefix}_{result.metric}']:.3f}"
    simple = settings.terms.baseline
    baseline = row.get(f"{simple}_{result.metric}")
    compared = "" if baseline is None else f" ({simple}: {baseline:.3f})"
    if state.epoch < (settings.epochs or 0):
        log(
            f"stopped early after epoch {state.epoch}: {state.waited} without a lower validation loss"
        )
    log(f"best: epoch {state.best_epoch}, {numbers}{compared}")
    doubt = warning(state)
    if doubt is not None and not quiet:
        console.log_error(f"raglane: warning: {doubt}")


@partial(options.command, common=_COMMON)
def tune(
    data: options.Data = None,
    *,
    columns: options.Columns,
    format: options.Format = None,
    test: options.Test = None,
    validation: options.Validation = None,
    trials: Annotated[
        int,
        option("Trials in total, including earlier calls and other processes.", options.TRAINING),
    ] = 30,
    minutes: Annotated[
        float | None, option("Time limit in minutes.", options.TRAINING, show_default="none")
    ] = None,
    output: Annotated[
        Path | None,
        options.output("Folder of the study.", show_default="runs/tune-<data>-<task>"),
    ] = None,
    choices: options.Choices,
    config: options.Config = None,
    show_config: options.ShowConfig = False,
    origins: options.Origins,
    quiet: options.Quiet = False,
) -> None:
    """Search for the settings with the lowest validation loss, and keep the best run.

    Options that are passed are fixed. Of the others, cell, sizes, direction, pooling, dropout,
    batch size and learning rate are searched by default; a table [search] in the file of --config
    can select more. The same command resumes a study, and several processes can share one. Only the
    best run is evaluated on the test part.

    For example:

    raglane tune names.csv --trials 30 --minutes 20 --output runs/names

    raglane tune meters.csv --task forecast --cell lstm --config search.toml
    """
    from raglane.runs.card import DataParts
    from raglane.runs.parts import read_parts
    from raglane.runs.training import guessed
    from raglane.runs.tuning import Search, as_table, default_space, read_space
    from raglane.training.machine import check_machine

    if not show_config:
        _need_data(data)
    _check_search(trials, minutes, choices)
    settings = settings_of(choices, data)
    source = SequenceSource(data, format).chosen(columns)
    table = {} if config is None else read_toml(config).get("search", {})
    listed = read_space(table, f"[search] in {config}")
    if "cell" in listed:
        cells = cast(tuple[str, ...], listed["cell"])
        listed["cell"] = tuple(map(named_choice, cells))
    check_default(source, settings)
    if not show_config:
        require("optuna", "tune")
        check_machine(settings)

    log = console.logger(quiet or show_config)
    if "task" in choices or data is None:
        records: Dataset = source.open(settings.task)
    else:
        records, task = guessed(source, settings.loss, log)
        settings = replace(settings, task=task)
    # The table takes precedence over fixed options.
    space = default_space(settings, {*choices, *listed}) | listed
    if show_config:
        others: dict[str, Any] = {
            "data": data,
            "format": format,
            "validation": validation,
            "test": test,
            "trials": trials,
            "minutes": minutes,
            "output": output,
            "quiet": quiet,
        }
        changes = {
            key_of(settings, name): {"value": None, "unset": "searched", "comment": ""}
            for name in space
        }
        if origins["task"] == DEFAULT and data is not None:
            changes["task"] = {"comment": _GUESSED}
        _print_config(settings, source, others, origins, changes, "runs/tune-<data>-<task>")
        tables = dict.fromkeys(space, DEFAULT) | dict.fromkeys(listed, FILE)
        console.log("", *as_table(space, tables).splitlines())
        return
    sources, records, note = _sources(source, validation, test).by_characters(
        records, settings.task
    )
    if note is not None:
        log(note)
    training, held_out, tested = read_parts(sources, records, settings, log)
    if held_out is None:
        rule = "a part whose losses a search can compare"
        fix = "hold a part out, or pass --validation"
        raise ArgumentError("validation", "no validation data", rule, fix)
    folder = output or Path("runs") / f"tune-{source.name}-{settings.task}"
    saved_source = asdict(SavedSource.of(*sources))
    seconds = None if minutes is None else 60 * minutes
    parts_of_data = DataParts(training, held_out, tested, saved_source["path"])
    columns = sources.training.found_in(training)
    _search(
        Search(folder, settings, space, parts_of_data, saved_source, columns, trials, log, seconds)
    )


def _check_search(trials: int, minutes: float | None, choices: Mapping[str, Any]) -> None:
    """Raise if the arguments of a search are invalid, or cannot be searched."""
    from raglane._utils.checks import check_whole
    from raglane.training.ranks import ranks_of

    check_whole("trials", trials, 1, "pass e.g. 30")
    if minutes is not None and not 0 < minutes < 1e6:
        rule = "a number above 0 and below a million"
        raise ArgumentError("minutes", f"{minutes}", rule, "pass e.g. 20")
    _, planned = left_to_plan(choices)
    if planned is not None:
        fix = "leave it out to search it, or pass a number"
        raise ArgumentError(planned, "'auto'", "a number in a search", fix)
    if ranks_of() is not None:
        rule = "processes on this machine in a search"
        fix = "start the command without torchrun, once for each process that searches"
        raise ArgumentError("processes", "those of torchrun", rule, fix)


def _search(search: Search) -> None:
    """Run a search, and publish the best trial as a run."""
    from raglane.runs.training import close_run
    from raglane.runs.tuning import BEST_RUN, STUDY
    from raglane.training.folder import LAST, at_work
    from raglane.training.run import TrainingResult
    from raglane.training.state import load_progress

    folder = search.folder
    log = search.log
    tuned = search.run()
    trials = f"{tuned.done} of {search.trials} trials"
    compared = search.compare()
    log(f"study: {folder / STUDY}, {trials}" + (f"; compared in {compared}" if compared else ""))
    if tuned.stopped_by is not None:
        log("stopped, and saved; the same command resumes")
        raise typer.Exit(128 + tuned.stopped_by)
    if tuned.others:
        log(f"trials of other processes: {tuned.others}; the last process publishes the best run")
        return
    if tuned.best is None:
        fix = "pass more --trials" if tuned.done >= search.trials else "the same command resumes"
        log(f"no trial is complete; {fix}")
        return
    run_folder = search.publish(tuned.best)
    with at_work(run_folder):
        state = load_progress(run_folder / LAST)
        result = TrainingResult(run_folder, tuned.settings.terms.metric, state)
        close_run(run_folder, tuned.settings, result, search.parts)
        log(f"best: trial {int(tuned.best.name)}, validation loss {tuned.value:.4f}")
        if search.parts.test is not None:
            _report_test(run_folder, tuned.settings, search.parts.test, log)
    log(f"run: {folder / BEST_RUN}  (model: best; results: card.md and report.html)")
