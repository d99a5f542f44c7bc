"""One command at a time in a folder: a lock that ends with the process that holds it, however that dies.

The lock is the system's, on a file in the folder, and not the file itself: what a killed process leaves of it stops
nobody. Where a file system or a system has no such locks, commands run without.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raglane._utils.messages import message
from raglane.errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

LOCK = ".lock"
# How often somebody else may come between; beyond it the file system is one on which files have no lasting identity.
_TRIES = 1000

# The folders that this process has locked, and by which thread: the system's lock keeps processes apart, not threads.
_HELD: dict[str, int] = {}


@contextmanager
def locked(folder: Path, given_as: str = "folder") -> Iterator[None]:
    """Lock a folder; a thread that already holds the lock may take it again."""
    key, thread = os.path.realpath(folder), threading.get_ident()
    if _HELD.get(key) == thread:
        yield
        return
    if _HELD.setdefault(key, thread) != thread:
        raise _busy(folder, given_as, "another thread of this process")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        descriptor = _take(folder, given_as)
        try:
            yield
        finally:
            _give_back(folder / LOCK, descriptor)
    finally:
        del _HELD[key]
        for path in made:
            # One in which something has been put stays.
            with suppress(OSError):
                path.rmdir()


@contextmanager
def turn(partial: Path) -> Iterator[None]:
    """Wait until no other process writes a file under a passing name; a system without such locks does not wait."""
    if not HAS_LOCKS:
        yield
        return
    for _ in range(_TRIES):
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Once the other has finished, what was opened bears the final name.
            if _is_at(descriptor, partial):
                yield
                return
        finally:
            os.close(descriptor)
    yield


def _take(folder: Path, given_as: str) -> int | None:
    """An open file that is locked, or the error of a folder in which somebody is at work; None without locks."""
    path = folder / LOCK
    for _ in range(_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        if not HAS_LOCKS:
            return None
        try:
            # Never through a link: what it leads to is not ours to write to.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            # Who had it before has removed the folder, which was empty.
            continue
        try:
            if not _lock(descriptor):
                owner = os.read(descriptor, 200).decode(errors="replace") or "another process"
                raise _busy(folder, given_as, owner)
            # Who had it before may have removed the file in between: then this one is nobody's.
            if _is_at(descriptor, path):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def _lock(descriptor: int) -> bool:
    """Lock a file; False where another process has locked it, True where the file system has no locks."""
    try:
        # This kind is not handed on to the processes that a DataLoader forks, which live on for a while.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _sign(descriptor: int) -> None:
    """Write who has the lock, for the message to whoever comes second."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _give_back(path: Path, descriptor: int | None) -> None:
    if descriptor is None:
        return
    try:
        # Not one that came after the folder was replaced.
        if _is_at(descriptor, path):
            path.unlink()
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """True while an open file has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _busy(folder: Path, given_as: str, owner: str) -> ArgumentError:
    got = f"{str(folder)!r}, in which {owner} writes"
    return ArgumentError(
        message(given_as, got, "a folder in which no other command writes", "wait until that process has ended")
    )
