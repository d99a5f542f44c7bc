"""Live streams of clients: a conversation over a WebSocket, and sequences over HTTP, within
limits.
"""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from raglane._utils.messages import quote, shorten
from raglane.errors import BusyError, ClosedError, RaglaneError
from raglane.serve.served import Served
from raglane.streams.engine import Engine
from raglane.streams.stream import AsyncStream, Stream

_LONGEST_REASON = 120  # bytes of the reason in a close frame, of 123
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


def error_text(error: Exception) -> str:
    """Return the message of an error for a client."""
    return (
        str(error)
        if isinstance(error, RaglaneError)
        else "internal error; the log of the server shows it"
    )


def short_reason(text: str) -> str:
    """Return the beginning of a text that a close frame has room for."""
    return shorten(text, _LONGEST_REASON).encode()[:_LONGEST_REASON].decode(errors="ignore")


class Clients:
    """Counts the streams of clients and those of the server, and ends them when it closes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self.conversations: set[Any] = set()
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
            fix = "close a stream, or set --max-streams-per-client"
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
        for conversation in [*self.conversations]:
            conversation.drain()
        while self.conversations or self.requests:
            await asyncio.sleep(0.02)


def encoded(stream: Stream) -> str:
    """Return the state of a stream as base64."""
    return base64.b64encode(stream.state()).decode()


def decoded(state: Any) -> bytes:
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


@dataclass
class _Sequence:
    """A sequence over HTTP: its stream, and the lock of its requests, which run one after the
    other.
    """

    client: str
    stream: AsyncStream
    at: int  # the number of frames
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ProtocolSequences:
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
                state = encoded(sequence.stream.stream) if parameters["return_state"] else None
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
        served.rounds.admit()
        self._clients.enter(client)
        try:
            stream = served.streams.stream(None if state is None else decoded(state))
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
