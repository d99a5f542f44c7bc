"""Times and sizes in words."""

from __future__ import annotations


def seconds_in_words(seconds: float) -> str:
    """Return a time with two or three digits and its unit."""
    for unit, size, digits in (("h", 3600, 1), ("min", 60, 1), ("s", 1, 2)):
        if seconds >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.1f} ms" if milliseconds >= 10 else f"{milliseconds:.2f} ms"


def bytes_in_words(count: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, size in (("GB", 2**30), ("MB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{max(1, round(count / 2**10))} KB"
