"""Columns beside the main one: what an element or a sequence has besides, numbers or categories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_flag, check_kind
from raglane.errors import DataError, message, quote

__all__ = ["Feature", "check_features", "joined"]


@dataclass(frozen=True, eq=False)
class Feature:
    """A named column beside the values of sequences.

    Attributes:
        name: of the column.
        values: ``(M,)`` float32 numbers, NaN where one is missing; or ``(M,)`` object, categories (str), "" where one
            is missing. There are ``M`` elements or sequences.
        per_sequence: whether there is one per sequence, rather than per element.

    Raises:
        ArgumentTypeError: an attribute of the wrong class.
        DataError: values of another shape or dtype.

    Example:
        >>> Feature("age", np.array([31, 58], np.float32), per_sequence=True).is_numbers
        True
    """

    name: str
    values: npt.NDArray[Any]
    per_sequence: bool = False

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "a text", "pass the name of the column")
        check_kind("values", self.values, np.ndarray, "a NumPy array", "convert it with np.asarray")
        check_flag("per_sequence", self.per_sequence)
        if self.values.ndim != 1 or self.values.dtype not in (np.dtype(np.float32), np.dtype(object)):
            got = f"{self.values.dtype} of shape {self.values.shape}"
            rule = "(M,) float32 for numbers, or (M,) object for categories"
            raise DataError(message(f"the feature {quote(self.name)}", got, rule, "convert the values"))

    @property
    def is_numbers(self) -> bool:
        """Whether they are numbers, rather than categories."""
        return bool(self.values.dtype != object)

    @property
    def kind(self) -> str:
        """What they are, in words."""
        return f"{'numbers' if self.is_numbers else 'categories'} per {'sequence' if self.per_sequence else 'element'}"

    def select(self, rows: npt.NDArray[np.int64], elements: npt.NDArray[np.int64]) -> Feature:
        """Those of some sequences.

        Args:
            rows: ``(M,)``, which sequences.
            elements: the flat indices of their elements.
        """
        return replace(self, values=self.values[rows if self.per_sequence else elements])


def check_features(features: Any, sequences: int, elements: int) -> None:
    """Refuse features of the wrong class or number, and two of one name.

    Example:
        >>> check_features((Feature("age", np.zeros(2, np.float32), per_sequence=True),), 2, 7)
    """
    check_kind("features", features, tuple, "a tuple of Feature", "convert it with tuple(...)")
    known: set[str] = set()
    for feature in features:
        check_kind("features", feature, Feature, "a tuple of Feature", "make each a rl.data.Feature")
        what = f"the feature {quote(feature.name)}"
        expected, per = (sequences, "sequence") if feature.per_sequence else (elements, "element")
        if len(feature.values) != expected:
            rule = f"one per {per}, and there are {expected}"
            raise DataError(message(what, f"{len(feature.values)} values", rule, "pass one each"))
        if feature.name in known:
            raise DataError(message(what, "two of this name", "a feature's name is its own", "rename one"))
        known.add(feature.name)


def joined(runs: Sequence[tuple[Feature, ...]]) -> tuple[Feature, ...]:
    """The same features of several runs of sequences, one run after the other.

    Example:
        >>> ages = [(Feature("age", np.array([age], np.float32), per_sequence=True),) for age in (31, 58)]
        >>> joined(ages)[0].values.tolist()
        [31.0, 58.0]
    """
    if not runs:
        return ()
    return tuple(
        replace(feature, values=np.concatenate([run[place].values for run in runs]))
        for place, feature in enumerate(runs[0])
    )
