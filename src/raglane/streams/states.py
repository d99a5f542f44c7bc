"""The states of a stream as bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import check_kind
from raglane.errors import CheckpointError

_MAGIC = b"raglane2"
_HEAD = struct.Struct("<8s32sQ")  # the magic bytes, the digest of the model, the CRC of the states


def packed(rows: Iterable[Tensor], digest: bytes) -> bytes:
    """Return states, ``(size,)`` each, as bytes with the digest of their model."""
    data = b"".join([row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows])
    return _HEAD.pack(_MAGIC, digest, zlib.crc32(data)) + data


def unpacked(state: bytes, starts: Sequence[Tensor], expected: bytes) -> list[Tensor]:
    """Return the states in bytes, ``(size,)`` each; raise if they are not those of the model
    with the first states ``starts``.
    """
    check_kind("state", state, bytes, "bytes", "pass the result of Stream.state()")
    ends = np.cumsum([_HEAD.size, *(start.nbytes for start in starts)]).tolist()
    if len(state) != ends[-1] or state[:8] != _MAGIC:
        got = f"{len(state)} bytes"
        rule = f"{ends[-1]} bytes that Stream.state() returned"
        raise CheckpointError("state", got, rule, "pass the state of a stream of this model")
    _, digest, check = _HEAD.unpack_from(state)
    if digest != expected:
        rule = "the state of a stream of the same model, with the same weights"
        raise CheckpointError(
            "state", "the state of another model", rule, "open a stream without state"
        )
    if zlib.crc32(state[_HEAD.size :]) != check:
        got = "a damaged state"
        rule = "the bytes that Stream.state() returned"
        raise CheckpointError(
            "state", got, rule, "pass them unchanged, or open a stream without state"
        )
    buffer = bytearray(state)
    return [
        torch.frombuffer(buffer, dtype=first.dtype, count=len(first), offset=end)
        for first, end in zip(starts, ends, strict=False)
    ]
