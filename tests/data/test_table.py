"""The readers of Parquet and JSON lines, also of damaged files and of columns of other types."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raglane.data import Columns, Dataset, convert, read
from raglane.errors import DataError
from small_files import put, refused, same, write_table

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
    ("columns", "values", "lengths", "labels", "note"),
    [
        (
            {"load": [[1.5, 2.5], [], [3.5]], "country": ["a", "b", "a"], "id": [1.5, 2.5, 3.5]},
            [[1.5], [2.5], [3.5]],
            [2, 0, 1],
            ("a", "b", "a"),
            "not used, since ids are texts or whole numbers: the column 'id'",
        ),
        (
            {"words": [["a", "b"], [], ["2020-01-01"]], "good": [True, False, True]},
            ["a", "b", "2020-01-01"],
            [2, 0, 1],
            ("true", "false", "true"),
            "label column: 'good' (the only candidate)",
        ),
        (
            {"text": ["the cat", "", "  \t ", " a\u00a0b  c\n", "x"], "class": [1, 2, 1, 2, 1]},
            ["the", "cat", "a", "b", "c", "x"],
            [2, 0, 0, 3, 1],
            ("1", "2", "1", "2", "1"),
            "the texts of 'text' are split on white space into tokens",
        ),
    ],
)
def test_numbers_strings_and_texts(
    tmp_path: Path,
    kind: str,
    columns: Any,
    values: Any,
    lengths: list[int],
    labels: tuple[str, ...],
    note: str,
) -> None:
    records = read(write(tmp_path, kind, columns))
    assert (records.values.tolist(), records.lengths.tolist()) == (values, lengths)
    assert records.values.dtype == (np.float32 if "load" in columns else object)
    assert (records.labels, records.channels) == (labels, ("x0",) if "load" in columns else ())
    assert note in records.notes


@both
def test_lists_of_lists_of_numbers_are_steps_of_channels(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    matrices = [
        random.normal(size=(length, 4)).astype(np.float32) for length in random.integers(0, 6, 30)
    ]
    matrices.append(np.ones((2, 4), dtype=np.float32))
    labels = random.integers(0, 3, 31).tolist()
    records = read(
        write(tmp_path, kind, {"x": [matrix.tolist() for matrix in matrices], "y": labels})
    )
    np.testing.assert_array_equal(records.values, np.concatenate(matrices))
    assert records.lengths.tolist() == [len(matrix) for matrix in matrices]
    assert (records.labels, records.channels) == (tuple(map(str, labels)), ("x0", "x1", "x2", "x3"))


@both
def test_tags_are_one_an_element(tmp_path: Path, kind: str) -> None:
    columns = {"words": [["a", "b"], [], ["c"]], "tags": [["X", "Y"], [], ["X"]]}
    path = write(tmp_path, kind, columns)
    for asked in (Columns("tag", sequence="words"), Columns("tag", label="tags"), Columns("tag")):
        records: Any = read(path, asked)
        assert (records.tags.tolist(), records.values.tolist()) == (
            ["X", "Y", "X"],
            ["a", "b", "c"],
        )
        assert records.labels is None
    assert records.notes[0] == "sequence column: 'words' (by its name)"
    path = write(tmp_path, kind, {"x": [[0.5, 1.5], [2.5]], "t": [[1, 2], [3]]})
    tags: Any = read(path, Columns(task="tag", sequence="x")).tags
    assert tags.tolist() == ["1", "2", "3"]
    path = write(tmp_path, kind, {"one": columns["words"], "two": columns["tags"]})
    refused(
        ["2 candidates for the sequence column: 'one', 'two'", "Columns(sequence="],
        read,
        path,
        Columns("tag"),
    )
    path = write(
        tmp_path, kind, {"x": [[0.5, 1.5], [2.5]], "t": [[1, 2], [3, 4]], "id": ["p", "q"]}
    )
    words = ["2 labels for 1 elements in row 1 (id 'q'", "column 't'"]
    refused(words, read, path, Columns(task="tag", sequence="x", label="t"))


@both
def test_ids_by_name_or_as_named(tmp_path: Path, kind: str) -> None:
    columns = {"ID": [7, 8], "x": [[1.0], [2.0]], "key": ["p", "q"]}
    records = read(write(tmp_path, kind, columns))
    assert records.ids == (7, 8)
    assert "id column: 'ID' (by its name)" in records.notes
    records = read(write(tmp_path, kind, columns), Columns(id="key"))
    assert (records.ids, records.labels) == (("p", "q"), ("7", "8"))


@both
def test_a_sequence_column_may_have_the_name_of_an_id(tmp_path: Path, kind: str) -> None:
    records = read(write(tmp_path, kind, {"Sequence_ID": [[1.0], [2.0]], "series": ["a", "b"]}))
    assert (records.ids, records.labels) == ((0, 1), ("a", "b"))
    assert read(write(tmp_path, kind, {"sequence": ["A C", "G"], "y": [1, 2]})).values.tolist() == [
        "A",
        "C",
        "G",
    ]


@both
def test_sequences_may_all_be_empty(tmp_path: Path, kind: str) -> None:
    records = read(write(tmp_path, kind, {"x": [[], []], "y": [1, 2]}))
    assert (records.lengths.tolist(), records.values.shape) == ([0, 0], (0, 1))


def test_parquet_without_channels_and_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    empty = pa.array([[], []], pa.list_(pa.list_(pa.float32())))
    parquet.write_table(table := pa.table({"x": empty, "y": ["a", "b"]}), path)
    records = read(path)
    assert (records.lengths.tolist(), records.values.shape, records.channels) == (
        [0, 0],
        (0, 0),
        (),
    )
    parquet.write_table(table[:0], path)
    refused(["no rows"], read, path)


@both
@pytest.mark.parametrize("need", [Columns(need_labels=False), Columns(task="forecast")])
def test_labels_are_not_needed_to_predict_or_forecast(
    tmp_path: Path, kind: str, need: Columns
) -> None:
    assert read(write(tmp_path, kind, {"x": [[1.0], [2.0]]}), need).labels is None
    path = write(tmp_path, kind, {"text": ["a", "b"], "y": ["c", None]})
    assert read(
        path, Columns(task=need.task, need_labels=need.need_labels, label="y")
    ).values.tolist() == ["a", "b"]


@both
@pytest.mark.parametrize(
    ("columns", "asked", "words"),
    [
        ({"x": [[1.0], None], "y": [1, 2]}, Columns(), ["a null in row 1", "'x'", "sequence"]),
        (
            {"x": [[1.0], [2.0, None]], "y": [1, 2]},
            Columns(),
            ["a null in row 1", "step 1", "'x'", "missing='zero'"],
        ),
        (
            {"x": [[[1.0, 2.0]], [[3.0, None]]], "y": [1, 2]},
            Columns(),
            ["a null in row 1", "step 0", "channel 1"],
        ),
        ({"x": [[[1.0]], [[1.0], None]], "y": [1, 2]}, Columns(), ["a null in row 1", "step 1"]),
        (
            {"id": ["p", "q"], "x": [[[1.0, 2.0]], [[3.0]]], "y": [1, 2]},
            Columns(),
            ["1 channel in row 1 (id 'q'"],
        ),
        (
            {"x": [["a"], ["b"]], "y": [["N"], [None]]},
            Columns(task="tag", sequence="x"),
            ["null in row 1", "step 0"],
        ),
        (
            {"x": [["a"]], "y": [[""]]},
            Columns(task="tag", sequence="x"),
            ["an empty label in row 0", "step 0"],
        ),
        (
            {"x": [[], []], "y": [1, 2]},
            Columns(sequence="z"),
            ["no column 'z'", "'x', 'y'", "Columns(sequence=...)"],
        ),
        (
            {"x": [[1.0]], "a": [1], "b": ["c"]},
            Columns(),
            ["2 candidates", "label", "'a', 'b'", "Columns(label=...)"],
        ),
        (
            {"x": [[1.0]], "a": [1.5]},
            Columns(),
            ["no candidate", "label", "'x', 'a'", "Columns(label=...)"],
        ),
        (
            {"x": [[1.0]], "z": [[1.0]], "y": [1]},
            Columns(),
            ["2 candidates", "'x', 'z'", "Columns(sequence=...)"],
        ),
        ({"a": [1], "b": [2.5]}, Columns(), ["no id column among 'a', 'b'"]),
        ({"kind": ["a"], "t": [1]}, Columns(), ["no candidate for the label column"]),
        # A text that is called a label is no sequence.
        (
            {"id": [1, 2], "x": [0.5, 1.5], "label": ["a", "b"]},
            Columns(),
            ["sequence column", "(id=...) and", "(feat"],
        ),
        ({"x": [1.5], "y": [1]}, Columns(sequence="x"), ["double", "'x'", "lists of numbers"]),
        (
            {"x": [[1.0]], "y": [1.5]},
            Columns(label="y"),
            ["double", "'y'", "strings, integers or booleans"],
        ),
        (
            {"x": [["a"]], "y": ["N"]},
            Columns(task="tag", sequence="x", label="y"),
            ["string", "'y'", "list"],
        ),
        ({"x": [[[], []]], "y": ["a"]}, Columns(), ["no channel in row 0", "step 0, column 'x'"]),
        (
            {"x": [[1.0]], "t": [[2]], "y": [1]},
            Columns(sequence="x", time="t"),
            ["time column 't'"],
        ),
    ],
)
def test_bad_columns(
    tmp_path: Path, kind: str, columns: dict[str, Any], asked: Columns, words: list[str]
) -> None:
    path = write(tmp_path, kind, columns)
    message = refused(words, read, path, asked)
    assert message.startswith(str(path))
    if kind == "jsonl" and "row 1" in message:
        assert "line 3" in message


_STEPS: dict[str, Any] = {
    "id": ["a", "b", "a", "c"],
    "time": [
        "2024-01-02T00:00:00",
        "2024-01-01T00:00:00",
        "2024-01-01T00:00:00",
        "2024-01-03T00:00:00",
    ],
    "x": [1.5, None, 2.5, 3.0],
    "town": ["Rome", "Bonn", "Oslo", "Rome"],
    "kind": ["u", "v", "u", "v"],
}


@pytest.mark.parametrize("kind", ["parquet", "feather", "jsonl"])
def test_a_row_may_be_an_element(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"data.{kind}"
    columns = {
        **_STEPS,
        "more": [{"a": 1}] * 4,
        "Unnamed: 0": [0, 1, 2, 3],
    }  # objects are no entries
    if kind == "jsonl":
        write(tmp_path, kind, columns)
    else:
        write_table(path, pa.table(columns))
    records = read(path)
    assert (records.ids, records.labels, records.lengths.tolist()) == (
        ("a", "b", "c"),
        ("u", "v", "v"),
        [2, 1, 1],
    )
    np.testing.assert_array_equal(records.values, [[2.5], [1.5], [np.nan], [3.0]])
    assert records.features[0].values.tolist() == ["Oslo", "Rome", "Bonn", "Rome"]
    same(records, read(pa.table(_STEPS)))
    assert records.notes[0] == "left out, nested or unnamed: more, Unnamed: 0"
    if kind == "jsonl":
        refused(["a row per element"], convert, path, tmp_path / "out")
        return
    folder = read(convert(path, tmp_path / "out", Columns(time="time")).folder)
    same(records, folder)
    assert not any(
        "not used" in note for note in folder.notes
    )  # the time column is that of the source
    refused(["a row per element", "rl.data.read"], Dataset, path)


def test_uuids_and_bytes_are_other_columns(tmp_path: Path) -> None:
    ids = pa.ExtensionArray.from_storage(
        pa.uuid(), pa.array([bytes([row] * 16) for row in (1, 2, 1)], pa.binary(16))
    )
    steps = pa.table({"id": ids, "x": [1.5, 2.5, 3.5], "kind": list("uvu")})
    assert read(write_table(tmp_path / "a.arrow", steps)).lengths.tolist() == [2, 1]
    texts = steps[:2].set_column(1, "text", [["a", "b c"]])
    assert read(write_table(tmp_path / "b.parquet", texts)).labels == ("u", "v")
    words = pa.table(
        {"a": ["b c", "d"], "e": ["f", "g"], "kind": ["u", "v"], "image": [b"0", b"1"]}
    )
    refused(
        ["3 candidates for the sequence column"], read, write_table(tmp_path / "c.parquet", words)
    )


@both
def test_a_table_without_lists_may_have_other_rows(tmp_path: Path, kind: str) -> None:
    numbers = {"id": [1, 1, 2], "x": [1.5, 2.5, 3.5]}

    def read_as(columns: dict[str, Any], **asked: Any) -> Dataset:
        return read(write(tmp_path, kind, columns), Columns(need_labels=False, **asked))

    assert read_as(numbers).lengths.tolist() == [2, 1]
    assert read_as({f"t{step}": [1.0, step] for step in range(4)}, wide=True).lengths.tolist() == [
        4,
        4,
    ]
    assert read_as({"id": [1, 2], "text": ["a b", "c"]}).lengths.tolist() == [2, 1]
    assert read_as({"id": [1, 1], "text": ["a", "b"]}, sequence="text").lengths.tolist() == [1, 1]
    reviews = {"user_id": [1, 1, 2], "text": ["so good", "not so bad", "so"], "stars": [5, 3, 5]}
    assert read_as(reviews).lengths.tolist() == [2, 3, 1]
    assert read_as({**reviews, "text": ["a", "b c", "d"]}, features=("text",)).lengths.tolist() == [
        2,
        1,
    ]
    assert read_as(
        {"case_id": [1, 1, 2], "step": ["pay in", "go on", "end it"]}
    ).lengths.tolist() == [2, 1]
    refused(["no candidate for the sequence column", "'x'"], read_as, {"x": [{"a": 1}]})
    # Texts called "sequence" are no ids, a step of whole numbers is no label, and times are no
    # texts of a forecast.
    genes = read(
        write(
            tmp_path,
            kind,
            {"sequence": ["A C", "A C", "T"], "q": [1.5, 2.5, 3.5], "label": list("uuv")},
        )
    )
    assert (genes.labels, genes.lengths.tolist()) == (("u", "u", "v"), [2, 2, 1])
    # A text that is called a label is a sequence, such as that of a drug's target, if the label is
    # another column.
    named = read(
        write(tmp_path, kind, {"target": ["A C", "T"], "y": ["u", "v"]}), Columns(label="y")
    )
    assert (named.labels, named.lengths.tolist()) == (("u", "v"), [2, 1])
    steps = read(
        write(
            tmp_path, kind, {"t0": [1, 2], "t1": [1.5, 2.5], "t2": [None, 3.5], "kind": ["u", "v"]}
        )
    )
    assert (steps.labels, steps.lengths.tolist()) == (("u", "v"), [2, 3])
    for name, time in (("time", None), ("hour", "hour")):
        days = {name: ["2024-01-02", "2024-01-01", "2024-01-03"], "x": [2.0, 1.0, 3.0]}
        assert read_as(days, task="forecast", time=time).values.tolist() == [[1], [2], [3]]
    # New data of a model may have one row per id.
    once = {"id": [1, 2], "x": [1.5, 2.5], "kind": ["u", "v"]}
    assert read_as(once, features=("x",)).values.tolist() == [[1.5], [2.5]]


def test_rows_that_are_no_elements(tmp_path: Path) -> None:
    empty = pa.table({"id": pa.array([], pa.int64()), "x": pa.array([], pa.float64())})
    refused(
        ["no rows"], read, write_table(tmp_path / "data.arrow", empty), Columns(need_labels=False)
    )
    images = pa.table({"id": [1, 1], "x": pa.array([b"a", b"b"], pa.binary_view())})
    refused(["bytes in the column 'x'"], read, images, Columns(need_labels=False))


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pa.list_(kind)
            for kind in (pa.float32(), pa.float16(), pa.uint64(), pa.decimal128(5, 1))
        ),
        *(pa.large_list(pa.int32()), pa.list_(pa.float32(), 2)),
    ],
    ids=str,
)
def test_parquet_list_types(tmp_path: Path, kind: Any) -> None:
    rows = [[1, 2], [3, 4], [5, 6]]
    table = pa.table({"x": pa.array(rows, kind), "y": ["a", "b", "c"]})
    records = read(write_table(tmp_path / "data.parquet", table))
    assert (records.values.ravel().tolist(), records.lengths.tolist()) == (
        [1, 2, 3, 4, 5, 6],
        [2, 2, 2],
    )


def test_parquet_dictionaries_large_strings_and_fixed_channels(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    labels = pa.array(["a", "b"]).dictionary_encode()
    inner = pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.float32(), 2)))
    records = read(write_table(path, pa.table({"x": inner, "y": labels})))
    assert (records.labels, records.values.tolist()) == (("a", "b"), [[1, 2], [3, 4], [5, 6]])
    large = pa.array(["p q", "r"], pa.large_string())
    words = pa.array([["p", "q"], ["p"]], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    for texts, tokens in ((large, ["p", "q", "r"]), (words, ["p", "q", "p"])):
        assert (
            read(write_table(path, pa.table({"x": texts, "y": [1, 2]}))).values.tolist() == tokens
        )


def test_parquet_reads_only_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    whole = parquet.ParquetFile.read

    def spy(file: Any, columns: Any) -> Any:
        asked.append(columns)
        return whole(file, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "read", spy)
    path = write(
        tmp_path, "parquet", {"x": [[1.0]], "y": ["a"], "other": [1.5], "__index_level_0__": [3]}
    )
    assert read(path).labels == ("a",)
    assert asked == [["x", "y"]]


@pytest.mark.parametrize(
    "line",
    [b'{"x": ["\\ud800"], "y": 1}', b'{"x": ["a"], "\\udfff": 1}', b'{"x": ["\xed\xa0\x80"]}'],
)
def test_half_a_surrogate_pair_is_no_text(tmp_path: Path, line: bytes) -> None:
    path = put(
        tmp_path / "data.jsonl", b'{"x": ["\\ud83d\\ude42 \\u00e9"], "y": 1}\n\n' + line + b"\n"
    )
    got = "half a surrogate pair" if b"\\u" in line else "the byte 0xed, which is not UTF-8"
    with pytest.raises(DataError, match=f"line 3 must be .*got {got}"):
        read(path)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"x": [1], "y": 1}\n\n{"x": [1, "y": 2}\n', 3, ["bad JSON", "character"]),
        ('{"x": [1], "y": 1}\n{"x": [1], "y"', 2, ["bad JSON"]),
        ('{"x": [1], "y": 1}\n[1, 2]\n', 2, ["a JSON list", "one JSON object per line"]),
        ('{"x": [1], "y": 1}\n{"x": [1, "a"], "y": 1}\n', 2, ["list of number and string", "'x'"]),
        (
            '{"x": [1], "y": 1}\n{"x": ["a"], "y": 1}\n',
            2,
            ["list of string", "after a list of number", "'x'"],
        ),
        ('{"x": [1], "y": 1}\n{"x": [1], "y": "a"}\n', 2, ["a string as 'y', after a number"]),
        ('{"x": [1], "y": ' + "9" * 5000 + "}", 1, ["thousands of digits", "64 bits"]),
        ('{"x": [' + "9" * 5000 + '], "y": 1}', 1, ["thousands of digits", "64 bits"]),
        ('{"x": [1, 9223372036854775808], "y": 1}', 1, ["too large as 'x'", "Write it as 1e30"]),
        ('{"x": [9007199254740993, 0.5], "y": 1}', 1, ["beyond 2**53 among fractions as 'x'"]),
        ("[" * 100_000, 1, ["more than 32 deep"]),
        ('{"x": ' + "[" * 40 + "1" + "]" * 40 + "}", 1, ["more than 32 deep"]),
        ('{"x": [1], "y": 1, "x": [2]}', 1, ["the key 'x' twice"]),
        ('{"x": [NaN, nan], "y": 1}', 1, ["bad JSON"]),
        ('{"x": [1], "y": NaN}', None, ["no candidate for the label column"]),
    ],
    ids=range(15),
)
def test_bad_json_lines(tmp_path: Path, text: str, line: int | None, words: list[str]) -> None:
    path = put(tmp_path / "data.jsonl", text)
    assert refused(words, read, path).startswith(
        f"{path}{'' if line is None else f', line {line}'} must be "
    )


def test_json_lines_with_absent_and_unused_keys(tmp_path: Path) -> None:
    path = put(
        tmp_path / "data.ndjson",
        '{"x": [1, 2.5], "y": 1, "z": 1}\r\n{"y": 2, "x": [NaN], "z": ["mixed"]}\r\n',
    )
    records = read(path, Columns(sequence="x", label="y"))
    np.testing.assert_array_equal(records.values, np.array([[1], [2.5], [np.nan]], np.float32))
    path.write_text('{"x": [1], "y": 1}\n{"x": [1]}\n')
    refused(["null in row 1 (line 2), column 'y'"], read, path)


def test_chosen_columns_read_another_file_in_the_same_way(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"id": [1], "text": ["a b"], "y": [3]})
    found = read(path).columns
    assert found == Columns(sequence="text", label="y", split="words")
    path = write(tmp_path, "jsonl", {"comment": ["x"], "y": ["p"], "text": ["a b"]})
    records = read(path, replace(found, need_labels=False))
    assert records.values.tolist() == ["a", "b"]
    assert records.columns == replace(found, need_labels=False)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(
        pa.table([pa.array([[1.0]]), pa.array([1]), pa.array([2])], names=["x", "y", "y"]), path
    )
    refused(["two columns 'y'"], read, path)


def test_a_text_that_is_not_utf8_is_named_by_its_row(tmp_path: Path) -> None:
    """Parquet keeps whatever bytes it is given as a string."""
    texts, good = pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string()), ["u", "v", "w"]
    lists = pa.ListArray.from_arrays([0, 1, 1, 3], texts)
    tags = Columns(task="tag", sequence="x", label="y")
    for table, columns, place in (
        ({"x": [[1], [2], [3]], "y": texts}, Columns(), "row 1, column 'y'"),
        ({"x": [[1], [2], [3]], "y": texts.dictionary_encode()}, Columns(), "row 1, column 'y'"),
        ({"x": texts, "y": good}, Columns(sequence="x", label="y"), "row 1, column 'x'"),
        ({"x": lists, "y": good}, Columns(), "row 2, step 0, column 'x'"),
        ({"x": [[1], [2], [3]], "id": texts, "y": good}, Columns(label="y"), "row 1, column 'id'"),
        ({"x": [[1], [], [2, 3]], "y": lists}, tags, "row 2, step 0, column 'y'"),
    ):
        parquet.write_table(pa.table(table), path := tmp_path / "data.parquet")
        with pytest.raises(DataError, match=rf"a text in UTF-8, got b'caf.*xe9' in {place}"):
            read(path, columns)


def test_parquet_that_is_damaged(tmp_path: Path) -> None:
    """Cut off, or with other bytes: where the pages have checksums, not one number is read
    wrongly.
    """
    path = tmp_path / "data.parquet"
    table = pa.table({"x": [[1.5, 2.5]] * 50, "y": ["a", "b"] * 25})
    parquet.write_table(
        table, path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    whole, right = path.read_bytes(), read(path)
    for end in range(0, len(whole), 41):
        path.write_bytes(whole[:end])
        with pytest.raises(DataError):
            read(path)
    refused = 0
    for is_read, place in itertools.product(
        (True, False), [*range(4, 1000, 7), *range(1000, len(whole))]
    ):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            found = (read(path) if is_read else Dataset(path)).records
        except DataError:
            refused += 1
            continue
        assert found.values.tolist() == right.values.tolist()
        assert found.labels == right.labels
    assert refused > 0


_UNSUPPORTED = [
    pa.array([[b"a"]], pa.list_(pa.binary())),
    pa.array([[{"a": 1}]]),
    pa.array([[[[1]]]]),
    pa.array([0], pa.timestamp("ns")),
    pa.array([2.5]),
]


@pytest.mark.parametrize("column", _UNSUPPORTED, ids=[str(column.type) for column in _UNSUPPORTED])
def test_columns_of_types_that_are_no_sequence(tmp_path: Path, column: Any) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"x": column, "y": ["a"]}), path)
    with pytest.raises(
        DataError, match=r"lists of numbers.* in column 'x'|a null in row 0, column 'x'"
    ):
        read(path, Columns(sequence="x", label="y"))
    with pytest.raises(
        DataError, match=r"strings, integers.* in column 'x'|a null in row 0, column 'x'"
    ):
        read(path, Columns(sequence="y", label="x"))


def test_keys_that_json_lacks_are_missing_values(tmp_path: Path) -> None:
    """NaN and Infinity, which many programs write, and numbers that are too large for a float."""
    path = put(
        tmp_path / "data.jsonl",
        '{"x": [NaN, Infinity, -Infinity, 1e999, -1e999, 1e300, 5], "y": 1}\n',
    )
    values = read(path).values[:, 0]
    np.testing.assert_array_equal(
        values, np.array([np.nan, np.inf, -np.inf, np.inf, -np.inf, np.inf, 5], np.float32)
    )
    refused(["must be data with finite numbers"], read(path).refuse_missing)


def test_keys_that_differ_from_line_to_line_take_no_room(tmp_path: Path) -> None:
    """A table of them would have as many cells as lines times keys."""
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"x": [1], "y": "a", f"k{line}": 1}) + "\n" for line in range(4000))
    )
    refused(["4,002 different keys in 4,000 lines"], read, path)
    path.write_text(
        "".join(
            json.dumps({"x": [1], "y": "a", "more": {f"k{line}": 1}}) + "\n" for line in range(4000)
        )
    )
    tracemalloc.start()
    assert len(read(path)) == 4000
    peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes()
    tracemalloc.stop()
    assert peak < 100e6
