"""The advice on a trained model: worse than a rule, overfitting, underfitting, done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from commands import FAST, Capsys
from raglane.cli import main
from raglane.data import read
from raglane.data.dataset import Dataset
from raglane.runs.advice import advise
from raglane.training.results import Evaluation
from raglane.training.run import TrainingResult
from raglane.training.settings import Settings
from raglane.training.state import TrainingState
from raglane.training.tasks import Measured

_RECORDS = read([[1.0], [2.0, 3.0]], labels=["a", "b"])
# Epochs as (training loss, validation loss, training accuracy, validation accuracy).
_FALLING = [(1.0, 1.0, 0.4, 0.4), (0.9, 0.9, 0.6, 0.6), (0.8, 0.8, 0.7, 0.65)]
_RISING = [(1.0, 1.0, 0.5, 0.5), (0.5, 0.8, 0.8, 0.7), (0.2, 1.2, 0.95, 0.68)]
_EXACT = [(1.0, 1.0, 0.5, 0.5), (0.2, 0.2, 0.9, 0.9), (0.1, 0.1, 1.0, 1.0)]


def _advice(
    rows: list[tuple[float, float, float, float]],
    rule: float = 0.3,
    training: Dataset = _RECORDS,
    **options: Any,
) -> str | None:
    """Return the advice on a classification with these epochs, and a most frequent class."""
    names = ("train_loss", "validation_loss", "train_accuracy", "validation_accuracy")
    history = [dict(zip(names, row, strict=True)) for row in rows]
    losses = [row["validation_loss"] for row in history]
    best = losses.index(min(losses)) + 1
    state = TrainingState(epoch=len(rows), best_epoch=best, history=history)
    numbers = {
        "loss": min(losses),
        "accuracy": history[best - 1]["validation_accuracy"],
        "majority_accuracy": rule,
    }
    settings = Settings(**{"epochs": len(rows), "lr_schedule": "constant", **options})
    return advise(
        settings,
        TrainingResult(None, "accuracy", state),
        Evaluation("classify", 9, 9, numbers, Measured(numbers)),
        "validation",
        training,
    )


def test_underfitting() -> None:
    longer = "the last epoch was the best: try epochs=20 or hidden_size=128"
    assert _advice(_FALLING) == longer
    # Under a rate that falls to 0 the last epoch is nearly always the best.
    assert _advice(_FALLING, lr_schedule="cosine") is None
    # A training that was stopped by patience was not too short.
    assert _advice(_FALLING, epochs=9) is None


def test_overfitting() -> None:
    symptom = (
        "the validation loss rose after epoch 2 while the training loss fell (overfitting): try "
    )
    assert _advice(_RISING) == f"{symptom}dropout=0.3 or weight_decay=0.01"
    assert _advice(_RISING, dropout=0.4) == f"{symptom}weight_decay=0.01 or hidden_size=32"
    options: dict[str, Any] = {"dropout": 0.3, "weight_decay": 0.1}
    assert _advice(_RISING, **options) == f"{symptom}hidden_size=32 or lr=0.001"
    assert _advice(_RISING, **options, hidden_size=8) == f"{symptom}lr=0.001"


def test_nothing_is_left_to_improve() -> None:
    assert _advice(_EXACT) is None
    # Nor if the loss of an exact model rises later.
    assert _advice([*_EXACT, (0.05, 0.3, 1.0, 1.0)]) is None


def test_worse_than_a_rule() -> None:
    rule = "the model is not better than a simple rule on the validation part (accuracy {}, majority accuracy {})"
    look = "see how the columns were read: raglane inspect DATA"
    assert _advice(_FALLING, rule=0.9, dropout=0.3) == (
        f"{rule.format('0.650', '0.900')}, nor on the training part (accuracy 0.700): "
        f"try epochs=20 or hidden_size=128; {look}"
    )
    assert _advice(_RISING, rule=0.75, dropout=0.3) == (
        f"{rule.format('0.700', '0.750')}, although on the training part it is (accuracy 0.800): "
        f"try weight_decay=0.01 or hidden_size=32; {look}"
    )


def test_a_column_of_dates_that_is_a_category_comes_first(tmp_path: Path) -> None:
    days = np.arange("2021-01-01", "2021-02-10", dtype="datetime64[D]").astype(str)
    lines = [f"{row // 4},{row % 7},d{day},{'ab'[row // 4 % 2]}" for row, day in enumerate(days)]
    path = tmp_path / "days.csv"
    path.write_text("id,x,batch,label\n" + "\n".join(lines) + "\n")
    records = read(path)
    assert [feature.name for feature in records.features] == ["batch"]
    line = _advice(_FALLING, rule=0.9, training=records)
    assert line is not None
    assert line.endswith(
        ": first, column batch has 40 values in 40 elements, as times and IDs have; name it as the "
        "time or ID column, or leave it out of the features"
    )


def test_a_short_training_with_dropout(tmp_path: Path, capsys: Capsys) -> None:
    """The last line of the command neither proposes what was passed nor less than it needs."""
    random = np.random.default_rng(0)
    lines = ["id,x,label"]
    for sequence in range(40):
        label = sequence % 2
        lines += [f"{sequence},{number},{'ab'[label]}" for number in random.normal(size=5)]
    path = tmp_path / "data.csv"
    path.write_text("\n".join(lines) + "\n")
    options = ["--dropout", "0.3", "--lr", "1e-9", *FAST]
    assert main(["train", str(path), "--output", str(tmp_path / "run"), *options]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"note: the (model is not better than a simple rule|last epoch)", last)
    assert "--dropout" not in last
    assert "--epochs 20" in last or "--weight-decay" in last
