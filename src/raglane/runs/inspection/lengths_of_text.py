"""Lengths alone, one per line of a text file: ten millions of them in about a second."""

from __future__ import annotations

import codecs
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import check_readable, check_text, data_error
from raglane.data.jobs import Progress
from raglane.errors import DataError, quote
from raglane.runs.inspection.contents import Contents, data_name


SUFFIX = ".txt"
"""The suffix of such a file; a folder of text files is something else."""

_CHUNK = 1 << 22
# Digits of a length: more make no sequence that a machine can hold.
_DIGITS = 9
_RULE = f"one length per line, a whole number from 0 to {10**_DIGITS - 1:,}"
_FIX = "write how many elements each sequence has, and nothing else"

_Lengths = npt.NDArray[np.int64]


def read(path: Path, progress: Progress) -> Contents:
    r"""Read the lengths of sequences from a text file, one per line; empty lines are passed over."""
    check_readable(path)
    size = path.stat().st_size
    parts: list[_Lengths] = []
    line, done, rest = 1, 0, b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            is_first, done = done == 0, done + len(chunk)
            if is_first:
                if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    check_text(path, chunk)
                chunk = chunk.removeprefix(codecs.BOM_UTF8)
            # A line that the chunk cuts waits for the next one.
            block, newline, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > _CHUNK:
                raise _error(path, rest, line)
            if newline:
                parts.append(_numbers(path, block, line))
                line += block.count(b"\n") + 1
            progress.done(min(1.0, done / max(size, 1)))
    parts.append(_numbers(path, rest, line))
    lengths = np.concatenate(parts)
    if len(lengths) == 0:
        raise data_error(path, "no length", _RULE, _FIX)
    note = "a file of lengths: of features and labels it says nothing"
    return Contents(data_name(path), path, lengths, "lengths", notes=(note,))


def _numbers(path: Path, block: bytes, first: int) -> _Lengths:
    """The numbers of whole lines, of which the first has this number."""
    if b"\r" in block:
        # The end of the last line may have been cut from it.
        block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
    signs = np.frombuffer(block + b"\n", np.uint8)
    ends = np.flatnonzero(signs == ord("\n"))
    widths = np.diff(ends, prepend=-1) - 1
    digits = signs - np.uint8(ord("0"))  # what is no digit wraps to 10 and above
    if np.count_nonzero(digits > 9) > len(ends) or widths.max() > _DIGITS:
        return _one_by_one(path, block, first)
    numbers = np.zeros(len(ends), np.int64)
    for place in range(int(widths.max())):
        has = widths > place
        numbers[has] += digits[ends[has] - 1 - place].astype(np.int64) * 10**place
    return numbers[widths > 0]


def _one_by_one(path: Path, block: bytes, first: int) -> _Lengths:
    """The numbers of lines that hold more than digits: blanks around them, or what is wrong."""
    found = []
    for line, written in enumerate(block.split(b"\n"), first):
        text = written.strip()
        if not text:
            continue
        if not text.isdigit() or len(text.lstrip(b"0")) > _DIGITS:
            raise _error(path, text, line)
        found.append(int(text))
    return np.array(found, dtype=np.int64)


def _error(path: Path, text: bytes, line: int) -> DataError:
    return data_error(path, quote(text[:1000].decode(errors="backslashreplace")), _RULE, _FIX, line)
