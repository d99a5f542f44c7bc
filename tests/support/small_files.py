"""Small files of each format and a small table, conversions in small steps, comparisons of records,
and refusals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch

from raglane import Ragged
from raglane.data import FORMATS, Columns, Dataset, convert
from raglane.data.assemble import pieces, streams
from raglane.data.records import Records
from raglane.data.sources import csv, ipc
from raglane.data.store import shards
from raglane.errors import DataError

__all__ = [
    *(
        "ROWS",
        "asked",
        "converted",
        "joined",
        "refused",
        "same",
        "same_batch",
        "small_steps",
        "small_table",
    ),
    *("write_table", "written"),
]

_STEPS = [[[float(row * step), 1.0 + step] for step in range(row % 4)] for row in range(23)]
ROWS: list[dict[str, Any]] = [
    {"x": steps, "kind": "ab"[row % 2], "id": f"s{row}"} for row, steps in enumerate(_STEPS)
]


def _ts(path: Path) -> None:
    lines = ["@dimensions 2", "@classLabel true a b", "# a note", "@data"]
    for row in ROWS:
        channels = [",".join(str(step[channel]) for step in row["x"]) for channel in (0, 1)]
        lines += [":".join([*channels, row["kind"]]), "# another"]
    path.write_text("\n".join(lines))


def _csv(path: Path) -> None:
    rows = [
        f"{row['id']},{step},{u},{v},{row['kind']}"
        for row in ROWS
        for step, (u, v) in enumerate(row["x"])
    ]
    path.write_text("\n".join(["id,step,u,v,kind", *rows, ""]))


def _npz(path: Path) -> None:
    arrays: dict[str, Any] = {name: [row[name] for row in ROWS] for name in ("kind", "id")}
    steps = np.concatenate([np.array(row["x"]).reshape(-1, 2) for row in ROWS])
    np.savez(path, x=steps, lengths=[len(row["x"]) for row in ROWS], **arrays)


def _folder(path: Path) -> None:
    path.mkdir()
    for name in ("cat", "dog"):
        lines = [f"{name}{'y' * number}" if number % 3 else "  " for number in range(9)]
        (path / f"{name}.txt").write_text("\n".join(lines))


def _conll(path: Path) -> None:
    rows = ["\n".join(f"w{step} T{row % 2}" for step in range(row % 4 + 1)) for row in range(23)]
    path.write_text("\n\n".join(rows))


def _arff(path: Path) -> None:
    lines = ["@relation r", "@attribute x relational", "@attribute t0 numeric", "@end x"]
    lines += ["@attribute kind {a,b}", "% a note", "@data"]
    for row in range(23):
        steps = ",".join(f"{row}.{step}" for step in range(row % 3 + 1))
        lines.append(f"'{steps}\\n{steps}',{'ab'[row % 2]}")
    path.write_text("\n".join(lines))


def _xlsx(path: Path) -> None:
    pytest.importorskip("python_calamine")
    book = pytest.importorskip("xlsxwriter").Workbook(str(path))
    sheet = book.add_worksheet()
    rows: list[list[Any]] = [["id", "x", "kind"]]
    rows += [[row["id"], step[0], row["kind"]] for row in ROWS for step in row["x"]]
    for place, row in enumerate(rows):
        sheet.write_row(place, 0, row)
    book.close()


def _text(path: Path) -> None:
    path.write_text("\n".join("a text" if row % 3 else "\u2003 " for row in range(20)))


def put(path: Path, content: str | bytes) -> Path:
    """Write a file, a text in UTF-8; return its path."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_table(path: Path, table: pa.Table, rows: int = 10) -> Path:
    """Write a Parquet or Arrow file in groups of some rows."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    else:
        new = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


_TABLE = pa.Table.from_pylist(ROWS)
_WRITERS: dict[str, Callable[[Path], object]] = {
    "ts": _ts,
    "csv": _csv,
    "folder": _folder,
    "npz": _npz,
    "text": _text,
    "conll": _conll,
    "arff": _arff,
    "xlsx": _xlsx,
    "arrow": lambda path: write_table(path, _TABLE),
    "parquet": lambda path: write_table(path, _TABLE),
    "jsonl": lambda path: path.write_text("\n\n".join(map(json.dumps, ROWS))),
}


def written(name: str, folder: Path) -> Path:
    """Write the small file of a format."""
    path = folder / f"data{(*FORMATS[name].suffixes, '')[0]}"
    _WRITERS[name](path)
    return path


def asked(name: str) -> Columns:
    """Return the columns for the file of a format; only text has no labels, and CoNLL one per
    word.
    """
    return Columns(task={"text": "forecast", "conll": "tag"}.get(name, "classify"))


def joined(parts: list[Records]) -> Records:
    """Concatenate records."""
    lengths = np.concatenate([records.lengths for records in parts])
    columns: dict[str, Any] = {}
    for name in ("ids", "labels", "tags"):
        if getattr(parts[0], name) is not None:
            columns[name] = tuple(entry for records in parts for entry in getattr(records, name))
    if parts[0].tags is not None:
        columns["tags"] = np.array(columns["tags"], object)
    return replace(
        parts[0],
        values=np.concatenate([records.values for records in parts if len(records.values)]),
        channels=max((records.channels for records in parts), key=len),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        **columns,
    )


def same(records: Dataset | Records, other: Dataset | Records) -> None:
    """Assert that two datasets in memory are equal."""
    records, other = (
        data.records if isinstance(data, Dataset) else data for data in (records, other)
    )
    assert records.offsets.tolist() == other.offsets.tolist()
    np.testing.assert_array_equal(records.values, other.values)
    assert (records.ids, records.labels, records.channels) == (
        other.ids,
        other.labels,
        other.channels,
    )
    for name in ("tags", "targets"):
        found, wanted = getattr(records, name), getattr(other, name)
        assert (found is None) == (wanted is None)
        if found is not None:
            np.testing.assert_array_equal(
                getattr(found, "values", found), getattr(wanted, "values", wanted)
            )
    features = [
        [(part.name, part.kind, part.values.tolist()) for part in data.features]
        for data in (records, other)
    ]
    np.testing.assert_equal(features[0], features[1])


def same_batch(batch: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two collated batches are equal."""
    assert batch.keys() == other.keys()
    for name, value in other.items():
        found = batch[name]
        assert type(found) is type(value)
        if isinstance(value, Ragged):
            assert found.offsets.tolist() == value.offsets.tolist()
            found, value = found.values, value.values
        torch.testing.assert_close(found, value, rtol=0, atol=0)


def refused(
    words: Iterable[str],
    call: Callable[..., object],
    *given: Any,
    error: type[Exception] = DataError,
    **named: Any,
) -> str:
    """Assert that a call raises an error of one line with these words; return its message."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    assert " must be " in message
    for word in words:
        assert word in message, message
    return message


@contextmanager
def small_steps(rows: int = 4, shard: int = 200) -> Iterator[None]:
    """Limit the pieces of a conversion to a few rows and its shards to a few bytes."""
    with ExitStack() as stack:
        for module in (pieces, streams, ipc, csv):
            stack.enter_context(mock.patch.object(module, "ROWS", rows))
        stack.enter_context(mock.patch.object(shards, "SHARD", shard))
        yield


def small_table() -> pa.Table:
    """Return a table with a column of every kind."""
    rows, chance = 40, np.random.default_rng(3)
    words = [
        ["abcde"[place] for place in chance.integers(0, 5, row * 7 % 5)] for row in range(rows)
    ]
    return pa.table(
        {
            "words": words,
            "tags": [[word.upper() for word in row] for row in words],
            "x": [
                [[float(row), step, -1.5] for step in range(len(words[row]))] for row in range(rows)
            ],
            "text": [" ".join(row) for row in words],
            "kind": ["uvw"[row % 3] for row in range(rows)],
            "name": [f"n{row}" for row in range(rows)],
            "total": [row / 3 for row in range(rows)],
            "two": [[row / 7, -float(row)] for row in range(rows)],
            "each": [[row / 5 + step for step in range(len(words[row]))] for row in range(rows)],
            "kinds": [["a", "b", "c"][: row % 4] for row in range(rows)],
            "sets": [[[word, "z"][: step % 3] for step, word in enumerate(row)] for row in words],
        }
    )


def converted(folder: Path, sequence: str = "words") -> Path:
    """Return a converted folder with a column of the small table."""
    path = write_table(folder / "a.parquet", small_table(), 40)
    return convert(path, folder / "out", Columns(sequence=sequence, label="kind")).folder
