"""Three measures of how well an epoch order shuffles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Integers = npt.NDArray[np.int64]


class Shuffling(NamedTuple):
    """Measures of two epochs: about (1, 0, 1) for a random order, (0, ..., 0) for the order of the
    data.
    """

    company: float
    trend: float
    travel: float


def shuffling(
    lengths: _Integers, first: tuple[_Integers, _Integers], second: tuple[_Integers, _Integers]
) -> Shuffling:
    """Measure two epochs."""
    rows, bounds = first
    count, sizes = len(rows), np.diff(bounds)
    owners = [np.empty(len(lengths), np.int64) for _ in range(2)]
    for owner, (held, edges) in zip(owners, (first, second), strict=True):
        owner[held] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    again = np.unique(owners[0][rows] * len(second[1]) + owners[1][rows], return_counts=True)[1]
    found = _pairs(again) / max(_pairs(sizes), 1.0)
    chance = _pairs(np.diff(second[1])) / max(count * (count - 1) / 2, 1.0)
    means = np.add.reduceat(lengths[rows], bounds[:-1]) / sizes
    varied = len(means) > 2 and means[1:].std() > 0 and means[:-1].std() > 0
    trend = float(np.corrcoef(means[:-1], means[1:])[0, 1]) if varied else 0.0
    travel = float(np.abs(rows - np.arange(count)).mean() / (count / 3))
    return Shuffling(chance / found if found else 1.0, round(trend, 12), travel)


def _pairs(sizes: _Integers) -> float:
    """Return the number of pairs within groups of some sizes."""
    return float((sizes * (sizes - 1) // 2).sum())
