"""Streams without an end, whose states are renewed."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, CheckpointError
from raglane.serve import Engine
from raglane.serve.app import create_app

RENEW, WARM_UP = 12, 5
SETTINGS: dict[str, Any] = {"renew": RENEW, "warm_up": WARM_UP}
MODELS: dict[str, Any] = {
    "lstm": lambda: rl.nn.LSTM(3, 4, num_layers=2),
    "learned": lambda: rl.nn.GRU(3, 4, initial_state="learned"),
    "pooling": lambda: [rl.nn.GRU(3, 4), rl.nn.Pooling("mean")],
    "convolution": lambda: rl.nn.CausalConv1d(3, 4, kernel_size=4),
}


def fresh(model: Any, frames: Tensor) -> Tensor:
    """Return what a stream and its successors answer: a fresh one begins WARM_UP frames before it
    takes over from one of RENEW frames.
    """
    outputs = []
    begin = 0
    engine = Engine(model, max_streams=1)
    while begin == 0 or begin + WARM_UP < len(frames):
        with engine.open() as stream:
            stream.push(frames[begin : begin + RENEW])
            engine.step()
            outputs.append(stream.pull()[WARM_UP if begin else 0 :])
        begin += RENEW - WARM_UP
    return torch.cat(outputs)


def in_pieces(engine: Engine, calls: list[Tensor], seed: int) -> list[Tensor]:
    """Return the results of streams that get their frames in random pieces, and move to another slot
    now and then.
    """
    rng = np.random.default_rng(seed)
    streams = [engine.open() for _ in calls]
    at = [0] * len(calls)
    results: list[list[Tensor]] = [[] for _ in calls]
    while any(begin < len(call) for begin, call in zip(at, calls, strict=True)):
        for index, call in enumerate(calls):
            if rng.random() < 0.7:
                count = int(rng.integers(0, 9))
                streams[index].push(call[at[index] : at[index] + count])
                at[index] = min(len(call), at[index] + count)
        while engine.step():
            pass
        for index, stream in enumerate(streams):
            results[index].append(stream.pull())
            if rng.random() < 0.2:
                state = stream.state()
                stream.close()
                streams[index] = engine.open(state)
    for stream in streams:
        stream.close()
    return [torch.cat(parts) for parts in results]


@pytest.mark.parametrize("name", MODELS)
def test_renewed_states_are_those_of_fresh_streams(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model = [part.eval() for part in model] if isinstance(model, list) else model.eval()
    lengths = [0, 1, 5, 6, 7, 8, 11, 12, 13, 18, 19, 20, 26, 27, 70]
    calls = [torch.randn(length, 3) for length in lengths]
    expected = [fresh(model, call) for call in calls]
    engine = Engine(model, max_streams=len(calls), chunk=6, **SETTINGS)
    for whole, rows in zip(engine.run(rl.Ragged(calls)), expected, strict=True):
        assert torch.equal(whole, rows)
    for seed in range(3):
        for served, rows in zip(in_pieces(engine, calls, seed), expected, strict=True):
            assert torch.equal(served, rows)


@pytest.mark.parametrize("settings", [(2, 1), (7, 1), (10, 5), (9, 4)])
def test_every_warm_up(settings: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of half of the frames, after which the next one begins at once."""
    monkeypatch.setitem(globals(), "RENEW", settings[0])
    monkeypatch.setitem(globals(), "WARM_UP", settings[1])
    model = rl.nn.GRU(3, 4).eval()
    calls = [torch.randn(length, 3) for length in (3, 40, 41, 1)]
    engine = Engine(model, max_streams=4, renew=settings[0], warm_up=settings[1])
    for served, call in zip(in_pieces(engine, calls, 0), calls, strict=True):
        assert torch.equal(served, fresh(model, call))


def test_a_reset_begins_again_and_a_swap_restarts() -> None:
    model = rl.nn.LSTM(3, 4).eval()
    engine = Engine(model, max_streams=2, **SETTINGS)
    frames = torch.randn(30, 3)
    stream, other = engine.open(), engine.open()
    for run in (stream.reset, lambda: engine.swap(rl.nn.LSTM(3, 4).eval(), restart=True)):
        stream.push(frames[:9])  # a second state has begun
        while engine.step():
            pass
        run()
        if stream.ready:
            stream.pull()
        stream.push(frames)
        other.push(frames[:3])
        while engine.step():
            pass
        assert torch.equal(stream.pull(), engine.run(rl.Ragged([frames])).values)
    assert engine.stats()["frames"] == 2 * (9 + 30 + 3)


def test_a_reset_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step does not count its frames, and a second state does not replace the new one."""
    engine = Engine(rl.nn.GRU(3, 4).eval(), max_streams=2, **SETTINGS)
    frames = torch.randn(RENEW, 3)
    for length in (RENEW - WARM_UP, RENEW):
        stream = engine.open()
        stream.push(frames[:length])
        while stream.queued > WARM_UP:
            engine.step()
        run = engine._stepper.runner.run

        def interrupted(*sizes: int, stream: Any = stream, run: Any = run) -> None:
            run(*sizes)
            stream.reset()

        with monkeypatch.context() as patch:
            patch.setattr(engine._stepper.runner, "run", interrupted)
            if not engine.step():
                stream.reset()
        stream.push(frames.repeat(3, 1))
        while engine.step():
            pass
        whole = engine.run(rl.Ragged([frames.repeat(3, 1)])).values
        assert torch.equal(stream.pull(), whole)
        stream.close()


def test_states_are_those_of_the_same_renewal() -> None:
    model = rl.nn.GRU(3, 4).eval()
    engine = Engine(model, max_streams=1, **SETTINGS)
    state = engine.open().state()
    others: list[dict[str, Any]] = [{}, {**SETTINGS, "renew": 13}, {**SETTINGS, "warm_up": 4}]
    for options in others:
        with pytest.raises(CheckpointError):
            Engine(model, max_streams=1, **options).open(state)
    for age in (-1, RENEW, 2**62):
        data = state[48:-8] + struct.pack("<q", age)
        changed = state[:40] + struct.pack("<Q", zlib.crc32(data)) + data
        with pytest.raises(CheckpointError, match=f"an age of {age} frames"):
            Engine(model, max_streams=1, **SETTINGS).open(changed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"renew": 10}, "renew, warm_up must be given together"),
        ({"warm_up": 3}, "renew, warm_up must be given together"),
        ({"renew": 10, "warm_up": 6}, "warm_up must be at most 5, got 6"),
        ({"renew": 1, "warm_up": 1}, "renew must be at least 2, got 1"),
        ({"renew": 10, "warm_up": 0}, "warm_up must be .* got 0"),
        ({"renew": 2.5, "warm_up": 1}, "renew must be a whole number"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        Engine(rl.nn.GRU(3, 4), max_streams=1, **options)


def test_a_server_renews() -> None:
    """Also over a new connection that continues from a state."""
    torch.manual_seed(0)
    model = rl.nn.GRU(3, 4).eval()
    frames = torch.randn(40, 3)
    expected = fresh(model, frames)
    answers: list[Any] = []
    state: dict[str, Any] = {}
    app = create_app({"gru": model}, max_streams=3, allow_hosts=["testserver"], **SETTINGS)
    with TestClient(app) as client:
        for begin, end in ((0, 9), (9, 10), (10, 40)):
            with client.websocket_connect("/stream") as stream:
                if state:
                    stream.send_text(json.dumps(state))
                    assert stream.receive_json()["restored"]
                stream.send_text(json.dumps({"frames": frames[begin:end].tolist()}))
                while len(answers) < end:
                    message = stream.receive_json()
                    assert "outputs" in message, message
                    answers += message["outputs"]
                stream.send_text('{"state": true}')
                state = stream.receive_json()
                assert len(base64.b64decode(state["state"])) == 48 + 2 * 4 * 4 + 8
    assert torch.equal(torch.tensor(answers), expected)
