"""Trainings that diverge: exit code 3, the message, and the files that are kept."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import FAST, Capsys, fails, tree, write_steps
from raglane.cli import main
from raglane.errors import DivergedError
from raglane.training.checkpoint import load_model
from raglane.training.settings import OPTIMIZERS, Settings
from raglane.training.state import TrainingState, check_losses, load_state, warning

# Each epoch has one step, which multiplies the weights by -10: the loss diverges in about the fifth
# epoch.
_GROWING = (
    "--optimizer adamw --weight-decay 3700 --batch-size 100 --hidden-size 4 --threads 1".split()
)


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_steps(tmp_path / "ok.csv", 40))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_learning_rate_that_is_far_too_large(
    data: str, tmp_path: Path, capsys: Capsys, optimizer: str
) -> None:
    command = [
        "train",
        data,
        "--output",
        str(tmp_path / "run"),
        *FAST,
        "--quiet",
        "--optimizer",
        optimizer,
    ]
    command += ["--grad-clip", "0"]
    rates = ("1e30", "1e38", "3.4e38")
    # Each rate with each of these options, over the optimizers.
    for number, options in enumerate(
        (
            [],
            ["--validation-fraction", "0"],
            ["--task", "forecast"],
            ["--grad-clip", "0.1"],
        ),
        OPTIMIZERS.index(optimizer),
    ):
        rate = rates[number % 3]
        pieces = [
            f"lr must be ... got {float(rate):g}, and ",
            "in epoch 1",
            "--grad-clip 1",
            "--lr, e.g. 0.003",
        ]
        expected = [
            piece for piece in pieces if piece != "--grad-clip 1" or "--grad-clip" not in options
        ]
        fails([*command, "--lr", rate, *options], capsys, *expected, code=3)
        assert [path.name for path in tmp_path.iterdir()] == ["ok.csv"]


@pytest.mark.parametrize("batch_size", ["2", "100"])
def test_a_loss_that_is_not_finite(
    data: str, tmp_path: Path, capsys: Capsys, batch_size: str
) -> None:
    """With one step per epoch, the validation loss or the weights show it."""
    command = [
        "train",
        data,
        "--task",
        "forecast",
        "--output",
        str(tmp_path / "run"),
        *FAST,
        "--optimizer",
        "sgd",
    ]
    command += ["--grad-clip", "0", "--batch-size", batch_size, "--lr", "1e30", "--quiet"]
    fails(command, capsys, "loss of", "the loss stays finite", code=3)
    command[-2] = "3e38"
    fails(
        [*command, "--validation-fraction", "0"],
        capsys,
        "weights" if batch_size == "100" else "loss",
        code=3,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ok.csv"]


def test_the_best_model_until_then_is_kept(data: str, tmp_path: Path, capsys: Capsys) -> None:
    run = tmp_path / "run"
    command = ["train", data, "--output", str(run), *_GROWING, "--epochs", "30", "--quiet"]
    pieces = (
        "a training loss of",
        "which began at",
        "a smaller --weight-decay",
        "the best model, of epoch",
    )
    fails(command, capsys, *pieces, code=3)
    state, _, _ = load_state(run / "last")
    assert 0 < state.epoch < 10
    losses = [row["train_loss"] for row in state.history]
    assert losses[-1] > 10 * losses[0]
    assert {path.name for path in run.iterdir()} == {
        "best",
        "last",
        "run.json",
        "run.toml",
        "curves.csv",
        "curves.png",
    }
    assert load_model(run).task == "classify"
    before = tree(tmp_path)
    # A resumed run would diverge again.
    for options in ([], ["--epochs", "60"], ["--device", "cpu"]):
        resume = ["train", "--resume", "--output", str(run), *options]
        pieces = (
            "resume must be ",
            "a run that diverged: a training loss of",
            "in epoch",
            "--overwrite",
        )
        fails(resume, capsys, *pieces, code=3)
        assert tree(tmp_path) == before
    assert main(["evaluate", str(run), data, "--quiet"]) == 0
    assert main(["predict", str(run), data, "-o", str(tmp_path / "p.csv"), "--quiet"]) == 0
    # The process may have been killed before run.json said that the run diverged.
    description = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(description | {"diverged": None}))
    fails(
        ["train", "--resume", "--output", str(run), "--quiet"],
        capsys,
        "lr must be ... got 0.003",
        code=3,
    )
    assert json.loads((run / "run.json").read_text()) == description
    assert main(["train", data, "--output", str(run), *FAST, "--overwrite", "--quiet"]) == 0
    assert json.loads((run / "run.json").read_text())["diverged"] is None


def test_ctrl_c_saves_no_model_that_has_diverged(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    from raglane.runs.progress import LineWatcher

    def stop(self: Any, epoch: int, batch: int, totals: Any) -> None:
        if not math.isfinite(totals.mean_loss):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LineWatcher, "batch_done", stop)
    command = [
        "train",
        data,
        "--task",
        "forecast",
        "--output",
        str(tmp_path / "run"),
        *FAST,
        "--optimizer",
        "sgd",
    ]
    fails([*command, "--lr", "1e30", "--batch-size", "3"], capsys, "a training loss of", code=3)
    assert not (tmp_path / "run").exists()


def test_nothing_to_learn_from_is_no_divergence(tmp_path: Path, capsys: Capsys) -> None:
    single = tmp_path / "single.csv"
    single.write_text("id,x\n" + "".join(f"s{n},{n}.5\n" for n in range(12)))
    command = [
        "train",
        str(single),
        "--task",
        "forecast",
        "--output",
        str(tmp_path / "run"),
        *FAST,
        "--quiet",
    ]
    fails(command, capsys, "data must be ... got no target")
    assert not (tmp_path / "run").exists()


def test_losses_that_count_as_divergence() -> None:
    settings, begun = Settings(), TrainingState(start_loss=2.0)

    def lost(loss: float, state: TrainingState, **more: float) -> bool:
        try:
            check_losses({"train_loss": loss, **more}, state, settings)
        except DivergedError:
            return True
        return False

    assert [lost(loss, begun) for loss in (1999.0, 2001.0, math.inf, math.nan)] == [
        False,
        True,
        True,
        True,
    ]
    # E.g. a first batch of constant sequences, which are forecast without a loss.
    easy = TrainingState(start_loss=0.0)
    assert [lost(loss, easy) for loss in (999.0, 1001.0)] == [False, True]
    # Later epochs are compared with the first, unless it diverged.
    quick = replace(begun, history=[{"train_loss": 0.01}])
    assert [lost(loss, quick) for loss in (9.0, 11.0)] == [False, True]
    away = replace(begun, history=[{"train_loss": 1500.0}])
    assert [lost(loss, away) for loss in (1999.0, 2001.0)] == [False, True]
    perfect = replace(begun, history=[{"train_loss": 1e-9}])
    assert [lost(loss, perfect) for loss in (0.9, 1.1)] == [False, True]
    # Validation data may differ from the training data, so only a loss that is not finite counts.
    assert [lost(1.0, begun, validation_loss=loss) for loss in (1e30, math.inf)] == [False, True]


def test_warnings_of_a_loss_that_grows(data: str, tmp_path: Path, capsys: Capsys) -> None:
    def end(*losses: float, best_loss: float = 0.5, start: float = 2.0) -> str | None:
        rows = [{"train_loss": loss} for loss in losses]
        return warning(
            TrainingState(
                len(rows), history=rows, best_epoch=1, best_loss=best_loss, start_loss=start
            )
        )

    assert end(2.0, 1.0, 3.0) is None
    assert end(0.01, 0.9) is None
    assert end(1e-9, 1e-3) is None
    assert end(3.0, 3.0, start=0.0) is None
    assert "ends at 30 and began at 2:" in str(end(2.0, 30.0))
    assert "ends at 500 and began at 2:" in str(end(500.0, 500.0))
    assert "the validation loss is 1e+30 at its best" in str(end(2.0, 2.0, best_loss=1e30))
    command = [
        "train",
        data,
        "--output",
        str(tmp_path / "run"),
        *_GROWING,
        "--epochs",
        "3",
        "--overwrite",
    ]
    assert main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("raglane: warning: the training loss ends at ")
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
