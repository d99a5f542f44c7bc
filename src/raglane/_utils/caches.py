"""Small files kept between processes in the user's folder of caches; any of them may be lost at any time.

Whoever reads finds a whole file or none: what is written gets its name at once, by a rename. So any number of processes
may read and write. A folder that cannot be written is passed over, and so is what is read there from somebody else:
a file that another user could have written.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# Of each kind; the oldest go. A tenth goes at a time, so that a full folder is not sorted at each write.
_MOST = 1000
_LARGEST = 1 << 24


def folder(kind: str) -> Path:
    """Where files of a kind lie: in ``RAGLANE_CACHE``, or else in ``raglane`` in the user's folder of caches."""
    chosen = os.environ.get("RAGLANE_CACHE")
    if chosen:
        return Path(chosen) / kind
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "raglane" / kind


def load(kind: str, key: str) -> str | None:
    """The text saved under a key; None without one that can be read."""
    try:
        with open(folder(kind) / f"{key}.json", encoding="utf-8", opener=_at_once) as file:
            return file.read() if _is_ours(os.fstat(file.fileno())) else None
    except (OSError, ValueError, RuntimeError):  # a user without a home is a RuntimeError
        return None


def _at_once(path: str, flags: int) -> int:
    """Open a file, whatever has its name: a pipe would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _is_ours(found: os.stat_result) -> bool:
    """True for a regular file of bounded size that only this user or root could write."""
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        return False
    return not hasattr(os, "geteuid") or (found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022)


def save(kind: str, key: str, content: str) -> None:
    """Keep a text, whole or not at all; a folder or a disk that cannot be written is passed over."""
    partial = ""
    if len(content) > _LARGEST:
        return
    try:
        place = folder(kind)
        place.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=place, prefix=f"{key}.", suffix=".partial")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(partial, place / f"{key}.json")
        _bound(place)
    except (OSError, RuntimeError):
        if partial:
            with suppress(OSError):
                os.unlink(partial)


def _bound(place: Path) -> None:
    """Remove the oldest files where there are too many; others may be at it, too."""
    with os.scandir(place) as entries:
        names = [entry.name for entry in entries]
    if len(names) <= _MOST:
        return
    ages = []
    for name in names:
        with suppress(OSError):
            ages.append(((place / name).stat().st_mtime_ns, name))
    for _, name in sorted(ages)[: len(ages) - _MOST + _MOST // 10]:
        with suppress(OSError):
            (place / name).unlink()
