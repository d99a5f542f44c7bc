"""Folders of recordings and texts, in which each file is a sequence, and of parts of a table."""

from __future__ import annotations

import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raglane as rl
from raglane.data import Columns, Dataset
from raglane.errors import ArgumentError, DataError

_ROWS = {"a": "x,y\n1,2\n3,4\n5,6\n", "b": "x,y\n7,8\n", "c": "x,y\n9,10\n11,12\n"}
_VALUES = [[float(2 * row + 1), float(2 * row + 2)] for row in range(6)]


def _write(folder: Path, files: Mapping[str, str | bytes | np.ndarray]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, np.ndarray):
            np.save(path, content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def _read(folder: Path, files: Mapping[str, Any], **columns: Any) -> Dataset:
    return rl.data.read(_write(folder, files), Columns(**columns))


def _check(data: Dataset, ids: tuple[str, ...], labels: tuple[str, ...] | None) -> None:
    assert data.records.values.tolist() == _VALUES
    assert data.lengths.tolist() == [3, 1, 2]
    assert (data.ids, data.labels) == (ids, labels)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "dat", "psv"])
def test_the_folder_of_a_table_is_its_class(tmp_path: Path, suffix: str) -> None:
    mark = {"tsv": "\t", "psv": "|"}.get(suffix, ",")
    rows = {name: text.replace(",", mark) for name, text in _ROWS.items()}
    files = {f"{'run' if name == 'c' else 'jog'}/{name}.{suffix}": rows[name] for name in rows}
    data = _read(tmp_path, files)
    _check(data, ("jog/a", "jog/b", "run/c"), ("jog", "jog", "run"))
    assert data.notes[0] == (
        f"each of 3 files (.{suffix}) is a sequence, its folder the class (2 classes)"
    )


def test_tables_of_numbers_in_texts(tmp_path: Path) -> None:
    rows = {name: text.split("\n", 1)[1].replace(",", "  ") for name, text in _ROWS.items()}
    files = {f"k{name}/{name}.txt": f"{rows[name]}" for name in rows}
    data = _read(tmp_path, files)
    assert data.channels == ("c1", "c2")
    _check(data, ("ka/a", "kb/b", "kc/c"), ("ka", "kb", "kc"))


def test_parquet_files_are_sequences(tmp_path: Path) -> None:
    for number, (name, count) in enumerate({"p/a": 3, "p/b": 1, "q/c": 2}.items()):
        first = [0, 3, 4][number]
        (tmp_path / name).parent.mkdir(exist_ok=True)
        table = pa.table({"x": [v[0] for v in _VALUES[first : first + count]]})
        table = table.append_column("y", [[int(v[1]) for v in _VALUES[first : first + count]]])
        pq.write_table(table, tmp_path / f"{name}.parquet")
    _check(rl.data.read(tmp_path), ("p/a", "p/b", "q/c"), ("p", "p", "q"))


@pytest.mark.parametrize("header", ["file,label\n", ""])
@pytest.mark.parametrize("suffix", [".csv", ""])
def test_a_table_of_labels_beside_the_files(tmp_path: Path, header: str, suffix: str) -> None:
    table = header + "".join(f"{name}{suffix},k{name}\n" for name in "cab")
    files = {f"{name}.csv": text for name, text in _ROWS.items()} | {"labels.csv": table}
    data = _read(tmp_path, files)
    _check(data, ("a", "b", "c"), ("ka", "kb", "kc"))
    assert data.notes[0].endswith("is a sequence, its label in labels.csv")


def test_labels_of_some_files_in_another_folder(tmp_path: Path) -> None:
    files = {f"audio/{name}.npy": np.ones((2, 1)) for name in "abcd"}
    table = "filename,fold,target,esc\na.npy,1,7,t\nc.npy,2,8,t\nd.npy,2,7,f\n"
    data = _read(tmp_path, files | {"meta/all.csv": table})
    assert data.labels == ("7", "8", "7")
    assert any("left out: 1 file: audio/b.npy" in note for note in data.notes)
    numbers = rl.data.read(tmp_path, Columns(task="regress", label="target"))
    assert numbers.records.targets is not None
    assert numbers.records.targets.values.tolist() == [[7.0], [8.0], [7.0]]
    (tmp_path / "meta/all.csv").write_text(table.replace("target", "kind"))
    with pytest.raises(DataError, match="3 candidates for the label column: 'fold', 'kind', 'esc'"):
        rl.data.read(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "labels"), [(r"^\d", ("0", "0", "1")), (r"_(\w+)_", ("jackson", "theo", "theo"))]
)
def test_a_label_in_the_name_of_a_file(
    tmp_path: Path, pattern: str, labels: tuple[str, ...]
) -> None:
    files = {f"{name}.npy": np.arange(3.0) for name in ("0_jackson_0", "0_theo_1", "1_theo_0")}
    data = _read(tmp_path, files, label_from_name=pattern)
    assert data.labels == labels
    with pytest.raises(DataError, match=r"in which 'jack' finds nothing"):
        rl.data.read(tmp_path, Columns(label_from_name="jack"))
    with pytest.raises(ArgumentError, match="a regular expression"):
        Columns(label_from_name="(")


def test_a_column_of_labels_in_each_file(tmp_path: Path) -> None:
    files = {f"p{n}.psv": f"HR|O2|Sepsis\n{n}|NaN|0\n{n + 1}|2|{n % 2}\n" for n in range(3)}
    data = _read(tmp_path, files, task="tag", label="Sepsis")
    assert data.ids == ("p0", "p1", "p2")
    assert data.records.tags is not None
    assert data.records.tags.tolist() == ["0", "0", "0", "1", "0", "0"]
    assert data.channels == ("HR", "O2")
    same = {f"q/p{n}.csv": f"x,kind\n1,{n % 2}\n2,{n % 2}\n" for n in range(3)}
    data = _read(tmp_path / "same", same, label="kind")
    assert data.labels == ("0", "1", "0")


def test_texts_whose_folder_is_the_class(tmp_path: Path) -> None:
    files = {
        "pos/0_9.txt": "A good film.\nSee it!",
        "pos/1_8.txt": "Good",
        "neg/0_2.txt": "Bad film",
        "unsup/0_0.txt": "What film",
        "urls.txt": "http://x",
        "README": "about",
    }
    data = _read(tmp_path, files)
    assert data.labels == ("neg", "pos", "pos")
    assert data.ids == ("neg/0_2", "pos/0_9", "pos/1_8")
    assert data.records.values.tolist()[2:8] == ["A", "good", "film.", "See", "it!", "Good"]
    assert any("left out: 2 files: unsup/0_0.txt, urls.txt" in note for note in data.notes)


def test_texts_without_a_suffix(tmp_path: Path) -> None:
    data = _read(tmp_path, {"alt.atheism/51060": "one two", "sci.med/57110": "three"})
    assert (data.labels, data.ids) == (
        ("alt.atheism", "sci.med"),
        ("alt.atheism/51060", "sci.med/57110"),
    )


def test_files_with_ids_are_parts_of_one_table(tmp_path: Path) -> None:
    files = {
        "part-0.csv": "id,t,x,kind\na,0,1,p\na,1,2,p\nb,0,3,q\n",
        "part-1.csv": "id,t,x,kind\nb,1,4,q\n",
    }
    data = _read(tmp_path, files)
    assert (data.ids, data.lengths.tolist()) == (("a", "b"), [2, 2])
    assert data.records.values[:, 0].tolist() == [1, 2, 3, 4]
    assert data.notes[0] == "2 files (.csv), the parts of one table"


def test_arrow_files_with_lists_or_texts_are_parts(tmp_path: Path) -> None:
    for number in range(2):
        rows = {"x": [[1.0 + number], [2.0, 3.0]], "kind": ["a", "b"]}
        pq.write_table(pa.table(rows), tmp_path / f"part-{number}.parquet")
    data = rl.data.read(tmp_path)
    assert (data.lengths.tolist(), data.labels) == ([1, 2, 1, 2], ("a", "b", "a", "b"))
    pq.write_table(pa.table({"y": [1]}), tmp_path / "part-2.parquet")
    with pytest.raises(DataError, match=r"other columns in part-2\.parquet"):
        rl.data.read(tmp_path)
    files = tmp_path / "files"
    files.mkdir()
    for number in range(2):
        rows = {"x": [1.0, 2.0, 3.0], "kind": ["ab"[number]] * 3}
        pq.write_table(pa.table(rows), files / f"{number}.parquet")
    data = rl.data.read(files)
    assert (data.lengths.tolist(), data.labels) == ([3, 3], ("a", "b"))


def test_arrays(tmp_path: Path) -> None:
    files = {f"k{n}/{n}.npy": np.arange(2.0 * n + 2).reshape(n + 1, 2) for n in range(3)}
    data = _read(tmp_path, files)
    assert (data.lengths.tolist(), data.labels) == ([1, 2, 3], ("k0", "k1", "k2"))
    assert data.records.values[1:3].tolist() == [[0, 1], [2, 3]]
    np.savez(tmp_path / "one.npz", x=np.arange(3.0))
    flat = _read(tmp_path / "flat", {"0.npy": np.arange(3)}, need_labels=False)
    assert flat.records.values.tolist() == [[0], [1], [2]]


def test_zipped_arrays(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "x.npz", x=np.arange(3.0), rate=np.arange(2))
    with pytest.raises(DataError, match=r"the arrays 'x', 'rate'"):
        rl.data.read(tmp_path)
    data = rl.data.read(tmp_path, Columns(sequence="x"))
    assert (data.lengths.tolist(), data.labels) == ([3, 3], ("a", "b"))


def _wave(path: Path, samples: np.ndarray, rate: int = 8000) -> None:
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def test_sounds(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    left = np.array([[0, 1], [16384, -16384], [-32768, 32767]])
    _wave(tmp_path / "a/x.wav", left)
    _wave(tmp_path / "b/y.wav", left[:2])
    data = rl.data.read(tmp_path)
    assert (data.labels, data.lengths.tolist()) == (("a", "b"), [3, 2])
    assert np.array_equal(data.records.values[:3], left.astype(np.float32) / 32768)
    _wave(tmp_path / "b/z.wav", left, 16000)
    with pytest.raises(DataError, match=r"8,000 and 16,000 Hz\. Resample"):
        rl.data.read(tmp_path)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"a.csv": _ROWS["a"], "b.npy": np.ones(3), "c.npy": np.ones(3)}, r"2 \.npy, and 1 \.csv"),
        ({"train/x/a.csv": "x\n1\n", "test/x/b.csv": "x\n1\n"}, r"folders 'test', 'train'.*test"),
        ({"x/s1/a.csv": "x\n1\n", "y/s1/b.csv": "x\n1\n"}, r"folders in folders.*label_from_name"),
        ({"a.npy": np.ones((3, 2)), "b.npy": np.ones((3, 3))}, r"shape \(3, 2\), and \(3, 3\)"),
        ({"a.npy": np.ones((3, 2, 2))}, r"shape \(3, 2, 2\)"),
        ({"a.csv": _ROWS["a"], "b.csv": "x,z\n1,2\n"}, r"'y', 'z' in b\.csv or a\.csv only"),
        ({"x/a.npy": b"no array"}, r"no readable array"),
        ({"x/a.txt": b"\xff"}, r"a\.txt, line 1.*0xff"),
        ({"a.pdf": b"%PDF"}, r"1 entries, none of them a text"),
    ],
)
def test_refused_by_what_is_there(tmp_path: Path, files: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        _read(tmp_path, files, need_labels=False)


def test_files_without_labels_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 files \(\.npy\) without labels.*file,label"):
        _read(tmp_path, {"a.npy": np.ones(3), "b.npy": np.ones(2)})


def test_predictions_for_files_without_classes(tmp_path: Path) -> None:
    train = _write(
        tmp_path / "train",
        {f"k{n % 2}/{n}.npy": np.full((3 + n, 1), float(n % 2)) for n in range(12)},
    )
    run = rl.fit(train, epochs=30, hidden_size=4, lr=0.05, threads=1, validation_fraction=0)
    new = _write(tmp_path / "new", {f"{n}.npy": np.full((4, 1), float(n)) for n in range(2)})
    predictions = run.predict(run.read(new, need_labels=False)).columns
    assert predictions["prediction"] == ["k0", "k1"]
    assert predictions["id"] == ["0", "1"]
    assert run.evaluate(train)["accuracy"] == 1


def test_a_bad_file_is_left_out(tmp_path: Path) -> None:
    files = {f"k{n % 2}/{n}.npy": np.ones(n + 1) for n in range(5)}
    folder = _write(tmp_path, files | {"k0/9.npy": b"no array"})
    data = rl.data.read(folder, on_bad_row="skip")
    assert len(data) == 5
    assert data.skipped[0].place == "9.npy"
