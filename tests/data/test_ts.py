"""The reader of .ts files."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import pytest

from raglane.data import Columns, japanese_vowels, read
from raglane.errors import DataError, MissingExtraError

HEADER = """# a comment
%another
@problemName Toy
@timeStamps false
@missing false
@univariate false
@dimensions 2
@equalLength false
@classLabel true a b
@data
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "toy.ts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_reads_what_the_header_says(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,2,3:4,5,6:a\n\n# between\n-1.5e2:0.25:b\n?,7:NaN,8:a\n")
    records = read(path)
    assert records.lengths.tolist() == [3, 1, 2]
    assert records.labels == ("a", "b", "a")
    assert records.channels == ("x0", "x1")
    assert records.source == path
    assert records.ids == (0, 1, 2)
    expected = [[1, 4], [2, 5], [3, 6], [-150, 0.25], [np.nan, np.nan], [7, 8]]
    np.testing.assert_array_equal(records.values, np.array(expected, dtype=np.float32))


def test_round_trip_of_random_sequences(tmp_path: Path) -> None:
    random = np.random.default_rng()
    lengths = random.integers(1, 30, 50)
    matrices = [random.normal(size=(length, 3)).astype(np.float32) for length in lengths]
    labels = random.choice(["1", "2", "10"], 50)
    lines = [
        ":".join(",".join(map(repr, channel.tolist())) for channel in matrix.T) + f":{label}"
        for matrix, label in zip(matrices, labels, strict=True)
    ]
    records = read(write(tmp_path, "@dimensions 3\n@classLabel true 1 2 10\n@data\n" + "\n".join(lines)))
    np.testing.assert_array_equal(records.values, np.concatenate(matrices))
    assert records.lengths.tolist() == lengths.tolist()
    assert records.labels == tuple(labels)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_newlines_a_byte_order_mark_and_other_letter_cases(tmp_path: Path, newline: str) -> None:
    text = "\ufeff@UNIVARIATE true\n@classlabel TRUE Walking Running\n@DATA\n1,2:walking\n3:Running\n"
    records = read(write(tmp_path, text.replace("\n", newline)))
    assert records.labels == ("Walking", "Running")
    assert records.values.tolist() == [[1], [2], [3]]


def test_channels_are_counted_where_the_header_does_not_say(tmp_path: Path) -> None:
    records = read(write(tmp_path, "@univariate false\n@strange 3\n@classLabel true a\n@data\n1:2:3:a\n"))
    assert records.channels == ("x0", "x1", "x2")
    assert any("@dimensions" in note for note in records.notes)
    assert any("@strange" in note for note in records.notes)


def test_a_comment_in_another_encoding_does_no_harm(tmp_path: Path) -> None:
    text = b"# Universit\xe4t\n@univariate true\n@classLabel true a\n@data\n1,2:a\n"
    assert read(write(tmp_path, text)).values.tolist() == [[1], [2]]


def test_an_empty_sequence(tmp_path: Path) -> None:
    records = read(write(tmp_path, HEADER + "::a\n1:2:b\n"))
    assert records.lengths.tolist() == [0, 1]


def test_other_tasks_and_prediction_need_no_label(tmp_path: Path) -> None:
    text = "@univariate true\n@classLabel false\n@data\n1,2\n3\n"
    path = write(tmp_path, text)
    for columns in (Columns(task="forecast"), Columns(need_labels=False)):
        records = read(path, columns)
        assert records.labels is None
        assert records.element_counts.tolist() == [2, 1]
    with pytest.raises(DataError, match="@classLabel true"):
        read(path)
    path = write(tmp_path, HEADER + "1:2:?\n")
    assert read(path, Columns(need_labels=False)).labels is None


def test_a_target_is_no_label(tmp_path: Path) -> None:
    path = write(tmp_path, "@univariate true\n@targetLabel true\n@data\n1,2:0.5\n3:0.75\n")
    with pytest.raises(DataError, match="@targetLabel"):
        read(path)
    records = read(path, Columns(task="forecast"))
    assert records.values.tolist() == [[1], [2], [3]]
    assert any("@targetLabel" in note for note in records.notes)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (HEADER + "1:2:a\n1,2:3,4,5:b\n", 12, ["channels of 2, 3 values", "equally long"]),
        (HEADER + "1:2:3:a\n", 11, ["4 fields", "2 channels and a label"]),
        (HEADER + "1,2:3,4:a\n1,2:3\n", 12, ["2 fields", "2 channels and a label", "restore the line"]),
        (HEADER + "1:2:c\n", 11, ["label 'c'", "'a', 'b'"]),
        (HEADER + "1,x:2,3:a\n", 11, ["'x'", "channel 0, step 1", "?"]),
        (HEADER + "1,2:2,--3:a\n", 11, ["'--3'", "channel 1, step 1"]),
        (HEADER + "1,2\udcff:3,4:a\n", 11, ["'2\\udcff'"]),
        ("@timeStamps true\n@data\n", 1, ["@timeStamps true", "not supported"]),
        ("@dimensions many\n@data\n", 1, ["'many'", "whole number"]),
        ("@dimensions 0\n@data\n", 1, ["'0'", "above 0"]),
        ("@classLabel true\n@data\n", 1, ["no class"]),
        ("@\n@data\n", 1, ["'@'", "a directive after '@'"]),
        ("@classLabel true a\n@data 1,2:a\n3:a\n", 2, ["'@data 1,2:a'", "nothing after @data"]),
        ("@dimensions ٣\n@data\n", 1, ["'٣'", "whole number"]),
        ("@dimensions 1 2\n@data\n", 1, ["@dimensions '1 2'", "one word"]),
        (f"@dimensions {'9' * 5000}\n@data\n", 1, ["'999", "at most 9 digits"]),
        (f"@seriesLength {'9' * 5000}\n@data\n", 1, ["@serieslength '999", "at most 9 digits"]),
        (f"@univariate {'t' * 5000}\n@data\n", 1, ["@univariate 'ttt", "true or false"]),
        ("@univariate true\n@dimensions 2\n@data\n", 2, ["2 channels, after 1", "make them agree"]),
        ("@dimensions 2\n@dimension 3\n@data\n", 2, ["@dimensions '3', after '2' in line 1"]),
        ("@classLabel true a\n@classLabel true b\n@data\n", 2, ["@classlabel 'true b', after 'true a' in line 1"]),
        ("@classLabel true a\n@targetLabel true\n@data\n", 2, ["@targetLabel true", "not both"]),
        (
            "@equalLength true\n@classLabel true a\n@data\n1,2:a\n1,2,3:a\n",
            5,
            ["3 steps", "2 steps, because of @equalLength true and earlier"],
        ),
        (HEADER + "1,1_5:2,3:a\n", 11, ["'1_5' as channel 0, step 1"]),
        (HEADER + "1,٣:2,3:a\n", 11, ["'٣' as channel 0, step 1"]),
        (HEADER + "1,?:2,x?:a\n", 11, ["'x?' as channel 1, step 1"]),
        (HEADER + f"1,{'9' * 5000}x:2,3:a\n", 11, ["'999", "as channel 0, step 1"]),
        (HEADER + f"1,2:2,3:{'c' * 5000}\n", 11, ["the label 'ccc", "'a', 'b'"]),
        ("1,2,3\n@data\n", 1, ["'1,2,3' before @data"]),
        ("@equalLength true\n@seriesLength 2\n@classLabel true a\n@data\n1,2:a\n1,2,3:a\n", 6, ["3 steps", "2"]),
        (HEADER, None, ["no line after @data"]),
        ("@dimensions 2\n", None, ["no line @data"]),
        ("", None, ["an empty file"]),
        ("\n \n", None, ["an empty file"]),
        ("# nothing but a comment\n", None, ["no line @data"]),
        ("\udcff\udc80\udc89PNG\n\udcff", 1, ["before @data", ".ts file"]),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_bad_files(tmp_path: Path, text: str, line: int | None, words: list[str]) -> None:
    path = write(tmp_path, text.encode(errors="surrogateescape"))
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: " if line is None else f"{path}, line {line}: ")
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 1000
    assert " must be " in message
    for word in words:
        assert word in message


def test_a_truncated_file_is_found_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = HEADER + "11,12:13,14:a\n15,16:17,18:b\n"
    start = len(HEADER) + len("11,12:13,14:a\n") + 1
    for end in range(start, len(whole) - 1):
        with pytest.raises(DataError, match="line 12"):
            read(write(tmp_path, whole[:end]))


def test_a_class_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "data.ts"
    path.write_bytes(b"@classLabel true caf\xe9 b\n@data\n1,2:caf\xe9\n")
    with pytest.raises(DataError, match=r"line 1 must be a text in UTF-8.*, got the class 'caf.udce9'"):
        read(path)


def test_tagging_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tag"):
        read(write(tmp_path, HEADER + "1:2:a\n"), Columns(task="tag"))


def test_a_number_too_large_for_float32_counts_as_missing(tmp_path: Path) -> None:
    assert np.isinf(read(write(tmp_path, HEADER + "1e300:2:a\n")).values[0, 0])


def test_japanese_vowels() -> None:
    if importlib.util.find_spec("sktime") is None:
        pytest.skip("the demo extra is not installed")
    start = time.perf_counter()
    train, test = japanese_vowels()
    assert time.perf_counter() - start < 2
    assert (len(train), len(test)) == (270, 370)
    assert train.values.shape[1] == test.values.shape[1] == 12
    lengths = train.lengths.tolist() + test.lengths.tolist()
    assert (min(lengths), max(lengths)) == (7, 29)
    assert set(train.labels or ()) == set("123456789")
    assert train.values[0, 0] == np.float32(1.860936)


def test_japanese_vowels_without_sktime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="demo"):
        japanese_vowels()


@pytest.mark.slow
def test_agrees_with_sktime() -> None:
    datasets = pytest.importorskip("sktime.datasets")
    folder = Path(os.path.dirname(datasets.__file__), "data")
    for name in ("BasicMotions", "JapaneseVowels", "PLAID", "UnitTest"):
        path = folder / name / f"{name}_TEST.ts"
        ours = read(path)
        frame, labels = datasets.load_from_tsfile(str(path), return_data_type="nested_univ")
        flat = [np.stack([np.asarray(cell, np.float32) for cell in row], 1) for row in frame.to_numpy()]
        np.testing.assert_array_equal(ours.values, np.concatenate(flat))
        assert [label.lower() for label in ours.labels or ()] == [label.lower() for label in labels]
