"""JSON lines: one object per line, with a list, or a text, under one key and a label under another.

Numbers are what Python's ``json`` reads, with three exceptions, each refused with its line: a whole number beyond 64
bits, which a column cannot hold (write ``1e30``, or a string where it is a name); lists or objects nested more deeply
than anything that is a sequence; and a key that comes twice in an object. ``NaN``, ``Infinity`` and ``-Infinity``,
which JSON does not have but many programs write, are missing values, and so is a number such as ``1e999`` that is too
large for a float.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import quote, require
from raglane.data.formats.base import columns_argument, data_error, decode, has_utf8, read_bytes
from raglane.data.formats.pieces import Line, Piece, Start, line_pieces, lines_of
from raglane.data.formats.table import Chosen, choose, records_of
from raglane.data.records import Columns, Records
from raglane.errors import DataError

# Lists of lists of numbers are the deepest that a sequence can be; objects are of no use, but may stand beside it.
_DEEPEST = 32

# Of a column for each key, the share that the lines must fill, where it is much at all.
_SPARSE, _MUCH = 20, 10_000_000

_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def read(path: Path, columns: Columns) -> Records:
    """Read a file of JSON lines."""
    texts = decode(path, read_bytes(path)).split("\n")
    table, lines = _table(path, [(number, text) for number, text in enumerate(texts, 1) if text.strip()], columns)
    chosen = choose(path, table.schema, columns)
    return records_of(path, table.select(chosen.names), chosen, columns, lines)


def pieces(path: Path, columns: Columns, start: Start = ()) -> Iterator[Piece]:
    """The same piece by piece; a piece begins at a byte, in a line. The first lines say which columns are read."""
    known: list[Chosen] = []

    def records(lines: Sequence[Line]) -> Records:
        texts = [(line.number, decode(path, line.content, line.number)) for line in lines]
        table, numbers = _table(path, texts, columns, known[0].names if known else ())
        chosen = known[0] if known else choose(path, table.schema, columns)
        found = records_of(path, table.select(chosen.names), chosen, columns, numbers, first=None)
        known.append(chosen)
        # A guessed id is asked for again too, so that all lines have one.
        return replace(found, columns=replace(found.columns, id=chosen.id))

    yield from line_pieces(lines_of(path, start), records, lambda line: (line.end, line.number + 1))


def _table(
    path: Path, texts: Sequence[tuple[int, str]], columns: Columns, known: Sequence[str] = ()
) -> tuple[Any, npt.NDArray[np.int64]]:
    """Lines as a ``pyarrow.Table``, a column for each key and each known name, and the number of each row's line."""
    arrow = require("pyarrow", "data")
    rows, lines = _rows(path, texts)
    names = list(dict.fromkeys([*known, *(name for row in rows for name in row)]))
    _refuse_sparse(path, rows, names)
    table: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(_innermost(value), dict) for value in values):
            # Nothing can be read from objects, and a column for each of their keys may be more than memory holds.
            table[name] = arrow.array([{}] * len(values), arrow.struct([]))
            continue
        try:
            table[name] = arrow.array(values)
        except (arrow.ArrowException, OverflowError, TypeError) as error:
            # Nothing is expected of a column that nobody asks for.
            named = (*(columns.features or ()), *(columns.static or ()))
            asked = (columns.sequence, columns.label, columns.id, *named, *known)
            guessing = not known and (columns.sequence is None or (columns.label is None and columns.wants_labels))
            if guessing or name in asked:
                raise _mixed(path, name, values, lines) from error
    return arrow.table(table), np.array(lines)


def _rows(path: Path, texts: Sequence[tuple[int, str]]) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects, and the number of each one's line, from 1."""
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    for number, line in texts:
        row = _row(path, decoder, line.strip(), number)
        if not isinstance(row, dict):
            got = f"a JSON {_kind(row)}"
            raise data_error(path, got, "a JSON object", 'write {"values": [...], ...}', number)
        rows.append(row)
        lines.append(number)
    return rows, lines


class _TwiceError(ValueError):
    """A key that comes twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; by itself, Python keeps the last value of a key without a word."""
    row = dict(pairs)
    if len(row) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _TwiceError(next(name for name in row if counts[name] > 1))
    return row


def _row(path: Path, decoder: json.JSONDecoder, line: str, number: int) -> Any:
    try:
        row = decoder.decode(line)
        if _is_deep(row):
            raise RecursionError
        # Only an escape can give half a pair, since the file is UTF-8.
        is_whole = not _HALF_A_PAIR.search(line) or has_utf8(json.dumps(row, ensure_ascii=False))
    except _TwiceError as error:
        got = f"the key {quote(str(error))} twice"
        raise data_error(path, got, "an object with each key once", "remove one of them", number) from error
    except json.JSONDecodeError as error:
        got = f"bad JSON ({error.msg} at character {error.pos + 1})"
        raise data_error(path, got, "a JSON object", "correct the line", number) from error
    except RecursionError as error:
        got = f"bad JSON (brackets in brackets, more than {_DEEPEST} deep)"
        raise data_error(
            path, got, "an object whose sequence is a list, or a list of lists", "correct the line", number
        ) from error
    except ValueError as error:
        # Python turns no more than some thousands of digits into a number.
        raise _too_large(path, "a whole number of thousands of digits", number) from error
    if not is_whole:
        got = "half a surrogate pair, which is not a character"
        raise data_error(path, got, "text of Unicode characters", "correct the line", number)
    return row


def _is_deep(row: Any) -> bool:
    """Whether lists and objects stand in each other more deeply than anything that is read.

    A list that begins with a number or a text is not looked through: with a list in it, it is refused anyway.
    """
    level = [row]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [entry for entry in value.values() if isinstance(entry, (dict, list))]
            elif isinstance(value, list) and not (value and isinstance(value[0], (int, float, str))):
                inner += [entry for entry in value if isinstance(entry, (dict, list))]
        if not inner:
            return False
        level = inner
    return True


def _innermost(value: Any) -> Any:
    """The first value in a list, or the value itself, that is neither null nor a list; None where there is none."""
    while isinstance(value, list):
        value = next((entry for entry in value if entry is not None), None)
    return value


def _refuse_sparse(path: Path, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Raise where the lines have so many different keys that a table of them would be mostly holes."""
    room = len(rows) * len(names)
    if room > _MUCH and room > _SPARSE * sum(map(len, rows)):
        got = f"{len(names):,} different keys in {len(rows):,} lines, most of them in few lines"
        raise data_error(
            path, got, "a file whose lines have the same keys", "put varying entries into a list, or leave them out"
        )


def _kind(value: Any, room: int = _DEEPEST) -> str:
    """What a JSON value is, for comparison and for messages."""
    if isinstance(value, list):
        inner = sorted({_kind(entry, room - 1) for entry in value} - {"null", "list"}) if room else ["lists"]
        return f"list of {' and '.join(inner)}" if inner else "list"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in (((int, float), "number"), (str, "string"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def _has_large(value: Any, most: int, room: int = _DEEPEST) -> bool:
    """Whether a whole number beyond ``most`` is in a value."""
    if isinstance(value, list):
        return room > 0 and any(_has_large(entry, most, room - 1) for entry in value)
    return isinstance(value, int) and not -most <= value < most


def _too_large(path: Path, got: str, line: int) -> DataError:
    return data_error(path, got, "an object of integers that fit 64 bits", "write it as 1e30, or as a string", line)


def _mixed(path: Path, name: str, values: list[Any], lines: list[int]) -> DataError:
    """The error for a column whose values are not all of one kind; names the first that is not like the others."""
    rule = "a file whose columns have values of one kind: only numbers, or only strings, in equally nested lists"
    names = f"{columns_argument('sequence')} and {columns_argument('label')}"
    fix = f"convert the values, or name the columns to use with {names}"
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
                path, got, "an object of integers up to 2**53 in a column of floats", "write it as a float", line
            )
    return data_error(path, f"values of several kinds as {quote(name)}", rule, fix)
