"""Parquet files with a column of lists, or of texts, and a column of labels."""

from __future__ import annotations

from pathlib import Path

from raglane.data.formats.base import check_readable, data_error
from raglane.data.formats.table import choose, records_of
from raglane.data.records import Columns, Records
from raglane.errors import require, shorten

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
    # Opened once before, because pyarrow's errors do not tell a file that is not there from one that is damaged.
    check_readable(path)
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            chosen = choose(path, file.schema_arrow, columns)
            table = file.read(columns=chosen.names)
        return records_of(path, table, chosen, columns)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # What is damaged may show when the file is opened, when a column is read, or when its content is looked at.
        detail = " ".join(str(error).split()).rstrip(".")
        got = f"no readable Parquet ({shorten(detail, 200)})"
        raise data_error(path, got, "a whole Parquet file", "write it again") from error
