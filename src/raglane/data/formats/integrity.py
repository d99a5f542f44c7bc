"""Checksums of converted folders: a CRC-32 (ISO 3309, of zlib) per block of a file, compared as the block is read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane.data.formats.base import data_error, open_error
from raglane.errors import DataError

# Bytes of a block: few enough that the first row of a shard is there at once, and so many that the checksums take
# 1/32768 of the data.
_BLOCK = 1 << 18
_SEAL = "checksum"


def damaged(path: Path, detail: str = "") -> DataError:
    """The error for a file of a converted folder that is not as it was written, or not there."""
    rule = "the file that raglane convert wrote"
    if not path.exists():
        fix = "put it back, or delete the folder and convert the data again"
        return data_error(path, "no such file", rule, fix)
    got = "a damaged file" + (f": {detail}" if detail else "")
    return data_error(path, got, rule, "delete the folder, and convert the data again")


def checksums(path: Path) -> str:
    """The CRC-32 of each block of a file, 8 hexadecimal digits each."""
    with path.open("rb") as file:
        return "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(_BLOCK), b""))


def verify_file(path: Path, expected: str) -> None:
    """Refuse a file that is not as it was written."""
    try:
        found = checksums(path)
    except FileNotFoundError as error:
        raise damaged(path) from error
    except OSError as error:
        raise open_error(path, error) from error
    if found != expected:
        raise damaged(path, "its checksum differs")


def seal(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description with a checksum of its content."""
    return {**description, _SEAL: _sum_of(description)}


def is_sealed(description: Mapping[str, Any]) -> bool:
    """Whether a description is as :func:`seal` made it."""
    return description.get(_SEAL) == _sum_of({name: value for name, value in description.items() if name != _SEAL})


def _sum_of(description: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(description, sort_keys=True).encode()):08x}"


class Blocks:
    """The blocks of a file that is mapped into memory, each verified before its first use."""

    def __init__(self, path: Path, content: memoryview, expected: str) -> None:
        self._path, self._content = path, content
        count = -(-len(content) // _BLOCK)
        if len(expected) != 8 * count:
            raise damaged(path, f"{len(content):,} bytes")
        try:
            self._expected = np.frombuffer(bytes.fromhex(expected), dtype=">u4")
        except ValueError as error:
            raise damaged(path, "no checksum") from error
        self._pending = np.ones(count, dtype=bool)
        self._left = count

    def verify(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Verify the blocks that hold some ranges of bytes."""
        if not self._left:
            return
        holds = ends > starts
        firsts, lasts = starts[holds] // _BLOCK, (ends[holds] - 1) // _BLOCK
        counts = lasts - firsts + 1
        # The blocks of all ranges, one after the other.
        blocks = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        for block in np.unique(blocks[self._pending[blocks]]).tolist():
            begin = block * _BLOCK
            if zlib.crc32(self._content[begin : begin + _BLOCK]) != self._expected[block]:
                raise damaged(self._path, f"the checksum of the bytes from {begin:,} on differs")
            self._pending[block] = False
            self._left -= 1

    def verify_outside(self, start: int, end: int) -> None:
        """Verify all but a range of bytes, which is verified as it is read."""
        self.verify(np.array([0, end]), np.array([start, len(self._content)]))
