"""The states of all slots: a row per slot in each pool, and a second one where states are renewed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raglane.streams.prepared import Prepared
from raglane.streams.queues import Integers
from raglane.streams.renewal import Renewal
from raglane.streams.stages import digest_of
from raglane.streams.states import packed, unpacked


class StatePools:
    """The states of slots in memory, as bytes, and their renewal."""

    def __init__(self, prepared: Prepared, slots: int, renewal: Renewal | None) -> None:
        self.renewal = renewal
        self.slots = slots
        # The second state of a slot is in a row after those of all slots.
        self.by_stage = prepared.pools(slots if renewal is None else 2 * slots)
        self._pools = [pool for pools in self.by_stage for pool in pools]
        self.ages = np.zeros(slots, np.int64)  # frames since the first state began, to be renewed
        self.accept(prepared)

    def accept(self, prepared: Prepared) -> None:
        """Keep the states for another model with the same ones."""
        self._prepared = prepared
        self.digest = prepared.digest
        self._starts = prepared.starts
        if self.renewal is not None:
            # The second state, and the age of the first one.
            self._starts += (*self._starts, torch.zeros(1, dtype=torch.int64, device="cpu"))
            self.digest = digest_of([], self.digest.hex() + repr(self.renewal))

    def begin(self, slots: Integers) -> None:
        """Write the first states of slots."""
        self._prepared.begin(self.by_stage, torch.from_numpy(slots))

    def begin_second(self, slots: Integers) -> None:
        """Write the first states to the second rows of slots."""
        self.begin(slots + self.slots)

    # Bytes.

    def unpacked(self, state: bytes) -> list[Tensor]:
        """Return the states in bytes; raise if they are not those of a stream of this model."""
        rows = unpacked(state, self._starts, self.digest)
        if self.renewal is not None:
            self.renewal.check_age(int(rows[-1]))
        return rows

    def write(self, slot: int, rows: list[Tensor]) -> None:
        """Write states that :meth:`unpacked` returned to a slot."""
        count = len(self._pools)
        for pool, row in zip(self._pools, rows, strict=False):
            pool[slot] = row
        if self.renewal is not None:
            for pool, row in zip(self._pools, rows[count:], strict=False):
                pool[slot + self.slots] = row
            self.ages[slot] = int(rows[-1])

    def first(self) -> bytes:
        """Return the first states as bytes."""
        return packed(self._starts, self.digest)

    def packed(self, slot: int) -> bytes:
        """Return the states of a slot as bytes."""
        rows = [pool[slot] for pool in self._pools]
        if self.renewal is not None:
            age = int(self.ages[slot])
            is_warming = age > self.renewal.begin
            second = slot + self.slots
            rows += [pool[second] for pool in self._pools] if is_warming else self._prepared.starts
            rows.append(torch.tensor([age], device="cpu"))
        return packed(rows, self.digest)

    # Renewal.

    def renew(self, renewal: Renewal, slots: Integers, lengths: Integers | int) -> None:
        """Count the frames of slots; replace states that are old enough by their second ones."""
        self.ages[slots] += lengths
        old = slots[self.ages[slots] == renewal.most]
        if len(old):
            self.ages[old] = renewal.warm_up
            rows = torch.from_numpy(old)
            for pool in self._pools:
                pool[rows] = pool[rows + self.slots]
