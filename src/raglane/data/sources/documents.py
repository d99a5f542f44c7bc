"""JSON files of one object: of columns, of a list of rows, or as pandas writes tables.

``{"text": [...], "label": [...]}`` has a list per column; ``{"version": 1, "data": [{...}]}`` one
list of objects; pandas' ``to_json`` objects by column and row (``columns``, ``index``), or the keys
``columns`` and ``data`` (``split``), or ``schema`` and ``data`` (``table``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raglane._utils.messages import count_of, quote
from raglane.data.columns import Columns
from raglane.data.sources.files import data_error

_Row = dict[str, Any]


def is_document(lines: Sequence[str]) -> bool:
    """Return True if the first two lines of a file may be those of one object."""
    if not lines or not lines[0].lstrip().startswith("{"):
        return False
    if len(lines) == 1:
        return True
    try:
        json.JSONDecoder().raw_decode(lines[0].strip())
    except ValueError:
        return True
    return False


def rows_in(path: Path, text: str, columns: Columns) -> list[str] | None:
    """Return the rows of a file of one object, as JSON; None if the object is a row, or damaged.

    Raises:
        DataError: it is unclear which keys are those of rows.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        # The reader of lines names the place.
        return None
    is_line = path.suffix.lower() != ".json" and "\n" not in text.strip()
    if not isinstance(document, dict) or is_line:
        return None
    rows = _rows_of(path, document, columns)
    return None if rows is None else [json.dumps(row, ensure_ascii=False) for row in rows]


def _rows_of(path: Path, document: dict[str, Any], columns: Columns) -> list[_Row] | None:
    names = document.get("columns")
    data = document.get("data")
    if isinstance(names, list) and isinstance(data, list):
        return _split(path, list(map(str, names)), data)
    lists = [value for value in document.values() if _are_objects(value)]
    if len(lists) == 1 == sum(isinstance(value, list) for value in document.values()):
        return _without_numbers(document, lists[0])
    inner = [value for value in document.values() if isinstance(value, dict)]
    if len(inner) == 1 and not any(isinstance(value, list) for value in document.values()):
        return _rows_of(path, inner[0], columns)
    if inner and len(inner) == len(document):
        return _by_index(path, document)
    return _by_column(document, columns)


def _split(path: Path, names: list[str], data: list[Any]) -> list[_Row]:
    """Return the rows of lists whose columns are named apart."""
    odd = next((row for row in data if not isinstance(row, list) or len(row) != len(names)), None)
    if odd is not None:
        got = f"{quote(odd)} for {count_of(len(names), 'column')}"
        raise data_error(path, got, "a list of lists with an entry per column", "correct the row")
    return [dict(zip(names, row, strict=True)) for row in data]


def _without_numbers(document: dict[str, Any], rows: list[_Row]) -> list[_Row]:
    """Return rows without the number that pandas writes in each, if its schema says so."""
    schema = document.get("schema")
    keys = schema.get("primaryKey") if isinstance(schema, dict) else None
    if keys != ["index"]:
        return rows
    return [{key: row[key] for key in row if key != "index"} for row in rows]


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _by_index(path: Path, document: dict[str, dict[str, Any]]) -> list[_Row] | None:
    """Return the rows of an object of objects."""
    outer = list(document)
    inner = list(dict.fromkeys(key for value in document.values() for key in value))
    is_index = all(map(str.isdigit, outer))
    if is_index == all(map(str.isdigit, inner)):
        got = f"an object of objects, by {outer[0]!r} and {inner[0]!r}" if inner else "no rows"
        fix = 'write it with to_json(path, orient="records")'
        raise data_error(path, got, "an object whose rows are numbered", fix)
    if is_index:
        return list(document.values())
    return [{name: document[name].get(key) for name in outer} for key in inner]


def _by_column(document: dict[str, Any], columns: Columns) -> list[_Row] | None:
    """Return the rows of an object of lists of one length."""
    values = list(document.values())
    if not values or not all(isinstance(value, list) for value in values):
        return None
    sequence = document.get(columns.sequence or "")
    if sequence and all(isinstance(entry, (int, float)) for entry in sequence):
        # One sequence, for a model of such sequences.
        return None
    if len({len(value) for value in values}) != 1 or not values[0]:
        return None
    return [dict(zip(document, row, strict=True)) for row in zip(*values, strict=True)]
