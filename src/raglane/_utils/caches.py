"""A cache of small files in the user's cache folder, shared by processes.

Writes are atomic, by a rename. Folders that are not writable, and files that another user could
have written, are ignored.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# Most files of each kind. A tenth, the oldest, is removed at a time, so that few writes sort the
# folder.
_MOST = 1000
_LARGEST = 1 << 24


def folder(kind: str) -> Path:
    """Return the folder of one kind of file: in ``RAGLANE_CACHE``, or in ``raglane`` in the user's
    cache folder.
    """
    chosen = os.environ.get("RAGLANE_CACHE")
    if chosen:
        return Path(chosen) / kind
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "raglane" / kind


def load(kind: str, key: str) -> str | None:
    """Return the text saved under a key, or None."""
    try:
        with open(folder(kind) / f"{key}.json", encoding="utf-8", opener=_at_once) as file:
            return file.read() if _is_ours(os.fstat(file.fileno())) else None
    except (OSError, ValueError, RuntimeError):  # a user without a home is a RuntimeError
        return None


def _at_once(path: str, flags: int) -> int:
    """Open without blocking, in case the name is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _is_ours(status: os.stat_result) -> bool:
    """Return True if this is a regular file of bounded size that only this user or root could
    write.
    """
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
        return False
    return not hasattr(os, "geteuid") or (
        status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
    )


def save(kind: str, key: str, content: str) -> str | None:
    """Save a text atomically; return the reason if that is not possible, e.g. a folder that is not
    writable.
    """
    partial = ""
    if len(content) > _LARGEST:
        return f"its {len(content):,} characters are more than {_LARGEST:,}"
    try:
        target = folder(kind)
        target.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=target, prefix=f"{key}.", suffix=".partial")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(partial, target / f"{key}.json")
        _bound(target)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            os.unlink(partial)
        return f"the cache folder is not writable: {error}"
    return None


def _bound(directory: Path) -> None:
    """Remove the oldest files if there are too many; other processes may do the same."""
    names = os.listdir(directory)
    if len(names) <= _MOST:
        return
    ages = []
    for name in names:
        with suppress(OSError):
            ages.append(((directory / name).stat().st_mtime_ns, name))
    for _, name in sorted(ages)[: len(ages) - _MOST + _MOST // 10]:
        with suppress(OSError):
            (directory / name).unlink()
