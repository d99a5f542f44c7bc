"""A small file of each format, conversions in small steps, and comparisons of records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from raglane.data import Columns, Dataset, shards
from raglane.data.formats import csv, ipc, pieces
from raglane.data.records import Records

_STEPS = [[[float(row * step), 1.0 + step] for step in range(row % 4)] for row in range(23)]
ROWS: list[dict[str, Any]] = [{"x": steps, "kind": "ab"[row % 2], "id": f"s{row}"} for row, steps in enumerate(_STEPS)]


def _ts(path: Path) -> None:
    lines = ["@dimensions 2", "@classLabel true a b", "# a note", "@data"]
    for row in ROWS:
        channels = [",".join(str(step[channel]) for step in row["x"]) for channel in (0, 1)]
        lines += [":".join([*channels, row["kind"]]), "# another"]
    path.write_text("\n".join(lines))


def _csv(path: Path) -> None:
    rows = [f"{row['id']},{step},{u},{v},{row['kind']}" for row in ROWS for step, (u, v) in enumerate(row["x"])]
    path.write_text("\n".join(["id,step,u,v,kind", *rows, ""]))


def _folder(path: Path) -> None:
    path.mkdir()
    for name in ("cat", "dog"):
        lines = [f"{name}{'y' * number}" if number % 3 else "  " for number in range(9)]
        (path / f"{name}.txt").write_text("\n".join(lines))


def _text(path: Path) -> None:
    path.write_text("\n".join("a text" if row % 3 else "\u2003 " for row in range(20)))


_TABLE = pa.Table.from_pylist(ROWS)


def _arrow(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _TABLE.schema) as writer:
        writer.write_table(_TABLE, max_chunksize=9)


WRITERS: dict[str, Callable[[Path], object]] = {
    "ts": _ts,
    "csv": _csv,
    "folder": _folder,
    "text": _text,
    "arrow": _arrow,
    "parquet": lambda path: pq.write_table(_TABLE, path, row_group_size=10),
    "jsonl": lambda path: path.write_text("\n\n".join(map(json.dumps, ROWS))),
}


def asked(name: str) -> Columns:
    """Return the columns for the file of a format; only text has no labels."""
    return Columns(task="forecast") if name == "text" else Columns()


def joined(parts: list[Records]) -> Records:
    """Concatenate records."""
    lengths = np.concatenate([records.lengths for records in parts])
    values = [records.values for records in parts if len(records.values)]
    return replace(
        parts[0],
        values=np.concatenate(values),
        channels=max((records.channels for records in parts), key=len),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        ids=None if parts[0].ids is None else tuple(name for records in parts for name in records.ids or ()),
        labels=None if parts[0].labels is None else tuple(name for records in parts for name in records.labels or ()),
        tags=None
        if parts[0].tags is None
        else np.concatenate([records.tags for records in parts if records.tags is not None]),
    )


def same(records: Dataset | Records, other: Dataset | Records) -> None:
    """Assert that two datasets in memory are equal."""
    records, other = (data.records if isinstance(data, Dataset) else data for data in (records, other))
    assert records.offsets.tolist() == other.offsets.tolist()
    np.testing.assert_array_equal(records.values, other.values)
    assert (records.ids, records.labels, records.channels) == (other.ids, other.labels, other.channels)
    assert (records.tags is None) == (other.tags is None)
    if records.tags is not None and other.tags is not None:
        assert records.tags.tolist() == other.tags.tolist()


@contextmanager
def small_steps(rows: int = 4, shard: int = 200) -> Iterator[None]:
    """Limit the pieces of a conversion to a few rows and its shards to a few bytes."""
    with ExitStack() as stack:
        for module in (pieces, ipc, csv):
            stack.enter_context(mock.patch.object(module, "ROWS", rows))
        stack.enter_context(mock.patch.object(shards, "SHARD", shard))
        yield
