"""Rules of all formats, the reader of .ts files, folders of texts, and texts cut into bytes,
characters and words.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raglane.data import FORMATS, Columns, convert, japanese_vowels, read
from raglane.data.splitting import SPLITS, characters_in, join_tokens, split_texts
from raglane.errors import ArgumentError, DataError, MissingExtraError
from raglane.tasks import guessed_in
from small_files import put, refused, same, written

files = pytest.mark.parametrize("name", [name for name, known in FORMATS.items() if known.suffixes])


@files
@pytest.mark.parametrize("content", [b"", b"\n", bytes(range(255, -1, -1)) * 3])
def test_an_empty_file_and_other_bytes(tmp_path: Path, name: str, content: bytes) -> None:
    path = put(tmp_path / f"data{FORMATS[name].suffixes[0]}", content)
    assert refused((), read, path).startswith(str(path))


@files
def test_nothing_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "absent" / f"data{FORMATS[name].suffixes[0]}"
    refused(["no such file or folder. Check the path"], read, path)
    refused(["a folder"], read, tmp_path, format=name)
    (tmp_path / "a.txt").write_text("x")
    refused(["a file"], read, tmp_path / "a.txt", format="folder")


@files
def test_permission_denied(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / f"data{FORMATS[name].suffixes[0]}", b"x")

    def denied(*args: object, **keywords: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    monkeypatch.setattr(Path, "open", denied)
    refused(["permission denied", "chmod"], read, path)


@pytest.mark.parametrize(
    ("name", "got"), [("data.odt", "'.odt'"), ("data", "no suffix"), ("data.doc", "'.doc'")]
)
def test_an_unknown_suffix_lists_the_known(tmp_path: Path, name: str, got: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    known = r"\.ts, \.parquet, \.pq, \.arrow, .*\.jsonl, .*\.csv, \.tsv, .*\.txt, or a folder"
    with pytest.raises(DataError, match=rf"{known}.*, got .*{got}"):
        read(tmp_path / name)


def test_suffixes_in_capitals_and_a_format_by_name(tmp_path: Path) -> None:
    text = "@univariate true\n@classLabel true a\n@data\n1,2:a\n"
    (tmp_path / "data.TS").write_text(text)
    (tmp_path / "data.txt").write_text(text)
    assert read(str(tmp_path / "data.TS")).lengths.tolist() == [2]
    assert read(tmp_path / "data.txt", format="ts").lengths.tolist() == [2]
    refused(
        ["one of ts, parquet", ", got 'excel'"],
        read,
        tmp_path / "data.txt",
        format="excel",
        error=ArgumentError,
    )


@pytest.mark.parametrize(
    ("name", "module"), [("parquet", "pyarrow"), ("jsonl", "pyarrow"), ("csv", "pandas")]
)
def test_a_missing_extra_is_named(
    tmp_path: Path, name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / f"data{FORMATS[name].suffixes[0]}", '{"x": 1}')
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


def test_files_without_a_class_are_left_out_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "LOC.txt").write_text("where\n")
    for name in ("SOURCE.txt", "README.txt", "LICENSE.txt", "table.csv", ".hidden.txt"):
        (tmp_path / name).write_text("nothing\n")
    (tmp_path / "folder.txt").mkdir()
    records = read(tmp_path)
    assert set(records.labels or ()) == {"LOC"}
    note = next(note for note in records.notes if note.startswith("left out: "))
    for name in (
        "SOURCE.txt",
        "README.txt",
        "LICENSE.txt",
        "table.csv",
        "folder.txt",
        ".hidden.txt",
    ):
        assert name in note


def test_labels_are_not_needed_to_predict_or_forecast(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("b\n")
    assert read(tmp_path, Columns(need_labels=False)).labels is None
    assert read(tmp_path, Columns(task="forecast")).labels is None
    refused(["tag"], read, tmp_path, Columns(task="tag"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["an empty folder", ".txt"]),
        ({"a.csv": b"x"}, ["a.csv", "a header and no rows"]),
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
            assert join_tokens(part, split) == (
                " ".join(text.split()) if split == "words" else text
            )
            if split != "words":
                # With the break at the end of the line.
                assert characters_in(part, 1, split) == len(text) + 1


def test_bytes_of_every_format_are_those_of_utf8(tmp_path: Path) -> None:
    texts = [text for text in _TEXTS if text.strip()]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\n".join(map(str.strip, texts)), encoding="utf-8")
    pq.write_table(
        pa.table({"text": list(map(str.strip, texts)), "y": ["a"] * len(texts)}),
        tmp_path / "a.parquet",
    )
    wanted = [[chr(byte) for byte in text.strip().encode()] for text in texts]
    for path, sequence in ((tmp_path / "texts", None), (tmp_path / "a.parquet", "text")):
        columns = Columns(sequence=sequence, split="bytes")
        for records in (
            read(path, columns),
            read(convert(path, tmp_path / f"{path.stem}.out", columns).folder),
        ):
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
    return put(folder / "toy.ts", text)


def test_reads_what_the_header_says(tmp_path: Path) -> None:
    path = write(
        tmp_path, HEADER + "1,2,3:4,5,6:a\n\n# between\n-1.5e2:1e300:b\n?,7:NaN,8:a\n::b\n"
    )
    records = read(path)
    assert records.lengths.tolist() == [3, 1, 2, 0]
    assert records.labels == ("a", "b", "a", "b")
    assert records.channels == ("x0", "x1")
    assert records.source == path
    assert records.ids == (0, 1, 2, 3)
    expected = [[1, 4], [2, 5], [3, 6], [-150, np.inf], [np.nan, np.nan], [7, 8]]
    np.testing.assert_array_equal(records.values, np.array(expected, dtype=np.float32))


def test_round_trip_of_random_sequences(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 30, 50)
    matrices = [random.normal(size=(length, 3)).astype(np.float32) for length in lengths]
    labels = random.choice(["1", "2", "10"], 50)
    lines = [
        ":".join(",".join(map(repr, channel.tolist())) for channel in matrix.T) + f":{label}"
        for matrix, label in zip(matrices, labels, strict=True)
    ]
    records = read(
        write(tmp_path, "@dimensions 3\n@classLabel true 1 2 10\n@data\n" + "\n".join(lines))
    )
    np.testing.assert_array_equal(records.values, np.concatenate(matrices))
    assert records.lengths.tolist() == lengths.tolist()
    assert records.labels == tuple(labels)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_newlines_a_byte_order_mark_and_other_letter_cases(tmp_path: Path, newline: str) -> None:
    text = (
        "\ufeff@UNIVARIATE true\n@classlabel TRUE Walking Running\n@DATA\n1,2:walking\n3:Running\n"
    )
    records = read(write(tmp_path, text.replace("\n", newline)))
    assert records.labels == ("Walking", "Running")
    assert records.values.tolist() == [[1], [2], [3]]


def test_channels_are_counted_where_the_header_does_not_say(tmp_path: Path) -> None:
    records = read(
        write(tmp_path, "@univariate false\n@strange 3\n@classLabel true a\n@data\n1:2:3:a\n")
    )
    assert records.channels == ("x0", "x1", "x2")
    assert any("@dimensions" in note for note in records.notes)
    assert any("@strange" in note for note in records.notes)


def test_a_comment_in_another_encoding_does_no_harm(tmp_path: Path) -> None:
    text = b"# Universit\xe4t\n@univariate true\n@classLabel true a\n@data\n1,2:a\n"
    assert read(write(tmp_path, text)).values.tolist() == [[1], [2]]


def test_other_tasks_and_prediction_need_no_label(tmp_path: Path) -> None:
    path = write(tmp_path, "@univariate true\n@classLabel false\n@data\n1,2\n3\n")
    for columns in (Columns(task="forecast"), Columns(need_labels=False)):
        records = read(path, columns)
        assert records.labels is None
        assert records.element_counts.tolist() == [2, 1]
    refused(["@classLabel true"], read, path)
    path = write(tmp_path, HEADER + "1:2:?\n")
    assert read(path, Columns(need_labels=False)).labels is None
    refused(["tag"], read, path, Columns(task="tag"))


def test_a_target_is_no_label(tmp_path: Path) -> None:
    path = write(tmp_path, "@univariate true\n@targetLabel true\n@data\n1,2:0.5\n3:0.75\n")
    refused(["@targetLabel"], read, path)
    records = read(path, Columns(task="forecast"))
    assert records.values.tolist() == [[1], [2], [3]]
    assert any("@targetLabel" in note for note in records.notes)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (HEADER + "1:2:a\n1,2:3,4,5:b\n", 12, ["channels of 2, 3 values", "equally long"]),
        (HEADER + "1:2:3:a\n", 11, ["4 fields", "2 channels and a label"]),
        (
            HEADER + "1,2:3,4:a\n1,2:3\n",
            12,
            ["2 fields", "2 channels and a label", "Restore the line"],
        ),
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
        (
            "@classLabel true a\n@classLabel true b\n@data\n",
            2,
            ["@classlabel 'true b', after 'true a' in line 1"],
        ),
        ("@classLabel true a\n@targetLabel true\n@data\n", 2, ["@targetLabel true", "not both"]),
        (
            "@equalLength true\n@classLabel true a\n@data\n1,2:a\n1,2,3:a\n",
            5,
            ["3 steps", "because of @equalLength"],
        ),
        (
            "@classLabel true caf\udce9 b\n@data\n1,2:caf\udce9\n",
            1,
            ["UTF-8", "got the class 'caf"],
        ),
        (HEADER + "1,٣:2,3:a\n", 11, ["'٣' as channel 0, step 1"]),
        (HEADER + "1,2:2,1_000:a\n", 11, ["'1_000' as channel 1, step 1"]),
        (HEADER + "1,2:2,1_0e1_0:a\n", 11, ["'1_0e1_0' as channel 1, step 1"]),
        (HEADER, None, ["no line after @data"]),
        ("@dimensions 2\n", None, ["no line @data"]),
        ("\n \n", None, ["an empty file"]),
        ("\udcff\udc80\udc89PNG\n\udcff", 1, ["before @data", ".ts file"]),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_bad_files(tmp_path: Path, text: str, line: int | None, words: list[str]) -> None:
    path = write(tmp_path, text.encode(errors="surrogateescape"))
    assert refused(words, read, path).startswith(
        f"{path}{'' if line is None else f', line {line}'} must be "
    )


def test_a_truncated_file_is_found_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = HEADER + "11,12:13,14:a\n15,16:17,18:b\n"
    for end in range(len(HEADER) + len("11,12:13,14:a\n") + 1, len(whole) - 1):
        refused(["line 12"], read, write(tmp_path, whole[:end]))


@pytest.mark.parametrize(
    ("name", "other", "write"),
    [
        ("csv", "data.tsv", lambda text: text.replace(",", "\t").encode()),
        ("csv", "data.csv", lambda text: text.replace(",", ";").replace(".", ",").encode()),
        ("csv", "data.tsv.gz", lambda text: gzip.compress(text.replace(",", "\t").encode())),
        ("jsonl", "data.jsonl.gz", lambda text: gzip.compress(text.encode())),
        (
            "jsonl",
            "data.json",
            lambda text: json.dumps(list(map(json.loads, text.split("\n\n"))), indent=1).encode(),
        ),
        ("jsonl", "data.json", lambda text: f" [{','.join(text.splitlines()[::2])}]\n".encode()),
    ],
)
def test_the_same_in_another_spelling(
    tmp_path: Path, name: str, other: str, write: Callable[[str], bytes]
) -> None:
    (folder := tmp_path / "other").mkdir()
    path = put(folder / other, write(written(name, tmp_path).read_text()))
    same(read(path), read(written(name, tmp_path)))
    whole = convert(path, tmp_path / "whole").folder
    same(read(whole), read(convert(written(name, tmp_path), tmp_path / "usual").folder))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('[{"x": [1.0], "y": "a"},\n{"x": [1.0], "y"]', 2, ["bad JSON"]),
        ('[{"x": [1.0], "y": "a"}\n{"x": [1.0], "y": "a"}]', 2, ["Expecting ',' or ']'"]),
        ('[{"x": [1.0], "y": "a"}]\n3', 2, ["Extra data"]),
        ('[\n\n{"x": ["a", 1.0], "y": "a"}]', 3, ["a list of number and string as 'x'"]),
        ("[1]", 1, ["a JSON number"]),
        ("[ ]", None, ["an empty array"]),
    ],
)
def test_a_bad_array_of_objects(
    tmp_path: Path, text: str, line: int | None, words: list[str]
) -> None:
    path = put(tmp_path / "data.json", text)
    assert refused(words, read, path).startswith(
        f"{path}{'' if line is None else f', line {line}'} must be "
    )


def test_a_damaged_gzip_or_npz_file(tmp_path: Path) -> None:
    whole = gzip.compress(b"id,x,y\n1,1,a\n" * 99)
    path = tmp_path / "data.csv.gz"
    for content in (whole[:-9], b"id,x,y\n1,1,a\n", whole[:20] + b"no" + whole[22:]):
        path.write_bytes(content)
        refused(["a damaged gzip file"], read, path)
    np.savez(path := tmp_path / "data.npz", x=np.zeros((3, 2)))
    archive = bytearray(path.read_bytes())
    archive[archive.index(b"PK\x01\x02") + 10] = 99  # no method of compression
    for bad, words in (
        (archive, "compression"),
        (archive[archive.index(b"\x93NUMPY") :], "no zip archive"),
    ):
        path.write_bytes(bad)
        refused([words], read, path)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"x": np.zeros((3, 2)), "y": np.zeros(4)},
            ["an array 'y' of shape (4,), with 3 sequences"],
        ),
        ({"x": np.zeros((5, 2)), "offsets": [0, 4, 2]}, ["offsets"]),
        (
            {"x": np.zeros((5, 2)), "offsets": [2, 4, 5]},
            ["begin with 0 and never fall", "[2, 4, 5"],
        ),
        ({"x": np.zeros((5, 2)), "offsets": [-1, 4, 5]}, ["begin with 0 and never fall"]),
        ({"x": np.zeros((5, 2)), "offsets": [0]}, ["begin with 0 and never fall"]),
        ({"x": np.zeros((5, 2)), "offsets": [0.0, 2.0, 5.0]}, ["begin with 0 and never fall"]),
        ({"x": np.zeros((5, 2)), "lengths": [[2, 3]]}, ["got lengths"]),
        (
            {"x": np.zeros((5, 2)), "lengths": [3, 3]},
            ["shape (5, 2), with 2 sequences of 6 elements", "the lengths"],
        ),
        (
            {"x": np.zeros((5, 2)), "lengths": [6, -1]},
            ["data.npz must be", "got lengths array([ 6, -1])"],
        ),
        ({"x": np.array([[1.0], [2.0, 3.0]], dtype=object)}, ["Object arrays cannot be loaded"]),
        ({"x": np.zeros((3, 2)), "rate": 16000}, ["an array 'rate'", "shape ()"]),
        ({}, ["no array"]),
    ],
)
def test_bad_arrays(tmp_path: Path, arrays: dict[str, Any], words: list[str]) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    refused(words, read, tmp_path / "data.npz")


def test_arrays_of_sequences_of_one_length(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    np.savez_compressed(
        tmp_path / "data.npz", series=values.astype("g"), y=np.array([0, 1, 0, 1], ">i8")
    )
    data = read(tmp_path / "data.npz")
    assert (data.lengths.tolist(), data.labels, data.label_kinds) == (
        [3] * 4,
        ("0", "1", "0", "1"),
        ("whole numbers",),
    )
    np.testing.assert_array_equal(data.values, values.reshape(12, 2))


def test_sets_of_numbers_are_channels(tmp_path: Path) -> None:
    path = put(tmp_path / "rolls.jsonl", '{"roll": [[60, 64], [], [127]]}\n{"roll": [[0]]}\n')
    data = read(path, Columns(task="forecast"))
    assert [row.nonzero()[0].tolist() for row in data.values] == [[60, 64], [], [127], [0]]
    assert (data.values.shape, data.columns.categorical) == ((4, 128), ("roll",))
    # Lists of one size are sets if their column is categorical, as it is then for a model of sets.
    path.write_text('{"roll": [[60], [64]]}\n')
    assert read(path, data.columns).values[1, 64] == 1
    for odd in ("128", "60, 60", "-1"):
        path.write_text(f'{{"roll": [[1], [{odd}], []]}}\n')
        refused(
            ["different whole numbers from 0 to 127", "in row 0 (line 1), step 1"],
            read,
            path,
            data.columns,
        )
    path.write_text('{"roll": [[1.5], [], [2]]}\n')
    refused(["the same number of channels"], read, path, Columns(task="forecast"))


def test_ids_that_repeat_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for count, words in ((4, "1 sequence repeats"), (5, "2 sequences repeat")):
        path.write_text(
            "".join(f'{{"id": {number % 3}, "x": [1.0], "y": "a"}}\n' for number in range(count))
        )
        assert f"{words} the id of another one" in read(path).notes


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
        flat = [
            np.stack([np.asarray(cell, np.float32) for cell in row], 1) for row in frame.to_numpy()
        ]
        np.testing.assert_array_equal(ours.values, np.concatenate(flat))
        assert [label.lower() for label in ours.labels or ()] == [label.lower() for label in labels]


def test_the_tasks_of_a_format_are_those_that_its_rows_can_tell() -> None:
    tasks = {name: guessed_in(format.row) for name, format in FORMATS.items()}
    assert tasks["text"] == ("classify", "language")
    assert tasks["conll"] == ("classify", "tag")
    assert tasks["csv"] == tasks["ts"] == ("classify", "regress")
    assert tasks["jsonl"] == tasks["folder"] == ("classify", "tag", "regress", "multilabel")
