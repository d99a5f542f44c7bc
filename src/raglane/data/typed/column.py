"""The typed columns of a table: texts as a file has them, or an Arrow column.

Every source of data is read to a mapping of names to columns. A column has two forms, both computed
when they are first used: numbers, and words as they are written. So a number of a Parquet file
becomes no text, and ``01`` of a CSV file stays ``01`` where it is an id or a label.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np

from raglane._utils.messages import require
from raglane.data.typed import decimals
from raglane.data.typed.arrays import Array, Bools, Entries, Floats, Integers
from raglane.data.typed.arrow import as_numpy

# Spellings of a missing number, in lower case.
MISSING = ("", "nan", "na", "n/a", "null", "none", "?")
# Of letters, and no number, as inf and infinity are.
_is_plain_word = re.compile(r"(?!inf(inity)? *$)[a-z_][\w -]*", re.ASCII | re.IGNORECASE).fullmatch


class Column(ABC):
    """A column of a table: ``N`` entries, as numbers or as words."""

    # Whether numbers have marks of thousands, which are left out.
    has_groups = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of entries."""

    @cached_property
    @abstractmethod
    def _numbers(self) -> tuple[Floats, Bools]: ...

    @cached_property
    @abstractmethod
    def _words(self) -> Entries: ...

    @cached_property
    @abstractmethod
    def _codes(self) -> tuple[Integers, Entries]: ...

    @property
    def entries(self) -> Entries:
        """The entries as texts with the decimal marks of a file, if it has some."""
        return self.words()

    def numbers(self) -> tuple[Floats, Bools]:
        """Return the entries as numbers ``(N,)``, NaN where missing, and which are words."""
        return self._numbers

    def words(self) -> Entries:
        """Return the entries as texts ``(N,)``, as they are written; "" where missing."""
        return self._words

    def texts(self) -> Any:
        """Return the entries as texts of Arrow."""
        return require("pyarrow", "data").array(self.words().tolist(), "string")

    def times(self) -> Array | None:
        """Return dates as ``datetime64[ns]`` in UTC, if the type of the column says so."""
        return None

    def codes(self) -> tuple[Integers, Entries]:
        """Number the different entries in their order of appearance; return numbers and texts."""
        return self._codes

    def coded(self) -> tuple[Integers, int]:
        """Number the different entries; return the numbers and their count, without texts."""
        return self._codes[0], len(self._codes[1])

    @abstractmethod
    def same_as(self, rows: Integers) -> Bools:
        """Return for each row whether its entry equals that in the row ``rows`` names for it.

        Missing entries are equal.
        """

    @abstractmethod
    def text(self, row: int) -> str:
        """Return one entry as a text."""

    @abstractmethod
    def take(self, rows: Array | slice) -> Column:
        """Return the column with these rows, by their numbers or by a mask."""


class TextColumn(Column):
    """A column of texts, such as that of a CSV file: ``entries`` ``(N,)`` of str.

    Example:
        >>> column = TextColumn(np.array(["1.5", "", "high"], dtype=object))
        >>> column.numbers()[0].tolist(), column.numbers()[1].tolist()
        ([1.5, nan, nan], [False, False, True])
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    @property
    def entries(self) -> Entries:
        """The entries with the decimal marks of a file."""
        return self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @cached_property
    def _numbers(self) -> tuple[Floats, Bools]:
        numbers, odd = numbers_in(self.entries)
        plain = decimals.without_groups(self.entries) if odd.any() else None
        self.has_groups = plain is not None
        return (numbers, odd) if plain is None else numbers_in(plain)

    @cached_property
    def _codes(self) -> tuple[Integers, Entries]:
        codes, different = require("pandas", "data").factorize(self.entries)
        return codes, decimals.without_marks(different)

    @property
    def _words(self) -> Entries:
        return decimals.without_marks(self.entries)

    def same_as(self, rows: Integers) -> Bools:
        """Return which entries equal those in other rows."""
        return np.asarray(self.entries == self.entries[rows], dtype=np.bool_)

    def text(self, row: int) -> str:
        """Return one entry."""
        return str(self.entries[row])

    def take(self, rows: Array | slice) -> TextColumn:
        """Return the column with these rows."""
        column = TextColumn(self.entries[rows])
        if "_numbers" in vars(self):
            # They are parsed once, before the rows are sorted.
            numbers, odd = self._numbers
            vars(column)["_numbers"] = (numbers[rows], odd[rows])
            column.has_groups = self.has_groups
        return column


class Typed(Column):
    """A column of Arrow: ``values``, a ``pyarrow.ChunkedArray`` of numbers, dates or texts.

    Example:
        >>> import pyarrow
        >>> column = Typed(pyarrow.chunked_array([[3, None, 5]]))
        >>> column.numbers()[0].tolist(), column.words().tolist()
        ([3.0, nan, 5.0], ['3', '', '5'])
    """

    def __init__(self, values: Any) -> None:
        # Arrow cannot take rows of views of texts, or of more than 2 GB of other texts.
        types = require("pyarrow.types", "data")
        is_text = types.is_string_view(values.type) or types.is_string(values.type)
        self.values = values.cast("large_string") if is_text else values

    def __len__(self) -> int:
        return len(self.values)

    @property
    def _is_numeric(self) -> bool:
        types = require("pyarrow.types", "data")
        kind = self.values.type
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind))

    @property
    def _is_text(self) -> bool:
        return bool(require("pyarrow.types", "data").is_large_string(self.values.type))

    @cached_property
    def _numbers(self) -> tuple[Floats, Bools]:
        if self._is_text and (numbers := _parsed(self.values)) is not None:
            return numbers, np.zeros(len(numbers), dtype=np.bool_)
        if self._is_text:
            # Words repeat, e.g. those of ids.
            codes, different = self._codes
            numbers, odd = numbers_in(different)
            return numbers[codes], odd[codes]
        if not self._is_numeric:
            return numbers_in(self.words())
        numbers = self.values.cast("double", safe=False).to_numpy()
        return np.asarray(numbers, dtype=np.float64), np.zeros(len(numbers), dtype=np.bool_)

    @cached_property
    def _words(self) -> Entries:
        types = require("pyarrow.types", "data")
        if types.is_integer(self.values.type):
            return np.asarray(self.values.cast("string").fill_null("").to_numpy(), dtype=object)
        if self._is_text:
            return as_numpy(filled(self.values))
        return np.array([_written(value) for value in self.values.to_pylist()], dtype=object)

    def texts(self) -> Any:
        """Return the entries as texts of Arrow."""
        return filled(self.values).cast("string") if self._is_text else super().texts()

    @cached_property
    def _coded(self) -> tuple[Integers, Any]:
        """Numbers of the different entries, and these as an array or a list."""
        if self._is_text:
            encoded = filled(self.values).combine_chunks().dictionary_encode()
            return as_numpy(encoded.indices).astype(np.int64), encoded.dictionary
        pandas = require("pandas", "data")
        types = require("pyarrow.types", "data")
        if types.is_integer(self.values.type) and self.values.null_count == 0:
            codes, different = pandas.factorize(self.values.to_numpy())
        elif types.is_floating(self.values.type):
            codes, different = pandas.factorize(self.numbers()[0], use_na_sentinel=False)
        else:
            codes, different = pandas.factorize(self.words())
        return codes, different

    @cached_property
    def _codes(self) -> tuple[Integers, Entries]:
        codes, different = self._coded
        if isinstance(different, np.ndarray) and different.dtype == object:
            return codes, different
        # NumPy's numbers as those of Python; Arrow's texts.
        values = different.to_pylist() if self._is_text else different.tolist()
        return codes, np.array(list(map(_written, values)), dtype=object)

    def times(self) -> Array | None:
        """Return the dates of a column of times; None for another type."""
        types = require("pyarrow.types", "data")
        kind = self.values.type
        if not (types.is_timestamp(kind) or types.is_date(kind)):
            return None
        # Arrow holds times with a zone in UTC.
        return np.asarray(self.values.cast("timestamp[ns]", safe=False).to_numpy())

    def coded(self) -> tuple[Integers, int]:
        """Number the different entries, without their texts."""
        return self._coded[0], len(self._coded[1])

    def same_as(self, rows: Integers) -> Bools:
        """Return which entries equal those in other rows."""
        if require("pyarrow.types", "data").is_floating(self.values.type):
            numbers, _ = self.numbers()
            others = numbers[rows]
            return (numbers == others) | (np.isnan(numbers) & np.isnan(others))
        if self._is_text:
            compute = require("pyarrow.compute", "data")
            texts = filled(self.values)
            return np.asarray(compute.equal(texts, texts.take(rows)).to_numpy(), dtype=np.bool_)
        codes, _ = self.coded()
        return codes == codes[rows]

    def text(self, row: int) -> str:
        """Return one entry."""
        return _written(self.values[row].as_py())

    def take(self, rows: Array | slice) -> Typed:
        """Return the column with these rows."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return Typed(self.values.slice(start, max(stop - start, 0)))
        if rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        arrow = require("pyarrow", "data")
        column = Typed(arrow.chunked_array([self.values.take(arrow.array(rows)).combine_chunks()]))
        if "_numbers" in vars(self):
            numbers, odd = self._numbers
            vars(column)["_numbers"] = (numbers[rows], odd[rows])
        return column


class NumberColumn(Typed):
    """A column of numbers that were read from texts: ``written`` reads the texts again."""

    def __init__(self, values: Any, written: Callable[[], Typed]) -> None:
        super().__init__(values)
        self._written = written

    @cached_property
    def _text(self) -> Typed:
        return self._written()

    def as_text(self) -> Typed:
        """Return the column of texts."""
        return self._text

    def words(self) -> Entries:
        """Return the entries as they are written."""
        return self._text.words()

    def codes(self) -> tuple[Integers, Entries]:
        """Number the different entries."""
        return self._text.codes()

    def coded(self) -> tuple[Integers, int]:
        """Number the different entries, without their texts."""
        return self._text.coded()

    def text(self, row: int) -> str:
        """Return one entry."""
        return self._text.text(row)

    def take(self, rows: Array | slice) -> NumberColumn:
        """Return the column with these rows."""
        taken = super().take(rows)
        return NumberColumn(taken.values, lambda: self._text.take(rows))


def filled(texts: Any) -> Any:
    """Return an Arrow column of texts with empty ones in place of nulls."""
    # Arrow imports pandas to convert a text of Python.
    return texts.fill_null("") if texts.null_count else texts


def _parsed(values: Any) -> Floats | None:
    """Return texts as numbers, NaN where they are empty; None if one may be a word.

    Arrow's numbers are those of Python: the nearest ones.
    """
    arrow = require("pyarrow", "data")
    compute = require("pyarrow.compute", "data")
    is_missing = as_numpy(compute.binary_length(filled(values))) == 0
    try:
        texts = compute.if_else(is_missing, None, values) if is_missing.any() else values
        numbers = as_numpy(texts.cast("double"))
    except arrow.ArrowInvalid:
        return None
    floats = np.asarray(numbers, dtype=np.float64)
    # Arrow reads nan(7) as a number.
    if np.isnan(floats).sum() > is_missing.sum():
        return None
    return floats


def _written(value: Any) -> str:
    if value is None or value != value:
        return ""
    return str(value.total_seconds() if isinstance(value, timedelta) else value)


def concatenated(columns: Sequence[Column]) -> Column:
    """Return the entries of several columns as one."""
    typed = [column for column in columns if isinstance(column, Typed)]
    if len(typed) < len(columns):
        return TextColumn(np.concatenate([each.entries for each in columns]))
    numbers = [column for column in typed if isinstance(column, NumberColumn)]
    if len(numbers) == len(columns):
        texts = [column.as_text for column in numbers]
        return NumberColumn(_chained(numbers), lambda: Typed(_chained([text() for text in texts])))
    return Typed(
        _chained([each.as_text() if isinstance(each, NumberColumn) else each for each in typed])
    )


def _chained(columns: Sequence[Typed]) -> Any:
    arrow = require("pyarrow", "data")
    tables = [arrow.table({"x": column.values}) for column in columns]
    return arrow.concat_tables(tables, promote_options="permissive").column("x")


def written(entries: list[str]) -> TextColumn:
    """Return a column of these texts."""
    return TextColumn(np.array(entries, dtype=object))


def numbers_in(entries: Entries) -> tuple[Floats, Bools]:
    """Return texts as numbers, NaN where missing, and which entries are neither."""
    entries = decimals.with_points(entries)
    text = "".join(entries.tolist())
    # Python accepts 1_5 and digits of other scripts; in a file they are damage.
    if text.isascii() and "_" not in text:
        with suppress(ValueError):
            numbers = np.where(entries == "", "nan", entries).astype(np.float64)
            return numbers, np.zeros(len(entries), dtype=np.bool_)
    if all(map(_is_plain_word, entries.tolist())):
        # Without importing pandas, which takes a quarter of a second.
        words = [word.strip().lower() for word in entries.tolist()]
        return np.full(len(entries), np.nan), np.array(
            [word not in MISSING for word in words], dtype=np.bool_
        )
    # Words and other spellings of missing numbers are parsed more slowly, so each distinct entry is
    # parsed once.
    pandas = require("pandas", "data")
    codes, different = pandas.factorize(entries)
    numbers = np.asarray(pandas.to_numeric(different, errors="coerce"), dtype=np.float64)
    odd = np.isnan(numbers)
    odd[odd] = [word.strip().lower() not in MISSING for word in different[odd].tolist()]
    return numbers[codes], odd[codes]
