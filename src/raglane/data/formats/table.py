"""Sequences and labels out of Arrow columns: what Parquet and JSON lines share.

A sequence is an entry of one column: a list of numbers (one channel), a list of lists of numbers (steps of channels), a
list of strings (tokens), or a text, which is split on white space into tokens. A label is a string, an integer or a
boolean (``"true"``, ``"false"``); for tagging, a list of these as long as the sequence. What a column holds is moved
as a whole, without a loop over its elements.

Where no column is named, the sequence column is the only list column, or if there is none the only text column; the
label column is the only other column of labels. A column called ``id`` (or ``sequence_id``, ...) holds the ids.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import choose_column, columns_argument, count_of, data_error, id_column, named_column
from raglane.data.missing import how_to_fill
from raglane.data.records import Columns, Records, offsets_of, place_of
from raglane.errors import DataError, quote, require

__all__ = ["Chosen", "choose", "records_of"]


@dataclass(frozen=True)
class Chosen:
    """The columns to read, and how they were found."""

    sequence: str
    label: str | None
    id: str | None
    notes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """Each column once, in no special order."""
        return list({name: None for name in (self.sequence, self.label, self.id) if name is not None})


def choose(path: Path, schema: Any, columns: Columns) -> Chosen:
    """Settle which columns to read.

    Args:
        path: the file, for messages.
        schema: a ``pyarrow.Schema``.
        columns: the names the user gave.

    Raises:
        DataError: a named column is not there, or none is named and there is not exactly one candidate.
    """
    # pandas stores the index of a table as a column of this name; it is nobody's label.
    fields = [field for field in schema if not field.name.startswith("__index_level_")]
    kinds = {field.name: field.type for field in fields}
    present = list(kinds)
    if len(present) < len(fields):
        counts = Counter(field.name for field in fields)
        twice = next(name for name in present if counts[name] > 1)
        raise data_error(path, f"two columns {quote(twice)}", "a column's name is its own", "rename one")
    if columns.time in kinds:
        got = f"the time column {quote(columns.time)}"
        rule = "a row is a whole sequence, its elements in their order; no column sorts them"
        raise data_error(path, got, rule, f"sort the lists before, and leave {columns_argument('time')} out")
    notes: list[str] = []
    id_name, id_notes = id_column(path, columns, present, [name for name in present if _is_id(kinds[name])])
    if columns.sequence is not None:
        sequence = named_column(path, "sequence", columns.sequence, present)
    else:
        free = [name for name in present if name not in (id_name, columns.label)]
        candidates = [name for name in free if _is_sequence(kinds[name])]
        candidates = candidates or [name for name in free if _is_text(kinds[name])]
        kind = "column of lists of numbers, of lists of lists of numbers, of lists of strings, or of texts"
        sequence, note = choose_column(path, "sequence", candidates, kind, present)
        notes.append(note)
    if _is_text(kinds[sequence]):
        notes.append(f"the texts of {quote(sequence)} are split on white space into tokens")
    label, label_notes = _choose_label(path, kinds, columns, {sequence, id_name})
    return Chosen(sequence, label, id_name, (*notes, *label_notes, *id_notes))


def _choose_label(
    path: Path, kinds: dict[str, Any], columns: Columns, taken: set[str | None]
) -> tuple[str | None, tuple[str, ...]]:
    """The label column, if it is to be read, and the notes."""
    if not columns.wants_labels:
        return None, ()
    if columns.label is not None:
        return named_column(path, "label", columns.label, kinds), ()
    fits, kind = _is_label, "column of strings, integers or booleans"
    if columns.task == "tag":
        fits, kind = _is_label_list, "column of lists of strings, integers or booleans, one per element"
    candidates = [name for name in kinds if name not in taken and fits(kinds[name])]
    label, note = choose_column(path, "label", candidates, kind, kinds)
    return label, (note,)


def _types() -> Any:
    return require("pyarrow.types", "data")


def _is_list(kind: Any) -> bool:
    types = _types()
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def _is_text(kind: Any) -> bool:
    types = _types()
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_number(kind: Any) -> bool:
    types = _types()
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind))


def _is_sequence(kind: Any) -> bool:
    """Whether this is a list column: of numbers, lists of numbers or strings, or of nothing where all are empty."""
    if not _is_list(kind):
        return False
    inner = kind.value_type
    return (
        _is_number(inner)
        or _is_text(inner)
        or _types().is_null(inner)
        or (_is_list(inner) and (_is_number(inner.value_type) or _types().is_null(inner.value_type)))
    )


def _is_label(kind: Any) -> bool:
    return _is_id(kind) or bool(_types().is_boolean(kind))


def _is_id(kind: Any) -> bool:
    return bool(_is_text(kind) or _types().is_integer(kind))


def _is_label_list(kind: Any) -> bool:
    return _is_list(kind) and _is_label(kind.value_type)


@dataclass(frozen=True)
class _Reader:
    """A table that is being read, and how its rows are called in messages."""

    path: Path
    ids: tuple[str | int, ...] | None
    lines: npt.NDArray[np.int64] | None
    first: int = 0

    def row(self, row: int) -> str:
        """A row in words: its number from 0, its id and its line."""
        details = [] if self.ids is None else [f"id {quote(self.ids[row])}"]
        details += [] if self.lines is None else [f"line {self.lines[row]}"]
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


def records_of(
    path: Path,
    table: Any,
    chosen: Chosen,
    columns: Columns,
    lines: npt.NDArray[np.int64] | None = None,
    first: int = 0,
) -> Records:
    """Turn the chosen columns of a table into records.

    Args:
        path: where the table came from.
        table: a ``pyarrow.Table`` with the chosen columns.
        chosen: from :func:`choose`.
        columns: for the task.
        lines: ``(B,)``, the line of the file that each row came from, for messages; None where there are no lines.
        first: the number of the table's first row in its file, for messages.

    Raises:
        DataError: a null, a type that is not a sequence or not a label, or steps of different numbers of channels.
    """
    if table.num_rows == 0:
        raise data_error(path, "no rows", "it must hold at least one sequence", "check the file")
    ids = None if chosen.id is None else _ids(_Reader(path, None, lines, first), table.column(chosen.id), chosen.id)
    reader = _Reader(path, ids, lines, first)
    values, offsets = _sequences(reader, table.column(chosen.sequence), chosen.sequence)
    labels, tags = None, None
    if chosen.label is not None and columns.task == "tag":
        tags = _tags(reader, table.column(chosen.label), chosen.label, offsets)
    elif chosen.label is not None:
        column = table.column(chosen.label)
        reader.refuse_nulls(column, chosen.label, "label")
        labels = tuple(_words(reader, column, chosen.label).tolist())
    width = values.shape[1] if values.ndim == 2 else 0
    channels = tuple(f"x{channel}" for channel in range(width))
    # A guessed id column is not asked for again: another file may do without ids.
    found = replace(columns, sequence=chosen.sequence, label=chosen.label or columns.label)
    return Records(values, offsets, ids, labels, tags, channels, path, chosen.notes, found)


def _ids(reader: _Reader, column: Any, name: str) -> tuple[str | int, ...]:
    """The ids: integers, or strings."""
    reader.refuse_nulls(column, name, "id")
    if _types().is_integer(column.type):
        return tuple(column.to_pylist())
    return tuple(_words(reader, column, name).tolist())


def _words(
    reader: _Reader, column: Any, name: str, offsets: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.object_]:
    """A column of labels or tokens, without nulls, as ``(M,)`` str; ``offsets`` where they are elements of rows."""
    if not _is_label(column.type):
        rule = "strings, integers or booleans"
        raise reader.error(f"{column.type} in column {quote(name)}", rule, "convert the column, or name another")
    texts = column.cast("large_string")
    try:
        words: npt.NDArray[np.object_] = texts.to_numpy().astype(object)
    except (UnicodeDecodeError, require("pyarrow", "data").ArrowException) as error:
        raise _not_utf8(reader, texts, name, offsets) from error
    return words


def _not_utf8(reader: _Reader, texts: Any, name: str, offsets: npt.NDArray[np.int64] | None) -> DataError:
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


def _explode(column: Any) -> tuple[npt.NDArray[np.int64], Any]:
    """The length of each list, ``(B,)`` int64, and the elements of all, as a chunked array."""
    arrow, compute = require("pyarrow", "data"), require("pyarrow.compute", "data")
    lengths = compute.list_value_length(column).to_numpy().astype(np.int64)
    parts = [chunk.flatten() for chunk in column.chunks]
    return lengths, arrow.chunked_array(parts, type=column.type.value_type)


def _sequences(reader: _Reader, column: Any, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The flat values of a sequence column, and their offsets."""
    reader.refuse_nulls(column, name, "sequence")
    if _is_text(column.type):
        return _split_texts(reader, column, name)
    if not _is_sequence(column.type):
        rule = "lists of numbers, lists of lists of numbers, lists of strings, or texts"
        raise reader.error(
            f"{column.type} in column {quote(name)}", rule, f"name another with {columns_argument('sequence')}"
        )
    lengths, elements = _explode(column)
    offsets = offsets_of(lengths)
    reader.refuse_inner_nulls(elements, offsets, name)
    if _is_text(elements.type):
        return _words(reader, elements, name, offsets), offsets
    if not _is_list(elements.type):
        return _numbers(elements)[:, None], offsets
    widths, entries = _explode(elements)
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
    return _numbers(entries).reshape(len(widths), int(widths[0])), offsets


def _numbers(entries: Any) -> npt.NDArray[np.float32]:
    """Numbers without nulls as ``(M,)`` float32: no copy where they are float32 in one chunk."""
    types = _types()
    if types.is_decimal(entries.type) or types.is_boolean(entries.type) or types.is_null(entries.type):
        entries = entries.cast("double" if types.is_decimal(entries.type) else "float")
    numbers = entries.chunk(0).to_numpy() if entries.num_chunks == 1 else entries.to_numpy()
    # A number that float32 cannot hold becomes infinite, and is then reported or filled as missing.
    with np.errstate(over="ignore"):
        floats: npt.NDArray[np.float32] = numbers.astype(np.float32, copy=False)
    return floats


def _split_texts(reader: _Reader, column: Any, name: str) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.int64]]:
    """Cut texts into tokens at white space; a text of white space alone has none."""
    arrow, compute = require("pyarrow", "data"), require("pyarrow.compute", "data")
    texts = compute.cast(column, "large_string")
    try:
        lengths, tokens = _explode(compute.utf8_split_whitespace(texts))
        words = tokens.to_numpy().astype(object)
    except (UnicodeDecodeError, arrow.ArrowException) as error:
        raise _not_utf8(reader, texts, name, None) from error
    # White space at an end leaves an empty token there.
    kept = words != ""
    before = np.concatenate([[0], np.cumsum(kept)])
    return words[kept], before[offsets_of(lengths)]


def _tags(reader: _Reader, column: Any, name: str, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """The labels of the elements, ``(N,)`` str."""
    reader.refuse_nulls(column, name, "list of labels")
    if not _is_list(column.type):
        rule = "tagging needs a list of labels, one per element"
        raise reader.error(
            f"{column.type} in column {quote(name)}", rule, f"name another with {columns_argument('label')}"
        )
    lengths, tags = _explode(column)
    differs = lengths != np.diff(offsets)
    if differs.any():
        row = int(differs.argmax())
        got = f"{lengths[row]} labels for {np.diff(offsets)[row]} elements in {reader.row(row)}, column {quote(name)}"
        raise reader.error(got, "one label per element", "correct the row, or remove it")
    reader.refuse_inner_nulls(tags, offsets, name)
    return _words(reader, tags, name, offsets)
