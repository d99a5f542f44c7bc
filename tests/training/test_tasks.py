"""Each task by hand: its loss, its metrics, its thresholds; and what older models lack."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from made_datasets import changed, dataset
from raglane.data import Dataset
from raglane.data.preprocess import Preprocessor
from raglane.data.records import Columns, Targets, offsets_of
from raglane.errors import ArgumentError, DataError
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.checkpoint import SavedModel, load_model
from raglane.training.inference import evaluate, predict
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.run import train
from raglane.training.settings import LOSSES, ModelSettings, Settings
from raglane.training.settings import TASKS as NAMES
from raglane.training.state import TrainingState, rate_of
from raglane.training.tasks import TASKS, make_task, settle
from raglane.training.tasks.labels import best_thresholds
from raglane.training.tasks.numbers import loss_of_errors

_QUICK = Settings(epochs=15, hidden_size=12, lr=0.02, threads=1)


def _records(count: int = 60, seed: int = 0) -> Dataset:
    """Sequences of one channel, of 1 to 6 steps."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 7, count)
    return dataset(random.normal(size=(int(lengths.sum()), 1)).astype(np.float32), offsets_of(lengths), channels=("x",))


def _with(records: Dataset, targets: Targets) -> Dataset:
    return dataset(records.values, records.offsets, channels=records.channels, targets=targets)


def _sums(records: Dataset) -> np.ndarray:
    return np.add.reduceat(records.values[:, 0].astype(np.float64), records.offsets[:-1])


def _thresholds(saved: SavedModel) -> list[float]:
    return saved.model.state_dict()["thresholds"].tolist()  # type: ignore[no-any-return]


def test_the_tasks_are_those_of_the_settings() -> None:
    assert tuple(TASKS) == NAMES == tuple(LOSSES)


def test_losses_of_errors_by_hand() -> None:
    for error, quantile in product((-3.0, -0.4, 0.0, 0.4, 3.0), (0.1, 0.5, 0.9)):
        size = abs(error)
        by_hand = {
            "mse": error**2,
            "mae": size,
            "huber": error**2 / 2 if size <= 1 else size - 0.5,
            # The target is above the prediction where the error is below 0.
            "quantile": quantile * size if error < 0 else (1 - quantile) * size,
        }
        for name, loss in by_hand.items():
            assert float(loss_of_errors(torch.tensor(error), name, quantile)) == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("per_element", [False, True])
def test_numbers_are_learned_and_told_in_their_units(tmp_path: Path, per_element: bool) -> None:
    """Twice: two numbers, in units far from 1; both beat the mean, and predictions are what was measured."""
    records, later = _records(), _records(20, seed=1)

    def sums(part: Dataset) -> Dataset:
        flat = part.values[:, 0].astype(np.float64) if per_element else _sums(part)
        values = np.stack([1000 + 50 * flat, 0.001 * flat], axis=1)
        return _with(part, Targets(values, per_element=per_element, names=("far", "small")))

    training, test = sums(records), sums(later)
    train(Settings(**{**_QUICK.to_config(), "task": "regress", "cell": "lstm"}), training, None, tmp_path)
    saved = load_model(tmp_path)
    evaluation = evaluate(saved, test)
    assert evaluation.numbers["R2"] > 0.7
    assert evaluation.numbers["MAE"] < 0.6 * evaluation.numbers["mean_MAE"]
    assert [row["number"] for row in evaluation.measured.table] == ["far", "small"]
    told = predict(saved, test).columns["prediction"]
    assert len(told) == 20
    rows = np.array([row for part in told for row in part] if per_element else told)
    assert test.targets is not None
    error = np.abs(rows - test.targets.values).mean(axis=0)
    assert error == pytest.approx([row["MAE"] for row in evaluation.measured.table], rel=1e-4)
    baseline = np.abs(test.targets.values - np.mean(training.targets.values, axis=0)).mean()  # type: ignore[union-attr]
    assert evaluation.numbers["mean_MAE"] == pytest.approx(baseline, rel=1e-6)


def test_a_quantile_has_its_share_below(tmp_path: Path) -> None:
    records = _records(200)
    noise = np.random.default_rng(3).normal(size=(200, 1))
    for quantile in (0.2, 0.8):
        settings = Settings("regress", loss="quantile", quantile=quantile, epochs=12, hidden_size=4, lr=0.02, threads=1)
        data = _with(records, Targets(noise, names=("noise",)))
        train(settings, data, None, tmp_path, overwrite=True)
        share = evaluate(load_model(tmp_path), data).numbers["share_below"]
        assert abs(share - quantile) < 0.1


def test_thresholds_against_every_cut() -> None:
    """No other cut gives any label a higher F1 score."""
    random = torch.Generator().manual_seed(0)
    for rows in (1, 2, 7, 30):
        shares = torch.rand((rows, 4), generator=random).round(decimals=1)
        targets = (torch.rand((rows, 4), generator=random) < 0.4).float()
        targets[:, 3] = 0

        def scores(told: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return 2 * (told * targets).sum(0) / (told.sum(0) + targets.sum(0))

        found = best_thresholds(shares, targets)
        best = scores((shares >= found).float())
        for cut in torch.linspace(-0.05, 1.05, 12):
            other = scores((shares >= cut).float())
            assert bool((best[:3].nan_to_num(1.0) >= other[:3].nan_to_num(0.0) - 1e-6).all())
        assert float(found[3]) == 0.5


@pytest.mark.parametrize("per_element", [False, True])
def test_sets_of_labels(tmp_path: Path, per_element: bool) -> None:
    """Each label follows from one fact; the thresholds are kept with the model, and decide what is told."""

    def sets(part: Dataset) -> Dataset:
        flat = part.values[:, 0] if per_element else _sums(part)
        values = np.empty(len(flat), dtype=object)
        values[:] = [tuple(name for name, is_there in (("up", x > 0), ("far", abs(x) > 1.5)) if is_there) for x in flat]
        return _with(part, Targets(values, per_element=per_element))

    training, test = sets(_records(90)), sets(_records(30, seed=1))
    settings = Settings(**{**_QUICK.to_config(), "task": "multilabel", "cell": "lstm"})
    train(settings, training, test, tmp_path)
    saved = load_model(tmp_path)
    assert _thresholds(saved) != [0.5, 0.5]
    evaluation = evaluate(saved, test)
    assert evaluation.numbers["micro_F1"] > 0.75 > evaluation.numbers["all_labels_micro_F1"]
    predictions = predict(saved, test, probabilities=True).columns
    told = [row for part in predictions["prediction"] for row in part] if per_element else predictions["prediction"]
    assert test.targets is not None
    exact = [set(one) == set(other) for one, other in zip(told, test.targets.values, strict=True)]
    assert np.mean(exact) == pytest.approx(evaluation.numbers["exact_match"])
    labels = list(zip(evaluation.labels, _thresholds(saved), strict=True))
    for label, threshold in labels:
        shares = predictions[f"p_{label}"]
        flat = [share for part in shares for share in part] if per_element else shares
        assert [label in row for row in told] == [share >= threshold for share in flat]


def test_an_evaluation_of_sets_by_hand() -> None:
    fitted = Preprocessor("multilabel", ("x",), labels=("a", "b"))
    model = SequenceModel(ModelConfig("multilabel", input_size=1, output_size=2, hidden_size=2))
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    meter = make_task(fitted, ModelSettings("multilabel")).meter(model, _records(3))
    batch = Batch(Ragged([torch.ones(1, 1)] * 3), targets, torch.arange(3))
    meter.add(torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]]), batch)
    measured = meter.measured()
    # a: told 2, there 2, both 1; b: told 1, there 1, both 1.
    assert measured.numbers == pytest.approx(
        {"micro_F1": 4 / 6, "macro_F1": (0.5 + 1) / 2, "exact_match": 1 / 3, "all_labels_micro_F1": 6 / 9}
    )


def test_targets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    records = _records(20)
    one = _with(records, Targets(np.ones((20, 1)), names=("y",)))
    total = len(records.values)
    train(Settings("regress", epochs=1, hidden_size=2, threads=1), one, None, tmp_path)
    saved = load_model(tmp_path)
    with pytest.raises(DataError, match=r"no numbers to learn.*numbers per sequence"):
        evaluate(saved, records)
    with pytest.raises(DataError, match=r"2 targets.*trained on 1: 'y'"):
        evaluate(saved, _with(records, Targets(np.ones((20, 2)), names=("y", "z"))))
    with pytest.raises(DataError, match=r"targets per element.*one per sequence"):
        evaluate(saved, _with(records, Targets(np.ones((total, 1)), per_element=True, names=("y",))))
    with pytest.raises(DataError, match=r"19 rows.*there are 20"):
        _with(records, Targets(np.ones((19, 1)), names=("y",)))
    with pytest.raises(DataError, match="finite"):
        Targets(np.array([[np.nan]]), names=("y",))
    with pytest.raises(ArgumentError, match=r"loss must be .*cross_entropy.*, got 'mae'"):
        Settings("classify", loss="mae")
    with pytest.raises(ArgumentError, match=r"quantile must be .*except quantile.*, got 0.9"):
        Settings("regress", quantile=0.9)
    assert total > 0


def _rolls(count: int = 40, seed: int = 0) -> Dataset:
    """Binary channels: the second is what the first was a step before; the third is chance."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, count)
    values = (random.random((int(lengths.sum()), 3)) < 0.4).astype(np.float32)
    values[1:, 1] = values[:-1, 0]
    return dataset(values, offsets_of(lengths), channels=("a", "b", "c"))


def test_binary_channels_are_told_as_such(tmp_path: Path) -> None:
    """Where a network can know more than frequencies it ends below them, and the rules' nats are what they are."""
    training, test = _rolls(), _rolls(20, seed=1)
    settings, note = settle(Settings("forecast", epochs=40, hidden_size=16, lr=0.02, threads=1), training)
    assert settings.loss == "bce"
    assert "all channels are 0 or 1" in str(note)
    result = train(replace(settings, loss=None), training, test, tmp_path)
    assert result.metric == "nats"
    saved = load_model(tmp_path)
    numbers = evaluate(saved, test).numbers
    assert numbers["nats"] < 0.85 * min(numbers["independent_nats"], numbers["persistence_nats"])
    pairs = [(test.values[row], test.values[row + 1]) for row in range(len(test.values) - 1)]
    inside = [pair for row, pair in enumerate(pairs) if row + 1 not in test.offsets]
    by_hand = 0.0
    for channel in range(3):
        for before in (0, 1):
            came = [new[channel] for old, new in inside if old[channel] == before]
            by_hand -= sum(math.log(np.mean(came) if one else 1 - np.mean(came)) for one in came)
    assert numbers["persistence_nats"] == pytest.approx(by_hand / len(inside))
    for row in predict(saved, test, horizon=3).columns["prediction"]:
        assert np.shape(row) == (3, 3)
        assert 0 < np.min(row) <= np.max(row) < 1
    wrong = replace_values(test, 2.0)
    with pytest.raises(DataError, match=r"got numbers between 2 and 2 in the channel 'x?.*0 or 1"):
        evaluate(saved, wrong)
    assert settle(Settings("forecast"), wrong)[0].loss is None
    assert settle(Settings("forecast", loss="mse"), test)[0].loss == "mse"


def replace_values(records: Dataset, value: float) -> Dataset:
    """The same with another number in all places."""
    return changed(records, values=np.full_like(records.values, value))


def test_steps_ahead_by_hand(tmp_path: Path) -> None:
    """The errors of each step are those of predictions on the sequences without their last elements."""
    records = _records(30)
    train(Settings("forecast", epochs=2, hidden_size=4, threads=1), records, None, tmp_path)
    saved = load_model(tmp_path)
    table = evaluate(saved, records, horizon=3, batch_size=7).measured.table
    long = records.subset(records.lengths > 3)
    keep = np.concatenate([np.arange(start, end - 3) for start, end in pairwise(long.offsets)])
    heads = dataset(long.values[keep], offsets_of(long.lengths - 3), channels=("x",))
    told = np.array(predict(saved, heads, horizon=3).columns["prediction"])[:, :, 0]
    truth = np.stack([long.values[end - 3 : end, 0] for end in long.offsets[1:]])
    last = np.stack([long.values[end - 4, 0] for end in long.offsets[1:]])[:, None]
    mean = (saved.preprocessor.mean or (0,))[0]
    for step, row in enumerate(table):
        assert row["step"] == step + 1
        for name, answer in (("MAE", told), ("persistence_MAE", last), ("mean_MAE", np.full((1, 3), mean))):
            assert row[name] == pytest.approx(np.abs(answer - truth)[:, step].mean(), rel=1e-4)
    with pytest.raises(DataError, match=r"horizon must be .*got 9"):
        evaluate(saved, records, horizon=9)


def test_weights_and_smoothing_change_the_loss_of_training_alone() -> None:
    fitted = Preprocessor("classify", ("x",), labels=("a", "b", "c"))
    task = make_task(fitted, Settings(label_smoothing=0.3))
    targets = torch.tensor([0, 0, 0, 0, 1, 2])
    task.class_weights = task.weigh(targets)
    assert task.class_weights.tolist() == [0.5, 2.0, 2.0]
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    batch = Batch(Ragged([torch.ones(1, 1)] * 6), targets, torch.arange(6))
    told = -logits.log_softmax(-1)
    plain = told[torch.arange(6), targets]
    assert float(task.score(logits, batch).loss) == pytest.approx(float(plain.sum()), rel=1e-5)
    # The share of smoothing goes to all classes, each with its own weight.
    weighed = 0.7 * plain * task.class_weights[targets] + 0.1 * (told * task.class_weights).sum(1)
    assert float(task.score(logits, batch, training=True).loss) == pytest.approx(float(weighed.sum()), rel=1e-5)
    sets = make_task(Preprocessor("multilabel", ("x",), labels=("a", "b")), ModelSettings("multilabel"))
    assert sets.weigh(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]])).tolist() == [3.0, 1.0]


def test_rates_by_hand() -> None:
    losses = [3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.0, 1.0, 1.0]
    history = [{"train_loss": 0.0, "validation_loss": loss} for loss in losses]
    plateau = Settings(lr=0.8, lr_schedule="plateau")
    rates = [rate_of(plateau, TrainingState(epoch=done, history=history[:done]), 5) for done in range(10)]
    assert rates == [0.8] * 4 + [0.4] * 3 + [0.2] * 2 + [0.1]
    warm = Settings(lr=0.8, warmup=2, epochs=6, lr_schedule="cosine")
    rising = [rate_of(warm, TrainingState(epoch=epoch, batch=batch), 2) for epoch in (0, 1) for batch in (0, 1)]
    assert rising == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rate_of(warm, TrainingState(epoch=4, batch=0), 2) == pytest.approx(0.4)
    assert rate_of(warm, TrainingState(epoch=5, batch=1), 2) == pytest.approx(0.8 * (1 + math.cos(math.pi * 7 / 8)) / 2)


def test_the_likeliest_classes(tmp_path: Path) -> None:
    records = _records(40)
    labels = tuple("abcd"[min(int(length) // 2, 3)] for length in records.lengths)
    data = changed(records, labels=labels)
    train(Settings(epochs=2, hidden_size=4, threads=1), data, None, tmp_path)
    saved = load_model(tmp_path)
    columns = predict(saved, data, top=2, probabilities=True).columns
    for row, (first, second) in enumerate(columns["top"]):
        shares = sorted((columns[f"p_{label}"][row] for label in "abcd"), reverse=True)
        assert columns["prediction"][row] == first != second
        assert columns["top_probability"][row] == shares[:2]
    hits = np.mean([label in row for label, row in zip(labels, columns["top"], strict=True)])
    assert evaluate(saved, data, top=2).numbers["top2_accuracy"] == pytest.approx(hits)
    assert evaluate(saved, data, top=9).numbers["top4_accuracy"] == 1
    with pytest.raises(ArgumentError, match=r"top must be .*got 0"):
        predict(saved, data, top=0)


def test_rare_tokens_are_read_as_unknown(tmp_path: Path) -> None:
    """With the rate 1 no token that occurs once is learned; with 0 the unknown token is not."""
    words = np.array(["often", "rare0", "often", "rare1", "often", "rare2"], dtype=object)
    data = dataset(words, offsets_of([2, 2, 2]), labels=("a", "b", "a"), columns=Columns())
    start = {}
    for rate in (0.0, 1.0):
        weights = []
        for epochs in (1, 4):
            settings = Settings(epochs=epochs, hidden_size=4, embedding=3, unk_dropout=rate, threads=1)
            train(settings, data, None, tmp_path, overwrite=True)
            embedding = load_model(tmp_path / "last").model.encoder.embedding
            assert embedding is not None
            weights.append(embedding.weight.detach())
        start[rate] = (weights[0] - weights[1]).abs().sum(1) > 0
    # The vocabulary: the unknown token, then the frequent one, then the rare ones.
    assert start[0.0].tolist() == [False, True, True, True, True]
    assert start[1.0].tolist() == [True, True, False, False, False]
