"""Batches cut out of files, tables and frames, against the same data read whole and preprocessed in
memory.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import datasets  # type: ignore[import-untyped]
import fsspec  # type: ignore[import-untyped]
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import raglane as rl
from raglane._utils.memory import mapped_bytes
from raglane.data import FORMATS, Columns, Dataset, Preprocessor, convert, read
from raglane.data.store.shards import Shards
from raglane.errors import DataError
from small_files import (
    asked,
    converted,
    same,
    same_batch,
    small_steps,
    small_table,
    write_table,
    written,
)

_TASKS = [
    Columns(sequence="words", label="kind", id="name"),
    Columns(task="tag", sequence="words", label="tags"),
    Columns(task="forecast", sequence="x"),
    Columns(sequence="x", label="kind"),
    Columns(sequence="x", need_labels=False),
    Columns(sequence="text", label="kind"),
    Columns(task="language", sequence="words"),
    Columns(task="language", sequence="text", need_labels=False),
    Columns(task="regress", sequence="x", label="total"),
    Columns(task="regress", sequence="words", label="two"),
    Columns(task="regress", sequence="x", label="each"),
    Columns(task="multilabel", sequence="x", label="kinds"),
    Columns(task="multilabel", sequence="words", label="sets"),
    Columns(sequence="x", label="kind", features=("words", "each"), static=("name", "total")),
    Columns(task="tag", sequence="words", label="tags", features=("each",), static=("kind",)),
    Columns(task="regress", sequence="words", label="total", static=("kind",)),
    Columns(task="forecast", sequence="x", static=("kind",)),
    Columns(task="transcribe", sequence="x", label="text", label_split="words"),
    Columns(task="transcribe", sequence="words", label="kinds"),
]


def _check(data: Dataset, memory: Dataset) -> None:
    """The same lengths, batches and items."""
    assert len(data) == len(memory)
    assert data.lengths.tolist() == memory.lengths.tolist()
    chance = np.random.default_rng(1)
    count = len(memory)
    for rows in (
        [],
        [0],
        list(range(count)),
        chance.permutation(count).tolist(),
        [3, 3, -1, 2],
        [count - 1, 0],
    ):
        if rows:
            same_batch(rl.collate(data.__getitems__(rows)), rl.collate(memory.__getitems__(rows)))
        assert data.take(rows).lengths.tolist() == memory.subset(rows).lengths.tolist()
    for row in (0, 5, -1):
        item, wanted = data[row], memory[row]
        assert item.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(item[name], wanted[name], rtol=0, atol=0)


def _sources(table: pa.Table, folder: Path) -> list[Any]:
    """The same table as every kind of source."""
    with fsspec.open("memory://there/a.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=9)
    for name, start in (("part-a", 0), ("part-b", 25)):
        write_table(folder / f"{name}.arrow", table.slice(start, 25))
    return [
        write_table(folder / "a.parquet", table, 7),
        "memory://there/a.parquet",
        str(folder / "part-*.arrow"),
        write_table(folder / "a.arrows", table, 11),
        table,
        pl.from_arrow(table),
        pd.DataFrame(table.to_pylist()),
        datasets.Dataset(table),
    ]


@pytest.mark.parametrize("number", [*range(6), 9, 12, 13])
def test_every_source_gives_what_memory_gives(number: int, tmp_path: Path) -> None:
    columns, table = _TASKS[number], small_table()
    sources = _sources(table, tmp_path)
    with small_steps(6, 200):
        convert(tmp_path / "a.parquet", tmp_path / "converted", columns)
    records = read(tmp_path / "a.parquet", columns)
    task = columns.task if columns.wants_labels else "forecast"
    fitted = Preprocessor.fit(records, task=task)
    memory = fitted.apply(records, require_targets=columns.need_labels)
    with small_steps(6):
        for source in (*sources, tmp_path / "converted"):
            _check(Dataset(source, columns, preprocessor=fitted), memory)
    assert len(list((tmp_path / "converted").glob("*.arrow"))) > 2


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_is_opened(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    records = read(path, asked(name))
    fitted = Preprocessor.fit(records, task=asked(name).task)
    data = Dataset(path, asked(name), preprocessor=fitted)
    _check(data, fitted.apply(records))
    assert data.ids == records.ids
    assert data.statistics.labels == Dataset(path, asked(name)).statistics.labels


@pytest.mark.parametrize("number", range(len(_TASKS)))
def test_converted_data_gives_the_batches_of_data_in_memory(number: int, tmp_path: Path) -> None:
    """Of every task, with features: the preprocessor, the batches, and what is read of the folder
    in the usual way.
    """
    columns, path = _TASKS[number], tmp_path / "a.parquet"
    pq.write_table(small_table(), path, row_group_size=11)
    records = read(path, columns)
    with small_steps(9, 400):
        convert(path, tmp_path / "folder", columns)
    assert len(list((tmp_path / "folder").glob("*.arrow"))) > 1
    data = Dataset(tmp_path / "folder", columns)
    task = (
        columns.task
        if columns.need_labels
        else "language"
        if columns.task == "language"
        else "forecast"
    )
    fitted = Preprocessor.fit(records, task=task)
    counted = Preprocessor.fit(data, task=task)
    close, wanted = counted.to_config(), fitted.to_config()
    for name in ("mean", "std", "target_mean", "target_std", "features", "split"):
        found, known = close.pop(name), wanted.pop(name)
        if name == "features":
            found, known = (
                [float(part[key]) for part in parts for key in ("mean", "std")]
                for parts in (found, known)
            )
        assert found == (known if isinstance(known, str) else pytest.approx(known))
    assert close == wanted
    memory = fitted.apply(records, require_targets=columns.need_labels)
    _check(data.with_preprocessor(fitted), memory)
    # Large values are read per batch, and large offsets are mapped.
    for limit, reads in (("_MAPPED", True), ("_COPIED", False)):
        shards = mock.patch(f"raglane.data.store.shards.{limit}", 0)
        with (
            shards,
            mock.patch("raglane.data.store.shards.os.pread", side_effect=os.pread) as counted,
        ):
            _check(Dataset(tmp_path / "folder", columns, preprocessor=fitted), memory)
        assert (counted.call_count > 0) == reads
    same(read(tmp_path / "folder", columns), records)
    same(data, records)


def test_without_a_preprocessor_features_are_as_they_are(tmp_path: Path) -> None:
    table = pa.table({"x": [[1.0, float("nan"), 2.0], [], [3.0]], "kind": ["b", "a", "b"]})
    batch = rl.collate(Dataset(table).__getitems__([0, 2]))
    assert batch["inputs"].values.tolist()[0] == [1.0]
    assert batch["inputs"].values.isnan().tolist() == [
        [False],
        [True],
        [False],
        [False],
    ]
    assert batch["target"].tolist() == [1, 1]
    words: Any = Dataset(small_table(), Columns(sequence="words", label="kind"))
    assert words.preprocessor.labels == ("u", "v", "w")
    counts = words.statistics.tokens
    assert words.preprocessor.vocabulary[:2] == (
        "<unk>",
        max(counts, key=lambda word: counts[word]),
    )


def test_a_language_model_reads_no_numbers(tmp_path: Path) -> None:
    """They may be converted for it, since a folder serves every task; sequences of length 0 are of
    every kind.
    """
    data = {}
    for kind, entry in (("numbers", [[0.5, 1.0]]), ("words", ["a"])):
        path = write_table(tmp_path / f"{kind}.parquet", pa.table({"x": [entry, [], entry * 2]}))
        data[kind] = Dataset(convert(path, tmp_path / kind, Columns(task="language")).folder)
        assert data[kind].take([1]).lengths.tolist() == [1]
    assert data["words"].take([0, 1, 2]).lengths.tolist() == [2, 1, 3]
    with pytest.raises(
        DataError,
        match="another task for sequences of numbers, since a language model reads tokens",
    ):
        data["numbers"].take([0, 1])


def test_a_converted_folder_opens_without_its_shards(tmp_path: Path) -> None:
    table = small_table()
    with small_steps(6, 300):
        path = write_table(tmp_path / "a.parquet", table)
        convert(path, tmp_path / "out", Columns(task="tag", sequence="words", label="tags"))
    with mock.patch.object(Shards, "load", side_effect=AssertionError("a shard is read")):
        data = Dataset(tmp_path / "out")
        assert data.columns.task == "tag"
        assert data.lengths.dtype == torch.int32
        assert data.lengths.tolist() == table["words"].combine_chunks().value_lengths().to_pylist()
        assert data.statistics.elements == int(data.lengths.sum())
        assert data.preprocessor.labels == tuple(sorted("ABCDE"))
        part = data.subset(np.arange(30, 10, -1))
        assert len(pickle.dumps(part)) < 20_000
    assert part.take([0, 1]).lengths.tolist() == data.take([30, 29]).lengths.tolist()
    assert part.subset([3])[0]["inputs"].tolist() == data[27]["inputs"].tolist()


def test_values_lie_in_the_file(tmp_path: Path) -> None:
    converted(tmp_path, "x")
    store, _ = Shards.of(tmp_path / "out")
    part = store.load(0)
    assert not part.values.flags.owndata
    assert not part.values.flags.writeable
    data = Dataset(tmp_path / "out")
    first = data.take(np.arange(4, 9)).values
    # The rows of one shard that stand together are that memory, not a copy of it.
    assert any(
        np.shares_memory(first.numpy(), kept.values) for kept in data._fragments._loaded.values()
    )
    data.take([0])
    before = mapped_bytes()
    for kept in data._fragments._stores:
        kept.drop()
    assert mapped_bytes() < before
    assert torch.equal(data.take(np.arange(4, 9)).values, first)


def test_parts_of_parquet_are_dropped_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, path = (
        Columns(sequence="x", label="kind"),
        write_table(tmp_path / "a.parquet", small_table(), 5),
    )
    monkeypatch.setattr("raglane.data.store.gathering._KEPT", 300)
    data, records = Dataset(path, columns), read(path, columns)
    rows = np.random.default_rng(2).permutation(len(records))
    np.testing.assert_array_equal(data.take(rows).values, records.subset(rows).values)
    for row in (0, 5, 0, 10):
        data.take([row])
    # Those of 120 bytes that were used last.
    assert list(data._fragments._loaded) == [0, 2]


def test_memory_that_is_mapped_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(tmp_path, "x")
    monkeypatch.setattr("raglane.data.store.gathering._LOOK", 8)
    data = Dataset(tmp_path / "out")
    for most, times in ((1 << 50, 0), (0, 2)):
        monkeypatch.setattr("raglane.data.store.gathering._MAPPED", most)
        with mock.patch.object(Shards, "drop") as drop:
            for _ in range(6):
                data.take([1, 2, 3])
        assert drop.call_count == times


def test_workers_open_the_files_again(tmp_path: Path) -> None:
    columns = Columns(sequence="words", label="kind")
    with small_steps(6, 300):
        converted(tmp_path, "words")
    data = Dataset(tmp_path / "out", columns)
    order = [[5, 1], [39, 2, 2], [0]]
    wanted = [rl.collate(data.__getitems__(rows)) for rows in order]
    for reader in (data, pickle.loads(pickle.dumps(data))):
        loader: DataLoader[Any] = DataLoader(
            reader, batch_sampler=order, collate_fn=rl.collate, num_workers=1
        )
        for batch, expected in zip(loader, wanted, strict=True):
            same_batch(batch, expected)


@pytest.mark.parametrize(
    "order", [("p", "q", "r"), ("r", "q", "p"), ("q", "r", "p"), ("r", "p"), ("q",)]
)
def test_channels_are_gathered_in_the_order_of_training(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    chance = np.random.default_rng(4)
    lengths = [2, 0, 1, 5, 3]
    channels = {
        name: [chance.normal(at, at + 1, n).tolist() for n in lengths]
        for at, name in enumerate("pqr")
    }
    pq.write_table(pa.table({**channels, "y": list("aabba")}), tmp_path / "a.parquet")
    trained = Columns(sequence=order[0], label="y", features=order)
    fitted = Preprocessor.fit(read(tmp_path / "a.parquet", trained), task="classify")
    columns = Columns(sequence="p", label="y", features=("p", "q", "r"))
    convert(tmp_path / "a.parquet", tmp_path / "out", columns)
    rows = [3, 0, 1, 4, 2]
    wanted = np.concatenate(
        [np.stack([channels[name][row] for name in order], axis=1) for row in rows]
    )
    if len(order) > 1:
        wanted = (wanted - np.array(fitted.mean)) / np.array(fitted.std)
    for source in (tmp_path / "a.parquet", tmp_path / "out"):
        data = Dataset(source, columns, preprocessor=fitted)
        if len(order) == 1:
            # A single column of numbers has a channel without a name.
            with pytest.raises(DataError, match="channels"):
                data.take(rows)
            continue
        np.testing.assert_allclose(
            data.take(rows).values.double().numpy(), wanted, rtol=1e-5, atol=1e-6
        )


def test_rows_before_the_first_element_take_channels_and_targets_from_it(tmp_path: Path) -> None:
    steps = [[], [[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]]
    pq.write_table(pa.table({"x": steps, "y": steps}), tmp_path / "a.parquet", row_group_size=1)
    columns = Columns(task="regress", sequence="x", label="y")
    whole, data = read(tmp_path / "a.parquet", columns), Dataset(tmp_path / "a.parquet", columns)
    assert data.channels == whole.channels == ("x0", "x1")
    assert data.records.channels == ("x0", "x1")
    fitted = Preprocessor.fit(data, task="regress")
    assert fitted.target_names == ("y_0", "y_1")
    found, wanted = data.with_preprocessor(fitted).tensors(), fitted.apply(whole).tensors()
    assert torch.equal(found.values, wanted.values)
    assert torch.equal(found.targets, wanted.targets)  # type: ignore[arg-type]


def test_rows_of_several_files_keep_their_number_and_their_label(tmp_path: Path) -> None:
    table = pa.table({"x": [[float(row)] * (row % 3) for row in range(9)], "y": list("abcabcaab")})
    for name, start, count in (("a", 0, 2), ("b", 2, 4), ("c", 6, 3)):
        pq.write_table(table.slice(start, count), tmp_path / f"{name}.parquet", row_group_size=3)
    columns = Columns(sequence="x", label="y")
    with small_steps(3, 40):
        convert(str(tmp_path / "*.parquet"), tmp_path / "out", columns)
    rows = [7, 0, 2, 2, 8, 5]
    for source in (str(tmp_path / "*.parquet"), tmp_path / "out"):
        data = Dataset(source, columns)
        assert data.ids == tuple(range(9))
        classes: Any = data.classes()
        words = data.preprocessor.labels or ()
        assert [words[place] for place in classes.tolist()] == list("abcabcaab")
        some = data.subset(rows)
        assert some.ids == tuple(rows)
        assert some.lengths.tolist() == [row % 3 for row in rows]
        assert list(some.classes()) == list(classes[rows])  # type: ignore[arg-type]
        assert list(some.subset([5, 1]).classes()) == list(classes[[5, 0]])  # type: ignore[arg-type]
