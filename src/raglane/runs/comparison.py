"""Comparison of runs: their results, costs and differing settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raglane._utils.json import read_json, reading
from raglane._utils.messages import count_of, metric_words
from raglane.errors import DataError
from raglane.report.figures import Compared
from raglane.runs.configuration import entries
from raglane.runs.sources import DEFAULT_DATA, SavedSource
from raglane.training.checkpoint import CONFIG, count_weights
from raglane.training.folder import BEST, EVALUATION, LAST, find
from raglane.training.job import RunDescription, load_description
from raglane.training.state import TrainingState, load_progress


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
                name.lower(): float(value)  # earlier versions wrote macro_F1 and MAE
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


_LAST_COLUMNS = ("weights", "seconds", "epochs run", "best epoch")


def _group(runs: Sequence[RunSummary]) -> Compared:
    """The rows of a group."""
    runs = sorted(runs, key=lambda run: run.state.best_loss)
    settings_of = [
        {entry.key: entry for entry in entries(run.description.settings)} for run in runs
    ]
    differing = _differing(settings_of)
    labels = _file_labels(runs)
    rows = [
        _row(run, {key: settings[key] for key in differing}, labels)
        for run, settings in zip(runs, settings_of, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in _LAST_COLUMNS)
    columns = [*names, *_LAST_COLUMNS]
    first = runs[0].description.settings
    task = first.task if first.loss is None else f"{first.task} ({first.loss})"
    data = ", ".join(dict.fromkeys(run.data for run in runs))
    metric = metric_words(first.terms.metric)
    candidates = (f"validation {metric}", f"train {metric}")
    return Compared(
        f"{data}: {task}, {count_of(len(runs), 'run')}",
        columns,
        [[row.get(name) for name in columns] for row in rows],
        best=0,
        drawn=next((name for name in candidates if name in columns), "seconds"),
        settings=differing,
        losses=[[row[f"{_watched(row)}_loss"] for row in run.state.history] for run in runs],
    )


def _differing(settings_of: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the options whose values are not the same in all runs."""
    return [
        key
        for key, entry in settings_of[0].items()
        if any(settings[key].value != entry.value for settings in settings_of)
    ]


def _file_labels(runs: Sequence[RunSummary]) -> dict[str, str]:
    """Return a label for each test file: its name, or its path if two files have the name."""
    paths = {run.test["data"] for run in runs if run.test}
    names = [Path(path).name for path in paths]
    return {path: path if names.count(Path(path).name) > 1 else Path(path).name for path in paths}


def _row(
    run: RunSummary, settings: Mapping[str, Any], file_labels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the row of a run: settings that differ, losses and metrics, and costs."""
    row: dict[str, Any] = {"run": str(run.folder)}
    for key, entry in settings.items():
        row[key] = entry.unset if entry.value is None else _cell(entry.value)
    best = run.state.history[run.state.best_epoch - 1]
    prefix = f"{_watched(best)}_"
    for name, number in best.items():
        if name.startswith(prefix):
            row[metric_words(name)] = number
    # Results on one file share columns.
    file_label = file_labels.get(run.test.get("data", ""))
    for name, number in run.test.items():
        if name != "data":
            row[metric_words(f"{file_label} {name}")] = number
    row["weights"] = run.weights
    row["seconds"] = sum(epoch["seconds"] for epoch in run.state.history)
    row["epochs run"] = run.state.epoch
    row["best epoch"] = run.state.best_epoch
    return row


def _watched(row: Mapping[str, float]) -> str:
    """Return the part whose loss decides which epoch is the best."""
    return "validation" if "validation_loss" in row else "train"


def _cell(value: Any) -> Any:
    """Return a setting as a cell of a table, floats with 4 significant digits."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else value
