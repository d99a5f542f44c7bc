"""The facts of the columns of a table that rules may use, each computed once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations

import numpy as np

from raglane.data.typed.column import Column, Integers
from raglane.data.typed.dates import is_clock, share_of_dates

# The most columns of ids that are looked for together.
_MOST_IDS = 3
# The most columns that are tried as ids.
_MOST_TRIED = 12
# The first rows, which are tried before all.
_SAMPLE = 4096

_has_digit = re.compile(r"\d").search


class Facts:
    """The facts of a table: ``columns`` by name, all of one length.

    Example:
        >>> from raglane.data.typed.column import written
        >>> facts = Facts({"a": written(["x", "x"]), "b": written(["1", "2"])})
        >>> facts.is_unique("a"), facts.is_unique("b"), facts.is_whole("b")
        (False, True, True)
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        self.share_of_words = cache(self._share_of_words)
        self.share_of_dates = cache(self._share_of_dates)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.columns)

    @cached_property
    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def _share_of_words(self, name: str) -> float:
        """Return the share of entries that are neither numbers nor missing."""
        return float(self.columns[name].numbers()[1].mean()) if self.count else 0.0

    def _share_of_dates(self, name: str) -> float:
        """Return the share of dates among the entries that are not missing."""
        column = self.columns[name]
        if column.times() is not None:
            return 1.0
        return share_of_dates(column.words()) if self.share_of_words(name) else 0.0

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
        words = list(filter(None, self.columns[name].words()[:_SAMPLE].tolist()))
        return sum(map(bool, map(is_clock, words))) > 0.5 * len(words)

    def have_digits(self, name: str) -> bool:
        """Return True unless there are entries, and none of them has a digit."""
        column = self.columns[name]
        if column.times() is not None or not self.share_of_words(name):
            return True
        return _has_digit("\n".join(column.words().tolist())) is not None

    def is_whole(self, name: str) -> bool:
        """Return True if all entries are whole numbers."""
        numbers, odd = self.columns[name].numbers()
        return not odd.any() and bool((np.isfinite(numbers) & (np.rint(numbers) == numbers)).all())

    def different(self, *names: str) -> int:
        """Return the number of different rows of some columns."""
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

    def most_alike(self, *names: str) -> int:
        """Return the number of rows with the most common entries of some columns."""
        return int(np.bincount(self._joint(names)).max(initial=0))

    def keys(self, names: Sequence[str], *required: str) -> list[tuple[str, ...]]:
        """Return the smallest sets of columns that, with the required ones, make each row unique.

        Sets in which an entry has a single row on average are none: they would be row numbers.
        """
        tried = [name for name in names if 1 < self.different(name) <= self.count // 2]
        first = {name: column.take(slice(0, _SAMPLE)) for name, column in self.columns.items()}
        sample = Facts(first)
        for size in range(1, _MOST_IDS + 1):
            # The first rows rule most sets out.
            likely = [
                key
                for key in combinations(tried[:_MOST_TRIED], size)
                if sample.is_unique(*key, *required)
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
        joint = np.zeros(self.count, dtype=np.int64)
        for name in names:
            codes, different = self.columns[name].codes()
            _, joint = np.unique(joint * len(different) + codes, return_inverse=True)
        return joint
