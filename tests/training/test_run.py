"""Whole runs: going on from a stop gives what never stopping gives, and nothing is pickled."""

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
from raglane.data import Dataset
from raglane.errors import ArgumentError, CheckpointError, DataError
from raglane.training.batches import Batch, training_order
from raglane.training.checkpoint import FORMAT_VERSION, load_model, read_tensors
from raglane.training.folder import check_folder
from raglane.training.inference import evaluate
from raglane.training.run import TrainingResult, train
from raglane.training.settings import Settings
from raglane.training.state import Totals, TrainingState
from raglane.training.tasks import Score
from raglane.training.tasks.labels import Classify
from small_runs import QUICK, small_records


class _Recorder:
    """A watcher that sends Ctrl-C when a batch is done."""

    def __init__(self, stop_at: tuple[int, int] | None = None) -> None:
        self.stop_at = stop_at
        self.rows: list[dict[str, float]] = []

    def started(self, state: TrainingState, epochs: int, batches: int) -> None:  # noqa: ARG002
        self.batches = batches

    def batch_done(self, epoch: int, batch: int, totals: Totals) -> None:  # noqa: ARG002
        if (epoch, batch) == self.stop_at:
            signal.raise_signal(signal.SIGINT)

    def epoch_done(self, row: dict[str, float], is_best: bool) -> None:  # noqa: ARG002
        self.rows.append(row)


def _without_times(result: TrainingResult) -> list[dict[str, float]]:
    timed = ("seconds", "elements_per_second")
    return [{key: value for key, value in row.items() if key not in timed} for row in result.state.history]


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
        ((2, 3), QUICK),  # within an epoch
        ((2, 6), replace(QUICK, optimizer="adamw", bucket=True)),  # at the last batch of one
        ((1, 1), replace(QUICK, optimizer="sgd", num_layers=2, grad_clip=0.5, cell="lstm")),
        ((3, 5), replace(QUICK, optimizer="rmsprop", task="tag", bidirectional=True)),
        ((2, 2), replace(QUICK, task="forecast", cell="rnn", weight_decay=0.1)),
        ((2, 7), replace(QUICK, task="tag", cell="lstm", bptt_steps=2)),  # with the states of chunks
        ((3, 2), replace(QUICK, task="forecast", bptt_steps=3)),
        ((3, 3), replace(QUICK, lr_schedule="cosine", warmup=1, label_smoothing=0.1)),
        ((2, 1), replace(QUICK, lr_schedule="plateau", class_weights="balanced", grad_clip=0.0)),
        ((2, 3), replace(QUICK, batch_elements=14, bucket=True, workers=1)),
        ((1, 2), replace(QUICK, batch_elements=5, too_long="split", largest_first=True)),
    ],
)
def test_going_on_is_never_having_stopped(tmp_path: Path, stop_at: tuple[int, int], settings: Settings) -> None:
    training, validation = small_records(24), small_records(9, seed=1)
    whole = train(settings, training, validation, tmp_path / "whole")
    stopped = train(settings, training, validation, tmp_path / "parts", callback=_Recorder(stop_at))
    assert stopped.interrupted
    assert (stopped.state.epoch, stopped.state.batch) == ((2, 0) if stop_at == (2, 6) else (stop_at[0] - 1, stop_at[1]))
    torch.manual_seed(99)  # what the process did in between must not matter
    torch.rand(7)
    gone_on = train(settings, training, validation, tmp_path / "parts", resume=True)
    assert not gone_on.interrupted
    assert len(whole.state.history) == 4
    _assert_same_run(whole, gone_on)


def _batches_scored(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches whose loss is computed from here on, in their order."""
    scored: list[Batch] = []
    score = Classify.score

    def noted(self: Classify, output: Any, batch: Batch, *, training: bool = False) -> Score:
        scored.append(batch)
        return score(self, output, batch, training=training)

    monkeypatch.setattr(Classify, "score", noted)
    return scored


def test_every_epoch_has_batches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = _batches_scored(monkeypatch)
    for settings in (QUICK, replace(QUICK, batch_elements=12)):
        scored.clear()
        training = small_records()
        train(settings, training, None, tmp_path / "run", overwrite=True)
        order = training_order(torch.from_numpy(training.lengths), settings)
        epochs = []
        for epoch in range(4):
            order.set_epoch(epoch)
            epochs.append([tuple(batch) for batch in order])
        seen = [tuple(batch.index.tolist()) for batch in scored]
        assert seen == [batch for batches in epochs for batch in batches]
        assert len(set(map(str, epochs))) == 4


def test_what_is_too_long_for_a_batch(tmp_path: Path) -> None:
    training = small_records()
    settings = replace(QUICK, batch_elements=4)
    long = int((training.lengths > 4).sum())
    with pytest.raises(ArgumentError, match=f"at most the size of a batch, 4 elements.*, got .*one of {long} such"):
        train(settings, training, None, tmp_path / "run")
    elements = {}
    for choice in ("drop", "split", "alone"):
        result = train(replace(settings, too_long=choice), training, None, tmp_path / choice)
        row = result.state.history[0]
        elements[choice] = round(row["elements_per_second"] * row["seconds"])
    kept = int(training.lengths[training.lengths <= 4].sum())
    assert elements == {"drop": kept, "split": len(training.values), "alone": len(training.values)}
    some = training.subset(training.lengths > 4)
    with pytest.raises(DataError, match="all too long for a batch"):
        train(replace(settings, too_long="drop"), some, None, tmp_path / "none")


def test_the_largest_batch_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = _batches_scored(monkeypatch)
    training = small_records()
    train(replace(QUICK, epochs=1, largest_first=True), training, None, tmp_path / "run")
    assert sorted(scored[0].inputs.lengths.tolist()) == sorted(training.lengths.tolist())[-4:]


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    training = small_records(24)
    train(QUICK, training, None, tmp_path / "run", callback=_Recorder((2, 3)))
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


def test_more_epochs_are_a_longer_run(tmp_path: Path) -> None:
    training = small_records()
    whole = train(QUICK, training, None, tmp_path / "whole")
    train(replace(QUICK, epochs=2), training, None, tmp_path / "parts")
    gone_on = train(QUICK, training, None, tmp_path / "parts", resume=True)
    _assert_same_run(whole, gone_on)
    with pytest.raises(ArgumentError, match=r"epochs must be .*got 3, and 4 are done"):
        train(replace(QUICK, epochs=3), training, None, tmp_path / "parts", resume=True)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    training = small_records()
    whole = train(QUICK, training, None, tmp_path / "whole")
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
    _assert_same_run(whole, train(QUICK, training, None, folder, resume=True))


def test_other_data_is_refused(tmp_path: Path) -> None:
    train(replace(QUICK, epochs=1), small_records(), None, tmp_path / "run")
    with pytest.raises(DataError, match="other data"):
        train(QUICK, small_records(seed=2), None, tmp_path / "run", resume=True)


def test_seed_decides(tmp_path: Path) -> None:
    training, validation = small_records(), small_records(9, seed=1)
    runs = [
        train(replace(QUICK, seed=seed), training, validation, tmp_path / f"{n}") for n, seed in enumerate((0, 0, 1))
    ]
    _assert_same_run(runs[0], runs[1])
    assert _without_times(runs[0]) != _without_times(runs[2])


def test_early_stopping(tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=60, lr=0.3, patience=2)
    result = train(settings, small_records(), small_records(9, seed=1), tmp_path / "run")
    losses = [row["validation_loss"] for row in result.state.history]
    assert len(losses) < 60
    assert result.state.best_epoch == len(losses) - 2 == losses.index(min(losses)) + 1
    saved = load_model(tmp_path / "run")
    best = evaluate(saved, small_records(9, seed=1))
    assert best.numbers["loss"] == pytest.approx(min(losses), rel=1e-5)
    assert best.numbers["accuracy"] == pytest.approx(
        result.state.history[result.state.best_epoch - 1]["validation_accuracy"]
    )


def _opposed() -> tuple[Dataset, Dataset]:
    """A training and a validation part with opposite labels: what makes one loss smaller makes the other larger."""
    training = small_records()
    flipped = tuple("down" if label == "up" else "up" for label in training.labels or ())
    return training, changed(training, labels=flipped)


def test_early_stopping_watches_the_validation_loss(tmp_path: Path) -> None:
    result = train(replace(QUICK, epochs=20, dropout=0.0, patience=3), *_opposed(), tmp_path / "run")
    history = result.state.history
    falling = [row["train_loss"] for row in history]
    assert falling == sorted(falling, reverse=True), "a run that watched the training loss would go on"
    losses = [row["validation_loss"] for row in history]
    assert len(history) == losses.index(min(losses)) + 1 + 3 < 20


def test_the_best_model_is_that_of_the_lowest_validation_loss(tmp_path: Path) -> None:
    training, validation = _opposed()
    result = train(replace(QUICK, epochs=8, dropout=0.0), training, validation, tmp_path / "run")
    losses = [row["validation_loss"] for row in result.state.history]
    lowest_of_training = min(result.state.history, key=lambda row: row["train_loss"])["epoch"]
    assert result.state.best_epoch == losses.index(min(losses)) + 1 < lowest_of_training
    best = evaluate(load_model(tmp_path / "run"), validation).numbers["loss"]
    assert best == pytest.approx(min(losses), rel=1e-5)
    assert best == pytest.approx(result.state.best_loss, rel=1e-5)


def test_only_safetensors_and_json_are_saved(tmp_path: Path) -> None:
    train(replace(QUICK, epochs=1), small_records(), small_records(9, seed=1), tmp_path / "run")
    files = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file())
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
    for name in files:
        path = tmp_path / "run" / name
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            assert read_tensors(path)


def test_scaling_is_that_of_the_training_part_alone(tmp_path: Path) -> None:
    """What is measured on the validation part must not have shaped the model's input."""
    training = small_records(20)
    validation = changed(small_records(10, seed=1), values=small_records(10, seed=1).values * 50 + 100)
    train(replace(QUICK, epochs=1), training, validation, tmp_path / "run")
    preprocessor = load_model(tmp_path / "run").preprocessor
    assert preprocessor.mean == pytest.approx(training.values.astype(np.float64).mean(0).tolist())
    assert preprocessor.std == pytest.approx(training.values.astype(np.float64).std(0).tolist())


def test_going_on_with_other_validation_data_is_refused(tmp_path: Path) -> None:
    records, other = small_records(20), small_records(10, seed=1)
    train(replace(QUICK, epochs=1), records, other, tmp_path / "run")
    with pytest.raises(DataError, match="data"):
        train(replace(QUICK, epochs=2), records, small_records(10, seed=2), tmp_path / "run", resume=True)


def test_folder_rules(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ArgumentError, match="a new folder, or that of a run"):
            check_folder(tmp_path / "mine", overwrite=overwrite)
    with pytest.raises(ArgumentError, match="the folder of a run"):
        check_folder(tmp_path / "mine", resume=True)
    train(replace(QUICK, epochs=1), small_records(), None, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="a folder without a run"):
        train(QUICK, small_records(), None, tmp_path / "run")
    train(replace(QUICK, epochs=2), small_records(), None, tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_damaged_models_are_refused_in_words(tmp_path: Path) -> None:
    train(replace(QUICK, epochs=1), small_records(), None, tmp_path / "run")
    folder = tmp_path / "run" / "best"
    config, weights = (folder / "config.json").read_bytes(), (folder / "weights.safetensors").read_bytes()

    def refuses(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_model(tmp_path / "run")
        (folder / "config.json").write_bytes(config)
        (folder / "weights.safetensors").write_bytes(weights)

    _edit(folder / "config.json", format_version=FORMAT_VERSION + 1)
    refuses("format version 3.*at most 2 for this version.*upgrade")
    _edit(folder / "config.json", format="other")
    refuses("format 'other'")
    _edit(folder / "config.json", model={"task": "classify"})
    refuses("whole and unchanged")
    _edit(folder / "config.json", model=json.loads(config)["model"] | {"hidden_size": 6})
    refuses(r"weights.safetensors must be .* weights in 6 tensors where config.json describes .* in 6.*, got ")
    _edit(folder / "config.json", model=json.loads(config)["model"] | {"cell": "other"})
    refuses("config.json: cell must be .*got 'other'")
    old = {"layer" if name == "cell" else name: value for name, value in json.loads(config)["model"].items()}
    _edit(folder / "config.json", model=old)
    refuses("a file that Raglane wrote.*model without the entry 'cell'")
    _edit(folder / "config.json", model=json.loads(config)["model"] | {"layer": "gru"})
    refuses("a file that Raglane wrote.*model with the unknown entry 'layer'")
    (folder / "config.json").write_bytes(config[:50])
    refuses("config.json")
    (folder / "config.json").write_bytes(b"[]")
    refuses("config.json")
    (folder / "weights.safetensors").write_bytes(weights[:-5])
    refuses("weights.safetensors")
    (folder / "weights.safetensors").write_bytes(b"")
    refuses("weights.safetensors")
    (folder / "weights.safetensors").unlink()
    refuses("weights.safetensors")
    (folder / "config.json").unlink()
    refuses("config.json")
    with pytest.raises(CheckpointError, match="no such folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="without a saved model"):
        load_model(tmp_path)
    assert load_model(folder).task == "classify"


@pytest.mark.parametrize("part", ["labels", "tags", "offsets"])
def test_going_on_with_other_labels_or_lengths_is_refused(part: str, tmp_path: Path) -> None:
    """The values alone do not say which data it is."""
    records = small_records()
    train(replace(QUICK, epochs=1), records, None, tmp_path / "run")
    given = getattr(records, part)
    assert given is not None
    turned = records.offsets[-1] - given[::-1] if part == "offsets" else given[::-1]
    assert list(turned) != list(given)
    with pytest.raises(DataError, match="other data"):
        train(QUICK, changed(records, **{part: turned}), None, tmp_path / "run", resume=True)
