"""Rules of all formats, the reader of .ts files, folders of texts, and texts cut into bytes, characters and words."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raglane.data import FORMATS, Columns, convert, japanese_vowels, read
from raglane.data.splitting import SPLITS, characters_in, join_tokens, split_texts
from raglane.errors import ArgumentError, DataError, MissingExtraError
from small_files import refused

files = pytest.mark.parametrize("name", [name for name, known in FORMATS.items() if known.suffixes])


@files
@pytest.mark.parametrize("content", [b"", b"\n", bytes(range(255, -1, -1)) * 3])
def test_an_empty_file_and_other_bytes(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / f"data{FORMATS[name].suffixes[0]}"
    path.write_bytes(content)
    assert refused((), read, path).startswith(str(path))


@files
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "absent" / f"data{FORMATS[name].suffixes[0]}"
    with pytest.raises(DataError, match=r"no such file or folder\. Check the path"):
        read(path)


@files
def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="a folder"):
        read(tmp_path, format=name)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="a file"):
        read(tmp_path / "a.txt", format="folder")


@files
def test_permission_denied(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"data{FORMATS[name].suffixes[0]}"
    path.write_bytes(b"x")

    def denied(*args: object, **keywords: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(DataError, match=r"permission denied.*chmod"):
        read(path)


@pytest.mark.parametrize(("name", "got"), [("data.xlsx", "'.xlsx'"), ("data", "no suffix"), ("data.doc", "'.doc'")])
def test_an_unknown_suffix_lists_the_known(tmp_path: Path, name: str, got: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    known = r"\.ts, \.parquet, \.pq, \.arrow, .*\.jsonl, \.ndjson, \.csv, \.txt, or a folder"
    with pytest.raises(DataError, match=rf"{known}.*, got .*{got}"):
        read(tmp_path / name)


def test_suffixes_in_capitals_and_a_format_by_name(tmp_path: Path) -> None:
    text = "@univariate true\n@classLabel true a\n@data\n1,2:a\n"
    (tmp_path / "data.TS").write_text(text)
    (tmp_path / "data.txt").write_text(text)
    assert read(str(tmp_path / "data.TS")).lengths.tolist() == [2]
    assert read(tmp_path / "data.txt", format="ts").lengths.tolist() == [2]
    with pytest.raises(ArgumentError, match=r"one of ts, parquet.*, got 'excel'"):
        read(tmp_path / "data.txt", format="excel")


@pytest.mark.parametrize(("name", "module"), [("parquet", "pyarrow"), ("jsonl", "pyarrow"), ("csv", "pandas")])
def test_a_missing_extra_is_named(tmp_path: Path, name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"data{FORMATS[name].suffixes[0]}"
    path.write_text('{"x": 1}')
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module} is not installed.*raglane\[data\]"):
        read(path)


def test_a_class_a_file_a_sequence_a_line(tmp_path: Path) -> None:
    (tmp_path / "Polish.txt").write_text("Łęcki\n\nŻak\r\n", encoding="utf-8")
    (tmp_path / "Arabic.txt").write_bytes("\ufeffNasr \n  \n\U0001f642é".encode())
    records = read(tmp_path)
    assert records.is_tokens
    assert records.labels == ("Arabic", "Arabic", "Polish", "Polish")
    lines = ["".join(records.values[start:end]) for start, end in pairwise(records.offsets)]
    assert lines == ["Nasr", "\U0001f642é", "Łęcki", "Żak"]
    assert all(type(token) is str and len(token) == 1 for token in records.values)
    assert records.source == tmp_path


def test_what_is_no_class_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "LOC.txt").write_text("where\n")
    for name in ("SOURCE.txt", "README.txt", "LICENSE.txt", "table.csv", ".hidden.txt"):
        (tmp_path / name).write_text("nothing\n")
    (tmp_path / "folder.txt").mkdir()
    records = read(tmp_path)
    assert set(records.labels or ()) == {"LOC"}
    note = next(note for note in records.notes if note.startswith("left out: "))
    for name in ("SOURCE.txt", "README.txt", "LICENSE.txt", "table.csv", "folder.txt", ".hidden.txt"):
        assert name in note


def test_labels_are_not_needed_to_predict_or_forecast(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("b\n")
    assert read(tmp_path, Columns(need_labels=False)).labels is None
    assert read(tmp_path, Columns(task="forecast")).labels is None
    with pytest.raises(DataError, match="tag"):
        read(tmp_path, Columns(task="tag"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["an empty folder", ".txt"]),
        ({"a.csv": b"x"}, ["1 entries, none of them a text"]),
        ({"SOURCE.txt": b"x"}, ["none of them a text"]),
        ({"a.txt": b"good\n\nb\xffd\n", "b.txt": b"x"}, ["a.txt, line 3", "0xff", "UTF-8"]),
        ({"a.txt": b"good\nb\0d\n"}, ["a.txt, line 2", "zero byte"]),
        ({"a.txt": b"good\n", "b.txt": b""}, ["b.txt", "an empty file"]),
    ],
)
def test_bad_folders(tmp_path: Path, files: dict[str, bytes], words: list[str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    refused(words, read, tmp_path)


# Characters of one to four bytes, one made of two, and none.
_TEXTS = ["to be", "\u00e9", "a\u0301b", "\u65e5\u672c \U0001f600", "", " x  y "]


def test_texts_are_cut_into_what_was_named() -> None:
    wanted = {
        "words": [text.split() for text in _TEXTS],
        "characters": [list(text) for text in _TEXTS],
        "bytes": [[chr(byte) for byte in text.encode()] for text in _TEXTS],
    }
    for split in SPLITS:
        tokens, lengths = split_texts(_TEXTS, split)
        assert lengths.tolist() == list(map(len, wanted[split])), split
        assert tokens.tolist() == list(chain.from_iterable(wanted[split])), split
        for text, part in zip(_TEXTS, wanted[split], strict=True):
            assert join_tokens(part, split) == (" ".join(text.split()) if split == "words" else text)
            if split != "words":
                # With the break at the end of the line.
                assert characters_in(part, 1, split) == len(text) + 1


def test_bytes_of_every_format_are_those_of_utf8(tmp_path: Path) -> None:
    texts = [text for text in _TEXTS if text.strip()]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\n".join(map(str.strip, texts)), encoding="utf-8")
    pq.write_table(pa.table({"text": list(map(str.strip, texts)), "y": ["a"] * len(texts)}), tmp_path / "a.parquet")
    wanted = [[chr(byte) for byte in text.strip().encode()] for text in texts]
    for path, sequence in ((tmp_path / "texts", None), (tmp_path / "a.parquet", "text")):
        columns = Columns(sequence=sequence, split="bytes")
        for records in (read(path, columns), read(convert(path, tmp_path / f"{path.stem}.out", columns).folder)):
            assert records.lengths.tolist() == list(map(len, wanted))
            assert records.values.tolist() == list(chain.from_iterable(wanted))


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
    path = write(tmp_path, HEADER + "1,2,3:4,5,6:a\n\n# between\n-1.5e2:1e300:b\n?,7:NaN,8:a\n::b\n")
    records = read(path)
    assert records.lengths.tolist() == [3, 1, 2, 0]
    assert records.labels == ("a", "b", "a", "b")
    assert records.channels == ("x0", "x1")
    assert records.source == path
    assert records.ids == (0, 1, 2, 3)
    expected = [[1, 4], [2, 5], [3, 6], [-150, np.inf], [np.nan, np.nan], [7, 8]]
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
    with pytest.raises(DataError, match="tag"):
        read(path, Columns(task="tag"))


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
        (HEADER + "1,2:3,4:a\n1,2:3\n", 12, ["2 fields", "2 channels and a label", "Restore the line"]),
        (HEADER + "1:2:c\n", 11, ["label 'c'", "'a', 'b'"]),
        (HEADER + "1,x:2,3:a\n", 11, ["'x'", "channel 0, step 1", "?"]),
        ("@timeStamps true\n@data\n", 1, ["@timeStamps true", "not supported"]),
        ("@dimensions many\n@data\n", 1, ["'many'", "whole number"]),
        ("@classLabel true\n@data\n", 1, ["no class"]),
        ("@\n@data\n", 1, ["'@'", "a directive after '@'"]),
        ("@classLabel true a\n@data 1,2:a\n3:a\n", 2, ["'@data 1,2:a'", "nothing after @data"]),
        ("@dimensions 1 2\n@data\n", 1, ["@dimensions '1 2'", "one word"]),
        (f"@dimensions {'9' * 5000}\n@data\n", 1, ["'999", "at most 9 digits"]),
        ("@univariate true\n@dimensions 2\n@data\n", 2, ["2 channels, after 1", "make them agree"]),
        ("@classLabel true a\n@classLabel true b\n@data\n", 2, ["@classlabel 'true b', after 'true a' in line 1"]),
        ("@classLabel true a\n@targetLabel true\n@data\n", 2, ["@targetLabel true", "not both"]),
        ("@equalLength true\n@classLabel true a\n@data\n1,2:a\n1,2,3:a\n", 5, ["3 steps", "because of @equalLength"]),
        ("@classLabel true caf\udce9 b\n@data\n1,2:caf\udce9\n", 1, ["UTF-8", "got the class 'caf"]),
        (HEADER + "1,٣:2,3:a\n", 11, ["'٣' as channel 0, step 1"]),
        (HEADER, None, ["no line after @data"]),
        ("@dimensions 2\n", None, ["no line @data"]),
        ("\n \n", None, ["an empty file"]),
        ("\udcff\udc80\udc89PNG\n\udcff", 1, ["before @data", ".ts file"]),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_bad_files(tmp_path: Path, text: str, line: int | None, words: list[str]) -> None:
    path = write(tmp_path, text.encode(errors="surrogateescape"))
    start = f"{path}{'' if line is None else f', line {line}'} must be "
    assert refused(words, read, path).startswith(start)


def test_a_truncated_file_is_found_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = HEADER + "11,12:13,14:a\n15,16:17,18:b\n"
    start = len(HEADER) + len("11,12:13,14:a\n") + 1
    for end in range(start, len(whole) - 1):
        with pytest.raises(DataError, match="line 12"):
            read(write(tmp_path, whole[:end]))


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
