"""The readers of Parquet and JSON lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raglane.data import Columns, read
from raglane.errors import DataError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(folder: Path, kind: str, columns: dict[str, Any]) -> Path:
    """Write plain Python columns in one of the two formats."""
    path = folder / f"data.{kind}"
    if kind == "parquet":
        # Two row groups, so that a column comes in several chunks.
        table = pa.table(columns)
        parquet.write_table(table, path, row_group_size=max(1, table.num_rows // 2))
    else:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


both = pytest.mark.parametrize("kind", ["parquet", "jsonl"])


@both
@pytest.mark.parametrize(
    ("columns", "values", "lengths", "labels", "channels", "note"),
    [
        (
            {"load": [[1.5, 2.5], [], [3.5]], "country": ["a", "b", "a"]},
            [[1.5], [2.5], [3.5]],
            [2, 0, 1],
            ("a", "b", "a"),
            ("x0",),
            "sequence column: 'load' (the only candidate)",
        ),
        (
            {"words": [["a", "b"], [], ["é"]], "good": [True, False, True]},
            ["a", "b", "é"],
            [2, 0, 1],
            ("true", "false", "true"),
            (),
            "label column: 'good' (the only candidate)",
        ),
        (
            {"text": ["the cat", "", "  \t ", " a\u00a0b  c\n", "x"], "class": [1, 2, 1, 2, 1]},
            ["the", "cat", "a", "b", "c", "x"],
            [2, 0, 0, 3, 1],
            ("1", "2", "1", "2", "1"),
            (),
            "the texts of 'text' are split on white space into tokens",
        ),
    ],
)
def test_numbers_strings_and_texts(
    tmp_path: Path,
    kind: str,
    columns: dict[str, Any],
    values: list[Any],
    lengths: list[int],
    labels: tuple[str, ...],
    channels: tuple[str, ...],
    note: str,
) -> None:
    records = read(write(tmp_path, kind, columns))
    assert records.values.tolist() == values
    assert records.values.dtype == (np.float32 if channels else object)
    assert records.lengths.tolist() == lengths
    assert (records.labels, records.channels) == (labels, channels)
    assert note in records.notes


@both
def test_lists_of_lists_of_numbers_are_steps_of_channels(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng()
    matrices = [random.normal(size=(length, 4)).astype(np.float32) for length in random.integers(0, 6, 30)]
    matrices.append(np.ones((2, 4), dtype=np.float32))
    labels = random.integers(0, 3, 31).tolist()
    path = write(tmp_path, kind, {"x": [matrix.tolist() for matrix in matrices], "y": labels})
    records = read(path)
    np.testing.assert_array_equal(records.values, np.concatenate(matrices))
    assert records.lengths.tolist() == [len(matrix) for matrix in matrices]
    assert records.labels == tuple(map(str, labels))
    assert records.channels == ("x0", "x1", "x2", "x3")


@both
def test_tags_are_one_an_element(tmp_path: Path, kind: str) -> None:
    columns = {"words": [["a", "b"], [], ["c"]], "tags": [["X", "Y"], [], ["X"]]}
    path = write(tmp_path, kind, columns)
    records = read(path, Columns(task="tag", sequence="words"))
    assert records.tags is not None
    assert records.tags.tolist() == ["X", "Y", "X"]
    assert records.labels is None
    assert read(path, Columns(task="tag", label="tags")).values.tolist() == ["a", "b", "c"]
    by_name = read(path, Columns(task="tag"))
    assert by_name.tags is not None
    assert by_name.tags.tolist() == ["X", "Y", "X"]
    assert by_name.notes[0] == "sequence column: 'words' (by its name)"
    path = write(tmp_path, kind, {"one": columns["words"], "two": columns["tags"]})
    with pytest.raises(
        DataError,
        match=r"2 candidates for the sequence column: 'one', 'two'.*name one with Columns\(sequence=\.\.\.\)",
    ):
        read(path, Columns(task="tag"))


@both
def test_integer_tags_and_a_length_that_differs(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind, {"x": [[0.5, 1.5], [2.5]], "t": [[1, 2], [3, 4]], "id": ["p", "q"]})
    with pytest.raises(DataError, match=r"2 labels for 1 elements in row 1 \(id 'q'.*column 't'"):
        read(path, Columns(task="tag", sequence="x", label="t"))
    path = write(tmp_path, kind, {"x": [[0.5, 1.5], [2.5]], "t": [[1, 2], [3]]})
    tags = read(path, Columns(task="tag", sequence="x")).tags
    assert tags is not None
    assert tags.tolist() == ["1", "2", "3"]


@both
def test_ids_by_name_or_as_named(tmp_path: Path, kind: str) -> None:
    columns = {"ID": [7, 8], "x": [[1.0], [2.0]], "key": ["p", "q"]}
    records = read(write(tmp_path, kind, columns))
    assert records.ids == (7, 8)
    assert "id column: 'ID' (by its name)" in records.notes
    records = read(write(tmp_path, kind, columns), Columns(id="key"))
    assert records.ids == ("p", "q")
    assert records.labels == ("7", "8")


@both
def test_a_sequence_column_may_have_the_name_of_an_id(tmp_path: Path, kind: str) -> None:
    records = read(write(tmp_path, kind, {"Sequence_ID": [[1.0], [2.0]], "series": ["a", "b"]}))
    assert records.ids == (0, 1)
    assert records.labels == ("a", "b")
    assert read(write(tmp_path, kind, {"sequence": ["A C", "G"], "y": [1, 2]})).values.tolist() == ["A", "C", "G"]


@both
def test_sequences_may_all_be_empty(tmp_path: Path, kind: str) -> None:
    records = read(write(tmp_path, kind, {"x": [[], []], "y": [1, 2]}))
    assert records.lengths.tolist() == [0, 0]
    assert records.values.shape == (0, 1)


@both
@pytest.mark.parametrize("need", [Columns(need_labels=False), Columns(task="forecast")])
def test_labels_are_not_needed_to_predict_or_forecast(tmp_path: Path, kind: str, need: Columns) -> None:
    records = read(write(tmp_path, kind, {"x": [[1.0], [2.0]]}), need)
    assert records.labels is None
    path = write(tmp_path, kind, {"text": ["a", "b"], "y": ["c", None]})
    columns = Columns(task=need.task, need_labels=need.need_labels, label="y")
    assert read(path, columns).values.tolist() == ["a", "b"]


@both
@pytest.mark.parametrize(
    ("columns", "asked", "words"),
    [
        ({"x": [[1.0], None], "y": [1, 2]}, Columns(), ["a null in row 1", "'x'", "sequence"]),
        ({"x": [[1.0], [2.0]], "y": ["a", None]}, Columns(), ["a null in row 1", "'y'", "label"]),
        ({"x": [[1.0], [2.0, None]], "y": [1, 2]}, Columns(), ["a null in row 1", "step 1", "'x'", "missing='zero'"]),
        ({"x": [["a"], [None]], "y": [1, 2]}, Columns(), ["a null in row 1", "step 0"]),
        (
            {"x": [[[1.0, 2.0]], [[1.0, 2.0], [3.0, None]]], "y": [1, 2]},
            Columns(),
            ["a null in row 1", "step 1", "channel 1"],
        ),
        ({"x": [[[1.0]], [[1.0], None]], "y": [1, 2]}, Columns(), ["a null in row 1", "step 1"]),
        (
            {"id": ["p", "q"], "x": [[[1.0, 2.0]], [[1.0, 2.0], [3.0]]], "y": [1, 2]},
            Columns(),
            ["1 channel in row 1 (id 'q'", "step 1", "after 2 channels"],
        ),
        ({"x": [["a"], ["b"]], "y": [["N"], [None]]}, Columns(task="tag", sequence="x"), ["null in row 1", "step 0"]),
        ({"x": [[], []], "y": [1, 2]}, Columns(sequence="z"), ["no column 'z'", "'x', 'y'", "Columns(sequence=...)"]),
        ({"x": [[1.0]], "y": [1]}, Columns(label="z"), ["no column 'z'", "Columns(label=...)"]),
        ({"x": [[1.0]], "y": [1]}, Columns(id="z"), ["no column 'z'", "Columns(id=...)"]),
        ({"x": [[1.0]], "a": [1], "b": ["c"]}, Columns(), ["2 candidates", "label", "'a', 'b'", "Columns(label=...)"]),
        ({"x": [[1.0]], "a": [1.5]}, Columns(), ["no candidate", "label", "'x', 'a'", "Columns(label=...)"]),
        ({"x": [[1.0]], "z": [[1.0]], "y": [1]}, Columns(), ["2 candidates", "'x', 'z'", "Columns(sequence=...)"]),
        ({"a": ["p"], "b": ["q"]}, Columns(), ["2 candidates", "'a', 'b'", "Columns(sequence=...)"]),
        ({"a": [1], "b": [2.5]}, Columns(), ["no candidate for the sequence column", "Columns(sequence=...)"]),
        ({"x": [1.5], "y": [1]}, Columns(sequence="x"), ["double", "'x'", "lists of numbers"]),
        ({"x": [[1.0]], "y": [1.5]}, Columns(label="y"), ["double", "'y'", "strings, integers or booleans"]),
        ({"x": [["a"]], "y": ["N"]}, Columns(task="tag", sequence="x", label="y"), ["string", "'y'", "list"]),
        ({"x": [[[], []]], "y": ["a"]}, Columns(), ["no channel in row 0", "step 0, column 'x'"]),
        (
            {"x": [[1.0]], "t": [[2]], "y": [1]},
            Columns(sequence="x", time="t"),
            ["time column 't'", "Columns(time=...)"],
        ),
    ],
)
def test_bad_columns(tmp_path: Path, kind: str, columns: dict[str, Any], asked: Columns, words: list[str]) -> None:
    path = write(tmp_path, kind, columns)
    with pytest.raises(DataError) as caught:
        read(path, asked)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for word in words:
        assert word in message
    if kind == "jsonl" and "row 1" in message:
        assert "line 3" in message


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.list_(pa.float64()),
        pa.list_(pa.float16()),
        pa.list_(pa.int8()),
        pa.list_(pa.uint64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.decimal128(5, 1)),
        pa.list_(pa.float32(), 2),
    ],
    ids=str,
)
def test_parquet_list_types(tmp_path: Path, kind: Any) -> None:
    rows = [[1, 2], [3, 4], [5, 6]]
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"x": pa.array(rows, kind), "y": ["a", "b", "c"]}), path)
    records = read(path)
    assert records.values.tolist() == [[1], [2], [3], [4], [5], [6]]
    assert records.lengths.tolist() == [2, 2, 2]


def test_parquet_dictionaries_large_strings_and_fixed_channels(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    labels = pa.array(["a", "b"]).dictionary_encode()
    inner = pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.float32(), 2)))
    parquet.write_table(pa.table({"x": inner, "y": labels}), path)
    assert read(path).labels == ("a", "b")
    assert read(path).values.tolist() == [[1, 2], [3, 4], [5, 6]]
    texts = pa.array(["p q", "r"], pa.large_string())
    parquet.write_table(pa.table({"x": texts, "y": [1, 2]}), path)
    assert read(path).values.tolist() == ["p", "q", "r"]
    words = pa.array([["p", "q"], ["p"]], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    parquet.write_table(pa.table({"x": words, "y": [1, 2]}), path)
    assert read(path).values.tolist() == ["p", "q", "p"]


def test_parquet_reads_only_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    whole = parquet.ParquetFile.read

    def spy(file: Any, columns: Any) -> Any:
        asked.append(columns)
        return whole(file, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "read", spy)
    path = write(tmp_path, "parquet", {"x": [[1.0]], "y": ["a"], "other": [1.5], "__index_level_0__": [3]})
    assert read(path).labels == ("a",)
    assert asked == [["x", "y"]]


@pytest.mark.parametrize("content", [b"PAR1 nonsense", b"\x00\xff" * 40, b"PAR1" + b"\0" * 50 + b"PAR1"])
def test_a_file_that_is_not_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match="Parquet"):
        read(path)


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"x": pa.array([], pa.list_(pa.float32())), "y": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="no rows"):
        read(path)


def test_a_column_of_empty_lists_of_lists_has_no_channels(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    empty = pa.array([[], []], pa.list_(pa.list_(pa.float32())))
    parquet.write_table(pa.table({"x": empty, "y": ["a", "b"]}), path)
    records = read(path)
    assert records.lengths.tolist() == [0, 0]
    assert (records.values.shape, records.channels) == ((0, 0), ())


@pytest.mark.parametrize(
    "line", [b'{"x": ["\\ud800"], "y": 1}', b'{"x": ["a"], "\\udfff": 1}', b'{"x": ["\xed\xa0\x80"]}']
)
def test_half_a_surrogate_pair_is_no_text(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"x": ["\\ud83d\\ude42 \\u00e9"], "y": 1}\n\n' + line + b"\n")
    got = "half a surrogate pair" if b"\\u" in line else "the byte 0xed, which is not UTF-8"
    with pytest.raises(DataError, match=f"line 3 must be .*got {got}"):
        read(path)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"x": [1], "y": 1}\n\n{"x": [1, "y": 2}\n', 3, ["bad JSON", "character"]),
        ('{"x": [1], "y": 1}\n{"x": [1], "y"', 2, ["bad JSON"]),
        ('{"x": [1], "y": 1}\n[1, 2]\n', 2, ["a JSON list", "a JSON object"]),
        ('{"x": [1], "y": 1}\n"text"\n', 2, ["a JSON string"]),
        ('{"x": [1], "y": 1}\n{"x": [1, "a"], "y": 1}\n', 2, ["list of number and string", "'x'"]),
        ('{"x": [1], "y": 1}\n{"x": ["a"], "y": 1}\n', 2, ["list of string", "after a list of number", "'x'"]),
        ('{"x": [1], "y": 1}\n{"x": [[1]], "y": 1}\n', 2, ["list of list of number", "'x'"]),
        ('{"x": [1], "y": 1}\n{"x": [1], "y": "a"}\n', 2, ["a string as 'y', after a number"]),
        ('{"x": [1], "y": 1}\n{"x": [1, [2]], "y": 1}\n', 2, ["'x'"]),
        ('{"x": [1], "y": 99999999999999999999999}\n', 1, ["too large", "'y'"]),
    ],
)
def test_bad_json_lines(tmp_path: Path, text: str, line: int | None, words: list[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: " if line is None else f"{path}, line {line}: ")
    for word in words:
        assert word in message


def test_json_lines_with_absent_and_unused_keys(tmp_path: Path) -> None:
    path = tmp_path / "data.ndjson"
    path.write_text('{"x": [1, 2.5], "y": 1, "z": 1}\r\n{"y": 2, "x": [NaN], "z": ["mixed"]}\r\n')
    records = read(path, Columns(sequence="x", label="y"))
    np.testing.assert_array_equal(records.values, np.array([[1], [2.5], [np.nan]], np.float32))
    path.write_text('{"x": [1], "y": 1}\n{"x": [1]}\n')
    with pytest.raises(DataError, match=r"null in row 1 \(line 2\), column 'y'"):
        read(path)


def test_a_string_that_looks_like_a_date_stays_a_string(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", {"x": [["2020-01-01"], ["2020-01-02"]], "y": ["2020-01-01", "2021-01-01"]})
    assert read(path).labels == ("2020-01-01", "2021-01-01")
    assert read(path).values.tolist() == ["2020-01-01", "2020-01-02"]


def test_what_was_found_reads_another_file_in_the_same_way(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"id": [1], "text": ["a b"], "y": [3]})
    found = read(path).columns
    assert found == Columns(sequence="text", label="y", split="words")
    path = write(tmp_path, "jsonl", {"comment": ["x"], "y": ["p"], "text": ["a b"]})
    records = read(path, replace(found, need_labels=False))
    assert records.values.tolist() == ["a", "b"]
    assert records.columns == replace(found, need_labels=False)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table([pa.array([[1.0]]), pa.array([1]), pa.array([2])], names=["x", "y", "y"]), path)
    with pytest.raises(DataError, match="two columns 'y'"):
        read(path)
