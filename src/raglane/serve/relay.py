"""Conversations over the WebSockets of any server of ASGI, e.g. that of Ray or of a test. They need
more time per message than those of :mod:`raglane.serve.wire`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from raglane.serve.conversations import Conversation
from raglane.serve.live import RefusedError
from raglane.serve.wire import PROTOCOL, refuse

_MOST = 64  # messages that wait to be sent, until results wait in the engine


class _Relay:
    """A link over ASGI, see :class:`raglane.serve.conversations.Link`."""

    def __init__(self, socket: WebSocket) -> None:
        self.conversation: Conversation | None = None
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._socket = socket
        self._queue = asyncio.Queue[str | bytes | tuple[int, str]]()
        self._is_full = False

    def send(self, content: str | bytes) -> None:
        """Queue a message."""
        self._queue.put_nowait(content)
        if not self._is_full and self._queue.qsize() >= _MOST and self.conversation is not None:
            self._is_full = True
            self.conversation.writing(False)

    def close(self, code: int, reason: str) -> None:
        """Close the connection after the messages."""
        self._queue.put_nowait((code, reason))

    def read(self, is_wanted: bool) -> None:
        """Continue to read messages, or pause."""
        if is_wanted:
            self.may_read.set()
        else:
            self.may_read.clear()

    async def write(self) -> None:
        """Send what is queued, until the close."""
        while True:
            content = await self._queue.get()
            if isinstance(content, tuple):
                await self._socket.close(*content)
                return
            if isinstance(content, str):
                await self._socket.send_text(content)
            else:
                await self._socket.send_bytes(content)
            if self._is_full and self._queue.empty():
                self._is_full = False
                assert self.conversation is not None  # noqa: S101
                self.conversation.writing(True)

    async def listen(self, most: int) -> None:
        """Pass messages on, until the client closes."""
        while True:
            await self.may_read.wait()
            received = await self._socket.receive()
            if received["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(received.get("code", 1005), received.get("reason"))
            data = received.get("bytes")
            content = received["text"] if data is None else data
            if self.conversation is None:
                continue
            if len(content) > most:
                got = f"{len(content):,} bytes"
                rule = f"at most {most:,} bytes"
                fix = "send less, or set --max-message"
                self.conversation.fail(RefusedError(413, "message", got, rule, fix))
            else:
                self.conversation.receive(content)


async def relay(server: Any, socket: WebSocket) -> None:
    """Hold a conversation over a WebSocket of ASGI."""
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None)
    link = _Relay(socket)
    try:
        link.conversation = server.converse(socket.url.path, socket, link)
    except Exception as error:
        refuse(link, error)
    tasks = [
        asyncio.create_task(link.write()),
        asyncio.create_task(link.listen(server.max_message)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            with suppress(WebSocketDisconnect, RuntimeError):
                task.result()
    finally:
        for task in tasks:
            # Marks its error as retrieved.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            task.cancel()
        if link.conversation is not None:
            link.conversation.end()
