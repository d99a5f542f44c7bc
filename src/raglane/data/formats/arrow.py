"""Arrow columns: what they can be, their elements, and how messages name their rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import columns_argument, data_error, takes_tokens
from raglane.data.missing import how_to_fill
from raglane.data.records import Columns, offsets_of, place_of
from raglane.data.splitting import split_texts
from raglane.errors import DataError, count_of, quote, require


def arrow_types() -> Any:
    """Pyarrow's questions about a type."""
    return require("pyarrow.types", "data")


def is_list(kind: Any) -> bool:
    """Whether a column of this type holds lists of any kind."""
    types = arrow_types()
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def is_text(kind: Any) -> bool:
    """Whether it holds texts."""
    types = arrow_types()
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    """Whether it holds numbers, or truth values."""
    types = arrow_types()
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind))


def is_sequence(kind: Any) -> bool:
    """Whether this is a list column: of numbers, lists of numbers or strings, or of nothing where all are empty."""
    if not is_list(kind):
        return False
    inner = kind.value_type
    return (
        is_number(inner)
        or is_text(inner)
        or arrow_types().is_null(inner)
        or (is_list(inner) and (is_number(inner.value_type) or arrow_types().is_null(inner.value_type)))
    )


def is_label(kind: Any) -> bool:
    """Whether it can hold classes: texts, whole numbers or truth values."""
    return is_id(kind) or bool(arrow_types().is_boolean(kind))


def is_id(kind: Any) -> bool:
    """Whether it can hold ids: texts or whole numbers."""
    return bool(is_text(kind) or arrow_types().is_integer(kind))


def is_label_list(kind: Any) -> bool:
    """Whether it holds lists of classes."""
    return is_list(kind) and is_label(kind.value_type)


@dataclass(frozen=True)
class Reader:
    """A table that is being read, and how its rows are called in messages."""

    path: Path
    ids: tuple[str | int, ...] | None
    lines: npt.NDArray[np.int64] | None
    first: int | None = 0
    """The number of the first row in its file; None where it is not known, and rows are called by their lines."""

    def row(self, row: int) -> str:
        """A row in words: its number from 0, its id and its line."""
        details = [] if self.ids is None else [f"id {quote(self.ids[row])}"]
        lines = [] if self.lines is None else [f"line {self.lines[row]}"]
        if self.first is None:
            return " ".join([*lines, *(f"({detail})" for detail in details)])
        details += lines
        return f"row {self.first + row}" + (f" ({', '.join(details)})" if details else "")

    def error(self, got: str, rule: str, fix: str) -> DataError:
        """The error for this file."""
        return data_error(self.path, got, rule, fix)

    def refuse_nulls(self, column: Any, name: str, role: str) -> None:
        """Raise if an entry of a column is null."""
        if column.null_count:
            row = int(column.is_null().to_numpy().argmax())
            fix = "fill it, or remove the row"
            raise self.error(f"a null in {self.row(row)}, column {quote(name)}", f"each row has a {role}", fix)

    def refuse_inner_nulls(self, elements: Any, offsets: npt.NDArray[np.int64], name: str) -> None:
        """Raise if an element of a column of lists is null."""
        if elements.null_count:
            row, step = place_of(offsets, int(elements.is_null().to_numpy().argmax()))
            got = f"a null in {self.row(row)}, step {step}, column {quote(name)}"
            fix = f"fill it, remove the row, or write NaN and {how_to_fill()}"
            raise self.error(got, "the elements of a sequence are not null", fix)


def words_of(
    reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.object_]:
    """A column of labels or tokens, without nulls, as ``(M,)`` str; ``offsets`` where they are elements of rows."""
    if not is_label(column.type):
        rule = "strings, integers or booleans"
        raise reader.error(f"{column.type} in column {quote(name)}", rule, "convert the column, or name another")
    texts = column.cast("large_string")
    try:
        words: npt.NDArray[np.object_] = texts.to_numpy().astype(object)
    except (UnicodeDecodeError, require("pyarrow", "data").ArrowException) as error:
        raise not_utf8(reader, texts, name, offsets) from error
    return words


def not_utf8(reader: Reader, texts: Any, name: str, offsets: npt.NDArray[np.int64] | None) -> DataError:
    """The error for the first text that is not UTF-8: Parquet stores whatever bytes it is given."""
    for element, content in enumerate(texts.cast("large_binary").to_pylist()):
        try:
            content.decode()
        except UnicodeDecodeError:
            row, step = (element, None) if offsets is None else place_of(offsets, element)
            place = reader.row(row) + ("" if step is None else f", step {step}")
            got = f"{quote(content)} in {place}, column {quote(name)}"
            return reader.error(got, "a text is UTF-8", "decode the column before you write it")
    return reader.error(f"a text in column {quote(name)}", "a text is UTF-8", "decode it before you write it")


def explode(column: Any) -> tuple[npt.NDArray[np.int64], Any]:
    """The length of each list, ``(B,)`` int64, and the elements of all, as a chunked array."""
    arrow, compute = require("pyarrow", "data"), require("pyarrow.compute", "data")
    lengths = compute.list_value_length(column).to_numpy().astype(np.int64)
    parts = [chunk.flatten() for chunk in column.chunks]
    return lengths, arrow.chunked_array(parts, type=column.type.value_type)


def numbers_of(entries: Any) -> npt.NDArray[np.float32]:
    """Numbers without nulls as ``(M,)`` float32: no copy where they are float32 in one chunk."""
    types = arrow_types()
    if types.is_decimal(entries.type) or types.is_boolean(entries.type) or types.is_null(entries.type):
        entries = entries.cast("double" if types.is_decimal(entries.type) else "float")
    numbers = entries.chunk(0).to_numpy() if entries.num_chunks == 1 else entries.to_numpy()
    # A number that float32 cannot hold becomes infinite, and is then reported or filled as missing.
    with np.errstate(over="ignore"):
        floats: npt.NDArray[np.float32] = numbers.astype(np.float32, copy=False)
    return floats


def is_whole(kind: Any) -> bool:
    """Whether a type holds whole numbers, which can be tokens."""
    return bool(arrow_types().is_integer(kind))


def sequences_of(
    reader: Reader, column: Any, name: str, columns: Columns
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The flat values of a sequence column, and their offsets."""
    reader.refuse_nulls(column, name, "sequence")
    if is_text(column.type):
        return _split_texts(reader, column, name, columns.split)
    if not is_sequence(column.type):
        rule = "lists of numbers, lists of lists of numbers, lists of strings, or texts"
        raise reader.error(
            f"{column.type} in column {quote(name)}", rule, f"name another with {columns_argument('sequence')}"
        )
    lengths, elements = explode(column)
    offsets = offsets_of(lengths)
    reader.refuse_inner_nulls(elements, offsets, name)
    if is_text(elements.type):
        return words_of(reader, elements, name, offsets), offsets
    if is_whole(elements.type) and takes_tokens(columns, name)[0]:
        return elements.cast("large_string").to_numpy().astype(object), offsets
    if not is_list(elements.type):
        return numbers_of(elements)[:, None], offsets
    widths, entries = explode(elements)
    if len(widths) == 0:
        # Sequences of length 0 alone: how many channels they have does not show, and a model need not be told.
        return np.zeros((0, 0), dtype=np.float32), offsets
    if (widths != widths[0]).any():
        odd = int((widths != widths[0]).argmax())
        row, step = place_of(offsets, odd)
        got = f"{count_of(widths[odd], 'channel')} in {reader.row(row)}, step {step}, column {quote(name)}"
        got += f", after {count_of(widths[0], 'channel')}"
        raise reader.error(got, "all steps have the same channels", "correct the row, or remove it")
    if widths[0] == 0:
        row, step = place_of(offsets, 0)
        got = f"no channel in {reader.row(row)}, step {step}, column {quote(name)}"
        raise reader.error(got, "a step has at least one channel", "write the empty sequence as an empty list")
    if entries.null_count:
        # The place of an entry is that of its step.
        first = int(entries.is_null().to_numpy().argmax())
        row, step = place_of(offsets, first // int(widths[0]))
        got = f"a null in {reader.row(row)}, step {step}, channel {first % int(widths[0])}, column {quote(name)}"
        fix = f"fill it, or write NaN and {how_to_fill()}"
        raise reader.error(got, "the elements of a sequence are not null", fix)
    return numbers_of(entries).reshape(len(widths), int(widths[0])), offsets


def _split_texts(
    reader: Reader, column: Any, name: str, split: str | None
) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.int64]]:
    """Cut texts into tokens, by default at white space: there a text of white space alone has none."""
    arrow, compute = require("pyarrow", "data"), require("pyarrow.compute", "data")
    texts = compute.cast(column, "large_string")
    if split not in (None, "words"):
        cut, counts = split_texts(words_of(reader, column, name).tolist(), split)
        return cut, offsets_of(counts)
    try:
        lengths, tokens = explode(compute.utf8_split_whitespace(texts))
        words = tokens.to_numpy().astype(object)
    except (UnicodeDecodeError, arrow.ArrowException) as error:
        raise not_utf8(reader, texts, name, None) from error
    # White space at an end leaves an empty token there.
    kept = words != ""
    before = np.concatenate([[0], np.cumsum(kept)])
    return words[kept], before[offsets_of(lengths)]
