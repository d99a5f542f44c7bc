"""Atomic writes of files and folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from raglane._utils.files import settle, whole_folder, write_file, write_files, write_folder


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _fail_after(count: int, monkeypatch: pytest.MonkeyPatch, name: str, times: int = 99) -> None:
    """Let the function ``os.<name>`` work ``count`` times, then find the disk full some times."""
    real, calls = getattr(os, name), [0]

    def failing(*arguments: object) -> object:
        calls[0] += 1
        if count < calls[0] <= count + times:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, name, failing)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_file_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "a.json"
    write_file(path, b"old")
    _fail_after(0, monkeypatch, name)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert _names(tmp_path) == ["a.json"]


def test_folder_is_replaced_with_all_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "best"
    write_folder(path, {"a": b"1", "b": b"2"})
    write_folder(path, {"a": b"3"})
    assert _names(path) == ["a"]
    assert (path / "a").read_bytes() == b"3"
    assert _names(tmp_path) == ["best"]


@pytest.mark.parametrize(
    ("name", "count"), [("fsync", 0), ("fsync", 1), ("rename", 0), ("rename", 1)]
)
def test_folder_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    path = tmp_path / "best"
    write_folder(path, {"a": b"old", "b": b"old"})
    # The undo after the second rename is a rename too.
    _fail_after(count, monkeypatch, name, times=1 if name == "rename" else 99)
    with pytest.raises(OSError, match="No space"):
        write_folder(path, {"a": b"new", "b": b"new"})
    assert {(path / file).read_bytes() for file in ("a", "b")} == {b"old"}
    assert _names(tmp_path) == ["best"]


def test_a_folder_that_cannot_be_synchronised_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first call is for the file, the second for the folder, which some systems refuse.
    _fail_after(1, monkeypatch, "fsync")
    write_folder(tmp_path / "best", {"a": b"new"})
    assert (tmp_path / "best" / "a").read_bytes() == b"new"


def test_death_between_the_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best"
    write_folder(path, {"a": b"old"})
    # The state after a kill between the renames: the old folder is moved away, the new one not in
    # place.
    os.rename(path, tmp_path / ".best.previous")
    (tmp_path / ".best.partial").mkdir()
    found = whole_folder(path)
    assert found is not None
    assert (found / "a").read_bytes() == b"old"
    write_folder(path, {"a": b"new"})
    assert whole_folder(path) == path
    assert (path / "a").read_bytes() == b"new"
    assert _names(tmp_path) == ["best"]


def test_partial_files_are_removed_and_whole_folders_renamed(tmp_path: Path) -> None:
    assert whole_folder(tmp_path / "best") is None
    write_folder(tmp_path / "best", {"a": b"1"})
    for name in (".best.partial", ".best.previous", ".last.previous", ".last.partial"):
        write_folder(tmp_path / name, {"a": b"0"})
    (tmp_path / ".a.json.partial").write_bytes(b"{")
    for name in ("best", "last", "a.json"):
        settle(tmp_path / name)
    # Without a folder of the name, the previous one is the only whole one.
    assert _names(tmp_path) == ["best", "last"]
    assert (tmp_path / "best" / "a").read_bytes() == b"1"


def test_files_that_belong_together_survive_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = {tmp_path / "model.onnx": b"new", tmp_path / "model.json": b"new"}
    for name, count in (("fsync", 0), ("fsync", 1), ("replace", 0), ("replace", 1)):
        with monkeypatch.context() as patch:
            _fail_after(count, patch, name)
            with pytest.raises(OSError, match="No space"):
                write_files(together)
        assert _names(tmp_path) == [], (name, count)
    write_files(dict.fromkeys(together, b"old"))
    with monkeypatch.context() as patch:
        _fail_after(1, patch, "fsync")
        with pytest.raises(OSError, match="No space") as found:
            write_files(together)
    assert found.value.filename == str(tmp_path / "model.json")
    assert {path.read_bytes() for path in together} == {b"old"}
    write_files(together)
    assert {path.read_bytes() for path in together} == {b"new"}
    assert _names(tmp_path) == ["model.json", "model.onnx"]
