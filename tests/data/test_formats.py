"""Rules of all formats: the choice of a reader, and unreadable paths."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raglane.data import FORMATS, read
from raglane.errors import ArgumentError, DataError, MissingExtraError

files = pytest.mark.parametrize("name", [name for name, known in FORMATS.items() if known.suffixes])


@files
@pytest.mark.parametrize("content", [b"", b"\n", bytes(range(255, -1, -1)) * 3])
def test_an_empty_file_and_other_bytes(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / f"data{FORMATS[name].suffixes[0]}"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


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
    with pytest.raises(
        DataError,
        match=rf"\.ts, \.parquet, \.pq, \.arrow, .*\.jsonl, \.ndjson, \.csv, \.txt, or a folder.*, got .*{got}",
    ):
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
