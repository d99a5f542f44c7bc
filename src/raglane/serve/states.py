"""The states of all streams: a pool for each state, and the bytes of one stream's states."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from raglane._utils.checks import check_kind
from raglane._utils.messages import message
from raglane.errors import CheckpointError
from raglane.serve.prepare import Prepared

_MAGIC, _HEAD = b"raglane1", struct.Struct("<8s32s")


class States:
    """Pools ``(slots, size)``, in which a slot begins with the first states of the model."""

    def __init__(self, prepared: Prepared, slots: int) -> None:
        self._prepared, self._slots = prepared, slots
        self.pools = prepared.pools(slots)
        self.is_fresh = np.zeros(slots, bool)  # the first states are still to be written, at the next step

    def replace(self, prepared: Prepared, restart: bool) -> None:
        """Continue or begin again with another model."""
        self._prepared = prepared
        if restart:
            self.pools = prepared.pools(self._slots)
            self.is_fresh[:] = True

    def begin(self, places: Tensor) -> None:
        """Write the first states to slots."""
        self.is_fresh[places.numpy()] = False
        for pool, start in zip(self.pools, self._prepared.starts, strict=True):
            pool[places] = start

    def packed(self, slot: int) -> bytes:
        """Return the states in a slot as bytes, with the digest of the model."""
        rows = self._prepared.starts if self.is_fresh[slot] else [pool[slot] for pool in self.pools]
        parts = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows]
        return _HEAD.pack(_MAGIC, self._prepared.digest) + b"".join(parts)

    def unpacked(self, state: bytes) -> list[Tensor]:
        """Return the states in bytes, ``(size,)`` each; raise if they are not those of the model."""
        check_kind("state", state, bytes, "bytes", "pass the result of Stream.state()")
        starts = self._prepared.starts
        ends = np.cumsum([_HEAD.size, *(start.nbytes for start in starts)]).tolist()
        if len(state) != ends[-1] or state[:8] != _MAGIC:
            got, rule = f"{len(state)} bytes", f"{ends[-1]} bytes that Stream.state() returned"
            raise CheckpointError(message("state", got, rule, "pass the state of a stream of this model"))
        if _HEAD.unpack_from(state)[1] != self._prepared.digest:
            rule = "the state of a stream of the same model, with the same weights"
            raise CheckpointError(message("state", "the state of another model", rule, "open a stream without state"))
        own = bytearray(state)
        return [
            torch.frombuffer(own, dtype=start.dtype, count=len(start), offset=end)
            for start, end in zip(starts, ends, strict=False)
        ]

    def write(self, slot: int, rows: list[Tensor] | None) -> None:
        """Set the states in a slot; None for the first ones."""
        self.is_fresh[slot] = rows is None
        for pool, row in zip(self.pools, rows or (), strict=rows is not None):
            pool[slot] = row
