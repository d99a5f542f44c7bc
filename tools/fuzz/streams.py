"""Clients of a server that break off and send bytes, sizes and JSON at random, next to a client
that does not.

A round sends some messages to a server in this process: requests over HTTP whose start line,
headers and body may be damaged, and WebSockets with valid and damaged frames, which may end in the
middle of a frame. A failure is: an answer with status 500 or code 1011, a text that is no JSON, a
stream that stays open, or another result of the other client.
"""

from __future__ import annotations

import atexit
import json
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn

import raglane as rl
from raglane.serve import Engine
from raglane.serve.app import create_app
from raglane.serve.live import Clients

_SECONDS = 20
_UPGRADE = [
    "Host: x",
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
]
_JSON = [
    {"frames": [[1, 2, 3]]}, {"frames": []}, {"frames": [[1e999, -0.0, 2**80]]}, {"frames": [[None, 1, 2]]},
    {"frames": "text"}, {"frames": [[1, 2]]}, {"frames": [[[]]]}, {"reset": True}, {"state": True}, {"state": "AAAA"},
    {"state": None}, {"end": True}, {"frames": [[1, 2, 3]] * 300}, {"frames": {"a": [1]}}, {"other": 1},
    [], 5, "x", None,
]  # fmt: skip
_ONE = {"shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
_TWO = {"shape": [2, 3], "datatype": "FP32", "data": [[1, 2, 3], [4, 5, 6]]}
_FACTS = {"sequence_id": 5, "sequence_start": True, "state": "AAAA", "return_state": 1}
_WHOLE = {"sequence_id": "a", "sequence_start": True, "sequence_end": True, "return_state": True}
_REQUESTS: list[tuple[str, Any]] = [
    ("/predict", {"sequences": [[[1, 2, 3]]]}),
    ("/predict", {"sequences": [[]], "top": 2}),
    ("/predict", {"sequences": [[[1, 2]], "x", None, {}]}),
    ("/predict", {"table": {"x": [[1], [2, "a"]]}, "model": "layer"}),
    ("/v2/models/layer/infer", {"inputs": [_ONE]}),
    ("/v2/models/layer/infer", {"inputs": [_TWO], "parameters": _FACTS}),
    ("/v2/models/layer/infer", {"inputs": [_ONE], "parameters": _WHOLE}),
    ("/v2/models/\u00e9%00/infer", {"inputs": [{"shape": [-1], "datatype": "", "data": ["a"]}]}),
]


def _damaged(chance: random.Random, data: bytes) -> bytes:
    """Return bytes with some replaced, removed, repeated or added."""
    own = bytearray(data)
    for _ in range(chance.choice([0, 0, 1, 1, 3, 20])):
        at = chance.randrange(len(own) + 1)
        match chance.randrange(4):
            case 0:
                own[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del own[at : at + chance.randrange(1, 9)]
            case 2:
                own[at:at] = own[at : at + chance.randrange(1, 50)]
            case _:
                own[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(own)


def _frame(chance: random.Random, code: int, data: bytes) -> bytes:
    """Return a frame of a client, masked, with odd bits and lengths at times."""
    first = (
        (0x80 if chance.random() < 0.9 else 0)
        | code
        | (chance.choice([0x10, 0x40]) if chance.random() < 0.03 else 0)
    )
    count = len(data) if chance.random() < 0.95 else chance.choice([0, 1, 2**16, 2**31, 2**62])
    size = (
        bytes([0x80 | count])
        if count < 126
        else struct.pack("!BH", 0xFE, count)
        if count < 2**16
        else struct.pack("!BQ", 0xFF, count)
    )
    mask = chance.randbytes(4)
    return bytes([first]) + size + mask + bytes(one ^ mask[at % 4] for at, one in enumerate(data))


def _conversation(chance: random.Random) -> bytes:
    """Return the bytes of a client of a WebSocket."""
    query = chance.choice(
        [
            "",
            "answers=binary",
            "outputs=true",
            "model=none",
            "top=2",
            "%00=%ff",
            "answers=json&model=layer",
        ]
    )
    head = "\r\n".join([f"GET /stream?{query} HTTP/1.1", *_UPGRADE, "", ""]).encode()
    parts = [head if chance.random() < 0.9 else _damaged(chance, head)]
    for _ in range(chance.randrange(8)):
        match chance.randrange(5):
            case 0:
                data, code = (
                    chance.randbytes(12 * chance.randrange(5) + chance.choice([0, 0, 0, 1, 5])),
                    2,
                )
            case 1:
                data, code = (
                    chance.randbytes(chance.randrange(126)),
                    chance.choice([8, 9, 10, 0, 3, 11]),
                )
            case _:
                text = json.dumps(chance.choice(_JSON)).encode()
                data, code = text if chance.random() < 0.7 else _damaged(chance, text), 1
        parts.append(_frame(chance, code, data))
    return b"".join(parts)


def _request(chance: random.Random) -> bytes:
    """Return the bytes of a client of HTTP."""
    path, content = chance.choice(_REQUESTS)
    body = json.dumps(content).encode()
    body = body if chance.random() < 0.5 else _damaged(chance, body)
    length = len(body) if chance.random() < 0.9 else chance.choice([0, 1, len(body) + 9, 10**12])
    fields = [
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
    ]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""])
    return (head.encode() if chance.random() < 0.9 else _damaged(chance, head.encode())) + body


def _send(chance: random.Random, address: tuple[str, int], data: bytes) -> bytes:
    """Send bytes in parts, of which the last ones may be missing; return the answer."""
    with socket.create_connection(address, timeout=_SECONDS) as client:
        client.settimeout(0.1)
        end = len(data) if chance.random() < 0.8 else chance.randrange(len(data) + 1)
        found = b""
        try:
            place = 0
            while place < end:
                step = chance.choice([1, 100, 10**6])
                client.sendall(data[place : min(end, place + step)])
                place += step
            if chance.random() < 0.2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            while part := client.recv(2**16):
                found += part
        except OSError:
            pass
        return found


def _check(answer: bytes) -> None:
    """Raise if an answer is an internal error, or contains a text that is no JSON."""
    if answer.startswith(b"HTTP/1.1 101"):
        rest = answer.partition(b"\r\n\r\n")[2]
        while len(rest) >= 2:
            code, count, start = rest[0] & 15, rest[1] & 127, 2
            if count > 125:
                start = 4 if count == 126 else 10
                count = int.from_bytes(rest[2:start], "big")
            data, rest = rest[start : start + count], rest[start + count :]
            if len(data) < count:
                return
            if code == 1:
                json.loads(data, parse_constant=_no_constant)
            assert code != 8 or data[:2] != struct.pack("!H", 1011), f"closed with {data!r}"
    elif answer:
        status = re.match(rb"HTTP/1.1 (\d+)", answer)
        assert status is not None, answer[:200]
        assert status[1] != b"500", answer[-500:]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


def play(address: tuple[str, int], engine: Engine, clients: Clients, number: int) -> None:
    chance = random.Random(number)
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(number))
    expected = engine.run(rl.Ragged([values])).values
    stream, found = engine.open(), []
    try:
        for at in range(6):
            stream.push(values[at : at + 1])
            make = _conversation if chance.random() < 0.6 else _request
            _check(_send(chance, address, make(chance)))
            end = time.monotonic() + _SECONDS
            while not stream.ready:
                assert time.monotonic() < end, "no result for another client"
                time.sleep(0.001)
            found.append(stream.pull())
        assert torch.equal(torch.cat(found), expected), "another client has other results"
    finally:
        stream.close()
    end = time.monotonic() + _SECONDS
    while clients.conversations or clients.requests:
        assert time.monotonic() < end, f"{len(clients.conversations)} conversations do not end"
        time.sleep(0.01)
    # Sequences over HTTP have no connection that ends.
    engine.expire(1e-9)
    assert engine.stats()["streams"] == 0, engine.stats()


def start(folder: Path) -> Callable[[int], None]:
    """Start a server in a thread."""
    torch.manual_seed(0)
    engine = Engine(rl.nn.LSTM(3, 4).eval(), max_streams=20, max_queue=50)
    app = create_app({"layer": engine}, max_message=10_000)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", ws="websockets-sansio")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has not started"
        time.sleep(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join(_SECONDS)

    atexit.register(stop)
    address = server.servers[0].sockets[0].getsockname()[:2]
    return lambda number: play(address, engine, app.state.server.clients, number)
