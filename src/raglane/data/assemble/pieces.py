"""Reading a file in pieces, in constant memory, and leaving out bad rows.

A piece has rows that are not parsed yet. Any range of them can be parsed separately, so
:func:`sift` finds bad rows by bisection. It is the only function that leaves rows out, for every
format.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from raglane.data.assemble.errors import attempt
from raglane.data.columns import Columns
from raglane.data.records import Records, Skipped, Targets, offsets_of
from raglane.data.records import joined as joined_features
from raglane.data.sources.files import BYTES, ROWS
from raglane.data.sources.lines import Line, Start
from raglane.data.store.fragments import StoreLayout
from raglane.errors import DataError

# A piece that begins with this many bad rows is given up.
_MOST_BAD = 1_000

ON_BAD_ROW = ("raise", "skip")
# The file that lists skipped rows.
SKIPPED = "skipped.jsonl"


@dataclass(frozen=True)
class Piece:
    """Some rows of a file, each a whole sequence."""

    count: int
    # Parses a range of the rows.
    read: Callable[[int, int], Records] = field(repr=False)
    end: Start
    # Describes a row in messages.
    place: Callable[[int], str] = field(repr=False)
    # The elements of a piece of one sequence, each as a sequence, and the piece without some.
    elements: Piece | None = field(default=None, repr=False)
    without: Callable[[list[int]], Piece] | None = field(default=None, repr=False)


def sift(
    piece: Piece,
    bad: list[Skipped] | None,
    check: Callable[[Records], Records] = lambda records: records,
    location: str = "",
    numbers: list[int] | None = None,
) -> Iterator[Records]:
    """Parse a piece; append its bad rows to ``bad``, and to ``numbers``, and yield the records of
    the others, or raise if ``bad`` is None.

    A DataError of ``check`` makes rows bad too.
    """
    if bad is None:
        yield check(piece.read(0, piece.count))
        return
    has_good = bool(bad)
    # A stack of the ranges to parse, the first on top.
    ranges = [(0, piece.count)]
    while ranges:
        start, end = ranges.pop()
        records = attempt(lambda low, high: check(piece.read(low, high)), start, end)
        if not isinstance(records, DataError):
            has_good = True
            yield records
            continue
        if end - start > 1:
            middle = (start + end) // 2
            ranges += [(middle, end), (start, middle)]
            continue
        bad.append(Skipped(location, piece.place(start), str(records)))
        if numbers is not None:
            numbers.append(start)
        if not has_good and len(bad) == _MOST_BAD:
            raise records


def without_bad_elements(piece: Piece, bad: list[Skipped] | None, location: str) -> Piece:
    """Return a piece of one sequence without its bad elements, which are appended to ``bad``."""
    if bad is None or piece.elements is None or piece.without is None:
        return piece
    numbers: list[int] = []
    deque(sift(piece.elements, bad, location=location, numbers=numbers), maxlen=0)
    return piece.without(numbers)


def line_pieces(
    lines: Iterator[Line],
    read: Callable[[Sequence[Line]], Records],
    prefix: Start = (),
    within: str = "",
) -> Iterator[Piece]:
    """Yield pieces of a text with one sequence per line; ``prefix`` and ``within`` identify one of
    several files.
    """

    def piece_of(held: Sequence[Line]) -> Piece:
        return Piece(
            len(held),
            lambda first, last: read(held[first:last]),
            (*prefix, held[-1].end, held[-1].number + 1),
            lambda row: f"{within}line {held[row].number}",
        )

    held: list[Line] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line.content)
        if size >= BYTES or len(held) >= ROWS:
            yield piece_of(held)
            held = []
            size = 0
    if held:
        yield piece_of(held)


def skipped_lines(rows: Iterable[Skipped | Mapping[str, str]]) -> bytes:
    """Return the content of the file that lists skipped rows: a JSON object per line."""
    objects = (asdict(row) if isinstance(row, Skipped) else dict(row) for row in rows)
    lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in objects]
    # File names may contain invalid UTF-8.
    return "".join(lines).encode(errors="backslashreplace")


@dataclass
class Alike:
    """The layout and columns of the first rows, with which later rows must agree."""

    layout: StoreLayout | None = None
    columns: Columns | None = None
    # The place of the first rows, for messages.
    first: str = ""

    def checked(self, records: Records) -> Records:
        """Return records in the layout of the first, without ids if those have none, or raise a
        DataError.
        """
        if self.layout is not None and self.layout.ids == "none" and records.ids is not None:
            records = replace(records, ids=None)
        if self.columns is None:
            self.columns = records.columns
        if self.layout is None or (
            not self.layout.channels and not self.layout.is_tokens and len(records.values)
        ):
            # Sequences without elements determine neither tokens nor channels.
            before = self.layout
            self.layout = StoreLayout.of(records)
            if before is not None:
                kept = replace(
                    before, is_tokens=self.layout.is_tokens, channels=self.layout.channels
                )
                kept.check(records, self.first)
        records = _alike(records, self.layout)
        self.layout.check(records, self.first)
        return records


def _alike(records: Records, layout: StoreLayout) -> Records:
    """Change ambiguous targets from per sequence to per element or back, as in the layout."""
    targets = records.targets
    if targets is None or targets.per_element == layout.targets_per_element:
        return records
    if layout.targets_per_element:
        # In each of these sequences all targets are equal.
        values = np.repeat(targets.values, records.lengths, axis=0)
        return replace(records, targets=replace(targets, values=values, per_element=True))
    width = len(layout.target_names)
    if targets.is_numbers and len(targets.names) == 1 and (records.lengths == width).all():
        # Each of these sequences has as many elements as targets.
        values = targets.values.reshape(-1, width)
        return replace(records, targets=Targets(values, names=layout.target_names))
    return records


def read_kept(
    path: Path, columns: Columns, read: Callable[[], Records], pieces: Iterable[Piece]
) -> Records:
    """Read a file without the rows that break a rule: as a whole, or else in pieces."""
    whole = attempt(read)
    if isinstance(whole, Records):
        return whole
    first = whole
    alike = Alike()
    skipped = list[Skipped]()
    count = 0
    kept: list[Records] = []
    for piece in pieces:
        bad: list[Skipped] = []
        rows = piece.count if piece.elements is None else piece.elements.count
        piece = without_bad_elements(piece, bad, str(path))
        kept += sift(_numbered(piece, count), bad, alike.checked, str(path))
        layouts = [] if count else [StoreLayout.of(part) for part in kept]
        if not kept or (
            bad and layouts and all(own.may_lack_labels and not own.label_kinds for own in layouts)
        ):
            # Every row fails, or all that have labels, so the arguments are wrong rather than the
            # rows.
            raise first
        skipped += bad
        count += rows
    if not skipped:
        raise first
    note = f"rows left out, because they break a rule: {len(skipped):,} of {count:,}; the first: {skipped[0].place}"
    notes = tuple(dict.fromkeys((*kept[0].notes, note)))
    used = replace(kept[0].columns, time=columns.time)
    return replace(_concatenated(kept), columns=used, skipped=tuple(skipped), notes=notes)


def _numbered(piece: Piece, before: int) -> Piece:
    """Use the numbers of rows as ids if a piece has none."""

    def read(low: int, high: int) -> Records:
        records = piece.read(low, high)
        return (
            records
            if records.ids is not None
            else replace(records, ids=tuple(range(before + low, before + high)))
        )

    return replace(piece, read=read)


def _concatenated(parts: Sequence[Records]) -> Records:
    """Concatenate records of one layout."""
    first = next((part for part in parts if len(part.values)), parts[0])
    # Records without elements may have another dtype.
    full = [part.values for part in parts if len(part.values)] or [first.values]
    tags = [part.tags for part in parts if part.tags is not None]
    return replace(
        first,
        values=np.concatenate(full),
        offsets=offsets_of(np.concatenate([part.lengths for part in parts])),
        ids=_chained([part.ids for part in parts]),
        labels=_chained([part.labels for part in parts]),
        tags=np.concatenate(tags) if tags else None,
        targets=_joined_targets([part.targets for part in parts]),
        features=joined_features([part.features for part in parts]),
    )


def _joined_targets(parts: Sequence[Targets | None]) -> Targets | None:
    some = [part for part in parts if part is not None]
    return replace(some[0], values=np.concatenate([part.values for part in some])) if some else None


def _chained(parts: Sequence[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    return None if parts[0] is None else tuple(chain.from_iterable(part or () for part in parts))
