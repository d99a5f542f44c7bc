"""The season of series: its length, whether a model is trained on differences, and their scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane import segments
from raglane._utils.messages import argument
from raglane.data.dataset import Dataset
from raglane.data.prepare import seasons
from raglane.data.prepare.preprocess import Preprocessor
from raglane.training.settings import Settings

# The longest season that is tried.
_LONGEST = 400
# The most elements that are compared for a season.
_COMPARED = 5000
# The most sequences that are read for the scale and the choice.
_SEQUENCES = 1000
# The share of the error of simple rules below which a season is better. Differences double the
# noise: where a season explains less than half, models without one forecast better.
_CLEARLY = 0.5


def season_of(values: Tensor) -> int:
    """Return the lag of the first high peak of the autocorrelation of elements ``(L, C)`` without
    trend, or 0; of the lags around the peak, the one with the smallest differences.
    """
    values = values[-_COMPARED:].cpu().double()
    count = len(values)
    steps = torch.stack([torch.ones(count), torch.arange(count) / max(count, 1)], 1).double()
    values = (
        values - steps @ torch.linalg.lstsq(steps, values).solution if count > 2 else values[:0]
    )
    lags = range(min(count // 2, _LONGEST) + 1 if count > 2 else 0)
    alike = [_alike(values[lag:], values[: count - lag]) for lag in lags]
    # A peak follows a valley; noise on a slow wave has peaks without one.
    peaks = [
        lag
        for lag in lags[2:-1]
        if min(alike[:lag]) < 0.7 * alike[lag] and alike[lag - 1] < alike[lag] >= alike[lag + 1]
    ]
    highest = max([alike[lag] for lag in peaks], default=0.0)
    # Autocorrelations of noise deviate from 0 by about 1 / sqrt(L).
    if highest < max(0.3, 3 / math.sqrt(max(count, 1))):
        return 0
    peak = next(lag for lag in peaks if alike[lag] > 0.8 * highest)
    # Few seasons, of which the first or the last is cut, move the peak.
    near = range(max(peak - peak // 20 - 1, 2), min(peak + peak // 20 + 1, count // 2) + 1)
    return min(near, key=lambda lag: _spread(values[lag:] - values[:-lag]))


def _spread(differences: Tensor) -> float:
    """Return the mean deviation of differences, of which a trend is the mean."""
    return float((differences - differences.mean(0)).abs().mean())


def _alike(values: Tensor, others: Tensor) -> float:
    """Return the correlation of two parts of a series, whose means need not be 0."""
    sizes = float(values.square().sum()) * float(others.square().sum())
    return float((values * others).sum()) / max(math.sqrt(sizes), 1e-12)


def settle(
    settings: Settings, training: Dataset, validation: Dataset | None
) -> tuple[Settings, str | None]:
    """Choose the season that was left to the data, and return a line about one.

    It is chosen if the held-out elements repeat those of one season before.
    """
    if settings.task != "forecast":
        return settings, None
    settings = replace(settings, season=0)
    is_possible = settings.loss != "bce" and validation is not None
    if not is_possible or validation is None or training.is_tokens or not len(validation):
        return settings, None
    plain = Preprocessor.fit(training, task="forecast", missing=settings.missing)
    longest = plain.apply(training.subset([int(training.element_counts.argmax())]), False)
    steps = season_of(longest.tensors().values[:, : len(plain.channels)])
    if not steps:
        return settings, None
    if not _is_repeated(plain.apply(validation), len(plain.channels), steps):
        return settings, None
    chooses = f"{argument('season', 0)} for none"
    note = f"season: {steps} steps, because the held-out part repeats it; {chooses}"
    return replace(settings, season=steps), note


def _is_repeated(validation: Dataset, channels: int, steps: int) -> bool:
    """Return True if elements change like one season before, with less than half the error of no
    change at all, or if they repeat the element one season before, with less than half that of the
    mean and of half a season before.
    """
    rows = np.arange(min(len(validation), _SEQUENCES))
    batch: Any = validation.take(rows).batch()
    inputs = batch["inputs"]
    values = inputs.values[:, :channels]
    targets = batch["target"].values[:, :channels]
    columns = seasons.differences(values, inputs.offsets, steps)
    counted = columns[:, -1:].bool() & ~targets.isnan()
    if not counted.any():
        return False
    # x[t + 1 - season] - x[t - season], and x[t + 1 - season]
    change = columns[:, :channels] + columns[:, channels : 2 * channels]
    before = values + columns[:, channels : 2 * channels]
    half = segments.shift(values, inputs.offsets, steps // 2)
    wrong = {
        "change": targets - values - change,
        "none": targets - values,
        "season": targets - before,
        "mean": targets,
        "half": targets - half,
    }
    errors = {name: float(error[counted].abs().mean()) for name, error in wrong.items()}
    changes = errors["change"] < _CLEARLY * errors["none"]
    return changes or errors["season"] < _CLEARLY * min(errors["mean"], errors["half"])


def scaled(fitted: Preprocessor, steps: int, training: Dataset) -> Preprocessor:
    """Return the preprocessor with a season, whose scale is the deviation of the differences."""
    with_season = replace(fitted, season=steps)
    rows = np.arange(min(len(training), _SEQUENCES))
    tensors = with_season.apply(training, False).take(rows)
    size = len(fitted.channels)
    columns = tensors.values[:, -2 * size - 1 :]
    differences = columns[columns[:, -1] > 0, :size].double()
    if len(differences) < 2 or fitted.std is None:
        return with_season
    spread = differences.std(0, correction=0).tolist()
    std = [scale * (share or 1.0) for scale, share in zip(fitted.std, spread, strict=True)]
    return replace(with_season, std=tuple(std))
