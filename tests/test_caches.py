from __future__ import annotations

import errno
import os
from pathlib import Path
from textwrap import dedent
from unittest.mock import Mock

import pytest

from raglane._utils import caches
from scripts import Script


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    return tmp_path / "things"


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caches.folder("plans") == tmp_path / "plans"
    monkeypatch.delenv("RAGLANE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caches.folder("plans") == tmp_path / "raglane" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert caches.folder("plans") == Path.home() / ".cache" / "raglane" / "plans"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert caches.folder("plans") == tmp_path / "Local" / "raglane" / "plans"


def test_saved_values_come_back(folder: Path) -> None:
    assert caches.load("things", "a") is None
    for content in ("one", "zwei ü"):
        caches.save("things", "a", content)
        assert caches.load("things", "a") == content
    assert [file.name for file in folder.iterdir()] == ["a.json"]


def test_foreign_files_are_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.save("things", "a", "one")
    file = folder / "a.json"
    for mode in (0o620, 0o602):
        file.chmod(mode)
        assert caches.load("things", "a") is None
    file.chmod(0o600)
    assert caches.load("things", "a") == "one"
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: os.stat(file).st_uid + 1)
        if os.stat(file).st_uid:  # root may do everything
            assert caches.load("things", "a") is None
    file.write_bytes(b"\xff")
    assert caches.load("things", "a") is None
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    for name in ("folder", "pipe"):
        assert caches.load("things", name) is None
        caches.save("things", name, "two")
    assert caches.load("things", "folder") is None
    assert caches.load("things", "pipe") == "two"
    monkeypatch.setattr(caches, "_LARGEST", 3)
    caches.save("things", "large", "four")
    assert not (folder / "large.json").exists()
    file.write_text("four")
    assert caches.load("things", "a") is None


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (
        tmp_path / "file",
        Path("/proc/none"),
        Path("/dev/null"),
        tmp_path / ("long" * 99),
    ):
        monkeypatch.setenv("RAGLANE_CACHE", str(place))
        caches.save("things", "a", "one")
        assert caches.load("things", "a") is None


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches.save("things", "a", "one")

    monkeypatch.setattr(
        "os.replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    )
    caches.save("things", "a", "two")
    assert caches.load("things", "a") == "one"
    assert [file.name for file in folder.iterdir()] == ["a.json"]


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_MOST", 20)
    for number in range(21):
        caches.save("things", f"{number}", "x")
        if number < 20:
            os.utime(folder / f"{number}.json", (number, number))
    assert {file.stem for file in folder.iterdir()} == {f"{number}" for number in range(3, 21)}


def test_processes_that_write_at_once(script: Script, tmp_path: Path) -> None:
    """A reader gets one of the written texts, whole."""
    code = dedent("""
        import os
        from raglane._utils import caches
        wanted = {None, *(f"{n}" * 50_000 for n in range(3))}
        children = []
        for n in range(3):
            child = os.fork()
            if not child:
                for _ in range(60):
                    caches.save("things", "a", f"{n}" * 50_000)
                    if caches.load("things", "a") not in wanted:
                        os._exit(1)
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        print(sorted(os.listdir(caches.folder("things"))))
    """)
    ended = script(code, RAGLANE_CACHE=str(tmp_path))
    assert ended.stdout == "['a.json']\n", ended.stderr
