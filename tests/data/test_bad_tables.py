"""Damaged Parquet and JSON lines, and columns of unsupported types."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raglane.data import Columns, read
from raglane.errors import DataError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def test_a_text_that_is_not_utf8_is_named_by_its_row(tmp_path: Path) -> None:
    """Parquet keeps whatever bytes it is given as a string."""
    bad = pa.array([b"a", b"caf\xe9", b"c"])
    texts, good = bad.view(pa.string()), ["u", "v", "w"]
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
    """Cut off, or with other bytes: where the pages have checksums, not one number is read wrongly."""
    path = tmp_path / "data.parquet"
    table = pa.table({"x": [[1.5, 2.5]] * 50, "y": ["a", "b"] * 25})
    parquet.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    whole, right = path.read_bytes(), read(path)
    for end in range(0, len(whole), 41):
        path.write_bytes(whole[:end])
        with pytest.raises(DataError):
            read(path)
    refused = 0
    for place in range(4, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            found = read(path)
        except DataError:
            refused += 1
            continue
        assert found.values.tolist() == right.values.tolist()
        assert found.labels == right.labels
    assert refused > 0


_UNSUPPORTED = [
    pa.array([[b"a"]], pa.list_(pa.binary())),
    pa.array([[0]], pa.list_(pa.timestamp("s"))),
    pa.array([[{"a": 1}]]),
    pa.array([[[[1]]]]),
    pa.array([{"a": 1}]),
    pa.array([b"a"]),
    pa.array([0], pa.timestamp("ns")),
    pa.array([None], pa.null()),
    pa.array([2.5]),
]


@pytest.mark.parametrize("column", _UNSUPPORTED, ids=[str(column.type) for column in _UNSUPPORTED])
def test_columns_of_types_that_are_no_sequence(tmp_path: Path, column: Any) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"x": column, "y": ["a"]}), path)
    with pytest.raises(DataError, match=r"lists of numbers.* in column 'x'|a null in row 0, column 'x'"):
        read(path, Columns(sequence="x", label="y"))
    with pytest.raises(DataError, match=r"strings, integers.* in column 'x'|a null in row 0, column 'x'"):
        read(path, Columns(sequence="y", label="x"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"x": [1], "y": ' + "9" * 5000 + "}", ["thousands of digits", "64 bits"]),
        ('{"x": [' + "9" * 5000 + '], "y": 1}', ["thousands of digits", "64 bits"]),
        ('{"x": [1, 9223372036854775808], "y": 1}', ["too large as 'x'", "write it as 1e30"]),
        ('{"x": [[-9223372036854775809]], "y": 1}', ["too large as 'x'"]),
        ('{"x": [1], "y": 1000000000000000000000}', ["too large as 'y'"]),
        ('{"x": [9007199254740993, 0.5], "y": 1}', ["beyond 2**53 among fractions as 'x'"]),
        ("[" * 100_000, ["more than 32 deep"]),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", ["more than 32 deep"]),
        ('{"x": ' + '{"x": ' * 500 + "1" + "}" * 501, ["more than 32 deep"]),
        ('{"x": ' + "[" * 40 + "1" + "]" * 40 + "}", ["more than 32 deep"]),
        ('{"x": ' + "[1, " * 900 + "1" + "]" * 900 + "}", ["list of"]),
        ('{"x": [1], "y": 1, "x": [2]}', ["the key 'x' twice"]),
        ('{"x": [NaN, nan], "y": 1}', ["bad JSON"]),
        ('{"x": [1], "y": NaN}', ["no candidate for the label column"]),
    ],
    ids=range(14),
)
def test_numbers_and_lists_that_no_column_holds(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError) as caught:
        read(path)
    assert words[0].startswith("no candidate") or "line 1: " in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_json_has_not_is_a_missing_value(tmp_path: Path) -> None:
    """NaN and Infinity, which many programs write, and numbers that are too large for a float."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": [NaN, Infinity, -Infinity, 1e999, -1e999, 1e300, 5], "y": 1}\n')
    values = read(path).values[:, 0]
    np.testing.assert_array_equal(values, np.array([np.nan, np.inf, -np.inf, np.inf, -np.inf, np.inf, 5], np.float32))
    with pytest.raises(DataError, match="the rule: finite numbers"):
        read(path).refuse_missing()


def test_keys_that_differ_from_line_to_line_take_no_room(tmp_path: Path) -> None:
    """A table of them would have as many cells as lines times keys."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"x": [1], "y": "a", f"k{line}": 1}) + "\n" for line in range(4000)))
    with pytest.raises(DataError, match="4,002 different keys in 4,000 lines"):
        read(path)
    path.write_text("".join(json.dumps({"x": [1], "y": "a", "more": {f"k{line}": 1}}) + "\n" for line in range(4000)))
    tracemalloc.start()
    assert len(read(path)) == 4000
    peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes()
    tracemalloc.stop()
    assert peak < 100e6
