"""The sources of a dataset: paths, patterns, folders, URLs and tables, and their fragments."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from raglane._utils import caches
from raglane._utils.checks import check_kind
from raglane._utils.files import put_folder, whole_file
from raglane._utils.messages import argument, printable, quote, require, shorten
from raglane.data.assemble.lists import Chosen, choose, records_of
from raglane.data.assemble.padding import may_be_padded
from raglane.data.assemble.rows import Load, element_columns
from raglane.data.formats import by_suffix, pick, read
from raglane.data.records import Columns, Records
from raglane.data.sources.files import check_readable, data_error, open_error, suffix_of
from raglane.data.sources.ipc import (
    decoded,
    is_converted,
    named,
    parquet_file,
    readable,
    slices,
    table_of,
    with_names,
)
from raglane.data.store.fragments import Layout, Store, check_labels
from raglane.data.store.shards import Shards
from raglane.errors import ArgumentError, ArgumentTypeError, DataError, MissingExtraError

# Bytes at each end of a file that are part of its fingerprint.
_EDGE = 1 << 20
# The days after which a copy of a URL is removed.
_LIFETIME = 30
# The most bytes of all copies.
_ROOM = 50 << 30
# The first days of a copy, when a command may use it.
_IN_USE = 2


@dataclass(frozen=True, eq=False)
class Memory(Store):
    """Records in memory: one fragment."""

    in_memory: Records

    @property
    def sizes(self) -> list[int]:
        """The number of sequences of each fragment."""
        return [len(self.in_memory)]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels."""
        return Layout.of(self.in_memory).label_kinds

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
    chosen: Chosen
    columns: Columns

    @property
    def sizes(self) -> list[int]:
        """The number of sequences of each fragment."""
        return [table.num_rows for _, _, table in self.tables]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels."""
        return (
            self.chosen.label_kinds(self.tables[0][2].schema, self.columns.task)
            if self.tables
            else ()
        )

    def name(self, number: int) -> str:
        """Return the name in messages."""
        path, first, _ = self.tables[number]
        return f"{path}, rows from {first}"

    def records(self, number: int) -> Records:
        """Return a fragment as records."""
        path, first, table = self.tables[number]
        with readable(path, "Arrow"):
            table.validate(full=True)
            records = records_of(
                path, table.select(self.chosen.names), self.chosen, self.columns, first=first
            )
            return named(records, table)

    def lengths_of(self, number: int) -> npt.NDArray[Any]:
        """Return the lengths from the offsets, without the values, if the column holds lists."""
        _, _, table = self.tables[number]
        column = table.column(self.chosen.sequence)
        lengths = None if may_be_padded(column, self.columns) else list_lengths(column)
        return super().lengths_of(number) if lengths is None else lengths


def list_lengths(column: Any) -> npt.NDArray[Any] | None:
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

    def _open(self) -> tuple[Any, Chosen]:
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
                chosen = self._file.get("chosen") or _choose(
                    path, file.schema_arrow, file.read, self.columns
                )
            self._file.update(file=file, chosen=chosen, stack=stack)
        return self._file["file"], self._file["chosen"]

    @property
    def sizes(self) -> list[int]:
        """The number of sequences of each fragment."""
        metadata = self._open()[0].metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """The kinds of the labels."""
        file, chosen = self._open()
        return chosen.label_kinds(file.schema_arrow, self.columns.task)

    def records(self, number: int) -> Records:
        """Return a fragment as records."""
        file, chosen = self._open()
        path = Path(self.location)
        with readable(path, "Parquet"):
            table = file.read_row_group(number, columns=chosen.names, use_threads=False)
            return records_of(path, table, chosen, self.columns, first=sum(self.sizes[:number]))

    def lengths_of(self, number: int) -> npt.NDArray[Any]:
        """Return the lengths from the column of sequences, without reading the others."""
        file, chosen = self._open()
        with readable(Path(self.location), "Parquet"):
            table = file.read_row_group(number, columns=[chosen.sequence], use_threads=False)
            column = table.column(chosen.sequence)
            lengths = None if may_be_padded(column, self.columns) else list_lengths(column)
        return super().lengths_of(number) if lengths is None else lengths

    def name(self, number: int) -> str:
        """Return the name in messages."""
        return f"{self.location}, row group {number}"

    def __getstate__(self) -> dict[str, Any]:
        location = self.location if is_url(self.location) else os.path.abspath(self.location)
        # Other processes open the file themselves, and do not choose again.
        chosen = {name: value for name, value in self._file.items() if name == "chosen"}
        return {**self.__dict__, "location": location, "_file": chosen}


def stores_of(
    source: Any, columns: Columns | None, format: str | None
) -> tuple[list[Store], Columns]:
    """Return the stores of a source, and the columns that are read."""
    if isinstance(source, Records):
        return [Memory(source)], columns or source.columns
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


def _choose(path: Path, schema: Any, load: Load, columns: Columns) -> Chosen:
    """Choose the columns to read on demand."""
    if not element_columns(path, schema, load, columns):
        return choose(path, schema, columns)
    rule = "a table whose rows are sequences, in order to be read on demand"
    raise data_error(path, "a row per element", rule, "read it whole with rl.data.read")


def _of_table(path: Path, table: Any, columns: Columns) -> Tables:
    with readable(path, "Arrow"):
        chosen = _choose(path, table.schema, table.select, columns)
    return Tables([(path, row, rows) for row, rows in slices(table)], chosen, columns)


def _of_file(location: str, columns: Columns, format: str | None) -> Store:
    """Return the store of a file: mapped into memory, read by row group, or read as a whole."""
    path = Path(location)
    name = format
    if is_url(location) and name is None:
        by_name = by_suffix(_path_in(location))
        name = None if by_name is None else by_name.name
    if name is None or not is_url(location):
        name = pick(path, format).name
    if name == "parquet":
        return Groups(location, columns)
    if name == "arrow" and not is_url(location):
        return _of_table(path, table_of(path), columns)
    with tempfile.TemporaryDirectory() as folder, local(location, Path(folder)) as copy:
        return Memory(replace(read(copy, columns, name), source=path))


def is_url(location: str) -> bool:
    """Return True if a location is a URL rather than a path."""
    return "://" in location


def expand(locations: Any) -> list[str]:
    """Return the files, folders and URLs of locations with patterns, in order."""
    many = isinstance(locations, Sequence) and not isinstance(locations, (str, bytes))
    files: list[str] = []
    for path in locations if many else [locations]:
        rule = "a path, a pattern or a URL, or a list of these"
        fix = "pass a str or a pathlib.Path"
        check_kind("location", path, (str, os.PathLike), rule, fix)
        files += _expand(os.fspath(path))
    if not files:
        raise ArgumentError("location", "an empty list", "at least one file", "pass the data")
    return files


def _expand(location: str) -> list[str]:
    has_pattern = any(sign in location for sign in "*?[")
    if is_url(location):
        if not has_pattern and (
            by_suffix(_path_in(location)) is not None or location.startswith("http")
        ):
            return [location]
        with _reaching(location):
            system, path = _fsspec().url_to_fs(location)
            # Unlike isdir, info raises if the store cannot be reached.
            if not has_pattern and system.info(path)["type"] != "directory":
                return [location]
            names = (
                system.glob(path)
                if has_pattern
                else filter(_is_data, system.ls(path, detail=False))
            )
            files = sorted(map(system.unstrip_protocol, names))
    elif has_pattern and not os.path.lexists(location):
        files = sorted(glob.glob(location, recursive=True))
    elif os.path.isdir(location):
        return _files_of(Path(location)) or [location]
    else:
        return [location]
    if not files:
        raise DataError(
            quote(location), "no file", "a pattern that matches a file", "check the pattern"
        )
    return files


def _files_of(folder: Path) -> list[str]:
    """Return the files of known formats in a folder; none if the folder itself is the data, such as
    one of tables of texts.
    """
    files = [] if is_converted(folder) else folder.iterdir()
    names = sorted(str(path) for path in files if _is_data(path) and path.is_file())
    kinds = {by_suffix(PurePath(name)) for name in names}
    return [] if any(kind is not None and kind.name == "csv" for kind in kinds) else names


def _is_data(path: str | Path) -> bool:
    """Return True for a file of a known format; .txt is data only in a folder of texts, and .json
    describes data.
    """
    format = by_suffix(PurePath(path))
    return format is not None and format.name != "text" and suffix_of(PurePath(path)) != ".json"


def _path_in(url: str) -> PurePosixPath:
    return PurePosixPath(url.split("?")[0])


def _fsspec() -> Any:
    return require("fsspec.core", "data")


@contextmanager
def _reaching(location: str) -> Iterator[None]:
    """Raise a DataError for any error at a URL, because each kind of storage has its own
    exceptions.
    """
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        rule = "a URL whose package is installed"
        raise MissingExtraError(quote(location), "one without it", rule, f"{error}") from error
    except Exception as error:
        detail = shorten(
            printable(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")), 200
        )
        got = f"no valid response ({detail})"
        fix = "check the URL, the connection and the permissions; finished work is kept"
        raise DataError(quote(location), got, "the URL of a readable file", fix) from error


@contextmanager
def open_location(location: str) -> Iterator[IO[bytes]]:
    """Open a file at a path or URL for reading."""
    if is_url(location):
        with _reaching(location), _fsspec().open(location, "rb") as file:
            yield file
    else:
        try:
            with open(location, "rb") as file:
                yield file
        except OSError as error:
            raise open_error(Path(location), error) from error


@contextmanager
def local(location: str, folder: Path) -> Iterator[Path]:
    """Yield a local path of the data: its own, or that of a temporary copy of a URL."""
    if not is_url(location):
        yield Path(location)
        return
    copy = folder / ("copy" + "".join(_path_in(location).suffixes[-2:]))
    try:
        with open_location(location) as source, whole_file(copy) as file:
            shutil.copyfileobj(source, file, 1 << 22)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def fetched(url: str) -> Path:
    """Copy a file or a folder at a URL to the user's cache folder, in place of an earlier copy;
    return the copy.
    """
    folder = copies() / hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / (_path_in(url).name or "data")
    with _reaching(url), tempfile.TemporaryDirectory(dir=folder) as partial:
        system, path = _fsspec().url_to_fs(url)
        whole = Path(partial, "whole")
        is_file = url.startswith("http") or system.info(path)["type"] != "directory"
        for name in [path] if is_file else system.find(path):
            inner = PurePath(name[len(path) :].lstrip("/"))
            if ".." in inner.parts:
                raise DataError(
                    quote(url), f"the file {quote(name)}", "a folder of plain names", "rename it"
                )
            target = whole / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(name, str(target))
        if is_file:
            os.replace(whole, copy)
        else:
            put_folder(whole, copy)
    _remove_old(folder)
    return copy


def copies() -> Path:
    """Return the folder of the copies of URLs."""
    return caches.folder("urls")


def _remove_old(newest: Path) -> None:
    """Remove the copies that were made long ago, and the oldest of those that are too large
    together.
    """
    now = time.time()
    total = 0
    ages = {}
    for folder in newest.parent.iterdir():
        with suppress(OSError):
            ages[folder] = (now - folder.stat().st_mtime) / 86400
    for folder in sorted(ages, key=ages.__getitem__):
        with suppress(OSError):
            total += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if folder != newest and (
            ages[folder] > _LIFETIME or (total > _ROOM and ages[folder] > _IN_USE)
        ):
            shutil.rmtree(folder, ignore_errors=True)


def size_of(location: str) -> int:
    """Return the bytes of a file, or of the files of a folder; 0 if unknown."""
    if is_url(location):
        with _reaching(location):
            system, path = _fsspec().url_to_fs(location)
            return int(system.size(path) or 0)
    path = Path(location)
    files = [path] if path.is_file() else path.glob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def fingerprint(location: str) -> str:
    """Return a hash of the size, the beginning and the end of a file, or of all files of a
    folder.
    """
    if not is_url(location) and os.path.isdir(location):
        digest = hashlib.sha256()
        for path in sorted(Path(location).iterdir()):
            if path.is_file() and not path.name.startswith("."):
                digest.update(
                    f"{path.name}\n{fingerprint(str(path))}\n".encode(errors="surrogateescape")
                )
        return digest.hexdigest()[:16]
    with open_location(location) as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(f"{size}\n".encode())
        for start in (0, max(size - _EDGE, 0)):
            file.seek(start)
            digest.update(file.read(_EDGE))
    return digest.hexdigest()[:16]
