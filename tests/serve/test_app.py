"""The server: answers of sequences and streams, limits, malformed messages, and slow, killed or
silent clients.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
import websockets.sync.client as websockets
from starlette.testclient import TestClient
from websockets.exceptions import ConnectionClosed

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, MissingExtraError, shorten
from raglane.serve import Engine, deployment
from raglane.serve.app import create_app
from servers import served

_SMALL: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "validation_fraction": 0, "threads": 1}


def _walks(count: int = 12, channels: int = 2) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.normal(size=(2 + at % 5, channels)).astype(np.float32) for at in range(count)]


@pytest.fixture(scope="module")
def run() -> rl.Run:
    return rl.fit(_walks(), ["up", "down"] * 6, **_SMALL)


@pytest.fixture(scope="module")
def backwards() -> rl.Run:
    return rl.fit(_walks(), ["up", "down"] * 6, bidirectional=True, **_SMALL)


def _app(models: Any, **options: Any) -> Any:
    """Return an application for Starlette's client, whose requests have the host ``testserver``."""
    return create_app(models, **{"allow_hosts": ["testserver"], **options})


def _layer() -> rl.nn.LSTM:
    torch.manual_seed(0)
    return rl.nn.LSTM(3, 8).eval()


def _engine(**options: Any) -> Engine:
    return Engine(_layer(), **{"max_streams": 50, **options})


@pytest.fixture(scope="module")
def client(run: rl.Run, backwards: rl.Run) -> Iterator[TestClient]:
    models: dict[str, rl.Run | Engine] = {
        "run": run,
        "backwards": backwards,
        "layer": _engine(max_queue=64),
    }
    with TestClient(
        _app(models, max_streams=50, max_message=100_000), raise_server_exceptions=False
    ) as client:
        yield client


def _offline(values: torch.Tensor) -> torch.Tensor:
    return _engine().run(rl.Ragged([values])).values


def _infer(client: TestClient, model: str, values: Any, **parameters: Any) -> tuple[int, Any]:
    array = np.asarray(values, np.float32)
    tensor = {
        "name": "frames",
        "shape": list(array.shape),
        "datatype": "FP32",
        "data": array.ravel().tolist(),
    }
    answer = client.post(
        f"/v2/models/{model}/infer", json={"inputs": [tensor], "parameters": parameters}
    )
    return answer.status_code, answer.json()


@pytest.mark.parametrize("model", ["run", "backwards"])
@pytest.mark.parametrize("options", [{}, {"probabilities": True}, {"top": 2}])
def test_predict(
    client: TestClient, request: pytest.FixtureRequest, model: str, options: dict[str, Any]
) -> None:
    expected = request.getfixturevalue(model).predict(_walks(), **options).columns
    body = {"model": model, "sequences": [walk.tolist() for walk in _walks()], **options}
    found = client.post("/predict", json=body).json()["predictions"]
    assert found == {name: column for name, column in expected.items() if name != "id"}


def test_requests_together_have_their_own_answers(client: TestClient, run: rl.Run) -> None:
    """Also if some of them are invalid."""
    walks = _walks(40)
    expected = run.predict(walks, probabilities=True)["p_up"]

    def ask(at: int) -> Any:
        bad = (
            [[[1.0, "x"]]]
            if at % 4 == 0
            else [[[float("nan"), 1.0]]]
            if at % 4 == 1
            else [walks[at].tolist()]
        )
        content = json.dumps({"model": "run", "sequences": bad, "probabilities": True})
        answer = client.post(
            "/predict", content=content, headers={"content-type": "application/json"}
        )
        return (
            answer.status_code
            if answer.status_code != 200
            else answer.json()["predictions"]["p_up"]
        )

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, range(40)))
    assert found == [400 if at % 4 < 2 else [expected[at]] for at in range(40)]


def test_predict_of_an_engine_and_of_a_table(client: TestClient, run: rl.Run) -> None:
    values = torch.randn(5, 3)
    found = client.post(
        "/predict", json={"model": "layer", "sequences": [values.tolist(), []]}
    ).json()
    assert torch.equal(torch.tensor(found["predictions"]["outputs"][0]), _offline(values))
    assert found["predictions"]["outputs"][1] == []
    table = pyarrow.table({"text": ["a b", "b a", "a a"] * 3, "kind": ["x", "y", "x"] * 3})
    words = rl.fit(table, sequence="text", label="kind", **_SMALL)
    with TestClient(_app({"words": words}, max_streams=2)) as other:
        for body in ({"sequences": ["a b a"]}, {"table": {"text": ["a b a"]}}):
            answer = other.post("/predict", json={**body, "probabilities": True})
            assert answer.status_code == 200, answer.text
            assert (
                answer.json()["predictions"]["p_x"]
                == words.predict(["a b a"], probabilities=True)["p_x"]
            )


def test_transcriptions_are_of_whole_sequences() -> None:
    run = rl.fit(["a b a", "b b a a"] * 6, ["xy", "x"] * 6, task="transcribe", **_SMALL)
    with TestClient(_app({"run": run}, max_streams=2)) as client:
        answer = client.post("/predict", json={"sequences": ["a b b", ""], "beam_size": 1})
        assert answer.status_code == 200, answer.text
        expected = run.predict(["a b b", ""]).columns
        assert answer.json()["predictions"] == {
            name: expected[name] for name in ("prediction", "score", "times")
        }
        for options in ({"beam_size": 0}, {"beam_size": 1001}, {"beam": 1}):
            assert client.post("/predict", json={"sequences": ["a"], **options}).status_code == 400
        with client.websocket_connect("/stream") as stream:
            assert "task other than transcribe" in stream.receive_json()["error"]


def test_each_client_gets_its_own_results() -> None:
    count, length = 20, 30
    values = torch.randn(count, length, 3)
    with served(_app({"layer": _engine()})) as where:

        def talk(at: int) -> torch.Tensor:
            random = np.random.default_rng(at)
            found: list[bytes] = []
            with websockets.connect(f"ws://{where}/stream?answers=binary") as stream:
                begin = 0
                while begin < length:
                    end = min(length, begin + int(random.integers(1, 8)))
                    stream.send(values[at, begin:end].numpy().tobytes())
                    begin = end
                while sum(map(len, found)) < length * 8 * 4:
                    found.append(stream.recv(decode=False))
            return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.float32).reshape(
                length, 8
            )

        with ThreadPoolExecutor(count) as pool:
            for at, found in enumerate(pool.map(talk, range(count))):
                assert torch.equal(found, _offline(values[at]))


def test_results_of_a_run(client: TestClient, run: rl.Run) -> None:
    walk = _walks(5)[4]
    with client.websocket_connect("/stream?model=run&probabilities=true") as stream:
        for step in range(len(walk)):
            stream.send_json({"frames": walk[step : step + 1].tolist()})
            found = stream.receive_json()
            assert found.pop("at") == step
            expected = run.predict([walk[: step + 1]], probabilities=True).columns
            assert found == {name: column for name, column in expected.items() if name != "id"}
        stream.send_json({"reset": True})
        assert stream.receive_json() == {"reset": True}
        stream.send_json({"frames": walk.tolist()})
        assert stream.receive_json()["p_up"][-1] == expected["p_up"][0]
        stream.send_json({"end": True})
        assert stream.receive() == {"type": "websocket.close", "code": 1000, "reason": "end"}


@pytest.mark.parametrize(
    "task", ["classify", "tag", "regress", "multilabel", "forecast", "language"]
)
def test_tasks(task: Any) -> None:
    walks = _walks()
    labels: Any = {
        "classify": ["a", "b"] * 6,
        "tag": [["u" if row[0] > 0 else "v" for row in walk] for walk in walks],
        "regress": [float(walk.sum()) for walk in walks],
        "multilabel": [["a", "b"], ["a"]] * 6,
    }.get(task)
    data: Any = ["a b a", "b b"] * 6 if task == "language" else walks
    run = rl.fit(data, labels, task=task, bidirectional=False, **_SMALL)
    one: Any = data[1]
    with (
        TestClient(_app({"run": run}, max_streams=2)) as client,
        client.websocket_connect("/stream") as stream,
    ):
        stream.send_json({"frames": one if isinstance(one, str) else one.tolist()})
        found = stream.receive_json()
        assert found.pop("at") == 0
        columns = run.predict([one]).columns
        for name, column in found.items():
            assert (column if task == "tag" else column[-1]) == columns[name][0]


def _numbers(columns: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the numbers of a prediction: of several quantiles, those of all."""
    names = [name for name in columns if name.startswith("q")] or ["prediction"]
    return np.array([columns[name] for name in names], np.float64)


@pytest.mark.parametrize("options", [{}, {"loss": "quantile", "quantile": (0.1, 0.5, 0.9)}])
@pytest.mark.parametrize("task", ["regress", "forecast"])
def test_numbers_are_in_the_units_of_the_data_on_every_route(
    task: Any, options: dict[str, Any]
) -> None:
    walks = [100 + 7 * walk for walk in _walks()]
    labels = [float(walk.sum()) for walk in walks] if task == "regress" else None
    run = rl.fit(walks, labels, task=task, **_SMALL, **options)
    walk = walks[4]
    expected = _numbers(run.predict([walk]).columns).ravel()
    assert np.abs(expected).min() > 10
    with TestClient(_app({"run": run}, max_streams=4)) as client:
        whole = client.post("/predict", json={"sequences": [walk.tolist()]}).json()
        assert np.array_equal(_numbers(whole["predictions"]).ravel(), expected)
        outputs = _infer(client, "run", walk)[1]["outputs"][0]
        found = np.array(outputs["data"]).reshape(outputs["shape"])[-1]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        with client.websocket_connect("/stream?outputs=true") as stream:
            stream.send_json({"frames": walk.tolist()})
            answer = stream.receive_json()
            last = {name: column[-1] for name, column in answer.items() if name != "at"}
            np.testing.assert_allclose(_numbers(last).ravel(), expected, rtol=1e-12)
            np.testing.assert_allclose(last["outputs"], expected, rtol=1e-6)
        with client.websocket_connect("/stream?answers=binary") as stream:
            stream.send_json({"frames": walk.tolist()})
            rows = np.frombuffer(stream.receive_bytes(), np.float32).reshape(len(walk), -1)
            np.testing.assert_allclose(rows[-1], expected, rtol=1e-6)
        with client.websocket_connect("/streams") as stream:
            stream.receive_json()
            stream.send_json({"stream": 3, "open": True})
            stream.receive_json()
            stream.send_bytes(struct.pack("<II", 3, len(walk)) + walk.tobytes())
            assert stream.receive_bytes()[8:] == rows.tobytes()


def test_bodies_and_frames_of_another_form(client: TestClient) -> None:
    """The messages are of frames and numbers."""
    body = json.dumps({"model": "run", "sequences": [[[0.5, 0.5]]]})
    assert client.post("/predict", content=body).status_code == 200  # without a content type
    asked = {
        "/predict": '{"model": "run", "sequences": 3}',
        "/v2/models/layer/infer": '{"inputs": 5}',
    }
    texts = [client.post(path, content=content).json()["error"] for path, content in asked.items()]
    assert texts[0].startswith("sequences must be a valid list, got 3.")
    assert texts[1].startswith("inputs must be a valid list, got 5.")
    assert client.post("/predict", content="{").json()["error"].startswith("body must be JSON")
    with client.websocket_connect("/stream?model=run") as stream:
        stream.send_json({"frames": [[1.0]]})
        text = stream.receive_json()["error"]
        assert (
            "frames of shape (n, 2), numbers of float32: one for each channel of 'x0', 'x1'" in text
        )
        stream.send_json({"frames": [[1.0, None]]})
        text += stream.receive_json()["error"]
        assert "cpu" not in text
        assert "torch" not in text
        assert "engine" not in text


def test_options_of_streams_do_not_mix(client: TestClient, run: rl.Run) -> None:
    frames = {"frames": _walks()[0][:1].tolist()}
    queries: dict[str, set[str]] = {
        "": set(),
        "&probabilities=true": {"p_up", "p_down"},
        "&outputs=true": {"outputs"},
        "&outputs=false&top=2": {"top", "top_probability"},
    }
    with ExitStack() as stack:
        for query, names in (*queries.items(), *queries.items()):
            address = f"/stream?model=run{query}"
            stream = stack.enter_context(client.websocket_connect(address))
            stream.send_json(frames)
            answer = stream.receive_json()
            assert set(answer) - {"at", "prediction", "probability"} == names, (query, answer)


def test_a_message_longer_than_the_queue(client: TestClient) -> None:
    values = torch.randn(1000, 3)
    found: list[list[float]] = []
    with client.websocket_connect("/stream?model=layer") as stream:
        stream.send_bytes(values.numpy().tobytes())
        while len(found) < 1000:
            answer = stream.receive_json()
            assert answer["at"] == len(found)
            found += answer["outputs"]
    assert torch.equal(torch.tensor(found), _offline(values))


def test_state_moves_to_another_server(client: TestClient) -> None:
    values = torch.randn(9, 3)
    with client.websocket_connect("/stream?model=layer") as stream:
        stream.send_json({"frames": values[:5].tolist()})
        stream.send_json({"state": True})
        answers = [stream.receive_json()]
        while "state" not in answers[-1]:
            answers.append(stream.receive_json())
        assert answers[-1]["at"] == 5
    state = answers[-1]["state"]
    expected = _offline(values)[5:]
    with TestClient(
        _app({"layer": _engine(max_streams=1)})
    ) as other:  # the stream has the only slot
        for counted, at in (({}, 0), ({"at": 5}, 5)):
            with other.websocket_connect("/stream") as stream:
                stream.send_json({"state": state, **counted})
                assert stream.receive_json() == {"restored": True, **counted}
                stream.send_json({"frames": values[5:].tolist()})
                answer = stream.receive_json()
                assert torch.equal(torch.tensor(answer["outputs"]), expected)
                assert answer["at"] == at
        code, found = _infer(
            other, "layer", values[5:], sequence_id="x", sequence_start=True, state=state
        )
        assert code == 200
        assert torch.equal(torch.tensor(found["outputs"][0]["data"]).reshape(4, 8), expected)


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ("{", 1007, "JSON"),
        ("[" * 50_000, 1007, "JSON"),
        ("3", 1008, "an object"),
        ("{}", 1008, "an object"),
        ('{"frames": [], "reset": true}', 1008, "an object"),
        ('{"nothing": 1}', 1008, "an object"),
        ('{"state": "?"}', 1008, "base64"),
        ('{"reset": false}', 1008, "reset must be true"),
        ('{"end": null}', 1008, "end must be true"),
        ('{"state": 5}', 1008, "base64"),
        ('{"state": "AAAA"}', 1008, "bytes that"),
        ('{{"state": "{}"}}'.format(base64.b64encode(b"raglane1" + bytes(200)).decode()), 1008, "state"),
        ("x" * 100_001, 1009, "at most 100,000 bytes"),
    ],
)  # fmt: skip
def test_malformed_messages_close_the_stream(
    client: TestClient, message: str, code: int, words: str
) -> None:
    with client.websocket_connect("/stream?model=layer") as stream:
        stream.send_text(message)
        error = stream.receive_json()["error"]
        assert words in error
        assert stream.receive() == {
            "type": "websocket.close",
            "code": code,
            "reason": shorten(error, 120),
        }


@pytest.mark.parametrize(
    "message",
    [
        '{"frames": [[1, 2]]}',
        '{"frames": [1, 2, 3]}',
        '{"frames": [[1, 2], [1, 2, 3]]}',
        '{"frames": [["a", "b", "c"]]}',
        '{"frames": "abc"}',
        '{"frames": {"a": 1}}',
        '{"frames": null}',
        '{"frames": [[1, 2, null]]}',
        '{"frames": [[1, 2, NaN]]}',
        '{"frames": [[true, false, true]]}',
        '{"frames": [[[1, 2, 3]]]}',
        b"abc",
        struct.pack("<3f", 1, float("nan"), 1),
    ],
)
def test_refused_frames_leave_the_stream_open(client: TestClient, message: str | bytes) -> None:
    values = torch.randn(2, 3)
    with client.websocket_connect("/stream?model=layer&outputs=true") as stream:
        stream.send_json({"frames": values[:1].tolist()})
        stream.receive_json()
        stream.send(
            {
                "type": "websocket.receive",
                "bytes" if isinstance(message, bytes) else "text": message,
            }
        )
        found = stream.receive_json()
        assert found["at"] == 1
        assert "frames must be" in found["error"]
        for nothing in ('{"frames": []}', b""):
            stream.send(
                {
                    "type": "websocket.receive",
                    "bytes" if isinstance(nothing, bytes) else "text": nothing,
                }
            )
        stream.send_json({"frames": values[1:].tolist()})
        assert torch.equal(torch.tensor(stream.receive_json()["outputs"]), _offline(values)[1:])


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ("model=none", 4404, "one of 'run', 'backwards', 'layer'"),
        ("", 4404, "got none"),
        ("model=backwards", 4409, "reads sequences from the end"),
        ("model=run&top=x", 1008, "top must be a whole number"),
        ("model=run&top=0", 1008, "top must be"),
        ("model=run&probabilities=1", 1008, "true or false"),
        ("model=layer&probabilities=true", 1008, "without a task"),
        ("model=run&other=1", 1008, "option must be one of"),
    ],
)
def test_streams_that_are_refused(client: TestClient, query: str, code: int, words: str) -> None:
    with client.websocket_connect(f"/stream?{query}") as stream:
        assert words in stream.receive_json()["error"]
        assert stream.receive()["code"] == code


def _open_streams(client: TestClient) -> int:
    return client.get("/health").json()["models"]["layer"]["streams"]


def test_limits_of_streams() -> None:
    app = _app({"layer": _engine(max_streams=3, idle=0.4)}, client_streams=2)
    with TestClient(app) as client:
        with client.websocket_connect("/stream") as one, client.websocket_connect("/stream") as two:
            with client.websocket_connect("/stream") as more:
                assert "within the limit of a client" in more.receive_json()["error"]
                assert more.receive()["code"] == 4429
            assert _infer(client, "layer", [[1, 2, 3]])[0] == 429
            # Streams that are idle are closed, and make room.
            for stream in (one, two):
                assert "idle" in str(stream.receive())
        assert _open_streams(client) == 0
        assert _infer(client, "layer", [[1, 2, 3]], sequence_id=1, sequence_start=True)[0] == 200
        assert _infer(client, "layer", [[1, 2, 3]], sequence_id=2, sequence_start=True)[0] == 200
        assert _infer(client, "layer", [[1, 2, 3]], sequence_id=3, sequence_start=True)[0] == 429
        time.sleep(2.5)
        assert _infer(client, "layer", [[1, 2, 3]], sequence_id=2)[0] == 404
        assert _infer(client, "layer", [[1, 2, 3]], sequence_id=3, sequence_start=True)[0] == 200
    with (
        TestClient(_app({"layer": _engine(max_streams=1)})) as client,
        client.websocket_connect("/stream"),
    ):
        with client.websocket_connect("/stream") as more:
            assert "max_streams must be" in more.receive_json()["error"]
            assert more.receive()["code"] == 1013
        assert _infer(client, "layer", [[1, 2, 3]])[0] == 503


def test_clients_that_do_not_read_or_are_killed() -> None:
    """Others go on without delay, nothing grows, and the streams of killed clients are closed."""
    engine = _engine(max_queue=32)
    rows = np.zeros((2000, 3), np.float32).tobytes()
    with served(_app({"layer": engine})) as where, ExitStack() as stack:
        slow = [
            stack.enter_context(websockets.connect(f"ws://{where}/stream", max_queue=1))
            for _ in range(3)
        ]

        def flood(stream: Any) -> None:
            with suppress(ConnectionClosed, OSError):
                while True:
                    stream.send(rows)

        threads = [threading.Thread(target=flood, args=(stream,), daemon=True) for stream in slow]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        values, times = torch.randn(60, 3), []
        expected = _offline(values)
        with websockets.connect(f"ws://{where}/stream?answers=binary") as stream:
            for at, row in enumerate(values):
                start = time.perf_counter()
                stream.send(row.numpy().tobytes())
                found = torch.frombuffer(
                    bytearray(stream.recv(timeout=20, decode=False)), dtype=torch.float32
                )
                times.append(time.perf_counter() - start)
                assert torch.equal(found, expected[at])
                if at == 30:
                    for other in slow:
                        # Without a closing handshake.
                        other.socket.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                        other.socket.shutdown(socket.SHUT_RDWR)
                if at == 15:
                    stats = engine.stats()
                    assert stats["queued"] <= 3 * 32
                    assert stats["results"] <= 3 * 32
            assert np.median(times) < 0.1
            for thread in threads:
                thread.join(10)
            end = time.monotonic() + 20
            while engine.stats()["streams"] > 1:
                assert time.monotonic() < end, engine.stats()
                time.sleep(0.05)
        while engine.stats()["streams"]:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_sequences_of_the_protocol(client: TestClient) -> None:
    values = torch.randn(2, 100, 3)
    found: list[list[Any]] = [[], []]
    for begin in range(0, 100, 20):
        for at in range(2):
            facts = {
                "sequence_start": begin == 0,
                "sequence_end": begin == 80,
                "sequence_id": ("a", 7)[at],
            }
            code, answer = _infer(client, "layer", values[at, begin : begin + 20], **facts)
            assert (code, answer["parameters"]) == (200, {"sequence_id": ("a", 7)[at]})
            assert answer["outputs"][0]["shape"] == [20, 8]
            found[at] += answer["outputs"][0]["data"]
    for at in range(2):
        assert torch.equal(torch.tensor(found[at]).reshape(100, 8), _offline(values[at]))
    code, whole = _infer(client, "layer", values[0])
    assert whole["outputs"][0]["data"] == found[0]
    code, ended = _infer(client, "layer", values[0], sequence_id=7)
    assert code == 404
    assert "sequence_start" in ended["error"]
    assert _infer(client, "layer", values[0], sequence_id=7, sequence_start=True)[0] == 200
    own = client.app.state.server.sequences._open["layer", 7].stream  # type: ignore[attr-defined]
    own.push = lambda rows: (
        own.stream.close() or type(own).push(own, rows)
    )  # as by a request that ends it meanwhile
    assert _infer(client, "layer", values[0], sequence_id=7) == (404, ended)
    assert _infer(client, "layer", np.zeros((0, 3)))[1]["outputs"][0]["shape"] == [0, 8]
    assert _open_streams(client) == 0


def test_a_deployment_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtraError, match=r"ray is not installed. Run pip install 'raglane\[ray\]'"
    ):
        deployment(_layer())


@pytest.fixture
def ray_stub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules with the names that a deployment imports of Ray, which keep what builds a replica.
    The tests of Ray itself are in test_on_ray.py.
    """
    kept: dict[str, Any] = {}
    own, serve = ModuleType("ray"), ModuleType("ray.serve")
    own.serve = serve  # type: ignore[attr-defined]

    def ingress(build: Any) -> Any:
        kept["build"] = build
        return lambda replica: replica

    serve.ingress = ingress  # type: ignore[attr-defined]
    serve.deployment = lambda replica, **_: replica  # type: ignore[attr-defined]
    router = "ray.serve.experimental.consistent_hash_router"
    modules = {"ray": own, "ray.serve": serve, router: ModuleType(router)}
    modules["ray.serve.experimental"] = ModuleType("ray.serve.experimental")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return kept


def test_replicas_of_ray_check_hosts(ray_stub: dict[str, Any]) -> None:
    deployment({"layer": _layer()}, allow_hosts=["models.example"], max_streams=2)
    with TestClient(ray_stub["build"]()) as client:
        codes = {"models.example:8000": 200, "localhost": 200, "rebound.example": 403}
        for host, code in codes.items():
            headers = {"host": host, "origin": f"http://{host}"}
            assert client.get("/metrics", headers=headers).status_code == code
        assert _stream_error(client, headers)[1] == 4403
    deployment(_layer(), max_streams=2)
    with TestClient(ray_stub["build"]()) as client:
        assert client.get("/metrics").status_code == 403  # testserver
    with pytest.raises(ArgumentError, match="allow_hosts must be a list of names, or None"):
        deployment(_layer(), allow_hosts=None)


def test_a_sequence_at_another_frame_is_refused(client: TestClient) -> None:
    """E.g. a request that was repeated, or an older copy of the sequence at another server."""
    values = torch.randn(7, 3)
    code, first = _infer(
        client, "layer", values[:4], sequence_id="x", sequence_start=True, return_state=True
    )
    assert code == 200
    code, refused = _infer(client, "layer", values[4:], sequence_id="x", at=3)
    assert (code, refused["error"].split(",")[0]) == (409, "at must be 4")
    code, refused = _infer(
        client, "layer", values[4:], sequence_id="x", state=first["parameters"]["state"]
    )
    assert (code, refused["error"].split(",")[0]) == (400, "state must be sent with sequence_start")
    for facts in ({}, {"sequence_start": True, "state": first["parameters"]["state"]}):
        code, found = _infer(client, "layer", values[4:], sequence_id="x", at=4, **facts)
        assert code == 200
        assert torch.equal(
            torch.tensor(found["outputs"][0]["data"]).reshape(3, 8), _offline(values)[4:]
        )
        assert (
            _infer(client, "layer", values[:0], sequence_id="x", at=7, sequence_end=bool(facts))[0]
            == 200
        )
    assert _open_streams(client) == 0


def test_predictions_of_the_protocol(client: TestClient, run: rl.Run) -> None:
    walk = _walks()[3]
    _, answer = _infer(client, "run", walk)
    outputs = {one["name"]: one for one in answer["outputs"]}
    assert outputs["prediction"]["datatype"] == "BYTES"
    assert outputs["prediction"]["data"][-1] == run.predict([walk])["prediction"][0]
    tensor = {"name": "frames", "shape": [20, 2], "datatype": "FP32", "data": [0.5] * 40}
    for names in (["prediction"], ["p_up", "prediction"], ["other"], []):
        body = {"inputs": [tensor], "outputs": [{"name": name} for name in names]}
        chosen = client.post("/v2/models/run/infer", json=body).json()["outputs"]
        assert {one["name"] for one in chosen} == {*names} & {*outputs}
    described = client.get("/v2/models/run").json()
    assert described["inputs"] == [{"name": "frames", "datatype": "FP32", "shape": [-1, 2]}]
    assert client.get("/v2").json()["extensions"] == ["sequence"]
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/backwards/ready").status_code == 503


@pytest.mark.parametrize(
    "change",
    [
        *[{"datatype": "FP64"}, {"datatype": "BYTES", "data": ["a", "b", "c"]}],
        *[
            {"shape": shape}
            for shape in ([2, 3], [-1, 3], [3, 1], [10**30], [], [2, 2**62], [3], None)
        ],
        *[{"shape": shape, "data": []} for shape in ([0, 10**30], [0, *[2**31 - 1] * 5])],
        *[{"data": data} for data in ([1, "x", 2], [1, None, 2], {"a": 1})],
    ],
)
def test_invalid_tensors(client: TestClient, change: dict[str, Any]) -> None:
    tensor = {"name": "frames", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3], **change}
    answer = client.post("/v2/models/layer/infer", json={"inputs": [tensor]})
    assert answer.status_code == 400
    assert answer.json()["error"].isprintable()


def test_models_without_streams(client: TestClient) -> None:
    code, answer = _infer(client, "backwards", _walks()[0])
    assert code == 409
    assert "reads sequences from the end" in answer["error"]
    own = client.get("/health").json()["models"]
    assert own["run"]["live"]
    assert not own["backwards"]["live"]
    assert "reads sequences from the end" in own["backwards"]["reason"]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/predict", b"{", 400),
        ("/predict", b"[" * 50_000, 400),
        ("/predict", b"{}", 404),
        ("/predict", b'{"model": "run"}', 400),
        ("/predict", b'{"model": "none", "sequences": []}', 404),
        ("/predict", b'{"model": "run", "sequences": 3}', 400),
        ("/predict", b'{"model": "run", "sequences": [3]}', 400),
        ("/predict", b'{"model": "run", "sequences": [[[1]]]}', 400),
        ("/predict", b'{"model": "run", "sequences": [[["1", "2"]]]}', 400),
        ("/predict", b'{"model": "run", "sequences": [[[1, 2]]], "top": 0}', 400),
        ("/predict", b'{"model": "run", "sequences": [[[1, 2]]], "horizon": 3}', 400),
        ("/predict", b'{"model": "layer", "sequences": [[[1, 2]]]}', 400),
        ("/predict", b'{"model": "layer", "table": {"x": [1]}}', 400),
        ("/predict", b'{"model": "run", "table": {"y": [1]}}', 400),
        ("/predict", b'{"model": "run", "table": {"y": [1], "x": [1, 2]}}', 400),
        ("/predict", b" " * 100_001, 413),
        ("/v2/models/layer/infer", b"{}", 400),
        ("/v2/models/layer/infer", b'{"inputs": []}', 400),
        ("/nothing", b"{}", 404),
    ],
)
def test_invalid_requests(client: TestClient, path: str, body: bytes, code: int) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == code, answer.text
    assert answer.json()["error"].isprintable()


def test_bodies_without_a_length(client: TestClient) -> None:
    assert client.post("/predict", content=iter([b" " * 60_000, b" " * 60_000])).status_code == 413


def test_tokens_and_origins(run: rl.Run) -> None:
    app = _app({"run": run}, max_streams=2, token="secret", origins=["https://other.example"])
    with TestClient(app) as client:
        own = {"authorization": "Bearer secret"}
        others: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer secre"},
            {"authorization": "x"},
            {"authorization": "Basic secret"},
            {"authorization": "secret"},
        ]
        for headers, code in (*((other, 401) for other in others), (own, 200)):
            for path in ("/metrics", "/v2/models/run", "/openapi.json"):
                assert client.get(path, headers=headers).status_code == code
        for path in ("/", "/health", "/v2/health/ready"):
            assert client.get(path).status_code == 200
        protocols: list[list[str]] = [[], ["raglane", "bearer.wrong"]]
        for sent in protocols:
            with client.websocket_connect("/stream", subprotocols=sent) as stream:
                assert "token must be" in stream.receive_json()["error"]
                assert stream.receive()["code"] == 4401
        with client.websocket_connect(
            "/stream", subprotocols=["raglane", "bearer.secret"]
        ) as stream:
            assert str(stream.accepted_subprotocol) == "raglane"
            stream.send_json({"frames": [[1, 2]]})
            assert stream.receive_json()["at"] == 0
        codes = {
            "http://testserver": 200,
            "https://other.example": 200,
            "https://evil.example": 403,
            "http://[": 403,
        }
        for origin, code in codes.items():
            assert client.get("/metrics", headers={**own, "origin": origin}).status_code == code
        with client.websocket_connect("/stream", headers={**own, "origin": "null"}) as stream:
            assert "Origin must be" in stream.receive_json()["error"]
            assert stream.receive()["code"] == 4403
    with pytest.raises(
        ArgumentError, match="token must be a token of visible ASCII characters, got 4 characters"
    ):
        _app({"run": run}, token="päss")


@pytest.fixture(scope="module")
def local() -> Iterator[TestClient]:
    """A server without a token, reached under names of its own."""
    hosts = ["Models.Example.", "192.0.2.7", "2001:db8:0::1", "[2001:DB8::2]"]
    with TestClient(create_app({"layer": _engine()}, allow_hosts=hosts)) as client:
        yield client


_OWN_HOSTS = [
    "localhost",
    "LocalHost:8000",
    "localhost.",
    "localhost.:8000",
    "127.0.0.1:1",
    "127.8.9.1",
    "[::1]",
    "[::1]:8000",
    "[0:0::0001]:8000",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "models.example",
    "MODELS.example:443",
    "models.example.",
    "192.0.2.7:80",
    "[2001:db8::1]",
    "[2001:0DB8::0002]:",
]
_OTHER_HOSTS = [
    "rebound.example",
    "rebound.example:8000",
    "localhost.rebound.example",
    "models.example.rebound.example",
    "evil-localhost",
    "models.example..",
    "192.0.2.8",
    "0.0.0.0",
    "[2001:db8::3]",
    "[::ffff:192.0.2.8]",
    "testserver",
]
_NO_HOSTS = ["", ":80", "::1", "a b", "localhost/", "x@localhost", "localhost:x", "[localhost]"]
_NO_HOSTS += ["localhost, localhost", "[127.0.0.1]", "[::1", "[::1%25lo]", "http://localhost", "é"]
_ROUTES = ["/", "/health", "/v2/health/live", "/v2/health/ready", "/metrics", "/v2", "/docs"]
_ROUTES += ["/v2/models/layer", "/openapi.json", "/nothing"]


def _stream_error(client: TestClient, headers: dict[str, str]) -> tuple[str, int]:
    """Return the refusal of a stream; raise if it is accepted."""
    with client.websocket_connect("/stream", headers=headers) as stream:
        return stream.receive_json()["error"], stream.receive()["code"]


@pytest.mark.parametrize("host", _OWN_HOSTS)
def test_hosts_of_the_server(local: TestClient, host: str) -> None:
    for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
        assert [local.get(path, headers=headers).status_code for path in _ROUTES[:-1]] == [200] * 9
        with local.websocket_connect("/stream?outputs=true", headers=headers) as stream:
            stream.send_json({"frames": [[1, 2, 3]]})
            assert stream.receive_json()["at"] == 0


@pytest.mark.parametrize("host", _OTHER_HOSTS)
def test_a_page_that_gives_its_name_the_address_of_the_server(local: TestClient, host: str) -> None:
    """The browser considers the server part of the page's site, and sends no other origin."""
    for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
        answers = [local.get(path, headers=headers) for path in _ROUTES]
        answers += [
            local.post(path, headers=headers, json={"sequences": []})
            for path in ("/predict", "/v2/models/layer/infer")
        ]
        assert [answer.status_code for answer in answers] == [403] * len(answers)
        assert all("Host must be a name of this server, got" in answer.text for answer in answers)
        error, code = _stream_error(local, headers)
        assert error.startswith("Host must be a name of this server")
        assert code == 4403


@pytest.mark.parametrize("host", _NO_HOSTS)
def test_invalid_hosts(local: TestClient, host: str) -> None:
    headers: Any = {"host": host.encode("latin-1")}
    answer = local.get("/health", headers=headers)
    assert (answer.status_code, "Host must be one header" in answer.text) == (400, True)
    error, code = _stream_error(local, headers)
    assert (error[:23], code) == ("Host must be one header", 1008)


@pytest.mark.parametrize(
    "sent",
    [
        [],
        ["localhost", "localhost"],
        ["localhost", "rebound.example"],
        ["rebound.example", "localhost"],
    ],
)
def test_missing_and_repeated_hosts(sent: list[str]) -> None:
    """From a client that writes its own headers; a server of HTTP may refuse them itself."""
    app, answers = create_app({"layer": _engine()}), list[Any]()
    headers = [(b"host", host.encode()) for host in sent]
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/health", "headers": headers}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1)}

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(answer: Any) -> None:
        answers.append(answer)

    asyncio.run(app(scope, receive, send))
    assert answers[0]["status"] == 400
    assert b"Host must be one header with the name of the server" in answers[1]["body"]


def test_origins_of_the_server(local: TestClient) -> None:
    """They name the host and the port of the request in any form; that of the scheme may be
    missing.
    """
    pairs = {
        ("models.example:80", "http://models.example"): 200,
        ("models.example", "https://models.example:443"): 200,
        ("models.example", "HTTPS://Models.Example."): 200,
        ("[::1]:8000", "http://[0::1]:8000"): 200,
        ("localhost:8000", "http://localhost:3000"): 403,
        ("localhost:8000", "http://127.0.0.1:8000"): 403,
        ("localhost:8000", "http://localhost"): 403,
        ("localhost", "app://localhost"): 403,
        ("localhost", "localhost"): 403,
        ("localhost", "null"): 403,
        ("localhost", ""): 403,
    }
    for (host, origin), code in pairs.items():
        headers = {"host": host, "origin": origin}
        assert local.get("/metrics", headers=headers).status_code == code, headers


def test_a_token_does_not_replace_the_check_of_hosts(run: rl.Run) -> None:
    own = {"authorization": "Bearer secret", "host": "rebound.example"}
    for hosts, code in (((), 403), (None, 200)):
        app = create_app({"run": run}, max_streams=2, token="secret", allow_hosts=hosts)
        with TestClient(app) as client:
            assert client.get("/metrics", headers=own).status_code == code
            assert client.get("/health", headers={"host": own["host"]}).status_code == code
            assert client.get("/metrics", headers={"host": "localhost"}).status_code == 401


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow_hosts": None}, "allow_hosts must be a list of names, or None for a server with a"),
        ({"allow_hosts": "example.org"}, "allow_hosts must be a list of texts, got 'example.org'"),
        ({"allow_hosts": [1]}, "allow_hosts must be a list of texts"),
        ({"origins": "https://example.org"}, "origins must be a list of texts"),
        *(
            ({"allow_hosts": [host]}, "allow_hosts must be names or addresses, without a scheme")
            for host in (
                "http://x.org",
                "x.org:80",
                "x.org/",
                "*",
                "",
                "[::1]:80",
                "::1::",
                "[::1]:",
            )
        ),
    ],
)
def test_arguments_of_hosts(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        create_app({"layer": _engine()}, **options)


def test_pages(client: TestClient) -> None:
    page = client.get("/").text
    assert "'self'" not in page
    assert "http://www.w3.org/2000/svg" in page
    assert page.count("http") == page.count("http://www.w3.org") + page.count('"http", "ws"')
    schema = client.get("/openapi.json").json()
    assert {"/predict", "/health", "/v2/models/{name}/infer"} <= set(schema["paths"])
    routes = client.get("/docs").text
    assert "POST /predict" in routes
    assert "http" not in routes  # it loads nothing
    models = json.loads(page.partition('id="models">')[2].partition("</script>")[0])
    sample = np.array(next(m for m in models if m["name"] == "run")["parameters"]["sample"])
    walks = np.concatenate(_walks())
    assert (np.abs(sample.mean(0) - walks.mean(0)) < walks.std(0)).all()
    assert (
        client.post("/predict", json={"model": "run", "sequences": [[[0, 0]]]}).status_code == 200
    )
    metrics = client.get("/metrics").text
    assert 'raglane_frames_total{model="layer"}' in metrics
    assert 'raglane_requests_total{route="/predict",status="200"}' in metrics


def test_a_failed_engine_is_unhealthy() -> None:
    """Also if another one works."""
    engine = _engine()
    with TestClient(_app({"layer": engine, "other": _engine()})) as client:
        with client.websocket_connect("/stream?model=layer") as stream:
            engine._error = RuntimeError("out of memory")
            stream.send_json({"frames": [[1, 2, 3]]})
            assert "out of memory" in str(stream.receive())
        assert client.get("/health").json()["status"] == "failed"
        assert client.get("/v2/health/ready").status_code == 503
        assert _infer(client, "layer", [[1, 2, 3]])[0] == 503
        engine._error = None


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="models must be at least one model"):
        _app({})
    with pytest.raises(ArgumentError, match="client_streams must be"):
        _app({"layer": _engine()}, client_streams=0)
