"""Tables of a program as Arrow: pandas, polars, Arrow, datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from raglane._utils.messages import quote, require
from raglane.data.sources.ipc import decoded
from raglane.errors import ArgumentTypeError, DataError


def table_from(source: Any, name: str) -> Any:
    """Return an object with the Arrow interface as a ``pyarrow.Table``, without a copy of Arrow
    memory.
    """
    with arrow_errors(name) as arrow:
        table = source
        if hasattr(source, "iloc") and hasattr(source, "columns"):
            table = of_frame(source)
        elif hasattr(source, "__arrow_c_stream__") and not isinstance(source, arrow.Table):
            table = arrow.table(source)
        elif hasattr(source, "with_format") and not isinstance(source, dict):
            # A Hugging Face dataset, whose rows may be a selection, but not a dict of its splits.
            table = source.with_format("arrow")[:]
        if isinstance(table, arrow.Table):
            return decoded(table)
    rule = "a path, a list of paths, a pyarrow.Table, a frame, or a Hugging Face dataset"
    raise ArgumentTypeError(name, quote(source), rule, "pass a path, or build a pyarrow.Table")


def of_frame(frame: Any) -> Any:
    """Return a table of pandas as a ``pyarrow.Table``; as in a Parquet file, an index with a name
    is a column.
    """
    frame = frame.rename(columns=str)
    frame = frame.assign(
        **{name: _lists(column) for name, column in frame.items() if column.dtype == object}
    )
    has_name = any(name is not None for name in frame.index.names)
    is_column = has_name and not frame.index.equals(
        require("pandas", "data").RangeIndex(len(frame))
    )
    return require("pyarrow", "data").Table.from_pandas(frame, preserve_index=is_column)


def _lists(column: Any) -> Any:
    """Return a column of lists as Arrow, in which NaN is not null; another column of objects
    unchanged.
    """
    if not any(isinstance(entry, (list, tuple, np.ndarray)) for entry in column):
        return column
    # Arrow does not convert arrays of two dimensions.
    plain = [
        entry.tolist() if getattr(entry, "ndim", 0) > 1 else entry
        for entry in column.where(column.notna(), None)
    ]
    arrow = require("pyarrow", "data")
    with suppress(
        arrow.ArrowInvalid, arrow.ArrowTypeError
    ):  # of pandas' missing values, which are refused later
        return require("pandas", "data").arrays.ArrowExtensionArray(arrow.array(plain))
    return column


@contextmanager
def arrow_errors(name: str) -> Iterator[Any]:
    """Yield pyarrow; convert its errors for columns that it cannot hold to DataErrors."""
    arrow = require("pyarrow", "data")
    try:
        yield arrow
    except (arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        got = f"a table that Arrow cannot hold ({' '.join(str(error).split()).rstrip('.')})"
        rule = "a table whose columns have values of one kind: numbers, texts, or lists of these"
        raise DataError(name, got, rule, "convert the column, or leave it out") from error
