"""From a path to what is there: every format of ``raglane.data``, and files of lengths alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from raglane.data.formats import FORMATS, japanese_vowels
from raglane.data.formats import read as read_records
from raglane.data.formats.ipc import is_converted
from raglane.data.jobs import Progress
from raglane.data.records import Columns
from raglane.errors import DataError, argument
from raglane.runs.inspection import lengths_of_parquet, lengths_of_text
from raglane.runs.inspection.contents import Contents, contents_of, contents_of_folder, refuse_empty



def read(
    path: Path | None, columns: Columns, format: str | None, progress: Progress, on_bad_row: str = "fail"
) -> Contents:
    """Read what is to be inspected; labels only where there are some."""
    if path is None:
        contents = contents_of(japanese_vowels()[0], None)
    elif format is None and path.suffix.lower() == lengths_of_text.SUFFIX and not path.is_dir():
        contents = lengths_of_text.read(path, progress)
    elif format in (None, "arrow") and is_converted(path):
        contents = contents_of_folder(path)
    elif _is_parquet(path, format) and on_bad_row == "fail":
        contents = _with_labels(lambda asked: lengths_of_parquet.read(path, asked, progress), columns)
    else:
        contents = _with_labels(
            lambda asked: contents_of(read_records(path, asked, format, on_bad_row=on_bad_row), path), columns
        )
    refuse_empty(contents)
    return contents


def _is_parquet(path: Path, format: str | None) -> bool:
    """Whether a Parquet file is there; what is not there is for the reader to refuse."""
    named = format == "parquet" or (format is None and path.suffix.lower() in FORMATS["parquet"].suffixes)
    return named and path.is_file()


def _with_labels(read: Callable[[Columns], Contents], columns: Columns) -> Contents:
    """What is there, without its labels where they cannot be told; who names their column must be right."""
    try:
        return read(columns)
    except DataError as error:
        if not columns.wants_labels or columns.label is not None:
            raise
        contents = read(replace(columns, need_labels=False))
        note = f"no labels are read: {error}"
        forecast = argument("task", "forecast")
        advice = f"to train on this data, name them with {argument('label', of='Columns')}, or pass {forecast}"
        return replace(contents, notes=(*contents.notes, note, advice))
