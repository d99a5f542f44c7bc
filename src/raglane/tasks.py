"""The tasks of trainings, with everything about them that does not need a model or data.

:mod:`raglane.training.tasks` has a class for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["DUPLICATES", "TASKS", "TaskFacts", "Terms", "guessed_in"]

DUPLICATES = ("keep", "mean", "first")
"""The ways to read rows of a sequence that have one time."""


class Terms(NamedTuple):
    """The names of a task's metric, and of the rule that the metric is compared with, if any."""

    metric: str
    baseline: str | None = None


@dataclass(frozen=True)
class TaskFacts:
    """The facts of one task.

    Attributes:
        label: the kind of labels, ``"class"``, ``"numbers"``, ``"set"`` or ``"sequence"``; None
            without labels.
        per: ``"sequence"``, ``"element"`` or ``"either"``: what has a label.
        losses: the names of the losses, the default first.
        terms: metric and baseline.
        terms_by_loss: metric and baseline for losses that have others.
        is_per_element: True if the model has an output for each element, whatever the labels.
        is_forwards: True if the next element is predicted, so that layers run forwards only.
        guessed_in: the files whose labels tell this task, by what a row of them is: ``"sequence"``,
            ``"element"`` (or a row that has its own numbered columns), ``"word"`` or ``"text"``.
    """

    label: str | None
    per: str
    losses: tuple[str, ...]
    terms: Terms
    terms_by_loss: Mapping[str, Terms] = field(default_factory=dict)
    is_per_element: bool = False
    is_forwards: bool = False
    guessed_in: tuple[str, ...] = ()


_NUMBER_LOSSES = ("mse", "mae", "huber", "quantile")

TASKS: dict[str, TaskFacts] = {
    "classify": TaskFacts(
        "class",
        "sequence",
        ("cross_entropy",),
        Terms("accuracy"),
        guessed_in=("sequence", "element", "word", "text"),
    ),
    "tag": TaskFacts(
        "class",
        "element",
        ("cross_entropy",),
        Terms("accuracy"),
        is_per_element=True,
        guessed_in=("sequence", "word"),
    ),
    "regress": TaskFacts(
        "numbers",
        "either",
        _NUMBER_LOSSES,
        Terms("mae", "mean"),
        guessed_in=("sequence", "element"),
    ),
    "multilabel": TaskFacts(
        "set", "either", ("bce",), Terms("exact_match"), guessed_in=("sequence",)
    ),
    "forecast": TaskFacts(
        None,
        "element",
        (*_NUMBER_LOSSES, "bce"),
        Terms("mae", "persistence"),
        {"bce": Terms("nats")},
        is_per_element=True,
        is_forwards=True,
    ),
    "language": TaskFacts(
        None,
        "element",
        ("cross_entropy",),
        Terms("bits_per_token"),
        is_per_element=True,
        is_forwards=True,
        guessed_in=("text",),
    ),
    "transcribe": TaskFacts(
        "sequence", "sequence", ("likelihood",), Terms("token_error_rate"), is_per_element=True
    ),
}
"""The tasks by name, in the order in which they are guessed."""


def guessed_in(row: str) -> tuple[str, ...]:
    """Return the tasks that the labels of a file tell, whose rows are of this kind."""
    return tuple(task for task, facts in TASKS.items() if row in facts.guessed_in)
