"""Streams over the server's own sockets: many per connection, clients that connect again, mistakes of
the protocol, and the checks of hosts, origins, tokens and limits.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import websockets.sync.client as websockets
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import State as Connected
from websockets.streams import StreamReader

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ClosedError, ShapeError
from raglane.serve import AsyncClient, Client, Engine
from raglane.serve.app import create_app
from raglane.serve.continued import Streams, StreamState
from raglane.serve.wire import Socket
from servers import served

RECORD = struct.Struct("<II")


def _layer() -> rl.nn.LSTM:
    torch.manual_seed(0)
    return rl.nn.LSTM(3, 8).eval()


def _engine(**options: Any) -> Engine:
    return Engine(_layer(), **{"max_streams": 50, **options})


def _offline(values: torch.Tensor) -> torch.Tensor:
    return _engine().run(rl.Ragged([values])).values


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app({"layer": _engine(max_queue=16)}, max_message=100_000)


@pytest.fixture(scope="module")
def where(app: Any) -> Iterator[str]:
    with served(app) as where:
        yield where


def _record(number: int, values: torch.Tensor) -> bytes:
    return RECORD.pack(number, len(values)) + values.numpy().tobytes()


class _Many:
    """A connection with many streams, as a person would write one from the page."""

    def __init__(self, where: str, **options: Any) -> None:
        address = f"ws://{where}/streams"
        self.socket = websockets.connect(address, compression=None, **options).__enter__()
        self.facts = json.loads(self.socket.recv())
        self.rows: dict[int, list[torch.Tensor]] = {}
        self.notes: list[dict[str, Any]] = []

    def say(self, **message: Any) -> dict[str, Any]:
        self.socket.send(json.dumps(message))
        count = len(self.notes)
        while len(self.notes) == count:
            self.listen()
        return self.notes[-1]

    def listen(self) -> None:
        content = self.socket.recv(timeout=30)
        if isinstance(content, str):
            self.notes.append(json.loads(content))
            return
        at = 0
        while at < len(content):
            number, count = RECORD.unpack_from(content, at)
            end = at + RECORD.size + count * 32
            rows = np.frombuffer(content[at + RECORD.size : end], np.float32).reshape(count, 8)
            self.rows.setdefault(number, []).append(torch.tensor(rows))
            at = end

    def results(self, number: int, count: int) -> torch.Tensor:
        while sum(map(len, self.rows.get(number, []))) < count:
            self.listen()
        return torch.cat(self.rows.pop(number))


def test_many_streams_of_a_connection(where: str) -> None:
    many = _Many(where)
    assert many.facts == {
        "model": "layer",
        "frames": {"shape": [3], "datatype": "FP32"},
        "results": {"shape": [8], "datatype": "FP32"},
    }
    values = {0: torch.randn(9, 3), 7: torch.randn(40, 3), 2**32 - 1: torch.randn(1, 3)}
    for number in values:
        assert many.say(stream=number, open=True) == {"stream": number, "open": True, "at": 0}
    for begin in range(0, 40, 5):
        parts = [_record(number, rows[begin : begin + 5]) for number, rows in values.items()]
        many.socket.send(b"".join(parts))  # some with no frames
    for number, rows in values.items():
        assert torch.equal(many.results(number, len(rows)), _offline(rows))
    state = many.say(stream=7, state=True)
    assert (state["stream"], state["at"]) == (7, 40)
    assert many.say(stream=7, reset=True) == {"stream": 7, "reset": True}
    many.socket.send(_record(7, values[0]))
    assert torch.equal(many.results(7, 9), _offline(values[0]))
    assert many.say(stream=7, close=True) == {"stream": 7, "closed": True, "at": 9}
    assert many.say(stream=7, open=state["state"], at=40)["at"] == 40
    more = torch.randn(3, 3)
    many.socket.send(_record(7, more))
    assert torch.equal(many.results(7, 3), _offline(torch.cat([values[7], more]))[40:])
    many.socket.close()


def test_a_state_is_that_after_all_frames_before_it(where: str) -> None:
    """Also of frames that take many steps."""
    values = torch.randn(151, 3)
    for at in (1, 100, 150):
        many = _Many(where)
        many.say(stream=1, open=True)
        many.socket.send(_record(1, values[:at]))
        note = many.say(stream=1, state=True)
        assert note["at"] == at
        assert torch.equal(many.results(1, at), _offline(values[:at]))
        many.say(stream=2, open=note["state"], at=at)
        many.socket.send(_record(2, values[at:]))
        assert torch.equal(many.results(2, 151 - at), _offline(values)[at:])
        many.socket.close()


def test_mistakes_of_one_stream_leave_the_others(where: str) -> None:
    many = _Many(where)
    many.say(stream=1, open=True)
    many.say(stream=2, open=True)
    values = torch.randn(2, 3)
    bad = torch.full((1, 3), torch.nan)
    many.socket.send(_record(1, values) + _record(2, bad) + _record(3, values))
    while len(many.notes) < 4:
        many.listen()
    assert (
        many.notes[2].pop("error").startswith("frames must be numbers other than NaN, got NaN in")
    )
    assert many.notes[2] == {"stream": 2, "at": 0, "dropped": 1}
    assert "stream must be a stream that was opened, got 3" in many.notes[3].pop("error")
    assert many.notes[3] == {"stream": 3, "dropped": 2}
    assert torch.equal(many.results(1, 2), _offline(values))
    for message, words in (
        ({"stream": 1, "open": True}, "stream must be a new number, got 1, which is open"),
        ({"stream": 4, "state": True}, "stream must be an open stream, got 4"),
        ({"stream": 4, "open": "AAAA"}, "state must be"),
        ({"stream": 4, "open": "?"}, "state must be base64"),
        ({"stream": 4, "open": True, "at": -1}, "at must be"),
    ):
        assert words in many.say(**message)["error"]
    many.socket.send(_record(1, values))
    assert torch.equal(many.results(1, 2), _offline(torch.cat([values, values]))[2:])
    many.socket.close()


@pytest.mark.parametrize(
    "message",
    [
        b"abc",
        RECORD.pack(1, 1) + bytes(11),
        RECORD.pack(1, 2**32 - 1),
        "{",
        "[]",
        '{"open": true}',
        '{"stream": -1, "open": true}',
        '{"stream": 4294967296, "open": true}',
        '{"stream": true, "open": true}',
        '{"stream": 1, "open": true, "close": true}',
        '{"stream": 1, "open": true, "other": 1}',
        '{"stream": 1}',
    ],
)
def test_malformed_messages_close_the_connection(where: str, message: str | bytes) -> None:
    many = _Many(where)
    many.say(stream=1, open=True)
    many.socket.send(message)
    many.listen()
    assert "must be" in many.notes[-1]["error"]
    with pytest.raises(ConnectionClosed):
        many.socket.recv(timeout=10)
    assert many.socket.close_code in (1007, 1008)


def test_clients_continue_after_lost_connections(where: str) -> None:
    values = torch.randn(10, 40, 3)
    with Client(f"http://{where}", keep=5) as client:
        streams = [client.open() for _ in values]
        found: list[list[Any]] = [[] for _ in values]
        for begin in range(0, 40, 4):
            for stream, rows in zip(streams, values, strict=True):
                stream.push(rows[begin : begin + 4].numpy())
            if begin % 12 == 8:
                client._connection.socket.shutdown(socket.SHUT_RDWR)
            for stream, parts in zip(streams, found, strict=True):
                parts.append(stream.pull())
        for stream, parts, rows in zip(streams, found, values, strict=True):
            while sum(map(len, parts)) < 40:
                parts.append(stream.pull())
            assert torch.equal(torch.from_numpy(np.concatenate(parts)), _offline(rows))
            with pytest.raises(ArgumentError, match="pull must be called after push"):
                stream.pull()
        state = streams[0].state()
        assert state.at == 40
        assert not streams[0]._stream.since  # nothing more is kept
        streams[0].close()
        with pytest.raises(ClosedError, match="a closed stream"):
            streams[0].push([[1, 2, 3]])
    with Client(f"ws://{where}/", "layer") as client, client.open(state) as stream:
        stream.push(values[1, :2].numpy())
        rows = torch.cat([values[0], values[1, :2]])
        assert torch.equal(torch.from_numpy(stream.pull()), _offline(rows)[40:])


def test_clients_of_asyncio(where: str) -> None:
    values = torch.randn(10, 40, 3)

    async def talk(client: AsyncClient, place: int) -> None:
        stream, found = await client.open(), list[Any]()
        async with stream:
            for begin in range(0, 40, 4):
                await stream.push(values[place, begin : begin + 4].numpy())
                if place == 3 and begin % 12 == 8:
                    client._connection.transport.abort()
                found.append(await stream.pull())
            while sum(map(len, found)) < 40:
                found.append(await stream.pull())
            assert (await stream.state()).at == 40
        rows = torch.from_numpy(np.concatenate(found))
        assert torch.equal(rows, _offline(values[place]))

    async def all_streams() -> None:
        async with AsyncClient(f"http://{where}", keep=7) as client:
            await asyncio.gather(*[talk(client, place) for place in range(10)])

    asyncio.run(asyncio.wait_for(all_streams(), 60))


def test_mistakes_of_clients(where: str) -> None:
    with pytest.raises(ClosedError, match="model must be one of 'layer'"):
        Client(f"http://{where}", "other")
    with pytest.raises(ClosedError, match="no answer from"):
        Client("http://127.0.0.1:1")
    with pytest.raises(ArgumentError, match="address must be"):
        Client(where)
    with Client(f"http://{where}") as client:
        with pytest.raises(ArgumentTypeError, match="state must be a State"):
            client.open(b"x")  # type: ignore[arg-type]
        stream = client.open()
        with pytest.raises(ShapeError, match=r"frames must be shape \(n, 3\)"):
            stream.push(np.zeros((2, 4)))
        with pytest.raises(ArgumentTypeError, match="frames must be numbers"):
            stream.push([["a", "b", "c"]])
        stream.push(np.full((1, 3), np.nan))
        with pytest.raises(ClosedError, match="NaN"):
            stream.pull()
        wrong = client.open(StreamState(b"abc", 3))
        wrong.push(np.zeros((1, 3)))
        with pytest.raises(ClosedError, match=r"bytes that Stream\.state"):
            wrong.pull()


def test_a_full_queue_stops_reading_until_results_are_read(where: str) -> None:
    """All results arrive, although the queue has 16 frames and a message 2,000."""
    values = torch.randn(2000, 3)
    many = _Many(where, max_queue=1)
    many.say(stream=1, open=True)
    many.socket.send(_record(1, values))
    many.socket.send(json.dumps({"stream": 1, "state": True}))
    many.socket.send(_record(1, values[:1]))
    expected = _offline(torch.cat([values, values[:1]]))
    assert torch.equal(many.results(1, 2001), expected)
    assert many.notes[-1]["at"] == 2000
    many.socket.close()


def test_streams_share_steps(app: Any, where: str) -> None:
    engine = app.state.server.served["layer"].engine
    many = _Many(where)
    for number in range(40):
        many.say(stream=number, open=True)
    before = engine.stats()
    for _ in range(10):
        many.socket.send(b"".join([_record(number, torch.randn(1, 3)) for number in range(40)]))
        for number in range(40):
            many.results(number, 1)
    after = engine.stats()
    assert after["frames"] - before["frames"] == 400
    assert after["steps"] - before["steps"] <= 20
    assert threading.active_count() < 20
    many.socket.close()


def test_a_server_that_closes_sends_the_states_of_all_streams() -> None:
    app = create_app({"layer": _engine(max_queue=16)})
    values = torch.randn(3, 200, 3)
    with served(app) as where:
        many = _Many(where)
        for number in range(3):
            many.say(stream=number, open=True)
        many.socket.send(b"".join([_record(number, values[number]) for number in range(3)]))
        many.results(0, 1)
        server = app.state.server
        loop = server.served["layer"].rounds._loop
        asyncio.run_coroutine_threadsafe(server.clients.drain(), loop)
        with suppress(ConnectionClosed):
            while True:
                many.listen()
        assert many.socket.close_code == 1001
    states = [note for note in many.notes if "state" in note]
    assert [(note["stream"], note["at"]) for note in states] == [(0, 200), (1, 200), (2, 200)]
    for number in (1, 2):
        assert torch.equal(many.results(number, 200), _offline(values[number]))


@pytest.mark.parametrize("kind", ["int16", "float32"])
def test_samples_in_chunks_of_any_size(where: str, kind: str) -> None:
    """They are cut to frames; a rest waits for more, and a reset discards it."""
    rng = np.random.default_rng(0)
    samples = rng.integers(-32768, 32768, 3 * 40).astype(np.int16)
    scaled = samples.astype(np.float32) / 32768
    sent = samples if kind == "int16" else scaled
    expected = _offline(torch.from_numpy(scaled).reshape(40, 3))
    cuts = np.sort(rng.integers(0, len(sent), 30))
    chunks = [part.tobytes() for part in np.split(sent, cuts)]
    with websockets.connect(f"ws://{where}/stream?samples={kind}&answers=binary") as stream:
        stream.send(sent[:2].tobytes())
        stream.send('{"reset": true}')
        assert json.loads(stream.recv()) == {"reset": True}
        found = b""
        for chunk in chunks:
            stream.send(chunk)
        while len(found) < 40 * 32:
            found += stream.recv(20, decode=False)
        rows = np.frombuffer(found, np.float32).reshape(40, 8)
        assert torch.equal(torch.tensor(rows), expected)
        stream.send(b"abc")
        assert "samples must be whole samples of" in json.loads(stream.recv())["error"]
    with websockets.connect(f"ws://{where}/streams?samples={kind}") as stream:
        stream.recv()
        stream.send('{"stream": 5, "open": true}')
        for chunk in chunks:
            stream.send(RECORD.pack(5, len(chunk) // sent.itemsize) + chunk)
        stream.recv()
        count = 0
        while count < 40:
            number, more = RECORD.unpack_from(answer := stream.recv(decode=False))
            assert number == 5
            rows = np.frombuffer(answer[8:], np.float32).reshape(more, 8)
            assert torch.equal(torch.tensor(rows), expected[count : count + more])
            count += more
    with websockets.connect(f"ws://{where}/stream?samples=int8") as stream:
        assert "samples must be int16 or float32" in json.loads(stream.recv())["error"]


# ---- frames of WebSocket ---------------------------------------------------------------------------


def _raw(where: str, *lines: str, path: str = "/stream") -> tuple[socket.socket, bytes]:
    host, port = where.split(":")
    link = socket.create_connection((host, int(port)), timeout=10)
    head = [f"GET {path} HTTP/1.1", "Upgrade: websocket", "Connection: Upgrade"]
    head += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {'A' * 22}==", *lines, "", ""]
    link.sendall("\r\n".join(head).encode("latin-1"))
    answer = b""
    while b"\r\n\r\n" not in answer:
        part = link.recv(4096)
        if not part:
            break
        answer += part
    return link, answer


def _until_close(link: socket.socket, data: bytes = b"") -> tuple[int, bytes]:
    """Return the code of the close frame, and all that came before it."""
    while (at := data.find(b"\x88")) < 0 or len(data) < at + 4:
        part = link.recv(1 << 16)
        assert part, data
        data += part
    return struct.unpack("!H", data[at + 2 : at + 4])[0], data[:at]


def _frame(first: int, payload: bytes, mask: bytes | None = b"\x05\x06\x07\x08") -> bytes:
    size = len(payload)
    head = bytes([first, (128 if mask else 0) | size]) if size < 126 else b""
    if size >= 126:
        head = struct.pack("!BBH", first, (128 if mask else 0) | 126, size)
    if mask is None:
        return head + payload
    return head + mask + bytes([byte ^ mask[at % 4] for at, byte in enumerate(payload)])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (_frame(0x82, bytes(12), None), 1002),  # without a mask
        (_frame(0xC2, bytes(12)), 1002),  # a reserved bit
        (_frame(0x83, bytes(12)), 1002),  # a reserved opcode
        (_frame(0x80, bytes(12)), 1002),  # a continuation of nothing
        (_frame(0x02, bytes(12)) + _frame(0x82, bytes(12)), 1002),  # within another message
        (_frame(0x09, b"x"), 1002),  # a ping in parts
        (_frame(0x89, bytes(126)), 1002),  # a long ping
        (_frame(0x88, b"\x00"), 1002),  # a close with half a code
        (struct.pack("!BBQ", 0x82, 255, 2**62) + bytes(4), 1009),
        (_frame(0x02, bytes(60_000)) + _frame(0x80, bytes(60_000)), 1009),
        (_frame(0x81, b"\xff\xfe"), 1007),
        (_frame(0x88, struct.pack("!H", 1000)), 1000),
    ],
)
def test_mistakes_of_the_protocol(where: str, data: bytes, code: int) -> None:
    link, answer = _raw(where, f"Host: {where}")
    assert answer.startswith(b"HTTP/1.1 101 ")
    link.sendall(data)
    assert _until_close(link)[0] == code
    link.close()


def test_messages_in_parts_and_pings(where: str) -> None:
    values = torch.randn(2, 3)
    payload = values.numpy().tobytes()
    link, _ = _raw(where, f"Host: {where}", path="/stream?answers=binary")
    data = _frame(0x02, payload[:7]) + _frame(0x89, b"now") + _frame(0x00, b"")
    data += _frame(0x80, payload[7:])
    for byte in data:
        link.sendall(bytes([byte]))
    found = b""
    while len(found) < 5 + 2 + 64:
        found += link.recv(4096)
    assert found[:5] == b"\x8a\x03now"
    assert found[5:7] == b"\x82\x40"
    rows = np.frombuffer(found[7:71], np.float32).reshape(2, 8)
    assert torch.equal(torch.tensor(rows), _offline(values))
    link.sendall(_frame(0x01, b'{"reset":') + _frame(0x00, b"") + _frame(0x80, b"true}"))
    assert link.recv(100) == b'\x81\x0e{"reset":true}'
    link.close()


def test_paths_of_sockets(where: str) -> None:
    for path in ("/nothing", "/", "/predict", "//stream", "/stream/"):
        link, answer = _raw(where, f"Host: {where}", path=path)
        link.close()
        assert answer.startswith(b"HTTP/1.1 404 "), answer


def test_a_connection_that_does_not_answer_pings(where: str, app: Any) -> None:
    server = app.state.server
    earlier = {*server.sockets}
    link, _ = _raw(where, f"Host: {where}")
    (one,) = server.sockets - earlier
    loop = server.served["layer"].rounds._loop
    loop.call_soon_threadsafe(one.beat, 100.0)
    assert link.recv(10)[:1] == b"\x89"
    loop.call_soon_threadsafe(one.beat, 150.0)
    loop.call_soon_threadsafe(one.beat, 161.0)
    link.settimeout(10)
    with suppress(ConnectionResetError):
        assert link.recv(10) == b""
    link.close()
    end = time.monotonic() + 10
    while one in server.sockets:
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- who may connect --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/stream", "/streams"])
@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        (["Host: rebound.example"], 4403, b"Host must be a name of this server"),
        (["Host: localhost", "Host: localhost"], 1008, b"Host must be one header"),
        (["Host: localhost", "Origin: http://evil.example"], 4403, b"Origin must be"),
        (["Host: localhost", "Origin: null"], 4403, b"Origin must be"),
    ],
)
def test_hosts_and_origins_of_sockets(
    where: str, path: str, lines: list[str], code: int, words: bytes
) -> None:
    link, answer = _raw(where, *lines, path=path)
    if answer.startswith(b"HTTP/1.1 400 "):  # by the reader of HTTP
        assert len(lines) == 2
        link.close()
        return
    found, before = _until_close(link, answer.partition(b"\r\n\r\n")[2])
    assert found == code
    assert words in before
    link.close()


def test_tokens_and_limits_of_sockets() -> None:
    app = create_app({"layer": _engine(max_streams=3)}, token="secret", client_streams=2)
    with served(app) as where:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
            for path in ("stream", "streams"):
                with websockets.connect(f"ws://{where}/{path}", additional_headers=headers) as one:
                    assert "token must be" in json.loads(one.recv())["error"]
                    with pytest.raises(ConnectionClosed):
                        one.recv()
                    assert one.close_code == 4401
        with pytest.raises(ClosedError, match="token must be"):
            Client(f"http://{where}")
        own: Any = ["raglane", "bearer.secret"]
        with websockets.connect(f"ws://{where}/stream", subprotocols=own) as one:
            assert one.subprotocol == "raglane"
        with Client(f"http://{where}", token="secret") as client:
            streams = [client.open() for _ in range(3)]
            streams[2].push(np.zeros((1, 3)))
            with pytest.raises(Exception, match="within the limit of a client"):
                streams[2].pull()
            streams[1].push(np.zeros((1, 3)))
            assert streams[1].pull().shape == (1, 8)
            # Other addresses behind a proxy of this machine have streams of their own.
            headers = {"Authorization": "Bearer secret", "X-Forwarded-For": "192.0.2.1"}
            with websockets.connect(f"ws://{where}/stream", additional_headers=headers) as other:
                other.send('{"frames": [[1, 2, 3]]}')
                assert json.loads(other.recv())["at"] == 0
        stats = app.state.server.served["layer"].engine.stats
        end = time.monotonic() + 10
        while stats()["streams"]:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_refused_handshake(where: str) -> None:
    connection = websockets.connect
    with pytest.raises(InvalidStatus) as caught, connection(f"ws://{where}/nothing"):
        pass
    assert caught.value.response.status_code == 404


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536, 70_000])
def test_heads_of_all_sizes(size: int) -> None:
    written: list[bytes] = []
    link: Any = Socket.__new__(Socket)
    link._conn = SimpleNamespace(state=Connected.OPEN)
    link._transport = SimpleNamespace(write=written.append)
    content = bytes(range(256)) * (size // 256 + 1)
    link.send(content[:size])
    link.send("x" * size)
    for expected in (Frame(Opcode.BINARY, content[:size]), Frame(Opcode.TEXT, b"x" * size)):
        reader = StreamReader()
        reader.feed_data(written.pop(0))
        parsing = Frame.parse(reader.read_exact, mask=False)
        with pytest.raises(StopIteration) as end:
            next(parsing)
        assert end.value.value == expected


def test_a_client_forgets_frames_before_a_state() -> None:
    facts = {"shape": [3], "datatype": "FP32"}
    streams = Streams(100)
    streams.greet(json.dumps({"model": "layer", "frames": facts, "results": facts}))
    stream, _ = streams.open(None)
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    streams.push(stream, rows[:3])
    streams.push(stream, rows[3:])
    for at in (2, 3, 4, 5):
        streams.receive(json.dumps({"stream": 0, "state": "AAAA", "at": at}))
        _, *records = streams.again()
        expected = RECORD.pack(0, 5 - at) + rows[at:].tobytes()
        assert records == ([expected] if at < 5 else [])


def _silent(where: str, path: str) -> socket.socket:
    """Return the socket of a client with a small buffer, which has read the answer to its handshake."""
    host, _, port = where.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect((host, int(port)))
    lines = [f"GET {path} HTTP/1.1", f"Host: {where}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {'A' * 22}==", "", ""]
    client.sendall("\r\n".join(lines).encode())
    while client.recv(1) != b"\n" or client.recv(2) != b"\r\n":
        pass
    return client


def _masked(opcode: int, content: bytes) -> bytes:
    return Frame(Opcode(opcode), content).serialize(mask=True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/stream", _masked(1, b'{"frames":[[1]]}')),
        ("/streams", _masked(1, b'{"stream":1,"close":true}')),
        ("/streams", _masked(2, struct.pack("<II", 5, 0) * 8)),
        ("/streams", _masked(2, _record(7, torch.full((1, 3), torch.nan)) * 8)),
    ],
    # Masks are drawn, so that the messages are no names of tests.
    ids=["chunk", "close", "frames", "nan"],
)
def test_errors_that_a_client_does_not_read_end_the_connection(
    path: str, message: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the client may answer late.
    monkeypatch.setattr("raglane.serve.wire._CLOSE_WITHIN", 60.0)
    app = create_app({"layer": _engine()})
    sockets = app.state.server.sockets
    with served(app) as where, _silent(where, path) as client:
        client.sendall(_masked(1, b'{"stream":7,"open":true}') if path == "/streams" else b"")
        (link,) = sockets
        with suppress(TimeoutError):
            while link._conn.state is Connected.OPEN:
                client.sendall(message * 1000)
                assert link._transport.get_write_buffer_size() < 2**20
        data = b""
        while b"errors must be read by the client" not in data:
            part = client.recv(1 << 16)
            assert part
            data = data[-200:] + part


def test_answers_wait_for_a_client_that_does_not_read() -> None:
    app = create_app({"layer": _engine()})
    sockets = app.state.server.sockets
    count = 20_000
    with served(app) as where, _silent(where, "/stream") as client:
        data = _masked(1, b'{"state":true}') * count
        thread = threading.Thread(target=client.sendall, args=(data,), daemon=True)
        thread.start()
        (link,) = sockets
        until = time.monotonic() + 20
        while not link._is_paused and time.monotonic() < until:
            time.sleep(0.01)
        assert link._is_paused
        for _ in range(20):
            time.sleep(0.01)
            assert link._transport.get_write_buffer_size() < 2**20
        states = 0
        left = b""
        while states < count:
            left += client.recv(1 << 16)
            states += left.count(b'{"state":"')
            left = left[-9:] if b'{"state":"' not in left[-9:] else b""
        thread.join()
        client.sendall(_masked(1, b'{"end":true}'))
        while not left.endswith(b"end"):
            part = client.recv(1 << 16)
            assert part
            left = left[-3:] + part


# ---- overload ----------------------------------------------------------------------------------------


def test_an_overloaded_server_accepts_no_stream() -> None:
    app = create_app({"layer": _engine()}, period=0.02)
    with served(app) as where, Client(f"http://{where}") as client:
        rounds = app.state.server.served["layer"].rounds
        stream = client.open()
        stream.push(np.zeros((1, 3)))
        stream.pull()
        rounds._lag, rounds._began = 0.5, time.perf_counter() + 60
        answer = httpx2.get(f"http://{where}/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "overloaded")
        assert "raglane_lag_seconds" in httpx2.get(f"http://{where}/metrics").text
        with websockets.connect(f"ws://{where}/stream") as one:
            error = json.loads(one.recv())["error"]
            assert "server must be faster than a frame per 20 ms, got results that take" in error
            with pytest.raises(ConnectionClosed):
                one.recv()
            assert one.close_code == 1013
        refused = client.open()
        refused.push(np.zeros((1, 3)))
        with pytest.raises(Exception, match="faster than a frame per 20 ms"):
            refused.pull()
        rounds._began = time.perf_counter() - 60  # a pause ends it
        assert httpx2.get(f"http://{where}/health").status_code == 200
        client.open().push(np.zeros((1, 3)))
    for period in (0, -1, float("nan"), "x"):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="period must be"):
            create_app({"layer": _engine()}, period=period)  # type: ignore[arg-type]


def test_slow_steps_are_an_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sequences over HTTP too; frames that wait are counted where they wait."""
    engine = _engine(max_queue=4)
    app = create_app({"layer": engine}, period=0.03)
    compute = engine._compute

    steps_are_slow = threading.Event()
    steps_are_slow.set()

    def slow(step: Any) -> None:
        time.sleep(0.06 if steps_are_slow.is_set() else 0)
        compute(step)

    monkeypatch.setattr(engine, "_compute", slow)
    with served(app) as where:
        many = _Many(where)
        many.say(stream=1, open=True)
        assert httpx2.get(f"http://{where}/health").json()["models"]["layer"]["longest"] == 0
        many.socket.send(_record(1, torch.zeros(4000, 3)))
        while (answer := httpx2.get(f"http://{where}/health")).status_code == 200:
            pass
        facts = answer.json()["models"]["layer"]
        assert facts["lag_seconds"] > 0.03
        assert 4 < facts["longest"] < 4000  # of a queue of 4
        text = httpx2.get(f"http://{where}/metrics").text
        assert float(text.partition('raglane_longest{model="layer"} ')[2].split()[0]) > 4
        assert float(text.partition('raglane_queued{model="layer"} ')[2].split()[0]) > 4
        frames = {"name": "frames", "shape": [1, 3], "datatype": "FP32", "data": [0, 0, 0]}
        sequence = {"sequence_id": 1, "sequence_start": True}
        body = {"inputs": [frames], "parameters": sequence}
        answer = httpx2.post(f"http://{where}/v2/models/layer/infer", json=body)
        assert answer.status_code == 503
        assert "faster than a frame per 30 ms" in answer.json()["error"]
        other = _Many(where)  # the first one is not read from
        assert "faster than" in other.say(stream=2, open=True)["error"]
        other.socket.close()
        steps_are_slow.clear()
        assert many.results(1, 4000).shape == (4000, 8)


def test_dropped_frames_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of streams that are idle, of a step that fails, and of a server that ends; also frames behind a
    message that waits.
    """
    error = RuntimeError("no")

    def failing(_: Any) -> None:
        raise error

    for how in ("idle", "fail", "stop"):
        engine = _engine(idle=1.0 if how == "idle" else 60)
        app = create_app({"layer": engine})
        rounds = app.state.server.served["layer"].rounds
        with ExitStack() as stack:
            where = stack.enter_context(served(app))
            many = _Many(where)
            many.say(stream=1, open=True)
            many.say(stream=2, open=True)
            single = websockets.connect(f"ws://{where}/stream").__enter__()
            single.send(json.dumps({"frames": [[0.0] * 3] * 2}))
            assert json.loads(single.recv())["at"] == 0
            with monkeypatch.context() as patch:
                patch.setattr(rounds, "wake", lambda: None)
                if how == "fail":
                    patch.setattr(engine, "_compute", failing)
                single.send(json.dumps({"frames": [[0.0] * 3] * 3}))
                many.socket.send(_record(1, torch.zeros(4, 3)))
                many.socket.send(json.dumps({"stream": 1, "state": True}))
                many.socket.send(_record(1, torch.zeros(2, 3)))
                while len(rounds._arrived) < 2 or not many_lanes_wait(rounds):
                    time.sleep(0.01)
                if how == "fail":
                    rounds._loop.call_soon_threadsafe(rounds._round)
                if how == "stop":
                    stack.close()
                answer = json.loads(single.recv())
                assert (answer["error"] != "", answer["dropped"]) == (True, 3)
                with suppress(ConnectionClosed):
                    while len(many.notes) < 4:
                        many.listen()
                dropped = {note.get("stream"): note.get("dropped") for note in many.notes[2:]}
                expected = {1: 6, 2: None} if how == "idle" else {None: 6}
                assert dropped == expected
                codes = {"idle": 4408, "fail": 1011, "stop": 1001}
                with pytest.raises(ConnectionClosed):
                    single.recv()
                assert single.close_code == codes[how]
            many.socket.close()
            single.close()


def many_lanes_wait(rounds: Any) -> bool:
    """Return True if a message and frames wait for the results of earlier ones."""
    return any(lane is not None and len(lane.todo) == 2 for lane in rounds._lanes)


def test_an_idle_stream_of_many() -> None:
    with served(create_app({"layer": _engine(idle=0.5)})) as where:
        many = _Many(where)
        many.say(stream=1, open=True)
        many.listen()
        assert many.notes[-1] == {
            "stream": 1,
            "error": "the stream was idle for too long",
            "code": 4408,
        }
        assert many.say(stream=1, open=True)["open"] is True
        assert many.say(stream=1, close=True)["closed"] is True
        with pytest.raises(ConnectionClosed):  # without a stream
            many.socket.recv(timeout=30)
        assert many.socket.close_code == 4408


def test_connections_without_a_stream_are_limited() -> None:
    with served(create_app({"layer": _engine()}, client_streams=2)) as where:
        two = [_Many(where) for _ in range(2)]
        third = _Many(where)
        assert "within the limit of a client" in third.facts["error"]
        two[0].say(stream=1, open=True)  # a limit of its own
        two[0].say(stream=2, open=True)
        assert "limit of a client" in two[1].say(stream=1, open=True)["error"]
        for many in (*two, third):
            many.socket.close()
        with Client(f"http://{where}") as client, client.open() as stream:
            stream.push(np.zeros((1, 3)))
            stream.pull()


def test_an_engine_with_a_thread_is_refused() -> None:
    engine = _engine()
    with engine, pytest.raises(ArgumentError, match="an engine without a thread of its own"):
        engine.adopt(threading.Event())
    engine.adopt(threading.Event())
    with pytest.raises(ArgumentError, match="start must be called without a server"):
        engine.start()
    engine.release()
    with engine:
        pass
