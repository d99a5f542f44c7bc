"""Rows that break a rule, left out of what is read, and listed; and what all rows that are kept have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from raglane.data.features import joined as joined_features
from raglane.data.formats.base import Format
from raglane.data.formats.pieces import Piece, pieces_of, sift
from raglane.data.layout import Layout
from raglane.data.records import Columns, Records, Skipped, offsets_of
from raglane.data.targets import Targets
from raglane.errors import DataError

__all__ = ["ON_BAD_ROW", "SKIPPED", "Alike", "joined", "read_kept", "skipped_lines"]

ON_BAD_ROW = ("fail", "skip")
# The file that lists what was left out.
SKIPPED = "skipped.jsonl"


def skipped_lines(rows: Iterable[Skipped | Mapping[str, str]]) -> bytes:
    r"""The file that lists rows which were left out: a JSON object per line.

    Example:
        >>> skipped_lines([Skipped("a.jsonl", "line 3", "a null")])
        b'{"location": "a.jsonl", "place": "line 3", "error": "a null"}\n'
    """
    objects = (asdict(row) if isinstance(row, Skipped) else dict(row) for row in rows)
    lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in objects]
    # A name of a file may be no text in UTF-8.
    return "".join(lines).encode(errors="backslashreplace")


@dataclass
class Alike:
    """What the first rows say of all that come later.

    Attributes:
        layout: of the rows; None before the first.
        columns: that the first rows were read with.
        source: of the first rows.
    """

    layout: Layout | None = None
    columns: Columns | None = None
    source: str = ""

    def checked(self, records: Records) -> Records:
        """Records that are like those before; without ids, where those had none."""
        if self.layout is not None and self.layout.ids == "none" and records.ids is not None:
            records = replace(records, ids=None)
        if self.columns is None:
            self.columns = records.columns
        if self.layout is None or (not self.layout.channels and not self.layout.is_tokens and len(records.values)):
            # Sequences without an element do not say of what kind they are.
            before, self.layout = self.layout, Layout.of(records)
            if before is not None:
                kept = replace(before, is_tokens=self.layout.is_tokens, channels=self.layout.channels)
                kept.check(records, self.source)
        records = _alike(records, self.layout)
        self.layout.check(records, self.source)
        return records


def _alike(records: Records, layout: Layout) -> Records:
    """Records whose targets are of elements or of sequences as those before, where these few may be read as either."""
    targets = records.targets
    if targets is None or targets.per_element == layout.targets_per_element:
        return records
    if layout.targets_per_element:
        # No sequence among these has two different ones.
        values = np.repeat(targets.values, records.lengths, axis=0)
        return replace(records, targets=replace(targets, values=values, per_element=True))
    width = len(layout.target_names)
    if targets.is_numbers and len(targets.names) == 1 and (records.lengths == width).all():
        # All of these happen to be as long as there are numbers to learn.
        values = targets.values.reshape(-1, width)
        return replace(records, targets=Targets(values, names=layout.target_names))
    return records


def read_kept(format: Format, path: Path, columns: Columns) -> Records:
    """Read a file without the rows that break a rule."""
    try:
        return format.read(path, columns)
    except DataError as error:
        first = error
    alike, skipped, count = Alike(), list[Skipped](), 0
    held: list[Records] = []
    for piece in pieces_of(format, path, columns):
        bad: list[Skipped] = []
        held += sift(_numbered(piece, count), bad, alike.checked, str(path))
        if not held:
            # Not the rows are bad, but how they are read.
            raise first
        skipped += bad
        count += piece.count
    if not skipped:
        raise first
    note = f"rows left out, because they break a rule: {len(skipped):,} of {count:,}; the first: {skipped[0].place}"
    notes = tuple(dict.fromkeys((*held[0].notes, note)))
    return replace(
        joined(held), columns=replace(held[0].columns, time=columns.time), skipped=tuple(skipped), notes=notes
    )


def _numbered(piece: Piece, before: int) -> Piece:
    """A piece whose rows have ids, if need be the numbers of rows."""

    def read(low: int, high: int) -> Records:
        records = piece.read(low, high)
        return records if records.ids is not None else replace(records, ids=tuple(range(before + low, before + high)))

    return replace(piece, read=read)


def joined(parts: Sequence[Records]) -> Records:
    """Records of one layout, one part after the other."""
    first = next((part for part in parts if len(part.values)), parts[0])
    # Parts without an element may be of any kind.
    full = [part.values for part in parts if len(part.values)] or [first.values]
    targets = [part.targets.values for part in parts if part.targets is not None]
    tags = [part.tags for part in parts if part.tags is not None]
    return replace(
        first,
        values=np.concatenate(full),
        offsets=offsets_of(np.concatenate([part.lengths for part in parts])),
        ids=None if first.ids is None else tuple(name for part in parts for name in part.ids or ()),
        labels=None if first.labels is None else tuple(label for part in parts for label in part.labels or ()),
        tags=np.concatenate(tags) if tags else None,
        targets=None if first.targets is None else replace(first.targets, values=np.concatenate(targets)),
        features=joined_features([part.features for part in parts]),
    )
