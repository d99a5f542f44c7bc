"""The facts of the columns of a table that rules may use, each computed once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations
from typing import Any

import numpy as np

from raglane.data.columns import Columns, is_named
from raglane.data.typed.arrays import Bools, Integers
from raglane.data.typed.arrow import arrow_types, explode, is_list, is_text
from raglane.data.typed.column import Column, Typed
from raglane.data.typed.dates import is_clock, share_of_dates

# The most columns of ids that are looked for together.
_MOST_IDS = 3
# The most columns that are tried as ids.
_MOST_TRIED = 12
# The number of rows in which dates are looked for first.
_FEW = 100
# The first rows, which are tried before all.
_SAMPLE = 4096

_is_list = re.compile(r"\[\s*(?:[-+\d.'\"\[].*)?\]", re.DOTALL).fullmatch
_has_digit = re.compile(r"\d").search


class Facts:
    """The facts of a table: ``columns`` by name, all of one length.

    ``kinds`` are the Arrow types of the columns, of which some may hold lists; {} for a table of
    texts. ``count`` is the number of rows, if it is known before a column is read.

    Example:
        >>> from raglane.data.typed.column import written
        >>> facts = Facts({"a": written(["x", "x"]), "b": written(["1", "2"])})
        >>> facts.is_unique("a"), facts.is_unique("b"), facts.is_whole("b")
        (False, True, True)
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        kinds: Mapping[str, Any] | None = None,
        count: int | None = None,
    ) -> None:
        self.columns = columns
        self.kinds: Mapping[str, Any] = kinds or {}
        self._count = count
        self._parts: dict[tuple[str, ...], Facts] = {}
        self._firsts: dict[tuple[str, ...], Integers] = {}
        self.share_of_words = cache(self._share_of_words)
        self.share_of_dates = cache(self._share_of_dates)
        self.is_constant_in = cache(self._is_constant_in)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.columns)

    @cached_property
    def count(self) -> int:
        """The number of rows."""
        if self._count is not None:
            return self._count
        return len(next(iter(self.columns.values()), ()))

    def cells(self, columns: Columns) -> list[str]:
        """Return the columns with a name whose entries are neither lists nor objects."""
        return [
            name
            for name in self
            if is_named(name, columns)
            and (name not in self.kinds or not arrow_types().is_nested(self.kinds[name]))
        ]

    def only(self, names: Iterable[str]) -> Facts:
        """Return the facts of some columns, whose cells are numbers and words."""
        key = tuple(names)
        if key not in self._parts:
            self._parts[key] = Facts({name: self.columns[name] for name in key}, count=self.count)
        return self._parts[key]

    def _share_of_words(self, name: str) -> float:
        """Return the share of entries that are neither numbers nor missing."""
        return float(self.columns[name].numbers()[1].mean()) if self.count else 0.0

    def _share_of_dates(self, name: str) -> float:
        """Return the share of dates among the entries that are not missing."""
        column = self.columns[name]
        if column.times() is not None:
            return 1.0
        if not self.share_of_words(name):
            return 0.0
        # Most columns are no dates, and are not looked at as a whole.
        some = column.take(np.arange(0, self.count, max(self.count // _FEW, 1))).words()
        if any(map(str.strip, some.tolist())) and not share_of_dates(some):
            return 0.0
        return share_of_dates(column.words())

    def are_dates(self, name: str) -> bool:
        """Return True for a column that is mostly dates."""
        return self.share_of_dates(name) > 0.5

    def dates(self, names: Iterable[str]) -> list[str]:
        """Return the columns that are mostly dates."""
        return [name for name in names if self.are_dates(name)]

    def words(self, names: Iterable[str]) -> list[str]:
        """Return the columns that are mostly words."""
        return [name for name in names if self.share_of_words(name) > 0.5]

    def are_clocks(self, name: str) -> bool:
        """Return True for a column that is mostly times of day, without a date."""
        if not self.share_of_words(name):
            return False
        first = self.columns[name].take(slice(0, _SAMPLE)).words()
        words = list(filter(None, first.tolist()))
        return sum(map(bool, map(is_clock, words))) > 0.5 * len(words)

    def are_equally_wide(self, name: str) -> bool:
        """Return False for lists of lists of several lengths."""
        column = self.columns[name]
        if not isinstance(column, Typed) or not is_list(column.values.type.value_type):
            return True
        _, elements = explode(column.values)
        return elements.null_count > 0 or len(set(explode(elements)[0].tolist())) < 2

    def are_written_lists(self, name: str) -> bool:
        """Return True for texts such as ``[1.0, 2.0]``, as pandas writes lists in CSV files."""
        if self.share_of_words(name) <= 0.5:
            return False
        first = list(filter(None, self.columns[name].take(slice(0, _FEW)).words().tolist()))
        return bool(first) and all(map(_is_list, first))

    def have_digits(self, name: str) -> bool:
        """Return True unless there are entries, and none of them has a digit."""
        column = self.columns[name]
        if column.times() is not None or not self.share_of_words(name):
            return True
        return _has_digit("\n".join(column.codes()[1].tolist())) is not None

    def is_whole(self, name: str) -> bool:
        """Return True if all entries are whole numbers."""
        numbers, odd = self.columns[name].numbers()
        return not odd.any() and bool((np.isfinite(numbers) & (np.rint(numbers) == numbers)).all())

    def are_fractions(self, name: str) -> bool:
        """Return True for a column of numbers, of which one has a fraction."""
        numbers, odd = self.columns[name].numbers()
        return not odd.any() and bool(np.isfinite(numbers).all() and (numbers % 1).any())

    def are_empty(self, name: str, words: Sequence[str]) -> bool:
        """Return True if all entries are missing, or one of these words."""
        codes, different = self.columns[name].codes()
        return bool(np.isin(different, words).all()) and len(codes) > 0

    def different(self, *names: str) -> int:
        """Return the number of different rows of some columns."""
        if len(names) == 1:
            return self.columns[names[0]].coded()[1]
        return int(self._joint(names).max(initial=-1)) + 1

    def is_unique(self, *names: str) -> bool:
        """Return True if no two rows agree in all of these columns."""
        return self.different(*names) == self.count

    def repeats(self, *names: str) -> int:
        """Return the number of rows that agree with an earlier one in all of these columns."""
        return self.count - self.different(*names)

    def is_constant(self, name: str, *ids: str) -> bool:
        """Return True if a column has one entry per id, and ids have several rows."""
        count = self.different(*ids)
        return count < self.count and self.different(*ids, name) == count

    def numbered(self, *names: str) -> Integers:
        """Number the different rows of some columns; all rows have 0 without a column."""
        return self._joint(names)

    def changes(self, name: str, *ids: str) -> Bools:
        """Return for each row whether its entry differs from that of the first row of its id."""
        if ids not in self._firsts:
            joint = self._joint(ids)
            firsts = np.empty(int(joint.max(initial=-1)) + 1, dtype=np.int64)
            # The last assignment remains: that of the first row.
            firsts[joint[::-1]] = np.arange(len(joint))[::-1]
            self._firsts[ids] = firsts[joint]
        return ~self.columns[name].same_as(self._firsts[ids])

    def _is_constant_in(self, name: str, *ids: str) -> bool:
        """Return True if all rows of an id have the same entry."""
        if self.count > _SAMPLE and self._sample.changes(name, *ids).any():
            return False
        return not self.changes(name, *ids).any()

    @cached_property
    def _sample(self) -> Facts:
        """The facts of the first rows, which rule many guesses out."""
        first = {name: column.take(slice(0, _SAMPLE)) for name, column in self.columns.items()}
        return Facts(first)

    def lengths(self, name: str, split: str | None = None) -> Integers | None:
        """Return the number of elements of each row of lists, or of words of each text; None if it
        is not known, and for missing rows.
        """
        column = self.columns[name]
        if not isinstance(column, Typed) or column.values.null_count:
            return None
        if is_list(column.values.type):
            return explode(column.values)[0]
        if not is_text(column.values.type) or split not in (None, "words"):
            return None
        return np.array([len(text.split()) for text in column.values.to_pylist()], dtype=np.int64)

    def most_alike(self, *names: str) -> int:
        """Return the number of rows with the most common entries of some columns."""
        return int(np.bincount(self._joint(names)).max(initial=0))

    def keys(self, names: Sequence[str], *required: str) -> list[tuple[str, ...]]:
        """Return the smallest sets of columns that, with the required ones, make each row unique.

        Sets in which an entry has a single row on average are none: they would be row numbers.
        """
        tried = [name for name in names if 1 < self.different(name) <= self.count // 2]
        for size in range(1, _MOST_IDS + 1):
            # The first rows rule most sets out.
            likely = [
                key
                for key in combinations(tried[:_MOST_TRIED], size)
                if self._sample.is_unique(*key, *required)
            ]
            unique = [
                key
                for key in likely
                if 2 * self.different(*key) <= self.count and self.is_unique(*key, *required)
            ]
            if unique:
                return unique
        return []

    def _joint(self, names: Sequence[str]) -> Integers:
        """Number the different rows of some columns."""
        if not names:
            return np.zeros(self.count, dtype=np.int64)
        joint, _ = self.columns[names[0]].coded()
        for name in names[1:]:
            codes, count = self.columns[name].coded()
            _, joint = np.unique(joint * count + codes, return_inverse=True)
        return joint
