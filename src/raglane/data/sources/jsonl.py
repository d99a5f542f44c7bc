"""JSON lines, an array in JSON, or one object with all rows: objects with a list or a text under one
key, and a label under another.

Numbers are those of Python's ``json``. Errors are: a whole number beyond 64 bits (write ``1e30``,
or a string for a name), lists or objects nested more deeply than a sequence can be, and a key that
occurs twice in an object. ``NaN``, ``Infinity`` and ``-Infinity``, which many programs write, and
numbers too large for a float, such as ``1e999``, are missing values.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.messages import quote, require
from raglane.data.columns import Columns, option
from raglane.data.sources.documents import is_document, rows_in
from raglane.data.sources.files import data_error, decode, has_utf8, read_bytes
from raglane.data.sources.lines import Line, Start, lines_of
from raglane.data.sources.table import SourceTable, whole_table
from raglane.errors import DataError

# Maximum nesting. Sequences are at most lists of lists; unused keys may have deeper values.
_DEEPEST = 32

# In a large table, at least one entry in _SPARSE must be present; a table of up to _SMALL entries
# may be empty.
_SPARSE, _SMALL = 20, 10_000_000

_SPACE = re.compile(r"\s*")
# Finds the ends of objects; numbers are parsed later.
_SCANNER = json.JSONDecoder(parse_int=str, parse_float=str)

_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


class _TwiceError(ValueError):
    """A key that occurs twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; raise for repeated keys, of which Python would silently keep the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _TwiceError(next(name for name in row if counts[name] > 1))
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def table(path: Path, columns: Columns) -> SourceTable:
    """Return the columns of a file, one per key."""
    text = decode(path, read_bytes(path))
    is_array = text.lstrip().startswith("[")
    rows = _array(path, text) if is_array else _objects(path, text, columns)
    return table_of_lines(path, [(number, row) for number, row in rows if row.strip()])


def _objects(path: Path, text: str, columns: Columns) -> Iterator[tuple[int, str]]:
    """Yield the rows of one object, numbered from 1, or the lines."""
    lines = text.split("\n")
    first = list(islice(filter(str.strip, lines), 2))
    rows = rows_in(path, text, columns) if is_document(first) else None
    return enumerate(lines if rows is None else rows, 1)


def rows_of(path: Path, columns: Columns, start: Start = ()) -> Iterator[Line]:
    """Yield the lines with an object, or the entries of an array or of one object."""
    first = [line.content.decode(errors="replace") for line in islice(lines_of(path), 2)]
    rows: Iterator[tuple[int, str]] | None = None
    if first and first[0].lstrip().startswith("["):
        rows = _array(path, decode(path, read_bytes(path)))
    elif is_document(first) and (texts := rows_in(path, decode(path, read_bytes(path)), columns)):
        rows = enumerate(texts, 1)
    if rows is None:
        return lines_of(path, start)
    return (
        Line(number, row.encode(), end)
        for end, (number, row) in enumerate(rows, 1)
        if not start or end > start[0]
    )


def _array(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the text of each entry of an array in JSON, with the number of its line."""
    end = text.index("[")
    line = 1
    counted = 0
    try:
        while text[end] != "]":
            start = _blank(text, end + 1)
            if text[end] == "[" and text[start : start + 1] == "]":
                raise data_error(
                    path, "an empty array", "an array with at least one object", "check the file"
                )
            line = line + text.count("\n", counted, start)
            counted = start
            _, stop = _SCANNER.raw_decode(text, start)
            yield line, text[start:stop]
            end = _blank(text, stop)
            if text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
        if (rest := _blank(text, end + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, rest)
    except json.JSONDecodeError as error:
        raise data_error(
            path,
            f"bad JSON ({error.msg})",
            "an array of objects, or one object per line",
            "correct it",
            error.lineno,
        ) from error
    except RecursionError as error:
        raise _too_deep(path, line) from error


def _blank(text: str, place: int) -> int:
    """Return the place of the first character that is not white space."""
    match = _SPACE.match(text, place)
    return place if match is None else match.end()


def table_of_lines(
    path: Path, texts: Sequence[tuple[int, str]], required: Sequence[str] = ()
) -> SourceTable:
    """Return numbered lines as a table, with a column per key and required name."""
    arrow = require("pyarrow", "data")
    rows = []
    for number, line in texts:
        row = row_of(path, line.strip(), number)
        if isinstance(row, DataError):
            raise row
        rows.append(row)
    lines = [number for number, _ in texts]
    names = list(dict.fromkeys([*required, *(name for row in rows for name in row)]))
    _check_sparse(path, rows, names)
    columns: dict[str, Any] = {}
    unread: dict[str, DataError] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(_innermost(value), dict) for value in values):
            # Objects are ignored: no sequence is made of them, and a column per key might exceed
            # the memory.
            columns[name] = arrow.array([{}] * len(values), arrow.struct([]))
            continue
        try:
            columns[name] = arrow.array(values)
        except (arrow.ArrowException, OverflowError, TypeError) as error:
            unread[name] = _caused(_mixed(path, name, values, lines), error)
    content = arrow.table(columns)
    return whole_table(path, content, lines=np.array(lines), unread=unread)


def row_of(path: Path, line: str, number: int) -> dict[str, Any] | DataError:
    """Parse the object of a line; return the error of a line that has none."""
    try:
        row = _DECODER.decode(line)
        if _is_deep(row):
            raise RecursionError
        # Since the file is UTF-8, only escapes can write half a surrogate pair.
        is_whole = not _HALF_A_PAIR.search(line) or has_utf8(json.dumps(row, ensure_ascii=False))
    except _TwiceError as error:
        got = f"the key {quote(str(error))} twice"
        rule = "an object with different keys"
        return _caused(data_error(path, got, rule, "remove one of them", number), error)
    except json.JSONDecodeError as error:
        got = f"bad JSON ({error.msg} at character {error.pos + 1})"
        return _caused(data_error(path, got, "a JSON object", "correct the line", number), error)
    except RecursionError as error:
        return _caused(_too_deep(path, number), error)
    except ValueError as error:
        # Python does not parse integers of thousands of digits.
        too_large = _too_large(path, "a whole number of thousands of digits", number)
        return _caused(too_large, error)
    if not is_whole:
        got = "half a surrogate pair, which is not a character"
        return data_error(path, got, "a text of Unicode characters", "correct the line", number)
    if not isinstance(row, dict):
        rule = "one JSON object per line"
        fix = 'write {"values": [...], ...}'
        return data_error(path, f"a JSON {_kind(row)}", rule, fix, number)
    return row


def _caused(error: DataError, cause: Exception) -> DataError:
    error.__cause__ = cause
    return error


def _too_deep(path: Path, number: int) -> DataError:
    got = f"bad JSON (brackets in brackets, more than {_DEEPEST} deep)"
    return data_error(path, got, "a list, or a list of lists", "correct the line", number)


def _is_deep(row: Any) -> bool:
    """Return True if lists and objects are nested more deeply than ``_DEEPEST``.

    Lists that begin with a number or a text are skipped: a list in one of them is an error anyway.
    """
    level = [row]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [entry for entry in value.values() if isinstance(entry, (dict, list))]
            elif isinstance(value, list) and not (
                value and isinstance(value[0], (int, float, str))
            ):
                inner += [entry for entry in value if isinstance(entry, (dict, list))]
        if not inner:
            return False
        level = inner
    return True


def _innermost(value: Any) -> Any:
    """Return the first value in nested lists that is neither null nor a list, or None."""
    while isinstance(value, list):
        value = next((entry for entry in value if entry is not None), None)
    return value


def _check_sparse(path: Path, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Raise a DataError if the keys differ so much between lines that most entries of the table
    would be null.
    """
    size = len(rows) * len(names)
    if size > _SMALL and size > _SPARSE * sum(map(len, rows)):
        got = f"{len(names):,} different keys in {len(rows):,} lines, most of them in few lines"
        fix = "put variable data into a list, or leave it out"
        raise data_error(path, got, "a file of lines with the same keys", fix)


def _kind(value: Any, depth: int = _DEEPEST) -> str:
    """Return the JSON type of a value, with the types in a list."""
    if isinstance(value, list):
        inner = (
            sorted({_kind(entry, depth - 1) for entry in value} - {"null", "list"})
            if depth
            else ["lists"]
        )
        return f"list of {' and '.join(inner)}" if inner else "list"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in (((int, float), "number"), (str, "string"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def _has_large(value: Any, most: int, depth: int = _DEEPEST) -> bool:
    """Return True if a value contains a whole number beyond ``most``."""
    if isinstance(value, list):
        return depth > 0 and any(_has_large(entry, most, depth - 1) for entry in value)
    return isinstance(value, int) and not -most <= value < most


def _too_large(path: Path, got: str, line: int) -> DataError:
    return data_error(
        path, got, "a whole number of at most 64 bits", "write it as 1e30, or as a string", line
    )


def _mixed(path: Path, name: str, values: list[Any], lines: list[int]) -> DataError:
    """Return the error for a column of several types, with the first value that differs."""
    rule = "a file whose keys have only numbers, or only strings, in equally nested lists"
    names = f"{option('sequence')} and {option('label')}"
    fix = f"use one type per key, or name the columns to use with {names}"
    first: str | None = None
    for value, line in zip(values, lines, strict=True):
        kind = _kind(value)
        if _has_large(value, 2**63):
            return _too_large(path, f"a whole number that is too large as {quote(name)}", line)
        if " and " in kind:
            return data_error(path, f"a {kind} as {quote(name)}", rule, fix, line)
        if kind in ("null", "list"):
            continue
        if first is not None and kind != first:
            return data_error(path, f"a {kind} as {quote(name)}, after a {first}", rule, fix, line)
        first = kind
    for value, line in zip(values, lines, strict=True):
        if _has_large(value, 2**53):
            got = f"a whole number beyond 2**53 among fractions as {quote(name)}"
            return data_error(
                path, got, "at most 2**53, to be exact as a float", "write it as a float", line
            )
    return data_error(path, f"values of several types as {quote(name)}", rule, fix)
