"""``raglane tune``: a search for good settings."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from raglane.cli import console, options
from raglane.cli.options import DEFAULT, FILE, option, read_toml
from raglane.cli.train import settings_of
from raglane.errors import ArgumentError, message
from raglane.runs.configuration import as_toml, entries, key_of, other_entries
from raglane.runs.sources import ColumnNames, SavedSource, Source, Sources, check_default
from raglane.training.own_cell import named_choice
from raglane.training.settings import left_to_plan

if TYPE_CHECKING:
    from raglane.runs.tuning import Search

_Trials = Annotated[int, option("Trials in all, with those of earlier calls and other processes.", options.TRAINING)]
_Minutes = Annotated[float | None, option("After which no trial goes on.", options.TRAINING, show_default="no end")]
_Out = Annotated[
    Path | None, option("Folder of the study.", parser=options.path, show_default="runs/tune-<data>-<task>")
]


@options.command
def tune(
    data: options.Data = None,
    *,
    columns: options.Columns,
    format: options.Format = None,
    test: options.Test = None,
    validation: options.Validation = None,
    trials: _Trials = 30,
    minutes: _Minutes = None,
    out: _Out = None,
    choices: options.Choices,
    config: options.Config = None,
    show_config: options.ShowConfig = False,
    origins: options.Origins,
    quiet: options.Quiet = False,
) -> None:
    """Search for the settings with the lowest validation loss, and keep the best run.

    What is given is fixed; of the rest, cell, sizes, direction, pooling, dropout, batch size and learning rate are
    searched, or what the table [search] of --config says. The same command goes on with a study that was stopped, and
    several processes may work on one. The test part is not measured before the end.

    For example:

    raglane tune names.csv --trials 30 --minutes 20 --out runs/names

    raglane tune meters.csv --task forecast --cell lstm --config search.toml
    """
    from raglane._utils.checks import check_whole
    from raglane.errors import require
    from raglane.runs.card import Parts
    from raglane.runs.training import read_parts
    from raglane.runs.tuning import Search, default_space, read_space
    from raglane.training.machine import check_machine

    check_whole("trials", trials, 1, "pass 30, say")
    if minutes is not None and not 0 < minutes < 1e6:
        raise ArgumentError(message("minutes", f"{minutes}", "a number above 0, and below a million", "pass 20, say"))
    planned = left_to_plan(choices)[1]
    if planned is not None:
        fix = "leave it out to search it, or give a number"
        raise ArgumentError(message(planned, "'auto'", "batches are searched, or fixed", fix))
    settings, source = settings_of(choices), Source(data, format, ColumnNames(**columns))
    table = {} if config is None else read_toml(config).get("search", {})
    said = read_space(table, f"[search] in {config}")
    if "layer" in said:
        said["layer"] = tuple(named_choice(layer) for layer in cast(tuple[str, ...], said["layer"]))
    check_default(source, settings)
    if not show_config:
        require("optuna", "tune")
        check_machine(settings)

    def say(line: str) -> None:
        if not (quiet or show_config):
            console.say(line)

    records, settings = _opened(source, settings, "task" in choices, say)
    # What is said of an option in the table goes before what is fixed.
    space = default_space(settings, {*choices, *said}) | said
    if show_config:
        others: dict[str, Any] = {
            "data": data,
            "format": format,
            "validation": validation,
            "test": test,
            "trials": trials,
        }
        others |= {"minutes": minutes, "out": out, "quiet": quiet}
        tables = dict.fromkeys(space, DEFAULT) | dict.fromkeys(said, FILE)
        _show(settings, source.columns, others, origins, space, tables)
        return
    given = [None if path is None else replace(source, path=path) for path in (validation, test)]
    sources = Sources(source, *given)
    training, held_out, tested = read_parts(sources, records, settings, say)
    if held_out is None:
        rule, fix = "a search compares validation losses", "hold a part out, or give --validation"
        raise ArgumentError(message("validation", "no validation part", rule, fix))
    folder = out or Path("runs") / f"tune-{source.name}-{settings.task}"
    kept, seconds = asdict(SavedSource.of(*sources)), None if minutes is None else 60 * minutes
    parts = Parts(training, held_out, tested, kept["path"])
    _search(Search(folder, settings, space, parts, kept, source.found_in(training), trials, say, seconds))


def _show(
    settings: Any, columns: ColumnNames, others: dict[str, Any], origins: options.Origins, space: Any, tables: Any
) -> None:
    """Print every option with its value and its origin, and what is searched, as a file that --config reads."""
    from raglane.runs.tuning import as_table

    fixed = {entry.key: entry for entry in entries(settings, origins)}
    for name in space:
        key = key_of(settings, name)
        fixed[key] = replace(fixed[key], value=None, unset="searched", comment="")
    if origins["task"] == DEFAULT and others["data"] is not None:
        fixed["task"] = replace(fixed["task"], comment="guessed from the labels of the data")
    rest = other_entries(others, origins, out="runs/tune-<data>-<task>")
    listed = [*rest, *entries(columns, origins), *fixed.values()]
    console.say(*as_toml(listed).splitlines(), "", *as_table(space, tables).splitlines())


def _opened(source: Source, settings: Any, is_told: bool, say: Any) -> tuple[Any, Any]:
    """The records, and the settings with the task that their labels are for."""
    from raglane.training.settings import Settings

    if is_told or source.path is None:
        return source.open(settings.task), settings
    records, task = source.guess(settings.loss)
    if task != "classify":
        say(f"task: {task} (guessed; --task chooses)")
    return records, Settings(**{**settings.to_config(), "task": task})


def _search(search: Search) -> None:
    """Search, and make a run of the best trial."""
    from raglane.cli.models import report
    from raglane.runs.training import close_run
    from raglane.runs.tuning import BEST_RUN, STUDY, TRIALS
    from raglane.training.checkpoint import load_model
    from raglane.training.folder import LAST, at_work
    from raglane.training.inference import pick_device
    from raglane.training.run import TrainingResult
    from raglane.training.state import load_progress
    from raglane.training.tasks import TASKS

    folder, say = search.folder, search.say
    tuned = search.run()
    trials = f"{tuned.done} of {search.trials} trials"
    say(f"study: {folder / STUDY}, {trials}; compare: raglane compare {folder / TRIALS}/*")
    if tuned.stopped_by is not None:
        say("stopped, and saved; the same command goes on")
        raise typer.Exit(128 + tuned.stopped_by)
    if tuned.others:
        say(f"{tuned.others} more at work: who ends last makes the best run")
        return
    if tuned.best is None:
        say("no trial has come to its end; the same command goes on")
        return
    place = search.publish(tuned.best)
    with at_work(place):
        state = load_progress(place / LAST)
        result = TrainingResult(place, TASKS[search.settings.task].terms(tuned.settings)[0], state)
        close_run(place, tuned.settings, result, search.parts)
        say(f"best: trial {int(tuned.best.name)}, validation loss {tuned.value:.4f}")
        if search.parts.test is not None:
            device = pick_device(tuned.settings.device)
            report(place, load_model(place), search.parts.test, device=device, say=say, name="test", is_short=True)
    say(f"run: {folder / BEST_RUN}  (model: best; card.md and report.html say all of it)")
