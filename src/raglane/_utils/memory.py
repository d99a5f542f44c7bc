"""Estimates of required and available memory."""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

from raglane.errors import ArgumentError

if TYPE_CHECKING:
    # The help of commands reads this module, and torch takes a second to import.
    from torch import Tensor

# Bytes of a weight.
FLOAT = 4
# Bytes of overhead of a tensor, in a model and in training, measured on thousands of layers of one
# unit.
TENSOR = 1024
TRAINED_TENSOR = 10 * 1024

# The limit and the use of a container in both versions of Linux's control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> float:
    """Return the bytes of memory available to this process; infinity if unknown."""
    return min(_free(), *starmap(_left, _GROUPS))


def check_memory(what: str, needed: int, fix: str, available: float | None = None) -> None:
    """Raise if less memory is available than needed."""
    most = available_memory() if available is None else available
    if needed > most:
        rule = f"at most the {most:,.0f} bytes that are available"
        raise ArgumentError("memory", f"{what}, which needs {needed:,} bytes", rule, fix)


def check_pairs(left: Tensor, right: Tensor, each: int) -> None:
    """Raise if ``each`` bytes per pair of elements do not fit; ``left`` and ``right`` are lengths
    on the host, (B,).
    """
    pairs = int((left * right).sum())
    if each * pairs >= 1 << 30:  # the available memory is read from a file
        check_memory(
            f"{pairs:,} pairs of elements", each * pairs, "pass fewer or shorter sequences at once"
        )


def mapped_bytes() -> int:
    """Return the resident bytes of mapped files; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def is_mapped(address: int, size: int) -> bool:
    """Return True if memory is mapped from a file that this process cannot modify; False below 1
    MiB.
    """
    try:
        lines = Path("/proc/self/maps").read_bytes().splitlines() if size >= 1 << 20 else []
    except OSError:
        return False
    for line in lines:
        addresses, allowed, _, _, inode = line.split()[:5]
        first, end = (int(bound, 16) for bound in addresses.split(b"-"))
        if first <= address < end:
            return (
                address + size <= end and inode != b"0" and (b"w" not in allowed or b"p" in allowed)
            )
    return False


def _free() -> float:
    """Return MemAvailable on Linux, and the physical memory elsewhere."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        )
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return math.inf


def _left(limit: str, current: str, cache: str) -> float:
    """Return the memory that a control group has left; files that were read once can be dropped for
    it.
    """
    most = math.inf  # if there is no such file, or it contains "max"
    folder = Path(limit).parent
    with suppress(OSError, ValueError):
        most = int(Path(limit).read_text())
        statistics = (folder / "memory.stat").read_text().split()
        cached = int(statistics[statistics.index(cache) + 1])
        most = max(most - int((folder / current).read_text()) + cached, 0)
    return most
