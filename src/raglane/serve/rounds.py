"""The rounds of a server: the event loop owns the engine. All frames that have arrived are pushed,
one step runs, and all results are sent, without a thread or a task per message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane.errors import BusyError
from raglane.streams.engine import Engine
from raglane.streams.queues import Integers
from raglane.streams.stream import Stream

SPACING = 0.004
"""The least seconds between two rounds: frames that arrive within it share a step. The first frame
after a pause does not wait.
"""

_RECENT = 1.0  # seconds after which a lag is no longer one


class Form(Protocol):
    """How results are written; streams with the same form are encoded together."""

    def encode(self, rows: Tensor) -> Callable[[int, int], Any]:
        """Return a function of the contents of rows from a begin to an end."""
        ...


class Owner(Protocol):
    """The connection that a lane belongs to."""

    form: Form
    can_write: bool

    def answer(self, lane: Lane, content: Any, count: int) -> None:
        """Take the results of ``count`` frames of a lane."""
        ...

    def finish(self) -> None:
        """End a round in which :meth:`answer` was called."""
        ...

    def fail(self, error: Exception) -> None:
        """End the connection, because a step has failed."""
        ...

    def expired(self, lane: Lane) -> None:
        """End a lane whose stream was idle."""
        ...


class Lane:
    """One live stream of a connection, and its frames that have not reached the engine."""

    __slots__ = (
        "answered",
        "at",
        "is_listed",
        "number",
        "owner",
        "parts",
        "rest",
        "stream",
        "todo",
        "waiting",
    )

    def __init__(self, owner: Owner, stream: Stream, number: int) -> None:
        self.owner = owner
        self.stream = stream
        self.number = number  # the client's name of the stream
        self.parts: list[npt.NDArray[Any]] = []  # checked frames, ``(n, width)``
        self.waiting = 0  # the number of frames in parts
        self.is_listed = False
        self.at = 0  # the number of frames that were accepted
        self.answered = 0
        self.rest = b""  # samples that are no whole frame yet
        self.todo = deque[Any]()  # messages that wait for the results of earlier ones

    @property
    def is_settled(self) -> bool:
        """True if all accepted frames are answered."""
        return self.answered == self.at

    def begin(self, at: int = 0) -> None:
        """Count from ``at`` frames on."""
        self.at = at
        self.answered = at


class Rounds:
    """Steps an engine in the event loop."""

    def __init__(self, engine: Engine, period: float | None = None) -> None:
        self.engine = engine
        self._period = period
        # From the first frame of a round to its last result, seconds; each round has the weight of
        # an eighth.
        self._lag = 0.0
        self._asked = 0.0
        self._lanes: list[Lane | None] = [None] * (2 * engine.max_streams)
        self._arrived: list[Lane] = []
        self._handle: asyncio.Handle | None = None
        self._began = 0.0  # the last round
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Take over the engine, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.adopt(self)

    def stop(self) -> None:
        """Give the engine back."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None
        if self._loop is not None:
            self.engine.release()
        self._loop = None

    # The engine calls these in place of those of an event.

    def is_set(self) -> bool:
        """True if a round will run."""
        return self._handle is not None

    def set(self) -> None:
        """Run a round soon; any thread may call this."""
        loop = self._loop
        if loop is not None and self._handle is None:
            loop.call_soon_threadsafe(self.wake)

    # Overload.

    @property
    def lag(self) -> float:
        """The mean time from the first frame of a round to its last result, seconds; 0 after a pause."""
        return self._lag if perf_counter() - self._began < _RECENT else 0.0

    @property
    def is_overloaded(self) -> bool:
        """True if frames come faster than rounds."""
        return self._period is not None and self.lag > self._period

    def admit(self) -> None:
        """Raise if another stream would make all streams late."""
        if self.is_overloaded:
            got = f"results that take {1e3 * self.lag:.0f} ms"
            rule = f"faster than a frame per {1e3 * self._period:g} ms"  # type: ignore[operator]
            raise BusyError("server", got, rule, "connect later, or to another one")

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the engine, whose queues are those of the lanes too."""
        statistics = self.engine.stats()
        waiting = [lane for lane in self._arrived if lane.waiting and lane.stream._slot >= 0]
        counts = self.engine.queued(np.array([lane.stream._slot for lane in waiting], np.int64))
        lengths = [
            lane.waiting + count for lane, count in zip(waiting, counts.tolist(), strict=True)
        ]
        statistics["longest"] = max([statistics["longest"], *lengths])
        statistics["queued"] += sum(lane.waiting for lane in waiting)
        return {**statistics, "lag_seconds": self.lag}

    # Lanes.

    def open(self, owner: Owner, number: int = 0, state: bytes | None = None) -> Lane:
        """Open a lane, see :meth:`Engine.open`; raise if the server is overloaded."""
        self.admit()
        lane = Lane(owner, self.engine.open(state), number)
        self._lanes[lane.stream._slot] = lane
        return lane

    def restore(self, lane: Lane, state: bytes, at: int) -> None:
        """Continue a lane from a state; its slot may be the only one."""
        self._leave(lane)
        lane.stream = self.engine.open(state)
        self._lanes[lane.stream._slot] = lane
        lane.begin(at)

    def close(self, lane: Lane) -> None:
        """Close a lane, and discard its frames."""
        self._leave(lane)
        lane.parts.clear()
        lane.todo.clear()
        lane.waiting = 0

    def _leave(self, lane: Lane) -> None:
        slot = lane.stream._slot
        if slot >= 0 and self._lanes[slot] is lane:
            self._lanes[slot] = None
        lane.stream.close()

    def arrive(self, lane: Lane, rows: npt.NDArray[Any]) -> None:
        """Take checked frames ``(n, width)``, n at least 1, for the next rounds."""
        count = rows.shape[0]
        lane.parts.append(rows)
        lane.waiting += count
        lane.at += count
        if not lane.is_listed:
            lane.is_listed = True
            self._arrived.append(lane)
        if self._handle is None:
            self.wake()

    # Rounds.

    def wake(self) -> None:
        """Run a round as soon as the spacing allows it."""
        if self._handle is not None or self._loop is None:
            return
        self._asked = perf_counter()
        wait = self._began + SPACING - self._asked
        if wait > 0:
            self._handle = self._loop.call_later(wait, self._round)
        else:
            self._handle = self._loop.call_soon(self._round)

    def _round(self) -> None:
        self._handle = None
        self._began = perf_counter()
        try:
            self._push()
            count = self.engine.step()
            if count:
                self._deliver(self.engine.stepped)
        except Exception as error:
            self._fail(error)
            return
        self._lag += (perf_counter() - self._asked - self._lag) / 8
        if count and (self._arrived or self.engine.has_frames) and self._handle is None:
            # What a step left over does not wait for others.
            assert self._loop is not None  # noqa: S101
            self._asked = self._began
            self._handle = self._loop.call_soon(self._round)

    def _push(self) -> None:
        """Queue the frames that have arrived, as far as there is room."""
        lanes = [lane for lane in self._arrived if lane.waiting and lane.stream._slot >= 0]
        for lane in self._arrived:
            lane.is_listed = False
        self._arrived = []
        if not lanes:
            return
        slots = np.array([lane.stream._slot for lane in lanes])
        most = self.engine.max_queue
        rooms = (most - self.engine.queued(slots)).tolist()
        parts: list[npt.NDArray[Any]] = []
        lengths: list[int] = []
        for lane, room in zip(lanes, rooms, strict=True):
            if lane.waiting <= room:
                lengths.append(lane.waiting)
                parts += lane.parts
                lane.parts = []
                lane.waiting = 0
                continue
            lengths.append(room)
            lane.waiting -= room
            lane.is_listed = True
            self._arrived.append(lane)
            while room:
                first = lane.parts[0]
                parts.append(first[:room])
                if first.shape[0] > room:
                    lane.parts[0] = first[room:]
                else:
                    del lane.parts[0]
                room -= parts[-1].shape[0]
        counts = np.array(lengths)
        if not counts.all():
            slots = slots[counts > 0]
            counts = counts[counts > 0]
        if len(slots):
            rows = torch.from_numpy(np.concatenate(parts))
            if self.engine.accepts.prepared.dtype is torch.bfloat16:
                rows = rows.view(torch.bfloat16)
            self.engine.push_rows(slots, counts, rows)

    def _deliver(self, slots: Integers) -> None:
        lanes = self._lanes
        self.deliver(
            [
                lane
                for slot in slots.tolist()
                # An engine may have closed an idle stream, and opened another one in its slot.
                if (lane := lanes[slot]) is not None
                and lane.stream._slot == slot
                and lane.owner.can_write
            ]
        )

    def deliver(self, lanes: Iterable[Lane]) -> None:
        """Send the results of lanes, together for those of one form."""
        groups: dict[Form, list[Lane]] = {}
        for lane in lanes:
            groups.setdefault(lane.owner.form, []).append(lane)
        owners: dict[Owner, None] = {}
        for form, members in groups.items():
            rows, counts = self.engine.pull_rows(np.array([lane.stream._slot for lane in members]))
            contents = form.encode(rows)
            begin = 0
            for lane, count in zip(members, counts.tolist(), strict=True):
                if count:
                    end = begin + count
                    lane.owner.answer(lane, contents(begin, end), count)
                    lane.answered += count
                    begin = end
                    owners[lane.owner] = None
        for owner in owners:
            owner.finish()

    def catch_up(self, lanes: Iterable[Lane]) -> None:
        """Send results that wait, after their connection could not be written to."""
        self.deliver([lane for lane in lanes if lane.stream._slot >= 0])
        self.wake()

    def expire(self) -> None:
        """Close idle streams, and tell their owners."""
        if self.engine.idle is not None and self.engine.works and self.engine.expire():
            for slot, lane in enumerate(self._lanes):
                if lane is not None and lane.stream.closed:
                    self._lanes[slot] = None
                    lane.owner.expired(lane)

    def _fail(self, error: Exception) -> None:
        owners = {lane.owner: None for lane in self._lanes if lane is not None}
        for owner in owners:
            owner.fail(error)
