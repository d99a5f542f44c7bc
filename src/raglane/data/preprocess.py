"""Everything learned from the training part that turns records into tensors: vocabulary, scaling, classes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane import interop
from raglane.checks import check_flag, check_kind
from raglane.data.dataset import SequenceDataset
from raglane.data.epochs import check_least
from raglane.data.missing import check_policy, fill_missing, how_to_fill, refuse_missing
from raglane.data.records import Records, check_task, place_of
from raglane.data.statistics import Counted, Statistics
from raglane.errors import ArgumentError, CheckpointError, DataError, argument, message, quote, quote_all

__all__ = ["UNKNOWN", "Preprocessor", "sort_labels"]

UNKNOWN = "<unk>"
_LARGEST = float(np.finfo(np.float32).max)


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


def _look_up(words: Iterable[str], table: Mapping[str, int], count: int, absent: int) -> npt.NDArray[np.int64]:
    """The number of each word, ``(count,)`` int64, ``absent`` for one that the table lacks; the loop runs in C."""
    return np.fromiter(map(table.get, words, repeat(absent)), dtype=np.int64, count=count)


@functools.lru_cache(maxsize=8)
def _places(words: tuple[str, ...]) -> dict[str, int]:
    """The place of each word; made once for the batches of an epoch."""
    return {word: place for place, word in enumerate(words)}


@dataclass(frozen=True)
class Preprocessor:
    """What was learned from the training part, and what turns records into tensors by it.

    Features are scaled first and filled afterwards. So a missing feature that is filled with 0 gets the mean of its
    channel (without ``standardize`` it gets a plain 0); the mean and deviation are those of the features that are
    present; and the was-missing channels stay 0 and 1. Tokens become their place in the vocabulary; one that it lacks
    becomes 0, the place of the unknown token.

    Attributes:
        task: ``"classify"``, ``"tag"`` or ``"forecast"``.
        channels: the names of the ``C`` feature columns; () for tokens.
        mean: ``C`` numbers, subtracted from the features; None without scaling.
        std: ``C`` numbers above 0 that the features are divided by; 1 for a channel that never changes.
        vocabulary: the tokens, the unknown one first, then from the most frequent; None for features.
        labels: the classes in order, for ``"classify"`` and ``"tag"``; else None.
        missing: ``"error"``, or ``"zero"`` or ``"forward"``, which append a was-missing channel for each channel.

    Example:
        >>> from raglane.data.records import offsets_of
        >>> words = np.array(["a", "b", "a", "c"], dtype=object)
        >>> records = Records(words, offsets_of([3, 1]), labels=("yes", "no"))
        >>> fitted = Preprocessor.fit(records, task="classify")
        >>> fitted.vocabulary, fitted.labels, fitted.input_size, fitted.class_count
        (('<unk>', 'a', 'b', 'c'), ('no', 'yes'), 4, 2)
        >>> fitted.apply(records)[0]["inputs"].tolist()
        [1, 2, 1]
        >>> Preprocessor.from_config(fitted.to_config()) == fitted
        True
    """

    task: str
    channels: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    vocabulary: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    missing: str = "error"

    def __post_init__(self) -> None:
        check_policy(self.missing)
        check_task(self.task)
        for name in ("channels", "mean", "std", "vocabulary", "labels"):
            kinds = tuple if name == "channels" else (tuple, type(None))
            check_kind(name, getattr(self, name), kinds, "a tuple", "convert it with tuple(...)")
        for name, scale in (("mean", self.mean), ("std", self.std)):
            if scale is not None and len(scale) != len(self.channels):
                got, rule = f"{len(scale)} numbers", f"one per channel, and there are {len(self.channels)}"
                raise ArgumentError(message(name, got, rule, "pass one each, or None"))
        for name, scale, rule in (("mean", self.mean, "finite numbers"), ("std", self.std, "finite numbers above 0")):
            # NaN passes no comparison.
            wrong = [number for number in scale or () if not abs(number) <= _LARGEST or (name == "std" and number <= 0)]
            if wrong:
                got = f"{wrong[0]!r}"[:60]
                raise ArgumentError(message(name, got, f"{rule} of 32 bits", "fit the preprocessing again"))

    @classmethod
    def fit(
        cls,
        records: Records | Statistics | Counted,
        *,
        task: str,
        missing: str = "error",
        standardize: bool = True,
        max_vocabulary: int | None = None,
        minimum_count: int = 1,
    ) -> Preprocessor:
        """Learn from the training part.

        Args:
            records: the training part, or what is counted of it; at least one element in all.
            task: ``"classify"``, ``"tag"`` or ``"forecast"``.
            missing: what to do about features that are NaN or infinite.
            standardize: whether to scale each channel to mean 0 and deviation 1.
            max_vocabulary: keep the most frequent tokens only, at most this many with the unknown one; None keeps all.
            minimum_count: keep the tokens that occur at least this often.

        Raises:
            ArgumentTypeError: an argument of the wrong kind.
            ArgumentError: an argument breaks a rule.
            DataError: there is nothing to learn from, or a feature is missing under ``missing="error"``.
        """
        check_policy(missing)
        check_task(task)
        if isinstance(records, Counted):
            records = records.statistics
        rule = "Records, a Dataset, or Statistics"
        check_kind("records", records, (Records, Statistics), rule, "read them with rl.data.read")
        check_flag("standardize", standardize)
        check_least("minimum_count", minimum_count, 0)
        if max_vocabulary is not None:
            # The unknown token and another.
            check_least("max_vocabulary", max_vocabulary, 2)
        known = Statistics.of(records) if isinstance(records, Records) else records
        if known.elements == 0:
            source = records.source if isinstance(records, Records) else "data"
            got = f"{known.sequences} sequences without an element"
            raise DataError(message(f"{source}", got, "training needs elements", "check the data"))
        labels = None if task == "forecast" else tuple(sort_labels(_classes(records, task)))
        if not known.channels:
            counts = Counter(known.tokens)
            del counts[UNKNOWN]
            ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
            kept = [token for token, count in ranked if count >= minimum_count]
            if max_vocabulary is not None:
                kept = kept[: max_vocabulary - 1]
            return cls(task=task, vocabulary=(UNKNOWN, *kept), labels=labels, missing=missing)
        if missing == "error":
            _refuse_missing(records)
        mean = tuple(channel.mean for channel in known.channels.values()) if standardize else None
        std = tuple(channel.deviation for channel in known.channels.values()) if standardize else None
        return cls(task, tuple(known.channels), mean, std, labels=labels, missing=missing)

    @property
    def is_tokens(self) -> bool:
        """Whether the inputs are tokens rather than features."""
        return self.vocabulary is not None

    @property
    def input_size(self) -> int:
        """The number of channels of ``"inputs"``, was-missing channels included; for tokens the vocabulary's size."""
        if self.vocabulary is not None:
            return len(self.vocabulary)
        return len(self.channels) * (1 if self.missing == "error" else 2)

    @property
    def class_count(self) -> int:
        """The number of classes; 0 for ``"forecast"``."""
        return 0 if self.labels is None else len(self.labels)

    @overload
    def apply(self, records: Records, require_targets: bool = True) -> SequenceDataset: ...

    @overload
    def apply(self, records: Counted, require_targets: bool = True) -> Any: ...

    def apply(self, records: Records | Counted, require_targets: bool = True) -> Any:
        """Turn records into tensors.

        Args:
            records: of the kind and with the channels of the training part; channels are matched by name, and others
                are left out. A :class:`~raglane.data.Dataset` is made tensors batch by batch.
            require_targets: whether the dataset has targets; without, labels are not read, and for ``"forecast"`` the
                last element of a sequence is an input like the others.

        Returns:
            Its inputs are ``(N, input_size)`` float32, or ``(N,)`` int64 for tokens; its targets int64, the places
            of the labels in ``labels``; those of a forecast are the elements that come next.

        Raises:
            ArgumentTypeError: not records, or ``require_targets`` is not a bool.
            DataError: other channels than in training, a feature missing under ``missing="error"``, no labels, or a
                label that training has not seen.
        """
        if isinstance(records, Counted):
            return records.with_preprocessor(self)
        check_kind("records", records, Records, "Records", "read them with rl.data.read")
        check_flag("require_targets", require_targets)
        values = self._tokens(records) if self.vocabulary is not None else self._features(records)
        targets = self._targets(records) if require_targets and self.task != "forecast" else None
        return SequenceDataset(
            values,
            torch.from_numpy(records.offsets.copy()),
            targets,
            per_element=self.task == "tag",
            forecast=require_targets and self.task == "forecast",
            ids=records.ids,
        )

    def _tokens(self, records: Records) -> Tensor:
        """``(N,)`` int64: each token's place in the vocabulary, 0 for an unknown one."""
        # Sequences of length 0 are of every kind: the model's own kind decides.
        if len(records.values) == 0:
            return torch.zeros(0, dtype=torch.int64)
        self.check_kind(records.channels, records.is_tokens, f"{records.source}")
        return torch.from_numpy(self.token_places(records.values.tolist()))

    def token_places(self, tokens: Sequence[str]) -> npt.NDArray[np.int64]:
        """The place of each token in the vocabulary, ``(M,)`` int64; 0 for one that it lacks."""
        return _look_up(tokens, _places(self.vocabulary or ()), len(tokens), 0)

    def class_places(self, labels: Sequence[str]) -> npt.NDArray[np.int64]:
        """The place of each label among the classes, ``(M,)`` int64; -1 for one that training has not seen."""
        return _look_up(labels, _places(self.labels or ()), len(labels), -1)

    def check_kind(self, channels: Sequence[str], is_tokens: bool, source: str) -> None:
        """Refuse data of another kind than that of the training part, or without one of its channels.

        Args:
            channels: of the data; () where it holds tokens.
            is_tokens: whether it does.
            source: where it is from, for the message.

        Raises:
            DataError: it is of another kind.
        """
        if self.is_tokens and not is_tokens:
            got = f"features ({quote_all(channels)})"
            fix = "pass data of the kind that the model was trained on"
            raise DataError(message(source, got, "the model was trained on tokens", fix))
        if not self.is_tokens and (is_tokens or any(name not in channels for name in self.channels)):
            got = "tokens" if is_tokens else f"the channels {quote_all(channels)}"
            rule = f"the model was trained on the channels {quote_all(self.channels)}"
            raise DataError(message(source, got, rule, "pass data with these channels"))

    def scaled(self, values: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Features of the channels of the training part, scaled, then filled.

        Args:
            values: ``(N, C)`` float32; with ``missing="error"`` all of them finite.
            offsets: ``(B + 1,)`` int64.

        Returns:
            ``(N, input_size)`` float32; ``values`` themselves where there is nothing to do.
        """
        if self.mean is not None and self.std is not None:
            # float64: subtracting a large mean in float32 would lose what is left of the value. Infinities stay.
            values = ((values - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        return values if self.missing == "error" else fill_missing(values, offsets, self.missing)

    def _features(self, records: Records) -> Tensor:
        """``(N, input_size)`` float32: the channels of the training part, scaled, then filled."""
        if len(records.values) == 0:
            return torch.zeros(0, self.input_size)
        self.check_kind(records.channels, records.is_tokens, f"{records.source}")
        values = records.values
        if self.missing == "error":
            refuse_missing(records)
        if self.channels != records.channels:
            values = values[:, [records.channels.index(name) for name in self.channels]]
        return interop.as_tensor(self.scaled(values, records.offsets))

    def _targets(self, records: Records) -> Tensor:
        """The place of each label among the classes: ``(B,)`` or, for tagging, ``(N,)`` int64."""
        words = _label_words(records, self.task)
        classes = self.labels or ()
        places = self.class_places(words.tolist())
        if (places < 0).any():
            first = int((places < 0).argmax())
            row, step = (first, None) if self.task == "classify" else place_of(records.offsets, first)
            place = records.describe_row(row) + ("" if step is None else f", step {step}")
            fix = "train on data that has this label, or correct it"
            got = f"the label {quote(words[first])} in {place}"
            known = f"the labels seen in training are {quote_all(classes)}"
            raise DataError(message(f"{records.source}", got, known, fix))
        return torch.from_numpy(places)

    def to_config(self) -> dict[str, Any]:
        """Everything as JSON values; :meth:`from_config` gives back an equal object."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Preprocessor:
        """The object that :meth:`to_config` described.

        Raises:
            CheckpointError: an entry is missing, unknown or of the wrong kind.
        """
        names = [field.name for field in fields(cls)]
        given: Any = config
        if not isinstance(given, Mapping):
            rule = f"an object with {', '.join(names)}"
            raise CheckpointError(message("preprocessing", quote(config), rule, "train again"))
        odd = sorted(map(str, set(names) ^ set(config)))
        if odd:
            got = f"entries {quote_all(odd)} missing or unknown"
            raise CheckpointError(message("preprocessing", got, f"exactly {', '.join(names)}", "train again"))
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in config.items()
        }
        for name in ("channels", "mean", "std", "vocabulary", "labels"):
            kind = (int, float) if name in ("mean", "std") else str
            value = values[name]
            # To Python a bool is an int.
            fits = isinstance(value, tuple) and all(
                isinstance(entry, kind) and not isinstance(entry, bool) for entry in value
            )
            if not fits and (value is not None or name == "channels"):
                got, rule = f"{name} = {quote(value)}", "a list of numbers or strings"
                raise CheckpointError(message("preprocessing", got, rule, "train again"))
        if (values["labels"] is None) != (values["task"] == "forecast"):
            got = f"labels = {quote(values['labels'])} for the task {quote(values['task'])}"
            raise CheckpointError(message("preprocessing", got, "labels, but for a forecast", "train again"))
        try:
            return cls(**values)
        except ArgumentError as error:
            raise CheckpointError(f"preprocessing: {error}") from error


def _classes(records: Records | Statistics, task: str) -> Iterable[str]:
    """The labels that occur."""
    if isinstance(records, Records):
        return list(_label_words(records, task))
    if not records.labels:
        fix = f"name their column with {argument('label', of='Columns')}"
        raise DataError(message("data", "no labels", f"the task {task} needs them", fix))
    return records.labels


def _refuse_missing(records: Records | Statistics) -> None:
    """Raise if a feature is missing; of records the place is known, too."""
    if isinstance(records, Records):
        refuse_missing(records)
        return
    for name, channel in records.channels.items():
        if channel.missing:
            got = f"{channel.missing:,} features of the channel {quote(name)} that are NaN or infinite"
            fix = f"correct the data, or {how_to_fill()}"
            raise DataError(message("data", got, "features are finite numbers", fix))


def _label_words(records: Records, task: str) -> npt.NDArray[np.object_]:
    """The labels, one per sequence, or for tagging one per element: ``(B,)`` or ``(N,)`` object."""
    fix = f"name their column with {argument('label', of='Columns')}"
    if task == "tag":
        if records.tags is None:
            raise DataError(message(f"{records.source}", "no label for each element", "tagging needs them", fix))
        return records.tags
    if records.labels is None:
        raise DataError(message(f"{records.source}", "no labels", "classifying needs one per sequence", fix))
    return np.array(records.labels, dtype=object)
