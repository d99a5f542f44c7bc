"""Files that a user names: opened where they are files, refused where reading them would never end.

A FIFO makes whoever opens it wait for a writer, a device may have no end, a socket cannot be opened at all. What is
wrong is an ``OSError`` here; the caller says it in the words of what it reads.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from raglane.errors import ArgumentTypeError, message, quote

_OTHERS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAFileError(OSError):
    """A path that leads to no file; ``strerror`` says to what it leads."""


def as_path(path: Any) -> Path:
    """A path that a caller gives."""
    if isinstance(path, bytes) or not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(message("path", quote(path), "a path", "pass a str or a pathlib.Path"))
    return Path(path)


def check_file(path: Path) -> None:
    """Refuse what is not a regular file, without opening it."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a zero byte, or half a surrogate pair
        raise NotAFileError(errno.EINVAL, "a name that no file can have", str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotAFileError(errno.ELOOP, "a link that leads back to itself", str(path)) from error
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            raise NotAFileError(errno.ENOENT, "a link to what is not there", str(path)) from error
        raise
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    for fits, name in _OTHERS:
        if fits(mode):
            raise NotAFileError(errno.EINVAL, name, str(path))


def read_file(path: Path) -> bytes:
    """The content of a regular file."""
    check_file(path)
    return path.read_bytes()
