"""The interface of parts, and the file of their results, which survives any end of the run."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

__all__ = ["BrokenError", "Context", "Item", "NotHereError", "Part", "Record", "Row", "play"]

Row = dict[str, Any]
"""The result of an item, as JSON values."""

# The most bytes of a file and of a trace; the rest is omitted.
_MOST, _TRACE = 15 << 20, 4000


class NotHereError(Exception):
    """A requirement of an item or a part is missing on this machine; the message names it."""


class BrokenError(Exception):
    """An error after which this process cannot use the device; another process can."""


@dataclass(frozen=True)
class Context:
    """The device and the time limit of a run.

    Attributes:
        device: the measured device.
        is_rehearsal: True for tiny sizes, which test that everything runs.
        until: no item begins after this time of ``time.monotonic``.
        call: the name of the call; items that failed in an earlier call run again.
        kernels: a folder whose ``lib`` contains the cpu kernels, if they were built for this run.
    """

    device: torch.device
    is_rehearsal: bool
    until: float
    call: str
    kernels: Path | None = None

    def left(self) -> float:
        """The seconds in which further items may begin."""
        return self.until - time.monotonic()


@dataclass(frozen=True)
class Item:
    """One measurement or test of some seconds.

    Attributes:
        key: its name within its part; an item with a row of that name and no fault does not run
            again.
        run: returns the result; an entry ``fault`` is an error.
        begin: called before any item of the part that is still to run.
    """

    key: str
    run: Callable[[], Row]
    begin: Callable[[], object] = tuple


@dataclass(frozen=True)
class Part:
    """Items that answer one question.

    Attributes:
        name: its name for ``--parts``.
        question: one phrase.
        items: returns the items, the most informative first; raises NotHereError if none can run.
        table: formats the rows as lines of Markdown.
        share: of the time that is left when the part begins, the most that it takes.
        end: called after its last item.
    """

    name: str
    question: str
    items: Callable[[Context], Iterable[Item]]
    table: Callable[[list[Row]], list[str]]
    share: float = 1.0
    end: Callable[[], object] = tuple


@dataclass
class Record:
    """The rows of a part, a line of JSON each, in a file that is valid after any interruption.

    Args:
        path: the file, which is read if it exists.
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
                raise ValueError(
                    f"{self.path}: a line that this program did not write: {line[:80]!r}"
                ) from error
        if half:  # the incomplete line of an interrupted call
            self.path.write_bytes(whole + b"\n" if whole else b"")

    def add(self, row: Row) -> None:
        """Store a row, and replace an earlier one of its key."""
        line = json.dumps(row, allow_nan=True) + "\n"
        if self.path.exists() and self.path.stat().st_size + len(line) > _MOST:
            return
        self.rows[row["key"]] = row
        with self.path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def is_done(self, key: str, call: str) -> bool:
        """Return True if an item has a result, or failed in this call."""
        return key in self.rows and (
            "fault" not in self.rows[key] or self.rows[key].get("call") == call
        )


def play(part: Part, context: Context, record: Record) -> Iterator[Row]:
    """Run the remaining items of a part within the time limit, and store each row.

    Yields:
        Each row. Its ``state`` is ``done``, ``fault`` or ``not run``.

    Raises:
        BrokenError: after the error of the last row, this process cannot use the device.
    """
    context = replace(context, until=time.monotonic() + part.share * context.left())
    try:
        items = [item for item in part.items(context) if not record.is_done(item.key, context.call)]
    except NotHereError as reason:
        yield {"key": part.name, "state": "not run", "why": str(reason)}
        return
    try:
        for item in items:
            item.begin()
        yield from _rows(part, context, record, items)
    finally:
        part.end()


def _rows(part: Part, context: Context, record: Record, items: list[Item]) -> Iterator[Row]:
    for item in sorted(items, key=lambda item: item.key in record.rows):
        if context.left() <= 0:
            yield {
                "key": part.name,
                "state": "not run",
                "why": "no time was left for the rest of this part",
            }
            return
        begun = time.monotonic()
        try:
            row: Row = item.run()
        except NotHereError as reason:
            yield {"key": item.key, "state": "not run", "why": str(reason)}
            continue
        # Any error is a result.
        except Exception as error:
            trace = traceback.format_exc()[-_TRACE:]
            row = {"fault": f"{type(error).__name__}: {error}"[:400], "trace": trace}
            if isinstance(error, torch.cuda.OutOfMemoryError):
                torch.cuda.empty_cache()
        row = {
            "key": item.key,
            **row,
            "took": round(time.monotonic() - begun, 3),
            "call": context.call,
        }
        record.add(row)
        yield row | {"state": "fault" if "fault" in row else "done"}
        if "CUDA error" in row.get("fault", ""):
            raise BrokenError
