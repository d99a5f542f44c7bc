"""The lines of a training whose output is no terminal."""

from __future__ import annotations

import time

import pytest

from raglane.runs.progress import LineWatcher
from raglane.training.state import TrainingState


def _listed(epochs: int, best: set[int], capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Return the epochs that have a line."""
    watcher = LineWatcher()
    watcher.started(TrainingState(), epochs, 1)
    for epoch in range(1, epochs + 1):
        row = {"epoch": float(epoch), "train_loss": 1.0, "elements_per_second": 5.0}
        watcher.epoch_done(row, epoch in best)
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("  best") for line in lines].count(True) == len(best)
    return [int(line.split("/")[0].removeprefix("epoch")) for line in lines]


def test_long_trainings_have_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert _listed(20, {3}, capsys) == list(range(1, 21))
    assert _listed(43, {1, 2, 17}, capsys) == [1, 2, 10, 17, 20, 30, 40, 43]


def test_long_epochs_have_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10_000, 11))
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    listed = _listed(40, set(), capsys)
    assert listed[:4] == [3, 6, 9, 10]
