"""Fit and apply vocabularies, scales of features, and labels; read them from a stored
preprocessor.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_flag, check_kind
from raglane._utils.messages import argument, quote, quote_all
from raglane.data.columns import option
from raglane.data.prepare.missing import fill_missing, how_to_fill
from raglane.data.prepare.statistics import FeatureCounts, Statistics
from raglane.data.records import Feature
from raglane.errors import ArgumentError, CheckpointError, DataError
from raglane.tasks import TASKS

# Indices of categories are stored as float32, which is exact up to this number.
_MOST = 2**24
_LARGEST = float(np.finfo(np.float32).max)

# The token for every word outside of the vocabulary: the first entry of each vocabulary.
UNKNOWN = "<unk>"
# The label of elements that do not count, and their class.
IGNORED = "-100"
IGNORED_CLASS = -100

# The token before and after each text of a language model: the second entry of its vocabulary.
END = "<end>"

# The attributes of a preprocessor that are tuples, and those of them that may be None.
OPTIONAL = ("mean", "std", "vocabulary", "labels")

TUPLES = ("channels", *OPTIONAL, "target_names", "target_mean", "target_std")
_NUMBERS = ("mean", "std", "target_mean", "target_std")
# Entries that the first format of stored models lacks.
_LATER = (
    *(
        "split",
        "label_split",
        "per_element",
        "target_names",
        "target_mean",
        "target_std",
        "features",
        "whole_labels",
        "season",
    ),
)


@dataclass(frozen=True)
class FeatureEncoder:
    """The fitted encoding of one feature: the scale of numbers, or the vocabulary of categories."""

    name: str
    per_sequence: bool = False
    mean: float = 0.0
    std: float = 1.0
    vocabulary: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "a text", "pass the name of the feature")
        check_flag("per_sequence", self.per_sequence)
        check_kind(
            "vocabulary",
            self.vocabulary,
            (tuple, type(None)),
            "a tuple, or None",
            "convert it with tuple(...)",
        )
        odd = next((word for word in self.vocabulary or () if not isinstance(word, str)), "")
        check_kind("vocabulary", odd, str, "a tuple of str", "convert each with str(...)")
        check_scale("mean", (self.mean,))
        check_scale("std", (self.std,))
        if self.vocabulary is not None and self.vocabulary[:1] != (UNKNOWN,):
            got = f"{quote(self.vocabulary)}"[:80]
            raise ArgumentError(
                "vocabulary", got, f"categories that begin with {UNKNOWN}", "fit it again"
            )

    @property
    def kind(self) -> str:
        """A description of the feature, e.g. "numbers per element"."""
        what = "numbers" if self.vocabulary is None else "categories"
        return f"{what} per {'sequence' if self.per_sequence else 'element'}"

    def to_config(self) -> dict[str, Any]:
        """Return the attributes as JSON values."""
        return {
            **asdict(self),
            "vocabulary": None if self.vocabulary is None else list(self.vocabulary),
        }

    @classmethod
    def from_config(cls, config: Any) -> FeatureEncoder:
        """Make the encoder from the result of :meth:`to_config`."""
        names = ("name", "per_sequence", "mean", "std", "vocabulary")
        if not isinstance(config, Mapping) or set(config) != set(names):
            rule = f"an object with {', '.join(names)}"
            raise CheckpointError(
                "preprocessing", f"the feature {quote(config)}"[:80], rule, "train again"
            )
        words = config["vocabulary"]
        try:
            return cls(
                **{**config, "vocabulary": tuple(words) if isinstance(words, list) else words}
            )
        except (ArgumentError, TypeError) as error:
            raise CheckpointError(f"preprocessing: {error}") from error


def check_scale(name: str, numbers: Iterable[Any]) -> None:
    """Raise an ArgumentError unless means or deviations are finite in float32, and deviations
    positive.
    """
    has_sign = not name.endswith("std")
    for number in numbers:
        is_number = isinstance(number, Real) and not isinstance(number, bool)
        # NaN passes no comparison.
        if not (is_number and abs(number) <= _LARGEST and (has_sign or number > 0)):
            rule = f"finite float32 numbers{'' if has_sign else ' above 0'}"
            raise ArgumentError(name, quote(number)[:60], rule, "fit the preprocessing again")


def fit_encoders(counted: Mapping[str, FeatureCounts], missing: str) -> tuple[FeatureEncoder, ...]:
    """Fit the scale or the vocabulary of each feature."""
    encoders = []
    for name, counts in counted.items():
        if counts.missing and missing == "raise":
            got = f"{counts.missing:,} missing in the feature {quote(name)}"
            raise DataError(
                "data", got, "data with complete features", f"correct the data, or {how_to_fill()}"
            )
        if counts.channel is not None:
            encoders.append(
                FeatureEncoder(
                    name, counts.per_sequence, counts.channel.mean, counts.channel.deviation
                )
            )
            continue
        words = fit_vocabulary({word: count for word, count in counts.words.items() if word})
        if len(words) > _MOST:
            got = f"{len(words) - 1:,} categories of {quote(name)}"
            rule = "limited to 2**24 categories"
            raise DataError("data", got, rule, "merge rare categories")
        encoders.append(FeatureEncoder(name, counts.per_sequence, vocabulary=words))
    return tuple(encoders)


def encode(
    encoders: Sequence[FeatureEncoder],
    features: Sequence[Feature],
    offsets: npt.NDArray[np.int64],
    missing: str,
    source: str,
) -> npt.NDArray[np.float32]:
    """Return the features as a matrix, ``(N, columns)`` float32: scaled numbers, then indices of
    categories.
    """
    by_name = {feature.name: feature for feature in features}
    numbers: list[npt.NDArray[np.float32]] = []
    indices: list[npt.NDArray[np.float32]] = []
    lengths = np.diff(offsets)
    for encoder in encoders:
        feature = by_name.get(encoder.name)
        if feature is None or feature.kind != encoder.kind:
            got = "no such feature" if feature is None else feature.kind
            if feature is None and by_name:
                got += f" among {quote_all(by_name)}"
            name = f"{source}: {quote(encoder.name)}"
            rule = f"{encoder.kind}, as in training"
            raise DataError(name, got, rule, "pass data with this feature")
        if missing == "raise":
            _refuse_missing(feature, source)
        if encoder.vocabulary is None:
            column = ((feature.values - encoder.mean) / encoder.std).astype(np.float32)
        else:
            words = feature.values.tolist()
            column = look_up(
                words, indexes_of_categories(encoder.vocabulary), len(words), 0
            ).astype(np.float32)
        column = np.repeat(column, lengths) if feature.per_sequence else column
        (numbers if encoder.vocabulary is None else indices).append(column)
    block = (
        np.stack(numbers, axis=1) if numbers else np.zeros((int(offsets[-1]), 0), dtype=np.float32)
    )
    if missing != "raise":
        block = fill_missing(block, offsets, missing)
    return np.concatenate([block, *(column[:, None] for column in indices)], axis=1)


def _refuse_missing(feature: Feature, source: str) -> None:
    absent = ~np.isfinite(feature.values) if feature.is_numbers else feature.values == ""
    if absent.any():
        where = f"{'sequence' if feature.per_sequence else 'element'} {int(absent.argmax())}"
        got = f"nothing for {where} in the feature {quote(feature.name)}"
        raise DataError(
            source, got, "data with complete features", f"correct the data, or {how_to_fill()}"
        )


def fit_vocabulary(
    counted: Mapping[str, int],
    special: tuple[str, ...] = (UNKNOWN,),
    min_count: int = 1,
    most: int | None = None,
) -> tuple[str, ...]:
    """Return the special words, then the others by descending frequency, ties in alphabetical
    order.
    """
    counts = Counter(counted)
    for word in special:
        del counts[word]
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    frequent = [word for word, count in ranked if count >= min_count]
    return (*special, *(frequent if most is None else frequent[: most - len(special)]))


def no_tokens() -> DataError:
    """Return the error for a language model with sequences of numbers."""
    rule = "another task for sequences of numbers, since a language model reads tokens"
    return DataError("task", "'language'", rule, "use forecast")


def between_ends(values: Tensor, offsets: Tensor, *, with_last: bool) -> tuple[Tensor, Tensor]:
    """Put the token ``END`` before each sequence, and with ``with_last`` after it too.

    Takes tokens ``(N,)`` and offsets; returns both for the longer sequences.
    """
    if len(values) and values.dim() > 1:
        raise no_tokens()
    more = 2 if with_last else 1
    lengths = offsets.diff() + more
    wrapped = segments.offsets_from_lengths(lengths)
    result = torch.ones(int(wrapped[-1]), dtype=torch.int64)
    added = torch.repeat_interleave(torch.arange(len(lengths)), offsets.diff()) * more + 1
    result[torch.arange(len(values)) + added] = values.reshape(len(values)).long()
    return result, wrapped


def sort_labels(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels: numbers by value, then other labels in alphabetical order."""
    return sorted(set(map(str, labels)), key=_label_key)


def _label_key(label: str) -> tuple[int, float, str]:
    try:
        number = float(label)
    except ValueError:
        return 1, 0.0, label
    # NaN has no order, so it is sorted as a word.
    return (0, number, label) if number == number else (1, 0.0, label)


def without_ignored(labels: Iterable[str], task: str) -> list[str]:
    """Return the labels of a task without the one of elements that do not count.

    As in torch's losses, -100 marks them, if all other labels of elements are whole numbers from 0.
    """
    words = list(labels)
    others = [label for label in words if label != IGNORED]
    facts = TASKS[task]
    per_element = facts.label == "class" and facts.per == "element"
    return others if per_element and ignores(others) else words


def ignores(labels: Sequence[str]) -> bool:
    """Return True if -100 is no label among these, but marks elements that do not count."""
    return are_whole(labels) and all(label.isdigit() for label in labels)


def are_whole(labels: Sequence[str]) -> bool:
    """Return True if there are labels, and all are whole numbers of 64 bits as Python writes
    them.
    """
    return bool(labels) and all(
        re.fullmatch(r"0|-?[1-9]\d{0,17}", label, re.ASCII) for label in labels
    )


def look_up(
    words: Iterable[str], table: Mapping[str, int], count: int, absent: int
) -> npt.NDArray[np.int64]:
    """Return the index of each word, ``(count,)`` int64, or ``absent`` if the table lacks it; the
    loop runs in C.
    """
    return np.fromiter(map(table.get, words, repeat(absent)), dtype=np.int64, count=count)


@functools.lru_cache(maxsize=8)
def indexes_of(words: tuple[str, ...]) -> dict[str, int]:
    """Return the index of each word; cached for the batches of an epoch."""
    return {word: index for index, word in enumerate(words)}


@functools.lru_cache(maxsize=8)
def indexes_of_categories(words: tuple[str, ...]) -> dict[str, int]:
    """Return the index of each category or label; 3 also as 3.0, 3.0 also as 3, and truth values in
    other cases.

    A column of whole numbers becomes one of floats if an entry of it is missing. Truth values are
    True in a table in memory, and TRUE in the CSV file of a spreadsheet.
    """
    indexes = indexes_of(words)
    whole = [word for word in words if re.fullmatch(r"-?\d+(\.0)?", word, re.ASCII)]
    others = {
        word.removesuffix(".0") if "." in word else f"{word}.0": indexes[word] for word in whole
    }
    folded = [word.lower() for word in words]
    for word in words:
        if (
            word.lower() in ("true", "false") and folded.count(word.lower()) == 1
        ):  # else they are different words
            others |= dict.fromkeys((word.lower(), word.upper(), word.title()), indexes[word])
    return others | indexes


def unknown_words(
    tokens: tuple[str, ...], encoders: Sequence[FeatureEncoder], statistics: Statistics
) -> list[str]:
    """Return a line on the tokens that a vocabulary lacks, and for each feature one on categories
    that are new.
    """
    vocabularies = []
    if tokens:
        name = "tokens that are not in the vocabulary"
        vocabularies.append((name, indexes_of(tokens), statistics.tokens))
    for encoder in encoders:
        if encoder.vocabulary is not None and encoder.name in statistics.features:
            name = f"categories of {quote(encoder.name)} unseen in training"
            words = statistics.features[encoder.name].words
            vocabularies.append((name, indexes_of_categories(encoder.vocabulary), words))
    lines = []
    for name, indexes, words in vocabularies:
        unknown = [word for word in words if word and word not in indexes]
        if unknown:
            share = f"{sum(words[word] for word in unknown):,} of {words.total():,}"
            lines.append(f"{name}: {share} ({quote_all(unknown)})")
    return lines


def fit_targets(statistics: Statistics, task: str, source: str) -> dict[str, Any]:
    """Fit the attributes of a preprocessor that describe targets; return them by name."""
    kind = TASKS[task].label
    if kind is None:
        return {}
    if kind != "numbers":
        if not statistics.labels and kind == "class":
            raise nothing_to_learn(source, task)
        labels = tuple(sort_labels(without_ignored(statistics.labels, task)))
        if kind == "class":
            return {"labels": labels}
        if not labels:
            rule = "data with at least one label"
            raise DataError(source, "no label", rule, "check the column of labels")
        return {"labels": labels, "per_element": statistics.per_element and kind == "set"}
    if not statistics.targets:
        raise nothing_to_learn(source, task)
    return _fit_numbers(statistics, source)


def _fit_numbers(statistics: Statistics, source: str) -> dict[str, Any]:
    """Fit the attributes of a preprocessor that describe numbers to learn."""
    if not sum(channel.count for channel in statistics.targets.values()):
        raise DataError(source, "no target", "at least one number", "check the data")
    mean = tuple(channel.mean for channel in statistics.targets.values())
    std = tuple(channel.deviation for channel in statistics.targets.values())
    for name, numbers in (("mean", mean), ("deviation", std)):
        if not all(
            abs(number) <= _LARGEST and (name == "mean" or number > 0) for number in numbers
        ):
            got = f"targets of {name} {list(numbers)}"
            rule = "data with targets whose mean and deviation fit float32"
            raise DataError(source, got, rule, "convert them to another unit")
    return {
        "per_element": statistics.per_element,
        "target_names": tuple(statistics.targets),
        "target_mean": mean,
        "target_std": std,
    }


def nothing_to_learn(source: str, task: str) -> DataError:
    """Return the error for data without the labels or numbers that a task requires."""
    kind = TASKS[task]
    column = f"name their column with {option('label')}"
    if kind.label == "class":
        got = "no label for each element" if kind.per == "element" else "no labels"
        return DataError(
            source, got, f"data with one label per {kind.per}, for the task {task}", column
        )
    names = {"numbers": "numbers", "sequence": "sequences of labels"}.get(
        kind.label or "", "sets of labels"
    )
    per = "per sequence" + " or per element" * (kind.per == "either")
    rule = f"data with {names} {per}, for the task {task}"
    return DataError(
        source, f"no {names} to learn", rule, f"{column}, and read with {argument('task', task)}"
    )


def read_config(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the attributes of a preprocessor from stored JSON values."""
    stored: Any = config
    if not isinstance(stored, Mapping):
        rule = f"an object with {', '.join(names)}"
        raise CheckpointError("preprocessing", quote(config), rule, "train again")
    odd = sorted(map(str, (set(names) - set(_LATER) - set(config)) | (set(config) - set(names))))
    if odd:
        got = f"entries {quote_all(odd)} missing or unknown"
        raise CheckpointError("preprocessing", got, f"exactly {', '.join(names)}", "train again")
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.items()
    }
    features = values.get("features", ())
    if not isinstance(features, tuple):
        raise CheckpointError(
            "preprocessing", f"features = {quote(features)}", "a list", "train again"
        )
    values["features"] = tuple(map(FeatureEncoder.from_config, features))
    for name in TUPLES:
        kind = (int, float) if name in _NUMBERS else str
        value = values.setdefault(name, ())
        # In Python a bool is an int.
        fits = isinstance(value, tuple) and all(
            isinstance(entry, kind) and not isinstance(entry, bool) for entry in value
        )
        if not fits and (value is not None or name not in OPTIONAL):
            got = f"{name} = {quote(value)}"
            rule = "a list of numbers or strings"
            raise CheckpointError("preprocessing", got, rule, "train again")
    return values
