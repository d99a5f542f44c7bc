"""Folders: of recordings or texts, of which each file is a sequence, or of parts of one table.

The class of a sequence is the folder of its file, a part of the file's name (``label_from_name``),
or in a table in the same folder, with a column of their names; tables may have a column of labels of
their own. Files with a column of ids are parts of one table. A folder whose texts are classes, with
a sequence per line, is read by :mod:`raglane.data.sources.text`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.messages import argument, count_of, quote, quote_all, require, shorten
from raglane.data.columns import Columns, option
from raglane.data.sources import csv, ipc, npz, text
from raglane.data.sources.files import data_error, decode, open_error, read_bytes, suffix_of
from raglane.data.sources.layout import has_header, is_table, rows_of
from raglane.data.sources.table import SourceTable, whole_table
from raglane.data.typed.arrays import Array
from raglane.data.typed.arrow import is_list, lists
from raglane.data.typed.column import Column, TextColumn, Typed, concatenated
from raglane.data.typed.names import (
    ROLE_NAMES,
    ROW_ID_NAMES,
    TEXT_NAMES,
)

_TABLES = (".csv", ".tsv", ".psv", ".tab", ".dat", ".data")
_ARROW = (".parquet", ".pq", ".arrow", ".feather")
_ARRAYS = (".npy", ".npz")
_SOUNDS = (".wav", ".flac", ".ogg", ".aiff", ".aif")
_TEXTS = (".txt", "")
_KNOWN = (*_TABLES, *_ARROW, *_ARRAYS, *_SOUNDS, *_TEXTS)
# Names of a table of labels in a folder of files of the same kind.
_LABEL_TABLES = ("labels", "label", "reference", "metadata", "meta", "targets", "annotations")
# Folders that are parts of the data, and a folder without labels.
_PARTS = ("train", "training", "test", "testing", "valid", "validation", "val", "dev", "eval")
_UNLABELLED = ("unsup", "unlabeled", "unlabelled")
# Columns of texts and tokens.
_SEQUENCES = (*ROLE_NAMES["sequence"], *TEXT_NAMES)
# The columns of names and classes.
_FILE = "file"
_CLASS = "class"


@dataclass(frozen=True)
class _LabelTable:
    """A table of labels: its column of labels, and the label of each name of a file."""

    file: Path
    label: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Files:
    """The files of the sequences, with the column and the entries of their labels."""

    path: Path
    files: list[Path]
    label: str | None
    labels: list[str]
    notes: tuple[str, ...]

    @property
    def suffix(self) -> str:
        """The suffix of all files."""
        return suffix_of(self.files[0])

    @property
    def ids(self) -> list[str]:
        """The names of the files in the folder."""
        names = [file.relative_to(self.path) for file in self.files]
        return [str(name.with_suffix("") if suffix_of(name) in _KNOWN else name) for name in names]

    def part(self, low: int, high: int) -> Files:
        """Return some of the files."""
        return replace(self, files=self.files[low:high], labels=self.labels[low:high])


def table(path: Path, columns: Columns) -> SourceTable | None:
    """Return the sequences of a folder; None for a folder with a text per class."""
    files = files_of(path, columns)
    return None if files is None else table_of(files, columns)


def files_of(path: Path, columns: Columns) -> Files | None:
    """Return the files of a folder; None for texts that are classes."""
    every = _walked(path)
    table = None if columns.label_from_name else _label_table(every, columns)
    readable = [
        file
        for file in every
        if suffix_of(file) in _KNOWN and (table is None or file != table.file)
    ]
    if not readable or (table is None and _are_classes(path, readable, columns)):
        return None
    suffix = Counter(map(suffix_of, readable)).most_common(1)[0][0]
    files = [file for file in readable if suffix_of(file) == suffix]
    if columns.label_from_name is not None:
        labels = [_label_in(path, file, columns.label_from_name) for file in files]
        how = f"a part of its name the class, by {option('label_from_name')}"
        return _noted(path, every, files, _CLASS, labels, how)
    if table is not None:
        return _with_table(path, every, files, table)
    return _with_folders(path, every, files, columns)


def _walked(path: Path) -> list[Path]:
    """Return the visible files in a folder and its folders, without texts about the data."""
    try:
        entries = sorted(path.rglob("*"))
    except OSError as error:
        raise open_error(path, error) from error
    if path.is_file():
        raise data_error(path, "a file", "a folder, for this format", "pass the folder")
    return [
        entry
        for entry in entries
        if not any(name.startswith((".", "__")) for name in entry.relative_to(path).parts)
        and entry.stem not in text.ABOUT
        and not entry.is_dir()
    ]


def _are_classes(path: Path, files: Sequence[Path], columns: Columns) -> bool:
    """Return True if the texts in a folder are classes, with a sequence per line."""
    texts = [file for file in files if file.suffix == ".txt" and file.parent == path]
    if not texts or columns.label_from_name or columns.sequence:
        return False
    return len(texts) == sum(file.suffix == ".txt" for file in files) and not is_table(
        _head(texts[0])
    )


def _head(file: Path) -> str:
    return read_bytes(file).decode(errors="replace")


def _label_in(path: Path, file: Path, pattern: str) -> str:
    """Return the label in the name of a file: the group of a pattern, or all that it finds."""
    name = file.relative_to(path).as_posix()
    match = re.search(pattern, name)
    if match is None:
        got = f"{quote(name)}, in which {quote(pattern)} finds nothing"
        fix = f"correct {option('label_from_name')}, or remove the file"
        raise data_error(path, got, "a folder of files with a label in each name", fix)
    return str(match[1] if match.re.groups else match[0])


def _label_table(files: Sequence[Path], columns: Columns) -> _LabelTable | None:
    """Return the table with a column of the names of files."""
    names = {name for file in files for name in (file.name, file.stem)}
    suffixes = Counter(suffix_of(file) for file in files if suffix_of(file) in _KNOWN)
    for file in files:
        is_alone = suffixes[suffix_of(file)] == 1 and len(suffixes) > 1
        if suffix_of(file) not in _TABLES or not (is_alone or file.stem.lower() in _LABEL_TABLES):
            continue
        rows = rows_of(_head(file))
        if len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}:
            labels = _labels_of_names(file, rows, names, columns)
            if labels is not None:
                return labels
    return None


def _labels_of_names(
    file: Path, rows: Sequence[Sequence[str]], names: set[str], columns: Columns
) -> _LabelTable | None:
    """Return the labels in a table, if one of its columns has the names of files."""
    header = list(rows[0])
    words = [[Path(word).name for word in column] for column in zip(*rows[1:], strict=True)]
    place = next((at for at, column in enumerate(words) if names.issuperset(column)), None)
    if place is None:
        return None
    body = rows[1:]
    if Path(header[place]).name in names:
        # There is no header.
        header = [f"c{at}" for at in range(1, len(header) + 1)]
        body = rows
    label = _column_of_labels(file, [*header[:place], *header[place + 1 :]], columns)
    at = header.index(label)
    return _LabelTable(file, label, {Path(row[place]).name: row[at] for row in body})


def _column_of_labels(file: Path, names: list[str], columns: Columns) -> str:
    usual = [name for name in names if name.lower() in ROLE_NAMES["label"]]
    if columns.label in names:
        return str(columns.label)
    if len(names) == 1 or len(usual) == 1:
        return (usual or names)[0]
    got = f"{len(names)} candidates for the label column: {quote_all(names)}"
    fix = f"name one with {option('label')}"
    raise data_error(file, got, "a table with one column of labels", fix)


def _with_table(
    path: Path, every: Sequence[Path], files: Sequence[Path], table: _LabelTable
) -> Files:
    labels = table.labels
    labelled = [file for file in files if labels.keys() & {file.name, file.stem}]
    classes = [labels.get(file.name, labels.get(file.stem, "")) for file in labelled]
    others = [file for file in every if file != table.file]
    return _noted(path, others, labelled, table.label, classes, f"its label in {table.file.name}")


def _with_folders(path: Path, every: Sequence[Path], files: list[Path], columns: Columns) -> Files:
    """Return files whose folder is the class, or which have no class."""
    inside = [file for file in files if file.parent != path]
    if 2 * len(inside) <= len(files):
        return _noted(path, every, [file for file in files if file.parent == path], None, [], "")
    _check_folders(path, inside)
    labelled = [file for file in inside if file.parent.name not in _UNLABELLED]
    if columns.label not in (None, _CLASS):
        return _noted(path, every, labelled, None, [], "")
    labels = [file.parent.name for file in labelled]
    count = len(set(labels))
    how = f"its folder the class ({count} {'class' if count == 1 else 'classes'})"
    return _noted(path, every, labelled, _CLASS, labels, how)


def _check_folders(path: Path, files: Sequence[Path]) -> None:
    """Raise a DataError for folders that are parts of the data, and for folders in folders."""
    folders = sorted({file.relative_to(path).parts[0] for file in files})
    parts = [name for name in folders if name.lower() in _PARTS]
    if len(parts) > 1:
        got = f"the folders {quote_all(parts)}"
        fix = f"pass {quote(str(path / parts[0]))}, and another with {argument('test')}"
        raise data_error(path, got, "a folder of one part of the data", fix)
    deep = next((file for file in files if file.parent.parent != path), None)
    if deep is not None:
        got = f"folders in folders, as {quote(deep.relative_to(path).as_posix())}"
        pattern = option("label_from_name")
        fix = f"find the class in this path with {pattern}, e.g. '^[^/]+'"
        raise data_error(path, got, "a folder of folders of files", fix)


def _noted(
    path: Path,
    every: Sequence[Path],
    files: Sequence[Path],
    label: str | None,
    labels: list[str],
    how: str,
) -> Files:
    """Return files with notes about how they are read, and about those left out."""
    others = [file for file in every if file not in set(files)]
    kinds = Counter(suffix_of(file) or "without a suffix" for file in others)
    suffix = suffix_of(files[0]) or "without a suffix"
    notes = [f"each of {count_of(len(files), 'file')} ({suffix}) is a sequence{how and ', ' + how}"]
    if any(file.parent == path for file in others if suffix_of(file) in _KNOWN) and not labels:
        counts = ", ".join(f"{count} {name}" for name, count in kinds.items())
        got = f"{len(files)} {suffix}, and {counts}"
        fix = "put the files of one kind in a folder of their own"
        raise data_error(path, got, "a folder of files of one kind", fix)
    if others:
        names = shorten(", ".join(str(file.relative_to(path)) for file in others), 160)
        notes.append(f"left out: {count_of(len(others), 'file')}: {names}")
    return Files(path, list(files), label, labels, tuple(notes))


def table_of(files: Files, columns: Columns) -> SourceTable:
    """Return the files of sequences, or the parts of a table, as one table."""
    suffix = files.suffix
    if suffix in _ARRAYS or suffix in _SOUNDS:
        return _with_labels(files, _arrays(files, columns))
    if suffix in _TEXTS and not is_table(_head(files.files[0])):
        contents = [decode(file, read_bytes(file)) for file in files.files]
        texts = require("pyarrow", "data").array(contents, "large_string")
        return _with_labels(files, {"text": texts})
    return _of_rows(files, columns)


def _with_labels(files: Files, columns: dict[str, Any]) -> SourceTable:
    """Return a table with a row per file."""
    arrow = require("pyarrow", "data")
    declared = {"sequence": next(iter(columns)), "id": _FILE}
    columns[_FILE] = arrow.array(files.ids)
    if files.label is not None:
        columns[files.label] = arrow.array(files.labels)
        declared["label"] = files.label
    unlabelled = _unlabelled(files) if files.label is None else None
    content = arrow.table(columns)
    return whole_table(files.path, content, files.notes, declared=declared, unlabelled=unlabelled)


def _unlabelled(files: Files) -> tuple[str, str, str]:
    """Return what is wrong with files without labels, the rule and the fix."""
    got = f"{count_of(len(files.files), 'file')} ({files.suffix}) without labels"
    fix = (
        "put the files of a class in a folder of its name, or add a table file,label; "
        f"{option('label_from_name')} finds labels in the names"
    )
    return got, "a folder of files with a label each", fix


def _of_rows(files: Files, columns: Columns) -> SourceTable:
    """Read tables with a row per element, each a sequence; or the parts of a table."""
    if suffix_of(files.files[0]) not in _ARROW and not has_header(_head(files.files[0])):
        columns = replace(columns, no_header=columns.header is None)
    notes = (_parts(files), *files.notes[1:])
    if files.suffix in _ARROW and files.label is None:
        whole = _arrow_parts(files)
        if any(map(is_list, whole.schema.types)) or _has_texts(whole.column_names):
            return whole_table(files.path, whole, notes)
    tables = [_columns(file, columns) for file in files.files]
    names = list(tables[0])
    _check_alike(files, tables)
    table = {name: concatenated([each[name] for each in tables]) for name in names}
    has_ids = columns.id is not None or any(name.lower() in ROW_ID_NAMES for name in names)
    if has_ids and files.label is None:
        return SourceTable(files.path, table, notes)
    return _with_ids(files, table, [len(each[names[0]]) for each in tables])


def _with_ids(files: Files, table: dict[str, Column], lengths: list[int]) -> SourceTable:
    """Return rows whose ids are the names of their files."""
    ids = _FILE if _FILE not in table else "file name"
    table = {ids: _repeated(files.ids, lengths), **table}
    declared = {"id": ids}
    if files.label is not None:
        table[files.label] = _repeated(files.labels, lengths)
        declared["label"] = files.label
    return SourceTable(files.path, table, files.notes, declared=declared)


def _arrays(files: Files, columns: Columns) -> dict[str, Any]:
    """Return a column with the arrays of all files."""
    read = _sound if files.suffix in _SOUNDS else _array
    arrays = [read(file, columns) for file in files.files]
    rates = {rate for _, rate in arrays}
    if len(rates) > 1:
        got = f"recordings of {' and '.join(f'{rate:,}' for rate in sorted(rates))} Hz"
        raise data_error(files.path, got, "a folder of recordings of one rate", "resample them")
    shapes = [array.shape[1:] for array, _ in arrays]
    odd = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        got = f"arrays of shape {arrays[0][0].shape}, and {arrays[odd][0].shape} in {files.files[odd].name}"
        fix = "write arrays of (steps,) or (steps, channels); transpose them if channels are first"
        raise data_error(files.path, got, "a folder of arrays of equally many channels", fix)
    offsets = np.append(0, np.cumsum([len(array) for array, _ in arrays], dtype=np.int64))
    name = (columns.sequence if files.suffix == ".npz" else None) or "values"
    return {name: lists(offsets, np.concatenate([array for array, _ in arrays]))}


def _array(file: Path, columns: Columns) -> tuple[Array, int]:
    if suffix_of(file) == ".npz":
        arrays = npz.arrays_of(file)
        name = columns.sequence if columns.sequence in arrays else next(iter(arrays))
        if len(arrays) > 1 and name != columns.sequence:
            got = f"the arrays {quote_all(arrays)}"
            fix = f"name one with {option('sequence')}"
            raise data_error(file, got, "a file of one array, in a folder of files", fix)
        array = arrays[name]
    else:
        array = npz.array_of(file)
    if array.ndim not in (1, 2) or array.dtype.kind not in "biuf":
        got = f"an array of {array.dtype} and shape {array.shape}"
        fix = "write a file per sequence, or one .npz with numpy.savez(path, x=..., label=...)"
        raise data_error(file, got, "numbers (steps,) or (steps, channels)", fix)
    return array, 0


def _sound(file: Path, columns: Columns) -> tuple[Array, int]:  # noqa: ARG001
    soundfile = require("soundfile", "sound")
    try:
        samples, rate = soundfile.read(file, dtype="float32")
    except (soundfile.SoundFileError, OSError) as error:
        got = f"no readable sound ({' '.join(str(error).split()).rstrip('.')})"
        raise data_error(file, got, "a whole recording", "write it again") from error
    return samples, int(rate)


def _has_texts(names: Sequence[str]) -> bool:
    return any(name.lower() in _SEQUENCES for name in names)


def _check_alike(files: Files, tables: Sequence[dict[str, Column]]) -> None:
    """Raise a DataError for the first file with other columns than the first."""
    names = set(tables[0])
    odd = next((at for at, table in enumerate(tables) if set(table) != names), None)
    if odd is not None:
        others = quote_all(sorted(set(tables[odd]) ^ names))
        got = f"the columns {others} in {files.files[odd].name} or {files.files[0].name} only"
        raise data_error(files.path, got, "a folder of tables with the same columns", "add them")


def _repeated(words: list[str], lengths: list[int]) -> Column:
    return TextColumn(np.repeat(np.array(words, dtype=object), lengths))


def _parts(files: Files) -> str:
    return f"{count_of(len(files.files), 'file')} ({files.suffix}), the parts of one table"


def _arrow_parts(files: Files) -> Any:
    """Return the tables of all files as one."""
    arrow = require("pyarrow", "data")
    tables = [ipc.whole(file) for file in files.files]
    odd = next(
        (at for at, each in enumerate(tables) if not each.schema.equals(tables[0].schema)), 0
    )
    if odd:
        got = f"other columns in {files.files[odd].name} than in {files.files[0].name}"
        raise data_error(files.path, got, "a folder of tables with the same columns", "add them")
    return arrow.concat_tables(tables)


def _columns(file: Path, columns: Columns) -> dict[str, Column]:
    """Return the typed columns of a file."""
    if suffix_of(file) not in _ARROW:
        return dict(csv.table_of(file, columns).columns)
    table = ipc.whole(file)
    return {name: Typed(table.column(name)) for name in table.column_names}
