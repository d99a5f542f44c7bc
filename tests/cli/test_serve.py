"""``raglane serve`` as a process: SIGTERM answers queued frames, and mistakes are one line."""

from __future__ import annotations

import base64
import json
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import uvicorn
import websockets.sync.client as websockets
from starlette.testclient import TestClient

import raglane as rl
from commands import Capsys, fails
from processes import Command, start
from raglane.cli import main
from raglane.cli.serve import _allowed, _run
from raglane.serve import Engine
from raglane.serve.app import create_app
from raglane.serve.hosts import check_hosts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    walks = [np.random.default_rng(at).normal(size=(3, 2)) for at in range(8)]
    options: dict[str, Any] = {
        "epochs": 1,
        "hidden_size": 4,
        "validation_fraction": 0,
        "threads": 1,
    }
    for name in ("one", "other/one", "two"):
        rl.fit(walks, ["up", "down"] * 4, **options).save(folder / name)
    return folder


def _started(runs: Path, *arguments: str) -> tuple[Command, str]:
    command = start(runs, "serve", *arguments, "--port", "0")
    command.wait_for("serving: ")
    found: Any = re.search(r"serving: http://(\S+)", command.printed())
    return command, found[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(runs: Path, number: int) -> None:
    """All frames that the server has read are answered, and the client receives the state for
    another server.
    """
    command, where = _started(runs, "one", "two", "--max-queue", "100")
    values = torch.randn(20_000, 2)
    with websockets.connect(f"ws://{where}/stream?model=one&outputs=true", max_size=None) as stream:
        stream.send(values.numpy().tobytes())
        found = json.loads(stream.recv())["outputs"]
        command.signal(number)
        answers = [json.loads(text) for text in stream]  # until the server closes
        found += [row for answer in answers for row in answer.get("outputs", [])]
        assert (stream.close_code, stream.close_reason) == (1001, "the server is closing")
    assert command.end() == 0, command.errors()
    assert command.errors() == ""
    engine = Engine(rl.load(runs / "one"), max_streams=1)
    assert torch.equal(torch.tensor(found), engine.run(rl.Ragged([values])).values)
    assert answers[-1]["at"] == 20_000
    again = engine.open(base64.b64decode(answers[-1]["state"]))
    again.push(values[:1])
    engine.step()
    assert torch.equal(
        again.pull(), engine.run(rl.Ragged([torch.cat([values, values[:1]])])).values[-1:]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_startup(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class Config(uvicorn.Config):
        def load(self) -> None:
            super().load()
            signal.raise_signal(number)

    monkeypatch.setattr(uvicorn, "Config", Config)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    app = create_app({"layer": rl.nn.LSTM(3, 4).eval()})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert _run(app, listener, 1, lambda: None) == 0
    app.state.server.served["layer"].stop()


def test_a_client_that_does_not_read_ends_the_drain_late(runs: Path) -> None:
    command, where = _started(runs, "one", "--shutdown-timeout", "0.5")
    with websockets.connect(
        f"ws://{where}/stream?outputs=true&probabilities=true", max_queue=1
    ) as stream:
        for _ in range(30):
            stream.send(bytes(100_000))
        while (
            _full_queue(where) < 1024
        ):  # until then the system takes what the client does not read
            time.sleep(0.01)
        command.signal(signal.SIGTERM)
        while _is_healthy(where):
            time.sleep(0.01)
        assert command.end(30) == 143


def _full_queue(where: str) -> int:
    """Return the number of results that the server could not send."""
    text = httpx2.get(f"http://{where}/metrics").text
    match = re.search(r"^raglane_results\{.*\} (\d+)", text, re.MULTILINE)
    assert match is not None, text
    return int(match[1])


def _is_healthy(where: str) -> bool:
    """Return False while a server drains, and after it has ended, which takes half a second."""
    try:
        return httpx2.get(f"http://{where}/health").status_code == 200
    except httpx2.TransportError:
        return False


def test_a_token_in_a_file(runs: Path) -> None:
    (runs / "token").write_text("secret\n")
    command, where = _started(
        runs, "one", "two", "--token-file", "token", "--max-streams-per-client", "7", "--int8"
    )
    assert "model: one (classify) model: two (classify)" in " ".join(command.printed().split())
    assert httpx2.get(f"http://{where}/metrics").status_code == 401
    own = {"authorization": "Bearer secret"}
    assert httpx2.get(f"http://{where}/v2/models/two", headers=own).json()["name"] == "two"
    body = {"model": "one", "sequences": [[[1, 2]]]}
    found = httpx2.post(f"http://{where}/predict", json=body, headers=own).json()["predictions"]
    assert (
        found["prediction"] == rl.load(runs / "one").predict([np.array([[1.0, 2.0]])])["prediction"]
    )
    command.signal(signal.SIGTERM)
    assert command.end() == 0


def _streamed(where: str, model: str, values: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a stream answers, four per frame."""
    answers = bytearray()
    with websockets.connect(f"ws://{where}/stream?model={model}&answers=binary") as stream:
        stream.send(values.numpy().tobytes())
        while len(answers) < 16 * len(values):
            answers += stream.recv(decode=False)
    return torch.frombuffer(answers, dtype=torch.float32)


def test_layers_and_modules(runs: Path) -> None:
    """Of functions that the user names, also next to runs."""
    text = "import torch, raglane as rl\n\ndef detector():\n    torch.manual_seed(0)\n"
    text += "    return [torch.nn.Linear(5, 3), rl.nn.GRU(3, 4)]\n\nlayer = rl.nn.LSTM(3, 2)\n"
    text += (
        "class Exported(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    )
    text += "        torch.manual_seed(0)\n        self.cell = torch.nn.GRUCell(5, 4)\n"
    text += "    def forward(self, x, state):\n        state = self.cell(x, state)\n"
    text += "        return state.relu(), state\n"
    (runs / "detectors.py").write_text(text)
    arguments = ["--model", "detectors:detector", "--model", "other=detectors:layer"]
    arguments += ["--renew", "4", "--warm-up", "1"]
    arguments += ["--model", "detectors:Exported"]
    command, where = _started(runs, "one", *arguments)
    printed = " ".join(command.printed().split())
    assert "model: one (classify) model: detector (module) model: other (module)" in printed
    torch.manual_seed(0)
    layers = [torch.nn.Linear(5, 3), rl.nn.GRU(3, 4)]
    engine = Engine(layers, max_streams=1, renew=4, warm_up=1)
    values = torch.randn(6, 5)
    whole = Engine(layers, max_streams=1).run(rl.Ragged([values])).values
    expected = engine.run(rl.Ragged([values])).values
    assert not torch.equal(expected, whole)
    assert torch.equal(_streamed(where, "detector", values), expected.flatten())
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(5, 4)
    state = torch.zeros(1, 4)
    outputs = _streamed(where, "Exported", values[:4])
    for output, row in zip(outputs.split(4), values[:4], strict=True):
        state = cell(row[None], state)
        torch.testing.assert_close(output[None], state.relu())
    command.signal(signal.SIGTERM)
    assert command.end() == 0
    assert command.errors() == ""


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        ([], {"127.0.0.1": 200, "localhost:1": 200, "rebound.example": 403, "one.example": 403}),
        (["--host", "localhost"], {"localhost": 200, "one.example": 403}),
        (
            ["--host", "127.0.0.2", "--allow-host", "one.example", "--allow-host", "Two.Example."],
            {"127.0.0.2": 200, "one.example": 200, "two.example:80": 200, "rebound.example": 403},
        ),
        (
            ["--host", "0.0.0.0", "--allow-host", "one.example"],
            {"one.example": 200, "localhost": 200, "rebound.example": 403, "192.0.2.1": 403},
        ),
        (["--host", "0.0.0.0", "--token-file", "secret"], {"any.example": 200, "192.0.2.1": 200}),
    ],
)
def test_hosts(
    runs: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], codes: dict[str, int]
) -> None:
    """The command passes them to the application, which runs here without a port."""
    (runs / "secret").write_text("secret")
    monkeypatch.chdir(runs)
    answers: dict[str, int] = {}

    def run(app: Any, *_: Any) -> int:
        with TestClient(app) as client:
            for host in codes:
                headers = {"host": host, "authorization": "Bearer secret"}
                answers[host] = client.get("/metrics", headers=headers).status_code
        return 0

    monkeypatch.setattr("raglane.cli.serve._run", run)
    assert main(["serve", "one", "--port", "0", "--max-streams", "2", *arguments]) == 0
    assert answers == codes


@pytest.mark.parametrize(
    ("host", "address", "hosts"),
    [
        ("::1", "::1", ["::1"]),
        ("server.example", "2001:db8::1", ["server.example", "2001:db8::1"]),
        ("fe80::1%lo", "fe80::1%lo", ["fe80::1"]),  # a zone, which browsers do not send
        ("::", "::", None),
        ("", "0.0.0.0", None),
    ],
)
def test_hosts_of_an_address(host: str, address: str, hosts: list[str] | None) -> None:
    found = _allowed(host, address, [], "secret")
    assert found is None if hosts is None else set(hosts) == set(check_hosts("names", found))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], ["nothing must be the folder of a run"]),
        ([], ["RUN must be a run, or --model, got none"]),
        (["one", "--feature-shape", "3"], ["--feature-shape must be passed with --model"]),
        (["--model", "detectors"], ["--model must be package.module:function", "'detectors'"]),
        (["--model", "a b:c"], ["--model must be package.module:function"]),
        (["one", "--model", "one=json:dumps"], ["--model must be different names", "'one'"]),
        (["--model", "nothing_there:make"], ["--model must be a function", "ModuleNotFoundError"]),
        (["--model", "json:nothing"], ["--model must be a function", "AttributeError"]),
        (["--model", "json:dumps"], ["--model must be a function", "TypeError"]),
        (["--model", "os:getcwd"], ["model must be a module"]),
        (["one", "--period", "0"], ["--period must be a number of seconds above 0"]),
        (["one", "--renew", "10"], ["renew, warm_up must be given together"]),
        (["one", "--renew", "10", "--warm-up", "6"], ["--warm-up must be at most 5, got 6"]),
        (["one", "--port", "70000"], ["--port must be a number from 0 to 65535", "70000"]),
        (["one", "--port", "x"], ["--port must be a whole number", "'x'"]),
        (["one", "--host", "0.0.0.0"], ["--host must be an address of one network", "'0.0.0.0'"]),
        (["one", "--host", "0"], ["--host must be an address of one network", "--token-file"]),
        (["one", "--host", "::"], ["--host must be an address of one network", "--allow-host"]),
        (["one", "--allow-host", "http://x.org"], ["--allow-host must be names or addresses"]),
        (["one", "--host", "256.1.1.1"], ["--port must be a free port", "256.1.1.1"]),
        (["one", "other/one"], ["RUN must be folders of different names", "'one'"]),
        (["one", "--max-streams", "0"], ["--max-streams must be"]),
        (["one", "--max-streams-per-client", "0"], ["--max-streams-per-client must be"]),
        (["one", "--max-message", "0"], ["--max-message must be"]),
        (["one", "--max-queue", "0"], ["--max-queue must be"]),
        (["one", "--threads", "0"], ["--threads must be"]),
        (["one", "--threads", "9999"], ["--threads must be at most 4096"]),
        (["one", "--idle-timeout", "0"], ["--idle-timeout must be"]),
        (["one", "--shutdown-timeout", "nan"], ["--shutdown-timeout must be"]),
        (["one", "--token-file", "nothing"], ["--token-file must be a file with a token"]),
        (["one", "--token-file", "empty"], ["a token of visible ASCII characters", "got nothing"]),
    ],
)
def test_mistakes(
    runs: Path,
    arguments: list[str],
    words: list[str],
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    (runs / "empty").write_text("")
    fails(["serve", *arguments], capsys, *words)


def test_a_port_in_use(runs: Path, capsys: Capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        fails(
            ["serve", str(runs / "one"), "--port", port],
            capsys,
            "--port must be a free port",
            "in use",
        )


def test_without_the_extra(runs: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    fails(
        ["serve", str(runs / "one")],
        capsys,
        "uvicorn is not installed. Run pip install 'raglane[serve]'",
    )
