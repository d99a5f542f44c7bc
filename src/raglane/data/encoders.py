"""What is learned of the features beside the main column, and how they become numbers for a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_flag, check_kind
from raglane.data.features import Feature
from raglane.data.labels import look_up, places_of
from raglane.data.missing import fill_missing, how_to_fill
from raglane.data.statistics import FeatureCounts
from raglane.data.vocabulary import UNKNOWN, fit_vocabulary
from raglane.errors import ArgumentError, CheckpointError, DataError, message, quote, quote_all

__all__ = ["FeatureEncoder", "encode", "fit_encoders"]

# Places are float32 in a row of numbers, which holds whole numbers up to here.
_MOST = 2**24
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class FeatureEncoder:
    """What was learned of one feature: the scale of numbers, or the categories.

    Attributes:
        name: of the feature.
        per_sequence: whether there is one per sequence, rather than per element.
        mean: subtracted from numbers.
        std: above 0; numbers are divided by it.
        vocabulary: the categories, the unknown one first; None for numbers.

    Raises:
        ArgumentTypeError: an attribute of the wrong class.
        ArgumentError: no scale, or one that is not finite.

    Example:
        >>> FeatureEncoder("city", True, vocabulary=("<unk>", "Bonn", "Rome")).kind
        'categories per sequence'
    """

    name: str
    per_sequence: bool = False
    mean: float = 0.0
    std: float = 1.0
    vocabulary: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "a text", "pass the name of the feature")
        check_flag("per_sequence", self.per_sequence)
        check_kind("vocabulary", self.vocabulary, (tuple, type(None)), "a tuple, or None", "convert it with tuple(...)")
        odd = next((word for word in self.vocabulary or () if not isinstance(word, str)), "")
        check_kind("vocabulary", odd, str, "a tuple of str", "convert each with str(...)")
        for name, number, lowest in (("mean", self.mean, -math.inf), ("std", self.std, 0.0)):
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            # NaN passes no comparison.
            if not (is_number and abs(number) <= _LARGEST and number > lowest):
                rule = "a finite number of 32 bits" + (" above 0" if name == "std" else "")
                raise ArgumentError(message(name, quote(number), rule, "fit the preprocessing again"))
        if self.vocabulary is not None and self.vocabulary[:1] != (UNKNOWN,):
            got = f"{quote(self.vocabulary)}"[:80]
            raise ArgumentError(message("vocabulary", got, f"categories, the first {UNKNOWN}", "fit it again"))

    @property
    def kind(self) -> str:
        """What they are, in words."""
        what = "numbers" if self.vocabulary is None else "categories"
        return f"{what} per {'sequence' if self.per_sequence else 'element'}"

    def to_config(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "vocabulary": None if self.vocabulary is None else list(self.vocabulary)}

    @classmethod
    def from_config(cls, config: Any) -> FeatureEncoder:
        """The object that :meth:`to_config` described."""
        names = ("name", "per_sequence", "mean", "std", "vocabulary")
        if not isinstance(config, Mapping) or set(config) != set(names):
            rule = f"an object with {', '.join(names)}"
            raise CheckpointError(message("preprocessing", f"the feature {quote(config)}"[:80], rule, "train again"))
        words = config["vocabulary"]
        try:
            return cls(**{**config, "vocabulary": tuple(words) if isinstance(words, list) else words})
        except (ArgumentError, TypeError) as error:
            raise CheckpointError(f"preprocessing: {error}") from error


def fit_encoders(counted: Mapping[str, FeatureCounts], missing: str) -> tuple[FeatureEncoder, ...]:
    """Learn of each feature its scale, or its categories."""
    found = []
    for name, counts in counted.items():
        if counts.missing and missing == "error":
            got = f"{counts.missing:,} missing in the feature {quote(name)}"
            raise DataError(message("data", got, "features are there", f"correct the data, or {how_to_fill()}"))
        if counts.channel is not None:
            found.append(FeatureEncoder(name, counts.per_sequence, counts.channel.mean, counts.channel.deviation))
            continue
        words = fit_vocabulary({word: count for word, count in counts.words.items() if word})
        if len(words) > _MOST:
            got, rule = f"{len(words) - 1:,} categories of {quote(name)}", "at most 2**24 of them"
            raise DataError(message("data", got, rule, "group the rare ones"))
        found.append(FeatureEncoder(name, counts.per_sequence, vocabulary=words))
    return tuple(found)


def encode(
    encoders: Sequence[FeatureEncoder],
    features: Sequence[Feature],
    offsets: npt.NDArray[np.int64],
    missing: str,
    source: str,
) -> npt.NDArray[np.float32]:
    """Features as columns of numbers, one row per element.

    Example:
        >>> city = FeatureEncoder("city", True, vocabulary=("<unk>", "Bonn", "Rome"))
        >>> there = Feature("city", np.array(["Rome", "Oslo"], dtype=object), per_sequence=True)
        >>> encode([city], [there], np.array([0, 1, 3]), "error", "data").tolist()
        [[2.0], [0.0], [0.0]]
    """
    known = {feature.name: feature for feature in features}
    numbers: list[npt.NDArray[np.float32]] = []
    places: list[npt.NDArray[np.float32]] = []
    lengths = np.diff(offsets)
    for encoder in encoders:
        feature = known.get(encoder.name)
        if feature is None or feature.kind != encoder.kind:
            got = "no such feature" if feature is None else feature.kind
            if feature is None and known:
                got += f" among {quote_all(known)}"
            what, rule = f"{source}: {quote(encoder.name)}", f"the model was trained on {encoder.kind} of this name"
            raise DataError(message(what, got, rule, "pass data with this feature"))
        if missing == "error":
            _refuse_missing(feature, source)
        if encoder.vocabulary is None:
            column = ((feature.values - encoder.mean) / encoder.std).astype(np.float32)
        else:
            words = feature.values.tolist()
            column = look_up(words, places_of(encoder.vocabulary), len(words), 0).astype(np.float32)
        column = np.repeat(column, lengths) if feature.per_sequence else column
        (numbers if encoder.vocabulary is None else places).append(column)
    block = np.stack(numbers, axis=1) if numbers else np.zeros((int(offsets[-1]), 0), dtype=np.float32)
    if missing != "error":
        block = fill_missing(block, offsets, missing)
    return np.concatenate([block, *(column[:, None] for column in places)], axis=1)


def _refuse_missing(feature: Feature, source: str) -> None:
    """Raise for the first entry that is missing."""
    absent = ~np.isfinite(feature.values) if feature.is_numbers else feature.values == ""
    if absent.any():
        place = f"{'sequence' if feature.per_sequence else 'element'} {int(absent.argmax())}"
        got = f"nothing for {place} in the feature {quote(feature.name)}"
        raise DataError(message(source, got, "features are there", f"correct the data, or {how_to_fill()}"))
