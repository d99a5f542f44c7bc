"""The lines of a text, read one by one."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raglane.data.sources.files import check_readable, check_text, opened

Start = tuple[int, ...]
"""The position of a piece in a file, in numbers that depend on the format; () is the beginning."""


@dataclass(frozen=True)
class Line:
    """A line of a text: its number from 1, its content, and the position of its end in bytes."""

    number: int
    content: bytes
    end: int


def lines_of(path: Path, start: Start = ()) -> Iterator[Line]:
    """Yield the lines of a text that are not blank."""
    check_readable(path)
    with opened(path) as file:
        if start:
            file.seek(start[0])
        elif mark := file.read(4):
            # UTF-16 is refused for the whole file, because its lines cannot be found.
            check_text(
                path, mark if mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else b""
            )
            file.seek(len(codecs.BOM_UTF8) if mark.startswith(codecs.BOM_UTF8) else 0)
        end = file.tell()
        for number, content in enumerate(file, start=start[1] if start else 1):
            end += len(content)
            if not content.isspace():
                yield Line(number, content.rstrip(b"\n"), end)
