"""Arrow columns: tests of their types, conversion of sequences and labels, and errors that name
their rows.

Numeric targets are one number per row, a list as long as the sequence (one per element), a list of
any other length that all rows share (several per sequence), or a list of lists (several per
element). Sets of labels are a text with ``;`` between the labels, a list of labels, or a list of
such lists as long as the sequence (one set per element).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import count_of, quote, require
from raglane.data.prepare.missing import how_to_fill
from raglane.data.records import Columns, Targets, as_float32, as_objects, offsets_of, place_of
from raglane.data.sources.files import columns_argument, data_error, takes_tokens
from raglane.data.splitting import split_texts
from raglane.errors import DataError, UnfitColumnError
from raglane.tasks import TASKS

# Sets of numbers are those of MIDI, such as the pitches of a chord. A fixed size gives all files
# the same channels.
SET_SIZE = 128

_Integers = npt.NDArray[np.int64]
_Labels = tuple[tuple[str, ...] | None, npt.NDArray[np.object_] | None, Targets | None]


def arrow_types() -> Any:
    """Return the module ``pyarrow.types``."""
    return require("pyarrow.types", "data")


def is_list(kind: Any) -> bool:
    """Return True for a type of lists."""
    types = arrow_types()
    tests = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    return any(test(kind) for test in tests)


def is_text(kind: Any) -> bool:
    """Return True for a type of texts, which may be a dictionary of them."""
    types = arrow_types()
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_number(kind: Any) -> bool:
    """Return True for a type of numbers or booleans."""
    types = arrow_types()
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
    )


def is_sequence(kind: Any) -> bool:
    """Return True for a type of lists of numbers, texts, nulls, or lists of numbers or nulls."""
    if not is_list(kind):
        return False
    inner = kind.value_type
    if is_list(inner):
        return is_number(inner.value_type) or bool(arrow_types().is_null(inner.value_type))
    return is_number(inner) or is_text(inner) or bool(arrow_types().is_null(inner))


def is_label(kind: Any) -> bool:
    """Return True for a type of classes: texts, integers or booleans."""
    return is_id(kind) or bool(arrow_types().is_boolean(kind))


def is_id(kind: Any) -> bool:
    """Return True for a type of ids: texts or integers."""
    return bool(is_text(kind) or arrow_types().is_integer(kind))


def _is_label_list(kind: Any) -> bool:
    return is_list(kind) and is_label(kind.value_type)


def _is_numeric(kind: Any, depth: int = 2) -> bool:
    return is_number(kind) or (
        depth > 0 and is_list(kind) and _is_numeric(kind.value_type, depth - 1)
    )


def _is_label_set(kind: Any) -> bool:
    return (
        is_text(kind) or _is_label_list(kind) or (is_list(kind) and _is_label_list(kind.value_type))
    )


def _is_label_sequence(kind: Any) -> bool:
    return is_text(kind) or _is_label_list(kind)


def _is_without_entries(kind: Any) -> bool:
    """Return True for the type of lists that are all empty, e.g. in a JSON file."""
    while is_list(kind):
        kind = kind.value_type
    return bool(arrow_types().is_null(kind))


def label_test(task: str) -> tuple[Callable[[Any], bool], str]:
    """Return the test of a type for the labels of a task, and its description."""
    if TASKS[task].label == "numbers":
        return _is_numeric, "column of numbers, or of lists of them"
    if TASKS[task].label == "set":
        return _is_label_set, "column of lists of labels, of lists of lists of them, or of texts"
    if TASKS[task].label == "sequence":
        return _is_label_sequence, "column of texts, or of lists of strings, integers or booleans"
    if TASKS[task].per == "element":
        return _is_label_list, "column of lists of strings, integers or booleans, one per element"
    return is_label, "column of strings, integers or booleans"


def label_kinds(kind: Any, task: str) -> tuple[str, ...]:
    """Return the kinds of labels of a type, as :func:`~raglane.data.records.kinds_of` names
    them.
    """
    while is_list(kind):
        kind = kind.value_type
    if not is_label(kind) or TASKS[task].label == "numbers":
        return ()
    return (
        ("texts",)
        if is_text(kind)
        else ("truth values",)
        if arrow_types().is_boolean(kind)
        else ("whole numbers",)
    )


class Reader(NamedTuple):
    """The table that is read: makes errors that name its rows."""

    path: Path
    ids: tuple[str | int, ...] | None
    lines: _Integers | None
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
        offsets: _Integers | None = None,
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
        return UnfitColumnError(
            f"{self.path}", f"{column.type} in column {quote(name)}", f"data with {rule}", fix
        )

    def category_error(self, column: Any, name: str) -> DataError:
        """Return the error for a column of a type that has no categories."""
        fix = f"convert it, or leave it out of {columns_argument('categorical')}"
        return self.type_error(column, name, "whole numbers or words as categories", fix)

    def check_nulls(self, column: Any, name: str, role: str) -> None:
        """Raise a DataError for the first null row of a column."""
        if column.null_count:
            fix = "fill it, or remove the row"
            raise self.entry_error(
                "a null", _first_null(column), name, f"a {role} in each row", fix
            )

    def check_inner_nulls(self, elements: Any, offsets: _Integers, name: str) -> None:
        """Raise a DataError for the first null element of a column of lists."""
        if elements.null_count:
            fix = f"fill it, remove the row, or write NaN and {how_to_fill()}"
            raise self.entry_error(
                "a null", _first_null(elements), name, "elements that are not null", fix, offsets
            )


def _first_null(column: Any) -> int:
    return int(column.is_null().to_numpy().argmax())


def as_texts(column: Any) -> Any:
    """Cast texts, integers or booleans to large strings."""
    if arrow_types().is_dictionary(column.type):
        # Arrow cannot look up string views, which Polars writes.
        column = column.cast(
            require("pyarrow", "data").dictionary(column.type.index_type, "large_string")
        )
    return column.cast("large_string")


def words_of(
    reader: Reader, column: Any, name: str, offsets: _Integers | None = None
) -> npt.NDArray[np.object_]:
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
            "a null", _first_null(texts), name, "values that are not null", "fill it", offsets
        )
    try:
        words: npt.NDArray[np.object_] = texts.to_numpy().astype(object)
    except (UnicodeDecodeError, require("pyarrow", "data").ArrowException) as error:
        raise _not_utf8(reader, texts, name, offsets) from error
    return words


def _not_utf8(reader: Reader, texts: Any, name: str, offsets: _Integers | None) -> DataError:
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


def explode(column: Any) -> tuple[_Integers, Any]:
    """Return the length of each list, ``(B,)``, and the elements of all lists as a chunked
    array.
    """
    arrow = require("pyarrow", "data")
    compute = require("pyarrow.compute", "data")
    lengths = compute.list_value_length(column).to_numpy().astype(np.int64)
    return lengths, arrow.chunked_array(
        [chunk.flatten() for chunk in column.chunks], type=column.type.value_type
    )


def numbers_of(entries: Any) -> npt.NDArray[np.float32]:
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


def sequences_of(
    reader: Reader, column: Any, name: str, columns: Columns
) -> tuple[npt.NDArray[Any], _Integers]:
    """Return the flat values of a sequence column, ``(N, C)`` float32 or ``(N,)`` tokens, and their
    offsets.
    """
    reader.check_nulls(column, name, "sequence")
    if is_text(column.type):
        return _split_texts(reader, column, name, columns.split)
    if not is_sequence(column.type):
        rule = "lists of numbers, lists of lists of numbers, lists of strings, or texts"
        raise reader.type_error(
            column, name, rule, f"name another with {columns_argument('sequence')}"
        )
    lengths, elements = explode(column)
    offsets = offsets_of(lengths)
    reader.check_inner_nulls(elements, offsets, name)
    if is_text(elements.type):
        return words_of(reader, elements, name, offsets), offsets
    types = arrow_types()
    if types.is_integer(elements.type) and takes_tokens(columns, name)[0]:
        return elements.cast("large_string").to_numpy().astype(object), offsets
    if not is_list(elements.type):
        if name in (columns.categorical or ()) and types.is_floating(elements.type):
            raise reader.category_error(column, name)
        return numbers_of(elements)[:, None], offsets
    kind = elements.type.value_type
    if name in (columns.categorical or ()) and (types.is_integer(kind) or types.is_null(kind)):
        return _multi_hot(reader, elements, name, offsets), offsets
    widths, entries = explode(elements)
    if len(widths) == 0:
        # All sequences are empty, so the number of channels is unknown.
        return np.zeros((0, 0), dtype=np.float32), offsets
    if (widths != widths[0]).any():
        odd = int((widths != widths[0]).argmax())
        got = count_of(widths[odd], "channel")
        after = f", after {count_of(widths[0], 'channel')}"
        rule = "the same number of channels in all steps"
        fix = "correct the row, or remove it"
        raise reader.entry_error(got, odd, name, rule, fix, offsets, after)
    if widths[0] == 0:
        fix = "write the empty sequence as an empty list"
        raise reader.entry_error(
            "no channel", 0, name, "at least one channel per step", fix, offsets
        )
    if entries.null_count:
        element, channel = divmod(_first_null(entries), int(widths[0]))
        row, step = place_of(offsets, element)
        got = f"a null in {reader.row(row)}, step {step}, channel {channel}, column {quote(name)}"
        raise reader.error(
            got, "elements that are not null", f"fill it, or write NaN and {how_to_fill()}"
        )
    return numbers_of(entries).reshape(len(widths), int(widths[0])), offsets


def are_sets(column: Any) -> bool:
    """Return True for lists of sets of whole numbers: their sizes differ, and no set has a number
    twice.
    """
    if not is_list(column.type) or not is_list(column.type.value_type) or column.null_count:
        return False
    _, elements = explode(column)
    if not arrow_types().is_integer(elements.type.value_type) or elements.null_count:
        return False
    widths, _ = explode(elements)
    return len(widths) > 0 and bool((widths != widths[0]).any()) and _not_in_set(elements) is None


def _not_in_set(elements: Any) -> int | None:
    """Return the first element that is no set of numbers below ``SET_SIZE``, or None."""
    widths, entries = explode(elements)
    owners = np.repeat(np.arange(len(widths)), widths)
    numbers = entries.cast("int64", safe=False).fill_null(-1).to_numpy()
    wrong = (numbers < 0) | (numbers >= SET_SIZE)
    _, places = np.unique(owners * SET_SIZE + numbers, return_index=True)
    wrong |= ~np.isin(np.arange(len(numbers)), places)
    return int(owners[wrong.argmax()]) if wrong.any() else None


def _multi_hot(
    reader: Reader, elements: Any, name: str, offsets: _Integers
) -> npt.NDArray[np.float32]:
    """Return sets of whole numbers as ``(N, SET_SIZE)`` float32: 1 for each number of a set."""
    widths, entries = explode(elements)
    odd = _not_in_set(elements)
    if odd is not None:
        rule = f"sets of different whole numbers from 0 to {SET_SIZE - 1}"
        fix = "correct the row, or remove it"
        raise reader.entry_error(quote(elements[odd].as_py()), odd, name, rule, fix, offsets)
    block = np.zeros((len(widths), SET_SIZE), dtype=np.float32)
    block[np.repeat(np.arange(len(widths)), widths), entries.cast("int64").to_numpy()] = 1
    return block


def _split_texts(
    reader: Reader, column: Any, name: str, split: str | None
) -> tuple[npt.NDArray[np.object_], _Integers]:
    """Split texts into tokens, by default at white space."""
    arrow = require("pyarrow", "data")
    compute = require("pyarrow.compute", "data")
    texts = as_texts(column)
    if split not in (None, "words"):
        tokens, counts = split_texts(words_of(reader, column, name).tolist(), split)
        return tokens, offsets_of(counts)
    try:
        lengths, elements = explode(compute.utf8_split_whitespace(texts))
        words = elements.to_numpy().astype(object)
    except (UnicodeDecodeError, arrow.ArrowException) as error:
        raise _not_utf8(reader, texts, name, None) from error
    # Arrow makes an empty token of white space at an end.
    kept = words != ""
    return words[kept], np.concatenate([[0], np.cumsum(kept)])[offsets_of(lengths)]


def labels_in(texts: list[str]) -> npt.NDArray[np.object_]:
    """Return the set of labels of each text, ``(M,)`` object; they are separated by semicolons."""
    parts = ((part.strip() for part in text.split(";")) for text in texts)
    return as_objects([tuple(dict.fromkeys(filter(None, labels))) for labels in parts])


def read_labels(
    reader: Reader, column: Any, name: str, offsets: _Integers, columns: Columns
) -> _Labels:
    """Read the labels of a task: classes per sequence, classes per element, or targets; the others
    are None.
    """
    task = columns.task
    if TASKS[task].label == "sequence":
        return None, None, _target_sequences(reader, column, name, columns)
    if TASKS[task].label == "numbers":
        return None, None, _numbers(reader, column, name, offsets)
    if TASKS[task].label == "set":
        return None, None, _sets(reader, column, name, offsets)
    if TASKS[task].per == "element":
        reader.check_nulls(column, name, "list of labels")
        if not is_list(column.type):
            raise _label_type_error(reader, column, name, "a list of labels, one per element")
        lengths, tags = explode(column)
        _check_lengths(reader, lengths, offsets, name, "labels")
        reader.check_inner_nulls(tags, offsets, name)
        return None, _classes(reader, tags, name, offsets), None
    reader.check_nulls(column, name, "label")
    return tuple(_classes(reader, column, name).tolist()), None, None


def _classes(
    reader: Reader, column: Any, name: str, offsets: _Integers | None = None
) -> npt.NDArray[np.object_]:
    """Convert labels as :func:`words_of` does; raise a DataError for the first empty one."""
    words = words_of(reader, column, name, offsets)
    if (blank := words == "").any():
        row = int(blank.argmax())
        rule = "a label in each place"
        raise reader.entry_error("an empty label", row, name, rule, "fill it", offsets)
    return words


def _label_type_error(reader: Reader, column: Any, name: str, rule: str) -> DataError:
    return reader.type_error(column, name, rule, f"name another with {columns_argument('label')}")


def _numbers(reader: Reader, column: Any, name: str, offsets: _Integers) -> Targets:
    """Read one or several numbers per sequence or per element."""
    reader.check_nulls(column, name, "number to learn")
    if not _is_numeric(column.type):
        raise _label_type_error(reader, column, name, "numbers, or lists of numbers")
    rows = np.arange(len(column))
    if not is_list(column.type):
        return _matrix(reader, column, name, 1, rows, False)
    lengths, entries = explode(column)
    per_element = bool((lengths == np.diff(offsets)).all())
    if is_list(entries.type):
        _check_lengths(reader, lengths, offsets, name, "lists of numbers")
        reader.check_inner_nulls(entries, offsets, name)
        lengths, entries = explode(entries)
        rows = np.repeat(rows, np.diff(offsets))
        per_element = True
    elif per_element:
        return _matrix(reader, entries, name, 1, np.repeat(rows, lengths), True)
    odd = lengths != (lengths[0] if len(lengths) else 0)
    if odd.any() or (len(lengths) and lengths[0] == 0):
        row = int(odd.argmax())
        rule = "one number per element, or the same number of them in each row"
        fix = "correct the row, or remove it"
        raise reader.entry_error(
            count_of(int(lengths[row]), "number"), int(rows[row]), name, rule, fix
        )
    width = int(lengths[0]) if len(lengths) else 1
    return _matrix(reader, entries, name, width, np.repeat(rows, lengths), per_element)


def _matrix(
    reader: Reader, entries: Any, name: str, width: int, rows: _Integers, per_element: bool
) -> Targets:
    """Return targets of ``width`` finite numbers; ``rows`` are the rows of the entries, for
    messages.
    """
    values = (
        entries.cast("double", safe=False).to_numpy()
        if entries.null_count == 0
        else entries.to_numpy()
    )
    values = np.asarray(values, dtype=np.float64)
    wrong = ~np.isfinite(values)
    if wrong.any():
        first = int(wrong.argmax())
        got = "a null" if entries.null_count else f"{values[first]}"
        fix = "fill it, or remove the row"
        raise reader.entry_error(got, int(rows[first]), name, "a finite number", fix)
    names = (name,) if width == 1 else tuple(f"{name}_{place}" for place in range(width))
    return Targets(values.reshape(-1, width), per_element=per_element, names=names)


def label_split_of(column: Any, columns: Columns) -> str | None:
    """Return the tokenization of target texts; None for other labels, and for lists, whose entries
    are the tokens.
    """
    is_split = TASKS[columns.task].label == "sequence" and is_text(column.type)
    return columns.label_split or "characters" if is_split else None


def _target_sequences(reader: Reader, column: Any, name: str, columns: Columns) -> Targets:
    """Read a sequence of labels per sequence: a list, or a text that is split."""
    reader.check_nulls(column, name, "target, empty for none,")
    if not (_is_label_sequence(column.type) or _is_without_entries(column.type)):
        raise _label_type_error(
            reader, column, name, "texts, or lists of strings, integers or booleans"
        )
    split = label_split_of(column, columns)
    if split is not None:
        return split_targets(words_of(reader, column, name).tolist(), split)
    lengths, entries = explode(column)
    offsets = offsets_of(lengths)
    reader.check_inner_nulls(entries, offsets, name)
    return Targets(_cut(words_of(reader, entries, name, offsets), offsets, tuple), ordered=True)


def split_targets(texts: list[str], split: str) -> Targets:
    """Return texts as sequences of labels."""
    words, lengths = split_texts(texts, split)
    return Targets(_cut(words, offsets_of(lengths), tuple), ordered=True)


def _sets(reader: Reader, column: Any, name: str, offsets: _Integers) -> Targets:
    """Read a set of labels per sequence or per element."""
    reader.check_nulls(column, name, "list of labels, [] for none,")
    if is_text(column.type):
        return Targets(labels_in(words_of(reader, column, name).tolist()))
    if not (_is_label_set(column.type) or _is_without_entries(column.type)):
        raise _label_type_error(
            reader, column, name, "a text with ; between labels, a list, or a list of lists"
        )
    lengths, entries = explode(column)
    starts = offsets_of(lengths)
    if not is_list(entries.type):
        reader.check_inner_nulls(entries, starts, name)
        return Targets(_cut(words_of(reader, entries, name, starts), starts, dict.fromkeys))
    _check_lengths(reader, lengths, offsets, name, "lists of labels")
    reader.check_inner_nulls(entries, offsets, name)
    lengths, entries = explode(entries)
    inner = offsets_of(lengths)
    if entries.null_count:
        row, _ = place_of(offsets, place_of(inner, _first_null(entries))[0])
        raise reader.entry_error("a null", row, name, "labels that are not null", "remove it")
    return Targets(_cut(words_of(reader, entries, name), inner, dict.fromkeys), per_element=True)


def _cut(
    words: npt.NDArray[np.object_],
    offsets: _Integers,
    collect: Callable[[list[str]], Iterable[str]],
) -> npt.NDArray[np.object_]:
    """Return the labels between offsets as tuples; ``collect`` keeps all of them, or each once."""
    labels = words.tolist()
    return as_objects(
        [tuple(collect(labels[start:end])) for start, end in pairwise(offsets.tolist())]
    )


def _check_lengths(
    reader: Reader, lengths: _Integers, offsets: _Integers, name: str, nouns: str
) -> None:
    """Raise a DataError for the first row whose list is not as long as its sequence."""
    differs = lengths != np.diff(offsets)
    if differs.any():
        row = int(differs.argmax())
        got = f"{lengths[row]} {nouns} for {np.diff(offsets)[row]} elements"
        raise reader.entry_error(
            got, row, name, f"equally many {nouns} and elements", "correct the row, or remove it"
        )
