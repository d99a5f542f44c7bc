"""Predictions and evaluations of a trained model, compared with its module and with counts by
hand.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from made_datasets import changed, dataset
from raglane.cli import console, main, models
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.records import offsets_of
from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.checkpoint import load_model
from raglane.training.inference import evaluate, predict, predict_in_parts
from raglane.training.predictions import csv_in_parts, to_bytes
from raglane.training.run import train
from raglane.training.settings import ModelSettings
from raglane.training.tasks import make_task
from small_runs import QUICK, small_records


@pytest.mark.parametrize("task", ["classify", "tag", "forecast"])
@pytest.mark.parametrize("missing", ["raise", "forward"])
def test_predictions_are_those_of_the_model(tmp_path: Path, task: str, missing: str) -> None:
    records = small_records(25)
    if missing == "forward":
        values = records.values.copy()
        values[::5, 1] = np.nan
        records = changed(records, values=values)
    train(replace(QUICK, epochs=2, task=task, missing=missing), records, None, tmp_path / "run")
    saved = load_model(tmp_path / "run")
    table = predict(saved, records, batch_size=7, probabilities=task != "forecast").columns
    labels = saved.preprocessor.labels
    dataset = saved.preprocessor.apply(records, require_targets=False)
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
            torch.testing.assert_close(
                torch.tensor(answer[0]), output.values[-1] * std + mean, rtol=1e-4, atol=1e-5
            )
            continue
        shares = (output.values if task == "tag" else output[0]).softmax(-1)
        assert labels is not None
        for place, label in enumerate(labels):
            torch.testing.assert_close(
                torch.tensor(table[f"p_{label}"][row]), shares[..., place], rtol=1e-4, atol=1e-6
            )
        chosen = shares.argmax(-1).tolist()
        assert answer == (
            labels[chosen] if task == "classify" else [labels[place] for place in chosen]
        )
    assert table["id"] == list(range(25))


@pytest.mark.parametrize("task", ["classify", "tag", "forecast"])
def test_predictions_in_parts_are_those_of_the_whole(tmp_path: Path, task: str) -> None:
    records = small_records(25)
    hours = np.arange(len(records.values)).astype("datetime64[h]").astype("datetime64[ns]")
    records = changed(records, times=hours, time_name="hour")
    train(replace(QUICK, epochs=1, task=task), records, None, tmp_path)
    saved = load_model(tmp_path)
    horizon = 3 if task == "forecast" else 1
    whole = predict(saved, records, horizon=horizon)
    parts = list(predict_in_parts(saved, records, part_size=7, horizon=horizon))
    assert [len(part) for part in parts] == [7, 7, 7, 4]
    assert [row for part in parts for row in part] == list(whole)
    content = b"".join(csv_in_parts(parts))
    assert content == to_bytes(whole, ".csv")
    assert (b"hour" in content) == (task != "classify")


def test_a_reader_that_ends_early_ends_the_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As head does: the rows after the first part are not computed."""
    train(replace(QUICK, epochs=1), small_records(25), None, tmp_path / "run")
    data = tmp_path / "data.jsonl"
    data.write_text('{"a": [1, 2], "b": [3, 4], "c": [5, 6]}\n' * 9)
    monkeypatch.setattr(models, "_PART", 2)
    computed: list[bytes] = []

    def write(content: bytes) -> bool:
        computed.append(content)
        return False

    monkeypatch.setattr(console, "write", write)
    columns = ["--feature-column", "a,b,c"]
    assert main(["predict", str(tmp_path / "run"), str(data), *columns, "-q"]) == 0
    assert len(computed) == 1
    assert computed[0].count(b"\n") == 3


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_evaluation_agrees_with_predictions(tmp_path: Path, task: str) -> None:
    records = small_records(25)
    truth = list(records.labels or ()) if task == "classify" else records.tags.tolist()  # type: ignore[union-attr]
    train(replace(QUICK, epochs=2, task=task), records, None, tmp_path)
    saved = load_model(tmp_path)
    evaluation: Any = evaluate(saved, records, batch_size=6)
    answers: list[Any] = predict(saved, records).columns["prediction"]
    flat = answers if task == "classify" else [tag for answer in answers for tag in answer]
    right = sum(one == other for one, other in zip(flat, truth, strict=True))
    assert evaluation.count == len(truth)
    assert evaluation.numbers["accuracy"] == pytest.approx(right / len(truth))
    pairs = Counter(zip(truth, flat, strict=True))
    counted = [[pairs[one, other] for other in evaluation.labels] for one in evaluation.labels]
    assert evaluation.confusion.tolist() == counted


def test_macro_f1_on_unbalanced_classes(tmp_path: Path) -> None:
    records = small_records(25)
    train(replace(QUICK, epochs=1), records, None, tmp_path / "run")
    saved = load_model(tmp_path / "run")
    answers = predict(saved, records).columns["prediction"]
    # Labels made from the predictions: four of five are right.
    names = list(saved.preprocessor.labels or ())
    labels = [name if row % 5 else names[1 - names.index(name)] for row, name in enumerate(answers)]
    evaluation = evaluate(saved, changed(records, labels=tuple(labels)))
    scores = []
    for name in names:
        right = sum(one == other == name for one, other in zip(labels, answers, strict=True))
        if labels.count(name) + answers.count(name):
            scores.append(2 * right / (labels.count(name) + answers.count(name)))
    assert evaluation.numbers["macro_f1"] == pytest.approx(sum(scores) / len(scores))
    assert evaluation.numbers["macro_f1"] != pytest.approx(evaluation.numbers["accuracy"])


def test_a_longer_forecast_feeds_itself(tmp_path: Path) -> None:
    records = small_records(12)
    train(replace(QUICK, epochs=2, task="forecast"), records, None, tmp_path / "run")
    saved = load_model(tmp_path / "run")
    answers = predict(saved, records, horizon=3).columns["prediction"]
    # By hand: append each forecast to the data, and forecast again from the start.
    for row, answer in enumerate(answers):
        values = records.subset([row]).values
        if len(values) == 0:
            assert answer is None
            continue
        for step in range(3):
            grown = dataset(values, offsets_of([len(values)]), channels=records.channels)
            one = predict(saved, grown).columns["prediction"][0][0]
            assert answer[step] == pytest.approx(one, rel=1e-3, abs=1e-4)
            values = np.concatenate([values, np.array([one], dtype=np.float32)])


def test_a_missing_target_has_no_error() -> None:
    # The last two columns of the targets mark missing values; one is missing, so its forecast does
    # not matter.
    targets = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 4.0, 0.0, 0.0]])
    batch = Batch(
        Ragged([torch.tensor([[0.0, 9.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]])]),
        targets,
        torch.tensor([0]),
    )
    task = make_task(
        Preprocessor("forecast", ("a", "b"), std=(1.0, 10.0), missing="zero"),
        ModelSettings("forecast"),
    )
    for wild in (0.0, 100.0):
        score = task.score(torch.tensor([[2.0, wild], [3.0, 5.0]]), batch)
        assert [float(part) for part in (score.loss, score.metric, score.count)] == [
            1 + 1,
            1 + 10,
            3,
        ]
        assert float(score.baseline) == 1 + 2 + 40
