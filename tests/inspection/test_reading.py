"""The reading of an inspection: lengths of text files, and Parquet files compared with the reader
of whole files.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import write_rows, write_steps
from made_datasets import dataset
from raglane.data import convert
from raglane.data.columns import Columns
from raglane.data.formats import read as read_records
from raglane.data.records import Feature as Beside
from raglane.data.records import offsets_of
from raglane.data.store.conversion import Progress
from raglane.errors import DataError
from raglane.runs.inspection import reading
from raglane.runs.inspection.reading import Contents, contents_of
from small_files import refused


class _Told(Progress):
    def __init__(self) -> None:
        self.shares: list[float] = []

    def done(self, share: float) -> None:
        self.shares.append(share)


def _read(path: Path, **columns: str) -> Contents:
    return reading.read(path, Columns(**columns), None, Progress())  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [10, 11, 12, 1 << 22])
def test_lengths_are_read_whatever_piece_they_come_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    path = tmp_path / "lengths.txt"
    for content, expected in (
        (b"4\n0\n12", [4, 0, 12]),
        (b"\xef\xbb\xbf7\r\n\r\n80\r\n9", [7, 80, 9]),
        (b"  7 \n\t8\n0009\n", [7, 8, 9]),
        (b"999999999\n1\n\n\n", [999_999_999, 1]),
        (b"5\r\n6\r", [5, 6]),
    ):
        path.write_bytes(content)
        monkeypatch.setattr(reading, "_CHUNK", chunk)
        told = _Told()
        found = reading.lengths_of_text(path, told)
        assert found.lengths.tolist() == expected, (content, chunk)
        assert found.lengths.dtype == np.int64
        assert told.shares == sorted(told.shares)
        assert told.shares[-1] == 1.0


@pytest.mark.parametrize(
    ("content", "line", "quoted"),
    [
        (b"4\n-3\n5\n", 2, "'-3'"),
        (b"1\n\n\n3 4\n", 4, "'3 4'"),
        (b"1\n1000000000\n", 2, "'1000000000'"),
        (b"1\n\xb2\n", 2, r"'\\xb2'"),
        (b"1\r\nx\r\n", 2, "'x'"),
        (b"2" * 5000, 1, "'2222"),
        (b"10\n" * 1000 + b"ten\n", 1001, "'ten'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("chunk", [64, 1 << 22])
def test_lines_are_counted_over_pieces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    line: int,
    quoted: str,
    chunk: int,
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    monkeypatch.setattr(reading, "_CHUNK", chunk)
    with pytest.raises(DataError) as caught:
        reading.lengths_of_text(path, Progress())
    assert re.search(
        rf"lengths.txt, line {line} must be .*, got {re.escape(quoted)}", str(caught.value)
    )
    assert len(str(caught.value)) < 500


def _column(kind: str, count: int, random: np.random.Generator) -> pa.Array:
    lengths = random.integers(0, 6, count)
    lengths[0] = 2
    if kind == "texts":
        return pa.array([" ".join(["a", "bc", "d"][: n % 4]) + "  " * (n % 2) for n in lengths])
    if kind == "tokens":
        return pa.array([[f"w{n}" for n in random.integers(0, 9, size)] for size in lengths])
    if kind == "channels":
        steps = [
            [[1.0, float("nan")] if random.random() < 0.2 else [0.5, 2.0] for _ in range(n)]
            for n in lengths
        ]
        return pa.array(steps, pa.list_(pa.list_(pa.float32())))
    if kind == "int16":
        return pa.array([random.integers(0, 9, n).tolist() for n in lengths], pa.list_(pa.int16()))
    values = [random.normal(size=n).tolist() for n in lengths]
    values[0][0], values[1] = float("inf"), [3e38 if kind == "float32" else 1e39]
    make = pa.large_list if kind == "large-float64" else pa.list_
    return pa.array(values, make(pa.float32() if kind == "float32" else pa.float64()))


@pytest.mark.parametrize("task", ["classify", "tag", "forecast"])
def test_a_parquet_file_in_pieces_is_what_it_is_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr("raglane.data.assemble.streams.ROWS", 7)
    random = np.random.default_rng(1)
    path = tmp_path / "data.parquet"

    def never(records: object, path: object) -> Contents:
        raise AssertionError("read as a whole")

    for kind in ("float32", "float64", "large-float64", "int16", "channels", "tokens", "texts"):
        if kind == "texts" and task == "tag":
            continue
        column = _column(kind, 40, random)
        labels = (
            pa.array(random.integers(0, 3, 40)) if kind == "int16" else pa.array(["x", "y"] * 20)
        )
        if task == "tag":
            labels = pa.array(
                [["t", "u", "t", "v", "t", "t"][: len(entry)] for entry in column.to_pylist()]
            )
        pq.write_table(pa.table({"seq": column, "label": labels}), path, row_group_size=11)
        columns = Columns(task=task, sequence="seq", label="label" if task != "forecast" else None)
        expected = contents_of(read_records(path, columns, "parquet"), path)
        told = _Told()
        with monkeypatch.context() as patch:
            patch.setattr(reading, "contents_of", never)
            found = reading.contents_of_parquet(path, columns, told)
        assert found.lengths.tolist() == expected.lengths.tolist(), kind
        assert (found.kind, found.vocabulary, found.labels) == (
            expected.kind,
            expected.vocabulary,
            expected.labels,
        )
        assert found.features == expected.features, kind
        assert len(told.shares) > 4
        assert told.shares[-1] == 1.0


def test_a_parquet_file_with_a_fault_is_refused_as_training_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    for column, pieces in (
        (pa.array([[1.0], None, [2.0]]), "a null in row 1"),
        (pa.array([[1.0], [2.0, None]]), "a null in row 1, step 1"),
        (pa.array([[[1.0]], [[1.0, 2.0]]]), "2 channels in row 1, step 0"),
        (pa.array([["a"], [None]]), "a null in row 1, step 0"),
        (pa.array([{"a": 1}]), "no candidate for the sequence column"),
    ):
        pq.write_table(pa.table({"seq": column}), path)
        with pytest.raises(DataError) as caught:
            _read(path, task="forecast")
        assert pieces in str(caught.value)
    pq.write_table(
        pa.table({"seq": pa.array([[1.0], [2.0]]), "tags": pa.array([["a"], ["b", "c"]])}), path
    )
    refused(
        ["2 labels for 1 elements in row 1"], _read, path, task="tag", sequence="seq", label="tags"
    )


def test_rare_types_are_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    texts = pa.array(["a b", "", "b"]).dictionary_encode()
    pq.write_table(pa.table({"seq": texts, "label": pa.array(["x", "y", "x"])}), path)
    found = _read(path, sequence="seq", label="label")
    assert (found.lengths.tolist(), found.vocabulary) == ([2, 0, 1], 2)


def test_labels_are_not_needed_unless_their_column_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", ({"seq": [1.0] * n} for n in range(4)))
    found = _read(path)
    assert found.labels is None
    assert found.lengths.tolist() == [0, 1, 2, 3]
    assert any("no labels are read" in note for note in found.notes)
    refused(["no column 'kind'"], _read, path, label="kind")
    assert _read(write_steps(tmp_path / "ok.csv")).labels == reading.labels_of(
        "sequence", {"x": 6, "y": 6}
    )


def test_missing_numbers_of_other_columns_are_counted() -> None:
    """A model reads one category more than the data has: that of unknown and missing words."""
    beside = (
        Beside("age", np.array([31, np.nan], np.float32), per_sequence=True),
        Beside("city", np.array(["Rome", "", "Bonn"], dtype=object)),
    )
    values = np.array([[1], [np.nan], [1]], np.float32)
    found = contents_of(
        dataset(values, offsets_of([2, 1]), channels=("a",), features=beside).records, None
    )
    assert [feature.missing for feature in found.features] == [1]
    assert found.missing == 2
    assert found.inputs() == (2 * 2, [3])


def test_rows_of_a_parquet_file_that_are_bad_are_left_out_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(
        pa.table({"seq": pa.array([[1.0, 2.0], None, [2.0]]), "label": pa.array(["x", "y", "z"])}),
        path,
    )
    found = reading.read(path, Columns(sequence="seq", label="label"), None, Progress(), "skip")
    assert found.lengths.tolist() == [2, 1]
    refused(
        ["a null in row 1"],
        reading.read,
        path,
        Columns(sequence="seq", label="label"),
        None,
        Progress(),
        "raise",
    )


def test_of_a_converted_folder_no_sequence_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.jsonl").write_text(
        '{"x": ["a", "b"], "y": "u"}\n{"x": [], "y": "v"}\n{"x": ["a"], "y": "u"}\n'
    )
    (tmp_path / "sets.jsonl").write_text(
        '{"x": ["a"], "y": ["u", "v"]}\n{"x": ["b"], "y": ["u"]}\n'
    )
    write_steps(tmp_path / "steps.csv", cells={"b": "nan"})
    sets = {"task": "multilabel", "label": "y"}
    files: dict[str, dict[str, str]] = {"words.jsonl": {}, "steps.csv": {}, "sets.jsonl": sets}
    for name, columns in files.items():
        wanted, folder = _read(tmp_path / name, **columns), tmp_path / Path(name).stem
        convert(tmp_path / name, folder, Columns(**columns))  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr("raglane.data.store.stores.Shards.load", None)
            patched.setattr("raglane.data.sources.ipc.table_of", None)
            found = _read(folder, **columns)
        assert found.lengths.dtype == np.int64
        assert found.lengths.tolist() == wanted.lengths.tolist()
        assert (found.kind, found.vocabulary, found.features) == (
            wanted.kind,
            wanted.vocabulary,
            wanted.features,
        )
        assert found.labels == wanted.labels
    assert found.labels == reading.labels_of("sequence", {"u": 2, "v": 1})


def test_tables_and_words_in_texts_are_no_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number}\n" for number in range(9)))
    assert _read(path).kind == "lengths"
    path.write_text("id t x kind\na 0 1.5 p\na 1 2.5 p\nb 0 3.5 q\n")
    assert _read(path).lengths.tolist() == [2, 1]
    path.write_text("Ann B-PER\nruns O\n\nRome B-LOC\nis O\n")
    assert _read(path, task="tag").lengths.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("numbers", "count"),
    [
        ([1, -999, 2, -999, 3], 2),
        ([20.5, -9999, 18], 1),
        ([-999.25, 3, 4], 1),
        ([1, 2, 3], 0),
        ([-999, -998, -997], 0),
        ([-999, -999], 0),
        ([-1000, 2, 3], 0),
    ],
)
def test_numbers_that_mean_missing_are_named(
    tmp_path: Path, numbers: list[float], count: int
) -> None:
    rows = "".join(f"a,{time},{number},1\n" for time, number in enumerate(numbers))
    (tmp_path / "a.csv").write_text(f"id,t,x,y\n{rows}")
    notes = [note for note in _read(tmp_path / "a.csv").notes if "missing, write" in note]
    assert len(notes) == bool(count)
    if count:
        verb = "is" if count == 1 else "are"
        share = f"{count} of {len(numbers)} numbers of 'x' {verb} "
        assert notes[0].startswith(share)
