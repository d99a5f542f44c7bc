"""The sources of a dataset: files, folders and tables, and their fragments."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raglane._utils.messages import argument, quote, require
from raglane.data.assemble.lists import records_of
from raglane.data.assemble.padding import may_be_padded
from raglane.data.assemble.streams import decided
from raglane.data.columns import Columns
from raglane.data.formats import by_suffix, pick, read
from raglane.data.records import Records
from raglane.data.roles import Roles, Shape
from raglane.data.roles.label_types import label_kinds
from raglane.data.sources.files import check_readable, data_error
from raglane.data.sources.frames import table_from
from raglane.data.sources.ipc import (
    is_converted,
    parquet_file,
    parquet_table,
    readable,
    slices,
    table_of,
    with_names,
)
from raglane.data.sources.locations import is_url, local, open_location, path_in
from raglane.data.sources.table import SourceTable, whole_table
from raglane.data.store.folders import expand
from raglane.data.store.fragments import Store, StoreLayout, check_labels
from raglane.data.store.shards import Shards
from raglane.data.typed.arrays import Array
from raglane.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class MemoryStore(Store):
    """Records in memory: one fragment."""

    in_memory: Records

    @property
    def sizes(self) -> list[int]:
        """The number of sequences of each fragment."""
        return [len(self.in_memory)]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels."""
        return StoreLayout.of(self.in_memory).label_kinds

    def name(self, number: int) -> str:  # noqa: ARG002
        """Return the name in messages."""
        return str(self.in_memory.source)

    def records(self, number: int) -> Records:  # noqa: ARG002
        """Return a fragment as records."""
        return self.in_memory


@dataclass(frozen=True, eq=False)
class Tables(Store):
    """Arrow tables, cut into runs of rows."""

    # The file, the number of the first row in it, and the rows.
    tables: list[tuple[Path, int, Any]]
    roles: Roles
    columns: Columns

    @property
    def sizes(self) -> list[int]:
        """The number of sequences of each fragment."""
        return [table.num_rows for _, _, table in self.tables]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels."""
        if not self.tables:
            return ()
        return kinds_of(self.roles, self.tables[0][2].schema, self.columns.task)

    def name(self, number: int) -> str:
        """Return the name in messages."""
        path, first, _ = self.tables[number]
        return f"{path}, rows from {first}"

    def records(self, number: int) -> Records:
        """Return a fragment as records."""
        path, first, table = self.tables[number]
        with readable(path, "Arrow"):
            table.validate(full=True)
            content = table.select(self.roles.names)
            return records_of(path, content, self.roles, self.columns, first=first)

    def lengths_of(self, number: int) -> Array:
        """Return the lengths from the offsets, without the values, if the column holds lists."""
        _, _, table = self.tables[number]
        column = table.column(str(self.roles.sequence))
        lengths = None if may_be_padded(column, self.columns) else list_lengths(column)
        return super().lengths_of(number) if lengths is None else lengths


def list_lengths(column: Any) -> Array | None:
    """Return the length of each list of a column; None if it holds no lists, or a null."""
    arrow = require("pyarrow", "data")
    compute = require("pyarrow.compute", "data")
    if column.null_count:
        return None
    with suppress(arrow.ArrowNotImplementedError):
        return compute.list_value_length(column).to_numpy()
    return None


@dataclass(frozen=True, eq=False)
class Groups(Store):
    """The row groups of a Parquet file, read on demand."""

    is_cheap = False
    location: str
    columns: Columns
    _file: dict[str, Any] = field(default_factory=dict)

    def _open(self) -> tuple[Any, Roles]:
        """Return the file, which stays open in this process, and its columns."""
        if "file" not in self._file:
            path = Path(self.location)
            stack = ExitStack()
            if not is_url(self.location):
                check_readable(path)
            with readable(path, "Parquet"):
                source = stack.enter_context(open_location(self.location))
                small = {"pre_buffer": False, "buffer_size": 1 << 20}
                file = parquet_file(path, source, **small)
                roles = self._file.get("roles") or _decided(
                    path, parquet_table(path, file), self.columns
                )
            self._file.update(file=file, roles=roles, stack=stack)
        return self._file["file"], self._file["roles"]

    @property
    def sizes(self) -> list[int]:
        """The number of sequences of each fragment."""
        metadata = self._open()[0].metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels."""
        file, roles = self._open()
        return kinds_of(roles, file.schema_arrow, self.columns.task)

    def records(self, number: int) -> Records:
        """Return a fragment as records."""
        file, roles = self._open()
        path = Path(self.location)
        with readable(path, "Parquet"):
            table = file.read_row_group(number, columns=roles.names, use_threads=False)
            return records_of(path, table, roles, self.columns, first=sum(self.sizes[:number]))

    def lengths_of(self, number: int) -> Array:
        """Return the lengths from the column of sequences, without reading the others."""
        file, roles = self._open()
        with readable(Path(self.location), "Parquet"):
            table = file.read_row_group(number, columns=[str(roles.sequence)], use_threads=False)
            column = table.column(str(roles.sequence))
            lengths = None if may_be_padded(column, self.columns) else list_lengths(column)
        return super().lengths_of(number) if lengths is None else lengths

    def name(self, number: int) -> str:
        """Return the name in messages."""
        return f"{self.location}, row group {number}"

    def __getstate__(self) -> dict[str, Any]:
        location = self.location if is_url(self.location) else os.path.abspath(self.location)
        # Other processes open the file themselves, and do not choose again.
        roles = {name: value for name, value in self._file.items() if name == "roles"}
        return {**self.__dict__, "location": location, "_file": roles}


def stores_of(
    source: Any, columns: Columns | None, format: str | None
) -> tuple[list[Store], Columns]:
    """Return the stores of a source, and the columns that are read."""
    if isinstance(source, Records):
        return [MemoryStore(source)], columns or source.columns
    require("pyarrow", "data")
    if not _names_files(source):
        asked = columns or Columns()
        return [_of_table(Path(type(source).__name__), table_from(source, "source"), asked)], asked
    stores: list[Store] = []
    named_columns: Columns | None = None
    locations = expand(source)
    for location in locations:
        path = Path(location)
        if is_url(location) or format not in (None, "arrow") or not is_converted(path):
            columns = columns or Columns()
            stores.append(_of_file(location, columns, format))
            continue
        shards, task = Shards.of(path)
        columns = columns or Columns(task=task)
        _check_task(shards, task, columns)
        stores.append(shards)
        named_columns = named_columns or with_names(columns, shards.names)
    named_columns = named_columns or columns or Columns()
    if named_columns.wants_labels and len(stores) > 1:
        _check_labels(stores, locations)
    return stores, named_columns


def _check_task(shards: Shards, task: str, columns: Columns) -> None:
    """Raise if a converted folder lacks the labels of the task."""
    if columns.wants_labels and not shards.layout.serves(columns.task):
        rule = f"{task}, for which {quote(str(shards.folder))} was converted"
        fix = f"convert the data again, with {argument('task', columns.task)}"
        raise ArgumentError("task", repr(columns.task), rule, fix)


def _check_labels(stores: Sequence[Store], locations: Sequence[str]) -> None:
    """Raise if a file has labels of other kinds than the files before it."""
    first = ""
    labels = set[str]()
    for store, location in zip(stores, locations, strict=True):
        kinds = store.label_kinds
        check_labels(kinds, location, tuple(sorted(labels)), first)
        first = first or (location if kinds else "")
        labels = labels | set(kinds)


def _names_files(source: Any) -> bool:
    names = [source] if isinstance(source, (str, os.PathLike)) else source
    return isinstance(names, Sequence) and all(
        isinstance(name, (str, os.PathLike)) for name in names
    )


def kinds_of(roles: Roles, schema: Any, task: str) -> tuple[str, ...]:
    """Return the kinds of the labels of a table with this ``pyarrow.Schema``; () without labels."""
    return () if roles.label is None else label_kinds(schema.field(roles.label).type, task)


def _decided(path: Path, table: SourceTable, columns: Columns) -> Roles:
    """Return the columns to read on demand."""
    roles = decided(path, table, columns)
    if roles.shape is Shape.LISTS:
        return roles
    rule = "a table whose rows are sequences, in order to be read on demand"
    raise data_error(path, "a row per element", rule, "read it whole with rl.data.read")


def _of_table(path: Path, table: Any, columns: Columns) -> Tables:
    with readable(path, "Arrow"):
        roles = _decided(path, whole_table(path, table), columns)
    return Tables([(path, row, rows) for row, rows in slices(table)], roles, columns)


def _of_file(location: str, columns: Columns, format: str | None) -> Store:
    """Return the store of a file: mapped into memory, read by row group, or read as a whole."""
    path = Path(location)
    name = format
    if is_url(location) and name is None:
        by_name = by_suffix(path_in(location))
        name = None if by_name is None else by_name.name
    if name is None or not is_url(location):
        name = pick(path, format).name
    if name == "parquet":
        return Groups(location, columns)
    if name == "arrow" and not is_url(location):
        return _of_table(path, table_of(path), columns)
    with tempfile.TemporaryDirectory() as folder, local(location, Path(folder)) as copy:
        return MemoryStore(replace(read(copy, columns, name), source=path))
