"""Arrow columns: what they can be, their elements, what is to be learned, and how messages name their rows.

Numbers are one per row, a list of them as long as the sequence (one per element), a list of any other length that all
rows share (several per sequence), or a list of lists (several per element). Sets of labels are a text with ``;``
between the labels, a list of labels, or a list of these as long as the sequence (one set per element).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import count_of, quote, require
from raglane.data.formats.base import columns_argument, data_error, takes_tokens
from raglane.data.missing import how_to_fill
from raglane.data.records import TASKS, Columns, Targets, as_float32, offsets_of, place_of
from raglane.data.splitting import split_texts
from raglane.errors import DataError

_Found = tuple[tuple[str, ...] | None, npt.NDArray[np.object_] | None, Targets | None]


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

    def wrong(
        self,
        what: str,
        at: int,
        name: str,
        rule: str,
        fix: str,
        offsets: npt.NDArray[np.int64] | None = None,
        after: str = "",
    ) -> DataError:
        """The error for an entry of a column, by its row, or with ``offsets`` by its place among all elements."""
        row, step = (at, "") if offsets is None else place_of(offsets, at)
        place = self.row(row) + ("" if offsets is None else f", step {step}")
        return self.error(f"{what} in {place}, column {quote(name)}{after}", rule, fix)

    def wrong_type(self, column: Any, name: str, rule: str, fix: str) -> DataError:
        """The error for a column of another type."""
        return self.error(f"{column.type} in column {quote(name)}", rule, fix)

    def refuse_nulls(self, column: Any, name: str, role: str) -> None:
        """Raise if an entry of a column is null."""
        if column.null_count:
            raise self.wrong(
                "a null", _first_null(column), name, f"a file with a {role} in each row", "fill it, or remove the row"
            )

    def refuse_inner_nulls(self, elements: Any, offsets: npt.NDArray[np.int64], name: str) -> None:
        """Raise if an element of a column of lists is null."""
        if elements.null_count:
            rule, fix = "a file without null elements", "fill it, remove the row, or write NaN and "
            raise self.wrong("a null", _first_null(elements), name, rule, fix + how_to_fill(), offsets)


def _first_null(column: Any) -> int:
    return int(column.is_null().to_numpy().argmax())


def words_of(
    reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.object_]:
    """A column of labels or tokens, without nulls, as ``(M,)`` str; ``offsets`` where they are elements of rows."""
    if not is_label(column.type):
        raise reader.wrong_type(
            column,
            name,
            "a file with strings, integers or booleans in the column",
            "convert the column, or name another",
        )
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
            fix = "decode the column before writing the file"
            return reader.wrong(quote(content), element, name, "text in UTF-8", fix, offsets)
    return reader.error(f"a text in column {quote(name)}", "text in UTF-8", "decode the text before writing the file")


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
    return as_float32(entries.chunk(0).to_numpy() if entries.num_chunks == 1 else entries.to_numpy())


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
        rule = "a file with lists of numbers, lists of lists of numbers, lists of strings, or texts in the column"
        raise reader.wrong_type(column, name, rule, f"name another with {columns_argument('sequence')}")
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
        got, after = count_of(widths[odd], "channel"), f", after {count_of(widths[0], 'channel')}"
        rule, fix = "a file whose steps have the same channels", "correct the row, or remove it"
        raise reader.wrong(got, odd, name, rule, fix, offsets, after)
    if widths[0] == 0:
        rule, fix = "a file whose steps have at least one channel", "write the empty sequence as an empty list"
        raise reader.wrong("no channel", 0, name, rule, fix, offsets)
    if entries.null_count:
        element, channel = divmod(_first_null(entries), int(widths[0]))
        row, step = place_of(offsets, element)
        got = f"a null in {reader.row(row)}, step {step}, channel {channel}, column {quote(name)}"
        fix = f"fill it, or write NaN and {how_to_fill()}"
        raise reader.error(got, "a file without null elements", fix)
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


def labels_in(text: str) -> tuple[str, ...]:
    """The labels that a text names, between semicolons, each once."""
    return tuple(dict.fromkeys(label for part in text.split(";") if (label := part.strip())))


def names_of(column: str, count: int) -> tuple[str, ...]:
    """The names of the numbers of a column."""
    return (column,) if count == 1 else tuple(f"{column}_{place}" for place in range(count))


def label_kind(task: str) -> tuple[Callable[[Any], bool], str]:
    """What a column must be to be guessed as the label of a task: a test of its type, and words for it."""
    if TASKS[task].label == "numbers":
        return _is_numbers, "column of numbers, or of lists of them"
    if TASKS[task].label == "set":
        return _is_sets, "column of lists of labels, of lists of lists of them, or of texts"
    if TASKS[task].per == "element":
        return is_label_list, "column of lists of strings, integers or booleans, one per element"
    return is_label, "column of strings, integers or booleans"


def column_kinds(kind: Any, task: str) -> tuple[str, ...]:
    """What the labels of a column are, by its type, in the words of :func:`~raglane.data.records.kinds_of`."""
    while is_list(kind):
        kind = kind.value_type
    if not is_label(kind) or TASKS[task].label == "numbers":
        return ()
    return ("texts",) if is_text(kind) else ("truth values",) if arrow_types().is_boolean(kind) else ("whole numbers",)


def _is_numbers(kind: Any, depth: int = 2) -> bool:
    return is_number(kind) or (depth > 0 and is_list(kind) and _is_numbers(kind.value_type, depth - 1))


def _is_sets(kind: Any) -> bool:
    return is_text(kind) or is_label_list(kind) or (is_list(kind) and is_label_list(kind.value_type))


def read_labels(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64], task: str) -> _Found:
    """What a column holds for a task."""
    if TASKS[task].label == "numbers":
        return None, None, _numbers(reader, column, name, offsets)
    if TASKS[task].label == "set":
        return None, None, _sets(reader, column, name, offsets)
    if TASKS[task].per == "element":
        return None, _tags(reader, column, name, offsets), None
    reader.refuse_nulls(column, name, "label")
    return tuple(words_of(reader, column, name).tolist()), None, None


def _tags(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    reader.refuse_nulls(column, name, "list of labels")
    if not is_list(column.type):
        raise reader.wrong_type(column, name, "a file with a list of one label per element, for tagging", _another())
    lengths, tags = explode(column)
    _check_lengths(reader, lengths, offsets, name, "labels")
    reader.refuse_inner_nulls(tags, offsets, name)
    return words_of(reader, tags, name, offsets)


def _numbers(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64]) -> Targets:
    """One or several numbers per sequence or per element."""
    reader.refuse_nulls(column, name, "number to learn")
    if not _is_numbers(column.type):
        raise reader.wrong_type(column, name, "a file with a number, or a list of numbers, as the target", _another())
    rows = np.arange(len(column))
    if not is_list(column.type):
        return _matrix(reader, column, name, 1, rows, None)
    lengths, entries = explode(column)
    per_element = bool((lengths == np.diff(offsets)).all())
    if is_list(entries.type):
        _check_lengths(reader, lengths, offsets, name, "lists of numbers")
        reader.refuse_inner_nulls(entries, offsets, name)
        lengths, entries = explode(entries)
        rows, per_element = np.repeat(rows, np.diff(offsets)), True
    elif per_element:
        return _matrix(reader, entries, name, 1, np.repeat(rows, lengths), offsets)
    odd = lengths != (lengths[0] if len(lengths) else 0)
    if odd.any() or (len(lengths) and lengths[0] == 0):
        row = int(odd.argmax())
        rule, fix = (
            "a file with one target per element, or the same number of targets in each row",
            "correct the row, or remove it",
        )
        raise reader.wrong(count_of(int(lengths[row]), "number"), int(rows[row]), name, rule, fix)
    width = int(lengths[0]) if len(lengths) else 1
    return _matrix(reader, entries, name, width, np.repeat(rows, lengths), offsets if per_element else None)


def _matrix(
    reader: Reader,
    entries: Any,
    name: str,
    width: int,
    rows: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64] | None,
) -> Targets:
    """Finite numbers, ``width`` to a row; ``rows`` says of which sequence each is, for messages."""
    values = entries.cast("double", safe=False).to_numpy() if entries.null_count == 0 else entries.to_numpy()
    values = np.asarray(values, dtype=np.float64)
    wrong = ~np.isfinite(values)
    if wrong.any():
        first = int(wrong.argmax())
        what = "a null" if entries.null_count else f"{values[first]}"
        rule, fix = "a file with finite targets", "fill it, or remove the row"
        raise reader.wrong(what, int(rows[first]), name, rule, fix)
    return Targets(values.reshape(-1, width), per_element=offsets is not None, names=names_of(name, width))


def _sets(reader: Reader, column: Any, name: str, offsets: npt.NDArray[np.int64]) -> Targets:
    """A tuple of labels per sequence or per element."""
    reader.refuse_nulls(column, name, "list of labels; write [] for none")
    if is_text(column.type):
        texts = words_of(reader, column, name)
        return Targets(_objects([labels_in(text) for text in texts.tolist()]))
    if not _is_sets(column.type):
        rule = "a file with labels as a text separated by ;, a list, or a list of lists"
        raise reader.wrong_type(column, name, rule, _another())
    lengths, entries = explode(column)
    starts = offsets_of(lengths)
    if not is_list(entries.type):
        reader.refuse_inner_nulls(entries, starts, name)
        return Targets(_cut(words_of(reader, entries, name, starts), starts))
    _check_lengths(reader, lengths, offsets, name, "lists of labels")
    reader.refuse_inner_nulls(entries, offsets, name)
    lengths, entries = explode(entries)
    inner = offsets_of(lengths)
    if entries.null_count:
        row, _ = place_of(offsets, place_of(inner, _first_null(entries))[0])
        raise reader.wrong("a null", row, name, "a file without null labels", "remove it")
    return Targets(_cut(words_of(reader, entries, name), inner), per_element=True)


def _cut(words: npt.NDArray[np.object_], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """The labels between offsets as tuples, each label once."""
    everything = words.tolist()
    return _objects([tuple(dict.fromkeys(everything[start:end])) for start, end in pairwise(offsets.tolist())])


def _objects(sets: list[tuple[str, ...]]) -> npt.NDArray[np.object_]:
    """``(M,)`` object: NumPy would make a matrix of tuples of one length."""
    result = np.empty(len(sets), dtype=object)
    result[:] = sets
    return result


def _check_lengths(
    reader: Reader, lengths: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], name: str, what: str
) -> None:
    differs = lengths != np.diff(offsets)
    if differs.any():
        row = int(differs.argmax())
        rule = f"a file with one {'label' if what == 'labels' else 'list'} per element"
        got = f"{lengths[row]} {what} for {np.diff(offsets)[row]} elements"
        raise reader.wrong(got, row, name, rule, "correct the row, or remove it")


def _another() -> str:
    return f"name another with {columns_argument('label')}"
