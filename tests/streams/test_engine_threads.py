"""The engine: its thread, threads of its clients, and asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import nullcontext

import pytest
import torch

import raglane as rl
from raglane.errors import ArgumentError, ClosedError
from served_models import engine_of


def test_a_stop_while_the_engine_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, before = engine_of(), {*threading.enumerate()}
    clear = engine._driver.event.clear

    def stop_and_clear() -> None:
        engine.stop()
        clear()

    monkeypatch.setattr(engine._driver.event, "clear", stop_and_clear)
    engine.start()
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
        assert not thread.is_alive()


def test_clients_in_threads() -> None:
    engine = engine_of(max_streams=8, max_queue=64)
    wrong: list[BaseException] = []

    def client(seed: int) -> None:
        made_by = torch.Generator().manual_seed(seed)
        try:
            for _ in range(5):
                frames = torch.randn(20, 3, generator=made_by)
                with engine.open() as stream:
                    outputs = []
                    for at in range(0, 20, 4):
                        stream.push(frames[at : at + 4])
                        outputs.append(stream.pull())
                    while sum(map(len, outputs)) < 20:
                        outputs.append(stream.pull())
                    assert torch.equal(torch.cat(outputs), engine.run(rl.Ragged([frames])).values)
        except BaseException as error:
            wrong.append(error)

    with engine:
        with pytest.raises(ArgumentError, match="start must be called once"):
            engine.start()
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong, wrong
    assert engine.stats()["streams"] == 0


def test_a_pull_wakes_an_engine_that_waits_for_space() -> None:
    engine, frames = engine_of(), torch.randn(8, 3)
    outputs, until = list[torch.Tensor](), time.monotonic() + 60
    with engine, engine.open() as stream:
        for part in frames.split(4):
            stream.push(part)
            while stream.ready < 4 or engine._driver.event.is_set():
                assert time.monotonic() < until
        while sum(map(len, outputs)) < 8:
            assert time.monotonic() < until
            outputs.append(stream.pull())
    assert torch.equal(torch.cat(outputs), engine.run(rl.Ragged([frames])).values)


def test_closes_and_resets_during_steps() -> None:
    # Each stream computes only its own frames, although slots are reused while a step runs.
    engine = engine_of(max_streams=3, max_queue=64)
    frames = torch.randn(40, 3)
    expected = engine.run(rl.Ragged([frames])).values
    with engine:
        for round_ in range(60):
            with engine.open() as stream:
                stream.push(frames)
                if round_ % 3 == 1:
                    stream.reset()
                    stream.push(frames)
                if round_ % 3 == 2:
                    continue
                outputs = [stream.pull()]
                while sum(map(len, outputs)) < 40:
                    outputs.append(stream.pull())
                assert torch.equal(torch.cat(outputs), expected)


def test_asyncio() -> None:
    engine = engine_of(max_streams=20, max_queue=16)

    async def client(seed: int) -> bool:
        frames = torch.randn(9, 3, generator=torch.Generator().manual_seed(seed))
        outputs: list[torch.Tensor] = []
        async with engine.stream() as stream:
            for at in range(0, 9, 3):
                stream.push(frames[at : at + 3])
                outputs.append(await stream.pull(2))
            async for rows in stream:
                outputs.append(rows)
                if sum(map(len, outputs)) == 9:
                    break
        return torch.equal(torch.cat(outputs), engine.run(rl.Ragged([frames])).values)

    async def all_clients() -> list[bool]:
        return await asyncio.wait_for(asyncio.gather(*map(client, range(20))), 60)

    with engine:
        assert all(asyncio.run(all_clients()))


def test_a_waiting_task_sees_that_its_stream_was_closed() -> None:
    engine = engine_of()

    async def client() -> None:
        async with engine.stream() as stream:
            waiting = asyncio.ensure_future(stream.pull())
            await asyncio.sleep(0)
            stream.stream.close()
            with pytest.raises(ClosedError):
                await asyncio.wait_for(waiting, 60)

    asyncio.run(client())


def test_tasks_that_are_gone_do_not_keep_others_waiting() -> None:
    engine, frame = engine_of(), torch.randn(1, 3)
    stream = engine.stream()

    async def client(leaves: bool) -> None:
        gone, waiting = (asyncio.ensure_future(stream.pull()) for _ in range(2))
        await asyncio.sleep(0)
        if leaves:
            return
        gone.cancel()
        last = asyncio.ensure_future(stream.pull())
        await asyncio.sleep(0)
        last.cancel()
        assert len(engine._slots.waiters._waiting[0]) == 2
        stream.push(frame)
        engine.step()
        assert (await asyncio.wait_for(waiting, 60)).shape == (1, 4)

    asyncio.run(client(leaves=False))
    asyncio.run(client(leaves=True))
    stream.push(frame)
    assert engine.step() == 1  # although the loop of those that wait is closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("own_thread", [True, False])
def test_a_waiting_task_sees_that_a_step_failed(
    own_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    monkeypatch.setattr(engine._stepper.runner, "run", lambda *_: 1 / 0)

    async def client() -> None:
        waiting = asyncio.ensure_future(engine.stream().pull())
        await asyncio.sleep(0)
        engine.open().push(torch.randn(1, 3))
        if not own_thread:
            with pytest.raises(ZeroDivisionError):
                engine.step()
        with pytest.raises(ClosedError, match="division by zero"):
            await asyncio.wait_for(waiting, 10)

    with engine if own_thread else nullcontext():
        asyncio.run(client())
