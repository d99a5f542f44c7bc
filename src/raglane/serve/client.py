"""Clients of a server: many live streams over one connection, which is made again when it is lost.
``pip install 'raglane[serve]'`` installs what they need.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote as quoted

import numpy.typing as npt

from raglane._utils.messages import quote, require
from raglane.errors import ArgumentError, ClosedError
from raglane.serve.continued import Remembered, Streams, StreamState, raise_failure

_KEEP = 256
_TRIES = 8  # connections, until the server is considered lost; each waits twice as long
_FIRST_PAUSE = 0.1  # seconds


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

    def __init__(self, client: Client, stream: Remembered) -> None:
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

    def state(self) -> StreamState:
        """Return the state after all pushed frames, also for another server with the model."""
        stream = self._stream
        streams = self._client._streams
        stream.asked = True
        self._client._send(lambda: streams.request(stream))
        while stream.states:
            raise_failure(stream)
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
        self._streams = Streams(keep)
        self._connection: Any = None
        self._open = ExitStack()  # of the connection
        try:
            self._connect(1)
        except BaseException:
            self._open.close()
            raise

    def open(self, state: StreamState | None = None) -> ClientStream:
        """Open a stream, or continue one from what ``state()`` of a stream returned."""
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

    def __init__(self, client: AsyncClient, stream: Remembered) -> None:
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

    async def state(self) -> StreamState:
        """See ``state`` of a stream of :class:`Client`."""
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
        self._streams = Streams(keep)
        self._connection: Any = None
        self._open = AsyncExitStack()  # of the connection
        self._reader: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._later = deque[str | bytes]()  # messages of a new connection

    async def __aenter__(self) -> Self:
        self._change = asyncio.Event()
        self._is_open = asyncio.Event()
        try:
            await self._connect(1)
        except BaseException:
            await self._open.aclose()
            raise
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

    async def open(self, state: StreamState | None = None) -> AsyncClientStream:
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

    async def _changed(self, stream: Remembered) -> None:
        """Wait for a message."""
        raise_failure(stream)
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
