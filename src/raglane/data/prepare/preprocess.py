"""The preprocessor: vocabulary, scaling and classes, learned from the training part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import as_tensor, check_choice, check_flag, check_kind, check_whole
from raglane._utils.messages import argument, quote, quote_all
from raglane.data.columns import check_task
from raglane.data.prepare import encoders, seasons
from raglane.data.prepare.encoders import END, OPTIONAL, TUPLES, UNKNOWN, FeatureEncoder
from raglane.data.prepare.missing import BLOCKS, MISSING, fill_missing, how_to_fill, refuse_absent
from raglane.data.prepare.statistics import Statistics
from raglane.data.records import TIME_GAP, Targets, offsets_of, place_of
from raglane.data.store.fragments import Fragment
from raglane.data.store.gathering import Codes, Gathered
from raglane.data.tensors import Sequences, Tensors
from raglane.errors import ArgumentError, CheckpointError, DataError
from raglane.tasks import TASKS

_Data = TypeVar("_Data", bound=Sequences)
_SCALES_OF_TARGETS = (("target_mean", "target_names"), ("target_std", "target_names"))


@dataclass(frozen=True)
class Preprocessor:
    """Converts sequences to tensors with what was learned from the training part.

    Features are scaled with the mean and deviation of the finite ones, and filled afterwards. So a
    missing feature that is filled with 0 has the mean of its channel (or, without ``standardize``,
    the value 0), and was-missing channels are not scaled. Tokens become their index in the
    vocabulary, and unknown ones 0.

    Attributes:
        task: a key of ``raglane.data.records.TASKS``.
        channels: the names of the ``C`` feature columns; () for tokens.
        mean: ``C`` numbers that are subtracted from the features; None without scaling.
        std: ``C`` numbers above 0 that the features are divided by; 1 for a constant channel.
        vocabulary: the unknown token, then the tokens in order of falling frequency; None for
            features.
        labels: the classes in order, for ``"classify"`` and ``"tag"``, or the labels of
            ``"multilabel"`` and ``"transcribe"``; else None.
        missing: ``"raise"``, or ``"zero"`` or ``"forward"``, which append a was-missing channel for
            each channel, or ``"elapsed"``, which appends to these the time since each channel was
            last present: in elements, or with a channel ``time_gap`` in multiples of its mean.
        per_element: whether there is a target per element; None uses the task's default, which is
            per sequence for tasks that support both.
        target_names: the names of the ``T`` numbers of ``"regress"``; else ().
        target_mean: ``T`` numbers that are subtracted from the targets.
        target_std: ``T`` numbers above 0 that the targets are divided by.
        features: the encoders of the further feature columns.
        whole_labels: whether the labels were whole numbers in their source, as predictions are then
            too.
        split: the tokenization of texts, see :class:`~raglane.data.Columns`; None without texts.
        label_split: the tokenization of target texts, for ``"transcribe"``; None if targets are
            lists.
        season: for ``"forecast"``, the steps of a season whose differences are appended to the
            inputs; 0 for none. ``std`` is then the deviation of the differences.

    Example:
        >>> from raglane.data import read
        >>> data = read(["a b a", "c"], labels=["yes", "no"])
        >>> fitted = Preprocessor.fit(data, task="classify")
        >>> fitted.vocabulary, fitted.labels, fitted.input_size, fitted.class_count
        (('<unk>', 'a', 'b', 'c'), ('no', 'yes'), 4, 2)
        >>> fitted.apply(data)[0]["inputs"].tolist()
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
    missing: str = "raise"
    per_element: bool | None = None
    target_names: tuple[str, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    split: str | None = None
    features: tuple[FeatureEncoder, ...] = ()
    whole_labels: bool = False
    label_split: str | None = None
    season: int = 0

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, MISSING)
        check_task(self.task)
        if self.per_element is None:
            object.__setattr__(self, "per_element", TASKS[self.task].per == "element")
        for name in TUPLES:
            kinds = (tuple, type(None)) if name in OPTIONAL else tuple
            check_kind(name, getattr(self, name), kinds, "a tuple", "convert it with tuple(...)")
        for name, names in (("mean", "channels"), ("std", "channels"), *_SCALES_OF_TARGETS):
            scale = getattr(self, name)
            count = len(getattr(self, names))
            if scale is not None and len(scale) != count:
                got = f"{len(scale)} numbers"
                rule = f"one number for each of the {count} names in {names}"
                raise ArgumentError(name, got, rule, "pass one each")
            encoders.check_scale(name, scale or ())

    @classmethod
    def fit(
        cls,
        data: Sequences | Statistics,
        *,
        task: str,
        missing: str = "raise",
        standardize: bool = True,
        max_vocabulary: int | None = None,
        min_count: int = 1,
    ) -> Preprocessor:
        """Learn from the training part.

        Args:
            data: the training part, a :class:`~raglane.data.Dataset`, or its statistics; at least
                one element in all.
            task: a key of ``raglane.data.records.TASKS``.
            missing: the treatment of features that are NaN or infinite.
            standardize: whether to scale each channel to mean 0 and deviation 1.
            max_vocabulary: the largest size of the vocabulary, with the unknown token; None keeps
                all tokens.
            min_count: the least number of occurrences of a token in the vocabulary.

        Raises:
            ArgumentTypeError: an argument of the wrong kind.
            ArgumentError: an argument breaks a rule.
            DataError: no element or no label, or a missing feature under ``missing="raise"``.
        """
        check_choice("missing", missing, MISSING)
        check_task(task)
        check_kind(
            "data",
            data,
            (Sequences, Statistics),
            "a Dataset or Statistics",
            "read it with rl.data.read",
        )
        check_flag("standardize", standardize)
        min_count = check_whole("min_count", min_count, 0)
        if max_vocabulary is not None:
            max_vocabulary = check_whole("max_vocabulary", max_vocabulary, 2)
        split = None
        source = "data"
        if isinstance(data, Statistics):
            statistics = data
        else:
            split = data.columns.split
            source = str(data.source)
            statistics = data.statistics_for(task)
        if statistics.elements == 0:
            got = f"{statistics.sequences} sequences without an element"
            raise DataError(
                source, got, "data with at least one element to train on", "check the data"
            )
        learned = encoders.fit_targets(statistics, task, source)
        if not isinstance(data, Statistics) and TASKS[task].label == "sequence":
            learned["label_split"] = data.columns.label_split
        if statistics.features and task == "language":
            got = f"the features {quote_all(statistics.features)} with the tokens"
            rule = "no features, because a language model reads only tokens"
            raise DataError(
                "features", got, rule, f"leave {argument('features')} and {argument('static')} out"
            )
        learned["features"] = encoders.fit_encoders(statistics.features, missing)
        if not statistics.channels:
            special = (UNKNOWN, END) if task == "language" else (UNKNOWN,)
            words = encoders.fit_vocabulary(statistics.tokens, special, min_count, max_vocabulary)
            return cls(task=task, vocabulary=words, missing=missing, split=split, **learned)
        if task == "language":
            raise encoders.no_tokens()
        if missing == "raise":
            _refuse_missing(data, statistics)
        channels = statistics.channels.values()
        mean = None
        std = None
        if standardize:
            mean = tuple(channel.mean for channel in channels)
            std = tuple(channel.deviation for channel in channels)
        return cls(task, tuple(statistics.channels), mean, std, missing=missing, **learned)

    @property
    def is_tokens(self) -> bool:
        """True if the inputs are tokens rather than features."""
        return self.vocabulary is not None

    @property
    def input_size(self) -> int:
        """The number of channels of ``"inputs"``, with was-missing channels; for only tokens the
        vocabulary's size.
        """
        if self.vocabulary is not None and not self.features:
            return len(self.vocabulary)
        return self._plain_size + seasons.width(len(self.channels), self.season)

    @property
    def _plain_size(self) -> int:
        """The number of channels of ``"inputs"`` without those of seasons."""
        width = 1 if self.vocabulary is not None else len(self.channels) * BLOCKS[self.missing]
        return width + self.features_size

    @property
    def features_size(self) -> int:
        """The number of the channels of ``features``, the last ones but those of seasons."""
        each = BLOCKS[self.missing]
        return sum(each if encoder.vocabulary is None else 1 for encoder in self.features)

    @property
    def categories(self) -> tuple[int, ...]:
        """The sizes of the vocabularies of the last channels of ``"inputs"``; () without
        features.
        """
        if not self.features:
            return ()
        words = [
            len(encoder.vocabulary) for encoder in self.features if encoder.vocabulary is not None
        ]
        return (*words, *(() if self.vocabulary is None else (len(self.vocabulary),)))

    @property
    def class_count(self) -> int:
        """The number of classes or labels; 0 without labels."""
        return 0 if self.labels is None else len(self.labels)

    @property
    def answers(self) -> tuple[str | int, ...]:
        """The labels as in their source, whole numbers or texts."""
        labels = self.labels or ()
        return tuple(map(int, labels)) if self.whole_labels else labels

    @property
    def ignores(self) -> bool:
        """True if elements with the label -100 do not count, as for whole numbers per element."""
        facts = TASKS[self.task]
        is_per_element = facts.label == "class" and facts.per == "element"
        return is_per_element and encoders.ignores(self.labels or ())

    def apply(self, data: _Data, require_targets: bool = True) -> _Data:
        """Convert sequences to tensors.

        Args:
            data: a :class:`~raglane.data.Dataset` of the kind and with the channels of the training
                part. Channels are matched by name, and others are ignored. Sequences in memory are
                converted now, others batch by batch.
            require_targets: whether the result has targets; without, labels are not read, and for
                ``"forecast"`` the last element of a sequence is an input like the others.

        Returns:
            A :class:`~raglane.data.Dataset`. Its inputs are ``(N, input_size)`` float32, or
            ``(N,)`` int64 for tokens without features. The columns are the channels, numeric
            features, the indexes of categories, and the index of the token; a feature per sequence
            is repeated in each row. Targets are classes, int64 indexes in ``labels``; for sequences
            of labels one sequence each of int64 indexes from 1, and 0 for a label that the training
            part does not have; for sets ``(M, K)`` float32, 1 for the labels of the set; numbers
            ``(M, T)`` float32, scaled; for a forecast the next elements.

        Raises:
            ArgumentTypeError: not a Dataset, or ``require_targets`` is not a bool.
            DataError: other channels than in training, a missing feature under ``missing="raise"``,
                no labels, or a label that the training part does not have.
        """
        check_kind("data", data, Sequences, "a Dataset", "read it with rl.data.read")
        check_flag("require_targets", require_targets)
        return data.with_preprocessor(self, require_targets)

    def _tensors(self, batch: Gathered, *, with_targets: bool, scale: bool = True) -> Tensors:
        """Return a batch as tensors; without ``scale`` features are unchanged."""
        follows = TASKS[self.task].label is None
        values = as_tensor(self._values(batch) if scale else batch.values)
        if self.features and (scale or batch.features) and batch.layout is not None:
            encoded = encoders.encode(
                self.features, batch.features, batch.offsets, self.missing, batch.source
            )
            more = torch.from_numpy(encoded)
            # Tokens are last, with the other categories.
            values = torch.cat(
                [values, more] if values.dim() == 2 else [more, values[:, None].float()], dim=1
            )
        targets = None
        target_offsets = None
        if with_targets and TASKS[self.task].label == "sequence":
            targets, target_offsets = self._target_sequences(batch)
        elif with_targets and not follows:
            targets = self._targets(batch)
        offsets = torch.from_numpy(batch.offsets)
        if self.task == "language":
            values, offsets = encoders.between_ends(values, offsets, with_last=with_targets)
        if self.season:
            more = seasons.differences(values[:, : len(self.channels)], offsets, self.season)
            values = torch.cat([values, more], dim=1)
        per_element = bool(self.per_element) and not follows
        return Tensors(
            values,
            offsets,
            targets,
            per_element,
            with_targets and follows,
            target_offsets=target_offsets,
        )

    def _values(self, batch: Gathered) -> npt.NDArray[Any]:
        """Return ``(N,)`` int64 indices of tokens, or ``(N, C)`` float32 channels, scaled and
        filled.
        """
        # Sequences of length 0 fit any kind, so the model's kind decides.
        if len(batch.values) == 0 or batch.layout is None:
            if self.is_tokens and (batch.layout is not None or not self.features):
                return np.zeros(0, dtype=np.int64)
            width = (
                self._plain_size if batch.layout is None else self._plain_size - self.features_size
            )
            return np.zeros((0, width), dtype=np.float32)
        channels = batch.layout.channels
        self._check_kind(channels, batch.layout.is_tokens, batch.source)
        if self.is_tokens:
            return batch.values
        values = batch.values
        if self.channels != channels:
            values = values[:, [channels.index(name) for name in self.channels]]
        if self.missing == "raise":
            refuse_absent(values, batch.offsets, self.channels, batch.where)
        return self.scaled(values, batch.offsets)

    def _targets(self, batch: Gathered) -> Tensor:
        kind = TASKS[self.task].label
        if batch.layout is None and kind != "class":
            return torch.zeros(0, len(self.target_names) if kind == "numbers" else self.class_count)
        if kind == "class":
            has_own = batch.layout is None or batch.layout.has_tags == self.per_element
            if batch.classes is None or not has_own:
                raise encoders.nothing_to_learn(batch.source, self.task)
            self._refuse_unknown(
                batch, batch.classes, np.arange(len(batch.classes)), batch.class_word
            )
            return torch.from_numpy(batch.classes)
        targets = self._fitting(batch)
        if kind == "numbers":
            scaled = (targets.values - np.array(self.target_mean)) / np.array(self.target_std)
            return torch.from_numpy(scaled.astype(np.float32))
        words, classes, counts = self._labels_of(targets)
        rows = np.repeat(np.arange(len(counts)), counts)
        self._refuse_unknown(batch, classes, rows, lambda *_: words[int((classes < 0).argmax())])
        result = torch.zeros(len(counts), self.class_count)
        result[torch.from_numpy(rows), torch.from_numpy(classes)] = 1.0
        return result

    def _target_sequences(self, batch: Gathered) -> tuple[Tensor, Tensor]:
        """Return the classes of labels from 1, ``(M,)`` int64, 0 for an unknown label; and offsets
        ``(B + 1,)``.
        """
        if batch.layout is None:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(
                len(batch.offsets), dtype=torch.int64
            )
        labels = self._labels_of(self._fitting(batch))
        return torch.from_numpy(labels.classes + 1), torch.from_numpy(offsets_of(labels.counts))

    def _labels_of(self, targets: Targets) -> _AllLabels:
        counts = np.fromiter(map(len, targets.values), dtype=np.int64, count=len(targets.values))
        words: list[str] = list(chain.from_iterable(targets.values))
        return _AllLabels(words, self._classes_of(words), counts)

    def _refuse_unknown(
        self,
        batch: Gathered,
        classes: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        word: Callable[[int, int | None], str],
    ) -> None:
        """Raise if a label is not one of training; ``rows`` is the sequence or element of each
        label.
        """
        if not (classes == -1).any():
            return
        row = int(rows[int((classes == -1).argmax())])
        step = None
        if self.per_element:
            row, step = place_of(batch.offsets, row)
        source, sequence = batch.where(row)
        got = f"the label {quote(word(row, step))} in {sequence}" + (
            "" if step is None else f", step {step}"
        )
        rule = f"data with the labels of training, {quote_all(self.labels or ())}"
        raise DataError(source, got, rule, "train on data that has this label, or correct it")

    def _fitting(self, batch: Gathered) -> Targets:
        """Return the targets, with the number and the kind of those of training."""
        targets = batch.targets
        if targets is None or targets.kind != TASKS[self.task].label:
            raise encoders.nothing_to_learn(batch.source, self.task)
        if targets.per_element and not self.per_element:
            got = "targets per element"
            rule = "data with one target per sequence, as in training"
            raise DataError(batch.source, got, rule, "pass data of the same form")
        if len(targets.names) != len(self.target_names):
            rule = f"data with the {len(self.target_names)} of training: {quote_all(self.target_names)}"
            raise DataError(
                batch.source,
                f"{len(targets.names)} numbers to learn",
                rule,
                "pass data of the same form",
            )
        if self.per_element and not targets.per_element:
            # A reader returns one target per sequence if no sequence has two different ones.
            return replace(
                targets,
                values=np.repeat(targets.values, np.diff(batch.offsets), axis=0),
                per_element=True,
            )
        return targets

    def _codes_of(self, fragment: Fragment, *, with_classes: bool) -> Codes:
        """Return the numbers of the tokens and of the labels of a fragment."""
        tokens = None
        if fragment.words is not None:
            indexes = encoders.indexes_of(self.vocabulary or ())
            if self.task == "language":
                # This token in a text is unknown, not the end.
                indexes = {token: index for token, index in indexes.items() if token != END}
            tokens = encoders.look_up(fragment.words, indexes, len(fragment.words), 0)
        labels = None
        if with_classes and fragment.labels is not None:
            labels = self._classes_of(fragment.label_words)
            if self.ignores:
                is_ignored = [word == encoders.IGNORED for word in fragment.label_words]
                labels[np.array(is_ignored, dtype=np.bool_)] = encoders.IGNORED_CLASS
        return Codes(tokens, labels)

    def _classes_of(self, labels: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the class of each label, ``(M,)`` int64; -1 for an unknown one."""
        return encoders.look_up(
            labels, encoders.indexes_of_categories(self.labels or ()), len(labels), -1
        )

    def _check_kind(self, channels: Sequence[str], is_tokens: bool, source: str) -> None:
        """Raise unless data has the kind and all channels of the training part."""
        if self.is_tokens and not is_tokens:
            got = f"features ({quote_all(channels)})"
            raise DataError(source, got, "tokens, as in training", "pass data of this kind")
        # Default names do not identify the channels of training among more.
        unnamed = tuple(f"x{number}" for number in range(len(channels)))
        is_wide = len(channels) > len(self.channels) and unnamed == tuple(channels)
        if not self.is_tokens and (
            is_tokens or is_wide or any(name not in channels for name in self.channels)
        ):
            got = "tokens" if is_tokens else f"the channels {quote_all(channels)}"
            rule = f"the channels {quote_all(self.channels)}, as in training"
            raise DataError(source, got, rule, "pass data with these channels")

    def scaled(
        self, values: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Return features scaled, then filled.

        Args:
            values: ``(N, C)`` float32; with ``missing="raise"`` all of them finite.
            offsets: ``(B + 1,)`` int64.

        Returns:
            ``(N, input_size)`` float32, without the channels of seasons; ``values`` itself if
            nothing changes.
        """
        gaps = self.gaps(values) if self.missing == "elapsed" else None
        if self.mean is not None and self.std is not None:
            # In float64, because float32 would lose small differences from a large mean.
            values = ((values - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        return (
            values if self.missing == "raise" else fill_missing(values, offsets, self.missing, gaps)
        )

    def gaps(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64] | None:
        """Return the time since the previous element, ``(N,)``, in means of training; None without
        time gaps.
        """
        if TIME_GAP not in self.channels:
            return None
        column = self.channels.index(TIME_GAP)
        gaps = np.nan_to_num(values[:, column].astype(np.float64), posinf=0.0, neginf=0.0)
        usual = self.mean[column] if self.mean is not None else 1.0
        return gaps / usual if usual > 0 else gaps

    def to_config(self) -> dict[str, Any]:
        """Return JSON values, from which :meth:`from_config` makes an equal object."""
        config = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        return {**config, "features": [encoder.to_config() for encoder in self.features]}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Preprocessor:
        """Return the object that :meth:`to_config` described.

        Raises:
            CheckpointError: an entry is missing, unknown or of the wrong kind.
        """
        values = encoders.read_config(config, [field.name for field in fields(cls)])
        try:
            fitted = cls(**values)
        except ArgumentError as error:
            raise CheckpointError(f"preprocessing: {error}") from error
        check_fitted(fitted)
        return fitted


def check_fitted(fitted: Preprocessor) -> None:
    """Raise if attributes contradict each other."""
    kind = TASKS[fitted.task].label
    whole = fitted.whole_labels
    has_ends = fitted.task != "language" or (fitted.vocabulary or ())[:2] == (UNKNOWN, END)
    is_whole = whole is False or (whole is True and encoders.are_whole(fitted.labels or ()))
    names_rule = "labels for classes, names for numbers to learn, and None for a forecast"
    for name, fits, rule in (
        ("vocabulary", has_ends, f"tokens, the first two {UNKNOWN} and {END}"),
        ("split", isinstance(fitted.split, str | None), "a text"),
        ("label_split", isinstance(fitted.label_split, str | None), "a text"),
        ("per_element", isinstance(fitted.per_element, bool), "true, false or null"),
        ("season", _is_season(fitted), "0 or at least 2, and 0 for tasks other than forecast"),
        ("whole_labels", is_whole, "true only for labels that are whole numbers"),
        ("labels", bool(fitted.labels) == (kind in ("class", "set", "sequence")), names_rule),
        ("target_names", bool(fitted.target_names) == (kind == "numbers"), names_rule),
    ):
        if not fits:
            got = f"{name} = {quote(getattr(fitted, name))} for the task {fitted.task!r}"
            raise CheckpointError("preprocessing", got, rule, "train again")


def _is_season(fitted: Preprocessor) -> bool:
    season = fitted.season
    if not isinstance(season, int) or isinstance(season, bool) or season == 0:
        return season == 0 and season is not False
    return season > 1 and fitted.task == "forecast" and not fitted.is_tokens


class _AllLabels(NamedTuple):
    """The labels of all sets or sequences, one after the other."""

    words: list[str]
    classes: npt.NDArray[np.int64]  # -1 for an unknown label
    counts: npt.NDArray[np.int64]  # of the labels of each set or sequence


def _refuse_missing(data: Sequences | Statistics, statistics: Statistics) -> None:
    """Raise if a channel has a missing number, by the first one if the data is there."""
    for name, channel in statistics.channels.items():
        if not channel.missing:
            continue
        if not isinstance(data, Statistics):
            data.refuse_missing()
        got = f"{channel.missing:,} NaN or infinite in the channel {quote(name)}"
        fix = f"correct the data, or {how_to_fill()}"
        raise DataError("data", got, "data with finite numbers", fix)
