"""Predictions as a table, and the results of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple, overload

from torch import Tensor

from raglane._utils.checks import check_whole
from raglane._utils.json import finite
from raglane._utils.messages import (
    count_of,
    message,
    metric_words,
    quote,
    quote_all,
    require,
    shorten,
)
from raglane.errors import ArgumentError
from raglane.training.tasks import Measured

# Rows, and characters per entry, in the repr of a table.
_SHOWN = 10
_WIDEST = 40


# Metrics that are compared with simple rules and are better if higher; those of other tasks are
# errors.
SCORES = ("accuracy", "micro_f1", "exact_match")


@dataclass(frozen=True, repr=False)
class Predictions:
    """A table of predictions in the order of the data.

    Args:
        columns: lists with one entry per sequence: ``id``, ``prediction``, ``probability`` and,
            with ``probabilities=True``, ``p_<label>`` for each class. With an output per element an
            entry is a list with a value per element. For ``forecast``, ``prediction`` is a list of
            ``horizon`` lists of ``C`` numbers in the units of the data (None for an empty
            sequence), without a probability.
        id_names: the names of the user's columns of ids, which :meth:`named` has in place of
            ``id``; several together are the ids of sequences.
        elements: columns with a list per sequence that describe its elements, or the steps of its
            forecast: the words, and the times.
        channels: the names of the channels of a forecast; () for other tasks.
        per_element: whether there is a prediction per element or step.

    Example:
        >>> predictions = Predictions({"id": [0, 1], "prediction": ["a", "b"], "probability": [0.75, 1.0]})
        >>> predictions
        Predictions of 2 sequences
        id  prediction  probability
        0  a  0.75
        1  b  1
        >>> predictions["prediction"], len(predictions)
        (['a', 'b'], 2)
        >>> predictions[0]
        {'id': 0, 'prediction': 'a', 'probability': 0.75}
    """

    columns: dict[str, list[Any]]
    id_names: tuple[str, ...] = ("id",)
    elements: dict[str, list[list[Any]]] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    per_element: bool = False

    def __len__(self) -> int:
        return len(self.columns["id"])

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    def __getitem__(self, key: str | int) -> Any:
        """Return a column by its name, or a row by its number as a dictionary."""
        if isinstance(key, str) and key in self.columns:
            return self.columns[key]
        if isinstance(key, str):
            rule = f"one of {quote_all(self.columns)}"
            raise ArgumentError("column", quote(key), rule, "choose one of them")
        row = check_whole("row", key)
        if not -len(self) <= row < len(self):
            rule = f"from {-len(self)} to {len(self) - 1}, for {len(self)} rows"
            raise IndexError(message("row", f"{row}", rule, "use a number below len(predictions)"))
        return {name: column[row] for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as dictionaries."""
        return (self[row] for row in range(len(self)))

    def __contains__(self, name: object) -> bool:
        """Return True for the name of a column."""
        return name in self.columns

    def keys(self) -> KeysView[str]:
        """Return the names of the columns."""
        return self.columns.keys()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the table to a package that reads Arrow, such as polars or DuckDB."""
        table = require("pyarrow", "data").table(self.named())
        return table.__arrow_c_stream__(requested_schema)

    def named(self) -> dict[str, list[Any]]:
        """Return the columns as in a file: the ids have the names of the user's columns, and a
        forecast has a row per step.

        Example:
            >>> Predictions({"id": ["a/u"], "prediction": [1]}, ("store", "item")).named()
            {'store': ['a'], 'item': ['u'], 'prediction': [1]}
        """
        if self.channels:
            return self.by_element().named()
        ids = self.columns["id"]
        others = {name: column for name, column in self.columns.items() if name != "id"}
        others = {name: column for name, column in self.elements.items() if name not in others} | (
            others
        )
        names = self.id_names
        if len(names) == 1:
            return {(names[0] if names[0] not in others else "id"): ids, **others}
        parts = [str(name).split("/") for name in ids]
        is_clear = all(len(each) == len(names) for each in parts)
        if not is_clear or others.keys() & set(names):
            return self.columns
        split = zip(*parts, strict=True) if parts else ([] for _ in names)
        return {**dict(zip(names, map(list, split), strict=True)), **others}

    def by_element(self) -> Predictions:
        """Return the table with a row per element, or per step of a forecast, of predictions that
        have a list of them for each sequence; numbered from 1 in the column ``step``.

        A sequence without elements has no row.

        Example:
            >>> Predictions({"id": [7], "prediction": [["D", "N"]]}, elements={"word": [["a", "cat"]]}).by_element()
            Predictions of 2 rows
            id  step  word  prediction
            7  1  a  D
            7  2  cat  N
        """
        lists = {name: column for name, column in self.columns.items() if name != "id"}
        counts = [len(entry or ()) for entry in lists["prediction"]]
        longer = {"id": _repeated(self.columns["id"], counts)}
        longer["step"] = [step for count in counts for step in range(1, count + 1)]
        longer |= {name: _flat(column) for name, column in self.elements.items()}
        for name, column in lists.items():
            entries = _flat(column)
            if not self.channels:
                longer[name] = entries
            elif len(self.channels) == 1:
                longer[name] = [entry[0] for entry in entries]
            else:
                for place, channel in enumerate(self.channels):
                    longer[f"{name}_{channel}"] = [entry[place] for entry in entries]
        return Predictions(longer, self.id_names)

    def __repr__(self) -> str:
        rows = "\n".join(
            "  ".join(shorten(_short(entry), _WIDEST) for entry in row)
            for row in islice(zip(*self.columns.values(), strict=True), _SHOWN)
        )
        more = f"\n... {len(self) - _SHOWN:,} more" if len(self) > _SHOWN else ""
        what = "row" if "step" in self.columns else "sequence"
        return (
            f"Predictions of {count_of(len(self), what)}\n{'  '.join(self.columns)}\n{rows}{more}"
        )

    def to_pandas(self) -> Any:
        """Return the table as a ``pandas.DataFrame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return require("pandas", "data").DataFrame(self.named())


@dataclass(frozen=True, repr=False)
class Evaluation(Mapping[str, float]):
    """The quality of a model on data that has targets: a mapping from names to numbers.

    Args:
        task: the name of the task.
        sequences: the number of sequences.
        count: the number of targets that were averaged: sequences, elements or numbers.
        numbers: ``loss`` and the metrics and baselines of the task, by name.
        measured: the classes, confusion matrix, table and points of the task.
    """

    task: str
    sequences: int
    count: int
    numbers: dict[str, float]
    measured: Measured

    def __getitem__(self, name: str) -> float:
        """Return one of the numbers."""
        if name not in self.numbers:
            raise ArgumentError(
                "number", quote(name), f"one of {quote_all(self.numbers)}", "choose one of them"
            )
        return self.numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, name: object) -> bool:
        return name in self.numbers

    def get(self, name: str, default: Any = None) -> Any:
        """Return one of the numbers, or the default for another name."""
        return self.numbers.get(name, default)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {number:.4g}" for name, number in self.numbers.items())
        return f"Evaluation({self.task}, {count_of(self.sequences, 'sequence')}: {numbers})"

    def better_rule(self) -> str | None:
        """Return the metric and the best simple rule in words, if the model is not better than this
        rule.
        """
        rule = self.rule_not_beaten()
        return None if rule is None else str(rule)

    def rule_not_beaten(self) -> BetterRule | None:
        """Return the best simple rule, if the model is not better than this rule."""
        rule = _rule_not_beaten(self.numbers)
        if rule is not None:
            return rule
        ahead = self.ahead()
        rule = _rule_not_beaten(ahead)
        return None if rule is None else rule._replace(steps=len(self.measured.table))

    def ahead(self) -> dict[str, float]:
        """Return the errors of forecasts and of simple rules, as means over all steps ahead; {}
        without them.
        """
        steps = [row for row in self.measured.table if "step" in row]
        names = [name for name in (steps[0] if steps else ()) if name != "step"]
        return {name: fmean(row[name] for row in steps) for name in names}

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes; empty for tasks without classes."""
        return self.measured.labels

    @property
    def confusion(self) -> Tensor | None:
        """The confusion matrix ``(K, K)`` int64, with a row per true class; None for tasks without
        classes.
        """
        return self.measured.confusion

    def to_config(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary, with None for numbers that are not finite."""
        return {
            "task": self.task,
            "sequences": self.sequences,
            "count": self.count,
            **finite(self.numbers),
            "labels": list(self.labels),
            "confusion": None if self.confusion is None else self.confusion.tolist(),
            "table": finite(list(self.measured.table)),
        }


class BetterRule(NamedTuple):
    """A simple rule that a model does not beat: its metric, the model's value, the rule's name and
    value, and the number of steps ahead of which they are means.
    """

    metric: str
    reached: float
    name: str
    value: float
    steps: int | None = None

    def is_beaten_by(self, reached: float) -> bool:
        """Return True if a value of the metric is better than the rule's, or without errors."""
        if self.metric in SCORES:
            return reached > self.value or reached == 1
        return reached < self.value or reached == 0

    def __str__(self) -> str:
        words = f"{metric_words(self.metric)} {self.reached:.3f}"
        words += f", {metric_words(self.name)} {self.value:.3f}"
        return words if self.steps is None else f"{words}, as the mean of {self.steps} steps ahead"


def _rule_not_beaten(numbers: Mapping[str, float]) -> BetterRule | None:
    # The share of right classes among the likeliest, top2_accuracy, is of the model too.
    others = {name: number for name, number in numbers.items() if not name.startswith("top")}
    for metric, reached in numbers.items():
        rules = {name: number for name, number in others.items() if name.endswith(f"_{metric}")}
        if not rules:
            continue
        best = max if metric in SCORES else min
        name = best(rules, key=rules.__getitem__)
        rule = BetterRule(metric, reached, name, rules[name])
        return None if rule.is_beaten_by(reached) else rule
    return None


def _repeated(entries: list[Any], counts: list[int]) -> list[Any]:
    return [entry for entry, count in zip(entries, counts, strict=True) for _ in range(count)]


def _flat(lists: list[Any]) -> list[Any]:
    return [entry for each in lists for entry in each or ()]


def _short(entry: Any) -> str:
    if isinstance(entry, list):
        return f"[{', '.join(map(_short, entry[:_SHOWN]))}{', ...' if len(entry) > _SHOWN else ''}]"
    return f"{entry:.4g}" if isinstance(entry, float) else str(entry)
