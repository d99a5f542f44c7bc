"""Records from the columns of lists or texts: each row is a sequence.

A sequence is an entry of one column: a list of numbers (one channel), a list of lists of numbers
(steps of channels), a list of strings (tokens), or a text, which is split on white space into
tokens. A label is a string, an integer or a boolean (``"true"``, ``"false"``); for tagging, a list
of these as long as the sequence. Columns are converted as a whole, without a loop over elements.

Further columns may be features: lists as long as the sequence (of elements), or numbers or words
(of sequences). Numbers of elements, in addition to a sequence of numbers, become channels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raglane._utils.messages import quote
from raglane.data.assemble.padding import without_padding
from raglane.data.assemble.reader import Reader, words_of
from raglane.data.assemble.sequences import SET_SIZE, are_sets, sequences_of
from raglane.data.assemble.targets import label_split_of, read_labels
from raglane.data.columns import Columns, option
from raglane.data.records import Feature, Records, as_float32
from raglane.data.roles import Roles
from raglane.data.roles.label_types import label_kinds
from raglane.data.sources.files import data_error
from raglane.data.sources.ipc import CHANNELS
from raglane.data.typed.arrays import Array, Integers
from raglane.data.typed.arrow import arrow_types, as_texts, is_label, is_list, is_number, is_text


def records_of(
    path: Path,
    table: Any,
    roles: Roles,
    columns: Columns,
    lines: Integers | None = None,
    first: int | None = 0,
) -> Records:
    """Convert the chosen columns of a table to records; ``lines`` and ``first`` number its rows,
    for messages.
    """
    if table.num_rows == 0:
        raise data_error(path, "no rows", "a file with at least one sequence", "check the file")
    ids = None
    if roles.id:
        ids = _ids(Reader(path, None, lines, first), table.column(roles.id[0]), roles.id[0])
    reader = Reader(path, ids, lines, first)
    sequence = str(roles.sequence)
    column = table.column(sequence)
    notes = roles.about
    if are_sets(column):
        sets = f"the lists of {quote(sequence)} are sets, as {SET_SIZE} channels of zeros and ones"
        notes = (*notes, sets)
        categorical = tuple(dict.fromkeys((*(columns.categorical or ()), sequence)))
        columns = replace(columns, categorical=categorical)
    values, offsets = sequences_of(reader, column, sequence, columns)
    values, channels, features = _with_features(reader, table, roles, columns, values, offsets)
    used = replace(
        columns,
        sequence=sequence,
        label=roles.label or columns.label,
        split=(columns.split or "words") if is_text(column.type) else None,
        label_split=None,
    )
    records = Records(
        values,
        offsets,
        ids,
        channels=_named_channels(table, sequence, channels),
        source=path,
        notes=notes,
        columns=used,
        features=features,
        roles=roles.described,
    )
    if roles.label is not None:
        records = _labelled(reader, table.column(roles.label), roles.label, records, columns)
    return without_padding(records)


def _labelled(
    reader: Reader, column: Any, name: str, records: Records, columns: Columns
) -> Records:
    """Return records with their labels or targets."""
    labels, tags, targets = read_labels(reader, column, name, records.offsets, columns)
    # A guessed id column is not required of other files.
    used = replace(records.columns, label_split=label_split_of(column, columns))
    kinds = label_kinds(column.type, columns.task)
    return replace(
        records, labels=labels, tags=tags, targets=targets, label_kinds=kinds, columns=used
    )


def _named_channels(table: Any, sequence: str, channels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the channels by the names that a converted folder has stored."""
    metadata = table.schema.field(sequence).metadata or {}
    if CHANNELS not in metadata:
        return channels
    names = tuple(json.loads(metadata[CHANNELS]))
    return names if len(names) == len(channels) else channels


def _ids(reader: Reader, column: Any, name: str) -> tuple[str | int, ...]:
    reader.check_nulls(column, name, "id")
    if arrow_types().is_integer(column.type):
        return tuple(column.to_pylist())
    return tuple(words_of(reader, column, name).tolist())


def _with_features(
    reader: Reader,
    table: Any,
    roles: Roles,
    columns: Columns,
    values: Array,
    offsets: Integers,
) -> tuple[Array, tuple[str, ...], tuple[Feature, ...]]:
    """Return the values with the feature columns that become channels, the channels, and the other
    features.
    """
    features: list[Feature] = []
    blocks = [values]
    channels = _channels(str(roles.sequence), values)
    for name in roles.features:
        # ``tokens`` and the task apply only to the sequence column.
        own = replace(columns, tokens=name in (columns.categorical or ()), task="tag")
        column = table.column(name)
        if not is_list(column.type):
            fix = f"for a feature of whole sequences, pass {option('static')}"
            raise reader.type_error(column, name, "lists as long as the sequence", fix)
        block, ends = sequences_of(reader, column, name, own)
        if not np.array_equal(ends, offsets):
            row = int((np.diff(ends) != np.diff(offsets)).argmax())
            lengths = (
                f"{ends[row + 1] - ends[row]} elements in {reader.row(row)}, column {quote(name)}"
            )
            got = (
                f"{lengths}, and {offsets[row + 1] - offsets[row]} in {quote(str(roles.sequence))}"
            )
            raise reader.error(
                got, "equally long columns of a sequence", "correct the row, or remove it"
            )
        if block.ndim == 2 and block.shape[1] == 0:
            # All sequences are empty, so the number of channels is unknown.
            block = np.zeros((0, 1), dtype=np.float32)
        if block.ndim == 2 and values.ndim == 2:
            blocks.append(block)
            channels += _channels(name, block)
        elif block.ndim == 2:
            pairs = zip(_channels(name, block), block.T, strict=True)
            features += [
                Feature(channel, np.ascontiguousarray(numbers)) for channel, numbers in pairs
            ]
        else:
            features.append(Feature(name, block))
    features += [
        _static_feature(reader, table.column(name), name, columns) for name in roles.static
    ]
    if len(blocks) > 1:
        return np.concatenate(blocks, axis=1), channels, tuple(features)
    # The channels of a single column have default names.
    return values, tuple(f"x{place}" for place in range(len(channels))), tuple(features)


def _channels(name: str, values: Array) -> tuple[str, ...]:
    """Return the names of a column's channels: the column, with a number if there are several."""
    if values.ndim == 1:
        return ()
    return (
        (name,)
        if values.shape[1] == 1
        else tuple(f"{name}{place}" for place in range(values.shape[1]))
    )


def _static_feature(reader: Reader, column: Any, name: str, columns: Columns) -> Feature:
    """Read a column with an entry per sequence; null is missing."""
    is_words = is_text(column.type) or name in (columns.categorical or ())
    if is_words and is_label(column.type):
        return Feature(
            name, words_of(reader, as_texts(column).fill_null(""), name), per_sequence=True
        )
    if is_words:
        raise reader.category_error(column, name)
    if not is_number(column.type):
        raise reader.type_error(
            column, name, "numbers or words", "convert the column, or leave it out"
        )
    return Feature(
        name, as_float32(column.cast("double", safe=False).to_numpy()), per_sequence=True
    )
