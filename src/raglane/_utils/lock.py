"""Locks of folders, which end with the process that holds them.

The system's lock on a file is used, not the existence of the file, so a killed process blocks no
other. Systems and file systems without locks run without them.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raglane.errors import ArgumentError

fcntl: Any
msvcrt: Any
try:
    import fcntl
except ImportError:
    fcntl = None
try:
    import msvcrt  # Windows
except ImportError:
    msvcrt = None
HAS_LOCKS = fcntl is not None or msvcrt is not None

LOCK = ".lock"
# O_NOFOLLOW: a link could lead to a file of the user.
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
# The byte that Windows locks: processes cannot read a locked byte, and the owner's name must be
# readable.
_BYTE = 1 << 20
# Attempts if other processes interfere; more would mean that the file system has no stable file
# identities.
_TRIES = 1000

# Locked folders of this process, by thread: the system's locks only exclude other processes.
_HELD: dict[str, int] = {}


@contextmanager
def locked(folder: Path, given_as: str = "folder") -> Iterator[None]:
    """Lock a folder; re-entrant per thread."""
    key = os.path.realpath(folder)
    thread = threading.get_ident()
    if _HELD.get(key) == thread:
        yield
        return
    if _HELD.setdefault(key, thread) != thread:
        raise _busy(folder, given_as, "another thread of this process")
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        descriptor = _take(folder, given_as)
        try:
            yield
        finally:
            _give_back(folder / LOCK, descriptor)
    finally:
        del _HELD[key]
        for path in missing:
            # Folders with content remain.
            with suppress(OSError):
                path.rmdir()


@contextmanager
def turn(partial: Path) -> Iterator[None]:
    """Wait until no other process writes a temporary file, if the system has locks of open files
    that are renamed.
    """
    if not HAS_LOCKS or fcntl is None:
        yield
        return
    for _ in range(_TRIES):
        descriptor = os.open(partial, _FLAGS, 0o666)
        try:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # When the other process has finished, the opened file has its final name.
            if _is_at(descriptor, partial):
                yield
                return
        finally:
            os.close(descriptor)
    yield


def _take(folder: Path, given_as: str) -> int | None:
    """Open and lock the lock file; raise if another process holds it; return None without locks."""
    path = folder / LOCK
    for _ in range(_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        if not HAS_LOCKS:
            return None
        try:
            descriptor = os.open(path, _FLAGS, 0o666)
        except FileNotFoundError:
            # The previous owner removed the empty folder.
            continue
        try:
            if not _lock(descriptor):
                owner = os.read(descriptor, 200).decode(errors="replace") or "another process"
                raise _busy(folder, given_as, owner)
            # The previous owner may have removed the file in the meantime.
            if _is_at(descriptor, path):
                _sign(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def _lock(descriptor: int) -> bool:
    """Lock a file; return False if another process holds it, True if the file system has no
    locks.
    """
    try:
        if fcntl is not None:
            # lockf is not inherited by forked DataLoader workers, which may outlive this process.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            os.lseek(descriptor, _BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return True


def _sign(descriptor: int) -> None:
    """Write the owner of the lock, for the messages of other processes."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())


def _give_back(path: Path, descriptor: int | None) -> None:
    if descriptor is None:
        return
    if fcntl is None:
        # Windows removes no open file, also not that of a process that has locked it since.
        os.close(descriptor)
        with suppress(OSError):
            path.unlink()
        return
    try:
        # Keep the file of a folder that replaced this one.
        if _is_at(descriptor, path):
            path.unlink()
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _busy(folder: Path, given_as: str, owner: str) -> ArgumentError:
    got = f"{str(folder)!r}, in which {owner} writes"
    rule = "a folder in which no other command writes"
    fix = "wait until that process has ended"
    return ArgumentError(given_as, got, rule, fix)
