"""From what a user names, a path or a table, to the parts of a dataset."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raglane.data.formats import FORMATS, pick, read
from raglane.data.formats.ipc import is_converted, slices, table_of, with_names
from raglane.data.formats.table import choose
from raglane.data.layout import check_labels
from raglane.data.locations import expand, is_url, local
from raglane.data.parts import Memory, Store, Tables
from raglane.data.records import Columns
from raglane.data.stores import Groups, Shards
from raglane.errors import ArgumentError, ArgumentTypeError, DataError, argument, message, quote, require

__all__ = ["stores_of"]


def stores_of(source: Any, columns: Columns | None, format: str | None) -> tuple[list[Store], Columns]:
    """Where the parts of a dataset come from, and the columns that are read."""
    require("pyarrow", "data")
    if not _names_files(source):
        asked = columns or Columns()
        store = _of_table(Path(type(source).__name__), _table(source), asked)
        return [store], asked
    stores: list[Store] = []
    found: Columns | None = None
    locations = expand(source)
    for location in locations:
        path = Path(location)
        if not is_url(location) and format in (None, "arrow") and is_converted(path):
            shards, task = Shards.of(path)
            columns = columns or Columns(task=task)
            if columns.wants_labels and not shards.layout.serves(columns.task):
                rule = f"{quote(str(path))} was converted for the task {task}, and holds no labels of another kind"
                fix = f"convert the data again, with {argument('task', columns.task)}"
                raise ArgumentError(message("task", repr(columns.task), rule, fix))
            stores.append(shards)
            found = found or with_names(columns, shards.names)
            continue
        columns = columns or Columns()
        stores.append(_of_file(location, columns, format))
    found = found or columns or Columns()
    if found.wants_labels and len(stores) > 1:
        _check_labels(stores, locations)
    return stores, found


def _check_labels(stores: Sequence[Store], locations: Sequence[str]) -> None:
    """Refuse files whose labels are of other kinds than those of the files before."""
    first, known = "", set[str]()
    for store, location in zip(stores, locations, strict=True):
        kinds = store.label_kinds
        check_labels(kinds, location, tuple(sorted(known)), first)
        first, known = first or (location if kinds else ""), known | set(kinds)


def _names_files(source: Any) -> bool:
    if isinstance(source, (str, os.PathLike)):
        return True
    return isinstance(source, Sequence) and all(isinstance(one, (str, os.PathLike)) for one in source)


def _table(source: Any) -> Any:
    """What speaks Arrow as a ``pyarrow.Table``, without a copy where it is in Arrow's memory."""
    arrow = require("pyarrow", "data")
    try:
        if hasattr(source, "__arrow_c_stream__"):
            return arrow.table(source)
        if hasattr(source, "with_format"):
            # A dataset of Hugging Face: the rows that it shows, in their order.
            found = source.with_format("arrow")[:]
            if isinstance(found, arrow.Table):
                return found
    except arrow.ArrowException as error:
        detail = " ".join(str(error).split())
        rule = "columns that Arrow has: lists of numbers or of strings, texts, numbers"
        raise DataError(message("source", quote(detail), rule, "make the entries of a column alike")) from error
    rule = "a path, a list of paths, or what speaks Arrow: a pyarrow.Table, a frame, a dataset of Hugging Face"
    raise ArgumentTypeError(message("source", quote(source), rule, "pass a path, or build a pyarrow.Table"))


def _of_table(path: Path, table: Any, columns: Columns) -> Tables:
    chosen = choose(path, table.schema, columns)
    return Tables([(path, row, part) for row, part in slices(table)], chosen, columns)


def _of_file(location: str, columns: Columns, format: str | None) -> Store:
    """The parts of a file: mapped into memory, read by row group, or read as a whole."""
    path = Path(location)
    name = format
    if name is None and is_url(location):
        name = next((known.name for known in FORMATS.values() if path.suffix.lower() in known.suffixes), None)
    if name is None or not is_url(location):
        name = pick(path, format).name
    if name == "parquet":
        return Groups(location, columns)
    if name == "arrow" and not is_url(location):
        return _of_table(path, table_of(path), columns)
    with tempfile.TemporaryDirectory() as folder, local(location, Path(folder)) as copy:
        return Memory(replace(read(copy, columns, name), source=path))
