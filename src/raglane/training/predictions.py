"""Predictions as a file: Parquet, CSV or JSON lines, by the suffix."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raglane._utils.files import as_path, check_new_file, no_formula, write_files
from raglane._utils.messages import message, quote, require
from raglane.errors import ArgumentError
from raglane.training.checkpoint import CONFIG
from raglane.training.folder import RUN_FILES, RUN_FOLDERS
from raglane.training.inference import Predictions
from raglane.training.stored import finite


def check_output(path: str | os.PathLike[str], *, escape_formulas: bool = False) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    path = as_path(path)
    if path.suffix.lower() not in WRITERS:
        rule = f"a name that ends in {', '.join(WRITERS)}"
        raise ArgumentError(message("output", repr(str(path)), rule, "change the suffix"))
    if escape_formulas and path.suffix.lower() != ".csv":
        rule = "used only for a .csv file"
        raise ArgumentError(message("escape_formulas", f"the output {quote(str(path))}", rule, "leave it out"))
    check_new_file("output", path)
    if path.suffix.lower() == ".parquet":
        require("pyarrow", "data")


def check_apart(path: Path, data: Path, run: Path) -> None:
    """Refuse to write over what is read: the data, the model, and the files of its run."""
    # Of a link both count: the place where it stands, and the file that it leads to.
    real, place = _real(path), _real(path.parent) / path.name
    if _real(data) in (real, place) or (path.exists() and data.exists() and path.samefile(data)):
        rule = "a file other than the data"
        raise ArgumentError(message("output", repr(str(path)), rule, "name a new file"))
    folder = _real(run)
    for name in (real, place):
        inside = any(parent in name.parents for parent in map(folder.joinpath, RUN_FOLDERS))
        if inside or (name.parent == folder and (name.name in RUN_FILES or (folder / CONFIG).exists())):
            rule = "a file outside of the run and its model"
            raise ArgumentError(message("output", repr(str(path)), rule, "name a file in another folder"))


def _real(path: Path) -> Path:
    """A path without links; unlike ``Path.resolve``, also where they lead in a circle."""
    return Path(os.path.realpath(path))


def write_predictions(
    path: str | os.PathLike[str],
    predictions: Predictions,
    beside: Mapping[Path, bytes] | None = None,
    *,
    escape_formulas: bool = False,
) -> None:
    r"""Write a table of predictions whole or not at all.

    Args:
        path: ends in ``.parquet``, ``.csv`` (lists as JSON text) or ``.jsonl``.
        predictions: the table. A number that is not finite becomes null, an empty entry in ``.csv``.
        beside: files that belong to it, by their places: there are all of them, or none.
        escape_formulas: put an apostrophe before texts of ``.csv`` that a spreadsheet would execute: those that begin
            with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return.

    Raises:
        ArgumentError: as :func:`check_output`.
        OSError: the disk is full, or the folder is closed to us.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "predictions.csv")
        ...     write_predictions(path, Predictions({"id": [0], "prediction": ["a"]}))
        ...     path.read_text()
        'id,prediction\n0,a\n'
    """
    check_output(path, escape_formulas=escape_formulas)
    path = as_path(path)
    if escape_formulas:
        columns = {no_formula(name): list(map(no_formula, entries)) for name, entries in predictions.columns.items()}
        predictions = Predictions(columns)
    write_files({path: WRITERS[path.suffix.lower()](finite(predictions.columns)), **(beside or {})})


def parquet_bytes(table: Any) -> bytes:
    """A table of Arrow as the bytes of a Parquet file."""
    sink = require("pyarrow", "data").BufferOutputStream()
    require("pyarrow.parquet", "data").write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    arrow = require("pyarrow", "data")
    return parquet_bytes(arrow.table({name: arrow.array(values) for name, values in _one_kind(columns).items()}))


def _one_kind(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Ids that are part numbers and part text, or beyond 64 bits, become text: a column has one kind."""
    ids = columns["id"]
    mixed = len({isinstance(value, str) for value in ids}) > 1
    mixed = mixed or any(not isinstance(value, str) and not -(2**63) <= value < 2**63 for value in ids)
    return columns | {"id": [str(value) for value in ids]} if mixed else columns


def _csv(columns: dict[str, list[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_json(entry) if isinstance(entry, list) else entry for entry in row])
    return text.getvalue().encode()


def _jsonl(columns: dict[str, list[Any]]) -> bytes:
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return "".join(_json(row) + "\n" for row in rows).encode()


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


WRITERS: dict[str, Callable[[dict[str, list[Any]]], bytes]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".jsonl": _jsonl,
}
