"""Real-time clients of a server over WebSockets, in a process of their own, and a server that only
echoes.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import struct
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RECORD = struct.Struct("<II")
POOL = 64  # different frames
_MASK = bytes(4)  # allowed, and a client needs no time for it


class Load(NamedTuple):
    """What clients send: each of ``streams`` a frame per ``period`` seconds."""

    port: int
    path: str
    streams: int
    per_socket: int  # above 1: many streams of a connection
    seconds: float
    period: float
    width: int  # numbers of a frame
    seed: int
    processor: int


class Facts(NamedTuple):
    """What clients have seen."""

    sent: int
    answered: int
    latencies: npt.NDArray[np.float32]  # seconds, from the time at which a frame is pushed
    answers: list[npt.NDArray[np.float32]]  # of each stream
    load: float  # the share of a processor that the clients took
    begin: float  # of the measured time
    end: float


def frames_of(seed: int, width: int) -> npt.NDArray[np.float32]:
    """Return the frames that clients send in turn, beginning with that of their number."""
    return np.random.default_rng(seed).standard_normal((POOL, width), np.float32)


def _masked(payload: bytes) -> bytes:
    if len(payload) < 2**16:
        return struct.pack("!BBH", 0x82, 0x80 | 126, len(payload)) + _MASK + payload
    return struct.pack("!BBQ", 0x82, 0x80 | 127, len(payload)) + _MASK + payload


class _Socket:
    """One connection: its messages, and the frames that are not answered."""

    def __init__(self, load: Load, numbers: range, pool: list[bytes]) -> None:
        self.numbers = numbers
        self.is_many = load.per_socket > 1
        self.link = socket.create_connection(("127.0.0.1", load.port))
        self.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = [f"GET {load.path} HTTP/1.1", f"Host: localhost:{load.port}"]
        lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        lines += [f"Sec-WebSocket-Key: {'A' * 22}==", "", ""]
        self.link.sendall("\r\n".join(lines).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.link.recv(1 << 16)
        assert b" 101 " in head, head
        self.left = head.partition(b"\r\n\r\n")[2]
        if self.is_many:
            for number in numbers:
                text = b'{"stream": %d, "open": true}' % number
                head = struct.pack("!BB", 0x81, 0x80 | len(text)) + _MASK
                self.link.sendall(head + text)
        self.pool = pool
        self.count = 0  # messages
        self.waiting = deque[tuple[float, int]]()
        self.link.setblocking(False)
        self.out = b""

    def push(self, now: float) -> int:
        """Send a frame of each stream; return their number."""
        if self.is_many:
            parts = []
            for number in self.numbers:
                parts += [RECORD.pack(number, 1), self.pool[(number + self.count) % POOL]]
            message = _masked(b"".join(parts))
        else:
            # The pool has whole messages.
            message = self.pool[(self.numbers[0] + self.count) % POOL]
        self.count += 1
        self.waiting.append((now, len(self.numbers)))
        self.out += message
        self.flush()
        return len(self.numbers)

    def flush(self) -> None:
        while self.out:
            try:
                self.out = self.out[self.link.send(self.out) :]
            except BlockingIOError:
                return

    def pull(self) -> list[bytes]:
        """Return the binary messages that have come."""
        try:
            data = self.left + self.link.recv(1 << 18)
        except BlockingIOError:
            return []
        messages = []
        at = 0
        while len(data) - at >= 2:
            size = data[at + 1]
            begin = at + 2
            if size == 126:
                begin = at + 4
                size = int.from_bytes(data[at + 2 : begin], "big")
            elif size == 127:
                begin = at + 10
                size = int.from_bytes(data[at + 2 : begin], "big")
            if begin > len(data) or begin + size > len(data):
                break
            if data[at] == 0x82:
                messages.append(data[begin : begin + size])
            elif data[at] == 0x89:  # a ping, which a client must answer
                self.out += bytes([0x8A, 0x80 | size]) + _MASK + data[begin : begin + size]
            else:
                assert data[at] == 0x81, (data[at], data[begin : begin + size])
                assert b"error" not in data[begin : begin + size], data[begin : begin + size]
            at = begin + size
        self.left = data[at:]
        return messages


def drive(load: Load, pipe: Any) -> None:
    """Be the clients; send a word when the measured time begins, and :class:`Facts`."""
    os.sched_setaffinity(0, {load.processor})
    frames = frames_of(load.seed, load.width)
    pool = [frame.tobytes() for frame in frames]
    if load.per_socket == 1:
        pool = [_masked(frame) for frame in pool]
    sockets = [
        _Socket(load, range(first, min(load.streams, first + load.per_socket)), pool)
        for first in range(0, load.streams, load.per_socket)
    ]
    selector = selectors.EpollSelector()
    for connection in sockets:
        selector.register(connection.link, selectors.EVENT_READ, connection)
    time.sleep(0.3)
    rng = np.random.default_rng(load.seed)
    begin = time.perf_counter() + 0.05
    due = deque(
        sorted(
            (
                (begin + load.period * share, place)
                for place, share in enumerate(rng.random(len(sockets)))
            ),
        )
    )
    end = begin + load.seconds
    answers: list[list[bytes]] = [[] for _ in range(load.streams)]
    latencies: list[float] = []
    sent = answered = 0
    pipe.send("begin")
    busy = time.process_time()
    while True:
        now = time.perf_counter()
        if now >= end and (answered >= sent or now > end + 10):
            break
        while now < end and due[0][0] <= now:
            when, place = due.popleft()
            sent += sockets[place].push(now)
            due.append((when + load.period, place))
        wait = due[0][0] - time.perf_counter() if now < end else 0.05
        # Coarse ticks cost clients less time of a processor.
        for key, _ in selector.select(max(0.0005, min(wait, 0.05))):
            connection = key.data
            messages = connection.pull()
            now = time.perf_counter()
            for message in messages:
                if connection.is_many:
                    at = 0
                    counted = 0
                    while at < len(message):
                        number, count = RECORD.unpack_from(message, at)
                        stop = at + RECORD.size + 4 * count
                        answers[number].append(message[at + RECORD.size : stop])
                        at = stop
                        counted += count
                else:
                    counted = len(message) // 4
                    answers[connection.numbers[0]].append(message)
                answered += counted
                while counted:
                    pushed, left = connection.waiting[0]
                    taken = min(left, counted)
                    latencies += [now - pushed] * taken
                    counted -= taken
                    if taken == left:
                        connection.waiting.popleft()
                    else:
                        connection.waiting[0] = (pushed, left - taken)
            if connection.out:
                connection.flush()
    busy = time.process_time() - busy
    span = time.perf_counter() - begin
    arrays = [np.frombuffer(b"".join(parts), np.float32) for parts in answers]
    pipe.send(
        Facts(
            sent,
            answered,
            np.array(latencies, np.float32),
            arrays,
            busy / span,
            begin,
            begin + span,
        )
    )


def echo(pipe: Any, processor: int) -> None:
    """Answer each message with its first bytes, over the socket layer of the server."""
    import uvloop
    from websockets.frames import Opcode
    from websockets.http11 import Request
    from websockets.server import ServerProtocol

    os.sched_setaffinity(0, {processor})

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self.protocol = ServerProtocol()

        def data_received(self, data: bytes) -> None:
            self.protocol.receive_data(data)
            for event in self.protocol.events_received():
                if isinstance(event, Request):
                    self.protocol.send_response(self.protocol.accept(event))
                elif event.opcode is Opcode.BINARY:
                    self.protocol.send_binary(event.data[:4])
            for part in self.protocol.data_to_send():
                self.transport.write(part)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    uvloop.run(run())
