"""What a part is, and the file that keeps what it has found, whatever ends the run."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["BrokenError", "Context", "Item", "NotHereError", "Part", "Record", "Row", "play"]

Row = dict[str, Any]
"""What an item has found, as JSON has it."""

# Bytes: of a file, whose rest is left out, and of a trace.
_MOST, _TRACE = 15 << 20, 4000


class NotHereError(Exception):
    """An item, or a part, needs something that this machine does not have; the message says what."""


class BrokenError(Exception):
    """After a fault on the device this process can use it no more; another one can."""


@dataclass(frozen=True)
class Context:
    """Where and how long to run.

    Attributes:
        device: that is asked about.
        is_rehearsal: on tiny sizes, to see that everything runs; its times say nothing.
        until: when to begin nothing more, on the clock of ``time.monotonic``.
        call: its name; what had a fault in an earlier call is asked again.
        kernels: a folder whose ``lib`` holds the cpu kernels, where they were built for this run.
    """

    device: torch.device
    is_rehearsal: bool
    until: float
    call: str
    kernels: Path | None = None

    def left(self) -> float:
        """Seconds until nothing more begins."""
        return self.until - time.monotonic()


@dataclass(frozen=True)
class Item:
    """One thing to find out, which takes some seconds.

    Attributes:
        key: its name within its part; a row of that name that holds no fault is not asked for again.
        run: gives what there is to say; a ``fault`` in it is one.
    """

    key: str
    run: Callable[[], Row]


@dataclass(frozen=True)
class Part:
    """Several items that answer one question.

    Attributes:
        name: as ``--parts`` takes it.
        question: in words.
        items: what to run, the most telling first; raises NotHereError where nothing of it can.
        table: what the report says of the rows, as lines of Markdown.
    """

    name: str
    question: str
    items: Callable[[Context], Iterable[Item]]
    table: Callable[[list[Row]], list[str]]


@dataclass
class Record:
    """The rows of a part, a line of JSON each, in a file that is whole up to its last line whenever the run ends.

    Args:
        path: of the file; what is there is read.
    """

    path: Path
    rows: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.is_file():
            return
        whole, _, half = self.path.read_bytes().rpartition(b"\n")
        for line in whole.splitlines():
            try:
                row = json.loads(line)
                self.rows[row["key"]] = row
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{self.path}: a line that this program did not write: {line[:80]!r}") from error
        if half:  # the line at which an earlier call ended
            self.path.write_bytes(whole + b"\n" if whole else b"")

    def add(self, row: Row) -> None:
        """Keep a row, in place of an earlier one of its key."""
        line = json.dumps(row, allow_nan=True) + "\n"
        if self.path.exists() and self.path.stat().st_size + len(line) > _MOST:
            return
        self.rows[row["key"]] = row
        with self.path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def is_done(self, key: str, call: str) -> bool:
        """Whether there is an answer already, or a fault that was found in this very call."""
        return key in self.rows and ("fault" not in self.rows[key] or self.rows[key].get("call") == call)


def play(part: Part, context: Context, record: Record) -> Iterator[Row]:
    """Run what is still to be run of a part, as long as there is time, and keep each row.

    Yields:
        each row as it comes. Its ``state`` is ``done``, ``fault`` or ``not run``.

    Raises:
        BrokenError: the last row's fault leaves the device unusable for this process.
    """
    try:
        items = [item for item in part.items(context) if not record.is_done(item.key, context.call)]
    except NotHereError as reason:
        yield {"key": part.name, "state": "not run", "why": str(reason)}
        return
    for item in sorted(items, key=lambda item: item.key in record.rows):
        if context.left() <= 0:
            yield {"key": part.name, "state": "not run", "why": "no time was left for the rest of this part"}
            return
        begun = time.monotonic()
        try:
            row: Row = item.run()
        except NotHereError as reason:
            yield {"key": item.key, "state": "not run", "why": str(reason)}
            continue
        # Whatever it raises is what was to be found out.
        except Exception as error:
            trace = traceback.format_exc()[-_TRACE:]
            row = {"fault": f"{type(error).__name__}: {error}"[:400], "trace": trace}
            if isinstance(error, torch.cuda.OutOfMemoryError):
                torch.cuda.empty_cache()
        row = {"key": item.key, **row, "took": round(time.monotonic() - begun, 3), "call": context.call}
        record.add(row)
        yield row | {"state": "fault" if "fault" in row else "done"}
        if "CUDA error" in row.get("fault", ""):
            raise BrokenError
