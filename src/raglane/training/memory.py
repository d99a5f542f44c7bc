"""How much memory a model needs, and how much there is: a question to ask before it is taken."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["available_memory"]

# Limits of a container, by the two versions of Linux's control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory() -> float:
    """The bytes of memory that this process can still get; infinity where the system does not tell.

    Example:
        >>> available_memory() > 0
        True
    """
    return min(_free(), *map(_limit, _LIMITS))


def _free() -> float:
    """What Linux calls available, which counts caches that it would give up; elsewhere all that is built in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return math.inf


def _limit(path: str) -> float:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        # No such file, or "max".
        return math.inf
