"""Sequences that end in elements without a value, as archives pad them to one length."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from raglane._utils.messages import count_of, require
from raglane.data.columns import Columns, option
from raglane.data.records import Feature, Records, offsets_of
from raglane.data.typed.arrays import Bools
from raglane.tasks import TASKS


def without_padding(records: Records) -> Records:
    """End each sequence before its last elements if they are missing in all channels and features.

    Sequences with a label or a target per element keep them, and so does other data that is read in
    the same way. A sequence without any value keeps its first element, which is a missing one.
    """
    columns = records.columns
    if columns.keep_trailing or records.is_tokens or 0 in records.values.shape:
        return records
    per_element = records.targets is not None and records.targets.per_element
    if records.tags is not None or per_element or _is_tagged(columns):
        return replace(records, columns=replace(columns, keep_trailing=True))
    lengths = records.lengths
    full = np.flatnonzero(lengths)
    lasts = records.offsets[full + 1] - 1
    if not np.isnan(records.values[lasts]).all(axis=1).any():
        return records
    starts = records.offsets[full]
    elements = np.arange(len(records.values))
    ends = np.maximum.reduceat(np.where(_are_missing(records), -1, elements), starts) + 1
    shorter = lengths.copy()
    shorter[full] = np.maximum(ends - starts, 1)
    count = int((shorter < lengths).sum())
    if count == 0:
        return records
    within = elements - np.repeat(records.offsets[:-1], lengths)
    is_kept = within < np.repeat(shorter, lengths)
    note = note_padding(count, int((~is_kept).sum()))
    return replace(
        records,
        values=records.values[is_kept],
        offsets=offsets_of(shorter),
        features=tuple(_cut(feature, is_kept) for feature in records.features),
        times=None if records.times is None else records.times[is_kept],
        notes=(*records.notes, note),
    )


def note_padding(sequences: int, elements: int) -> str:
    """Return the note about sequences that end before missing elements."""
    verb = "ends" if sequences == 1 else "end"
    where = f"{count_of(sequences, 'sequence')} {verb} in missing values in all channels"
    keep = option("keep_trailing", value=True)
    return f"{where}: {count_of(elements, 'element')} left out as padding ({keep} keeps them)"


def _is_tagged(columns: Columns) -> bool:
    facts = TASKS[columns.task]
    return facts.label is not None and facts.per == "element"


def _are_missing(records: Records) -> Bools:
    """Return which elements have neither a channel nor a feature."""
    missing = np.isnan(records.values).all(axis=1)
    for feature in records.features:
        if not feature.per_sequence:
            missing &= np.isnan(feature.values) if feature.is_numbers else feature.values == ""
    return missing


def _cut(feature: Feature, is_kept: Bools) -> Feature:
    return feature if feature.per_sequence else replace(feature, values=feature.values[is_kept])


def may_be_padded(column: Any, columns: Columns) -> bool:
    """Return True if lists of an Arrow column may end in missing numbers, by their last entries."""
    if columns.keep_trailing or _is_tagged(columns):
        return False
    arrow = require("pyarrow", "data")
    compute = require("pyarrow.compute", "data")
    types = require("pyarrow.types", "data")
    with suppress(arrow.ArrowNotImplementedError):
        for chunk in column.chunks:
            ends = chunk
            while not (types.is_floating(ends.type) or types.is_primitive(ends.type)):
                lengths = compute.list_value_length(ends).to_numpy(zero_copy_only=False)
                inner = ends.flatten()
                places = np.cumsum(lengths)[lengths > 0] - 1
                ends = inner.take(arrow.array(places.astype(np.int64)))
            if types.is_floating(ends.type) and compute.any(compute.is_nan(ends)).as_py():
                return True
    return False
