"""Files piece by piece, for whoever cannot hold a whole file: some rows at a time, and where the next ones begin.

A piece holds rows that are not understood yet. Any run of them can be read by itself, so that one bad row is found, and
left out, by halves: :func:`sift` is the only place where rows are left out, whatever the format.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from raglane.data.formats.base import Format, check_readable, check_text
from raglane.data.fragments import Layout
from raglane.data.records import Columns, Records, Skipped, Targets, offsets_of
from raglane.data.records import joined as joined_features
from raglane.errors import DataError

# Bytes and rows of a piece: as much as is worth one call of a library, and little beside what a program holds anyway.
BYTES, ROWS = 1 << 24, 1 << 16

# Bad rows before the first good one, of a piece, that end it.
_HOPELESS = 1_000

Start = tuple[int, ...]
"""Where in a file a piece begins; what the numbers mean is the format's business, and () is the beginning."""

ON_BAD_ROW = ("fail", "skip")
# The file that lists what was left out.
SKIPPED = "skipped.jsonl"


@dataclass(frozen=True)
class Piece:
    """Some rows of a file, each a whole sequence."""

    count: int
    read: Callable[[int, int], Records] = field(repr=False)
    end: Start
    place: Callable[[int], str] = field(repr=False)


def sift(
    piece: Piece,
    bad: list[Skipped] | None,
    check: Callable[[Records], Records] = lambda records: records,
    location: str = "",
) -> Iterator[Records]:
    """Read a piece, in one go where every row is as it should be."""
    is_hopeful = bad is None or bool(bad)
    # Runs of rows still to be read, the first of them last: without recursion, and in the order of the file.
    runs = [(0, piece.count)]
    while runs:
        start, end = runs.pop()
        try:
            records = check(piece.read(start, end))
        except DataError as error:
            if bad is None:
                raise
            if end - start == 1:
                bad.append(Skipped(location, piece.place(start), str(error)))
                if not is_hopeful and len(bad) == _HOPELESS:
                    raise
                continue
            middle = (start + end) // 2
            runs += [(middle, end), (start, middle)]
        else:
            is_hopeful = True
            yield records


@dataclass(frozen=True)
class Line:
    """A line of a text."""

    number: int
    content: bytes
    end: int


def lines_of(path: Path, start: Start = ()) -> Iterator[Line]:
    """The lines of a text that are not blank, of which few are in memory at once."""
    check_readable(path)
    with path.open("rb") as file:
        if not start and (mark := file.read(4)):
            # A file that begins as UTF-16 does is refused as a whole: of its lines little could be said.
            if mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                check_text(path, mark)
            file.seek(len(codecs.BOM_UTF8) if mark.startswith(codecs.BOM_UTF8) else 0)
        if start:
            file.seek(start[0])
        end = file.tell()
        for number, content in enumerate(file, start=start[1] if start else 1):
            end += len(content)
            if not content.isspace():
                yield Line(number, content.rstrip(b"\n"), end)


def line_pieces(
    lines: Iterator[Line],
    read: Callable[[Sequence[Line]], Records],
    start: Callable[[Line], Start],
    within: str = "",
) -> Iterator[Piece]:
    """Pieces of a text in which a line is a sequence."""

    def piece_of(held: Sequence[Line]) -> Piece:
        return Piece(
            len(held),
            lambda first, last: read(held[first:last]),
            start(held[-1]),
            lambda row: f"{within}line {held[row].number}",
        )

    held: list[Line] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line.content)
        if size >= BYTES or len(held) >= ROWS:
            yield piece_of(held)
            held, size = [], 0
    if held:
        yield piece_of(held)


def skipped_lines(rows: Iterable[Skipped | Mapping[str, str]]) -> bytes:
    """The file that lists rows which were left out: a JSON object per line."""
    objects = (asdict(row) if isinstance(row, Skipped) else dict(row) for row in rows)
    lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in objects]
    # A name of a file may be no text in UTF-8.
    return "".join(lines).encode(errors="backslashreplace")


@dataclass
class Alike:
    """What the first rows say of all that come later."""

    layout: Layout | None = None
    columns: Columns | None = None
    # Where the first rows stand, for messages.
    first: str = ""

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
                kept.check(records, self.first)
        records = _alike(records, self.layout)
        self.layout.check(records, self.first)
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
    for piece in format.pieces(path, columns, ()):
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
