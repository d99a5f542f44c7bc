"""What a training chooses by its data: its length, splits of texts, held-out ends of series; and
its advice.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raglane as rl
from commands import FAST, Capsys, prints
from raglane.cli import main
from raglane.data import read
from raglane.errors import ArgumentError
from raglane.training.inference import evaluate
from raglane.training.results import Evaluation
from raglane.training.settings import Settings
from raglane.training.tasks import FEWEST, MOST, STEPS, Measured, settle

_QUICK: dict[str, Any] = {"hidden_size": 4, "threads": 1}
_WAVE = [math.sin(0.5 * step) + 0.1 * step for step in range(40)]


def _texts(path: Path, words: list[str]) -> str:
    path.write_text(
        "name,kind\n"
        + "".join(f"{word},{'long' if len(word) > 5 else 'short'}\n" for word in words)
    )
    return str(path)


@pytest.mark.parametrize(
    ("count", "options", "steps"),
    [
        (7, {}, 1),
        (1600, {}, 50),
        (1600, {"batch_size": 16}, 100),
        (1600, {"accumulate": 2}, 25),
        (1600, {"batch_elements": 32}, 50),
        (1600, {"bptt_steps": 1}, 50),
        (100_000, {}, 3125),
    ],
)
def test_the_length_of_a_training(count: int, options: dict[str, Any], steps: int) -> None:
    data = read(np.zeros((count, 2)), rl.data.Columns("forecast"))
    settings, notes = settle(Settings("forecast", loss="mse", season=0, **options), data)
    epochs = min(max(math.ceil(STEPS / steps), FEWEST["forecast"]), MOST)
    assert (settings.epochs, settings.lr_schedule) == (epochs, "cosine")
    assert settings.patience == (None if steps == 1 else max(math.ceil(500 / steps), 5))
    assert notes[0].startswith(f"epochs: {epochs:,} of {steps:,} step")
    chosen = settle(Settings("forecast", loss="mse", season=0, epochs=7, **options), data)
    assert chosen == (
        Settings("forecast", loss="mse", season=0, epochs=7, lr_schedule="constant", **options),
        [],
    )


def test_tags_are_read_in_both_directions_by_default(tmp_path: Path, capsys: Capsys) -> None:
    """Unless chunks are read, or one direction is chosen; the run has it, as its config file."""
    data = tmp_path / "tags.jsonl"
    row = '{"words": ["a", "b"], "tags": ["x", "y"]}\n'
    data.write_text(row * 8)
    train = ["train", str(data), "--sequence-column", "words", "--label-column", "tags", *FAST]
    line = "directions: 2, because tags may depend on what follows; --no-bidirectional for live"
    for more, directions in (([], 2), (["--no-bidirectional"], 1), (["--bptt-steps", "1"], 1)):
        out = tmp_path / f"run{len(more)}"
        assert (line in prints([*train, *more, "--output", str(out)], capsys)) == (directions == 2)
        assert rl.load(out).model.config.bidirectional == (directions == 2)
        again = ["train", "--config", str(out / "run.toml"), "--output", str(out), "--overwrite"]
        assert line not in prints(again, capsys)
        assert rl.load(out).model.config.bidirectional == (directions == 2)
        shown = prints([*train, *more, "--task", "tag", "--show-config"], capsys)
        assert f"\nbidirectional = {str(directions == 2).lower()} " in shown
    assert not Settings("tag").bidirectional


def test_a_run_states_the_length_and_repeats_it(tmp_path: Path, capsys: Capsys) -> None:
    data, run = _texts(tmp_path / "names.csv", ["a b", "a b c d e f"] * 12), tmp_path / "run"
    quick = ["--hidden-size", "3", "--threads", "1"]
    assert (
        main(
            [
                "train",
                data,
                "--sequence-column",
                "name",
                "--output",
                str(run),
                *quick,
                "--patience",
                "2",
                "--lr",
                "1",  # with which a training soon stops to improve
            ]
        )
        == 0
    )
    assert f"epochs: {MOST} of 1 step, until 2 without improvement" in capsys.readouterr().out
    for line in (f"epochs = {MOST}", "patience = 2", 'lr-schedule = "cosine"'):
        assert f"\n{line}" in (run / "run.toml").read_text()


@pytest.mark.parametrize(
    ("numbers", "rule"),
    [
        ({"accuracy": 0.8, "macro_f1": 0.2, "majority_accuracy": 0.7}, None),
        (
            {"accuracy": 0.7, "macro_f1": 0.2, "majority_accuracy": 0.7},
            "accuracy 0.700, majority accuracy 0.700",
        ),
        ({"accuracy": 1.0, "majority_accuracy": 1.0}, None),
        ({"accuracy": 0.8, "majority_accuracy": 0.7, "top2_accuracy": 0.9}, None),
        ({"mae": 2.0, "persistence_mae": 3.0, "mean_mae": 1.5}, "MAE 2.000, mean MAE 1.500"),
        ({"mae": 2.0, "persistence_mae": 2.5}, None),
        (
            {"nats": 9.0, "independent_nats": 8.0, "persistence_nats": 7.0},
            "nats 9.000, persistence nats 7.000",
        ),
        ({"perplexity": 3.0, "unigram_perplexity": 4.0, "bits_per_character": 2.0}, None),
        (
            {"micro_f1": 0.1, "all_labels_micro_f1": 0.3},
            "micro-F1 0.100, all labels micro-F1 0.300",
        ),
    ],
)
def test_the_rule_that_a_model_does_not_beat(numbers: dict[str, float], rule: str | None) -> None:
    assert (
        Evaluation("any", 9, 9, {"loss": 1.0, **numbers}, Measured(numbers)).better_rule() == rule
    )


@pytest.mark.parametrize(
    ("measures", "rule"),
    [
        (((1.0, 3.0, 2.0), (2.0, 1.0, 2.0)), None),
        (
            ((2.0, 4.0, 1.0), (2.0, 4.0, 2.0)),
            "MAE 2.000, season 7 MAE 1.500, as the mean of 2 steps ahead",
        ),
    ],
)
def test_the_rule_that_forecasts_of_several_steps_do_not_beat(
    measures: Any, rule: str | None
) -> None:
    names = ("mae", "persistence_mae", "season_7_mae")
    steps = tuple(
        {"step": step, **dict(zip(names, row, strict=True))} for step, row in enumerate(measures, 1)
    )
    numbers = {"loss": 1.0, "mae": 0.1, "persistence_mae": 0.2}
    assert (
        Evaluation("forecast", 1, 9, numbers, Measured(numbers, table=steps)).better_rule() == rule
    )


@pytest.mark.parametrize("out", [None, "run"])
def test_a_forecast_that_is_worse_than_the_season_some_steps_ahead_is_said(
    out: str | None, tmp_path: Path
) -> None:
    noise = np.random.default_rng(0).normal(size=240)
    series = np.resize(np.eye(1, 12)[0] * 5 + np.arange(12) % 5, 240) + noise / 10
    folder = None if out is None else tmp_path / out
    options = {"epochs": 12, "lr": 0.003, "season": 0, **_QUICK}
    run = rl.fit([series.tolist()], task="forecast", output=folder, **options)
    words = r"not better than a simple rule on the validation part \(MAE .*, season 12 MAE 0\..*\)"
    assert re.search(rf"{words}.*: try season=12$", run.notes[-1])
    # What has been passed is not proposed.
    run = rl.fit([series.tolist()], task="forecast", **options | {"season": 12})
    assert "season=" not in run.notes[-1]


def test_the_last_line_is_advice(tmp_path: Path, capsys: Capsys) -> None:
    # Labels that do not depend on the sequences.
    random = np.random.default_rng(0)
    noise, labels = list(random.normal(size=(60, 5))), ["a", "a", "b"] * 20
    run = rl.fit(noise, labels, epochs=3, lr=1e-9, validation_fraction=0.5, **_QUICK)
    assert run.notes[-1].startswith(
        ("the model is not better than a simple rule on the validation part", "the last")
    )
    # A word always follows another, which two epochs do not learn exactly.
    data, out = _texts(tmp_path / "n.csv", ["abcdabcdabcd"] * 90), str(tmp_path / "run")
    options = ["--task", "language", "--sequence-column", "name", "--split", "characters"]
    assert main(["train", data, *options, "--lr", "0.01", "--output", out, *FAST]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "note: the last epoch was the best: try --epochs 20 or --hidden-size 8"
    assert "the last epoch was the best" in (tmp_path / "run" / "card.md").read_text()


def test_words_are_split_into_characters(tmp_path: Path, capsys: Capsys) -> None:
    data = _texts(
        tmp_path / "names.csv",
        ["anna", "eve", "van der", *("xy" * length for length in range(1, 20))],
    )
    train = ["train", data, "--sequence-column", "name", "--validation", data, *FAST]
    assert main([*train, "--output", str(tmp_path / "run")]) == 0
    assert (
        "texts of one word are split into characters; --split words keeps them whole"
        in capsys.readouterr().out
    )
    run = rl.load(tmp_path / "run")
    assert run.preprocessor.split == "characters"
    # New data is read in the same way, whatever its texts are, and so is the data of a resumed run.
    assert run.read(["many words here"], need_labels=False).lengths.tolist() == [15]
    assert main(["train", "--resume", "--output", str(tmp_path / "run"), "--epochs", "3"]) == 0
    assert main([*train, "--output", str(tmp_path / "words"), "--split", "words"]) == 0
    assert (
        "21 of 22 sequences have at most one element: to split texts into"
        in capsys.readouterr().out
    )
    assert (
        rl.fit(["anna", "eve"] * 4, ["a", "b"] * 4, epochs=1, **_QUICK).preprocessor.split
        == "characters"
    )


def test_the_end_of_one_series_is_held_out(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "series.csv"
    path.write_text(
        "month,x\n"
        + "".join(f"{2000 + row // 12}-{row % 12 + 1:02},{x}\n" for row, x in enumerate(_WAVE))
    )
    out = prints(
        ["train", str(path), "--task", "forecast", "--output", str(tmp_path / "run"), *FAST], capsys
    )
    assert "no id column: all rows are one series" in out
    assert "training: 1 sequence, 36 elements of 1 channel" in out
    assert "validation: the end of the sequence, 10 % of its elements" in out
    run: Any = rl.fit([_WAVE], task="forecast", epochs=2, **_QUICK)
    state = run.result.state
    # Each element of the end is forecast from all before it.
    predicted = np.array(run.predict([_WAVE[:end] for end in range(36, 40)])["prediction"])[:, 0, 0]
    best = state.history[state.best_epoch - 1]
    assert best["validation_mae"] == pytest.approx(np.abs(predicted - _WAVE[36:]).mean(), rel=1e-4)
    assert best["persistence_mae"] == pytest.approx(np.abs(np.diff(_WAVE[35:])).mean(), rel=1e-4)
    with pytest.raises(ArgumentError, match="at least 3 elements, got a sequence of 2"):
        rl.fit([[0.1, 0.2]], task="forecast", **_QUICK)


def test_backtests_from_several_origins() -> None:
    run = rl.fit([_WAVE], task="forecast", epochs=1, validation_fraction=0, **_QUICK)
    records = run.read([_WAVE])
    table = evaluate(run.saved, records, horizon=3, backtests=4).measured.table
    heads = [_WAVE[: 40 - 3 * back] for back in range(1, 5)]
    predicted = np.array(run.predict(heads, horizon=3)["prediction"])[:, :, 0]
    truth = np.array([_WAVE[len(head) : len(head) + 3] for head in heads])
    assert [row["mae"] for row in table] == pytest.approx(
        np.abs(predicted - truth).mean(0), rel=1e-4
    )
    # Origins before the first element are left out.
    assert evaluate(run.saved, records, horizon=30, backtests=9).measured.table[0]["step"] == 1
    with pytest.raises(ArgumentError, match="backtests must be 1 for forecasts of one step, got 2"):
        run.evaluate([_WAVE], backtests=2)


def test_a_language_model_is_not_evaluated_by_a_horizon() -> None:
    run = rl.fit(["a b c d", "b c d a"] * 4, task="language", epochs=1, progress=False)
    rule = "horizon must be left out in an evaluation except for the task forecast, got 2"
    with pytest.raises(ArgumentError, match=rule):
        run.evaluate(["a b c d"], horizon=2)
