"""Comparison of runs: their results, costs and differing settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raglane._utils.messages import count_of, metric_words
from raglane.errors import DataError
from raglane.report.figures import Compared
from raglane.runs.configuration import entries
from raglane.runs.sources import DEFAULT_DATA, SavedSource
from raglane.training.checkpoint import CONFIG, count_weights
from raglane.training.folder import BEST, EVALUATION, LAST, find
from raglane.training.job import RunDescription, load_description
from raglane.training.state import TrainingState, load_progress
from raglane.training.stored import read_json, reading
from raglane.training.tasks import TASKS


class RunSummary(NamedTuple):
    """The results of a run."""

    folder: Path
    description: RunDescription
    state: TrainingState
    weights: int
    test: dict[str, Any]
    source: SavedSource | None = None

    @property
    def data(self) -> str:
        """The name of the data."""
        if self.source is None:
            return "data in memory"
        return Path(self.source.path).name if self.source.path else DEFAULT_DATA

    @property
    def key(self) -> tuple[str, str, str]:
        """The task, the loss and the identity of the data, which comparable runs share."""
        settings = self.description.settings
        loss = f"{settings.loss_name} {settings.quantiles}"
        return settings.task, loss, self.description.identity or self.description.fingerprint


def read_run(folder: Path) -> RunSummary:
    """Read the results in the folder of a run."""
    # First, because its message for another kind of folder is the most helpful.
    weights = count_weights(folder)
    description = load_description(folder)
    state = load_progress(find(folder, LAST))
    path = find(folder, EVALUATION)
    test: dict[str, Any] = {}
    if path.is_file():
        test = read_json(path)
        with reading(path):
            test = {"data": os.path.normpath(test["data"])} | {
                # Earlier versions wrote micro_F1 and macro_F1.
                name.replace("_F1", "_f1"): float(value)
                for name, value in test.items()
                if isinstance(value, float | int) and name not in ("sequences", "count")
            }
    source = SavedSource.load(folder, description.data) if description.data else None
    return RunSummary(folder, description, state, weights, test, source)


def has_model(folder: Path) -> bool:
    """Return True unless a folder or file exists and has no saved model, e.g. of a run that was
    stopped early.
    """
    return not os.path.exists(folder) or (folder / CONFIG).is_file() or find(folder, BEST).is_dir()


def compare(folders: Iterable[str | os.PathLike[str]]) -> tuple[Compared, ...]:
    """Return one table per data set, task and loss, with the best runs first."""
    runs = [
        read_run(Path(folder)) for folder in dict.fromkeys(os.fspath(folder) for folder in folders)
    ]
    if not runs:
        raise DataError("runs", "none", "at least one folder of a run", "pass the folders of runs")
    groups: dict[tuple[str, str, str], list[RunSummary]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    return tuple(map(_group, groups.values()))


def _group(runs: Sequence[RunSummary]) -> Compared:
    """The rows of a group."""
    runs = sorted(runs, key=lambda run: run.state.best_loss)
    settings_of = [
        {entry.key: entry for entry in entries(run.description.settings)} for run in runs
    ]
    # The options whose values are not the same in all runs.
    differing = [
        key
        for key, entry in settings_of[0].items()
        if any(one[key].value != entry.value for one in settings_of)
    ]
    first = runs[0].description.settings
    metric = TASKS[first.task].terms(first)[0]
    tested_on = {run.test["data"] for run in runs if run.test}
    # Files with the same name are distinguished by their paths.
    names = [Path(path).name for path in tested_on]
    labels = {
        path: path if names.count(Path(path).name) > 1 else Path(path).name for path in tested_on
    }
    rows = []
    for run, settings in zip(runs, settings_of, strict=True):
        best = run.state.history[run.state.best_epoch - 1]
        row: dict[str, Any] = {"run": str(run.folder)}
        for key in differing:
            value, unset = settings[key].value, settings[key].unset
            row[key] = unset if value is None else _cell(value)
        part = f"{_watched(best)}_"
        row |= {metric_words(name): value for name, value in best.items() if name.startswith(part)}
        # Results on one file share columns.
        where = labels.get(run.test.get("data", ""))
        row |= {
            metric_words(f"{where} {name}"): number
            for name, number in run.test.items()
            if name != "data"
        }
        row |= {"weights": run.weights, "seconds": sum(one["seconds"] for one in run.state.history)}
        row |= {"epochs run": run.state.epoch, "best epoch": run.state.best_epoch}
        rows.append(row)
    ends = ("weights", "seconds", "epochs run", "best epoch")
    columns = [*dict.fromkeys(name for row in rows for name in row if name not in ends), *ends]
    names = list(dict.fromkeys(run.data for run in runs))
    task = first.task if first.loss is None else f"{first.task} ({first.loss})"
    title = f"{', '.join(names)}: {task}, {count_of(len(runs), 'run')}"
    candidates = (f"{part} {metric.replace('_', ' ')}" for part in ("validation", "train"))
    drawn = next((name for name in candidates if name in columns), "seconds")
    losses = [[row[f"{_watched(row)}_loss"] for row in run.state.history] for run in runs]
    cells = [[row.get(name) for name in columns] for row in rows]
    return Compared(title, columns, cells, best=0, drawn=drawn, settings=differing, losses=losses)


def _watched(row: Mapping[str, float]) -> str:
    """Return the part whose loss decides which epoch is the best."""
    return "validation" if "validation_loss" in row else "train"


def _cell(value: Any) -> Any:
    """Return a setting as a cell of a table, floats with 4 significant digits."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else value
