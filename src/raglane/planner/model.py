"""A small model of time: what a call takes, from how many rows run at each step.

A step of a schedule costs something whatever it computes, and something per row; the more rows, the less each costs.
So the time of a call is a sum of features of its batch, each with a coefficient of at least 0 that depends on the
layer and the machine::

    1,  S,  sum_t min(rows_t, k) for k = 4, 16, 64,  sum_t rows_t,  B,  what lies beyond the caches

where ``rows_t`` is the number of rows at step ``t`` and ``S`` the number of steps. Sums of ``min(rows, k)`` make the
cost of a step a concave function of its rows, linear between the ``k``.

NOTE (packs of torch): torch runs a pack of equal lengths as a padded tensor, and any other step by step, so these have
coefficients of their own. Its backward pass also fills a tensor of the whole batch at every step: ``S * N``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raglane.kernels.cpu.lanes import lanes_of
from raglane.planner.ways import Way
from raglane.schedules import SCHEDULES

__all__ = ["Floats", "Integers", "features", "fit", "rows_of"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_KNOTS = (4, 16, 64)
# Elements whose states and gates the caches hold, about.
_CACHED = 4096
# Measurements that are further off than this count less: something else ran meanwhile.
_TRUSTED = 0.1


def rows_of(way: Way, lengths: Tensor) -> Integers:
    """How many rows run at each step, ``(S,)``.

    Args:
        way: of the call.
        lengths: ``(B,)`` int64 on the CPU.
    """
    lanes = lanes_of(lengths, way.threads) if way.backend == "cpu" else None
    rows: Integers = SCHEDULES[way.schedule].rows_per_step(lengths, lanes).numpy()
    return rows


def features(way: Way, rows: Integers, count: int) -> Floats:
    """The features of one call.

    Args:
        way: of the call.
        rows: ``(S,)``, what :func:`rows_of` gives.
        count: sequences of the batch.

    Returns:
        ``(F,)``; for one backend and schedule always as many.
    """
    steps, computed = rows.shape[0], int(rows.sum())
    capped = [int(np.minimum(rows, knot).sum()) for knot in _KNOTS]
    found = np.array([1, steps, *capped, computed, count, max(0, computed - _CACHED)], np.float64)
    if (way.backend, way.schedule) != ("torch", "packed"):
        return found
    none = np.zeros_like(found)
    uneven = steps > 0 and rows[-1] != rows[0]
    return np.concatenate((none, found, [steps * computed]) if uneven else (found, none, [0.0]))


def fit(measured: Floats, seconds: Floats) -> Floats:
    """Coefficients of at least 0 whose predictions miss the measurements by the smallest shares.

    Args:
        measured: ``(M, F)``, the features of each call.
        seconds: ``(M,)``, above 0.

    Returns:
        ``(F,)``. Minimises the sum of Huber's function (1964) of ``prediction / seconds - 1``, so that a call that was
        disturbed decides little.
    """
    scaled = measured / seconds[:, None]
    weights = np.ones(len(seconds))
    found = _least_squares(scaled, weights)
    for _ in range(5):
        missed = np.abs(scaled @ found - 1)
        weights = _TRUSTED / np.maximum(missed, _TRUSTED)
        found = _least_squares(scaled, weights)
    return found


def _least_squares(scaled: Floats, weights: Floats) -> Floats:
    """The non-negative least squares of ``scaled @ x = 1``, one coefficient after the other.

    The sum is convex, so that going through the coefficients (coordinate descent) ends at its minimum. A millionth of
    their squares is added: where features cannot be told apart, they share.
    """
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1
    unit = scaled / size
    gram = unit.T @ (weights[:, None] * unit) + 1e-6 * np.eye(unit.shape[1])
    aim = unit.T @ weights
    found = np.zeros(len(size))
    for _ in range(3000):
        for place in range(len(found)):
            found[place] = max(0.0, found[place] + (aim[place] - gram[place] @ found) / max(gram[place, place], 1e-6))
    result: Floats = found / size
    return result
