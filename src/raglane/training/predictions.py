"""Files of predictions: Parquet, CSV or JSON lines, or the CoNLL file of the words."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raglane._utils.files import as_path, check_new_file, no_formula, write_files
from raglane._utils.json import finite
from raglane._utils.messages import quote, require
from raglane.data.assemble.answers import filled
from raglane.data.dataset import Dataset
from raglane.data.formats import by_suffix
from raglane.data.sources.conll import SUFFIXES
from raglane.errors import ArgumentError
from raglane.training.checkpoint import CONFIG
from raglane.training.folder import RUN_FILES, RUN_FOLDERS
from raglane.training.results import Predictions


def check_output(path: str | os.PathLike[str], *, escape_formulas: bool = False) -> None:
    """Raise if predictions cannot be written to a file."""
    path = as_path(path)
    check_new_file("output", path, (*WRITERS, *SUFFIXES))
    if escape_formulas and path.suffix.lower() != ".csv":
        got = f"it for {quote(str(path))}"
        rule = "left out, except for .csv"
        raise ArgumentError("escape_formulas", got, rule, "leave it out")
    if path.suffix.lower() == ".parquet":
        require("pyarrow", "data")


def check_apart(path: Path, data: Path, run: Path) -> None:
    """Raise if the output would replace the data, the model, or a file of its run."""
    # For a link, both the link and its target are checked.
    real = _real(path)
    target = _real(path.parent) / path.name
    if _real(data) in (real, target) or (path.exists() and data.exists() and path.samefile(data)):
        rule = "a file other than the data"
        raise ArgumentError("output", repr(str(path)), rule, "pass a new file")
    folder = _real(run)
    for name in (real, target):
        inside = any(parent in name.parents for parent in map(folder.joinpath, RUN_FOLDERS))
        if inside or (
            name.parent == folder and (name.name in RUN_FILES or (folder / CONFIG).exists())
        ):
            rule = "a file that is not of the run or its model"
            raise ArgumentError("output", repr(str(path)), rule, "pass another file")


def _real(path: Path) -> Path:
    """Return a path without links; unlike ``Path.resolve``, it accepts circles of links."""
    return Path(os.path.realpath(path))


def write_predictions(
    path: str | os.PathLike[str],
    predictions: Predictions,
    files: Mapping[Path, bytes] | None = None,
    *,
    escape_formulas: bool = False,
    data: Dataset | None = None,
) -> None:
    """Write predictions to a Parquet, CSV or JSON lines file, and further files: all of them, or
    none.

    Numbers that are not finite become null, an empty entry in CSV, where lists are JSON text. A
    forecast has a row per step, and in CSV a prediction per element has a row per element.
    ``escape_formulas`` prepends an apostrophe to CSV texts that a spreadsheet would execute. A CoNLL
    file has the lines of that of ``data``, with the predicted labels.
    """
    check_output(path, escape_formulas=escape_formulas)
    path = as_path(path)
    suffix = path.suffix.lower()
    content = (
        _conll(path, predictions, data)
        if suffix in SUFFIXES
        else to_bytes(predictions, suffix, escape_formulas=escape_formulas)
    )
    write_files({path: content, **(files or {})})


def to_bytes(predictions: Predictions, suffix: str, *, escape_formulas: bool = False) -> bytes:
    """Return predictions as the content of a file with a suffix."""
    return WRITERS[suffix](_columns(predictions, suffix, escape_formulas))


def csv_in_parts(parts: Iterable[Predictions], *, escape_formulas: bool = False) -> Iterator[bytes]:
    """Yield the content of a CSV file of all parts, one part after the other."""
    for number, part in enumerate(parts):
        yield _csv(_columns(part, ".csv", escape_formulas), has_names=number == 0)


def _columns(predictions: Predictions, suffix: str, escape_formulas: bool) -> dict[str, list[Any]]:
    """Return the columns of a file with a suffix."""
    if suffix == ".csv" and predictions.per_element:
        predictions = predictions.by_element()
    if suffix == ".parquet":
        predictions = replace(predictions, columns=_one_kind(predictions.columns))
    columns = predictions.named()
    if escape_formulas:
        columns = {
            no_formula(name): list(map(no_formula, entries)) for name, entries in columns.items()
        }
    return finite(columns)


def _conll(path: Path, predictions: Predictions, data: Dataset | None) -> bytes:
    """Return the CoNLL file of the words with predicted labels."""
    if data is not None and data.columns.task == "tag" and data.source.is_file():
        reads = by_suffix(data.source)
        if reads is not None and reads.name in ("conll", "text"):
            return filled(data.source, data.columns, predictions.columns["prediction"])
    got = f"it for {quote(str(path))}"
    rule = "a .jsonl, .csv or .parquet, unless DATA is CoNLL, and the task tag"
    raise ArgumentError("output", got, rule, "write another format")


def parquet_bytes(table: Any) -> bytes:
    """Return an Arrow table as the bytes of a Parquet file."""
    sink = require("pyarrow", "data").BufferOutputStream()
    require("pyarrow.parquet", "data").write_table(table, sink)
    return sink.getvalue().to_pybytes()


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    arrow = require("pyarrow", "data")
    return parquet_bytes(
        arrow.table({name: arrow.array(values) for name, values in columns.items()})
    )


def _one_kind(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Convert ids to text if they mix numbers and text, or exceed 64 bits, because a Parquet column
    has one type.
    """
    ids = columns["id"]
    mixed = len({isinstance(value, str) for value in ids}) > 1
    mixed = mixed or any(
        not isinstance(value, str) and not -(2**63) <= value < 2**63 for value in ids
    )
    return columns | {"id": [str(value) for value in ids]} if mixed else columns


def _csv(columns: dict[str, list[Any]], *, has_names: bool = True) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if has_names:
        writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_json(entry) if isinstance(entry, list) else entry for entry in row])
    return text.getvalue().encode()


def _jsonl(columns: dict[str, list[Any]]) -> bytes:
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return "".join(_json(row) + "\n" for row in rows).encode()


def _json(content: Any) -> str:
    # Dates are written as in CSV.
    return json.dumps(content, ensure_ascii=False, allow_nan=False, default=str)


WRITERS: dict[str, Callable[[dict[str, list[Any]]], bytes]] = {
    ".parquet": _parquet,
    ".csv": _csv,
    ".jsonl": _jsonl,
}
