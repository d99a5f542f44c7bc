"""Forecasts with seasonal differences: their channels, feedback over several steps, and their choice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from raglane.data import Columns, read
from raglane.data.holdout import elements_held_out
from raglane.data.prepare import seasons
from raglane.errors import ArgumentError
from raglane.runs.parts import hold_out
from raglane.training.settings import Settings
from raglane.training.tasks import FEWEST_STEPS, SEASONAL_DROPOUT, settle
from raglane.training.tasks.season import season_of

_RNG = np.random.default_rng(0)
_QUICK: dict[str, Any] = {"epochs": 2, "hidden_size": 4, "threads": 1, "task": "forecast"}


@pytest.mark.parametrize("season", [2, 3, 7])
def test_differences_are_those_of_a_loop(season: int) -> None:
    lengths = torch.tensor([9, 0, 1, 2, 3, 7, 8])
    values = torch.randn(int(lengths.sum()), 2, dtype=torch.float64)
    batch = rl.Ragged.from_flat(values, lengths=lengths)
    rows = seasons.differences(values, batch.offsets, season)
    assert rows.shape[1] == seasons.width(2, season)
    expected = []
    for sequence in batch:
        for t in range(len(sequence)):
            if t < season:
                expected.append(torch.zeros(5, dtype=torch.float64))
                continue
            before = sequence[t - season]
            parts = [sequence[t] - before, sequence[t + 1 - season] - sequence[t]]
            expected.append(torch.cat([*parts, torch.ones(1, dtype=torch.float64)]))
    assert torch.equal(rows, torch.stack(expected))


def _series(lengths: list[int], season: int = 6, channels: int = 1) -> list[np.ndarray]:
    return [
        np.stack(
            [
                10 * np.sin(2 * np.pi * np.arange(n) / season + k) + 0.3 * _RNG.normal(size=n)
                for k in range(channels)
            ],
            axis=1,
        )
        for n in lengths
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"season": 6},
        {"season": 6, "loss": "quantile", "quantile": [0.1, 0.5, 0.9]},
        {"season": 6, "cell": "lstm", "num_layers": 2, "bptt_steps": 5},
        {"season": 30},  # longer than all sequences
    ],
)
def test_each_forecast_is_the_input_of_the_next(options: dict[str, Any]) -> None:
    data = _series([20, 1, 5, 6, 7, 13], channels=2)
    run = rl.fit(data, **_QUICK, **options, validation_fraction=0)
    ahead = run.predict(data, horizon=9)["prediction"]
    for sequence, forecasts in zip(data, ahead, strict=True):
        longer = sequence
        for forecast in forecasts:
            (following,) = run.predict([longer])["prediction"]
            assert np.allclose(following[0], forecast, rtol=1e-4, atol=1e-4)
            longer = np.concatenate([longer, [forecast]])


def test_the_first_season_is_persistence_and_an_exact_season_is_repeated() -> None:
    exact = np.tile(_RNG.normal(size=(5, 1)), (6, 1))
    run = rl.fit([exact] * 4, **_QUICK, season=5, validation_fraction=0)
    # Differences of 0 have no scale of their own, and nothing is left to learn.
    (ahead,) = run.predict([exact], horizon=10)["prediction"]
    assert np.abs(np.array(ahead) - exact[:10]).max() < 1
    (short,) = run.predict([exact[:4]], horizon=2)["prediction"]
    assert np.allclose(short, exact[3], rtol=1e-5)
    assert run.predict([np.zeros((0, 1))])["prediction"] == [None]


def test_errors_ahead_are_in_the_units_of_the_data() -> None:
    data = _series([40, 50])
    run = rl.fit(data, **_QUICK, season=6, validation_fraction=0)
    table = run.evaluate(data, horizon=6).measured.table
    heads = [sequence[:-6] for sequence in data]
    ahead = np.array(run.predict(heads, horizon=6)["prediction"])
    ends = np.stack([sequence[-6:] for sequence in data])
    assert np.allclose([row["mae"] for row in table], np.abs(ahead - ends).mean((0, 2)), rtol=1e-4)


def test_a_season_is_chosen_by_the_held_out_part() -> None:
    (wave,) = _series([200], season=24)
    noise = _RNG.normal(size=(200, 1))
    walk = noise.cumsum(0)
    # Differences would double the noise, which is more than half of the deviations from the mean.
    drowned = np.sin(2 * np.pi * np.arange(600) / 24)[:, None] + 0.5 * _RNG.normal(size=(600, 1))
    assert season_of(torch.from_numpy(drowned)) == 24
    for series, season in ((wave, 24), (noise, 0), (walk, 0), (drowned, 0)):
        data = read([series], Columns("forecast"))
        training, validation = hold_out(data, 0.1, 0)
        settings, notes = settle(Settings("forecast", loss="mse"), training, validation)
        assert settings.season == season
        assert any(note.startswith("season: 24 steps") for note in notes) == bool(season)
        # Without a held-out part nothing tells whether the season helps.
        assert settle(Settings("forecast", loss="mse"), data)[0].season == 0
        # A model of differences has dropout, unless that was chosen.
        names = () if season else ("batch_size",)
        free, lines = settle(Settings("forecast", loss="mse"), training, validation, names)
        assert free.dropout == (SEASONAL_DROPOUT if season else 0.0)
        assert any(line.startswith("dropout: 0.3, because") for line in lines) == bool(season)
        kept, _ = settle(Settings("forecast", loss="mse"), training, validation, ("dropout",))
        assert kept.dropout == 0.0
        off, notes = settle(Settings("forecast", loss="mse", season=0), training, validation)
        assert (off.season, [note for note in notes if "season" in note]) == (0, [])


@pytest.mark.parametrize("count", [216, 230, 240, 288])
def test_a_cut_season_does_not_move_its_length(count: int) -> None:
    day = np.clip(np.sin(2 * np.pi * (np.arange(count) - 12) / 48), 0, None)
    trend = np.repeat([1.0, 1.3, 0.7, 1.1, 0.9, 1.2], 48)[:count]
    assert season_of(torch.from_numpy(day * trend).unsqueeze(1)) == 48


def test_a_trend_does_not_move_the_length_of_a_season() -> None:
    months = np.arange(86) + 20 * np.sin(np.arange(86) * np.pi / 6)
    assert season_of(torch.from_numpy(months).unsqueeze(1)) == 12


def test_few_series_have_more_steps_in_an_epoch() -> None:
    data = read(_series([30] * 10), Columns("forecast"))
    settings, notes = settle(Settings("forecast", loss="mse"), data, chosen=())
    assert settings.batch_size == math.ceil(10 / FEWEST_STEPS)
    assert any(
        note.startswith("batches of 2 sequences, because there are only 10") for note in notes
    )
    assert (
        settle(Settings("forecast", loss="mse"), data, chosen=("batch_size",))[0].batch_size == 32
    )
    many = read(_series([3] * 300), Columns("forecast"))
    assert settle(Settings("forecast", loss="mse"), many, chosen=())[0].batch_size == 32
    run = rl.fit(_series([12] * 10), **_QUICK, batch_size=10)
    assert not any("batches of" in note for note in run.notes)
    assert any(
        "batches of 2 sequences" in note for note in rl.fit(_series([12] * 10), **_QUICK).notes
    )


def _panel(path: Path, lengths: dict[str, int]) -> str:
    rows = [
        f"{name},{1 + day},{day * (1 + index)}"
        for index, (name, count) in enumerate(lengths.items())
        for day in range(count)
    ]
    path.write_text("id,time,sold\n" + "\n".join(rows) + "\n")
    return str(path)


def test_a_panel_holds_out_its_last_steps(tmp_path: Path) -> None:
    source = _panel(tmp_path / "panel.csv", {"a": 20, "b": 2, "c": 41})
    data = read(source, Columns("forecast"))
    training, validation = hold_out(data, 0.1, 0)
    assert training.element_counts.tolist() == [18, 2, 37]
    assert (validation.ids, validation.element_counts.tolist()) == (("a", "c"), [20, 41])
    assert elements_held_out(validation) == 2
    plain = rl.data.Preprocessor.fit(training, task="forecast", standardize=False)
    applied = plain.apply(validation)
    batch: Any = applied.batch()
    real = ~batch["target"].values.isnan().squeeze(1)
    assert batch["target"].values[real, 0].tolist() == [18, 19, 3 * 37, 3 * 38, 3 * 39, 3 * 40]
    # Also row by row, of a part of the sequences, and in another order.
    for row, count in ((0, 2), (1, 4)):
        assert int((~applied[row]["target"].isnan()).sum()) == count
        assert int((~applied.subset([row])[0]["target"].isnan()).sum()) == count
    turned: Any = applied.take([1, 0]).batch()["target"]
    assert [int((~part.isnan()).sum()) for part in turned] == [4, 2]
    with pytest.raises(ArgumentError, match="sequences of at most 2"):
        hold_out(data.subset([1, 1]), 0.1, 0)


def test_a_run_of_a_panel_says_what_is_held_out(tmp_path: Path) -> None:
    source = _panel(tmp_path / "panel.csv", {"a": 20, "b": 30})
    run = rl.fit(source, **_QUICK)
    assert "validation: the ends of 2 sequences, 10 % of their elements" in run.notes
    # Series without times, such as pieces of music, are held out whole.
    notes = rl.fit(_series([20] * 10), **_QUICK).notes
    assert any("1 sequence, 10 % of the training sequences" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"season": 1}, "0, or at least 2"),
        ({"season": -3}, "0, or at least 2"),
        ({"season": 4, "loss": "bce"}, "unset for all tasks except forecast"),
        ({"season": 4, "task": "tag"}, "unset for all tasks except forecast"),
    ],
)
def test_a_season_is_a_number_of_steps_of_a_forecast(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Settings(**{"task": "forecast", **options})


def test_a_resumed_run_has_the_season_and_its_bits(tmp_path: Path) -> None:
    source = _panel(tmp_path / "panel.csv", {"a": 60, "b": 50})
    options = _QUICK | {"season": 7, "lr_schedule": "constant"}
    whole = rl.fit(source, **options | {"epochs": 3}, output=tmp_path / "whole")
    rl.fit(source, **options, output=tmp_path / "run")
    again = rl.fit(source, **options | {"epochs": 3}, output=tmp_path / "run", resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    loaded = rl.load(tmp_path / "whole")
    assert loaded.preprocessor.season == loaded.model.config.season == 7
    assert loaded.predict(source, horizon=3).columns == whole.predict(source, horizon=3).columns
