"""The command in its own process: output, Ctrl-C, SIGKILL, a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import FAST, read_csv, write_steps
from processes import run, start
from raglane.training.checkpoint import load_model
from raglane.training.state import load_state
from raglane.training.trainer import Trainer


def test_the_default_from_nothing_to_predictions(tmp_path: Path) -> None:
    # Children must find the raglane that is tested here, in an environment without colours.
    path = os.pathsep.join(filter(None, sys.path))
    trained = subprocess.run(
        [sys.executable, "-m", "raglane", "demo", "--epochs", "5", "--output", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (trained.returncode, trained.stderr) == (0, "")
    assert "training: 243 sequences" in trained.stdout
    assert (
        "validation: 27 sequences, 10 % of the training sequences, stratified by label, seed 0"
        in trained.stdout
    )
    # A line per epoch where there is no terminal, and nothing that moves a cursor.
    assert sum(line.startswith("epoch ") for line in trained.stdout.splitlines()) == 5
    assert "\x1b" not in trained.stdout
    assert "\r" not in trained.stdout
    assert "lightning" not in trained.stdout.lower()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    code, evaluated, errors = run(tmp_path, "evaluate", "run")
    assert (code, errors) == (0, "")
    numbers = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert numbers["sequences"] == 370
    assert numbers["accuracy"] > 0.85
    assert f"test: accuracy {numbers['accuracy']:.3f}" in trained.stdout
    assert f"evaluation: accuracy {numbers['accuracy']:.3f}" in evaluated
    code, _, errors = run(tmp_path, "predict", "run", "--output", "p.csv")
    assert (code, errors) == (0, "")
    assert [row["id"] for row in read_csv(tmp_path / "p.csv")] == [
        str(number) for number in range(370)
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    write_steps(tmp_path / "steps.csv", 60)
    # A training of minutes, past its first checkpoints.
    options = ["--epochs", "4000", "--hidden-size", "4", "--threads", "1", "--output", "run"]
    command = start(tmp_path, "train", "steps.csv", *options)
    command.wait_for("epoch 3/")
    command.signal(number)
    assert command.end() == code
    assert command.errors() == ""
    assert "resume with: raglane train --resume --output run" in command.printed()
    state, _, _ = load_state(tmp_path / "run" / "last")
    assert state.epoch >= 3
    assert load_model(tmp_path / "run").task == "classify"
    assert (tmp_path / "run" / "curves.png").exists()
    ended, resumed, errors = run(
        tmp_path, "train", "--resume", "--output", "run", "--epochs", str(state.epoch + 2)
    )
    assert (ended, errors) == (0, "")
    assert f"epoch {state.epoch + 2}/{state.epoch + 2}" in resumed
    assert len((tmp_path / "run" / "curves.csv").read_text().splitlines()) == state.epoch + 3


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    (folder := tmp_path / "here").mkdir()
    write_steps(folder / "steps.csv", 60)
    # A kilobyte for a file: run.json still fits, weights do not.
    code, _, errors = run(
        folder, "train", "steps.csv", "--hidden-size", "32", "--output", "run", largest_file=1500
    )
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("raglane: error: ")
    assert "too large" in errors.lower()
    assert [path.name for path in folder.iterdir()] == ["steps.csv"]


def _allow_workers() -> None:
    """Let this process, a daemon, have workers of a DataLoader."""
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _kill_at(name: str, epoch: int, batch: int | None) -> None:
    """Kill this process after a method of the trainer, if its state is at this epoch and batch;
    without a batch, before the method.
    """
    _allow_workers()
    method = getattr(Trainer, name)

    def killed(self: Trainer, *arguments: Any) -> Any:
        if batch is None and self.state.epoch == epoch:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = method(self, *arguments)
        if (self.state.epoch, self.state.batch) == (epoch, batch):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(Trainer, name, killed)


def _results(run: Path) -> list[Any]:
    """Return the history without times, the optimizer and the weights of a run."""
    state = load_state(run / "last")[0]
    times = ("seconds", "elements_per_second")
    history = [
        {name: value for name, value in row.items() if name not in times} for row in state.history
    ]
    files = ("best/weights.safetensors", "last/weights.safetensors", "last/training.safetensors")
    return [history, *((run / name).read_bytes() for name in files)]


@pytest.mark.parametrize(
    ("options", "moment", "saved"),
    [
        (["--batch-elements", "9", "--bucket"], ("_save_last", 2, 0), (2, 0)),
        # A worker takes seconds to start, in each epoch.
        (
            ["--batch-size", "4", "--workers", "1", "--epochs", "2"],
            ("_save_epoch", 1, 0),
            (1, 0),
        ),
        (["--task", "forecast", "--bptt-steps", "2"], ("_save_last", 2, 0), (2, 0)),
        # Before the end of the second epoch is saved.
        (["--batch-size", "4", "--bucket"], ("_epoch_done", 1, None), (1, 2)),
    ],
    ids=["elements", "workers", "chunks", "last batch"],
)
def test_a_kill_at_the_end_of_an_epoch_loses_no_batch(
    tmp_path: Path,
    options: list[str],
    moment: tuple[str, int, int | None],
    saved: tuple[int, int],
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    write_steps(folder / "ok.csv")
    command = ["train", "ok.csv", *FAST, "--epochs", "3", "--checkpoint-minutes", "0", *options]
    assert start(folder, *command, "--output", "whole", before=_allow_workers).end() == 0
    killed = start(folder, *command, "--output", "killed", before=partial(_kill_at, *moment))
    assert killed.end() == -signal.SIGKILL
    state = load_state(folder / "killed" / "last")[0]
    assert (state.epoch, state.batch) == saved
    resumed = start(folder, "train", "--resume", "--output", "killed", before=_allow_workers)
    assert (resumed.end(), resumed.errors()) == (0, "")
    assert _results(folder / "killed") == _results(folder / "whole")
