"""``raglane show``: the settings and results of a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from raglane._utils.messages import first_of, metric_words
from raglane.cli import console, options
from raglane.training.settings import Settings

# The number of labels that are listed.
_LISTED = 10


@options.command
def show(
    run: options.Run,
    *,
    json: options.Json = None,
) -> None:
    """Show a run: its data, settings, best epoch, and results on the test data.

    For example:

    raglane show runs/demo

    raglane show runs/demo --json -
    """
    facts = facts_of(run)
    console.write_json(json, facts)
    if console.is_stdout(json):
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        console.log(f"{name:{width}}  {_words(value)}")


def facts_of(run: Path) -> dict[str, Any]:
    """Return the facts about a run by name."""
    from raglane.runs.comparison import read_run
    from raglane.training.checkpoint import stored_labels

    found = read_run(run)
    settings = found.description.settings
    state = found.state
    default = Settings(task=settings.task)
    best = state.history[state.best_epoch - 1]
    return {
        "run": str(run),
        "data": found.data,
        "task": settings.task,
        "labels": stored_labels(run),
        "weights": found.weights,
        "settings": {
            field.name: getattr(settings, field.name)
            for field in fields(Settings)
            if getattr(settings, field.name) != getattr(default, field.name)
        },
        "epochs": state.epoch,
        "best epoch": state.best_epoch,
        **{metric_words(name): value for name, value in best.items() if name != "epoch"},
        "test": found.test,
    }


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        entries = (f"{metric_words(name)} {_words(each)}" for name, each in value.items())
        return ", ".join(entries) or "none"
    if isinstance(value, list):
        return f"{len(value):,}: {first_of(value, _LISTED)}" if value else "none"
    return str(value)
