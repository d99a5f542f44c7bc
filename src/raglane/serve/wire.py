"""WebSockets of live streams without a task per message: a protocol of uvicorn, which passes each
connection that asks for an upgrade to it. The frames of WebSocket are those of ``websockets``.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from contextlib import suppress
from typing import Any

from starlette.requests import HTTPConnection
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from websockets.exceptions import InvalidState
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from raglane._utils.messages import quote, quote_all
from raglane.serve.conversations import CLOSING, Conversation
from raglane.serve.live import code_of, error_text, short_reason
from raglane.serve.served import to_json

log = logging.getLogger("raglane.serve")

PROTOCOL = "raglane"  # of WebSockets, next to which browsers send a token
PING_EVERY = 20.0  # seconds
_PONG_WITHIN = 60.0  # seconds; a client that is not read from cannot answer
_CLOSE_WITHIN = 10.0  # seconds in which a client answers a close


class Socket(asyncio.Protocol):
    """One connection; see :class:`raglane.serve.conversations.Link`."""

    def __init__(self, server: Any, *, config: Any, server_state: Any, **_: Any) -> None:
        self._server = server
        self._config = config
        self._connections = server_state.connections
        self._conn = ServerProtocol(max_size=server.max_message, logger=log)
        self._conversation: Conversation | None = None
        self._pieces: list[bytes] = []  # of a message in several frames
        self._is_text = False
        self._can_write = True
        self._is_paused = False
        self._pinged: float | None = None  # when the ping was sent that is not answered
        self._timer: asyncio.TimerHandle | None = None

    # What the event loop calls.

    def connection_made(self, transport: Any) -> None:
        """Take a connection whose request is read."""
        self._transport = transport
        self._connections.add(self)
        self._server.sockets.add(self)

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        conn = self._conn
        conn.receive_data(data)
        events: list[Any] = conn.events_received()
        for event in events:
            if isinstance(event, Request):
                self._greet(event)
            elif event.opcode is Opcode.BINARY and event.fin:
                if self._conversation is not None:
                    self._conversation.receive(event.data)
            else:
                self._frame(event)
        out = conn.data_to_send()  # pongs, and answers to mistakes of the protocol
        if out:
            self._write(out)

    def eof_received(self) -> None:
        """Close: a client sends a close frame first."""
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """End the conversation."""
        self._connections.discard(self)
        self._server.sockets.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._conversation is not None:
            self._conversation.end()

    def pause_writing(self) -> None:
        """Let results wait in the engine."""
        self._can_write = False
        if self._conversation is not None:
            self._conversation.writing(False)

    def resume_writing(self) -> None:
        """Send what waits."""
        self._can_write = True
        if self._conversation is not None:
            self._conversation.writing(True)

    def shutdown(self) -> None:
        """Close, when uvicorn ends."""
        if self._conversation is not None:
            self._conversation.stop()
        else:
            self.close(1001, CLOSING)
        self._transport.close()

    def beat(self, now: float) -> None:
        """Send a ping, or close a connection that does not answer."""
        if self._conn.state is not State.OPEN:
            return
        if self._pinged is None:
            self._pinged = now
            self._conn.send_ping(b"")
            self._write(self._conn.data_to_send())
        elif now - self._pinged > _PONG_WITHIN:
            self._transport.abort()

    # What the conversation calls.

    def send(self, content: str | bytes) -> None:
        """Send a message, in one frame."""
        if self._conn.state is not State.OPEN:
            return
        # Frames of a server have no mask.
        kind = 0x82
        if isinstance(content, str):
            kind = 0x81
            content = content.encode()
        size = len(content)
        if size < 126:
            head = struct.pack("!BB", kind, size)
        elif size < 2**16:
            head = struct.pack("!BBH", kind, 126, size)
        else:
            head = struct.pack("!BBQ", kind, 127, size)
        self._transport.write(head + content)

    def close(self, code: int, reason: str) -> None:
        """Send a close frame, and close when the client has answered."""
        with suppress(InvalidState):
            self._conn.send_close(code, reason)
            self._write(self._conn.data_to_send())
            self._wait_for_close()
        self.read(True)

    def read(self, is_wanted: bool) -> None:
        """Continue to read messages, or pause."""
        if is_wanted == self._is_paused and not self._transport.is_closing():
            self._is_paused = not is_wanted
            (self._transport.resume_reading if is_wanted else self._transport.pause_reading)()

    # Frames.

    def _write(self, parts: list[bytes]) -> None:
        for data in parts:
            # A client that does not read gets no pongs, which would need memory.
            if data and (self._can_write or self._conn.state is not State.OPEN):
                self._transport.write(data)
        if self._conn.state is not State.OPEN and self._conn.handshake_exc is None:
            if self._conn.close_rcvd is not None and self._conn.close_sent is not None:
                self._transport.close()
            else:
                self._wait_for_close()

    def _wait_for_close(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CLOSE_WITHIN, self._transport.abort)

    def _frame(self, event: Any) -> None:
        """Act on a frame of text, on a part of a message, or on one of control."""
        opcode = event.opcode
        if opcode is Opcode.PONG:
            self._pinged = None
        if opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return
        if opcode is not Opcode.CONT:
            self._is_text = opcode is Opcode.TEXT
        self._pieces.append(event.data)
        if not event.fin:
            return
        data = b"".join(self._pieces)
        content: str | bytes = data
        self._pieces = []
        if self._is_text:
            try:
                content = data.decode()
            except UnicodeDecodeError:
                self._conn.fail(1007, "text that is not UTF-8")
                return
        if self._conversation is not None:
            self._conversation.receive(content)

    def _greet(self, request: Request) -> None:
        """Answer the handshake, and begin a conversation."""
        conn = self._conn
        path, _, query = request.path.partition("?")
        paths = self._server.conversations
        headers = [
            (name.lower().encode("latin-1"), text.encode("latin-1"))
            for name, text in request.headers.raw_items()
        ]
        protocols = [
            name.strip()
            for text in request.headers.get_all("Sec-WebSocket-Protocol")
            for name in text.split(",")
        ]
        if path not in paths:
            text = f"path must be one of {quote_all(paths)}, got {quote(path)}\n"
            conn.send_response(conn.reject(404, text))
        else:
            response = conn.accept(request)
            if response.status_code == 101 and PROTOCOL in protocols:
                conn.subprotocol = Subprotocol(PROTOCOL)
                response.headers["Sec-WebSocket-Protocol"] = PROTOCOL
            conn.send_response(response)
        self._write(conn.data_to_send())
        if conn.state is not State.OPEN:
            self._transport.close()
            return
        peer = self._transport.get_extra_info("peername")
        scope: dict[str, Any] = {
            "type": "websocket",
            "scheme": "ws",
            "path": path,
            "query_string": query.encode("latin-1", "replace"),
            "headers": headers,
            "subprotocols": protocols,
            "client": tuple(peer[:2]) if isinstance(peer, tuple) else None,
        }
        try:
            connection = HTTPConnection(self._behind_proxy(scope))
            self._conversation = self._server.converse(path, connection, self)
        except Exception as error:
            refuse(self, error)

    def _behind_proxy(self, scope: dict[str, Any]) -> dict[str, Any]:
        """Return the scope with the client that a trusted proxy names."""
        if not self._config.proxy_headers:
            return scope
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
            seen.append(scope)

        wrapped: Any = ProxyHeadersMiddleware(app, trusted_hosts=self._config.forwarded_allow_ips)
        with suppress(StopIteration):
            wrapped(scope, None, None).send(None)
        return seen[0]


def refuse(link: Any, error: Exception) -> None:
    """Send the message of an error, and close."""
    if not hasattr(error, "status") and code_of(error) == 1011:
        log.error("a stream failed", exc_info=error)
    text = error_text(error)
    link.send(to_json({"error": text}))
    link.close(code_of(error), short_reason(text))
