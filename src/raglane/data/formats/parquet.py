"""Parquet files with a column of lists, or of texts, and a column of labels."""

from __future__ import annotations

from pathlib import Path

from raglane.data.formats.base import data_error, open_error
from raglane.data.formats.table import choose, records_of
from raglane.data.records import Columns, Records
from raglane.errors import require

__all__ = ["read"]


def read(path: Path, columns: Columns) -> Records:
    """Read a Parquet file; only the columns that are used are read.

    Args:
        path: the file.
        columns: which columns hold what, and the task; see :mod:`raglane.data.formats.table` for what is guessed.

    Raises:
        DataError: the file is not Parquet, has no such column, or a row breaks a rule.
        MissingExtraError: pyarrow is not installed.
    """
    arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    try:
        # Opened once before, because pyarrow's errors do not tell a file that is not there from one that is damaged.
        with path.open("rb") as content:
            if not content.read(1):
                raise data_error(path, "an empty file", "it must hold at least one sequence", "check the file")
    except OSError as error:
        raise open_error(path, error) from error
    try:
        with parquet.ParquetFile(path) as file:
            chosen = choose(path, file.schema_arrow, columns)
            table = file.read(columns=chosen.names)
    except (arrow.ArrowException, OSError) as error:
        detail = " ".join(str(error).split()).rstrip(".")
        got = f"no readable Parquet ({detail})"
        raise data_error(path, got, "a whole Parquet file", "write it again") from error
    return records_of(path, table, chosen, columns)
