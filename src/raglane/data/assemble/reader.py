"""Entries of Arrow columns as words and numbers, and errors that name their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from raglane._utils.messages import quote, require
from raglane.data.columns import option
from raglane.data.prepare.missing import how_to_fill
from raglane.data.records import as_float32, place_of
from raglane.data.sources.files import data_error
from raglane.data.typed.arrays import Entries, Integers, Values
from raglane.data.typed.arrow import arrow_types, as_numpy, as_texts, is_label
from raglane.errors import DataError


class Reader(NamedTuple):
    """The table that is read: makes errors that name its rows."""

    path: Path
    ids: tuple[str | int, ...] | None
    lines: Integers | None
    # The number of the first row in its file; None if only the lines are known.
    first: int | None = 0

    def row(self, row: int) -> str:
        """Return the description of a row: its number from 0, its id and its line."""
        details = [] if self.ids is None else [f"id {quote(self.ids[row])}"]
        lines = [] if self.lines is None else [f"line {self.lines[row]}"]
        if self.first is None:
            return " ".join([*lines, *(f"({detail})" for detail in details)])
        details += lines
        return f"row {self.first + row}" + (f" ({', '.join(details)})" if details else "")

    def error(self, got: str, rule: str, fix: str) -> DataError:
        """Return the error for this file."""
        return data_error(self.path, got, f"data with {rule}", fix)

    def entry_error(
        self,
        got: str,
        at: int,
        name: str,
        rule: str,
        fix: str,
        offsets: Integers | None = None,
        after: str = "",
    ) -> DataError:
        """Return the error for an entry: ``at`` is its row, or with ``offsets`` its index among all
        elements.
        """
        row, step = (at, "") if offsets is None else place_of(offsets, at)
        place = self.row(row) + ("" if offsets is None else f", step {step}")
        return self.error(f"{got} in {place}, column {quote(name)}{after}", rule, fix)

    def type_error(self, column: Any, name: str, rule: str, fix: str) -> DataError:
        """Return the error for a column of a wrong type."""
        return self.error(f"{column.type} in column {quote(name)}", rule, fix)

    def category_error(self, column: Any, name: str) -> DataError:
        """Return the error for a column of a type that has no categories."""
        fix = f"convert it, or leave it out of {option('categorical')}"
        return self.type_error(column, name, "whole numbers or words as categories", fix)

    def check_nulls(self, column: Any, name: str, role: str) -> None:
        """Raise a DataError for the first null row of a column."""
        if column.null_count:
            fix = "fill it, or remove the row"
            raise self.entry_error("a null", first_null(column), name, f"a {role} in each row", fix)

    def check_inner_nulls(self, elements: Any, offsets: Integers, name: str) -> None:
        """Raise a DataError for the first null element of a column of lists."""
        if elements.null_count:
            fix = f"fill it, remove the row, or write NaN and {how_to_fill()}"
            raise self.entry_error(
                "a null", first_null(elements), name, "elements that are not null", fix, offsets
            )


def first_null(column: Any) -> int:
    """Return the first null row."""
    return int(column.is_null().to_numpy().argmax())


def words_of(reader: Reader, column: Any, name: str, offsets: Integers | None = None) -> Entries:
    """Convert labels or tokens without nulls to ``(M,)`` str; ``offsets`` are given if they are
    elements of rows.
    """
    if not is_label(column.type) and not (arrow_types().is_null(column.type) and not len(column)):
        raise reader.type_error(
            column, name, "strings, integers or booleans", "convert the column, or name another"
        )
    texts = as_texts(column)
    # A null may be a value of a dictionary, which the column does not count.
    if texts.null_count:
        raise reader.entry_error(
            "a null", first_null(texts), name, "values that are not null", "fill it", offsets
        )
    try:
        words: Entries = as_numpy(texts)
    except (UnicodeDecodeError, require("pyarrow", "data").ArrowException) as error:
        raise not_utf8(reader, texts, name, offsets) from error
    return words


def not_utf8(reader: Reader, texts: Any, name: str, offsets: Integers | None) -> DataError:
    """Return the error for the first text that is not UTF-8, which Parquet does not check."""
    fix = "decode the column before you write it"
    for element, content in enumerate(texts.cast("large_binary").to_pylist()):
        try:
            content.decode()
        except UnicodeDecodeError:
            return reader.entry_error(
                quote(content), element, name, "a text in UTF-8", fix, offsets
            )
    return reader.error(f"a text in column {quote(name)}", "a text in UTF-8", fix)


def numbers_of(entries: Any) -> Values:
    """Convert numbers without nulls to ``(M,)`` float32, without a copy if they are one chunk of
    float32.
    """
    types = arrow_types()
    if (
        types.is_decimal(entries.type)
        or types.is_boolean(entries.type)
        or types.is_null(entries.type)
    ):
        entries = entries.cast("double" if types.is_decimal(entries.type) else "float")
    return as_float32(
        entries.chunk(0).to_numpy() if entries.num_chunks == 1 else entries.to_numpy()
    )
