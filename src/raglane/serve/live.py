"""Live streams of clients: a conversation over a WebSocket, and sequences over HTTP, within
limits.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from starlette.websockets import WebSocket, WebSocketDisconnect
from torch import Tensor

from raglane._utils.messages import quote, quote_all
from raglane.errors import ArgumentError, ArgumentTypeError, BusyError, ClosedError, RaglaneError
from raglane.serve.engine import Engine
from raglane.serve.served import Served, to_json
from raglane.serve.streams import AsyncStream, Stream

_KEYS = ("frames", "reset", "state", "end")  # of messages in JSON
_SWEEP = 1.0  # seconds between searches for sequences whose streams were idle


# The codes that close a WebSocket by the status of HTTP; others are 4000 + status.
_CODES = {400: 1008, 413: 1009, 422: 1007, 500: 1011, 503: 1013}


class RefusedError(RaglaneError):
    """An error with a status of HTTP; arguments are those of a message."""

    def __init__(self, status: int, *parts: str) -> None:
        super().__init__(*parts)
        self.status = status


def status_of(error: Exception) -> int:
    """Return the status of HTTP for an error."""
    status = 500
    if isinstance(error, BusyError | ClosedError):
        status = 503
    elif isinstance(error, RaglaneError):
        status = 400
    return getattr(error, "status", status)


def code_of(error: Exception) -> int:
    """Return the code that closes a WebSocket for an error."""
    status = status_of(error)
    return _CODES.get(status, 4000 + status)


class Clients:
    """Counts the streams of clients and those of the server, and ends them when it closes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self.conversations: set[Conversation] = set()
        self.requests = 0  # requests over HTTP that run
        self.is_closing = False

    def check_open(self) -> None:
        """Raise if the server is closing."""
        if self.is_closing:
            raise RefusedError(503, "server", "a closing server", "open", "connect to another one")

    def enter(self, client: str) -> None:
        """Count a stream of a client; raise if it has too many."""
        self.check_open()
        if self._counts[client] >= self._most:
            got = f"{self._most} streams of this client"
            fix = "close a stream, or set --client-streams"
            raise RefusedError(429, "stream", got, "within the limit of a client", fix)
        self._counts[client] += 1

    def leave(self, client: str) -> None:
        """Count a stream of a client that has ended."""
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]

    async def drain(self) -> None:
        """Accept no new work, and return when all queued frames and running requests are
        answered.
        """
        self.is_closing = True
        for conversation in self.conversations:
            conversation.drain()
        while self.conversations or self.requests:
            await asyncio.sleep(0.02)


async def _encoded(stream: Stream) -> str:
    """Return the state of a stream as base64; it waits for a step in another thread."""
    return base64.b64encode(await asyncio.to_thread(stream.state)).decode()


def _decoded(state: Any) -> bytes:
    """Return a state in base64 as bytes."""
    try:
        return base64.b64decode(state, validate=True)
    except (TypeError, ValueError):
        rule = "base64 of a state that this server returned"
        raise RefusedError(400, "state", quote(state), rule, "send it unchanged") from None


def live(served: Served) -> Served:
    """Return the model if it has streams; raise otherwise."""
    if served.engine is None:
        reason = served.reason.rstrip(".")
        text = f"{quote(served.name)} has no live streams: {reason}. POST /predict takes whole sequences."
        raise RefusedError(409, text)
    return served


class Conversation:
    """One live stream over a WebSocket: frames in, results out, in order.

    A client that sends faster than the engine steps, or does not read, is not read from: its
    messages remain in the buffers of TCP, and other streams continue.
    """

    def __init__(
        self,
        socket: WebSocket,
        served: Served,
        options: Mapping[str, Any],
        is_binary: bool,
        most: int,
    ) -> None:
        self._socket = socket
        self._served = served
        self._options = options
        self._is_binary = is_binary
        self._most = most  # bytes of a message
        self._engine = served.streams
        self._own = self._engine.stream()
        self._pushed = self._answered = 0
        self._change = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._is_waiting = self._is_draining = False

    def drain(self) -> None:
        """Read no more messages; answer all queued frames, send the state, and close."""
        self._is_draining = True
        if self._is_waiting and self._reader is not None:
            self._reader.cancel()

    async def run(self) -> tuple[int, str]:
        """Talk until the end; return the code and the reason that close the WebSocket."""
        self._reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        # In the order of errors: the writer's may follow from the reader's.
        tasks = [self._reader, writer]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._is_draining and writer not in done:
                tasks.append(settled := asyncio.create_task(self._settled()))
                done, _ = await asyncio.wait({settled, writer}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done and not task.cancelled():
                    task.result()
            if not self._is_draining:
                return 1000, "end"
            await self._send_state()
            return 1001, "the server is closing"
        except ClosedError as error:
            return (
                (4408, "the stream was idle for too long")
                if self._own.stream.closed
                else (1011, str(error))
            )
        finally:
            for task in tasks:
                # Marks its error as retrieved; the first one has ended the conversation.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
                task.cancel()
            # Before the next await, where this task may be cancelled.
            self._own.stream.close()

    async def _read(self) -> None:
        while not self._is_draining:
            self._is_waiting = True
            received = await self._socket.receive()
            self._is_waiting = False
            if received["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(received.get("code", 1005), received.get("reason"))
            data = received.get("bytes")
            content = received["text"] if data is None else data
            if len(content) > self._most:
                got = f"{len(content):,} bytes"
                rule = f"at most {self._most:,} bytes"
                raise RefusedError(413, "message", got, rule, "send less, or set --max-message")
            if data is not None:
                await self._push(data)
            elif not await self._obey(content):
                return

    async def _obey(self, text: str) -> bool:
        """Act on a message in JSON; return False at the end of the stream."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise RefusedError(422, "message", quote(text), "JSON", "send an object") from None
        if not isinstance(content, dict) or len(content) != 1 or next(iter(content)) not in _KEYS:
            raise RefusedError(
                400,
                "message",
                quote(text),
                f"an object with one of {quote_all(_KEYS)}",
                "correct it",
            )
        ((key, value),) = content.items()
        if key in ("reset", "end") and value is not True:
            raise RefusedError(400, key, quote(value), "true", "send true, or no such message")
        if key == "frames":
            await self._push(value)
            return True
        await self._settled()
        if key == "state" and value is True:
            await self._send_state()
        elif key != "end":
            if key == "reset":
                self._own.stream.reset()
            else:
                # A stream receives a state when it is opened; its slot may be the only free one.
                self._own.stream.close()
                self._own.stream = self._engine.open(_decoded(value))
            self._pushed = self._answered = 0
            await self._send({"reset" if key == "reset" else "restored": True})
        return bool(key != "end")

    async def _send(self, content: Mapping[str, Any]) -> None:
        await self._socket.send_text(to_json(content))

    async def _send_state(self) -> None:
        await self._send({"state": await _encoded(self._own.stream), "at": self._answered})

    async def _push(self, content: Any) -> None:
        """Queue frames when there is room; frames that the engine refuses are answered with an
        error.
        """
        most = self._engine.max_queue
        try:
            for frames in self._served.checked(self._served.frames(content)).split(most):
                while (
                    self._pushed > self._answered and self._own.stream.queued + len(frames) > most
                ):
                    await self._changed()
                self._own.push(frames)
                self._pushed += len(frames)
        except (ArgumentError, ArgumentTypeError) as error:
            await self._send({"error": str(error), "at": self._pushed})

    async def _changed(self) -> None:
        """Wait until results were pulled or sent."""
        self._change.clear()
        await self._change.wait()

    async def _settled(self) -> None:
        """Wait until all queued frames are answered."""
        while self._answered < self._pushed:
            await self._changed()

    async def _write(self) -> None:
        while True:
            rows = await self._own.pull()
            self._change.set()  # there is room for frames
            if self._is_binary:
                await self._socket.send_bytes(rows.contiguous().view(torch.uint8).numpy().tobytes())
            else:
                await self._send(
                    {"at": self._answered, **self._served.answer(rows, **self._options)}
                )
            self._answered += len(rows)
            self._change.set()


@dataclass
class _Sequence:
    """A sequence over HTTP: its stream, and the lock of its requests, which run one after the
    other.
    """

    client: str
    stream: AsyncStream
    at: int  # the number of frames
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sequences:
    """The sequences of the Open Inference Protocol by model and ``sequence_id``."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._open: dict[tuple[str, Any], _Sequence] = {}
        self._swept = 0.0

    async def infer(
        self, served: Served, client: str, frames: Tensor, parameters: Mapping[str, Any]
    ) -> tuple[Tensor, str | None]:
        """Return the results of frames, and the state after them in base64 if it is requested."""
        number = parameters["sequence_id"]
        key = served.name, object() if number is None else number
        sequence = self._sequence_of(key, served, client, parameters)
        rule = "the id of a sequence that began with sequence_start, and was not idle"
        gone = RefusedError(404, "sequence_id", quote(number), rule, "set sequence_start")
        if sequence is None:
            raise gone
        async with sequence.lock:
            if parameters["at"] not in (None, sequence.at):
                got = str(parameters["at"])
                rule = f"{sequence.at}, the number of frames of the sequence"
                raise RefusedError(
                    409, "at", got, rule, "set sequence_start, and state to continue from it"
                )
            try:
                rows = await self._run(sequence.stream, served.streams, frames)
                state = (
                    await _encoded(sequence.stream.stream) if parameters["return_state"] else None
                )
            except BaseException as error:
                # Another request has ended it meanwhile, or the engine, because it was idle.
                ended = isinstance(error, ClosedError) and sequence.stream.stream.closed
                # Frames may have no results, so that the sequence cannot continue.
                self._close(key, sequence)
                if ended:
                    raise gone from error
                raise
            sequence.at += len(frames)
        if number is None or parameters["sequence_end"]:
            self._close(key, sequence)
        return rows, state

    def _sequence_of(
        self, key: tuple[str, Any], served: Served, client: str, parameters: Mapping[str, Any]
    ) -> _Sequence | None:
        """Return the sequence of a request, which may begin it; None if it is not open."""
        is_whole = parameters["sequence_id"] is None
        starts = parameters["sequence_start"]
        if parameters["state"] is not None and not is_whole and not starts:
            rule = "sent with sequence_start, for which it is the first state"
            raise RefusedError(
                400, "state", "a state without sequence_start", rule, "set sequence_start"
            )
        if starts:
            self._close(key)
        if is_whole or starts:
            self._begin(key, served, client, parameters["state"], parameters["at"] or 0)
        sequence = self._open.get(key)
        if sequence is None or not sequence.stream.stream.closed:
            return sequence
        # The engine has closed it, because it was idle.
        self._close(key, sequence)
        return None

    async def _run(self, stream: AsyncStream, engine: Engine, frames: Tensor) -> Tensor:
        prepared = engine.accepts.prepared
        results = [torch.empty(0, *prepared.output_features, dtype=prepared.output_dtype)]
        for chunk in frames.split(engine.max_queue) if len(frames) else ():
            stream.push(chunk)
            count = len(chunk)
            while count:
                results.append(await stream.pull())
                count -= len(results[-1])
        return torch.cat(results)

    def _begin(
        self, key: tuple[str, Any], served: Served, client: str, state: str | None, at: int
    ) -> None:
        if monotonic() > self._swept + _SWEEP:
            self._swept = monotonic()
            for other, sequence in list(self._open.items()):
                if sequence.stream.stream.closed:
                    self._close(other)
        self._clients.enter(client)
        try:
            stream = served.streams.stream(None if state is None else _decoded(state))
        except BaseException:
            self._clients.leave(client)
            raise
        self._open[key] = _Sequence(client, stream, at)

    def _close(self, key: tuple[str, Any], sequence: _Sequence | None = None) -> None:
        """End the sequence of a key, unless another has replaced it."""
        open_sequence = self._open.get(key)
        if open_sequence is not None and sequence in (None, open_sequence):
            del self._open[key]
            open_sequence.stream.stream.close()
            self._clients.leave(open_sequence.client)
