"""Labels and numbers to learn, learned of the training part and turned into tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane.data.records import Records, place_of
from raglane.data.statistics import Statistics
from raglane.data.targets import TASKS, Targets
from raglane.errors import DataError, argument, message, quote, quote_all

if TYPE_CHECKING:
    from raglane.data.preprocess import Preprocessor

__all__ = ["encode_targets", "fit_targets", "look_up", "places_of", "sort_labels"]


def sort_labels(labels: Iterable[str]) -> list[str]:
    """The distinct labels in order: those that are numbers first, by value, then the others, by text.

    Example:
        >>> sort_labels(["10", "2", "b", "2", "-1"])
        ['-1', '2', '10', 'b']
    """
    return sorted(set(map(str, labels)), key=_label_key)


def _label_key(label: str) -> tuple[int, float, str]:
    """What a label is sorted by."""
    try:
        number = float(label)
    except ValueError:
        return 1, 0.0, label
    # NaN compares with nothing, so it is taken for a word.
    return (0, number, label) if number == number else (1, 0.0, label)


def look_up(words: Iterable[str], table: Mapping[str, int], count: int, absent: int) -> npt.NDArray[np.int64]:
    """The number of each word, ``(count,)`` int64, ``absent`` for one that the table lacks; the loop runs in C.

    Example:
        >>> look_up(["a", "b"], {"a": 3}, 2, -1).tolist()
        [3, -1]
    """
    return np.fromiter(map(table.get, words, repeat(absent)), dtype=np.int64, count=count)


@functools.lru_cache(maxsize=8)
def places_of(words: tuple[str, ...]) -> dict[str, int]:
    """The place of each word; made once for the batches of an epoch.

    Example:
        >>> places_of(("b", "a"))
        {'b': 0, 'a': 1}
    """
    return {word: place for place, word in enumerate(words)}


def fit_targets(records: Records | None, known: Statistics, task: str) -> dict[str, Any]:
    """What a preprocessor keeps of the targets of the training part, by the names of its attributes."""
    kind = TASKS[task].label
    if kind is None:
        return {}
    source = "data" if records is None else str(records.source)
    if kind == "class":
        words = _counted_labels(known, task) if records is None else _label_words(records, task).tolist()
        return {"labels": tuple(sort_labels(words))}
    if records is not None:
        _targets_for(records, task)
    elif not (known.labels if kind == "set" else known.targets):
        raise _nothing_to_learn(source, task)
    if kind == "set":
        labels = tuple(sort_labels(known.labels))
        if not labels:
            rule = "at least one label to learn"
            raise DataError(message(source, "no label anywhere", rule, "check the column of labels"))
        return {"labels": labels, "per_element": known.per_element}
    if not sum(channel.count for channel in known.targets.values()):
        raise DataError(message(source, "no number to learn", "at least one", "check the data"))
    mean = tuple(channel.mean for channel in known.targets.values())
    std = tuple(channel.deviation for channel in known.targets.values())
    _refuse_large(source, mean, std)
    return {
        "per_element": known.per_element,
        "target_names": tuple(known.targets),
        "target_mean": mean,
        "target_std": std,
    }


def _refuse_large(source: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Raise where numbers are beyond what a network of 32 bits can be scaled to."""
    largest = float(np.finfo(np.float32).max)
    for name, numbers in (("mean", mean), ("deviation", std)):
        fits = all(abs(number) <= largest and (name == "mean" or number > 0) for number in numbers)
        if not fits:
            rule = "mean and deviation fit 32 bits"
            got = f"numbers to learn of {name} {list(numbers)}"
            raise DataError(message(source, got, rule, "give them in another unit"))


def encode_targets(fitted: Preprocessor, records: Records) -> Tensor:
    """The targets of some records."""
    kind = TASKS[fitted.task].label
    if kind == "class":
        classes: list[str] = _label_words(records, fitted.task).tolist()
        places = fitted.class_places(classes)
        _refuse_unknown(fitted, records, classes, places, np.arange(len(classes)))
        return torch.from_numpy(places)
    targets = _fitting(fitted, records)
    if kind == "numbers":
        scaled = (targets.values - np.array(fitted.target_mean)) / np.array(fitted.target_std)
        return torch.from_numpy(scaled.astype(np.float32))
    counts = np.fromiter(map(len, targets.values), dtype=np.int64, count=len(targets.values))
    words: list[str] = list(chain.from_iterable(targets.values))
    places, rows = fitted.class_places(words), np.repeat(np.arange(len(counts)), counts)
    _refuse_unknown(fitted, records, words, places, rows)
    result = torch.zeros(len(counts), fitted.class_count)
    result[torch.from_numpy(rows), torch.from_numpy(places)] = 1.0
    return result


def _refuse_unknown(
    fitted: Preprocessor,
    records: Records,
    words: list[str],
    places: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
) -> None:
    """Raise for the first label that training has not seen; ``rows`` says of which sequence or element it is."""
    if not (places < 0).any():
        return
    first = int((places < 0).argmax())
    row, step = int(rows[first]), None
    if fitted.per_element:
        row, step = place_of(records.offsets, row)
    place = records.describe_row(row) + ("" if step is None else f", step {step}")
    fix = "train on data that has this label, or correct it"
    got = f"the label {quote(words[first])} in {place}"
    known = f"the labels seen in training are {quote_all(fitted.labels or ())}"
    raise DataError(message(f"{records.source}", got, known, fix))


def _counted_labels(records: Statistics, task: str) -> Iterable[str]:
    """The labels that were counted."""
    if not records.labels:
        fix = f"name their column with {argument('label', of='Columns')}"
        raise DataError(message("data", "no labels", f"the task {task} needs them", fix))
    return records.labels


def _label_words(records: Records, task: str) -> npt.NDArray[np.object_]:
    """The labels, one per sequence, or for tagging one per element: ``(B,)`` or ``(N,)`` object."""
    fix = f"name their column with {argument('label', of='Columns')}"
    if TASKS[task].per == "element":
        if records.tags is None:
            raise DataError(message(f"{records.source}", "no label for each element", "tagging needs them", fix))
        return records.tags
    if records.labels is None:
        raise DataError(message(f"{records.source}", "no labels", "classifying needs one per sequence", fix))
    return np.array(records.labels, dtype=object)


def _targets_for(records: Records, task: str) -> Targets:
    """The numbers or sets of labels that a task needs."""
    targets = records.targets
    if targets is None or targets.is_numbers != (TASKS[task].label == "numbers"):
        raise _nothing_to_learn(str(records.source), task)
    return targets


def _nothing_to_learn(source: str, task: str) -> DataError:
    """The error of data that has no targets of a task's kind."""
    what = "numbers" if TASKS[task].label == "numbers" else "sets of labels"
    fix = f"name their column with {argument('label', of='Columns')}, and read with {argument('task', task)}"
    rule = f"the task {task} needs {what}, per sequence or per element"
    return DataError(message(source, f"no {what} to learn", rule, fix))


def _fitting(fitted: Preprocessor, records: Records) -> Targets:
    """The targets, as many and for the same things as in training."""
    targets = _targets_for(records, fitted.task)
    if targets.per_element and not fitted.per_element:
        got, rule = "targets per element", "the model was trained on one per sequence"
        raise DataError(message(f"{records.source}", got, rule, "give data of the same form"))
    if len(targets.names) != len(fitted.target_names):
        got = f"{len(targets.names)} numbers to learn"
        rule = f"the model was trained on {len(fitted.target_names)}: {quote_all(fitted.target_names)}"
        raise DataError(message(f"{records.source}", got, rule, "give data of the same form"))
    if fitted.per_element and not targets.per_element:
        # A file in which no sequence has two different labels says so once per sequence.
        values = np.repeat(targets.values, records.lengths, axis=0)
        return Targets(values, per_element=True, names=targets.names)
    return targets
