"""The engine: errors, statistics and memory."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raglane as rl
from raglane.errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyError,
    CheckpointError,
    ClosedError,
    DispatchError,
    ShapeError,
)
from raglane.serve import Engine
from raglane.streams import Stream
from served_models import engine_of


def test_no_slot_is_left() -> None:
    engine = engine_of()
    one, _ = engine.open(), engine.open()
    with pytest.raises(BusyError, match=r"max_streams must be .* got 2 open streams"):
        engine.open()
    one.close()
    engine.open()
    assert engine.stats()["refused"] == 1


def test_a_full_queue_refuses_all_frames_of_a_push() -> None:
    engine = engine_of()
    stream, frames = engine.open(), torch.randn(6, 3)
    stream.push(frames[:3])
    with pytest.raises(
        BusyError,
        match=r"frames must be at most max_queue = 4 .* got 2 frames, with 3 in the queue",
    ):
        stream.push(frames[3:5])
    stream.push(frames[3:4])
    engine.step()
    assert torch.equal(stream.pull(), engine.run(rl.Ragged([frames[:4]])).values)


def test_results_that_are_not_pulled_stop_only_their_stream() -> None:
    engine = engine_of()
    slow, other, frames = engine.open(), engine.open(), torch.randn(8, 3)
    slow.push(frames[:4])
    engine.step()
    slow.push(frames[4:5])
    assert engine.step() == 0
    slow.push(frames[5:])
    other.push(frames[:1])
    assert engine.step() == 1
    assert (slow.queued, slow.ready, other.ready) == (4, 4, 1)
    assert engine.step() == 0
    first = slow.pull(3)
    assert engine.step() == 1
    engine_run = engine.run(rl.Ragged([frames])).values
    second = slow.pull()
    assert torch.equal(torch.cat([first, second]), engine_run[:7])


def test_a_closed_stream() -> None:
    engine = engine_of()
    stream = engine.open()
    stream.push(torch.randn(2, 3))
    stream.close()
    stream.close()
    for use in (
        lambda: stream.push(torch.randn(1, 3)),
        stream.pull,
        stream.state,
        stream.reset,
        lambda: stream.queued,
    ):
        with pytest.raises(ClosedError, match="stream must be an open stream"):
            use()
    assert stream.closed
    assert engine.step() == 0
    assert engine.stats()["streams"] == engine.stats()["queued"] == 0


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (torch.randn(3), ShapeError),
        (torch.randn(1, 4), ShapeError),
        (torch.randn(1, 1, 3), ShapeError),
        (torch.randn(1, 3).double(), ShapeError),
        (torch.ones(1, 3, dtype=torch.int64), ShapeError),
        (torch.randn(1, 3, device="meta"), ShapeError),
        (torch.randn(1, 3).to_sparse(), ArgumentTypeError),
        (lambda: torch.nested.nested_tensor([torch.randn(1, 3)]), ArgumentTypeError),
        (np.ones((1, 3)), ShapeError),
        (np.ma.masked_equal(np.ones((1, 3), np.float32), 1), ArgumentTypeError),
        ("abc", ArgumentTypeError),
        (None, ArgumentTypeError),
        ([[1.0, 2.0]], ShapeError),
        ([[1.0, 2.0, 3.0], [1.0]], ArgumentTypeError),
        (torch.tensor([[1.0, torch.nan, 0.0]]), ArgumentError),
        (torch.tensor([[torch.inf, torch.nan, 0.0]]), ArgumentError),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_wrong_frames_change_nothing(frames: Any, error: type[Exception]) -> None:
    engine = engine_of()
    stream = engine.open()
    with pytest.raises(error, match=r"frames must be"):
        stream.push(frames() if callable(frames) else frames)
    assert engine.step() == 0


@pytest.mark.parametrize(
    "frames",
    [
        torch.empty(0, 3),
        torch.full((2, 3), torch.inf),
        torch.full((2, 3), 3e38),
        np.ones((2, 3), np.float32),
        [[1, 2, 3], [4.0, 5.0, 6.0]],
        torch.randn(3, 2).T,
        torch.randn(2, 3, requires_grad=True),
        torch.randn(4, 3)[::2],
    ],
)
def test_valid_frames(frames: Any) -> None:
    engine = engine_of()
    stream = engine.open()
    stream.push(frames)
    rows = torch.as_tensor(frames, dtype=torch.float32).detach()
    assert engine.step() == bool(len(rows))
    torch.testing.assert_close(
        stream.pull(), engine.run(rl.Ragged([rows])).values, rtol=0, atol=0, equal_nan=True
    )


def test_frames_are_copied() -> None:
    engine, frames = engine_of(), torch.randn(2, 3)
    stream, expected = engine.open(), engine.run(rl.Ragged([frames])).values
    stream.push(frames)
    frames.zero_()
    engine.step()
    assert torch.equal(stream.pull(), expected)


@pytest.mark.parametrize("tokens", [[-1], [10], [3, 10]])
def test_tokens_out_of_range(tokens: list[int]) -> None:
    engine = Engine(rl.nn.SequenceEncoder(3, 4, num_embeddings=10).eval(), max_streams=1)
    with pytest.raises(ArgumentError, match="tokens from 0 to 9"):
        engine.open().push(torch.tensor(tokens))


@pytest.mark.parametrize(
    "change",
    [
        *(lambda s: s[:-1], lambda s: s + b"1", lambda s: b"x" + s[1:], lambda _: b""),
        lambda s: s[:-2] + bytes([s[-2] ^ 64]) + s[-1:],
    ],
)
def test_damaged_states(change: Any) -> None:
    engine = engine_of()
    with pytest.raises(CheckpointError, match="state must be"):
        engine.open(change(engine.open().state()))
    assert engine.stats()["streams"] == 1


def test_a_state_of_another_model() -> None:
    state = engine_of().open().state()
    torch.manual_seed(1)
    with pytest.raises(CheckpointError, match="same model"):
        Engine(rl.nn.LSTM(3, 4).eval(), max_streams=1).open(state)
    with pytest.raises(ArgumentTypeError, match="state must be bytes"):
        engine_of().open("state")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model",
    [rl.nn.LSTM(4, 4), rl.nn.GRU(3, 5), rl.nn.LSTM(3, 8, proj_size=4), rl.nn.LSTM(3, 4).double()],
)
def test_a_model_that_cannot_replace_another(model: nn.Module) -> None:
    with pytest.raises(ShapeError, match="model must be"):
        engine_of().swap(model.eval())


def test_a_step_that_fails_is_reported_by_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    stream = engine.open()
    stream.push(torch.randn(1, 3))

    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(engine._stepper.runner, "run", fail)
    with pytest.raises(MemoryError):
        engine.step()
    _every_use_raises(engine, stream, "none left")
    assert not engine.stats()["works"]
    stream.close()
    assert stream.closed


def _every_use_raises(engine: Engine, stream: Stream, words: str) -> None:
    model, frame = rl.nn.LSTM(3, 4).eval(), torch.randn(1, 3)
    uses: list[Callable[[], object]] = [
        stream.pull,
        partial(stream.push, frame),
        stream.state,
        stream.reset,
        partial(engine.push, [stream], frame),
        partial(engine.pull, [stream]),
        engine.open,
        engine.stream,
        engine.step,
        engine.start,
        partial(engine.swap, model),
        partial(engine.swap, model, restart=True),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match=words):
            use()


def test_results_without_memory_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states contain the frames of the step, whose results are lost."""
    engine = engine_of()
    stream = engine.open()
    stream.push(torch.randn(1, 3))

    def fail(*_: Any) -> None:
        raise MemoryError("no room for results")

    monkeypatch.setattr(engine._slots.results, "append", fail)
    monkeypatch.setattr(engine._slots.results, "extend", fail)
    with pytest.raises(MemoryError):
        engine.step()
    _every_use_raises(engine, stream, "no room for results")


def _long(dtype: torch.dtype = torch.float32) -> Any:
    """More frames than a queue has room for, all of which are refused once their numbers are
    read.
    """
    return torch.full((3,), torch.nan, dtype=dtype).expand(2**16, 3)


@pytest.mark.parametrize(
    "frames",
    [
        _long(),
        _long().numpy(),
        _long().requires_grad_(),
        torch.complex(_long(), _long()).conj().imag,
    ],
    ids=["tensor", "array", "with gradients", "negated"],
)
def test_more_frames_than_a_queue_are_not_read(frames: Any) -> None:
    engine = engine_of()
    stream, closed = engine.open(), engine.open()
    closed.close()
    for queued in (0, 4):
        words = rf"at most max_queue = 4 frames.*65536 frames, with {queued} in the queue"
        with pytest.raises(BusyError, match=words):
            stream.push(frames)
        if not queued:
            stream.push(torch.ones(4, 3))
    assert engine.stats()["refused"] == 2
    with pytest.raises(ClosedError):
        closed.push(frames)
    with pytest.raises(ShapeError, match="for each of the 1 streams, got 65536 frames"):
        engine.push([stream], frames)
    with pytest.raises(ShapeError, match="Reshape or convert"):
        stream.push(frames[:, :2])
    assert stream.queued == 4


@pytest.mark.parametrize("is_array", [False, True])
def test_more_frames_than_a_queue_are_not_copied(is_array: bool) -> None:
    model = [nn.Flatten(), rl.nn.LSTM(6, 4).eval()]
    stream = engine_of(model=model, feature_shape=(3, 2)).open()
    frames: Any = torch.ones(2, 3).expand(2**40, 2, 3).transpose(1, 2)
    if is_array:
        frames = np.broadcast_to(np.ones((3, 2), np.float32), (2**40, 3, 2))
    with pytest.raises(BusyError, match=f"{2**40} frames"):
        stream.push(frames)


def test_an_interrupt_ends_only_the_streams_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(max_streams=3)
    hit, gone, other, frames = engine.open(), engine.open(), engine.open(), torch.randn(2, 3)
    hit.push(frames)
    gone.push(frames)

    def interrupt(*_: Any) -> None:
        gone.close()
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(engine._stepper.runner, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(ClosedError, match="its states are incomplete"):
        hit.pull()
    with pytest.raises(ClosedError, match="got a closed stream"):
        gone.pull()
    # Both slots are free, and contain nothing of the step.
    streams = [other, engine.open(), engine.open()]
    for stream in streams:
        stream.push(frames)
    assert engine.step() == 3
    for stream in streams:
        assert torch.equal(stream.pull(), engine.run(rl.Ragged([frames])).values)


def test_a_stream_that_opens_during_a_step_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, frames, opened, states = (
        engine_of(max_streams=3),
        torch.randn(4, 3),
        list[Stream](),
        list[bytes](),
    )
    with engine.open() as first:
        first.push(frames[:2])
        engine.step()
        state = first.state()
    gone, read, plain = engine.open(), engine.open(), engine._stepper.runner.run
    engine.push([gone, read], frames[:2])
    reading = Thread(target=lambda: states.append(read.state()))

    def run(*sizes: int) -> None:
        reading.start()
        reading.join(0.1)  # until after the step
        gone.close()
        for _ in range(3 * engine.max_streams):  # more come and go than there are slots
            engine.open().close()
        opened.append(engine.open(state))
        plain(*sizes)

    with monkeypatch.context() as during:
        during.setattr(engine._stepper.runner, "run", run)
        engine.step()
    reading.join()
    assert states == [read.state()]
    opened[0].push(frames[2:])
    engine.step()
    assert torch.equal(opened[0].pull(), engine.run(rl.Ragged([frames])).values[2:])


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (3, 1, 2)])
def test_a_reset_during_a_step_discards_only_its_results(
    counts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, frames = engine_of(max_streams=3), [torch.randn(count, 3) for count in counts]
    streams, plain = [engine.open() for _ in counts], engine._stepper.runner.run
    for stream, part in zip(streams, frames, strict=True):
        stream.push(part)
    with monkeypatch.context() as during:
        during.setattr(
            engine._stepper.runner, "run", lambda *sizes: (plain(*sizes), streams[0].reset())
        )
        engine.step()
    streams[0].push(frames[0])
    engine.step()
    for stream, part in zip(streams, frames, strict=True):
        assert torch.equal(stream.pull(), engine.run(rl.Ragged([part])).values)


def test_results_of_several_dimensions() -> None:
    engine = engine_of(model=[nn.Linear(3, 6), nn.Unflatten(1, (2, 3))])
    stream, frames = engine.open(), torch.randn(4, 3)
    stream.push(frames)
    engine.step()
    assert torch.equal(stream.pull(), engine.run(rl.Ragged([frames])).values.view(4, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_streams_at_once(dtype: torch.dtype) -> None:
    engine = Engine(rl.nn.LSTM(3, 4).to(dtype).eval(), max_streams=5)
    streams, frames = [engine.open() for _ in range(5)], torch.randn(3, 5, 3).to(dtype)
    for one in frames:
        engine.push(streams[::-1], one)
    assert engine.step() == 5
    found = [engine.pull(streams[1:]) for _ in frames]
    wanted = engine.run(rl.Ragged(list(frames.transpose(0, 1).flip(0))))
    assert torch.equal(torch.stack(found, 1).flatten(0, 1), wanted.values[3:])
    assert streams[0].ready == 3
    engine.push([], frames[0, :0])
    assert engine.pull([]).shape == (0, 4)


def test_many_wrong_streams_change_nothing() -> None:
    engine, other = engine_of(max_streams=3), engine_of()
    one, two, closed = (engine.open() for _ in range(3))
    closed.close()
    wrong: list[tuple[Any, str]] = [
        ([one, one], "different streams"),
        ([one, closed], "an open stream"),
    ]
    wrong += [
        ([one, other.open()], "this engine"),
        (None, "a list of streams"),
        (iter([one]), "a list of streams"),
    ]
    for streams, words in wrong:
        for use in (lambda own: engine.push(own, torch.randn(2, 3)), engine.pull):
            with pytest.raises((ArgumentError, ArgumentTypeError, ClosedError), match=words):
                use(streams)
    with pytest.raises(ShapeError, match="one frame for each of the 2 streams"):
        engine.push([one, two], torch.randn(3, 3))
    two.push(torch.randn(4, 3))
    with pytest.raises(BusyError, match="below max_queue = 4"):
        engine.push([one, two], torch.randn(2, 3))
    assert (one.queued, two.queued, engine.step()) == (0, 4, 1)
    with pytest.raises(ArgumentError, match="1 without a result"):
        engine.pull([two, one])
    assert two.ready == 4


@pytest.mark.parametrize("most", [-1, 1.5, True, "a"])
def test_a_wrong_number_of_results_is_refused(most: Any) -> None:
    engine = engine_of()
    stream = engine.open()
    stream.push(torch.randn(3, 3))
    engine.step()
    with pytest.raises((ArgumentError, ArgumentTypeError), match="max_items must be"):
        stream.pull(most)
    assert stream.pull().shape == (3, 4)


def test_a_task_does_not_wait_for_no_result() -> None:
    async def client(engine: Engine) -> None:
        async with engine.stream() as stream:
            assert repr(stream) == "AsyncStream(0 frames queued, 0 results)"
            await stream.pull(0)

    with pytest.raises(ArgumentError, match="max_items must be at least 1"):
        asyncio.run(client(engine_of()))


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (
            ArgumentError,
            {
                "max_streams": 0,
                "max_queue": 0,
                "chunk": 1.5,
                "threads": 0,
                "nan": "keep",
                "idle": 0,
            },
        ),
        (ArgumentError, {"dtype": torch.float16}),
        ((ArgumentError, ArgumentTypeError), {"feature_shape": -1, "idle": "a", "on_idle": 3}),
        *(
            ((ArgumentError, ArgumentTypeError), {"feature_shape": wrong})
            for wrong in ((3, 1.5), "abc")
        ),
    ],
)
def test_wrong_options_are_refused(error: Any, options: dict[str, Any]) -> None:
    for name, value in options.items():
        with pytest.raises(error, match=f"{name} must be"):
            engine_of(**{name: value})


@pytest.mark.parametrize(
    "change", [lambda array: array.copy(), lambda array: np.frombuffer(array.tobytes(), "f4")]
)
def test_arrays_that_cannot_be_written_are_copied(change: Callable[[Any], Any]) -> None:
    engine = engine_of()
    stream = engine.open()
    frames = np.ones((2, 3), np.float32)
    stream.push(change(frames).reshape(2, 3))
    engine.step()
    assert torch.equal(stream.pull(), engine.run(rl.Ragged([torch.from_numpy(frames)])).values)


def test_idle_streams_are_closed() -> None:
    closed: list[Stream] = []
    engine = engine_of(idle=1000.0, on_idle=closed.append)
    one, two = engine.open(), engine.open()
    assert engine.expire() == 0
    time.sleep(0.05)
    two.push(torch.randn(1, 3))
    assert engine.expire(0.04) == 1
    assert closed == [one]
    assert one.closed
    assert not two.closed
    assert engine.stats()["evicted"] == 1
    engine = engine_of(idle=0.01, on_idle=lambda _: engine.stop())
    stream = engine.start().open()
    until = time.monotonic() + 60
    while engine._driver.is_running:
        assert time.monotonic() < until
    assert stream.closed
    engine.open()


def test_every_use_keeps_a_stream_open_and_wakes_the_engine() -> None:
    engine, frame = engine_of(max_queue=1), torch.randn(1, 3)
    stream = engine.open()
    for push, pull in (
        (stream.push, stream.pull),
        (partial(engine.push, [stream]), partial(engine.pull, [stream])),
    ):
        for use in (partial(push, frame), pull):
            engine._slots._touched[:] = -np.inf
            engine._driver.event.clear()
            use()
            assert (engine._driver.event.is_set(), engine.expire(3600.0)) == (True, 0)
            engine.step()


def test_statistics() -> None:
    engine = engine_of(chunk=1)
    one, two = engine.open(), engine.open()
    one.push(torch.randn(3, 3))
    one.push(torch.randn(1, 3))
    two.push(torch.randn(1, 3))
    assert engine.stats()["ready"] == 2
    assert engine.step() == 2
    assert engine.step() == 1
    stats = engine.stats()
    counts = {
        name: stats[name]
        for name in ("streams", "ready", "queued", "results", "steps", "frames", "late")
    }
    assert counts == {
        "streams": 2,
        "ready": 1,
        "queued": 2,
        "results": 3,
        "steps": 2,
        "frames": 3,
        "late": 1,
    }
    assert stats["step_streams"]["most"] == 2
    assert 0 < stats["step_ms"]["p50"] <= stats["step_ms"]["p99"] <= stats["step_ms"]["most"]


def test_frames_that_are_left_wait_from_the_step_before() -> None:
    engine = engine_of(chunk=1, max_queue=9)
    engine.open().push(torch.randn(9, 3))
    time.sleep(0.3)
    for _ in range(9):
        engine.step()
    waits = engine.stats()["queue_ms"]
    assert waits["most"] >= 300
    assert waits["p50"] < 150


class Doubled(nn.LSTM):
    """A subclass that changes the output of torch's layer."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        out, state = super().forward(input, hx)
        return out.map(lambda values: 2 * values), state


class Backwards(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, rl.nn.LSTM(3, 4, bidirectional=how == "directions")
        self.attention = nn.MultiheadAttention(4, 1) if how == "attention" else nn.Identity()

    def forward(self, batch: rl.Ragged) -> Any:
        out, (_, c) = self.layer(batch)
        results: dict[str, Callable[[], Any]] = {
            "padded": out.to_padded,
            "reverse": lambda: self.layer(batch.reverse())[0],
            "scores": lambda: torch.softmax(out.values @ out.values.T, -1) @ out.values,
            "softmax": lambda: out.softmax(1),
            "cell state": lambda: c[-1],
            "two": lambda: (out, out.values),
            "flipped": lambda: out.values.flip(0),
            "tensor": lambda: self.layer(batch.values)[0],
            "pad": lambda: nn.functional.pad(out, (0, 0, 2, 0)),
            "mirror": lambda: nn.functional.pad(out, (0, 0, 2, 0), mode="reflect"),
        }
        return results.get(self.how, lambda: out)()


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            Backwards("directions"),
            r"layer \(LSTM\), which reads sequences from the end. Build the layer with bidirec",
        ),
        (Backwards("attention"), r"attention \(MultiheadAttention\), which reads whole sequences"),
        (Backwards("padded"), "Ragged.to_padded"),
        (Backwards("reverse"), "Ragged.reverse"),
        (Backwards("softmax"), "Ragged.softmax"),
        (Backwards("scores"), r"Backwards\).* rows of the batch meet in its operation mm"),
        (Backwards("cell state"), "a state other than the output"),
        (Backwards("two"), "it returns 2 results"),
        (Backwards("flipped"), r"Backwards\): rows of the batch meet"),
        (Backwards("tensor"), r"layer \(LSTM\): it is called with a tensor"),
        (
            Backwards("pad"),
            "pad of the steps, and .*one result per frame .rl.nn.CausalConv1d reads",
        ),
        (Backwards("mirror"), r"Backwards\): .*pad must be .* two for the steps, with a constant"),
        (nn.LSTM(3, 4), r"LSTM\), a layer of torch. Call rl.accelerate"),
        (rl.accelerate(Doubled(3, 4)), r"AcceleratedDoubled\), which has a forward of its own"),
        (rl.nn.GRU(3, 4, initial_state="lengths"), "initial_state is 'lengths'"),
        ([rl.nn.GRU(3, 4), nn.Linear(5, 2)], r"parts.1 \(Linear\): it raised RuntimeError: .*mat1"),
    ],
)
def test_models_that_are_refused_by_name(model: Any, named: str) -> None:
    with pytest.raises(
        DispatchError, match=f"model must be a model that runs element by element.*{named}"
    ):
        Engine(model, max_streams=1, feature_shape=3)


@pytest.mark.parametrize("model", [None, 3, rl.nn.LSTM])
def test_other_values_than_models_are_refused(model: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="model must be a module"):
        Engine(model, max_streams=1)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_opened_and_closed_streams_leave_no_memory() -> None:
    engine, frame = engine_of(max_streams=50), torch.randn(2, 3)

    def rounds(count: int) -> int:
        for _ in range(count):
            streams = [engine.open() for _ in range(50)]
            for stream in streams[:5]:
                stream.push(frame)
            engine.step()
            for stream in streams:
                stream.close()
        gc.collect()
        return resident()

    before = rounds(50)
    assert rounds(1000) - before < 1 << 19


def test_memory_of_open_streams() -> None:
    slots = 20_000
    engine = Engine(rl.nn.LSTM(8, 128).eval(), max_streams=slots)
    gc.collect()
    before = resident()
    streams = [engine.open() for _ in range(slots)]
    for stream in streams:
        stream.push(torch.zeros(1, 8))
    engine.step()
    for stream in streams:
        stream.pull()
    # The queued frames and results of all streams are 11 MB, and grow by doubling.
    assert resident() - before < slots * 1536 + (40 << 20)
