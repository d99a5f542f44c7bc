"""Pictures of forecasts with the truth that was held out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from raglane._utils.messages import count_of, shorten
from raglane.data.dataset import Dataset
from raglane.data.holdout import elements_held_out
from raglane.report.figures import Forecasted, forecast_svg
from raglane.report.page import Block, picture
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import FURTHEST, predict

# The most sequences that are drawn.
_MOST = 3
# The drawn elements before a forecast, as a multiple of its steps.
_BEFORE = 3
_LONGEST_NAME = 40


def forecast_pictures(saved: SavedModel, records: Dataset, device: Any, on: str) -> list[Block]:
    """Return pictures of forecasts of the last elements of the first sequences.

    The steps are those that were held out, at most 48, or else a tenth of the longest sequence.
    """
    encoders = saved.preprocessor.features
    if saved.task != "forecast" or saved.model.is_binary or not records.is_in_memory:
        return []
    counts = np.asarray(records.element_counts, dtype=np.int64)
    horizon = min(elements_held_out(records) or int(counts.max(initial=0)) // 10, FURTHEST)
    rows = np.flatnonzero(counts > horizon + 1)[:_MOST]
    has_unknown = any(not encoder.per_sequence for encoder in encoders)
    if horizon < 2 or has_unknown or len(rows) == 0:
        return []
    whole = records.records.select(rows)
    heads = Dataset(whole.select(range(len(rows)), counts[rows] - horizon), records.columns)
    predictions = predict(saved, heads, horizon=horizon, device=device)
    name = saved.preprocessor.channels[0]
    numbers = whole.values[:, whole.channels.index(name)].astype(np.float64)
    shares = saved.model.config.quantiles
    blocks: list[Block] = []
    for row, (start, end) in enumerate(pairwise(whole.offsets.tolist())):
        ahead = {
            key: [step[0] for step in column[row]]
            for key, column in predictions.columns.items()
            if key != "id"
        }
        drawn = Forecasted(
            numbers[max(end - (1 + _BEFORE) * horizon, start) : end].tolist(),
            ahead["prediction"],
            label=shorten(name, _LONGEST_NAME),
        )
        if len(shares) > 1:
            ends = (shares[0], shares[-1])
            low, high = (ahead[f"q{share:g}"] for share in ends)
            drawn = replace(drawn, low=low, high=high, shares=ends)
        words = f"Forecast of the last {count_of(horizon, 'element')} of {_name(whole, row)}."
        blocks.append(picture(forecast_svg(drawn), f"f{row}", words, _caption(whole, row, on)))
    return blocks


def _caption(records: Any, row: int, on: str) -> str:
    """Return the name of one of several series, and with the first the part with its truth."""
    name = _name(records, row) if len(records) > 1 else ""
    read = f"On the {on} part, from the elements before; the line is the truth."
    return ". ".join(filter(None, [name, "" if row else read]))


def _name(records: Any, row: int) -> str:
    if records.ids is None or len(records) == 1:
        return "the series" if len(records) == 1 else f"sequence {row}"
    return shorten(str(records.ids[row]), _LONGEST_NAME)
