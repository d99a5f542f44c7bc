"""Malformed files through every reader: the result is valid records or one clear message.

A round builds a small file, valid or with odd cells and names, may corrupt its bytes, and reads it
as :func:`raglane.data.read` does, with random columns and a random task. The dataset is
preprocessed, and the file is also converted. Any result other than a consistent
:class:`~raglane.data.Dataset` or one of Raglane's errors with a message of one printable line is a
failure: another exception, a hang, or unlimited memory.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.odd_files import build
from raglane.data import Columns, Dataset, Preprocessor, convert, read
from raglane.errors import RaglaneError

# Seconds and additional kilobytes that a reader of a few kilobytes cannot need.
_LIMIT, _ROOM = 60, 1_000_000


def _use(records: Dataset, columns: Columns) -> None:
    """Check that the parts of a dataset are consistent, and preprocess it."""
    problems = [
        (records.element_counts < 0).any(),
        len(records.ids) != len(records),
        records.labels is not None and not all(isinstance(label, str) for label in records.labels),
        records.tags is not None and not all(isinstance(tag, str) for tag in records.tags.tolist()),
        records.is_tokens and not all(isinstance(token, str) for token in records.values.tolist()),
        records.values.dtype not in (np.float32, object),
        any(not note.isprintable() or len(note) > 400 for note in records.notes),
    ]
    assert not any(problems), f"inconsistent records: {problems}"
    texts = [
        *(records.labels or ()),
        *(records.tags.tolist() if records.tags is not None else ()),
        *records.channels,
    ]
    json.dumps(texts, ensure_ascii=False).encode()
    Preprocessor.fit(records, task=columns.task, missing="zero").apply(records)


def _convert(path: Path, columns: Columns, form: str | None, records: Dataset | None) -> None:
    """Convert the file, and compare with the records; without records the conversion may raise or
    skip rows.
    """
    output = path.parent / "converted"
    try:
        done = convert(path, output, columns, format=form, on_bad_row="skip")
    except RaglaneError:
        if records is not None:
            raise
        return
    data = Dataset(output, Columns(task=columns.task, need_labels=False))
    lengths = data.lengths.tolist()
    assert data.take(range(len(data))).lengths.tolist() == lengths, (
        "a dataset with other lengths than its rows"
    )
    assert len(data) == done.statistics.sequences, "statistics that count other sequences"
    if records is not None:
        assert not done.skipped, f"{done.skipped} rows skipped that are read"
        assert data.element_counts.tolist() == records.element_counts.tolist(), (
            f"converted to other lengths: {lengths}"
        )


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise a TimeoutError in the block after ``_LIMIT`` seconds."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {_LIMIT} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _peak_memory() -> int:
    """Return the peak memory of this process, in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def check(path: Path, form: str | None, columns: Columns) -> None:
    """Read, use and convert a file; raise if the result is neither valid nor a clear error."""
    before = _peak_memory()
    try:
        with _time_limit(), warnings.catch_warnings():
            # As in the commands: a warning of another library is no error.
            warnings.simplefilter("ignore")
            records = None
            try:
                records = read(path, columns, form)
                _use(records, columns)
            finally:
                _convert(path, columns, form, records)
    except RaglaneError as error:
        message = str(error)
        if not message.isprintable() or len(message) > 2000 or ", got " not in message:
            raise AssertionError(
                f"a message that is not one short clear line: {message[:300]!a}"
            ) from error
    more = _peak_memory() - before
    assert more < _ROOM, f"{more} kilobytes more memory"


def play(number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, form, columns = build(random.Random(number), Path(folder))
        try:
            check(path, form, columns)
        except Exception as error:
            content = path.read_bytes()[:2000] if path.is_file() else sorted(path.iterdir())
            raise AssertionError(
                f"{type(error).__name__}: {error!s:.200}\n{path.name} {form} {columns}\n{content!r}"
            ) from error
