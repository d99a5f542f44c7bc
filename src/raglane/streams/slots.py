"""The slots of an engine: what the stream of each is doing, and its frames and results."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from raglane.streams.prepared import Prepared
from raglane.streams.queues import Integers, RowQueues
from raglane.streams.statistics import StepCounts
from raglane.streams.stream import Stream, Waiters

# What a slot is doing: a sum of these, 0 for a free slot.
OPEN = 1  # a stream has it
FRESH = 2  # its first states are still to be written, at the next step
WAITING = 4  # it is in the list of ready slots; it may have lost its frames since
STEPPING = 8  # its frames are in the running step
DROPPED = 16  # it was reset or closed during its step, whose results are discarded

_BETWEEN_STEPS = OPEN | FRESH | WAITING
_NOT_WAITING = OPEN | FRESH


class Slots:
    """All slots: their states, queues and times. The engine's lock is held in every call.

    A slot that is closed during its step is free after it, because the step still writes its
    states; so there are more slots than streams.
    """

    def __init__(self, streams: int, prepared: Prepared, statistics: StepCounts) -> None:
        count = 2 * streams
        self.frames = RowQueues(count, prepared.width, prepared.dtype)
        self.results = RowQueues(count, prepared.output_width, prepared.output_dtype)
        self.open = 0  # the number of open streams
        self.ready: list[int] = []  # those that are WAITING
        self.since = np.zeros(count)  # when the first of its frames was pushed, or its last step
        self.waiters = Waiters()
        self._touched = np.zeros(count)  # the last push or pull
        # One memory: bytes are faster for one slot, the array for many.
        self._doing = bytearray(count)
        self._all = np.frombuffer(self._doing, np.uint8)
        self.streams: list[Stream | None] = [None] * count
        self._free: list[int] = []
        self._used = 0  # slots from here on were never used
        self._has_dropped = False  # a slot of the running step is DROPPED
        self._statistics = statistics

    # Streams.

    def take(self, is_fresh: bool) -> int:
        """Return a free slot, which is OPEN from now on."""
        slot = self._free.pop() if self._free else self._used
        self._used = max(self._used, slot + 1)
        self.open += 1
        self._doing[slot] |= OPEN | FRESH if is_fresh else OPEN
        self._touched[slot] = time.perf_counter()
        self._statistics.opened += 1
        return slot

    def is_fresh(self, slot: int) -> bool:
        """Return True if the first states of a slot are still to be written."""
        return bool(self._doing[slot] & FRESH)

    def restart(self, slot: int) -> int:
        """Begin a new sequence; return the number of frames and results that were discarded."""
        self._doing[slot] |= FRESH
        self._drop(slot)
        return self.frames.drop(slot) + self.results.drop(slot)

    def restart_all(self) -> None:
        """Begin new sequences in all slots, between two steps, with the frames that wait."""
        self._all[self._all & OPEN > 0] |= FRESH

    def close(self, slot: int, reason: str = "a closed stream") -> None:
        """Close the stream of a slot."""
        stream = self.streams[slot]
        assert stream is not None  # noqa: S101
        stream._end(reason)
        self.streams[slot] = None
        self.open -= 1
        self.frames.drop(slot)
        self.results.drop(slot)
        self._drop(slot)
        self._doing[slot] &= WAITING | STEPPING | DROPPED
        # Other slots are free at once: more streams may be opened and closed during a step than
        # there are slots.
        if not self._doing[slot] & STEPPING:
            self._free.append(slot)
        self.waiters.wake((slot,))

    def _drop(self, slot: int) -> None:
        """Discard the results of the running step, if the slot is in it."""
        if self._doing[slot] & STEPPING:
            self._doing[slot] |= DROPPED
            self._has_dropped = True

    def idle(self, seconds: float) -> list[Stream]:
        """Return the streams without a push or pull for some time."""
        limit = time.perf_counter() - seconds
        late = np.flatnonzero(self._touched[: self._used] < limit).tolist()
        return [stream for slot in late if (stream := self.streams[slot]) is not None]

    # Frames and results.

    def push(self, slot: int, rows: npt.NDArray[Any]) -> None:
        """Queue frames of one slot; bfloat16 as int16."""
        now = self._touched[slot] = time.perf_counter()
        if not rows.shape[0]:
            return
        if self.frames.counts.item(slot):
            self._statistics.late += 1
        else:
            self.since[slot] = now
        self.frames.append(slot, rows)
        doing = self._doing[slot]
        if not doing & WAITING:
            self._doing[slot] = doing | WAITING
            self.ready.append(slot)

    def push_many(self, slots: Integers, lengths: Integers | int, rows: Tensor) -> None:
        """Queue ``lengths`` frames, each at least 1 (an int is 1), of each of different slots."""
        is_late = self.frames.counts[slots] > 0
        now = time.perf_counter()
        self.frames.extend(slots, lengths, rows)
        self._touched[slots] = now
        self.since[slots[~is_late]] = now
        self._statistics.late += int(np.count_nonzero(is_late))
        new = slots[self._all[slots] & WAITING == 0]
        self._all[new] |= WAITING
        self.ready += new.tolist()

    def pull(self, slot: int, most: int | None) -> tuple[Tensor, int]:
        """Remove at most ``most`` results of a slot; return them, and the number that it had."""
        ready = self.results.counts.item(slot)
        count = ready if most is None else min(most, ready)
        if count:
            self._touched[slot] = time.perf_counter()
        return self.results.take_one(slot, count), ready

    def pull_many(self, slots: Integers, lengths: Integers | int) -> Tensor:
        """Remove ``lengths`` results (an int is 1) of each of different slots; return them in
        order.
        """
        self._touched[slots] = time.perf_counter()
        if not isinstance(lengths, int):
            slots = slots[lengths > 0]
            lengths = lengths[lengths > 0]
        count = len(slots) if isinstance(lengths, int) else int(lengths.sum())
        rows = self.results.empty(count)
        if count:
            self.results.take(slots, lengths, rows)
        return rows

    def statistics(self) -> dict[str, int]:
        """Return the numbers of frames and results now."""
        counts = self.frames.counts[: self._used]
        return {
            "ready": int(np.count_nonzero(counts)),
            "queued": len(self.frames),
            "results": len(self.results),
            "longest": int(counts.max(initial=0)),
        }

    # Steps.

    def step_one(self) -> tuple[int, bool]:
        """Begin a step of the only ready slot, with its only frame; return the slot, and if it is
        FRESH.
        """
        slot = self.ready.pop()
        was_fresh = self._doing[slot] & FRESH
        self._doing[slot] = OPEN | STEPPING
        return slot, bool(was_fresh)

    def step_many(self, slots: Integers, is_stepping: Any, is_left: Any) -> Integers:
        """Begin a step of ready slots, some of which have frames after it; return the FRESH slots
        of the step.
        """
        doing = self._all[slots]
        after = np.where(is_stepping, OPEN | STEPPING, doing & _NOT_WAITING)
        self.ready.clear()
        if is_left.any():
            after[is_left] |= WAITING
            self.ready += slots[is_left].tolist()
        self._all[slots] = after
        return slots[is_stepping & (doing & FRESH > 0)]

    def finish_step(self, slots: Integers) -> npt.NDArray[np.bool_] | slice:
        """End the step of slots; return which of them were neither closed nor reset."""
        if not self._has_dropped:
            if len(slots) == 1:
                self._doing[slots.item()] &= _BETWEEN_STEPS
            else:
                self._all[slots] &= _BETWEEN_STEPS
            return slice(None)
        self._has_dropped = False
        doing = self._all[slots]
        self._free += slots[doing & OPEN == 0].tolist()
        self._all[slots] = doing & _BETWEEN_STEPS
        return doing & DROPPED == 0
