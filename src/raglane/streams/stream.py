"""Streams of an engine, for threads and for asyncio: a step wakes the tasks that wait for its
results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor

from raglane.errors import ClosedError


class Stream:
    """One live sequence of an engine; made by :meth:`raglane.serve.Engine.open`. Its methods may be
    called by any thread.
    """

    __slots__ = ("_closed_as", "_engine", "_slot")

    def __init__(self, engine: Any, slot: int) -> None:
        self._engine = engine
        self._slot = slot
        self._closed_as = ""

    def __repr__(self) -> str:
        return f"Stream({'closed' if self.closed else f'{self.queued} frames queued, {self.ready} results'})"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_slot(self) -> int:
        if self._slot < 0:
            raise ClosedError("stream", self._closed_as, "an open stream", "open another one")
        return self._slot

    def _end(self, reason: str) -> None:
        self._slot = -1
        self._closed_as = reason

    @property
    def closed(self) -> bool:
        """True after :meth:`close`, or after the engine closed an idle stream."""
        return self._slot < 0

    @property
    def queued(self) -> int:
        """The number of frames that wait for a step."""
        return int(self._engine._slots.frames.counts[self._open_slot()])

    @property
    def ready(self) -> int:
        """The number of results that were not pulled."""
        return int(self._engine._slots.results.counts[self._open_slot()])

    def push(self, frames: Any) -> None:
        """Queue frames; they are copied.

        Args:
            frames: ``(n, *features)``, n at least 0, of the dtype of the model: a tensor, an array
                or lists. For a run, numbers in the units of its data, or tokens.

        Raises:
            BusyError: the frames do not fit the queue; none was added.
            ClosedError: the stream is closed.
            ShapeError, ArgumentTypeError, ArgumentError: the frames have another shape or dtype, or
                contain NaN.
        """
        self._engine._push(self, frames)

    def pull(self, max_items: int | None = None) -> Tensor:
        """Return the results of steps, ``(n, *features)``, one per frame, and remove them from the
        queue.

        Args:
            max_items: the largest number of results; None for all.

        Raises:
            ClosedError: the stream is closed.
            ArgumentError, ArgumentTypeError: ``max_items`` is not a whole number of at least 0.
        """
        return self._engine._pull(self, max_items)

    def state(self) -> bytes:
        """Return the state after the last step, for :meth:`raglane.serve.Engine.open`; it does not contain queued
        frames.

        Raises:
            ClosedError: the stream is closed, or a step of the engine has raised.
        """
        return self._engine._state_of(self)

    def reset(self) -> int:
        """Begin a new sequence; return the number of frames and results that were discarded.

        Raises:
            ClosedError: the stream is closed, or a step of the engine has raised.
        """
        return self._engine._reset(self)

    def close(self) -> None:
        """Close the stream, and discard its frames and results; a closed one stays closed."""
        self._engine._close(self)


class Waiters:
    """The futures that wait for results, by slot. The engine's lock is held in every call."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, slot: int, future: asyncio.Future[None]) -> None:
        """Add a future, which the next :meth:`wake` of the slot completes."""
        # Without those of tasks that were cancelled.
        waiting = [other for other in self._waiting.get(slot, ()) if not other.done()]
        self._waiting[slot] = [*waiting, future]

    def wake(self, slots: Iterable[int] | None) -> None:
        """Complete the futures of slots, all for None: one call to each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for slot in list(self._waiting) if slots is None else slots:
            for future in self._waiting.pop(slot, ()):
                by_loop.setdefault(future.get_loop(), []).append(future)
        for loop, futures in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_complete, futures)


def _complete(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class AsyncStream:
    """A stream for asyncio, made by :meth:`raglane.serve.Engine.stream`: ``push`` does not wait, ``pull`` waits
    for results.

    Example:
        >>> from raglane.serve import Engine
        >>> async def first(engine):
        ...     async with engine.stream() as stream:
        ...         stream.push(torch.randn(2, 3))
        ...         return (await stream.pull()).shape
        >>> with Engine(rl.nn.GRU(3, 4).eval(), max_streams=10) as engine:
        ...     asyncio.run(first(engine))
        torch.Size([2, 4])
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._engine = stream._engine

    def __repr__(self) -> str:
        return f"Async{self.stream!r}"

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stream.close()

    def push(self, frames: Any) -> None:
        """See :meth:`raglane.streams.Stream.push`."""
        self.stream.push(frames)

    async def pull(self, max_items: int | None = None) -> Tensor:
        """Return at least one result; see :meth:`raglane.streams.Stream.pull`."""
        while True:
            future = asyncio.get_running_loop().create_future()
            rows: Tensor = self._engine._pull(self.stream, max_items, future)
            if rows.shape[0]:
                return rows
            await future

    async def __aiter__(self) -> AsyncIterator[Tensor]:
        while True:
            yield await self.pull()
