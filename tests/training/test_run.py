"""Whole runs: resuming, early stopping, the files, and damaged files."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from made_datasets import changed
from raglane.errors import ArgumentError, CheckpointError, DataError
from raglane.training.batches import Batch, training_order
from raglane.training.checkpoint import load_model, read_tensors
from raglane.training.inference import evaluate
from raglane.training.run import TrainingResult, train
from raglane.training.settings import Settings
from raglane.training.tasks import Score
from raglane.training.tasks.labels import Classify
from small_runs import QUICK, Watcher, small_records


def _stopped(at: tuple[int, int]) -> Watcher:
    """Return a callback that raises SIGINT after a batch."""
    return Watcher(lambda *position: signal.raise_signal(signal.SIGINT) if position == at else None)


def _without_times(result: TrainingResult) -> list[dict[str, float]]:
    timed = ("seconds", "elements_per_second")
    return [
        {key: value for key, value in row.items() if key not in timed}
        for row in result.state.history
    ]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "weights.safetensors")


def _assert_same_run(one: TrainingResult, other: TrainingResult) -> None:
    assert _without_times(one) == _without_times(other)
    assert one.folder is not None
    assert other.folder is not None
    for part in ("best", "last"):
        mine, theirs = _weights(one.folder / part), _weights(other.folder / part)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("stop_at", "settings"),
    [
        ((2, 6), replace(QUICK, optimizer="adamw", bucket=True)),  # at the last batch of an epoch
        ((1, 1), replace(QUICK, optimizer="sgd", num_layers=2, grad_clip=0.5, cell="lstm")),
        ((3, 5), replace(QUICK, optimizer="rmsprop", task="tag", bidirectional=True)),
        (
            (2, 7),
            replace(QUICK, task="tag", cell="lstm", bptt_steps=2),
        ),  # with the states of chunks
        ((3, 2), replace(QUICK, task="forecast", cell="rnn", weight_decay=0.1, bptt_steps=3)),
        ((3, 3), replace(QUICK, lr_schedule="cosine", warmup=1, label_smoothing=0.1)),
        ((2, 1), replace(QUICK, lr_schedule="plateau", class_weights="balanced", grad_clip=0.0)),
        ((2, 3), replace(QUICK, batch_elements=14, bucket=True)),
        ((1, 2), replace(QUICK, batch_elements=5, too_long="chunk", largest_first=True)),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, stop_at: tuple[int, int], settings: Settings
) -> None:
    training, validation = small_records(24), small_records(9, seed=1)
    whole = train(settings, training, validation, tmp_path / "whole")
    stopped = train(settings, training, validation, tmp_path / "parts", callback=_stopped(stop_at))
    assert stopped.stopped_by is not None
    assert (stopped.state.epoch, stopped.state.batch) == (
        (2, 0) if stop_at == (2, 6) else (stop_at[0] - 1, stop_at[1])
    )
    torch.manual_seed(99)  # the state of the generator must not matter
    gone_on = train(settings, training, validation, tmp_path / "parts", resume=True)
    assert gone_on.stopped_by is None
    assert len(whole.state.history) == 4
    _assert_same_run(whole, gone_on)


@pytest.mark.parametrize(("minutes", "saved"), [(0.0, [False, *[True] * 5]), (1.0, [False] * 6)])
def test_checkpoints_within_an_epoch(tmp_path: Path, minutes: float, saved: list[bool]) -> None:
    seen: list[bool] = []
    watcher = Watcher(lambda epoch, batch: seen.append((tmp_path / "run" / "last").exists()))  # noqa: ARG005
    settings = replace(QUICK, epochs=1, checkpoint_minutes=minutes)
    train(settings, small_records(24), None, tmp_path / "run", callback=watcher)
    assert seen == saved


def _batches_scored(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Return a list that will contain the batches whose loss is computed."""
    scored: list[Batch] = []
    score = Classify.score

    def noted(self: Classify, output: Any, batch: Batch, *, training: bool = False) -> Score:
        scored.append(batch)
        return score(self, output, batch, training=training)

    monkeypatch.setattr(Classify, "score", noted)
    return scored


def test_every_epoch_has_other_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = _batches_scored(monkeypatch)
    for settings in (QUICK, replace(QUICK, batch_elements=12)):
        scored.clear()
        training = small_records()
        train(settings, training, None, tmp_path / "run", overwrite=True)
        order = training_order(training.lengths, settings)
        epochs = []
        for epoch in range(4):
            order.set_epoch(epoch)
            epochs.append([tuple(batch) for batch in order])
        seen = [tuple(batch.index.tolist()) for batch in scored]
        assert seen == [batch for batches in epochs for batch in batches]
        assert len(set(map(str, epochs))) == 4


def test_sequences_that_are_too_long_for_a_batch(tmp_path: Path) -> None:
    training = small_records()
    settings = replace(QUICK, batch_elements=4)
    long = int((training.lengths > 4).sum())
    with pytest.raises(
        ArgumentError, match=f"at most the size of a batch, 4 elements.*, got .*and {long - 1} more"
    ):
        train(settings, training, None, tmp_path / "run")
    elements = {}
    for choice in ("drop", "chunk", "alone"):
        result = train(replace(settings, too_long=choice), training, None, tmp_path / choice)
        row = result.state.history[0]
        elements[choice] = round(row["elements_per_second"] * row["seconds"])
    kept = int(training.lengths[training.lengths <= 4].sum())
    assert elements == {"drop": kept, "chunk": len(training.values), "alone": len(training.values)}
    some = training.subset(training.lengths > 4)
    with pytest.raises(DataError, match="all too long for a batch"):
        train(replace(settings, too_long="drop"), some, None, tmp_path / "none")


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    training = small_records(24)
    train(QUICK, training, None, tmp_path / "run", callback=_stopped((2, 3)))
    path = tmp_path / "run" / "last" / "training.json"
    content = json.loads(path.read_text())
    assert content["state"]["order"]["done"] == 3
    del content["state"]["order"]
    path.write_text(json.dumps(content))
    whole = train(QUICK, training, None, tmp_path / "whole")
    _assert_same_run(whole, train(QUICK, training, None, tmp_path / "run", resume=True))
    content["state"]["order"] = {"epoch": 1, "done": 2}
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="order at another batch"):
        train(replace(QUICK, epochs=9), training, None, tmp_path / "run", resume=True)


def test_seed_decides(tmp_path: Path) -> None:
    training, validation = small_records(), small_records(9, seed=1)
    runs = [
        train(replace(QUICK, seed=seed), training, validation, tmp_path / f"{n}")
        for n, seed in enumerate((0, 0, 1))
    ]
    _assert_same_run(runs[0], runs[1])
    assert _without_times(runs[0]) != _without_times(runs[2])


def test_early_stopping_and_the_best_model_follow_the_validation_loss(tmp_path: Path) -> None:
    training = small_records()
    # Opposite labels, so that one loss falls while the other rises.
    flipped = tuple("down" if label == "up" else "up" for label in training.labels or ())
    validation = changed(training, labels=flipped)
    state = train(
        replace(QUICK, epochs=20, dropout=0.0, patience=3), training, validation, tmp_path / "run"
    ).state
    falling = [row["train_loss"] for row in state.history]
    assert falling == sorted(falling, reverse=True)
    losses = [row["validation_loss"] for row in state.history]
    assert state.best_epoch == losses.index(min(losses)) + 1
    assert len(losses) == state.best_epoch + 3 < 20
    best = evaluate(load_model(tmp_path / "run"), validation).numbers
    assert (
        best["loss"]
        == pytest.approx(min(losses), rel=1e-5)
        == pytest.approx(state.best_loss, rel=1e-5)
    )
    assert best["accuracy"] == pytest.approx(
        state.history[state.best_epoch - 1]["validation_accuracy"]
    )


def test_only_safetensors_and_json_are_saved(tmp_path: Path) -> None:
    train(replace(QUICK, epochs=1), small_records(), small_records(9, seed=1), tmp_path / "run")
    files = sorted(
        str(path.relative_to(tmp_path / "run"))
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    )
    assert files == [
        "best/config.json",
        "best/weights.safetensors",
        "curves.csv",
        "last/config.json",
        "last/training.json",
        "last/training.safetensors",
        "last/weights.safetensors",
        "run.json",
    ]
    assert all(read_tensors(path) for path in (tmp_path / "run").rglob("*.safetensors"))


def test_scaling_is_that_of_the_training_data_only(tmp_path: Path) -> None:
    training = small_records(20)
    validation = changed(
        small_records(10, seed=1), values=small_records(10, seed=1).values * 50 + 100
    )
    train(replace(QUICK, epochs=1), training, validation, tmp_path / "run")
    preprocessor = load_model(tmp_path / "run").preprocessor
    assert preprocessor.mean == pytest.approx(training.values.astype(np.float64).mean(0).tolist())
    assert preprocessor.std == pytest.approx(training.values.astype(np.float64).std(0).tolist())


@pytest.mark.parametrize("part", ["values", "labels", "tags", "offsets", "validation"])
def test_resuming_with_other_data_is_refused(part: str, tmp_path: Path) -> None:
    training, validation = small_records(), small_records(10, seed=1)
    train(replace(QUICK, epochs=1), training, validation, tmp_path / "run")
    if part == "validation":
        validation = small_records(10, seed=2)
    else:
        before = getattr(training, part)
        other = training.offsets[-1] - before[::-1] if part == "offsets" else before[::-1]
        assert not np.array_equal(other, before)
        training = changed(training, **{part: other})
    with pytest.raises(DataError, match="other data"):
        train(QUICK, training, validation, tmp_path / "run", resume=True)
