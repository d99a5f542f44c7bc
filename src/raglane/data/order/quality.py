"""How well an order shuffles, in three numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Shuffling", "shuffling"]

_Integers = npt.NDArray[np.int64]


class Shuffling(NamedTuple):
    """How well two epochs are shuffled. A random order has about (1, 0, 1), the order of the data (0, ..., 0).

    Attributes:
        company: of pairs of sequences that share a batch in the first epoch, how many do again in the second: the share
            that chance gives over the share that was found. It is about the part of the data that a sequence meets.
        trend: the correlation of the mean length of a batch with that of the next, so that a step says nothing of the
            step after it where this is 0.
        travel: how far a sequence of the first epoch is from its place in the data, over what chance gives.
    """

    company: float
    trend: float
    travel: float


def shuffling(lengths: _Integers, first: tuple[_Integers, _Integers], second: tuple[_Integers, _Integers]) -> Shuffling:
    """Measure two epochs.

    Example:
        >>> rows, bounds = np.arange(1000), np.arange(0, 1001, 10)
        >>> shuffling(rows, (rows, bounds), (rows, bounds))
        Shuffling(company=0.009009009009009009, trend=1.0, travel=0.0)
    """
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
    """How many pairs there are within groups of some sizes."""
    return float((sizes * (sizes - 1) // 2).sum())
