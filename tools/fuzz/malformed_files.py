"""Malformed files, read by every reader: the answer is valid records, or one clear line.

A round builds a small file of a format, valid or made of odd cells and names, spoils its bytes (or leaves them), and
reads it as :func:`raglane.data.read` does for a random choice of columns and task; what was read goes on into a
preprocessor. What may come of it is a :class:`~raglane.data.Records` whose parts fit together, or an error of Raglane's
own whose message is one line of printable characters. Anything else (another exception, a hang, memory without end) is
a fault, and its line says how to repeat it::

    cd tests
    python -m fuzz.malformed_files 20000 1        # 20,000 rounds from seed 1
    python -m fuzz.malformed_files 1 1 4711       # round 4711 of seed 1 alone, with the trace and the file

A round follows from the seed and its number, so any one can be repeated without those before it.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.odd_files import build
from raglane.data import Columns, Dataset, Preprocessor, Records, convert, read
from raglane.errors import RaglaneError

__all__ = ["attack", "build", "fault_of", "main"]

# Seconds, and kilobytes more than before, that no file of a few kilobytes can take but for a reader that does not end.
_LIMIT, _ROOM = 60, 1_000_000


def _use(records: Records, columns: Columns) -> None:
    """Go on with what was read, as training does."""
    lengths = records.lengths
    problems = [
        (lengths < 0).any(),
        len(records.row_ids) != len(records),
        records.labels is not None and not all(isinstance(label, str) for label in records.labels),
        records.tags is not None and not all(isinstance(tag, str) for tag in records.tags.tolist()),
        records.is_tokens and not all(isinstance(token, str) for token in records.values.tolist()),
        records.values.dtype not in (np.float32, object),
        any(not note.isprintable() or len(note) > 400 for note in records.notes),
    ]
    if any(problems):
        raise AssertionError(f"records whose parts do not fit: {problems}")
    texts = [*(records.labels or ()), *(records.tags.tolist() if records.tags is not None else ()), *records.channels]
    json.dumps(texts, ensure_ascii=False).encode()
    Preprocessor.fit(records, task=columns.task, missing="zero").apply(records)


def _convert(path: Path, columns: Columns, form: str | None, records: Records | None) -> None:
    """Convert the same: what was read comes out again, and what was not is an error, or rows that are left out."""
    output = path.parent / "converted"
    try:
        done = convert(path, output, columns, format=form, on_bad_row="skip")
    except RaglaneError:
        if records is not None:
            raise
        return
    data = Dataset(output, Columns(task=columns.task, need_labels=False))
    lengths = data.lengths.tolist()
    if data.take(range(len(data))).lengths.tolist() != lengths or len(data) != done.statistics.sequences:
        raise AssertionError("a dataset that is not what was converted")
    # What a language model reads begins with an end.
    ends = 1 if columns.task == "language" else 0
    if records is not None and (done.skipped or lengths != (records.lengths + ends).tolist()):
        raise AssertionError(f"{done.skipped} rows left out of what is read, or other lengths: {lengths}")


@contextlib.contextmanager
def _watch() -> Iterator[None]:
    """Turn a hang into an error, where this is the main thread of a system that has alarms."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {_LIMIT} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _taken() -> int:
    """The most memory that this process ever had, in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fault_of(path: Path, form: str | None, columns: Columns) -> BaseException | None:
    """What should not have come of reading a file; None where all is well."""
    before = _taken()
    try:
        with _watch(), warnings.catch_warnings():
            # As the commands do: what a library only warns of must not pass for read.
            warnings.simplefilter("ignore")
            records = None
            try:
                records = read(path, columns, form)
                _use(records, columns)
            finally:
                _convert(path, columns, form, records)
    except RaglaneError as error:
        message = str(error)
        if not message.isprintable() or len(message) > 2000 or "Fix: " not in message:
            return AssertionError(f"a message that is not one short clear line: {message[:300]!a}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return error
    more = _taken() - before
    return MemoryError(f"{more} kilobytes") if more > _ROOM else None


def attack(seed: int, number: int, folder: Path) -> tuple[BaseException | None, Path, str | None, Columns]:
    """Round ``number`` of ``seed``: what went wrong, or None, and what was read."""
    case = build(random.Random(f"{seed}/{number}"), folder)
    return fault_of(*case), *case


def main(rounds: int, seed: int, first: int = 0) -> int:
    """Run rounds ``first`` to ``first + rounds - 1``, print their faults and how to repeat them, and count them."""
    print(f"malformed files: {rounds} rounds from {first}, seed {seed}", flush=True)
    faults, slowest = 0, (0.0, first)
    for number in range(first, first + rounds):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            fault, path, form, columns = attack(seed, number, Path(folder))
            slowest = max(slowest, (time.perf_counter() - start, number))
            if fault is None and rounds > 1:
                continue
            if fault is not None:
                faults += 1
                print(f"{type(fault).__name__}: {str(fault)[:200]!a}", flush=True)
                print(f"  repeat: cd tools && python -m fuzz.malformed_files 1 {seed} {number}", flush=True)
            if rounds == 1:
                if fault is not None:
                    traceback.print_exception(fault)
                print(path.name, form, columns)
                print(path.read_bytes()[:2000] if path.is_file() else sorted(path.iterdir()))
    print(f"{faults} faults; the slowest round, {slowest[1]}, took {slowest[0]:.1f} s", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
