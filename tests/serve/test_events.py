"""Starts and ends of events, against a search in the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.serve import Events


def _whole(values: Any, start: float, end: float, least: int, pause: int) -> list[tuple[str, int]]:
    """Return the events of a sequence, by its runs of frames."""
    answer: list[tuple[str, int]] = []
    at = 0
    while at < len(values):
        if not values[at] >= start:
            at += 1
            continue
        stop = at
        while stop < len(values) and any(values[stop : stop + pause] >= end):
            stop += 1
        loud = [place for place in range(at, stop) if values[place] >= end]
        if loud[-1] + 1 - at >= least:
            answer += [("start", at), ("end", loud[-1] + 1)]
        at = loud[-1] + 1 + pause
    return answer


@pytest.mark.parametrize("seed", range(40))
def test_events_of_random_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    end, start = np.sort(rng.random(2)).tolist()
    least, pause = (int(number) for number in rng.integers(1, 6, 2))
    values = rng.random(int(rng.integers(0, 80)))
    values[rng.random(len(values)) < 0.05] = np.nan
    events = Events(start, end, min_length=least, pause=pause)
    for _ in range(2):  # close begins a new sequence
        cuts = np.sort(rng.integers(0, len(values) + 1, 10))
        answer = [event for part in np.split(values, cuts) for event in events.push(part)]
        answer += events.close()
        assert answer == _whole(values, start, end, least, pause)


def test_mistakes() -> None:
    for options in ({"threshold": 2}, {"end_threshold": -1}, {"threshold": 0.2}, {"min_length": 0}):
        with pytest.raises(ArgumentError):
            Events(**options)
    with pytest.raises(ArgumentTypeError, match="probabilities must be one number per frame"):
        rl.serve.Events().push("abc")
