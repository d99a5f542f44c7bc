"""The outputs of streams have the bits of whole sequences, however they are divided, and next to
any others.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from raglane.errors import ShapeError
from raglane.nn.embeddings import with_dropout
from raglane.serve import Engine
from raglane.streams import Stream
from served_models import LAYERS, MODELS, made


def sequences(count: int, dtype: torch.dtype, seed: int = 0, width: int = 6) -> list[Tensor]:
    """Return sequences of which the first have lengths 0 and 1."""
    made_by, lengths = (
        torch.Generator().manual_seed(seed),
        np.random.default_rng(seed).integers(2, 14, count),
    )
    return [
        torch.randn(n, width, generator=made_by).to(dtype) for n in (0, 1, *lengths[2:].tolist())
    ]


def served(engine: Engine, data: list[Tensor], seed: int = 0) -> list[Tensor]:
    """Push sequences in a random order and division, with resets, moves and strangers; return their
    outputs.
    """
    rng = np.random.default_rng(seed)
    streams: list[Stream | None] = [None] * len(data)
    pushed, outputs = [0] * len(data), [list[Tensor]() for _ in data]

    def finish(place: int) -> None:
        while streams[place].queued:  # type: ignore[union-attr]
            engine.step()
        outputs[place].append(streams[place].pull())  # type: ignore[union-attr]

    while any(at < len(part) for at, part in zip(pushed, data, strict=True)):
        for place in rng.permutation(len(data)):
            stream, part = streams[place], data[place]
            if stream is None:
                stream = streams[place] = engine.open()
            action = rng.random()
            if action < 0.5:
                count = int(rng.integers(0, 6))
                stream.push(part[pushed[place] : pushed[place] + count])
                pushed[place] = min(pushed[place] + count, len(part))
            elif action < 0.7:
                outputs[place].append(stream.pull(int(rng.integers(0, 3)) or None))
            elif action < 0.75:
                finish(place)
                state = stream.state()
                stream.close()
                streams[place] = engine.open(state)
            elif action < 0.8 and pushed[place] < len(
                part
            ):  # else many streams are hardly ever at their ends at once
                stream.reset()
                outputs[place].clear()
                pushed[place] = 0
            elif action < 0.9:
                with engine.open() as stranger:
                    stranger.push(part[:1])
                    if rng.random() < 0.5:
                        engine.step()
        engine.step()
    for place in range(len(data)):
        if streams[place] is None:
            streams[place] = engine.open()
        finish(place)
        streams[place].close()  # type: ignore[union-attr]
    return [torch.cat(parts) for parts in outputs]


def check(model: Any, data: list[Tensor], **options: Any) -> Engine:
    engine = Engine(model, max_streams=len(data) + 2, feature_shape=6, **options)
    whole = engine.run(rl.Ragged(data))
    assert all(torch.equal(a, b) for a, b in zip(served(engine, data), whole, strict=True))
    assert torch.equal(engine.run(rl.Ragged(data[::-1])).values, torch.cat(whole.to_list()[::-1]))
    return engine


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(MODELS, [torch.float32, torch.bfloat16]),
        *product(["LSTM", "GRU", "RNN", "skips"], [torch.float64]),
    ],
)
def test_streams_equal_whole_sequences(name: str, dtype: torch.dtype) -> None:
    check(made(name, dtype), sequences(8, dtype), chunk=3)


@pytest.mark.parametrize("name", MODELS)
def test_run_is_the_model_in_float64(name: str) -> None:
    model = made(name, torch.float64)
    batch = rl.Ragged([part for part in sequences(8, torch.float64) if len(part)])
    outputs = Engine(model, max_streams=1, feature_shape=6).run(batch)
    with torch.no_grad():
        expected: Any = batch
        for part in model if isinstance(model, list) else [model]:
            expected = part(expected)
            expected = expected[0] if isinstance(expected, tuple) else expected
    found = outputs.values if isinstance(expected, rl.Ragged) else outputs.last()
    expected = expected.values if isinstance(expected, rl.Ragged) else expected
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_bits_of_their_call(name: str) -> None:
    layer, batch = made(name), rl.Ragged(sequences(6, torch.float32))
    with torch.no_grad():
        assert torch.equal(Engine(layer, max_streams=1).run(batch).values, layer(batch)[0].values)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN", "skips"])
def test_int8_weights(name: str) -> None:
    model = made(name)
    engine = check(model, sequences(8, torch.float32), dtype=torch.int8)
    assert engine.digest != Engine(model, max_streams=1, feature_shape=6).digest
    if isinstance(model, rl.nn.LSTM):
        batch = rl.Ragged(sequences(8, torch.float32))
        with torch.no_grad():
            expected = rl.quantize(model)(batch)[0]
        assert torch.equal(engine.run(batch).values, expected.values)
        assert torch.equal(Engine(model, max_streams=1).run(batch).values, expected.values)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_threads_and_chunks(threads: int, chunk: int | None) -> None:
    data = sequences(20, torch.float32)
    before = torch.get_num_threads()
    engine = check(made("skips"), data, threads=threads, chunk=chunk)
    assert torch.get_num_threads() == before
    other = Engine(made("skips").train(), max_streams=1)  # it runs as in evaluation
    assert torch.equal(engine.run(rl.Ragged(data)).values, other.run(rl.Ragged(data)).values)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(seed: int) -> None:
    name = list(MODELS)[seed * 5 % len(MODELS)]
    data = sequences(12, torch.float32, seed)
    engine = Engine(made(name), max_streams=14, feature_shape=6, chunk=1 + seed)
    expected = engine.run(rl.Ragged(data))
    for round_ in range(3):
        found = served(engine, data, 10 * seed + round_)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_tokens() -> None:
    torch.manual_seed(0)
    encoder = rl.nn.SequenceEncoder(5, 8, "lstm", num_embeddings=50, pooling="mean").eval()
    data = [torch.randint(0, 50, (n,)) for n in (0, 1, 7, 4)]
    found = served(Engine(encoder, max_streams=6), data)
    with torch.no_grad():
        for outputs, part in zip(found, data, strict=True):
            for end in range(1, len(part) + 1):
                assert torch.equal(outputs[end - 1], encoder(rl.Ragged([part[:end]]))[0])


def test_frames_of_several_dimensions() -> None:
    torch.manual_seed(0)
    model = [part.eval() for part in (nn.Conv2d(1, 2, 3), nn.Flatten(), rl.nn.GRU(8, 3))]
    engine = Engine(model, max_streams=2, feature_shape=(1, 4, 4))
    frames = torch.randn(5, 1, 4, 4)
    stream = engine.open()
    stream.push(frames[:2])
    engine.step()
    stream.push(frames[2:])
    engine.step()
    with torch.no_grad():
        torch.testing.assert_close(stream.pull(), model[2](model[1](model[0](frames)))[0])


@pytest.mark.parametrize("has_tokens", [False, True])
def test_weights_are_copied(has_tokens: bool) -> None:
    first = [with_dropout(nn.Embedding(9, 6), 0.5)] if has_tokens else []
    model = nn.Sequential(*first, rl.nn.LSTM(6, 4)).eval()
    batch = rl.Ragged([torch.arange(9)] if has_tokens else sequences(4, torch.float32))
    engine = Engine(model, max_streams=1)
    before = engine.run(batch).values
    for part in model.train().parameters():
        part.data.zero_()
    assert torch.equal(engine.run(batch).values, before)


def test_the_digest_depends_on_every_weight() -> None:
    for model in (
        made("skips"),
        rl.nn.SequenceEncoder(5, 8, num_embeddings=50, initial_state="learned").eval(),
    ):
        found = {Engine(model, max_streams=1).digest}
        for part in model.parameters():
            part.data += 0.5
            found.add(Engine(model, max_streams=1).digest)
        assert len(found) == 1 + len([*model.parameters()])


def test_a_nan_stays_in_its_stream() -> None:
    engine = Engine(made("skips"), max_streams=4, nan="pass")
    data = sequences(4, torch.float32)[2:]
    expected = engine.run(rl.Ragged(data))
    one, two, other = engine.open(), engine.open(), engine.open()
    one.push(data[0])
    other.push(torch.full((5, 6), torch.nan))
    two.push(data[1])
    engine.step()
    assert torch.equal(one.pull(), expected[0])
    assert torch.equal(two.pull(), expected[1])
    assert other.pull().isnan().any()


def test_swap_goes_on_or_restarts() -> None:
    first, second = (rl.nn.LSTM(6, 4, initial_state="learned").eval() for _ in range(2))
    for start in (first.get_parameter("initial_h"), second.get_parameter("initial_h")):
        nn.init.normal_(start)
    part = sequences(3, torch.float32)[2]
    engine = Engine(first, max_streams=1)
    stream = engine.open()
    stream.push(part)
    engine.step()
    stream.pull()
    with torch.no_grad():
        _, state = first(part)
        expected, _ = second(part, state)
        new, _ = second(part)
    engine.swap(second)
    stream.push(part)
    engine.step()
    assert torch.equal(stream.pull(), expected)
    stream.push(part[:1])
    engine.swap(second, restart=True)
    stream.push(part[1:])
    engine.step()
    assert torch.equal(stream.pull(), new)


def test_a_restart_with_other_states() -> None:
    part = sequences(3, torch.float32)[2]
    engine = Engine(rl.nn.LSTM(6, 4).eval(), max_streams=1)
    stream = engine.open()
    stream.push(part)
    engine.step()
    stream.pull()
    other = rl.nn.GRU(6, 4).eval()
    with pytest.raises(ShapeError, match="Pass restart=True"):
        engine.swap(other)
    engine.swap(other, restart=True)
    stream.push(part)
    engine.step()
    assert torch.equal(stream.pull(), other(part)[0])


def test_a_state_moves_to_another_process_of_the_same_model() -> None:
    part = sequences(3, torch.float32)[2]
    whole = Engine(made("voice"), max_streams=1, feature_shape=6).run(rl.Ragged([part])).values
    one, two = (Engine(made("voice"), max_streams=3, feature_shape=6) for _ in range(2))
    stream = one.open()
    stream.push(part[:3])
    one.step()
    assert torch.equal(stream.pull(), whole[:3])
    two.open()
    moved = two.open(stream.state())
    moved.push(part[3:])
    two.step()
    assert torch.equal(moved.pull(), whole[3:])
