"""One command at a time in a folder; the lock of a dead process is free."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import FAST, Capsys, fails, tree, write_steps
from raglane._utils import lock
from raglane._utils.files import write_file
from raglane._utils.lock import LOCK, locked
from raglane.cli import main
from raglane.errors import ArgumentError

_HOLD = """
import sys, time
from pathlib import Path
from raglane._utils.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python code in a process of its own session."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextmanager
def _held_elsewhere(folder: Path, code: str = _HOLD) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of a folder."""
    process = _start(code, str(folder))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_refused_until_the_first_is_killed(
    tmp_path: Path, capsys: Capsys
) -> None:
    data, run = str(write_steps(tmp_path / "ok.csv")), tmp_path / "run"
    train = ["train", data, "--output", str(run), *FAST, "--quiet"]
    with _held_elsewhere(run) as process:
        # Before the first has written anything.
        fails(
            train,
            capsys,
            "output must be ",
            f"in which process {process.pid} on",
            " writes",
            "Wait until that process has ended",
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Its lock file is still there, but free.
        assert (run / LOCK).exists()
        assert main(train) == 0
    assert not (run / LOCK).exists()
    before = tree(tmp_path)
    with _held_elsewhere(run):
        fails([*train, "--overwrite"], capsys, " writes")
        fails(["train", "--resume", "--output", str(run), "--epochs", "3"], capsys, " writes")
        fails(["evaluate", str(run), data], capsys, "run must be ", " writes")
        # To read needs no lock, also where something is left to clean up.
        (run / ".best.partial").mkdir()
        assert main(["predict", str(run), data, "-o", str(tmp_path / "p.csv"), "--quiet"]) == 0
        assert (run / ".best.partial").exists()
        (tmp_path / "p.csv").unlink()
        (run / ".best.partial").rmdir()
    (run / LOCK).unlink()
    assert tree(tmp_path) == before


def test_a_folder_that_stays_empty_is_removed(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    with locked(deep):
        # The same thread may have it twice, and the inner one gives nothing back.
        with locked(tmp_path / "a" / ".." / "a" / "b"):
            pass
        assert (deep / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(deep):
        (deep / "mine").write_text("")
    assert [path.name for path in deep.iterdir()] == ["mine"]


def test_another_thread_is_refused(tmp_path: Path) -> None:
    told: list[str] = []

    def second() -> None:
        try:
            with locked(tmp_path / "run"):
                told.append("no error")
        except ArgumentError as error:
            told.append(str(error))

    with locked(tmp_path / "run"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    second()
    assert "in which another thread of this process writes" in told[0]
    assert told[1:] == ["no error"]


def test_the_lock_is_not_handed_on_to_a_process_that_is_forked(tmp_path: Path) -> None:
    """Workers live on for a while after a training that is killed."""
    folder = tmp_path / "run"
    fork = """
    import os, signal
    if os.fork() > 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    print("forked", flush=True)
    time.sleep(600)
"""
    process = _start(_HOLD.replace("    time.sleep(600)\n", fork), str(folder))
    assert process.stdout is not None
    with process.stdout as printed:
        try:
            assert [printed.readline(), printed.readline()] == ["held\n", "forked\n"]
            assert process.wait() == -signal.SIGKILL
            with locked(folder):
                pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_without_locks_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr("raglane._utils.lock.fcntl.lockf", absent)
        patched.setattr("raglane._utils.lock.fcntl.flock", absent)
        with locked(tmp_path / "a"):
            write_file(tmp_path / "a" / "x", b"1")
    monkeypatch.setattr(lock, "HAS_LOCKS", False)
    with locked(tmp_path / "b"):
        write_file(tmp_path / "b" / "x", b"2")
    found = {name: content for name, content in tree(tmp_path).items() if LOCK not in name}
    assert found == {"a/x": b"1", "b/x": b"2"}


# Windows has no fcntl, and its locks are those of msvcrt.
_WINDOWS = """
import errno, fcntl, os, sys, types

def locking(descriptor, mode, count):
    assert mode == 2
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, os.lseek(descriptor, 0, os.SEEK_CUR))
    except OSError as error:
        raise PermissionError(errno.EACCES, "Permission denied") from error

sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
sys.modules["fcntl"] = None
"""
_TRY = """
import sys
from pathlib import Path
from raglane._utils.lock import locked
try:
    with locked(Path(sys.argv[1])):
        print("held")
except ValueError as error:
    print(error)
"""


def test_locks_of_windows(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with _held_elsewhere(tmp_path / "run", _WINDOWS + _HOLD) as first:
        assert (
            f"in which process {first.pid} on" in _start(_WINDOWS + _TRY, folder).communicate()[0]
        )
    assert (tmp_path / "run" / LOCK).exists()
    assert _start(_WINDOWS + _TRY, folder).communicate()[0] == "held\n"
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


_WRITE = """
import sys
from pathlib import Path
from raglane._utils.files import write_file
path, letter = Path(sys.argv[1]), sys.argv[2].encode()
for number in range(80):
    write_file(path, letter * (1 + number * 37 % 5000))
"""


def test_two_processes_that_write_one_file_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    writers = [_start(_WRITE, str(path), letter) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            content = path.read_bytes()
            assert content
            assert set(content) == {content[0]}
    assert [(writer.wait(), writer.communicate()[0]) for writer in writers] == [(0, ""), (0, "")]
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
