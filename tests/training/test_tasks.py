"""Losses, metrics, thresholds and predictions of each task, compared with values by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from made_datasets import changed, dataset
from raglane.data import Dataset
from raglane.data.columns import Columns
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.records import Targets, offsets_of
from raglane.errors import ArgumentError, DataError
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.checkpoint import load_model
from raglane.training.inference import evaluate, predict
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.run import train
from raglane.training.settings import ModelSettings, Settings
from raglane.training.state import TrainingState, rate_of
from raglane.training.tasks import make_task, settle
from raglane.training.tasks.labels import (
    accuracy,
    best_thresholds,
    confusion_matrix,
    f1_scores,
    macro_f1,
)
from raglane.training.tasks.numbers import loss_of_errors

_QUICK = Settings(epochs=15, hidden_size=12, lr=0.02, threads=1)


def _records(count: int = 60, seed: int = 0) -> Dataset:
    """Sequences of one channel, of 1 to 6 steps."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 7, count)
    return dataset(
        random.normal(size=(int(lengths.sum()), 1)).astype(np.float32),
        offsets_of(lengths),
        channels=("x",),
    )


def _with(records: Dataset, targets: Targets) -> Dataset:
    return dataset(records.values, records.offsets, channels=records.channels, targets=targets)


def _sums(records: Dataset) -> np.ndarray:
    return np.add.reduceat(records.values[:, 0].astype(np.float64), records.offsets[:-1])


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
            assert float(loss_of_errors(torch.tensor(error), name, quantile)) == pytest.approx(
                loss, abs=1e-6
            )


@pytest.mark.parametrize("per_element", [False, True])
def test_numbers_are_learned_and_predicted_in_their_units(
    tmp_path: Path, per_element: bool
) -> None:
    """Two numbers in units far from 1: the errors are below those of the mean, and equal those of
    the predictions.
    """
    records, later = _records(), _records(20, seed=1)

    def sums(part: Dataset) -> Any:
        flat = part.values[:, 0].astype(np.float64) if per_element else _sums(part)
        values = np.stack([1000 + 50 * flat, 0.001 * flat], axis=1)
        return _with(part, Targets(values, per_element=per_element, names=("far", "small")))

    training, test = sums(records), sums(later)
    train(
        Settings(**{**_QUICK.to_config(), "task": "regress", "cell": "lstm"}),
        training,
        None,
        tmp_path,
    )
    saved = load_model(tmp_path)
    evaluation = evaluate(saved, test)
    assert evaluation.numbers["r2"] > 0.7
    assert evaluation.numbers["mae"] < 0.6 * evaluation.numbers["mean_mae"]
    assert [row["number"] for row in evaluation.measured.table] == ["far", "small"]
    predicted = predict(saved, test).columns["prediction"]
    assert len(predicted) == 20
    rows = np.array([row for part in predicted for row in part] if per_element else predicted)
    error = np.abs(rows - test.targets.values).mean(axis=0)
    assert error == pytest.approx([row["mae"] for row in evaluation.measured.table], rel=1e-4)
    baseline = np.abs(test.targets.values - np.mean(training.targets.values, axis=0)).mean()
    assert evaluation.numbers["mean_mae"] == pytest.approx(baseline, rel=1e-6)


def test_a_quantile_has_its_share_below(tmp_path: Path) -> None:
    records = _records(200)
    noise = np.random.default_rng(3).normal(size=(200, 1))
    for quantile in (0.2, 0.8):
        settings = Settings(
            "regress",
            loss="quantile",
            quantile=[quantile],
            epochs=12,
            hidden_size=4,
            lr=0.02,
            threads=1,
        )
        data = _with(records, Targets(noise, names=("noise",)))
        train(settings, data, None, tmp_path, overwrite=True)
        assert abs(evaluate(load_model(tmp_path), data).numbers["share_below"] - quantile) < 0.1


@pytest.mark.parametrize("task", ["regress", "forecast"])
def test_several_quantiles(tmp_path: Path, task: str) -> None:
    random, shares = np.random.default_rng(3), [0.1, 0.5, 0.9]
    records = dataset(
        random.normal(size=(4000, 1)).astype(np.float32), offsets_of([20] * 200), channels=("x",)
    )
    if task == "regress":
        records = _with(records, Targets(random.normal(size=(200, 1)), names=("noise",)))
    settings = Settings(
        task, loss="quantile", quantile=shares, epochs=15, hidden_size=4, lr=0.02, threads=1
    )
    train(settings, records, None, tmp_path)
    saved = load_model(tmp_path)
    columns = predict(saved, records, horizon=2 if task == "forecast" else 1).columns
    assert columns["prediction"] == columns["q0.5"]
    low, middle, high = (np.array(columns[f"q{share}"]) for share in shares)
    assert (low < middle).mean() > 0.9 < (middle < high).mean()
    if task == "regress":
        for share in shares:
            assert abs(evaluate(saved, records).numbers[f"share_below_q{share}"] - share) < 0.1
    else:
        # The middle one is fed back.
        assert low.shape == (200, 2, 1)
        assert np.mean(high - low) == pytest.approx(2 * 1.28, rel=0.3)
        rows = np.hstack([records.values.reshape(200, 20), middle[:, 0]]).astype(np.float32)
        again = predict(
            saved, dataset(rows.reshape(-1, 1), offsets_of([21] * 200), channels=("x",))
        ).columns["q0.9"]
        np.testing.assert_allclose(np.array(again)[:, 0], high[:, 1], rtol=1e-3, atol=1e-4)


def test_thresholds_against_every_cut() -> None:
    """No other threshold gives a higher F1 score."""
    random = torch.Generator().manual_seed(0)
    for rows in (1, 2, 7, 30):
        shares = torch.rand((rows, 4), generator=random).round(decimals=1)
        targets = (torch.rand((rows, 4), generator=random) < 0.4).float()
        targets[:, 3] = 0

        def scores(predicted: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return 2 * (predicted * targets).sum(0) / (predicted.sum(0) + targets.sum(0))

        found = best_thresholds(shares, targets)
        best = scores((shares >= found).float())
        for cut in torch.linspace(-0.05, 1.05, 12):
            other = scores((shares >= cut).float())
            assert bool((best[:3].nan_to_num(1.0) >= other[:3].nan_to_num(0.0) - 1e-6).all())
        assert float(found[3]) == 0.5


@pytest.mark.parametrize("per_element", [False, True])
def test_sets_of_labels(tmp_path: Path, per_element: bool) -> None:
    """The thresholds are stored with the model, and decide which labels are predicted."""

    def sets(part: Dataset) -> Any:
        flat = part.values[:, 0] if per_element else _sums(part)
        values = np.empty(len(flat), dtype=object)
        values[:] = [
            tuple(name for name, is_there in (("up", x > 0), ("far", abs(x) > 1.5)) if is_there)
            for x in flat
        ]
        return _with(part, Targets(values, per_element=per_element))

    training, test = sets(_records(90)), sets(_records(30, seed=1))
    train(
        Settings(**{**_QUICK.to_config(), "task": "multilabel", "cell": "lstm"}),
        training,
        test,
        tmp_path,
    )
    saved = load_model(tmp_path)
    thresholds = saved.model.state_dict()["thresholds"].tolist()
    assert thresholds != [0.5, 0.5]
    evaluation = evaluate(saved, test)
    assert evaluation.numbers["micro_f1"] > 0.75 > evaluation.numbers["all_labels_micro_f1"]
    predictions = predict(saved, test, probabilities=True).columns
    predicted = (
        [row for part in predictions["prediction"] for row in part]
        if per_element
        else predictions["prediction"]
    )
    exact = [
        set(one) == set(other) for one, other in zip(predicted, test.targets.values, strict=True)
    ]
    assert np.mean(exact) == pytest.approx(evaluation.numbers["exact_match"])
    for label, threshold in zip(evaluation.labels, thresholds, strict=True):
        shares = predictions[f"p_{label}"]
        flat = [share for part in shares for share in part] if per_element else shares
        assert [label in row for row in predicted] == [share >= threshold for share in flat]
        true = torch.tensor([[label in row] for row in test.targets.values])
        assert best_thresholds(torch.tensor(flat)[:, None], true).tolist() == pytest.approx(
            [threshold]
        )


def test_an_evaluation_of_sets_by_hand() -> None:
    fitted = Preprocessor("multilabel", ("x",), labels=("a", "b"))
    model = SequenceModel(ModelConfig("multilabel", input_size=1, output_size=2, hidden_size=2))
    targets = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    task = make_task(fitted, ModelSettings("multilabel"), model)
    batch = Batch(Ragged([torch.ones(1, 1)] * 3), targets, torch.arange(3))
    output = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]])
    score = task.score(torch.tensor([[1.0, -1.0], [1.0, 1.0], [1.0, 1.0]]), batch)
    assert float(score.metric / score.count) == pytest.approx(2 / 3)
    (meter := task.meter(model, _records(3))).add(output, batch)
    measured = meter.measured()
    # a: 2 predicted, 2 true, 1 both; b: 1 of each.
    assert measured.numbers == pytest.approx(
        {
            "micro_f1": 4 / 6,
            "macro_f1": (0.5 + 1) / 2,
            "exact_match": 1 / 3,
            "all_labels_micro_f1": 6 / 9,
        }
    )


def test_targets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    records = _records(20)
    one = _with(records, Targets(np.ones((20, 1)), names=("y",)))
    total = len(records.values)
    train(Settings("regress", epochs=1, hidden_size=2, threads=1), one, None, tmp_path)
    saved = load_model(tmp_path)
    with pytest.raises(DataError, match=r"numbers per sequence.*no numbers to learn"):
        evaluate(saved, records)
    with pytest.raises(DataError, match="'y', got 2 "):
        evaluate(saved, _with(records, Targets(np.ones((20, 2)), names=("y", "z"))))
    with pytest.raises(DataError, match=r"one target per sequence.*got targets per element"):
        evaluate(
            saved, _with(records, Targets(np.ones((total, 1)), per_element=True, names=("y",)))
        )


def _rolls(count: int = 40, seed: int = 0) -> Dataset:
    """Binary channels: the second is the first one step later, the third is random."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, count)
    values = (random.random((int(lengths.sum()), 3)) < 0.4).astype(np.float32)
    values[1:, 1] = values[:-1, 0]
    return dataset(values, offsets_of(lengths), channels=("a", "b", "c"))


def test_binary_channels(tmp_path: Path) -> None:
    training, test = _rolls(), _rolls(20, seed=1)
    settings, notes = settle(
        Settings("forecast", epochs=40, hidden_size=16, lr=0.02, threads=1), training
    )
    assert settings.loss == "bce"
    assert "all channels are 0 or 1" in notes[0]
    assert train(replace(settings, loss=None), training, test, tmp_path).metric == "nats"
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
    wrong = changed(test, values=np.full_like(test.values, 2.0))
    with pytest.raises(
        DataError, match=r"0 or 1 .* got numbers between 2 and 2 in the channel 'a'"
    ):
        evaluate(saved, wrong)
    assert settle(Settings("forecast"), wrong)[0].loss is None
    assert settle(Settings("forecast", loss="mse"), test)[0].loss == "mse"


def test_steps_ahead_by_hand(tmp_path: Path) -> None:
    """Errors per step, compared with predictions for the sequences without their last elements."""
    records = _records(30)
    train(Settings("forecast", epochs=2, hidden_size=4, threads=1), records, None, tmp_path)
    saved = load_model(tmp_path)
    table = evaluate(saved, records, horizon=3, batch_size=7).measured.table
    long = records.subset(records.lengths > 3)
    keep = np.concatenate([np.arange(start, end - 3) for start, end in pairwise(long.offsets)])
    heads = dataset(long.values[keep], offsets_of(long.lengths - 3), channels=("x",))
    predicted = np.array(predict(saved, heads, horizon=3).columns["prediction"])[:, :, 0]
    truth = np.stack([long.values[end - 3 : end, 0] for end in long.offsets[1:]])
    last = np.stack([long.values[end - 4, 0] for end in long.offsets[1:]])[:, None]
    mean = (saved.preprocessor.mean or (0,))[0]
    for step, row in enumerate(table):
        assert row["step"] == step + 1
        for name, answer in (
            ("mae", predicted),
            ("persistence_mae", last),
            ("mean_mae", np.full((1, 3), mean)),
        ):
            assert row[name] == pytest.approx(np.abs(answer - truth)[:, step].mean(), rel=1e-4)
    with pytest.raises(DataError, match=r"horizon must be .*got 9"):
        evaluate(saved, records, horizon=9)


@pytest.mark.parametrize("season", [0, 4, 12])
def test_the_seasonal_rule_by_hand(tmp_path: Path, season: int) -> None:
    random, lengths = np.random.default_rng(1), [7, 50, 64]
    steps = np.concatenate([np.arange(length) for length in lengths])
    wave = 0.05 * random.normal(size=len(steps)) + (
        np.sin(2 * np.pi * steps / season) if season else 0
    )
    records = dataset(wave.astype(np.float32)[:, None], offsets_of(lengths), channels=("x",))
    train(Settings("forecast", epochs=1, hidden_size=2, threads=1), records, None, tmp_path)
    found = evaluate(load_model(tmp_path), records, horizon=6, batch_size=1)
    name = f"season_{season}_mae"
    assert (name in found.numbers) == (name in found.measured.table[0]) == (season > 0)
    if season:
        parts = np.split(records.values[:, 0].astype(np.float64), records.offsets[1:-1])
        errors = [
            abs(x[i] - x[i - season if i >= season else i - 1])
            for x in parts
            for i in range(1, len(x))
        ]
        assert found.numbers[name] == pytest.approx(np.mean(errors), rel=1e-4)
        ahead = [[abs(x[-6 + h] - (x[:-6][-season:] if len(x) - 6 >= season else x[:1])[h % min(season, len(x) - 6)])
                  if len(x) - 6 >= season else abs(x[-6 + h] - x[0]) for h in range(6)] for x in parts]  # fmt: skip
        assert [row[name] for row in found.measured.table] == pytest.approx(
            np.mean(ahead, 0), rel=1e-4
        )


def test_weights_and_smoothing_change_only_the_training_loss() -> None:
    task = make_task(
        Preprocessor("classify", ("x",), labels=("a", "b", "c")), Settings(label_smoothing=0.3)
    )
    targets = torch.tensor([0, 0, 0, 0, 1, 2])
    task.class_weights = task.weigh(targets)
    assert task.class_weights.tolist() == [0.5, 2.0, 2.0]
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    batch = Batch(Ragged([torch.ones(1, 1)] * 6), targets, torch.arange(6))
    predicted = -logits.log_softmax(-1)
    plain = predicted[torch.arange(6), targets]
    assert float(task.score(logits, batch).loss) == pytest.approx(float(plain.sum()), rel=1e-5)
    weighed = 0.7 * plain * task.class_weights[targets] + 0.1 * (
        predicted * task.class_weights
    ).sum(1)
    assert float(task.score(logits, batch, training=True).loss) == pytest.approx(
        float(weighed.sum()), rel=1e-5
    )
    sets = make_task(
        Preprocessor("multilabel", ("x",), labels=("a", "b")), ModelSettings("multilabel")
    )
    assert sets.weigh(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]])).tolist() == [
        3.0,
        1.0,
    ]


def test_rates_by_hand() -> None:
    losses = [3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.0, 1.0, 1.0]
    history = [{"train_loss": 0.0, "validation_loss": loss} for loss in losses]
    plateau = Settings(lr=0.8, lr_schedule="plateau")
    rates = [
        rate_of(plateau, TrainingState(epoch=done, history=history[:done]), 5) for done in range(10)
    ]
    assert rates == [0.8] * 4 + [0.4] * 3 + [0.2] * 2 + [0.1]
    warm = Settings(lr=0.8, warmup=2, epochs=6, lr_schedule="cosine")
    rising = [
        rate_of(warm, TrainingState(epoch=epoch, batch=batch), 2)
        for epoch in (0, 1)
        for batch in (0, 1)
    ]
    assert rising == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rate_of(warm, TrainingState(epoch=4, batch=0), 2) == pytest.approx(0.4)
    assert rate_of(warm, TrainingState(epoch=5, batch=1), 2) == pytest.approx(
        0.8 * (1 + math.cos(math.pi * 7 / 8)) / 2
    )


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
    """With unk_dropout=1 no token that occurs once is learned; with 0 the unknown token is not."""
    words = np.array(["often", "rare0", "often", "rare1", "often", "rare2"], dtype=object)
    data = dataset(words, offsets_of([2, 2, 2]), labels=("a", "b", "a"), columns=Columns())
    start = {}
    for rate in (0.0, 1.0):
        weights = []
        for epochs in (1, 4):
            settings = Settings(
                epochs=epochs, hidden_size=4, embedding=3, unk_dropout=rate, threads=1
            )
            train(settings, data, None, tmp_path, overwrite=True)
            embedding = load_model(tmp_path / "last").model.encoder.embedding
            assert embedding is not None
            weights.append(embedding.weight.detach())
        start[rate] = (weights[0] - weights[1]).abs().sum(1) > 0
    # The vocabulary: the unknown token, the frequent one, the rare ones.
    assert start[0.0].tolist() == [False, True, True, True, True]
    assert start[1.0].tolist() == [True, True, False, False, False]


_PAIRS = st.integers(1, 5).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), max_size=40),
    )
)


@given(_PAIRS)
def test_against_counting(case: tuple[int, list[tuple[int, int]]]) -> None:
    classes, pairs = case
    targets, predictions = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    matrix = confusion_matrix(targets, predictions, classes)
    assert matrix.tolist() == [
        [pairs.count((true, guess)) for guess in range(classes)] for true in range(classes)
    ]
    hits = [pairs.count((name, name)) for name in range(classes)]
    sizes = [
        sum((true == name) + (guess == name) for true, guess in pairs) for name in range(classes)
    ]
    scores = [2 * hit / size if size else math.nan for hit, size in zip(hits, sizes, strict=True)]
    assert f1_scores(matrix).tolist() == pytest.approx(scores, nan_ok=True)
    if not pairs:
        assert math.isnan(accuracy(matrix))
        assert math.isnan(macro_f1(matrix))
        return
    assert accuracy(matrix) == sum(hits) / len(pairs)
    assert macro_f1(matrix) == pytest.approx(np.nanmean(scores), rel=1e-12, abs=1e-12)
