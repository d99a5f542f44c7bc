"""Ray Serve with two replicas: streams stay at their replica, and continue elsewhere after it was
killed.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import pytest
import torch
import websockets.sync.client as websockets
from websockets.exceptions import ConnectionClosed

import raglane as rl
from raglane.errors import ArgumentTypeError
from raglane.serve import Engine, deployment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # of Ray itself
ray, serve = (
    pytest.importorskip(name, reason="needs the extra ray") for name in ("ray", "ray.serve")
)

_OWN = {"authorization": "Bearer secret"}


def _layer() -> rl.nn.LSTM:
    torch.manual_seed(0)
    return rl.nn.LSTM(3, 8).eval()


@pytest.fixture(scope="module")
def where() -> Iterator[str]:
    """The address of two replicas."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    small = {"object_store_memory": 80_000_000, "include_dashboard": False}
    ray.init(num_cpus=4, log_to_driver=False, logging_level="ERROR", **small)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        two = deployment({"layer": _layer()}, token="secret", max_streams=100)
        serve.run(two.options(num_replicas=2, health_check_period_s=1).bind())
        yield f"127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


class _Call:
    """A client of the Open Inference Protocol that keeps the last state of its stream."""

    def __init__(self, where: str, name: str) -> None:
        self.address, self.name = f"http://{where}/v2/models/layer/infer", name
        self.at = self.moves = 0
        self.state, self.found = None, torch.empty(0, 8)

    def push(self, frames: torch.Tensor) -> None:
        tensor = {"shape": list(frames.shape), "datatype": "FP32", "data": frames.tolist()}
        facts = {
            "sequence_id": self.name,
            "at": self.at,
            "return_state": True,
            "sequence_start": not self.at,
        }
        while True:
            body = {"inputs": [tensor], "parameters": facts}
            with suppress(httpx2.TransportError):
                answer = httpx2.post(
                    self.address, json=body, headers=_OWN | {"x-session-id": self.name}, timeout=10
                )
                if answer.status_code == 200:
                    break
                # 404 and 409: this replica has no such sequence, or an older part of it.
                self.moves += answer.status_code in (404, 409)
                facts |= {"sequence_start": True, "state": self.state}
                time.sleep(0.1)
        content = answer.json()
        rows = torch.tensor(content["outputs"][0]["data"]).reshape(-1, 8)
        self.state, self.found = content["parameters"]["state"], torch.cat([self.found, rows])
        self.at += len(frames)


def _replicas() -> list[str]:
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith("SERVE_REPLICA") and "raglane" in name]


def test_streams_survive_their_replicas(where: str) -> None:
    """Both replicas are killed, one after the other; streams stay where they are before."""
    values, outputs, kept, restored = torch.randn(24, 12, 3), [], "", 0
    calls = [_Call(where, f"call {number}") for number in range(24)]
    replicas = dict(zip((4, 8), _replicas(), strict=True))
    with ExitStack() as stack:

        def connected() -> Any:
            address, headers = f"ws://{where}/stream?outputs=true", _OWN
            return stack.enter_context(websockets.connect(address, additional_headers=headers))

        live = connected()
        for step in range(12):
            if step in replicas:
                assert step > 4 or not any(call.moves for call in calls)
                while (
                    serve.status().applications["default"].status != "RUNNING"
                    or len(_replicas()) < 2
                ):
                    time.sleep(0.1)
                ray.kill(ray.get_actor(replicas[step], namespace="serve"))
            for call, own in zip(calls, values, strict=True):
                call.push(own[step : step + 1])
            while True:
                try:
                    live.send(json.dumps({"frames": values[0, step : step + 1].tolist()}))
                    rows = json.loads(live.recv())["outputs"]
                    live.send(json.dumps({"state": True}))
                    kept = json.loads(live.recv())["state"]
                    break
                except ConnectionClosed:
                    restored, live = restored + 1, connected()
                    live.send(json.dumps({"state": kept}))
                    assert json.loads(live.recv()) == {"restored": True}
            outputs += rows
    assert restored
    assert all(call.moves for call in calls)
    expected = Engine(_layer(), max_streams=1).run(rl.Ragged(list(values)))
    assert all(torch.equal(call.found, own) for call, own in zip(calls, expected, strict=True))
    assert torch.equal(torch.tensor(outputs), expected[0])
    assert httpx2.get(f"http://{where}/v2/models/layer").status_code == 401  # without the token


def test_a_page_under_a_name_of_its_own_is_refused(where: str) -> None:
    """Ray's proxy passes the header ``Host`` of the client to the replica."""
    address, rebound = f"http://{where}/v2/models/layer", {"host": "rebound.example"}
    assert httpx2.get(address, headers=_OWN).status_code == 200
    answer = httpx2.get(address, headers=_OWN | rebound)
    assert (answer.status_code, "Host must be a name" in answer.json()["error"]) == (403, True)


def test_an_engine_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="models must be runs or modules"):
        deployment(Engine(_layer(), max_streams=1))
