"""JSON lines: an object a line, with a list, or a text, under one key and a label under another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from raglane.data.formats.base import data_error, has_utf8, read_bytes
from raglane.data.formats.table import choose, records_of
from raglane.data.records import Columns, Records
from raglane.errors import DataError, require

__all__ = ["read"]


def read(path: Path, columns: Columns) -> Records:
    """Read a file of JSON lines.

    Args:
        path: the file; blank lines are skipped.
        columns: which keys hold what, and the task; see :mod:`raglane.data.formats.table` for what is guessed.

    Raises:
        DataError: a line is no JSON object, has no such key, or breaks a rule; the message names the line.
        MissingExtraError: pyarrow is not installed.
    """
    arrow = require("pyarrow", "data")
    rows, lines = _rows(path)
    names = dict.fromkeys(name for row in rows for name in row)
    table: dict[str, Any] = {}
    for name in names:
        cells = [row.get(name) for row in rows]
        try:
            table[name] = arrow.array(cells)
        except (arrow.ArrowException, OverflowError, TypeError) as error:
            # Of a column that nobody asks for nothing is expected.
            asked = (columns.sequence, columns.label, columns.id)
            guessing = columns.sequence is None or (columns.label is None and columns.wants_labels)
            if guessing or name in asked:
                raise _mixed(path, name, cells, lines) from error
    table_of_all = arrow.table(table)
    chosen = choose(path, table_of_all.schema, columns)
    return records_of(path, table_of_all.select(chosen.names), chosen, columns, lines=np.array(lines))


def _rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects, and the number of each one's line, from 1."""
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, line in enumerate(read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise data_error(path, "bytes that are not UTF-8", "JSON is UTF-8", "convert it", number) from error
        except (json.JSONDecodeError, RecursionError) as error:
            detail = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            got = f"bad JSON ({detail})"
            raise data_error(path, got, "one JSON object a line", "correct the line", number) from error
        if not isinstance(row, dict):
            got = f"a JSON {_kind(row)}"
            raise data_error(path, got, "one JSON object a line", 'write {"values": [...], ...}', number)
        # Only these bytes, an escape or half a pair written out, can give what UTF-8 has not.
        if (b"\\u" in line or b"\xed" in line) and not has_utf8(json.dumps(row, ensure_ascii=False)):
            got = "half a surrogate pair, which is no character"
            raise data_error(path, got, "a text is Unicode characters", "correct the line", number)
        rows.append(row)
        lines.append(number)
    return rows, lines


def _kind(cell: Any) -> str:
    """What a JSON value is, for comparison and for messages."""
    if isinstance(cell, list):
        inner = sorted({_kind(entry) for entry in cell} - {"null", "list"})
        return f"list of {' and '.join(inner)}" if inner else "list"
    if isinstance(cell, bool):
        return "boolean"
    for kind, name in (((int, float), "number"), (str, "string"), (dict, "object")):
        if isinstance(cell, kind):
            return name
    return "null"


def _mixed(path: Path, name: str, cells: list[Any], lines: list[int]) -> DataError:
    """The error for a column whose cells are not all of one kind; names the first that is not like the others."""
    rule = "the values of a column are of one kind: all numbers, or all strings, equally deep in lists"
    fix = "write them alike, or name the columns to use with --sequence-column and --label-column"
    first: str | None = None
    for cell, line in zip(cells, lines, strict=True):
        kind = _kind(cell)
        if " and " in kind:
            return data_error(path, f"a {kind} as {name!r}", rule, fix, line)
        if kind in ("null", "list"):
            continue
        if first is not None and kind != first:
            return data_error(path, f"a {kind} as {name!r}, after a {first}", rule, fix, line)
        first = kind
    return data_error(path, f"values of several kinds, or too large, as {name!r}", rule, fix)
