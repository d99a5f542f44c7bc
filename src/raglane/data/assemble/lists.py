"""Records from Arrow columns, for Parquet, Arrow and JSON lines.

A sequence is an entry of one column: a list of numbers (one channel), a list of lists of numbers
(steps of channels), a list of strings (tokens), or a text, which is split on white space into
tokens. A label is a string, an integer or a boolean (``"true"``, ``"false"``); for tagging, a list
of these as long as the sequence. Columns are converted as a whole, without a loop over elements.

Further columns may be features: lists as long as the sequence (of elements), or numbers or words
(of sequences). Numbers of elements, in addition to a sequence of numbers, become channels.

A table without lists may have a row per element: :func:`raglane.data.assemble.rows.entries_of`.

If no column is named, the sequence column is the only list column, or else the only text column;
the label column is the only other column of labels. A column called ``id`` (or ``sequence_id``,
...) contains the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import quote
from raglane.data.assemble.arrow import (
    SET_SIZE,
    Reader,
    are_sets,
    arrow_types,
    as_texts,
    is_id,
    is_label,
    is_list,
    is_number,
    is_sequence,
    is_text,
    label_kinds,
    label_split_of,
    label_test,
    read_labels,
    sequences_of,
    words_of,
)
from raglane.data.assemble.padding import without_padding
from raglane.data.records import LISTS, Columns, Feature, Records, RoleNotes, as_float32
from raglane.data.roles.rules import ID_NAMES, ROLE_NAMES, TIME_NAMES
from raglane.data.sources.files import (
    check_named,
    choose_column,
    columns_argument,
    data_error,
    empty_label,
    id_column,
    is_named,
    takes_tokens,
)
from raglane.tasks import TASKS


@dataclass(frozen=True)
class Chosen:
    """The columns to read, and notes on the choice."""

    sequence: str
    label: str | None
    id: str | None
    notes: tuple[str, ...]
    features: tuple[str, ...] = ()
    static: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Each column once."""
        every = (self.sequence, self.label, self.id, *self.features, *self.static)
        return list({name: None for name in every if name is not None})

    @property
    def roles(self) -> RoleNotes:
        """Which column is what, in words."""
        named = [
            f"{role} column: {quote(name)} (named)"
            for role, name in (("sequence", self.sequence), ("label", self.label), ("id", self.id))
            if name is not None
            and not any(note.startswith(f"{role} column") for note in self.notes)
        ]
        return RoleNotes(("each row is a sequence",), (*named, *self.notes))

    def label_kinds(self, schema: Any, task: str) -> tuple[str, ...]:
        """Return the kinds of the labels of a table with this ``pyarrow.Schema``; () without
        labels.
        """
        return () if self.label is None else label_kinds(schema.field(self.label).type, task)


def kinds_of(path: Path, schema: Any) -> dict[str, Any]:
    """Return the types of a table's columns; raise a DataError if two have the same name."""
    # pandas stores the index of a table as a column of this name.
    fields = [field for field in schema if not field.name.startswith("__index_level_")]
    kinds = {field.name: field.type for field in fields}
    if len(kinds) < len(fields):
        counts = Counter(field.name for field in fields)
        twice = next(name for name in kinds if counts[name] > 1)
        raise data_error(
            path,
            f"two columns {quote(twice)}",
            "a file with columns of different names",
            "rename one",
        )
    return kinds


def choose(path: Path, schema: Any, columns: Columns) -> Chosen:
    """Choose the columns to read."""
    kinds = {name: kind for name, kind in kinds_of(path, schema).items() if is_named(name, columns)}
    present = list(kinds)
    if columns.time in kinds:
        rule = "a file without a time column, because a row is a whole sequence with its elements in order"
        fix = f"sort the lists, and leave {columns_argument('time')} out"
        raise data_error(path, f"the time column {quote(columns.time)}", rule, fix)
    notes: list[str] = []
    id_name, id_notes = id_column(
        path, columns, present, [name for name in present if is_id(kinds[name])]
    )
    features, static = feature_columns(path, columns, present)
    if columns.sequence is not None:
        sequence = check_named(path, "sequence", columns.sequence, present)
    elif features:
        sequence = features[0]
    else:
        free = [name for name in present if name not in (id_name, columns.label, *static)]
        numbers = []
        candidates = [name for name in free if is_sequence(kinds[name])]
        if columns.wants_labels and TASKS[columns.task].label == "sequence":
            # Both columns may be lists or texts, but only sequences are numbers.
            candidates = [
                name for name in candidates if not is_text(kinds[name].value_type)
            ] or candidates
            is_target = label_test(columns.task)[0]
            numbers = [name for name in candidates if not is_target(kinds[name])]
        labels = (
            ROLE_NAMES["label"]
            if columns.label is None and TASKS[columns.task].label is not None
            else ()
        )
        texts = [name for name in free if is_text(kinds[name]) and name.lower() not in labels]
        if columns.wants_labels and columns.task != "classify":
            # A list may be the label here, but a text with the name of a sequence is not.
            usual = [name for name in texts if name.lower() in ROLE_NAMES["sequence"]]
            candidates = numbers or usual or candidates
        candidates = candidates or texts
        kind = "column of lists of numbers, of lists of lists of numbers, of lists of strings, or of texts"
        sequence, note = choose_column(path, "sequence", candidates, kind, present)
        notes.append(note)
    if is_text(kinds[sequence]):
        how = (
            "on white space into tokens"
            if columns.split in (None, "words")
            else f"into {columns.split}"
        )
        notes.append(f"the texts of {quote(sequence)} are split {how}")
    if is_list(kinds[sequence]) and arrow_types().is_integer(kinds[sequence].value_type):
        notes.append(takes_tokens(columns, sequence)[1])
    features = tuple(name for name in features if name != sequence)
    label = columns.label if columns.wants_labels else None
    if label is not None:
        check_named(path, "label", label, kinds)
    elif columns.wants_labels:
        fits, kind = label_test(columns.task)
        taken = {sequence, id_name, *features, *static}
        # A table with a time in each row has a row per element.
        times = [name for name in kinds if name.lower() in TIME_NAMES and not is_list(kinds[name])]
        candidates = [name for name in kinds if name not in (*taken, *times) and fits(kinds[name])]
        usual = [name for name in kinds if name.lower() in ROLE_NAMES["label"]]
        if usual and all(arrow_types().is_null(kinds[name]) for name in usual):
            raise empty_label(path, usual[0])
        label, note = choose_column(path, "label", candidates, kind, kinds)
        notes.append(note)
    if id_name is None:
        others = [name for name in kinds if name not in (sequence, label, *features, *static)]
        unfit = [name for name in others if name.lower() in ID_NAMES]
        notes += [
            f"not used, since ids are texts or whole numbers: the column {quote(name)}"
            for name in unfit
        ]
    return Chosen(sequence, label, id_name, (*notes, *id_notes), features, static)


def records_of(
    path: Path,
    table: Any,
    chosen: Chosen,
    columns: Columns,
    lines: npt.NDArray[np.int64] | None = None,
    first: int | None = 0,
) -> Records:
    """Convert the chosen columns of a table to records; ``lines`` and ``first`` number its rows,
    for messages.
    """
    if table.num_rows == 0:
        raise data_error(path, "no rows", "a file with at least one sequence", "check the file")
    ids = (
        None
        if chosen.id is None
        else _ids(Reader(path, None, lines, first), table.column(chosen.id), chosen.id)
    )
    reader = Reader(path, ids, lines, first)
    notes = chosen.notes
    if are_sets(table.column(chosen.sequence)):
        notes = (
            *notes,
            f"the lists of {quote(chosen.sequence)} are sets, as {SET_SIZE} channels of zeros and ones",
        )
        columns = replace(
            columns,
            categorical=tuple(dict.fromkeys((*(columns.categorical or ()), chosen.sequence))),
        )
    values, offsets = sequences_of(reader, table.column(chosen.sequence), chosen.sequence, columns)
    split = (columns.split or "words") if is_text(table.column(chosen.sequence).type) else None
    labels = None
    tags = None
    targets = None
    kinds = None
    if chosen.label is not None:
        kinds = label_kinds(table.column(chosen.label).type, columns.task)
        labels, tags, targets = read_labels(
            reader, table.column(chosen.label), chosen.label, offsets, columns
        )
    values, channels, features = _with_features(reader, table, chosen, columns, values, offsets)
    # A guessed id column is not required of other files.
    label_split = (
        None if chosen.label is None else label_split_of(table.column(chosen.label), columns)
    )
    label = chosen.label or columns.label
    used = replace(
        columns, sequence=chosen.sequence, label=label, split=split, label_split=label_split
    )
    records = Records(
        values,
        offsets,
        ids,
        labels,
        tags,
        channels,
        path,
        notes,
        used,
        targets,
        features,
        label_kinds=kinds,
        roles=chosen.roles,
    )
    return without_padding(records)


def _ids(reader: Reader, column: Any, name: str) -> tuple[str | int, ...]:
    reader.check_nulls(column, name, "id")
    if arrow_types().is_integer(column.type):
        return tuple(column.to_pylist())
    return tuple(words_of(reader, column, name).tolist())


def feature_columns(
    path: Path, columns: Columns, present: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that were named as features of elements and of sequences; raise if a role
    is ambiguous.
    """
    names = list(present)
    for several in LISTS:
        for wanted in getattr(columns, several) or ():
            check_named(path, several, wanted, names, len(getattr(columns, several)))
    features, static = (
        tuple(dict.fromkeys(named or ())) for named in (columns.features, columns.static)
    )
    for name in static:
        others = {
            "features": columns.features or (),
            "sequence": (columns.sequence,),
            "label": (columns.label,),
        }
        role = next((role for role, taken in others.items() if name in taken), None)
        if role is not None:
            got = f"{quote(name)} as {columns_argument('static')} and as {columns_argument(role)}"
            raise data_error(
                path, got, "a file with one role per column", "leave one of the two out"
            )
    return features, static


def _with_features(
    reader: Reader,
    table: Any,
    chosen: Chosen,
    columns: Columns,
    values: npt.NDArray[Any],
    offsets: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[Any], tuple[str, ...], tuple[Feature, ...]]:
    """Return the values with the feature columns that become channels, the channels, and the other
    features.
    """
    features: list[Feature] = []
    blocks = [values]
    channels = _channels(chosen.sequence, values)
    for name in chosen.features:
        # ``tokens`` and the task apply only to the sequence column.
        own = replace(columns, tokens=name in (columns.categorical or ()), task="tag")
        column = table.column(name)
        if not is_list(column.type):
            fix = f"for a feature of whole sequences, pass {columns_argument('static')}"
            raise reader.type_error(column, name, "lists as long as the sequence", fix)
        block, ends = sequences_of(reader, column, name, own)
        if not np.array_equal(ends, offsets):
            row = int((np.diff(ends) != np.diff(offsets)).argmax())
            lengths = (
                f"{ends[row + 1] - ends[row]} elements in {reader.row(row)}, column {quote(name)}"
            )
            got = f"{lengths}, and {offsets[row + 1] - offsets[row]} in {quote(chosen.sequence)}"
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
        _static_feature(reader, table.column(name), name, columns) for name in chosen.static
    ]
    if len(blocks) > 1:
        return np.concatenate(blocks, axis=1), channels, tuple(features)
    # The channels of a single column have default names.
    return values, tuple(f"x{place}" for place in range(len(channels))), tuple(features)


def _channels(name: str, values: npt.NDArray[Any]) -> tuple[str, ...]:
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
