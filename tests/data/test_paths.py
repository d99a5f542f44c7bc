"""Paths that lead to no file, and bytes that are not text: refused at once, by every reader."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raglane._utils.files import check_file, read_file
from raglane._utils.json import read_json
from raglane.cli import main
from raglane.data import FORMATS, Columns, read
from raglane.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DataError,
    RaglaneError,
)
from raglane.planner.probe import lengths_of_file
from raglane.training.checkpoint import load_model, read_tensors
from raglane.training.predictions import check_apart, check_output
from small_files import put, refused

files = pytest.mark.parametrize("name", [name for name, known in FORMATS.items() if known.suffixes])


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)


_MAKERS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a circular link": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _bind,
}
others = pytest.mark.parametrize("what", list(_MAKERS))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The name of a socket is short.
    monkeypatch.chdir(tmp_path)


@others
@files
def test_paths_of_no_file_are_refused_before_they_are_opened(
    tmp_path: Path, name: str, what: str
) -> None:
    path = tmp_path / f"data{FORMATS[name].suffixes[0]}"
    _MAKERS[what](path)
    for form in (None, name, "folder"):
        with pytest.raises(
            DataError, match=f"{path.name} must be .*file or a folder, got {what}. "
        ):
            read(path, format=form)


@others
def test_paths_that_are_read_and_written_are_files(tmp_path: Path, what: str) -> None:
    _MAKERS[what](path := tmp_path / "data.csv")
    with pytest.raises(
        DataError, match=f"lengths must be .*got '.*data.csv', which cannot be read .{what}"
    ):
        lengths_of_file(path)
    for load in (read_json, read_tensors):
        with pytest.raises(CheckpointError, match=f"data.csv must be .*got {what}"):
            load(path)
    if what != "a dangling link":  # which a new file replaces
        with pytest.raises(
            ArgumentError, match=f"output must be a file.*, got '.*data.csv', {what}"
        ):
            check_output(path)
    check_apart(tmp_path / "other.csv", path, tmp_path / "run")
    before = sorted(os.listdir(tmp_path))
    assert main(["demo", "--output", str(path), "--epochs", "1"]) == 2
    assert sorted(os.listdir(tmp_path)) == before


@others
def test_a_class_is_not_passed_over(tmp_path: Path, what: str) -> None:
    """A folder with a text that is not a file would be read without it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("anna\n")
    os.chdir(folder)
    _MAKERS[what](folder / "b.txt")
    with pytest.raises(DataError, match=f"b.txt must be .*got {what}"):
        read(folder)


def test_a_program_that_writes_into_a_command_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refuse a pipe, such as that of ``raglane train <(zcat data.csv.gz) --format csv``."""
    out, into = os.pipe()
    try:
        os.write(into, b"id,x,y\n1,2,a\n")
        assert main(["train", f"/dev/fd/{out}", "--format", "csv"]) == 2
    finally:
        os.close(out)
        os.close(into)
    assert "got a FIFO" in capsys.readouterr().err


def test_links_to_files_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("id,x,y\n1,2,a\n")
    (tmp_path / "link.csv").symlink_to("data.csv")
    assert read("link.csv").values.tolist() == [[2]]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("b\n")
    (tmp_path / "link").symlink_to("texts")
    assert read("link").labels == ("a",)
    check_file(Path("link.csv"))
    assert read_file(Path("link.csv")) == b"id,x,y\n1,2,a\n"


@pytest.mark.parametrize("name", ["a\0.csv", "\ud800.csv", "n" * 5000 + ".csv"])
def test_names_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    for attempt in (
        lambda: read(name),
        lambda: load_model(name),
        lambda: lengths_of_file(Path(name)),
    ):
        with pytest.raises(RaglaneError) as caught:
            attempt()
        assert str(caught.value).isprintable()
        assert " must be " in str(caught.value)


def test_a_path_that_is_none() -> None:
    wrong: list[Any] = [None, 3, b"data.csv"]
    for path in wrong:
        refused(["data must be a path,", ", got "], read, path, error=ArgumentTypeError)
        refused(
            ["path must be a str or a pathlib.Path, got "],
            load_model,
            path,
            error=ArgumentTypeError,
        )
    with pytest.raises(ArgumentTypeError, match=r"columns must be .*got 'x'"):
        read("data.csv", "x")  # type: ignore[arg-type]
    Path("data.csv").write_text("x")
    with pytest.raises(ArgumentError, match="format must be "):
        read("data.csv", format=3)  # type: ignore[arg-type]


_TEXTS = {
    "ts": "@dimensions 1\n@classLabel true a b\n@data\n1,2:a\n3:b\n",
    "csv": "id,x,y\n1,2,a\n1,3,a\n2,4,b\n",
    "jsonl": '{"x": [1, 2], "y": "a"}\n{"x": [3], "y": "b"}\n',
}
texts = pytest.mark.parametrize("name", list(_TEXTS))


@texts
def test_a_mark_at_the_start_of_a_text_is_passed_over(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / f"data.{name}", b"\xef\xbb\xbf" + _TEXTS[name].encode())
    marked = read(path)
    path.write_text(_TEXTS[name])
    assert marked.values.tolist() == read(path).values.tolist()
    assert marked.labels == ("a", "b")


@texts
@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-32"])
def test_a_text_in_utf_16(tmp_path: Path, name: str, code: str) -> None:
    path = put(tmp_path / f"data.{name}", _TEXTS[name].encode(code))
    if (name, code) == ("csv", "utf-16"):
        # The "Unicode text" of spreadsheets.
        assert read(path).labels == ("a", "b")
        return
    with pytest.raises(
        DataError, match=r"a text in UTF-8, .*UTF-16.*iconv|line 1 must be .*got a zero byte"
    ):
        read(path)


@texts
def test_a_byte_that_no_text_holds_is_named_by_its_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"data.{name}"
    lines = _TEXTS[name].encode().splitlines(keepends=True)
    for place in range(len(lines)):
        spoilt = lines.copy()
        spoilt[place] = spoilt[place].rstrip(b"\n") + b"\0\n"
        path.write_bytes(b"".join(spoilt))
        with pytest.raises(DataError, match=rf"line {place + 1} must be .*got a zero byte"):
            read(path)
        if lines[place] == b"@data\n":
            continue  # with another byte it is a directive that is not known
        spoilt[place] = lines[place][:-2] + b"\xff\n"
        path.write_bytes(b"".join(spoilt))
        with pytest.raises(
            DataError, match=rf"line {place + 1} must be .*, got .*(0xff, which is not UTF-8|udcff)"
        ):
            read(path)


def test_a_column_that_a_format_has_not_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    notes = read(
        put(tmp_path / "data.ts", _TEXTS["ts"]), Columns(time="t", label="y", wide=True)
    ).notes
    unused = "Columns(label=...), Columns(time=...), Columns(wide=...)"
    assert f"not used, since the format ts has no such column: {unused}" in notes
