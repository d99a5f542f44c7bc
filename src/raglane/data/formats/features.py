"""Features out of Arrow columns: lists beside the sequence column, and what stands once per sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.features import Feature
from raglane.data.formats.arrow import Reader, is_label, is_list, is_number, is_text, words_of
from raglane.data.formats.base import columns_argument, data_error, named_column
from raglane.data.formats.sequences import sequences_of
from raglane.data.records import Columns
from raglane.errors import quote

__all__ = ["beside", "static_of", "with_features"]


def beside(path: Path, columns: Columns, present: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that were named as features, of elements and of sequences."""
    names = list(present)
    features = tuple(named_column(path, "features", name, names) for name in columns.features or ())
    static = tuple(named_column(path, "static", name, names) for name in columns.static or ())
    for name in columns.categorical or ():
        named_column(path, "categorical", name, names)
    for name in static:
        others = {"features": columns.features or (), "sequence": (columns.sequence,), "label": (columns.label,)}
        role = next((role for role, taken in others.items() if name in taken), None)
        if role is not None:
            got = f"{quote(name)} as {columns_argument('static')} and as {columns_argument(role)}"
            raise data_error(path, got, "a column has one role", "leave one of the two out")
    return features, static


def with_features(
    reader: Reader, table: Any, chosen: Any, columns: Columns, values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], tuple[str, ...], tuple[Feature, ...]]:
    """Sequences with the columns that stand beside them."""
    features: list[Feature] = []
    blocks, channels = [values], _names(chosen.sequence, values)
    for name in chosen.features:
        # Whether the whole numbers of the sequence column are tokens says nothing of another column.
        asked = replace(columns, tokens=name in (columns.categorical or ()), task="tag")
        column = table.column(name)
        if not is_list(column.type):
            rule = "a feature of elements is a list as long as the sequence"
            fix = f"for one that a sequence has as a whole: {columns_argument('static')}"
            raise reader.error(f"{column.type} in column {quote(name)}", rule, fix)
        found, ends = sequences_of(reader, column, name, asked)
        if not np.array_equal(ends, offsets):
            row = int((np.diff(ends) != np.diff(offsets)).argmax())
            lengths = f"{ends[row + 1] - ends[row]} elements in {reader.row(row)}, column {quote(name)}"
            got = f"{lengths}, and {offsets[row + 1] - offsets[row]} in {quote(chosen.sequence)}"
            raise reader.error(got, "the columns of a sequence are equally long", "correct the row, or remove it")
        if found.ndim == 2 and found.shape[1] == 0:
            # No row has an element, so nobody knows how many channels there would be.
            found = np.zeros((0, 1), dtype=np.float32)
        if found.ndim == 2 and values.ndim == 2:
            blocks.append(found)
            channels += _names(name, found)
        elif found.ndim == 2:
            pairs = zip(_names(name, found), found.T, strict=True)
            features += [Feature(part, np.ascontiguousarray(column)) for part, column in pairs]
        else:
            features.append(Feature(name, found))
    features += [static_of(reader, table.column(name), name, columns) for name in chosen.static]
    if len(blocks) > 1:
        return np.concatenate(blocks, axis=1), channels, tuple(features)
    # A sequence column by itself has channels without names.
    own = tuple(f"x{place}" for place in range(len(channels)))
    return values, own, tuple(features)


def _names(name: str, values: npt.NDArray[Any]) -> tuple[str, ...]:
    """What the channels of a column are called: as the column, with a number where there are several."""
    if values.ndim == 1:
        return ()
    return (name,) if values.shape[1] == 1 else tuple(f"{name}{place}" for place in range(values.shape[1]))


def static_of(reader: Reader, column: Any, name: str, columns: Columns) -> Feature:
    """A column with an entry per sequence; null is missing."""
    is_words = is_text(column.type) or name in (columns.categorical or ())
    if is_words and is_label(column.type):
        return Feature(name, words_of(reader, column.cast("large_string").fill_null(""), name), per_sequence=True)
    if is_words or not is_number(column.type):
        rule = "what a sequence has as a whole is a number or a word"
        raise reader.error(f"{column.type} in column {quote(name)}", rule, "convert the column, or leave it out")
    numbers = column.cast("double").to_numpy()
    # A number that float32 cannot hold becomes infinite, and is then reported or filled as missing.
    with np.errstate(over="ignore"):
        return Feature(name, numbers.astype(np.float32), per_sequence=True)
