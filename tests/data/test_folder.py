"""The reader of a folder of texts, one per class."""

from __future__ import annotations

from pathlib import Path

import pytest

from raglane.data import Columns, read
from raglane.errors import DataError


def test_a_class_a_file_a_sequence_a_line(tmp_path: Path) -> None:
    (tmp_path / "Polish.txt").write_text("Łęcki\n\nŻak\r\n", encoding="utf-8")
    (tmp_path / "Arabic.txt").write_bytes("\ufeffNasr \n  \n\U0001f642é".encode())
    records = read(tmp_path)
    assert records.is_tokens
    assert records.labels == ("Arabic", "Arabic", "Polish", "Polish")
    lines = [
        "".join(records.values[start:end]) for start, end in zip(records.offsets, records.offsets[1:], strict=False)
    ]
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
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    for word in words:
        assert word in str(caught.value)
