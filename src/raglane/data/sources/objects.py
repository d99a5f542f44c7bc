"""Arrays, lists, Ragged and panels of pandas as sequences of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raglane._utils.checks import check_unmasked
from raglane._utils.messages import quote_all, require
from raglane.data.records import Records, as_float32, offsets_of
from raglane.data.typed.arrays import Array, Values
from raglane.errors import ArgumentTypeError, DataError, ShapeError

# The name of objects in messages.
DATA = Path("data")

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

CONVERT = "convert it, or pass only texts for tokens"
WHOLE = "pass the whole table, as rl.fit(df): rows with the same id are one sequence"


def flat(values: Any, offsets: Any) -> Records:
    """Return sequences of numbers, or of channels, between offsets."""
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
    return Records(rows, np.array(offsets, dtype=np.int64), source=DATA, channels=channels)


def _floats(values: Any, name: str, fix: str = CONVERT) -> Values:
    check_unmasked(name, values)
    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
            values = (values.float() if values.is_floating_point() else values).numpy()
        numbers = np.asarray(values)
        if numbers.dtype == object:
            # pandas converts its missing values.
            numbers = np.asarray(
                (values if is_pandas(values, "DataFrame") else numbers).astype(np.float64)
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


def array_records(array: Any) -> Records:
    """Return the records of an array ``(B, L)`` or ``(B, L, C)``, sequences of one length."""
    if array.ndim not in (2, 3):
        rule = "an array (sequences, steps) or (sequences, steps, channels)"
        raise ShapeError(
            "data", f"an array of shape {tuple(array.shape)}", rule, "pass a list of sequences"
        )
    count, steps = array.shape[:2]
    return flat(array.reshape(count * steps, *array.shape[2:]), np.arange(count + 1) * steps)


def number_records(sequences: Sequence[Any]) -> Records:
    """Return the records of arrays ``(L,)`` or ``(L, C)``, or of lists of numbers."""
    fix = WHOLE if is_frame(sequences) else CONVERT
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
    return flat(values, offsets_of(list(map(len, matrices))))


def _width(matrix: Array) -> int:
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


def is_pandas(data: Any, name: str) -> bool:
    """Return True for an object of a class of pandas."""
    # By name, so that pandas need not be imported.
    return any(
        kind.__name__ == name and kind.__module__.split(".")[0] == "pandas"
        for kind in type(data).__mro__
    )


def whole_numbers(data: Any) -> list[list[int]] | None:
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


def is_frame(data: Any) -> bool:
    """Return True for a list of tables of pandas or polars."""
    return isinstance(data, (list, tuple)) and [*map(_name_of, data[:1])] == ["DataFrame"]


def _name_of(value: Any) -> str:
    return type(value).__name__


def is_panel(data: Any) -> bool:
    """Return True for a table with an index of (sequence, step) or a Series in each entry, and for
    a list of tables.
    """
    if isinstance(data, (list, tuple)):
        return len(data) > 0 and is_pandas(data[0], "DataFrame")
    if not is_pandas(data, "DataFrame"):
        return False
    if data.index.nlevels > 1:
        return True
    return (
        len(data) > 0
        and len(data.columns) > 0
        and all(is_pandas(entry, "Series") for entry in data.iloc[0])
    )


def panel_records(data: Any) -> Records:
    """Return the sequences of a panel, with the names of its columns as channels."""
    if isinstance(data, (list, tuple)):
        _check_tables(data)
        records = number_records(data)
        names = list(data[0].columns)
    else:
        is_nested = data.index.nlevels == 1
        records = _nested(data) if is_nested else _indexed(data)
        names = list(data.columns)
    # Named channels are found by their names in any order.
    are_texts = all(isinstance(name, str) for name in names)
    is_named = are_texts and len(set(names)) == len(records.channels)
    return replace(records, channels=tuple(names)) if is_named else records


def _check_tables(tables: Sequence[Any]) -> None:
    """Raise a DataError for the first table with other columns than the first."""
    expected = list(tables[0].columns)
    for place, table in enumerate(tables):
        names = list(table.columns) if is_pandas(table, "DataFrame") else None
        if names == expected:
            continue
        got = f"a {type(table).__name__}"
        got += f" of the columns {quote_all(names)}" if names else ""
        rule = f"a table with the columns of data[0] in their order, {quote_all(expected)}"
        fix = "select them with table[names], or pass only arrays"
        raise DataError(f"data[{place}]", got, rule, fix)


def _nested(frame: Any) -> Records:
    """Return the sequences of rows of Series, one per channel."""
    columns = ([np.asarray(entry) for entry in row] for row in frame.itertuples(index=False))
    return number_records([_stacked(row, place) for place, row in enumerate(columns)])


def _indexed(frame: Any) -> Records:
    """Return the sequences of a table with an index of (sequence, step)."""
    pandas = require("pandas", "data")
    codes, ids = pandas.factorize(frame.index.droplevel(-1))
    if (codes < 0).any():
        got = f"a missing entry in row {int((codes < 0).argmax())} of the index"
        rule = "a table with the id of a sequence in each row"
        raise DataError("data", got, rule, "fill it, or remove the row")
    steps = frame.index.get_level_values(-1)
    # Words, such as t2 and t10, and missing steps keep the order of the rows.
    is_ordered = getattr(steps, "ordered", steps.inferred_type in _ORDERED) and not steps.hasnans
    if is_ordered and frame.index.has_duplicates:
        row = int(frame.index.duplicated().argmax())
        got = f"the index ({', '.join(map(str, frame.index[row]))}) again in row {row}"
        rule = "a table with one row per step of a sequence"
        raise DataError("data", got, rule, "remove one of the rows")
    ranks = np.arange(len(steps))
    with suppress(TypeError):  # of times with and without a zone, which have no order
        ranks = pandas.factorize(steps, sort=True)[0] if is_ordered else ranks
    order = np.lexsort((ranks, codes))
    fix = "select its columns of numbers, or pass data.reset_index()"
    values = _floats(frame.iloc[order], "data", fix)
    return replace(
        flat(values, offsets_of(np.bincount(codes, minlength=len(ids)))),
        ids=tuple(name if isinstance(name, (str, int)) else str(name) for name in ids.tolist()),
    )


def _stacked(row: list[Array], place: int) -> Array:
    """Return the channels of one sequence as columns, ``(L, C)``."""
    lengths = list(map(len, row))
    if len(set(lengths)) > 1:
        got = f"channels of {', '.join(map(str, lengths))} steps"
        rule = "a sequence whose channels have one length"
        raise ShapeError(
            f"data, row {place}", got, rule, "cut them to one length, or fill with NaN"
        )
    return np.stack(row, axis=1)
