"""Clients of a server: many live streams over one connection, which is made again when it is lost.
``pip install 'raglane[serve]'`` installs what they need.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote as quoted

import numpy as np
import numpy.typing as npt

from raglane._utils.checks import check_count
from raglane._utils.messages import quote, require
from raglane.errors import ArgumentError, ArgumentTypeError, BusyError, ClosedError, ShapeError

_RECORD = struct.Struct("<II")
_DTYPES = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8"}
_KEEP = 256
_TRIES = 8  # connections, until the server is considered lost; each waits twice as long
_FIRST_PAUSE = 0.1  # seconds


class State(NamedTuple):
    """The state of a stream after ``at`` frames, for :meth:`Client.open`."""

    content: bytes
    at: int


class _Stream:
    """A stream as its client remembers it: the last state, and the frames since then."""

    def __init__(self, number: int, state: State | None) -> None:
        self.number = number
        self.state = state
        self.since = deque[npt.NDArray[Any]]()  # frames after the state
        self.pushed = self.received = self.at  # frames, and results
        self.results = deque[npt.NDArray[Any]]()
        self.skip = 0  # results that were received over an earlier connection
        self.states = 0  # that were requested
        self.asked = False  # by a caller
        self.error: Exception | None = None
        self.is_closed = False

    @property
    def at(self) -> int:
        return 0 if self.state is None else self.state.at


class _Streams:
    """The streams of a connection, without the connection."""

    def __init__(self, keep: int) -> None:
        self.keep = check_count("keep", keep)
        self.streams: dict[int, _Stream] = {}
        self.width = 0
        self._next = 0

    def greet(self, text: str | bytes) -> None:
        """Read the first message of the server."""
        facts = json.loads(text)
        if "error" in facts:
            raise ClosedError("server", facts["error"], "a server with this model", "correct it")
        names = {key: facts[key]["datatype"] for key in ("frames", "results")}
        if not set(names.values()) <= {*_DTYPES}:
            raise ArgumentError("model", f"one of {names}", "of FP32, FP64 or INT64", "convert it")
        self.dtype = np.dtype(_DTYPES[names["frames"]])
        self.shape = tuple(facts["frames"]["shape"])
        self.result_dtype = np.dtype(_DTYPES[names["results"]])
        self.result_shape = tuple(facts["results"]["shape"])
        self.width = math.prod(self.result_shape) * self.result_dtype.itemsize

    def open(self, state: State | None) -> tuple[_Stream, str]:
        if state is not None and not isinstance(state, State):
            raise ArgumentTypeError(
                "state", quote(state), "a State, or None", "pass the result of state()"
            )
        stream = self.streams[self._next] = _Stream(self._next, state)
        self._next += 1
        return stream, self._opening(stream)

    def _opening(self, stream: _Stream) -> str:
        message: dict[str, Any] = {"stream": stream.number, "open": True}
        if stream.state is not None:
            content = base64.b64encode(stream.state.content).decode()
            message |= {"open": content, "at": stream.state.at}
        return json.dumps(message)

    def again(self) -> list[str | bytes]:
        """Return what continues all streams over a new connection."""
        messages: list[str | bytes] = []
        for stream in self.streams.values():
            stream.states = int(stream.asked)
            stream.skip = stream.received - stream.at
            messages.append(self._opening(stream))
            if stream.since:
                messages.append(self._record(stream, np.concatenate(list(stream.since))))
            if stream.asked:
                messages.append(json.dumps({"stream": stream.number, "state": True}))
        return messages

    def push(self, stream: _Stream, frames: Any) -> list[str | bytes]:
        _raise(stream)
        try:
            rows = np.array(frames, self.dtype)
        except (TypeError, ValueError) as error:
            rule = f"numbers of {self.dtype}"
            raise ArgumentTypeError("frames", quote(frames), rule, "convert them") from error
        if rows.shape[1:] != self.shape or not rows.ndim:
            rule = f"shape ({', '.join(map(str, ('n', *self.shape)))})"
            raise ShapeError("frames", f"shape {rows.shape}", rule, "reshape them")
        messages: list[str | bytes] = [self._record(stream, rows)]
        stream.since.append(rows)
        before = stream.pushed
        stream.pushed += len(rows)
        if stream.pushed // self.keep > before // self.keep:
            messages += self.request(stream)
        return messages

    @staticmethod
    def _record(stream: _Stream, rows: npt.NDArray[Any]) -> bytes:
        return _RECORD.pack(stream.number, len(rows)) + rows.tobytes()

    @staticmethod
    def request(stream: _Stream) -> list[str | bytes]:
        """Return the request of a state."""
        stream.states += 1
        return [json.dumps({"stream": stream.number, "state": True})]

    def receive(self, content: str | bytes) -> None:
        """Note the results or the answer in a message."""
        if isinstance(content, str):
            self._note(json.loads(content))
            return
        at = 0
        while at < len(content):
            number, count = _RECORD.unpack_from(content, at)
            at += _RECORD.size
            end = at + count * self.width
            rows = np.frombuffer(content[at:end], self.result_dtype)
            at = end
            stream = self.streams.get(number)
            if stream is None:
                continue
            rows = rows.reshape(count, *self.result_shape)
            again = min(stream.skip, count)
            stream.skip -= again
            if count > again:
                stream.received += count - again
                stream.results.append(rows[again:])

    def _note(self, answer: dict[str, Any]) -> None:
        stream = self.streams.get(answer.get("stream", -1))
        if stream is None:
            if "error" in answer and "stream" not in answer:
                for other in self.streams.values():
                    other.error = ClosedError("server", answer["error"], "working", "see its log")
            return
        if "error" in answer:
            kind = BusyError if answer.get("code") in (1013, 4429) else ClosedError
            stream.error = kind("stream", answer["error"], "accepted by the server", "correct it")
        elif "state" in answer:
            stream.state = State(base64.b64decode(answer["state"]), answer["at"])
            after = stream.pushed - stream.at  # frames after the state
            have = sum(map(len, stream.since))
            while stream.since and have - len(stream.since[0]) >= after:
                have -= len(stream.since.popleft())
            if have > after:
                stream.since[0] = stream.since[0][have - after :]
            stream.states = max(0, stream.states - 1)
        elif "closed" in answer:
            stream.is_closed = True
            del self.streams[stream.number]

    def taken(self, stream: _Stream) -> npt.NDArray[Any] | None:
        """Return the results that were received, and remove them; None without any."""
        if stream.results:
            rows = np.concatenate(list(stream.results))
            stream.results.clear()
            return rows
        _raise(stream)
        return None


def _raise(stream: _Stream) -> None:
    if stream.error is not None:
        raise stream.error
    if stream.is_closed:
        raise ClosedError("stream", "a closed stream", "an open stream", "open another one")


def _address(address: str, model: str | None) -> str:
    """Return the address of the streams of a server."""
    scheme, _, rest = address.rstrip("/").partition("://")
    kinds = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in kinds or not rest:
        rule = "an address with http, https, ws or wss"
        fix = "pass e.g. http://127.0.0.1:8000"
        raise ArgumentError("address", quote(address), rule, fix)
    query = "" if model is None else f"?model={quoted(model)}"
    return f"{kinds[scheme]}://{rest}/streams{query}"


def _settings(token: str | None) -> dict[str, Any]:
    require("websockets", "serve")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # Frames of numbers hardly become smaller.
    return {"additional_headers": headers, "max_size": None, "compression": None}


def _no_server(address: str, error: Exception) -> ClosedError:
    got = f"no answer from {address} ({error})"
    return ClosedError("server", got, "a running server", "start it, or correct the address")


class ClientStream:
    """One live stream of a :class:`Client`; made by :meth:`Client.open`."""

    def __init__(self, client: Client, stream: _Stream) -> None:
        self._client = client
        self._stream = stream

    def push(self, frames: Any) -> None:
        """Send frames ``(n, *features)``, n at least 0."""
        self._client._send(lambda: self._client._streams.push(self._stream, frames))

    def pull(self) -> npt.NDArray[Any]:
        """Return the results ``(n, *features)`` of the next frames, n at least 1; wait for them.

        Raises:
            ClosedError: the stream was closed or refused, or the server does not answer.
            ArgumentError: no frame was pushed whose result is missing.
        """
        streams = self._client._streams
        while (rows := streams.taken(self._stream)) is None:
            if self._stream.received >= self._stream.pushed:
                rule = "called after push of a frame whose result is missing"
                raise ArgumentError("pull", "no frame without a result", rule, "push frames first")
            self._client._receive()
        return rows

    def state(self) -> State:
        """Return the state after all pushed frames, also for another server with the model."""
        stream = self._stream
        streams = self._client._streams
        stream.asked = True
        self._client._send(lambda: streams.request(stream))
        while stream.states:
            _raise(stream)
            self._client._receive()
        stream.asked = False
        assert stream.state is not None  # noqa: S101
        return stream.state

    def close(self) -> None:
        """Close the stream; results that were not pulled are lost."""
        stream = self._stream
        if not stream.is_closed and stream.error is None:
            message = json.dumps({"stream": stream.number, "close": True})
            self._client._send(lambda: [message])
        stream.is_closed = True
        self._client._streams.streams.pop(stream.number, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """Live streams of a server over one connection, for one thread.

    If the connection is lost, the client connects again, here or, behind a balancer, at another
    server, and continues each stream from the last state that it has kept: no result is missing,
    and none comes twice.

    Args:
        address: that of the server, as ``http://127.0.0.1:8000``.
        model: the name of a model; None for the only one.
        token: the token of the server.
        keep: a state is requested after this many frames of a stream; the frames since then are
            kept in memory.

    Raises:
        ClosedError: the server does not answer, or refuses the connection.
        ArgumentError, ArgumentTypeError: another argument is invalid.

    Example:
        >>> client = rl.serve.Client("http://127.0.0.1:8000")  # doctest: +SKIP
        >>> with client, client.open() as stream:  # doctest: +SKIP
        ...     stream.push(np.zeros((3, 40), np.float32))
        ...     print(stream.pull().shape)
    """

    def __init__(
        self, address: str, model: str | None = None, *, token: str | None = None, keep: int = _KEEP
    ) -> None:
        self._address = _address(address, model)
        self._settings = _settings(token)
        self._streams = _Streams(keep)
        self._connection: Any = None
        self._open = ExitStack()  # of the connection
        self._connect(1)

    def open(self, state: State | None = None) -> ClientStream:
        """Open a stream, or continue one from the state of :meth:`ClientStream.state`."""
        stream, message = self._streams.open(state)
        self._send(lambda: [message])
        return ClientStream(self, stream)

    def close(self) -> None:
        """Close the connection and all streams."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, tries: int = _TRIES) -> None:
        import time

        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        for count in range(tries):
            if count:
                time.sleep(_FIRST_PAUSE * 2 ** (count - 1))
            try:
                self._open.close()
                connection = connect(self._address, **self._settings)
                self._connection = self._open.enter_context(connection)
                self._streams.greet(self._connection.recv())
                for message in self._streams.again():
                    self._connection.send(message)
                return
            except (OSError, WebSocketException) as error:
                last = error
        raise _no_server(self._address, last) from last

    def _send(self, make: Callable[[], list[str | bytes]]) -> None:
        from websockets.exceptions import ConnectionClosed

        messages = make()
        try:
            for message in messages:
                self._connection.send(message)
        except ConnectionClosed:
            self._connect()  # it sends what was noted

    def _receive(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._streams.receive(self._connection.recv())
        except ConnectionClosed:
            self._connect()


class AsyncClientStream:
    """One live stream of an :class:`AsyncClient`; see :class:`ClientStream`."""

    def __init__(self, client: AsyncClient, stream: _Stream) -> None:
        self._client = client
        self._stream = stream

    async def push(self, frames: Any) -> None:
        """See :meth:`ClientStream.push`."""
        await self._client._send(self._client._streams.push(self._stream, frames))

    async def pull(self) -> npt.NDArray[Any]:
        """See :meth:`ClientStream.pull`; here frames may be pushed meanwhile."""
        streams = self._client._streams
        while (rows := streams.taken(self._stream)) is None:
            await self._client._changed(self._stream)
        return rows

    async def state(self) -> State:
        """See :meth:`ClientStream.state`."""
        stream = self._stream
        stream.asked = True
        await self._client._send(self._client._streams.request(stream))
        while stream.states:
            await self._client._changed(stream)
        stream.asked = False
        assert stream.state is not None  # noqa: S101
        return stream.state

    async def close(self) -> None:
        """See :meth:`ClientStream.close`."""
        stream = self._stream
        if not stream.is_closed and stream.error is None:
            await self._client._send([json.dumps({"stream": stream.number, "close": True})])
        stream.is_closed = True
        self._client._streams.streams.pop(stream.number, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """Live streams of a server over one connection, for asyncio; see :class:`Client`.

    Example:
        >>> async def first(address, frames):
        ...     async with rl.serve.AsyncClient(address) as client:
        ...         async with await client.open() as stream:
        ...             await stream.push(frames)
        ...             return await stream.pull()
        >>> asyncio.run(first("http://127.0.0.1:8000", frames))  # doctest: +SKIP
    """

    def __init__(
        self, address: str, model: str | None = None, *, token: str | None = None, keep: int = _KEEP
    ) -> None:
        self._address = _address(address, model)
        self._settings = _settings(token)
        self._streams = _Streams(keep)
        self._connection: Any = None
        self._open = AsyncExitStack()  # of the connection
        self._reader: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._later = deque[str | bytes]()  # messages of a new connection

    async def __aenter__(self) -> Self:
        self._change = asyncio.Event()
        self._is_open = asyncio.Event()
        await self._connect(1)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        await self._open.aclose()

    async def open(self, state: State | None = None) -> AsyncClientStream:
        """See :meth:`Client.open`."""
        stream, message = self._streams.open(state)
        await self._send([message])
        return AsyncClientStream(self, stream)

    async def _connect(self, tries: int = _TRIES) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        for count in range(tries):
            if count:
                await asyncio.sleep(_FIRST_PAUSE * 2 ** (count - 1))
            try:
                await self._open.aclose()
                connection = connect(self._address, **self._settings)
                self._connection = await self._open.enter_async_context(connection)
                self._streams.greet(await self._connection.recv())
                self._later = deque(self._streams.again())
                while self._later:
                    await self._connection.send(self._later[0])
                    self._later.popleft()
                self._is_open.set()
                return
            except (OSError, WebSocketException) as error:
                last = error
        raise _no_server(self._address, last) from last

    async def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                try:
                    self._streams.receive(await self._connection.recv())
                except ConnectionClosed:
                    self._is_open.clear()
                    await self._connect()
                self._notify()
        except Exception as error:
            self._failure = error
            self._is_open.set()
            self._notify()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _changed(self, stream: _Stream) -> None:
        """Wait for a message."""
        _raise(stream)
        if self._failure is not None:
            raise self._failure
        await self._change.wait()

    async def _send(self, messages: list[str | bytes]) -> None:
        from websockets.exceptions import ConnectionClosed

        if self._failure is not None:
            raise self._failure
        if not self._is_open.is_set():
            # After those that a new connection begins with, which are all that was noted before.
            self._later += messages if self._later else ()
            return
        with suppress(ConnectionClosed):
            for message in messages:
                await self._connection.send(message)
