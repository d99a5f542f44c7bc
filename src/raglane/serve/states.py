"""The states of a stream as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import check_kind
from raglane.errors import CheckpointError
from raglane.serve.prepare import Prepared

_MAGIC, _HEAD = b"raglane1", struct.Struct("<8s32s")


def packed(rows: Iterable[Tensor], prepared: Prepared) -> bytes:
    """Return states, ``(size,)`` each, as bytes with the digest of their model."""
    parts = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows]
    return _HEAD.pack(_MAGIC, prepared.digest) + b"".join(parts)


def unpacked(state: bytes, prepared: Prepared) -> list[Tensor]:
    """Return the states in bytes, ``(size,)`` each; raise if they are not those of the model."""
    check_kind("state", state, bytes, "bytes", "pass the result of Stream.state()")
    starts = prepared.starts
    ends = np.cumsum([_HEAD.size, *(start.nbytes for start in starts)]).tolist()
    if len(state) != ends[-1] or state[:8] != _MAGIC:
        got, rule = f"{len(state)} bytes", f"{ends[-1]} bytes that Stream.state() returned"
        raise CheckpointError("state", got, rule, "pass the state of a stream of this model")
    if _HEAD.unpack_from(state)[1] != prepared.digest:
        rule = "the state of a stream of the same model, with the same weights"
        raise CheckpointError("state", "the state of another model", rule, "open a stream without state")
    own = bytearray(state)
    return [
        torch.frombuffer(own, dtype=part.dtype, count=len(part), offset=end)
        for part, end in zip(starts, ends, strict=False)
    ]
