"""A run from Python answers as the commands do, from any number of threads, wherever it has
been.
"""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch

import raglane as rl
from commands import FAST, Capsys, fails, tree, write_steps
from raglane.cli import main
from raglane.errors import ArgumentError, ArgumentTypeError, CheckpointError, DataError
from raglane.training.predictions import write_predictions


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file and runs on it."""
    folder = tmp_path_factory.mktemp("runs")
    data = str(write_steps(folder / "steps.csv", 16))
    test = str(write_steps(folder / "test.csv", 5))
    for task, more in (("classify", ["--test", test]), ("forecast", ["--feature-column", "a"])):
        assert (
            main(
                [
                    "train",
                    data,
                    "--task",
                    task,
                    "--output",
                    str(folder / task),
                    *FAST,
                    *more,
                    "--quiet",
                ]
            )
            == 0
        )
    return folder


def test_predictions_are_those_of_the_command(place: Path, tmp_path: Path) -> None:
    for task, flags, options in (
        ("classify", ["--probabilities"], {"probabilities": True}),
        ("forecast", ["--horizon", "3"], {"horizon": 3}),
    ):
        run, data = rl.load(place / task), place / "steps.csv"
        assert run.task == task
        for suffix in (".csv", ".jsonl", ".parquet"):
            told, own = tmp_path / f"told{suffix}", tmp_path / f"own{suffix}"
            assert (
                main(["predict", str(place / task), str(data), "-o", str(told), *flags, "--quiet"])
                == 0
            )
            write_predictions(own, run.predict(data, **options))
            assert own.read_bytes() == told.read_bytes()


def test_numbers_are_those_of_the_command(place: Path) -> None:
    run = rl.load(place / "classify")
    before = tree(place)
    assert run.evaluate().sequences == 5
    found = run.evaluate(place / "steps.csv")
    assert tree(place) == before
    assert main(["evaluate", str(place / "classify"), str(place / "steps.csv"), "--quiet"]) == 0
    told = json.loads((place / "classify" / "evaluation.json").read_text())
    assert told == {"data": str(place / "steps.csv"), **found.to_config()}
    assert found["accuracy"] == told["accuracy"]


def test_one_answer_to_every_form_of_data(place: Path) -> None:
    run = rl.load(place / "classify")
    frame = pd.read_csv(place / "steps.csv")
    arrays = [group[["a", "b"]].to_numpy() for _, group in frame.groupby("id", sort=False)]
    expected = run.predict(place / "steps.csv", probabilities=True)
    ragged = rl.Ragged([torch.tensor(array, dtype=torch.float32) for array in arrays])
    for data in (
        frame,
        frame.drop(columns="label"),
        arrays,
        ragged,
        rl.data.read(place / "steps.csv"),
    ):
        assert {**run.predict(data, probabilities=True).columns, "id": []} == {
            **expected.columns,
            "id": [],
        }
    assert (
        run.predict(frame.rename(columns={"id": "row"}), id="row", probabilities=True).columns
        == expected.columns
    )
    labels = frame.groupby("id", sort=False)["label"].first().tolist()
    numbers = run.evaluate(frame).numbers
    assert run.evaluate(arrays, labels).numbers == numbers
    assert run.evaluate(frame.drop(columns="label"), labels).numbers == numbers


def test_to_load_draws_no_random_numbers(place: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    rl.load(place / "classify").predict([np.zeros((2, 2))])
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_at_once_get_the_same_bits(place: Path) -> None:
    run, random = rl.load(place / "classify"), np.random.default_rng(0)
    parts = [
        [random.normal(size=(length, 2)) for length in random.integers(0, 9, 40)] for _ in range(8)
    ]
    expected = [run.predict(part, probabilities=True).columns for part in parts]
    found: list[Any] = [None] * len(parts)
    barrier = threading.Barrier(len(parts))

    def work(place: int) -> None:
        barrier.wait()
        for _ in range(5):
            found[place] = run.predict(parts[place], probabilities=True).columns
            assert found[place] == expected[place]

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work, range(len(parts))))
    assert found == expected


def test_copies_pickles_and_saved_models_answer_alike(place: Path, tmp_path: Path) -> None:
    run = rl.load(place / "classify")
    run.save(tmp_path / "deep" / "model")
    shutil.copytree(place / "classify" / "best", tmp_path / "copy")
    expected = run.predict(place / "steps.csv", probabilities=True).columns
    loaded = [rl.load(tmp_path / name) for name in ("deep/model", "copy")]
    others = [pickle.loads(pickle.dumps(run)), copy.deepcopy(run), *loaded]
    for other in others:
        assert other.predict(place / "steps.csv", probabilities=True).columns == expected
    assert tree(tmp_path / "copy") == tree(tmp_path / "deep" / "model")
    assert others[0].folder is None
    for taken in (place / "classify", place / "steps.csv"):
        with pytest.raises(ArgumentError, match="a new folder"):
            run.save(taken)


def test_a_run_is_described_in_a_line(place: Path) -> None:
    run = rl.load(place / "classify")
    shown = "Run(classify, GRU, 4 units, 1 layer, 106 weights; 2 channels to 2 classes; "
    assert repr(run) == f"{shown}{place / 'classify'})"
    assert repr(copy.copy(run)) == f"{shown}in memory)"
    assert (run.labels, run.channels, run.folder) == (("x", "y"), ("a", "b"), place / "classify")
    assert not run.model.training
    predictions = run.predict(np.zeros((30, 2, 2)))
    assert len(repr(predictions).splitlines()) == 13
    assert repr(predictions).endswith("... 20 more")
    assert list(predictions.to_pandas().columns) == ["id", "prediction", "probability"]


def test_mistakes(place: Path, tmp_path: Path) -> None:
    run = rl.load(place / "classify")
    sequence = [np.zeros((2, 2))]
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: rl.load(tmp_path / "none"), CheckpointError, "no such folder"),
        (lambda: rl.load(b"3"), ArgumentTypeError, "a path"),  # type: ignore[arg-type]
        (lambda: run.predict(tmp_path / "none.csv"), DataError, "no such file"),
        (lambda: run.predict([np.zeros((2, 3))]), DataError, "3 channels without names"),
        (lambda: run.predict(["a b"]), DataError, "got tokens"),
        (lambda: run.predict(sequence, horizon=2), ArgumentError, "forecast"),
        (lambda: run.predict(sequence, batch_size=0), ArgumentError, "batch_size"),
        (lambda: run.predict(sequence, device="tpu"), ArgumentError, "device"),
        (lambda: run.predict(sequence, column="a"), ArgumentTypeError, "'column'"),  # type: ignore[call-arg]
        (lambda: run.predict(sequence, features=[1]), ArgumentTypeError, ", got 1."),  # type: ignore[list-item]
        (lambda: run.predict(sequence)["p"], ArgumentError, "'prediction'"),
        (lambda: run.evaluate(sequence), DataError, ", got none."),
        (lambda: run.evaluate(sequence, ["z"]), DataError, "the label 'z' in row 0"),
        (lambda: run.evaluate(place / "steps.csv", ["x"]), ArgumentTypeError, "labels"),
        (lambda: copy.copy(run).evaluate(), ArgumentError, "no test data"),
        (lambda: run.evaluate()["f1"], ArgumentError, "'accuracy'"),
    ]
    for call, error, words in calls:
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value), caught.value
    files = dict(pickle.loads(pickle.dumps(run)).__reduce__()[1][0])
    for name in files:
        with pytest.raises(CheckpointError, match=f"a pickled run/{name}"):
            rl.runs.run._from_files({**files, name: files[name][:-20]}, ())
    with pytest.raises(CheckpointError, match="no such file"):
        rl.runs.run._from_files({}, ())


def test_a_run_with_data_in_memory_goes_on_in_python(tmp_path: Path, capsys: Capsys) -> None:
    folder = tmp_path / "run"
    rl.fit([[1.0], [2.0]] * 4, ["a", "b"] * 4, epochs=1, hidden_size=2, output=folder)
    fails(
        ["train", "--resume", "--output", str(folder)],
        capsys,
        "data in memory",
        "rl.fit(data, output=",
    )
    fails(["evaluate", str(folder)], capsys, "this run has no test data")


def test_results_are_read_as_a_mapping_and_as_rows(tmp_path: Path) -> None:
    run = rl.fit(
        [[0.1, 0.9], [0.8, 0.2]] * 8,
        ["up", "down"] * 8,
        epochs=2,
        hidden_size=4,
        output=tmp_path / "r",
    )
    found = run.evaluate([[0.2, 0.7], [0.9, 0.1]], ["up", "down"])
    assert dict(found) == found.numbers
    assert "accuracy" in found
    assert found.get("none") is None
    assert next(iter(found)) == "loss"
    answers = run.predict([[0.2, 0.7], [0.9, 0.1]])
    assert "prediction" in answers
    assert [*answers] == [answers[0], answers[1]]
    assert [*answers.keys()] == ["id", "prediction", "probability"]
    assert answers[-1] == {name: answers[name][1] for name in answers.keys()}  # noqa: SIM118
    assert pyarrow.table(answers).to_pydict() == answers.columns
    with pytest.raises(IndexError, match="row must be from -2 to 1, for 2 rows, got 2"):
        answers[2]
    loaded = rl.load(tmp_path / "r")
    assert run.history == loaded.history
    assert [row["epoch"] for row in loaded.history] == [1, 2]
    assert rl.load(tmp_path / "r" / "best").history == []
    assert (
        repr(run.read([[0.1, 0.2]] * 3, need_labels=False))
        == "Dataset(3 sequences, 1 channel; data)"
    )


def test_texts_from_python_are_those_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rl.fit(
        ["abab", "abba", "baba"] * 4,
        task="language",
        epochs=2,
        hidden_size=4,
        output=tmp_path / "r",
    )
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "r"), "--count", "2", "--seed", "3"]) == 0
    assert run.generate(count=2, seed=3) == capsys.readouterr().out.splitlines()
