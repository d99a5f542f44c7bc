"""Reads files, and objects of a program, into a dataset in memory.

Numbers become channels ``x0`` to ``x<C-1>``; texts and lists of texts become tokens. A table with a
column of lists or texts follows the rules of Parquet, where a row is a sequence; other tables
follow those of CSV, where a row is an element.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_kind, check_tensor, check_unmasked
from raglane._utils.files import as_path
from raglane._utils.messages import argument, quote, quote_all, require
from raglane.data import formats
from raglane.data.assemble.arrow import Reader, label_kinds, label_split_of, read_labels
from raglane.data.assemble.padding import without_padding
from raglane.data.assemble.rows import read_table
from raglane.data.dataset import Dataset
from raglane.data.records import NO_ROLES, ROLES, Columns, Records, as_float32, offsets_of
from raglane.data.sources.files import columns_argument, unused_notes
from raglane.data.store.stores import table_from
from raglane.errors import (
    ArgumentError,
    ArgumentTypeError,
    DataError,
    MissingExtraError,
    ShapeError,
)
from raglane.ragged import Ragged
from raglane.ragged.interop import conversion_of

# The names of objects in messages.
_DATA, _LABELS = Path("data"), Path("labels")

# The kinds of steps that order the rows of a sequence; words have no order but that of the rows.
_ORDERED = (
    "integer",
    "floating",
    "datetime64",
    "datetime",
    "date",
    "time",
    "timedelta64",
    "timedelta",
    "period",
)

_FORMS = (
    "a path, a list or a generator of sequences, an array (sequences, steps) or (sequences, steps, channels), "
    "a Ragged, a Dataset, or a table of pandas, polars, Arrow or datasets"
)


_CONVERT = "convert it, or pass only texts for tokens"
_WHOLE = "pass the whole table, as rl.fit(df): rows with the same id are one sequence"


def listed(data: Any) -> Any:
    """Return a generator or another iterator as a list, because data is read more than once.

    A file, or a reader of its parts, is no list of sequences.
    """
    return list(data) if isinstance(data, Iterator) and not hasattr(data, "read") else data


def read(
    source: Any,
    columns: Columns | None = None,
    format: str | None = None,
    *,
    labels: Any = None,
    on_bad_row: Literal["raise", "skip"] = "raise",
) -> Dataset:
    r"""Read sequences into memory: those of a file or folder, or of objects of a program.

    ==============================================  ============================================================
    source                                          its sequences
    ==============================================  ============================================================
    path                                            those of a file in one of the ``FORMATS``, of a converted folder,
                                                    or of a folder of recordings or texts
    list of arrays or tensors, or lists of numbers  each ``(L,)``, one channel, or ``(L, C)``
    list of texts, or of lists of texts             tokens; a text is split at white space
    array or tensor ``(B, L)``, ``(B, L, C)``       ``B`` sequences of one length
    :class:`~raglane.Ragged`                        its own, of ``(L,)`` or ``(L, C)``
    table: pandas, polars, Arrow, datasets          as in a file: with a column of lists or texts, a row is a
                                                    sequence; else a row is an element, and a column names its
                                                    sequence
    pandas, with an index of (sequence, step)       a row is an element, a column a channel
    pandas, each entry a Series                     a row is a sequence, a column a channel
    list of pandas tables                           a table is a sequence, its rows elements, its columns channels
    :class:`~raglane.data.Dataset`                  its own
    ==============================================  ============================================================

    Args:
        source: as above; NaN is a missing number.
        columns: which columns hold what, and the task; None guesses, for the task ``"classify"``.
        format: of a path, a key of ``FORMATS``; None uses the suffix, and whether the path is a
            folder.
        labels: of objects, the targets of the task, one entry per sequence: a label, a list with a
            label per element, or numbers; None uses those of ``source``, if it has any.
        on_bad_row: of a path, ``"raise"``, or ``"skip"`` to leave out rows that break a rule;
            ``skipped`` lists them.

    Returns:
        The sequences, unchanged. ``notes`` lists what was guessed and left out, named columns that
        the format lacks, and the number of empty sequences with a label.

    Raises:
        ArgumentTypeError: ``source`` or ``columns`` of another kind, or labels with a path.
        ArgumentError: ``format`` is not a key of ``FORMATS``, or ``on_bad_row`` neither ``"raise"``
            nor ``"skip"``, or ``format`` or ``"skip"`` without a path.
        DataError: no sequence; a path that is missing, unreadable, of an unknown suffix, or no file
            or folder; or content that breaks a rule.
        ShapeError: sequences with different channels, or not one label per sequence.
        MissingExtraError: the ``data`` extra is required and not installed.

    Example:
        >>> data = read([[0.1, 0.5], [[0.9], [0.2], [0.3]]], labels=["up", "down"])
        >>> data.lengths.tolist(), data.channels, data.labels
        ([2, 3], ('x0',), ('up', 'down'))
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "cat.txt").write_text("tom\ntiger\n")
        ...     _ = Path(folder, "dog.txt").write_text("rex\n")
        ...     data = read(folder)
        >>> data.labels, data.lengths.tolist()
        (('cat', 'cat', 'dog'), [3, 5, 3])
    """
    fix = "pass e.g. rl.data.Columns(label=...); labels are passed by name, as labels=[...]"
    check_kind("columns", columns, (Columns, type(None)), "an object of Columns, or None", fix)
    if isinstance(source, (str, os.PathLike)):
        if labels is not None:
            rule = "None, because a file has its labels in a column"
            fix = "name the column with Columns(label=...)"
            raise ArgumentTypeError("labels", quote(labels), rule, fix)
        return Dataset(formats.read(as_path(source), columns, format, on_bad_row=on_bad_row))
    for name, given, default in (("format", format, None), ("on_bad_row", on_bad_row, "raise")):
        if given != default:
            rule = f"{default!r} for data in memory, because it is about the reading of files"
            raise ArgumentError(name, quote(given), rule, "leave it out, or write a file")
    if isinstance(source, Dataset) and labels is None:
        return source if columns is None else _noted(source, columns)
    return Dataset(records_from(listed(source), listed(labels), columns))


def _has_own_steps(data: Any) -> bool:
    """Return True if each element is there by itself: of a Ragged, or a row of a table."""
    return isinstance(data, Ragged) or is_panel(data)


def _noted(dataset: Dataset, columns: Columns) -> Dataset:
    """Return a dataset with a note about options that differ from those it was read with."""
    unused = [
        field.name
        for field in fields(Columns)
        if field.name not in ("task", "need_labels")
        and getattr(columns, field.name) not in (None, False, getattr(dataset.columns, field.name))
    ]
    if not unused:
        return dataset
    names = ", ".join(map(columns_argument, unused))
    noted = copy(dataset)
    noted.notes = (*dataset.notes, f"not used, since a Dataset is read already: {names}")
    return noted


def japanese_vowels() -> tuple[Dataset, Dataset]:
    """Return the Japanese vowels data, from the files of sktime: 270 training and 370 test
    recordings.

    Nine speakers pronounce two vowels. A recording has 7 to 29 steps of 12 channels, and the
    speaker is the label. The split is the official one. sktime itself is not imported.

    Returns:
        The training part and the test part.

    Raises:
        MissingExtraError: sktime is not installed.

    Example:
        >>> train, test = japanese_vowels()
        >>> len(train), len(test)
        (270, 370)
    """
    spec = importlib.util.find_spec("sktime")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("sktime is not installed. Run pip install 'raglane[demo]'.")
    folder = Path(spec.submodule_search_locations[0], "datasets", "data", "JapaneseVowels")
    train, test = (
        Dataset(formats.read(folder / f"JapaneseVowels_{part}.ts")) for part in ("TRAIN", "TEST")
    )
    return train, test


def records_from(data: Any, labels: Any, columns: Columns | None) -> Records:
    """Convert objects of a program to records, see :func:`read`."""
    asked = Columns() if columns is None else columns
    # A column of labels is optional if labels are passed.
    columns = asked if labels is None else replace(asked, need_labels=False)
    table = None if is_panel(data) else _table(data)
    records = _read(data, columns) if table is None else _of_table(table, columns)
    needs_labels = asked.need_labels or labels is not None
    records = replace(
        records, columns=replace(records.columns, task=asked.task, need_labels=needs_labels)
    )
    if len(records) == 0:
        raise DataError("data", "no sequences", "at least one sequence", "pass some")
    if labels is not None:
        records = _with_labels(records, labels, asked.label_split)
    elif columns.wants_labels and not records.has_targets:
        rule = f"a list with one entry per sequence, for the task {columns.task}"
        fix = f"pass {argument('labels')}"
        fix = f"{fix}, or {_WHOLE}" if _is_frame(data) else fix
        raise DataError("labels", "none", rule, fix)
    if isinstance(data, Dataset):
        return replace(records, notes=_noted(data, asked).notes)
    if table is None and not _has_own_steps(data):
        kept = replace(records.columns, keep_trailing=asked.keep_trailing)
        records = without_padding(replace(records, columns=kept))
    notes = unused_notes(asked, () if table is None else ROLES, "data in memory", records)
    if labels is not None and asked.label is not None and table is not None:
        # A column of this name is left out of the features.
        columns_of_labels = {asked.label, *(name.strip() for name in asked.label.split(","))}
        if columns_of_labels.isdisjoint(table.column_names):
            notes.append(f"not used, since labels are passed: {columns_argument('label')}")
    return replace(records, notes=(*records.notes, *notes))


def _read(data: Any, columns: Columns) -> Records:
    if isinstance(data, Dataset):
        return data.records
    if _is_grouped(data):
        raise ArgumentTypeError("data", "groups of a table", _FORMS, _WHOLE)
    if isinstance(data, PackedSequence):
        raise ArgumentTypeError("data", "a PackedSequence", _FORMS, conversion_of(data))
    if columns.tokens or (columns.tokens is None and columns.task == "language"):
        sequences = _whole_numbers(data)
        if sequences is not None:
            return _tokens(sequences, replace(columns, tokens=True))
    if isinstance(data, Ragged):
        return _flat(data.values, data.offsets.cpu().numpy())
    if isinstance(data, torch.Tensor) or (isinstance(data, np.ndarray) and data.dtype.kind != "O"):
        return _array(check_tensor("data", data) if isinstance(data, torch.Tensor) else data)
    if is_panel(data):
        records = _panel(data)
        names = list((data if _is_pandas(data, "DataFrame") else data[0]).columns)
        # Named channels are found by their names in any order.
        is_named = all(isinstance(name, str) for name in names) and len(set(names)) == len(
            records.channels
        )
        return replace(records, channels=tuple(names)) if is_named else records
    if hasattr(data, "to_list") or isinstance(data, np.ndarray):
        # A column of pandas or polars, or an array of objects.
        data = list(data)
    if isinstance(data, (str, bytes, dict)) or not isinstance(data, Sequence):
        raise ArgumentTypeError("data", _kind(data), _FORMS, "pass one of these")
    if not data:
        return _flat(np.zeros((0, 1)), [0])
    return _tokens(data, columns) if is_text(data) else _numbers(data)


def _whole_numbers(data: Any) -> list[list[int]] | None:
    """Return the sequences of data whose elements are whole numbers; None for other data."""
    if is_panel(data) or isinstance(data, (str, bytes, dict)) or not hasattr(data, "__iter__"):
        return None
    sequences = []
    for sequence in data:
        is_sequence = isinstance(sequence, (list, tuple, np.ndarray, torch.Tensor))
        if not is_sequence or (isinstance(sequence, (list, tuple)) and is_text([sequence])):
            return None
        try:
            numbers = np.asarray(sequence.cpu() if isinstance(sequence, torch.Tensor) else sequence)
        except (TypeError, ValueError):  # of sequences of several lengths
            return None
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            return None
        sequences.append(numbers.tolist())
    return sequences if any(sequences) else None


def _is_grouped(data: Any) -> bool:
    """Return True for a table that is grouped, or for its groups as pairs of a key and a table."""
    if "GroupBy" in type(data).__name__:
        return True
    first = data[0] if isinstance(data, list) and data else None
    return isinstance(first, tuple) and len(first) == 2 and _is_frame([first[1]])


def _is_frame(data: Any) -> bool:
    """Return True for a list of tables of pandas or polars."""
    return isinstance(data, (list, tuple)) and [*map(_name_of, data[:1])] == ["DataFrame"]


def _name_of(value: Any) -> str:
    return type(value).__name__


def _kind(data: Any) -> str:
    return (
        quote(data)
        if isinstance(data, (str, bytes, int, float, type(None)))
        else f"a {type(data).__name__}"
    )


def _flat(values: Any, offsets: Any) -> Records:
    if values.ndim not in (1, 2) or values.shape[1:] == (0,):
        got = f"elements of shape {tuple(values.shape[1:])}"
        raise ShapeError(
            "data",
            got,
            "sequences whose elements are numbers, or C channels",
            "flatten the elements",
        )
    rows = _floats(values, "data")
    rows = rows[:, None] if rows.ndim == 1 else rows
    channels = tuple(f"x{place}" for place in range(rows.shape[1]))
    return Records(rows, np.array(offsets, dtype=np.int64), source=_DATA, channels=channels)


def _floats(values: Any, name: str, fix: str = _CONVERT) -> npt.NDArray[np.float32]:
    check_unmasked(name, values)
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            values = (values.float() if values.is_floating_point() else values).numpy()
        numbers = np.asarray(values)
        if numbers.dtype == object:
            # pandas converts its missing values.
            numbers = np.asarray(
                (values if _is_pandas(values, "DataFrame") else numbers).astype(np.float64)
            )
        if numbers.dtype.kind in "biuf" or not numbers.size:
            return np.asarray(as_float32(numbers), order="C")
        got = f"an array of {numbers.dtype}"
    except (
        TypeError,
        ValueError,
        OverflowError,
        NotImplementedError,
    ):  # by sparse or meta tensors too
        got = f"a {type(values).__name__} that is not an array of numbers"
    raise ArgumentTypeError(
        name, got, "an array (L,) or (L, C) of real numbers, or a list of them", fix
    )


def _array(array: Any) -> Records:
    """Return the records of an array ``(B, L)`` or ``(B, L, C)``, sequences of one length."""
    if array.ndim not in (2, 3):
        rule = "an array (sequences, steps) or (sequences, steps, channels)"
        raise ShapeError(
            "data", f"an array of shape {tuple(array.shape)}", rule, "pass a list of sequences"
        )
    count, steps = array.shape[:2]
    return _flat(array.reshape(count * steps, *array.shape[2:]), np.arange(count + 1) * steps)


def _numbers(sequences: Sequence[Any]) -> Records:
    fix = _WHOLE if _is_frame(sequences) else _CONVERT
    matrices = [
        _floats(sequence, f"data[{place}]", fix) for place, sequence in enumerate(sequences)
    ]
    typical = next((matrix for matrix in matrices if matrix.size), matrices[0])
    width = _width(typical) if typical.size else 1
    for place, matrix in enumerate(matrices):
        if matrix.ndim not in (1, 2) or (len(matrix) and _width(matrix) != width):
            rule = f"an array (L,) or (L, C), with C = {width} as in the other sequences"
            fix = "give every sequence the same channels; transpose sequences of shape (channels, steps)"
            fixes = (
                "wrap the numbers of a sequence in a list",
                fix,
                fix,
                f"reshape it to (L, {width})",
            )
            raise ShapeError(
                f"data[{place}]", f"shape {matrix.shape}", rule, fixes[min(matrix.ndim, 3)]
            )
    values = np.concatenate([matrix.reshape(-1, width) for matrix in matrices])
    return _flat(values, offsets_of(list(map(len, matrices))))


def _width(matrix: npt.NDArray[Any]) -> int:
    return int(np.prod(matrix.shape[1:]))


def is_text(sequences: Sequence[Any]) -> bool:
    """Return True if sequences are texts, or lists of texts; the first non-empty one decides."""
    first = next(
        (
            sequence
            for sequence in sequences
            if isinstance(sequence, str) or _has_elements(sequence)
        ),
        None,
    )
    return isinstance(first, str) or (first is not None and isinstance(first[0], str))


def _has_elements(sequence: Any) -> bool:
    is_array = isinstance(sequence, np.ndarray) and sequence.ndim > 0
    return (is_array or isinstance(sequence, (list, tuple))) and len(sequence) > 0


def _arrow(values: Any, name: str, rule: str) -> Any:
    arrow = require("pyarrow", "data")
    plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    try:
        # Among texts and whole numbers, NaN and NA are missing entries.
        is_mixed = not all(isinstance(value, (float, list)) for value in plain)
        return arrow.chunked_array([arrow.array(plain, from_pandas=is_mixed)])
    except (arrow.ArrowException, OverflowError, TypeError, UnicodeEncodeError) as error:
        got = f"values of several kinds ({' '.join(str(error).split()).rstrip('.')})"
        raise ArgumentTypeError(name, got, rule, "pass values of one kind") from error


def _tokens(sequences: Sequence[Any], columns: Columns) -> Records:
    """Return the records of texts, which are tokenized as ``columns.split`` names it, or of lists
    of texts or whole numbers.
    """
    column = _arrow(
        sequences, "data", "sequences that are all texts, or all lists of texts, or all of numbers"
    )
    table = require("pyarrow", "data").table({"data": column})
    asked = Columns(need_labels=False, sequence="data", split=columns.split, tokens=columns.tokens)
    # The column is one of this function, and has no role that a user could change.
    return replace(_of_table(table, asked), roles=NO_ROLES)


def _with_labels(records: Records, labels: Any, label_split: str | None) -> Records:
    """Return records with labels, which are read like a column of a file."""
    rule = "a list with one entry per sequence"
    is_list = (
        hasattr(labels, "__len__")
        and getattr(labels, "ndim", 1) > 0
        and not hasattr(labels, "columns")
    )
    if not is_list or isinstance(labels, (str, bytes, dict, set, frozenset)):
        raise ArgumentTypeError(
            "labels", _kind(labels), rule, "pass a list, or one column of a table"
        )
    if len(labels) != len(records):
        raise ShapeError(
            "labels",
            f"{len(labels)} for {len(records)} sequences",
            rule,
            "pass one label per sequence",
        )
    check_order("labels", labels, records.ids)
    column = _arrow(
        list(labels), "labels", "labels of one kind: texts, whole numbers, booleans, or lists"
    )
    columns = replace(records.columns, label_split=label_split)
    reader = Reader(_LABELS, records.ids, None)
    words, tags, targets = read_labels(reader, column, "labels", records.offsets, columns)
    columns = replace(columns, label_split=label_split_of(column, columns))
    kinds = label_kinds(column.type, columns.task)
    return replace(
        records, labels=words, tags=tags, targets=targets, label_kinds=kinds, columns=columns
    )


def check_order(name: str, labels: Any, ids: Sequence[str | int] | None) -> None:
    """Raise a DataError if labels of pandas have the ids of the sequences as their index, in
    another order.
    """
    has_index = _is_pandas(labels, "Series") or _is_pandas(labels, "DataFrame")
    index = list(map(str, labels.index.tolist() if has_index else ()))
    names = list(map(str, ids or ()))
    # pandas numbers the rows of labels without an index.
    if index not in (names, [str(row) for row in range(len(names))]) and set(index) == set(names):
        rule = f"in the order of the sequences, {quote_all(names)}"
        got = f"an index in another order, {quote_all(index)}"
        fix = f"pass {name}.loc[ids] with the ids in their order, or {name}.to_numpy() if it has their order already"
        raise DataError(name, got, rule, fix)


def _is_pandas(data: Any, name: str) -> bool:
    # By name, so that pandas need not be imported.
    return any(
        kind.__name__ == name and kind.__module__.split(".")[0] == "pandas"
        for kind in type(data).__mro__
    )


def _table(data: Any) -> Any:
    """Return an object with columns as a ``pyarrow.Table``; None for other objects."""
    has_names = hasattr(data, "columns") or hasattr(data, "column_names")
    is_table = has_names and (hasattr(data, "__arrow_c_stream__") or hasattr(data, "with_format"))
    return table_from(data, "data") if is_table else None


def _of_table(table: Any, columns: Columns) -> Records:
    """Return the records of a table: by the rules of CSV if a row is an element, else by those of
    Parquet.
    """
    if table.num_rows == 0:
        return _flat(np.zeros((0, 1)), [0])
    return read_table(_DATA, table.schema, table.select, columns)


def is_panel(data: Any) -> bool:
    """Return True for a table with an index of (sequence, step) or a Series in each entry, and for
    a list of tables.
    """
    if isinstance(data, (list, tuple)):
        return len(data) > 0 and _is_pandas(data[0], "DataFrame")
    if not _is_pandas(data, "DataFrame"):
        return False
    if data.index.nlevels > 1:
        return True
    return (
        len(data) > 0
        and len(data.columns) > 0
        and all(_is_pandas(entry, "Series") for entry in data.iloc[0])
    )


def _panel(frame: Any) -> Records:
    if isinstance(frame, (list, tuple)):
        for place, table in enumerate(frame):
            names = list(table.columns) if _is_pandas(table, "DataFrame") else None
            if names != list(frame[0].columns):
                got = f"a {type(table).__name__}" + (
                    f" of the columns {quote_all(names)}" if names else ""
                )
                rule = f"a table with the columns of data[0] in their order, {quote_all(frame[0].columns)}"
                raise DataError(
                    f"data[{place}]",
                    got,
                    rule,
                    "select them with table[names], or pass only arrays",
                )
        return _numbers(frame)
    if frame.index.nlevels == 1:
        # Rows of Series, one per channel.
        columns = ([np.asarray(entry) for entry in row] for row in frame.itertuples(index=False))
        return _numbers([_stacked(row, place) for place, row in enumerate(columns)])
    pandas = require("pandas", "data")
    codes, ids = pandas.factorize(frame.index.droplevel(-1))
    if (codes < 0).any():
        got = f"a missing entry in row {int((codes < 0).argmax())} of the index"
        raise DataError(
            "data",
            got,
            "a table with the id of a sequence in each row",
            "fill it, or remove the row",
        )
    steps = frame.index.get_level_values(-1)
    # Words, such as t2 and t10, and missing steps keep the order of the rows.
    is_ordered = getattr(steps, "ordered", steps.inferred_type in _ORDERED) and not steps.hasnans
    if is_ordered and frame.index.has_duplicates:
        row = int(frame.index.duplicated().argmax())
        got = f"the index ({', '.join(map(str, frame.index[row]))}) again in row {row}"
        raise DataError(
            "data", got, "a table with one row per step of a sequence", "remove one of the rows"
        )
    ranks = np.arange(len(steps))
    with suppress(TypeError):  # of times with and without a zone, which have no order
        ranks = pandas.factorize(steps, sort=True)[0] if is_ordered else ranks
    order = np.lexsort((ranks, codes))
    values = _floats(
        frame.iloc[order], "data", "select its columns of numbers, or pass data.reset_index()"
    )
    return replace(
        _flat(values, offsets_of(np.bincount(codes, minlength=len(ids)))),
        ids=tuple(name if isinstance(name, (str, int)) else str(name) for name in ids.tolist()),
    )


def _stacked(row: list[npt.NDArray[Any]], place: int) -> npt.NDArray[Any]:
    """Return the channels of one sequence as columns, ``(L, C)``."""
    lengths = list(map(len, row))
    if len(set(lengths)) > 1:
        got = f"channels of {', '.join(map(str, lengths))} steps"
        rule = "a sequence whose channels have one length"
        raise ShapeError(
            f"data, row {place}", got, rule, "cut them to one length, or fill with NaN"
        )
    return np.stack(row, axis=1)
