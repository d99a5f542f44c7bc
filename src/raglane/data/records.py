"""The content of a file as a reader returns it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raglane import segments
from raglane._utils.checks import check_flag, check_kind, read_index, read_lengths
from raglane._utils.messages import quote
from raglane.data.columns import Columns, option
from raglane.errors import DataError
from raglane.tasks import TASKS

# The channel of the time since the previous element.
TIME_GAP = "time_gap"

_NUMBER = re.compile(r"[+-]?(\d+|(\d+\.\d*|\.?\d+)([eE][+-]?\d+)?)")


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the offsets ``(B + 1,)`` of sequences of these lengths."""
    return segments.offsets_from_lengths(read_lengths(lengths)).numpy()


def as_float32(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return numbers as float32; larger ones become infinite, which counts as missing."""
    with np.errstate(over="ignore"):
        floats: npt.NDArray[np.float32] = numbers.astype(np.float32, copy=False)
    return floats


def as_objects(sets: Sequence[tuple[str, ...]]) -> npt.NDArray[np.object_]:
    """Return ``(M,)`` object; np.array would make a matrix of equally long tuples."""
    result = np.empty(len(sets), dtype=object)
    result[:] = sets
    return result


def place_of(offsets: npt.NDArray[np.int64], element: int) -> tuple[int, int]:
    """Return the sequence and the step of an element."""
    row = int(np.searchsorted(offsets, element, side="right")) - 1
    return row, element - int(offsets[row])


@dataclass(frozen=True, eq=False)
class Targets:
    """Numbers, or sets or sequences of labels, to learn, per sequence or per element."""

    # (M, T) float64, finite; or (M,) object, tuples of labels (str).
    values: npt.NDArray[Any]
    per_element: bool = False
    # The names of the T numbers; () for labels.
    names: tuple[str, ...] = ()
    # True for sequences of labels, which have an order and duplicates.
    ordered: bool = False

    @property
    def is_numbers(self) -> bool:
        """True for numbers, False for sets and sequences of labels."""
        return bool(self.values.dtype != object)

    @property
    def kind(self) -> str:
        """The kind of the targets, as in :data:`raglane.tasks.TASKS`."""
        if self.is_numbers:
            return "numbers"
        return "sequence" if self.ordered else "set"

    def select(self, rows: npt.NDArray[np.int64], elements: npt.NDArray[np.int64]) -> Targets:
        """Return the targets of some sequences, by their rows and the flat indices of their
        elements.
        """
        return replace(self, values=self.values[elements if self.per_element else rows])


def kinds_of(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of labels that are texts in their source, by their spelling: sorted, without
    duplicates.
    """
    return tuple(sorted(set(map(_kind_of, set(labels)))))


def _kind_of(label: str) -> str:
    if label.lower() in ("true", "false"):
        return "truth values" if label.islower() else "truth values with a capital"
    number = _NUMBER.fullmatch(label)
    if number is None:
        return "texts"
    return "fractions" if number[2] else "whole numbers"


@dataclass(frozen=True, eq=False)
class Feature:
    """A named column in addition to the values of sequences.

    Attributes:
        name: the name of the column.
        values: ``(M,)`` float32 numbers, NaN if missing; or ``(M,)`` object, categories (str), ""
            if missing.
        per_sequence: whether there is one value per sequence, rather than per element.

    Raises:
        ArgumentTypeError: an attribute of the wrong type.
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
        if self.values.ndim != 1 or self.values.dtype not in (
            np.dtype(np.float32),
            np.dtype(object),
        ):
            got = f"{self.values.dtype} of shape {self.values.shape}"
            rule = "(M,) float32 for numbers, or (M,) object for categories"
            raise DataError(f"the feature {quote(self.name)}", got, rule, "convert the values")

    @property
    def is_numbers(self) -> bool:
        """True for numbers, False for categories."""
        return bool(self.values.dtype != object)

    @property
    def kind(self) -> str:
        """The kind of the values, in words."""
        return f"{'numbers' if self.is_numbers else 'categories'} per {'sequence' if self.per_sequence else 'element'}"

    def select(self, rows: npt.NDArray[np.int64], elements: npt.NDArray[np.int64]) -> Feature:
        """Return the feature of some sequences, by their rows and the flat indices of their
        elements.
        """
        return replace(self, values=self.values[rows if self.per_sequence else elements])


def joined(runs: Sequence[tuple[Feature, ...]]) -> tuple[Feature, ...]:
    """Concatenate the features of several runs of sequences."""
    if not runs:
        return ()
    return tuple(
        replace(feature, values=np.concatenate([run[place].values for run in runs]))
        for place, feature in enumerate(runs[0])
    )


@dataclass(frozen=True)
class Skipped:
    """A row that was left out because it breaks a rule."""

    location: str
    place: str
    error: str


class RoleNotes(NamedTuple):
    """Which column is what, and by which rule: for the rows, and for features and labels."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


NO_ROLES = RoleNotes()


@dataclass(frozen=True, eq=False)
class Records:
    """The sequences of a file as flat columns, unchanged."""

    # (N, C) float32 features, NaN if missing; or (N,) object, tokens (str).
    values: npt.NDArray[Any]
    # (B + 1,) int64.
    offsets: npt.NDArray[np.int64]
    # One per sequence; without ids, rows are numbered from 0.
    ids: tuple[str | int, ...] | None = None
    labels: tuple[str, ...] | None = None
    # (N,) object, a label (str) per element.
    tags: npt.NDArray[np.object_] | None = None
    # The names of the C features ("x0", ... if the format has none); () for tokens.
    channels: tuple[str, ...] = ()
    source: Path = Path()
    # Lines for the user, such as guessed columns.
    notes: tuple[str, ...] = ()
    # The request with the columns that were found: with it, another file is read in the same way.
    columns: Columns = field(default_factory=Columns)
    targets: Targets | None = None
    features: tuple[Feature, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    # The kinds of the labels in the source, see kinds_of; None if the source has only texts.
    label_kinds: tuple[str, ...] | None = None
    roles: RoleNotes = NO_ROLES
    # (N,) numbers or datetime64, the times of the elements, and the name of their column; None
    # without one.
    times: npt.NDArray[Any] | None = None
    time_name: str | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def is_tokens(self) -> bool:
        """True if the elements are tokens rather than rows of numbers."""
        return bool(self.values.dtype == object)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of elements of each sequence, ``(B,)`` int64."""
        return np.diff(self.offsets)

    @property
    def has_targets(self) -> bool:
        """True if there are labels, tags or targets."""
        return any(part is not None for part in (self.labels, self.tags, self.targets))

    def describe_row(self, row: int) -> str:
        """Return the name of a sequence in messages: ``row 3`` or ``row 3 (id 'a17')``, counted
        from 0.
        """
        return f"row {row}" if self.ids is None else f"row {row} (id {quote(self.ids[row])})"

    def select(
        self,
        index: Sequence[int] | npt.NDArray[Any] | torch.Tensor,
        most: npt.NDArray[np.int64] | None = None,
    ) -> Records:
        """Return copies of some sequences, by integers or a mask, in this order, cut to ``most``
        elements each, ``(M,)``.
        """
        rows = read_index(index, len(self)).numpy()
        starts = self.offsets[rows]
        lengths = self.lengths[rows]
        lengths = lengths if most is None else np.minimum(lengths, most)
        total = int(lengths.sum())
        elements = segments.element_index(
            torch.from_numpy(starts), torch.from_numpy(lengths), total
        ).numpy()
        return replace(
            self,
            values=self.values[elements],
            offsets=offsets_of(lengths),
            ids=None if self.ids is None else tuple(self.ids[row] for row in rows.tolist()),
            labels=None
            if self.labels is None
            else tuple(self.labels[row] for row in rows.tolist()),
            tags=None if self.tags is None else self.tags[elements],
            targets=None if self.targets is None else self.targets.select(rows, elements),
            features=tuple(feature.select(rows, elements) for feature in self.features),
            times=None if self.times is None else self.times[elements],
        )


def note_empty(records: Records) -> str | None:
    """Return a line on the empty sequences, which have a class too; None without any."""
    empty = np.flatnonzero(records.lengths == 0)
    if len(empty) == 0:
        return None
    first = records.describe_row(int(empty[0]))
    share = f"{len(empty):,} of {len(records):,} sequences"
    if len(empty) == 1:
        return f"{share} is empty ({first}): its class follows from the initial state only"
    return (
        f"{share} are empty (the first: {first}): their class follows from the initial state only"
    )


def note_single(lengths: npt.NDArray[Any], is_tokens: bool) -> str | None:
    """Return a line on sequences of at most one element, with the options that may be meant; None
    if they are few.
    """
    count = int((lengths <= 1).sum())
    if len(lengths) < 2 or count < 0.9 * len(lengths):
        return None
    fix = f"to split texts into characters, pass {option('split', 'characters')}"
    if not is_tokens:
        wide = option("wide", value=True)
        name = option("id")
        fix = f"if the columns are steps, pass {wide}; if several rows are a sequence, name the ids with {name}"
    return f"{count:,} of {len(lengths):,} sequences have at most one element: {fix}"


def is_one_word(records: Records) -> bool:
    """Return True if nearly all sequences are texts of one word, which has several characters."""
    if not records.is_tokens or records.columns.split != "words" or len(records.values) == 0:
        return False
    is_short = sum(map(len, records.values)) < 2 * len(records.values)
    return not is_short and bool((records.lengths <= 1).mean() >= 0.9)


def for_task(records: Records, task: str) -> Records:
    """Return the records with only the labels or numbers that a task learns."""
    label = TASKS[task].label
    per = TASKS[task].per
    targets = (
        records.targets if records.targets is not None and records.targets.kind == label else None
    )
    labels = records.labels if (label, per) == ("class", "sequence") else None
    tags = records.tags if (label, per) == ("class", "element") else None
    if labels is records.labels and tags is records.tags and targets is records.targets:
        return records
    return replace(records, labels=labels, tags=tags, targets=targets)
