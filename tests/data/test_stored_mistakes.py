"""Files and folders that a dataset cannot be cut out of: refused, by file and row."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from raglane.data import Columns, Dataset, Preprocessor, convert, read
from raglane.data.sources.ipc import checksums, seal
from raglane.errors import ArgumentError, ArgumentTypeError, DataError
from small_files import converted, refused, small_table, write_table


def test_targets_that_a_folder_was_not_made_with(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", small_table())
    convert(
        tmp_path / "a.parquet",
        tmp_path / "folder",
        Columns(task="multilabel", sequence="x", label="kinds"),
    )
    with pytest.raises(ArgumentError, match=r"task must be multilabel, for which .* was converted"):
        Dataset(tmp_path / "folder", Columns(task="regress"))
    data = Dataset(tmp_path / "folder")
    refused(["no numbers to learn"], Preprocessor.fit, data, task="regress")
    few = Preprocessor.fit(read(tmp_path / "a.parquet", data.columns), task="multilabel")
    few = Preprocessor.from_config({**few.to_config(), "labels": ["a", "b"]})
    with pytest.raises(DataError, match=r"part-00000\.arrow must be .*got the label 'c' in row 3"):
        data.with_preprocessor(few).take(range(8))


def test_errors_name_file_and_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"x": [float(row)], "kind": "ab"[row % 2], "id": f"s{row}"} for row in range(9)
    ]
    path, good = (
        write_table(tmp_path / f"{name}.parquet", pa.Table.from_pylist(rows))
        for name in ("a", "good")
    )
    fitted = Preprocessor.fit(read(path), task="classify")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": [None]}, "a null in row 5"),
        ({"x": [float("nan")]}, r"got nan in row 5 \(id 's5'\), step 0, channel 'x0'"),
        ({"kind": "c"}, r"got the label 'c' in row 5 \(id 's5'\)"),
        ({"kind": None}, "a null in row 5"),
    ]
    for changed, pattern in cases:
        write_table(path, pa.Table.from_pylist([*rows[:5], {**rows[5], **changed}, *rows[6:]]))
        with pytest.raises(DataError, match=rf"a\.parquet.*{pattern}"):
            Dataset([good, path], preprocessor=fitted).take([1, 14])
    wide = pa.Table.from_pylist([{**row, "x": [[1.0, 2.0]]} for row in rows])
    data = Dataset([good, write_table(tmp_path / "b.parquet", wide)])
    refused(
        ["b.parquet, row group 0 must be ", ", got features ", "after features"], data.take, [0, 12]
    )
    tags = Columns(task="tag", sequence="x", label="kind")
    write_table(path, pa.table({"x": [[1.0, 2.0]], "kind": [["a", "z"]]}))
    known = {**Preprocessor.fit(read(path, tags), task="tag").to_config(), "labels": ["a", "b"]}
    data = Dataset(path, tags, preprocessor=Preprocessor.from_config(known))
    refused(["got the label 'z' in row 0, step 1"], data.take, [0])


@pytest.mark.parametrize(
    "name", ["part-00000.arrow", "lengths.npy", "statistics.json", "dataset.json"]
)
def test_a_file_that_is_cut_or_not_there_is_refused(tmp_path: Path, name: str) -> None:
    path = converted(tmp_path) / name
    for damaged in (path.read_bytes()[:-20], b"[]", b"{"):
        path.write_bytes(damaged)
        refused([name], _use, tmp_path / "out")
    if name != "dataset.json":  # without which it is a folder of Arrow files
        path.unlink()
        assert "damaged" not in refused(["got no such file. Restore it"], _use, tmp_path / "out")


@pytest.mark.parametrize(("row", "offset"), [(3, b"\xff\xff\xff\x7f"), (0, b"\1\0\0\0" * 2)])
def test_offsets_that_fall_are_refused_whatever_the_checksums_say(
    tmp_path: Path, row: int, offset: bytes
) -> None:
    converted(tmp_path)
    path, described = tmp_path / "out" / "part-00000.arrow", tmp_path / "out" / "dataset.json"
    shard = path.read_bytes()
    batch = pa.ipc.open_file(pa.BufferReader(shard)).get_batch(0)
    place = shard.index(batch.column("words").offsets.buffers()[1].to_pybytes()[:64])
    path.write_bytes(shard[: place + 4 * row] + offset + shard[place + 4 * row + len(offset) :])
    description = json.loads(described.read_bytes())
    del description["checksum"]
    description["shards"][0]["checksums"] = checksums(path)
    described.write_text(json.dumps(seal(description)))
    with pytest.raises(DataError, match=r"part-00000\.arrow must be .*got a damaged file"):
        Dataset(tmp_path / "out").take([0, 1])


def test_zeroed_bytes_of_a_shard_are_noticed_by_whatever_reads_them(tmp_path: Path) -> None:
    """Training on a shard with 64 zeroed bytes gave another model."""
    values = np.random.default_rng(3).normal(size=(300_000, 2)).astype(np.float32)
    rows = np.split(values, np.arange(1000, 300_000, 1000))
    table = pa.table({"x": [row.tolist() for row in rows], "kind": ["a", "b"] * 150})
    convert(write_table(tmp_path / "a.parquet", table), tmp_path / "out", Columns(label="kind"))
    path = tmp_path / "out" / "part-00000.arrow"
    content = path.read_bytes()
    place = content.index(values[200_000:200_008].tobytes())
    path.write_bytes(content[:place] + bytes(64) + content[place + 64 :])
    data = Dataset(tmp_path / "out")
    damaged = r"part-00000\.arrow must be .*got a damaged file"
    # Blocks are verified as they are read: those without damage are good.
    assert len(data.take([0, 5, 299])) == 3
    for rows_read in ([200], [199, 200, 201], range(300)):
        with pytest.raises(DataError, match=f"{damaged}: the checksum of the bytes"):
            Dataset(tmp_path / "out").take(rows_read)
    for use in (read, lambda folder: convert(folder, tmp_path / "again", Columns(label="kind"))):
        with pytest.raises(DataError, match=f"{damaged}: its checksum differs"):
            use(tmp_path / "out")


def test_any_changed_byte_of_a_folder_is_noticed(tmp_path: Path) -> None:
    converted(tmp_path)
    random = np.random.default_rng(1)
    for path in sorted((tmp_path / "out").iterdir()):
        content = path.read_bytes()
        head = min(len(content), 140)
        for place in (
            *range(0, head, 3),
            *random.integers(0, len(content), 40).tolist(),
            len(content) - 1,
        ):
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
            )
            with pytest.raises(DataError, match=path.name):
                _use(tmp_path / "out")
        path.write_bytes(content)
    _use(tmp_path / "out")


def test_a_relative_path_is_read_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open a dataset in another process, as the workers of a cluster do."""
    monkeypatch.chdir(tmp_path)
    converted(Path())
    (tmp_path / "elsewhere").mkdir()
    for source in ("out", "a.parquet"):
        data = Dataset(source, Columns(sequence="words", label="kind"))
        lengths, content = data.lengths[[3, 1]].tolist(), pickle.dumps(data)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert pickle.loads(content).take([3, 1]).lengths.tolist() == lengths
        monkeypatch.chdir(tmp_path)


def _use(folder: Path) -> None:
    data = Dataset(folder)
    assert data.lengths.shape == (40,)
    data.take(np.arange(40))
    assert data.statistics.sequences == 40


@pytest.mark.parametrize(
    ("task", "per_sequence", "per_element"),
    [
        ("regress", [0.5, 1.5], [[1.0, 2.0], [3.0]]),
        ("multilabel", [["a"], ["b"]], [[["a"], ["b"]], [["b"]]]),
    ],
)
def test_targets_of_both_kinds_are_not_mixed(
    tmp_path: Path, task: str, per_sequence: Any, per_element: Any
) -> None:
    paths = [
        write_table(tmp_path / name, pa.table({"x": [[1.0, 2.0], [3.0]], "y": labels}))
        for name, labels in (("a.parquet", per_sequence), ("b.parquet", per_element))
    ]
    for order in (paths, paths[::-1]):
        data = Dataset(order, Columns(task=task, sequence="x", label="y"))
        for found in (data.tensors, lambda data=data: data.records):
            refused([f"{order[1]}", "per element", "per sequence", "one schema"], found)


def test_other_values_than_sources_are_refused() -> None:
    for source in (3, None, [1, 2], {"x": [1]}):
        refused(
            ["source must be a path, a list of paths, a pyarrow.Table"],
            Dataset,
            source,
            error=ArgumentTypeError,
        )
    with pytest.raises(ArgumentTypeError, match="columns"):
        Dataset(small_table(), "words")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"columns must be .* got \['a'\].*labels=\[...\]"):
        read([[1.0]], ["a"])  # type: ignore[arg-type]
    refused(
        ["no rows"],
        lambda: Dataset(small_table().slice(0, 0), Columns(sequence="x", label="kind")).channels,
    )
    with pytest.raises(IndexError, match="from -40 to 39, for 40 sequences"):
        Dataset(small_table(), Columns(sequence="x", label="kind"))[40]
