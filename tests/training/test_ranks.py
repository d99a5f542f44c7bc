"""Several processes train the same as one: gradients, weights, sums, signals, and ranks that
die.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe, current_process
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from raglane.data import Dataset
from raglane.errors import ArgumentError, LostRankError
from raglane.training import batches
from raglane.training.checkpoint import read_tensors
from raglane.training.job import Job
from raglane.training.machine import check_machine
from raglane.training.ranks import Ranks, ranks_of
from raglane.training.ranks import launch as launching
from raglane.training.ranks.launch import _send
from raglane.training.run import train
from raglane.training.settings import Settings
from raglane.training.state import Totals, TrainingState
from raglane.training.trainer import Trainer
from ranks import fork_ranks, gradients
from small_runs import Watcher, small_records

_QUICK = Settings(epochs=2, hidden_size=5, batch_size=12, lr=0.05, threads=1, grad_clip=0.1, seed=3)


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


def _records(count: int = 40) -> Dataset:
    return small_records(count, seed=5)


def _trained(folder: Path, settings: Settings, **more: Any) -> dict[str, torch.Tensor]:
    train(settings, _records(), _records(9), folder, **more)
    return read_tensors(folder / "last" / "weights.safetensors")


def _numbers(folder: Path) -> dict[str, Any]:
    """Return the state of a run without times."""
    state: dict[str, Any] = json.loads((folder / "last" / "training.json").read_text())["state"]
    for row in state["history"]:
        del row["seconds"], row["elements_per_second"]
    return state


def _largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


_CHUNKED = replace(_QUICK, task="forecast", cell="lstm", bptt_steps=2, batch_size=5)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (_QUICK, 3),
        (replace(_QUICK, accumulate=3, batch_size=4), 2),
        # Batches of one or two sequences: other ranks are idle.
        (replace(_QUICK, batch_size=2), 3),
        (replace(_QUICK, batch_elements=9), 4),
        (replace(_CHUNKED, batch_size=2), 3),
        (replace(_QUICK, task="forecast", loss="mse", batch_size=2, accumulate=2), 3),
    ],
)
def test_weights_and_sums_are_those_of_one_process(
    tmp_path: Path, settings: Settings, ranks: int
) -> None:
    alone = _trained(tmp_path / "alone", settings)
    assert (
        0
        < _largest(alone, _trained(tmp_path / "shared", replace(settings, processes=ranks)))
        < 1e-5
    )
    mine, theirs = _numbers(tmp_path / "alone"), _numbers(tmp_path / "shared")
    assert mine["order"] == theirs["order"]
    for one, other in zip(mine["history"], theirs["history"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_ranks_of_an_environment() -> None:
    ranks: Any = ranks_of(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    )
    assert (ranks.rank, ranks.count, ranks.local) == (3, 4, 1)
    assert ranks_of({}) is None


def test_steps_of_several_batches_are_those_of_large_ones(tmp_path: Path) -> None:
    """With epochs that end within a step."""
    large = Settings(
        epochs=3, hidden_size=4, optimizer="sgd", lr=0.5, grad_clip=0.0, threads=1, batch_size=12
    )
    weights = []
    for place, settings in enumerate((large, replace(large, batch_size=5, accumulate=4))):
        train(settings, _records(12), None, tmp_path / str(place))
        weights.append(read_tensors(tmp_path / str(place) / "last" / "weights.safetensors"))
    assert _largest(*weights) < 1e-5


def test_a_gradient_is_that_of_one_process() -> None:
    once = Settings(
        "tag", epochs=1, optimizer="sgd", lr=1.0, grad_clip=0.0, threads=1, batch_size=12
    )
    several = replace(once, batch_size=6, accumulate=2)
    kinds = [
        (replace(chosen, cell=layer), dtype)
        for chosen, layer in (
            (once, "gru"),
            (once, "sru"),
            (several, "gru"),
            (replace(several, accumulate=3), "lstm"),
        )
        for dtype in (torch.float32, torch.float64)
    ]
    alone = gradients(kinds, 1)[0]
    for one, several_of_it, limit in ((alone[0], alone[4], 1e-6), (alone[1], alone[5], 1e-12)):
        assert float((one - several_of_it).norm() / one.norm()) < limit
    found = gradients(kinds, 3)
    for place, (_, dtype) in enumerate(kinds):
        error = float((found[0][place] - alone[place]).norm() / alone[place].norm())
        assert error < (1e-6 if dtype == torch.float32 else 1e-12), (kinds[place], error)
        assert all(torch.equal(others[place], found[0][place]) for others in found), kinds[place]


_LONG = replace(_QUICK, processes=2, dropout=0.3, epochs=3, batch_size=4)


def _whole(folder: Path) -> dict[str, Any]:
    """Return the content of a run without times."""
    return {
        **{name: (folder / name / "weights.safetensors").read_bytes() for name in ("best", "last")},
        "optimizer": (folder / "last" / "training.safetensors").read_bytes(),
        "numbers": _numbers(folder),
    }


def test_every_batch_of_every_rank_draws_other_numbers() -> None:
    seeds = set()
    for rank in range(2):
        trainer: Any = Trainer(Job(_QUICK, training=_records()), Ranks(rank, 2))
        trainer.optimizer, trainer._stop, trainer._batches = Mock(param_groups=[]), Mock(), 3
        for trainer.state.epoch, trainer.state.batch in itertools.product(range(2), range(3)):
            trainer._batch_started()
            seeds.add(torch.initial_seed())
    assert len(seeds) == 12


def test_a_signal_stops_all_ranks_and_the_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    _trained(tmp_path / "whole", _LONG)

    def stop(epoch: int, batch: int) -> None:
        if (epoch, batch) == (1, 1):
            os.kill(os.getpid(), signal.SIGINT)

    result = train(_LONG, _records(), _records(9), tmp_path / "stopped", callback=Watcher(stop))
    assert result.stopped_by == signal.SIGINT
    assert (result.state.epoch, result.state.batch) != (0, 0)
    watcher = Watcher(lambda *_: None)
    train(_LONG, _records(), _records(9), tmp_path / "stopped", resume=True, callback=watcher)
    assert len(watcher.rows) == 3 - result.state.epoch
    assert _whole(tmp_path / "stopped") == _whole(tmp_path / "whole")


def test_a_kept_error_can_be_collected_in_a_forked_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TCPStore has no thread in the child, where destroying it killed a DataLoader worker."""

    def none(pipe: Any) -> Any:
        raise OSError("no process")

    monkeypatch.setattr(launching, "start_process", none)
    kept = []
    try:
        _trained(tmp_path / "run", replace(_QUICK, processes=2))
    except OSError as error:
        kept.append(error)
    # Stacks of threads that have ended are freed once there are many.
    ends = threading.Event()
    others = [threading.Thread(target=ends.wait) for _ in range(16)]
    for thread in others:
        thread.start()
    child = os.fork()
    if child == 0:
        one = threading.Thread(target=int)
        one.start()
        one.join()
        kept.clear()
        gc.collect()
        os._exit(0)
    ends.set()
    for thread in others:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert len(kept) == 1


def test_messages_of_ranks_contain_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are sent by value, because a rank does not share the key of its parent process."""
    mine, its = Pipe()
    _send(its, "ended", TrainingState(totals=Totals(torch.tensor(1.5))))
    monkeypatch.setattr(current_process(), "authkey", b"another")
    _, state = mine.recv()
    assert float(state.totals.loss) == 1.5


def test_files_contain_the_settings_as_passed(tmp_path: Path) -> None:
    chosen = replace(_QUICK, processes=2, threads=None, epochs=1, lr_schedule="constant")
    train(chosen, _records(), None, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"] == chosen.to_config()
    with pytest.raises(ArgumentError, match=r"at most .*, got 600"):
        check_machine(replace(chosen, processes=600))
    assert check_machine(replace(chosen, processes=600, engine="ray", device="cpu")).type == "cpu"


def test_a_run_whose_rank_died_is_resumed_with_any_number_of_ranks(tmp_path: Path) -> None:
    chunked = replace(_LONG, task="forecast", cell="lstm", bptt_steps=2)
    _trained(tmp_path / "whole", chunked)
    for number, settings in enumerate((_LONG, chunked)):
        folder = tmp_path / f"died-{number}"
        started: list[int] = []
        start = launching.start_process

        def kill(
            epoch: int, batch: int, number: int = number, started: list[int] = started
        ) -> None:
            if (epoch, batch) == (1, 1):
                os.kill(started[number], signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:

            def watched(pipe: Any, started: list[int] = started, start: Any = start) -> Any:
                process, code = start(pipe)
                started.append(process.pid)
                return process, code

            patch.setattr(launching, "start_process", watched)
            with pytest.raises(LostRankError, match=f"rank {number}, killed by SIGKILL") as found:
                train(settings, _records(), _records(9), folder, callback=Watcher(kill))
        state = _numbers(folder)
        assert "resume=True" in str(found.value)
        assert (state["epoch"], state["batch"]) != (0, 0)
        if number == 0:
            alone = replace(_LONG, processes=1)
            assert train(alone, _records(), _records(9), folder, resume=True).state.epoch == 3
            continue
        train(settings, _records(), _records(9), folder, resume=True)
        assert _whole(folder) == _whole(tmp_path / "whole")


def test_a_run_whose_worker_died_is_resumed_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(_LONG, processes=1, workers=1)
    _trained(tmp_path / "whole", chosen)
    made, noted = batches.make_batch, tmp_path / "noted"
    count = 0

    def note(epoch: int, batch: int) -> None:
        noted.write_text(f"{epoch} {batch}")

    def dies(samples: Any) -> Any:
        nonlocal count
        count += 1
        if count == 6:
            end = time.monotonic() + 60
            while time.monotonic() < end and not (noted.exists() and noted.read_text() == "1 5"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return made(samples)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "make_batch", dies)
        # So that a worker has this function; from Python 3.14 on, the default is another.
        patch.setattr(
            multiprocessing.context._default_context,
            "_actual_context",
            multiprocessing.get_context("fork"),
        )
        with pytest.raises(
            LostRankError, match=r"lost a worker of the DataLoader, .*Resume with resume=True"
        ):
            train(chosen, _records(), _records(9), tmp_path / "died", callback=Watcher(note))
    assert (_numbers(tmp_path / "died")["epoch"], _numbers(tmp_path / "died")["batch"]) == (0, 5)
    train(chosen, _records(), _records(9), tmp_path / "died", resume=True)
    assert _whole(tmp_path / "died") == _whole(tmp_path / "whole")
