"""What each task wants of the data, and the targets that are neither classes nor the elements themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_choice, check_flag, check_kind
from raglane.errors import DataError, message

__all__ = ["TASKS", "Targets", "Wanted", "check_task", "kinds_of"]

_NUMBER = re.compile(r"[+-]?(\d+|(\d+\.\d*|\.?\d+)([eE][+-]?\d+)?)")


@dataclass(frozen=True)
class Wanted:
    """What a task wants of the data beside the sequences.

    Attributes:
        label: ``"class"``, one word; ``"numbers"``, one or several; ``"set"``, any number of words; None where the
            elements themselves are what is to be learned.
        per: what has a label: ``"sequence"``, ``"element"`` or ``"either"``, as the data has it.
    """

    label: str | None
    per: str


TASKS: dict[str, Wanted] = {
    "classify": Wanted("class", "sequence"),
    "tag": Wanted("class", "element"),
    "regress": Wanted("numbers", "either"),
    "multilabel": Wanted("set", "either"),
    "forecast": Wanted(None, "element"),
    "language": Wanted(None, "element"),
}
"""The tasks by name; :mod:`raglane.training.tasks` says what a model does about each."""


def check_task(task: str) -> None:
    """Raise :class:`~raglane.errors.ArgumentError` unless ``task`` is one of ``TASKS``."""
    check_choice("task", task, tuple(TASKS))


@dataclass(frozen=True, eq=False)
class Targets:
    """What is to be learned of sequences or elements, where it is not one class each.

    Attributes:
        values: ``(M, T)`` float64, ``T`` finite numbers each; or ``(M,)`` object, a tuple of labels (str) each. There
            are ``M`` sequences or elements.
        per_element: whether there is one row per element.
        names: of the ``T`` numbers; () for labels.

    Raises:
        ArgumentTypeError: an attribute of the wrong class.
        DataError: values of another shape or dtype.

    Example:
        >>> Targets(np.array([[1.5], [2.0]]), names=("height",)).is_numbers
        True
    """

    values: npt.NDArray[Any]
    per_element: bool = False
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_kind("targets", self.values, np.ndarray, "a NumPy array", "convert it with np.asarray")
        check_flag("per_element", self.per_element)
        check_kind("names", self.names, tuple, "a tuple", "convert it with tuple(...)")
        if self.values.dtype == object:
            fits = self.values.ndim == 1 and not self.names
        else:
            is_matrix = self.values.dtype == np.float64 and self.values.ndim == 2
            fits = is_matrix and self.values.shape[1] == len(self.names) and bool(np.isfinite(self.values).all())
        if not fits:
            got = f"{self.values.dtype} of shape {self.values.shape} and {len(self.names)} names"
            rule = "(M, T) float64, finite, with T names, or (M,) object with none"
            raise DataError(message("targets", got, rule, "convert the values, and name each column of numbers"))

    @property
    def is_numbers(self) -> bool:
        """Whether they are numbers, rather than labels."""
        return bool(self.values.dtype != object)

    def select(self, rows: npt.NDArray[np.int64], elements: npt.NDArray[np.int64]) -> Targets:
        """Those of some sequences.

        Args:
            rows: ``(M,)``, which sequences.
            elements: the flat indices of their elements.
        """
        return replace(self, values=self.values[elements if self.per_element else rows])


def kinds_of(labels: Iterable[str]) -> tuple[str, ...]:
    """What labels are that are nothing but texts in their source, by how they are written; in order, each once.

    Example:
        >>> kinds_of(["2", "1.0", "2"]), kinds_of(["true", "1.0a"]), kinds_of([])
        (('fractions', 'whole numbers'), ('texts', 'truth values'), ())
    """
    return tuple(sorted(set(map(_kind_of, set(labels)))))


def _kind_of(label: str) -> str:
    if label.lower() in ("true", "false"):
        # Which are other labels.
        return "truth values" if label.islower() else "truth values with a capital"
    found = _NUMBER.fullmatch(label)
    return "texts" if found is None else "fractions" if found[2] else "whole numbers"
