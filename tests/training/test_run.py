"""Whole runs: going on from a stop gives what never stopping gives, nothing is pickled, predictions are the model's."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raglane.data.preprocess import Preprocessor
from raglane.data.records import Records, offsets_of
from raglane.errors import ArgumentError, CheckpointError, DataError
from raglane.ragged import Ragged
from raglane.training.batches import Batch, training_order
from raglane.training.checkpoint import FORMAT_VERSION, load_model, read_tensors
from raglane.training.folder import check_folder
from raglane.training.inference import evaluate, predict
from raglane.training.run import TrainingResult, train
from raglane.training.settings import ModelSettings, Settings
from raglane.training.state import Totals, TrainingState
from raglane.training.tasks import Score, make_task
from raglane.training.tasks.classify import Classify

_QUICK = Settings(epochs=4, hidden=5, batch_size=4, lr=0.05, dropout=0.3, threads=1)


def _records(count: int = 30, seed: int = 0) -> Records:
    """Sequences of three channels whose label is the sign of the first channel's mean."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 7, count)
    values = random.normal(size=(int(lengths.sum()), 3)).astype(np.float32)
    offsets = offsets_of(lengths)
    sums = [values[start:end, 0].sum() for start, end in pairwise(offsets)]
    labels = tuple("up" if total > 0 else "down" for total in sums)
    tags = np.where(values[:, 1] > 0, "high", "low").astype(object)
    return Records(values, offsets, labels=labels, tags=tags, channels=("a", "b", "c"))


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
        ((2, 3), _QUICK),  # within an epoch
        ((2, 6), replace(_QUICK, optimizer="adamw", bucket=True)),  # at the last batch of one
        ((1, 1), replace(_QUICK, optimizer="sgd", layers=2, clip=0.5, layer="lstm")),
        ((3, 5), replace(_QUICK, optimizer="rmsprop", task="tag", bidirectional=True)),
        ((2, 2), replace(_QUICK, task="forecast", layer="rnn", weight_decay=0.1)),
        ((2, 7), replace(_QUICK, task="tag", layer="lstm", steps=2)),  # with the states of chunks
        ((3, 2), replace(_QUICK, task="forecast", steps=3)),
        ((3, 3), replace(_QUICK, schedule="cosine", warmup=1, label_smoothing=0.1)),
        ((2, 1), replace(_QUICK, schedule="plateau", class_weights="balanced", clip=0.0)),
        ((2, 3), replace(_QUICK, batch_elements=14, bucket=True, workers=1)),
        ((1, 2), replace(_QUICK, batch_elements=5, too_long="split", largest_first=True)),
    ],
)
def test_going_on_is_never_having_stopped(tmp_path: Path, stop_at: tuple[int, int], settings: Settings) -> None:
    training, validation = _records(24), _records(9, seed=1)
    whole = train(settings, training, validation, tmp_path / "whole")
    stopped = train(settings, training, validation, tmp_path / "parts", watcher=_Recorder(stop_at))
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
    for settings in (_QUICK, replace(_QUICK, batch_elements=12)):
        scored.clear()
        training = _records()
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
    training = _records()
    settings = replace(_QUICK, batch_elements=4)
    long = int((training.lengths > 4).sum())
    with pytest.raises(
        ArgumentError, match=f"one of {long} such; the rule: no sequence longer than a batch, 4 elements"
    ):
        train(settings, training, None, tmp_path / "run")
    elements = {}
    for choice in ("drop", "split", "alone"):
        result = train(replace(settings, too_long=choice), training, None, tmp_path / choice)
        row = result.state.history[0]
        elements[choice] = round(row["elements_per_second"] * row["seconds"])
    kept = int(training.lengths[training.lengths <= 4].sum())
    assert elements == {"drop": kept, "split": len(training.values), "alone": len(training.values)}
    some = training.select(training.lengths > 4)
    with pytest.raises(DataError, match="all too long for a batch"):
        train(replace(settings, too_long="drop"), some, None, tmp_path / "none")


def test_the_largest_batch_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = _batches_scored(monkeypatch)
    training = _records()
    train(replace(_QUICK, epochs=1, largest_first=True), training, None, tmp_path / "run")
    assert sorted(scored[0].inputs.lengths.tolist()) == sorted(training.lengths.tolist())[-4:]


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    training = _records(24)
    train(_QUICK, training, None, tmp_path / "run", watcher=_Recorder((2, 3)))
    path = tmp_path / "run" / "last" / "training.json"
    content = json.loads(path.read_text())
    assert content["state"]["order"]["done"] == 3
    del content["state"]["order"]
    path.write_text(json.dumps(content))
    whole = train(_QUICK, training, None, tmp_path / "whole")
    _assert_same_run(whole, train(_QUICK, training, None, tmp_path / "run", resume=True))
    content["state"]["order"] = {"epoch": 1, "done": 2}
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="order that stands elsewhere"):
        train(replace(_QUICK, epochs=9), training, None, tmp_path / "run", resume=True)


def test_more_epochs_are_a_longer_run(tmp_path: Path) -> None:
    training = _records()
    whole = train(_QUICK, training, None, tmp_path / "whole")
    train(replace(_QUICK, epochs=2), training, None, tmp_path / "parts")
    gone_on = train(_QUICK, training, None, tmp_path / "parts", resume=True)
    _assert_same_run(whole, gone_on)
    with pytest.raises(ArgumentError, match="epochs: got 3, and 4 are done"):
        train(replace(_QUICK, epochs=3), training, None, tmp_path / "parts", resume=True)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    training = _records()
    whole = train(_QUICK, training, None, tmp_path / "whole")
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
    _assert_same_run(whole, train(_QUICK, training, None, folder, resume=True))


def test_other_data_is_refused(tmp_path: Path) -> None:
    train(replace(_QUICK, epochs=1), _records(), None, tmp_path / "run")
    with pytest.raises(DataError, match="other data"):
        train(_QUICK, _records(seed=2), None, tmp_path / "run", resume=True)


def test_seed_decides(tmp_path: Path) -> None:
    training, validation = _records(), _records(9, seed=1)
    runs = [
        train(replace(_QUICK, seed=seed), training, validation, tmp_path / f"{n}") for n, seed in enumerate((0, 0, 1))
    ]
    _assert_same_run(runs[0], runs[1])
    assert _without_times(runs[0]) != _without_times(runs[2])


def test_early_stopping(tmp_path: Path) -> None:
    settings = replace(_QUICK, epochs=60, lr=0.3, patience=2)
    result = train(settings, _records(), _records(9, seed=1), tmp_path / "run")
    losses = [row["validation_loss"] for row in result.state.history]
    assert len(losses) < 60
    assert result.state.best_epoch == len(losses) - 2 == losses.index(min(losses)) + 1
    saved = load_model(tmp_path / "run")
    best = evaluate(saved, _records(9, seed=1))
    assert best.numbers["loss"] == pytest.approx(min(losses), rel=1e-5)
    assert best.numbers["accuracy"] == pytest.approx(
        result.state.history[result.state.best_epoch - 1]["validation_accuracy"]
    )


def _opposed() -> tuple[Records, Records]:
    """A training and a validation part with opposite labels: what makes one loss smaller makes the other larger."""
    training = _records()
    flipped = tuple("down" if label == "up" else "up" for label in training.labels or ())
    return training, replace(training, labels=flipped)


def test_early_stopping_watches_the_validation_loss(tmp_path: Path) -> None:
    result = train(replace(_QUICK, epochs=20, dropout=0.0, patience=3), *_opposed(), tmp_path / "run")
    history = result.state.history
    falling = [row["train_loss"] for row in history]
    assert falling == sorted(falling, reverse=True), "a run that watched the training loss would go on"
    losses = [row["validation_loss"] for row in history]
    assert len(history) == losses.index(min(losses)) + 1 + 3 < 20


def test_the_best_model_is_that_of_the_lowest_validation_loss(tmp_path: Path) -> None:
    training, validation = _opposed()
    result = train(replace(_QUICK, epochs=8, dropout=0.0), training, validation, tmp_path / "run")
    losses = [row["validation_loss"] for row in result.state.history]
    lowest_of_training = min(result.state.history, key=lambda row: row["train_loss"])["epoch"]
    assert result.state.best_epoch == losses.index(min(losses)) + 1 < lowest_of_training
    best = evaluate(load_model(tmp_path / "run"), validation).numbers["loss"]
    assert best == pytest.approx(min(losses), rel=1e-5)
    assert best == pytest.approx(result.state.best_loss, rel=1e-5)


def test_only_safetensors_and_json_are_saved(tmp_path: Path) -> None:
    train(replace(_QUICK, epochs=1), _records(), _records(9, seed=1), tmp_path / "run")
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


@pytest.mark.parametrize("task", ["classify", "tag", "forecast"])
@pytest.mark.parametrize("missing", ["error", "forward"])
def test_predictions_are_those_of_the_model(tmp_path: Path, task: str, missing: str) -> None:
    records = _records(25)
    if missing == "forward":
        values = records.values.copy()
        values[::5, 1] = np.nan
        records = replace(records, values=values)
    train(replace(_QUICK, epochs=2, task=task, missing=missing), records, None, tmp_path / "run")
    saved = load_model(tmp_path / "run")
    table = predict(saved, records, batch_size=7, probabilities=task != "forecast").columns
    labels = saved.preprocessor.labels
    dataset = saved.preprocessor.apply(records, require_targets=False)
    from raglane.ragged import Ragged

    for row in range(25):
        inputs = dataset[row]["inputs"]
        with torch.no_grad():
            output = saved.model(Ragged([inputs]))
        answer = table["prediction"][row]
        if task == "forecast":
            if len(inputs) == 0:
                assert answer is None
                continue
            mean, std = torch.tensor(saved.preprocessor.mean), torch.tensor(saved.preprocessor.std)
            torch.testing.assert_close(torch.tensor(answer[0]), output.values[-1] * std + mean, rtol=1e-4, atol=1e-5)
            continue
        shares = (output.values if task == "tag" else output[0]).softmax(-1)
        assert labels is not None
        for place, label in enumerate(labels):
            expected = shares[..., place]
            torch.testing.assert_close(torch.tensor(table[f"p_{label}"][row]), expected, rtol=1e-4, atol=1e-6)
        chosen = shares.argmax(-1).tolist()
        assert answer == (labels[chosen] if task == "classify" else [labels[place] for place in chosen])
    assert table["id"] == list(range(25))


def test_rows_permuted_are_predictions_permuted(tmp_path: Path) -> None:
    records = _records(25)
    train(replace(_QUICK, epochs=1), records, None, tmp_path / "run")
    saved = load_model(tmp_path / "run")
    order = np.random.default_rng(3).permutation(25)
    straight, permuted = predict(saved, records).columns, predict(saved, records.select(order), batch_size=4).columns
    assert permuted["prediction"] == [straight["prediction"][row] for row in order]
    assert permuted["probability"] == pytest.approx([straight["probability"][row] for row in order], rel=1e-5)


def test_evaluation_agrees_with_predictions(tmp_path: Path) -> None:
    records = _records(25)
    for task, truth in (
        ("classify", list(records.labels or ())),
        ("tag", records.tags.tolist() if records.tags is not None else []),
    ):
        train(replace(_QUICK, epochs=2, task=task), records, None, tmp_path / task)
        saved = load_model(tmp_path / task)
        evaluation = evaluate(saved, records, batch_size=6)
        answers: list[Any] = predict(saved, records).columns["prediction"]
        flat = answers if task == "classify" else [tag for answer in answers for tag in answer]
        right = sum(one == other for one, other in zip(flat, truth, strict=True))
        assert evaluation.count == len(truth)
        assert evaluation.numbers["accuracy"] == pytest.approx(right / len(truth))
        assert evaluation.confusion is not None
        pairs = Counter(zip(truth, flat, strict=True))
        counted = [[pairs[one, other] for other in evaluation.labels] for one in evaluation.labels]
        assert evaluation.confusion.tolist() == counted


def test_macro_f1_on_unbalanced_classes(tmp_path: Path) -> None:
    """Against precision and recall counted by hand: 20 against 5, of which the rare one is mostly missed."""
    records = _records(25)
    train(replace(_QUICK, epochs=1), records, None, tmp_path / "run")
    saved = load_model(tmp_path / "run")
    answers = predict(saved, records).columns["prediction"]
    # The labels are made from the answers, so that what is right and wrong is known.
    names = list(saved.preprocessor.labels or ())
    labels = [name if row % 5 else names[1 - names.index(name)] for row, name in enumerate(answers)]
    evaluation = evaluate(saved, replace(records, labels=tuple(labels)))
    scores = []
    for name in names:
        right = sum(one == other == name for one, other in zip(labels, answers, strict=True))
        if labels.count(name) + answers.count(name):
            scores.append(2 * right / (labels.count(name) + answers.count(name)))
    assert evaluation.numbers["macro_f1"] == pytest.approx(sum(scores) / len(scores))
    assert evaluation.numbers["macro_f1"] != pytest.approx(evaluation.numbers["accuracy"])


def test_scaling_is_that_of_the_training_part_alone(tmp_path: Path) -> None:
    """What is measured on the validation part must not have shaped the model's input."""
    training = _records(20)
    validation = replace(_records(10, seed=1), values=_records(10, seed=1).values * 50 + 100)
    train(replace(_QUICK, epochs=1), training, validation, tmp_path / "run")
    preprocessor = load_model(tmp_path / "run").preprocessor
    assert preprocessor.mean == pytest.approx(training.values.astype(np.float64).mean(0).tolist())
    assert preprocessor.std == pytest.approx(training.values.astype(np.float64).std(0).tolist())


def test_going_on_with_other_validation_data_is_refused(tmp_path: Path) -> None:
    records, other = _records(20), _records(10, seed=1)
    train(replace(_QUICK, epochs=1), records, other, tmp_path / "run")
    with pytest.raises(DataError, match="data"):
        train(replace(_QUICK, epochs=2), records, _records(10, seed=2), tmp_path / "run", resume=True)


def test_a_longer_forecast_feeds_itself(tmp_path: Path) -> None:
    records = _records(12)
    train(replace(_QUICK, epochs=2, task="forecast"), records, None, tmp_path / "run")
    saved = load_model(tmp_path / "run")
    answers = predict(saved, records, horizon=3).columns["prediction"]
    # The obvious way: append what was forecast to the data and forecast again from the start.
    for row, answer in enumerate(answers):
        values = records.select([row]).values
        if len(values) == 0:
            assert answer is None
            continue
        for step in range(3):
            grown = Records(values, offsets_of([len(values)]), channels=records.channels)
            one = predict(saved, grown).columns["prediction"][0][0]
            assert answer[step] == pytest.approx(one, rel=1e-3, abs=1e-4)
            values = np.concatenate([values, np.array([one], dtype=np.float32)])


def test_what_was_missing_is_no_target(tmp_path: Path) -> None:
    records = _records(12)
    values = records.values.copy()
    values[:, 2] = np.nan
    values[0, 2] = 1.0
    gaps = replace(records, values=values)
    train(replace(_QUICK, epochs=1, task="forecast", missing="zero"), gaps, None, tmp_path / "run")
    evaluation = evaluate(load_model(tmp_path / "run"), gaps)
    steps = int((records.lengths - 1).clip(min=0).sum())
    assert evaluation.count == 2 * steps


def test_folder_rules(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ArgumentError, match="a new folder, or that of a run"):
            check_folder(tmp_path / "mine", overwrite=overwrite)
    with pytest.raises(ArgumentError, match="the folder of a run"):
        check_folder(tmp_path / "mine", resume=True)
    train(replace(_QUICK, epochs=1), _records(), None, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="a run is not replaced unasked"):
        train(_QUICK, _records(), None, tmp_path / "run")
    train(replace(_QUICK, epochs=2), _records(), None, tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_damaged_models_are_refused_in_words(tmp_path: Path) -> None:
    train(replace(_QUICK, epochs=1), _records(), None, tmp_path / "run")
    folder = tmp_path / "run" / "best"
    config, weights = (folder / "config.json").read_bytes(), (folder / "weights.safetensors").read_bytes()

    def refuses(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_model(tmp_path / "run")
        (folder / "config.json").write_bytes(config)
        (folder / "weights.safetensors").write_bytes(weights)

    _edit(folder / "config.json", format_version=FORMAT_VERSION + 1)
    refuses("format version 3.*reads up to 2.*upgrade")
    _edit(folder / "config.json", format="other")
    refuses("format 'other'")
    _edit(folder / "config.json", model={"task": "classify"})
    refuses("whole and unchanged")
    _edit(folder / "config.json", model=json.loads(config)["model"] | {"hidden": 6})
    refuses(r"weights.safetensors: got .* weights in 6 tensors where config.json asks for .* in 6")
    _edit(folder / "config.json", model=json.loads(config)["model"] | {"layer": "other"})
    refuses("config.json: layer: got 'other'")
    old = {"cell" if name == "layer" else name: value for name, value in json.loads(config)["model"].items()}
    _edit(folder / "config.json", model=old)
    refuses("model without the entry 'layer'; the rule: a file that Raglane wrote")
    _edit(folder / "config.json", model=json.loads(config)["model"] | {"cell": "gru"})
    refuses("model with the unknown entry 'cell'; the rule: a file that Raglane wrote")
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
    records = _records()
    train(replace(_QUICK, epochs=1), records, None, tmp_path / "run")
    given = getattr(records, part)
    assert given is not None
    turned = records.offsets[-1] - given[::-1] if part == "offsets" else given[::-1]
    assert list(turned) != list(given)
    with pytest.raises(DataError, match="other data"):
        train(_QUICK, replace(records, **{part: turned}), None, tmp_path / "run", resume=True)


def test_a_missing_target_has_no_error() -> None:
    """Whatever is forecast where the second channel was missing; by hand, the flags being the last two columns."""
    targets = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 4.0, 0.0, 0.0]])
    inputs = torch.tensor([[0.0, 9.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]])
    batch = Batch(Ragged([inputs]), targets, torch.tensor([0]))
    fitted = Preprocessor("forecast", ("a", "b"), std=(1.0, 10.0), missing="zero")
    task = make_task(fitted, ModelSettings("forecast"))
    for wild in (0.0, 100.0):
        score = task.score(torch.tensor([[2.0, wild], [3.0, 5.0]]), batch)
        assert [float(part) for part in (score.loss, score.metric, score.count)] == [1 + 1, 1 + 10, 3]
        assert float(score.baseline) == 1 + 2 + 40
