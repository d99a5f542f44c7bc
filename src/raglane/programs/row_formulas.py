"""Formulas for the parts of rows: of a graph, the columns of all parts and their number, what each part gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from raglane.programs.graph import Columns, Graph, Refused

__all__ = [
    "cumulated",
    "first_of",
    "largest",
    "log_softmax",
    "log_sum",
    "mean",
    "product",
    "root",
    "smallest",
    "softmax",
    "total",
    "variance",
]


def total(g: Graph, a: Columns, parts: int) -> Columns:
    """The sum of each part."""
    return g.sums(a, parts)


def mean(g: Graph, a: Columns, parts: int) -> Columns:
    """The mean of each part."""
    return g.each("mul", g.sums(a, parts), parts / len(a))


def largest(g: Graph, a: Columns, parts: int) -> Columns:
    """The largest column of each part."""
    return g.reduce("row_max", a, parts) if len(a) > parts else a


def smallest(g: Graph, a: Columns, parts: int) -> Columns:
    """The smallest column of each part."""
    return g.each("neg", largest(g, g.each("neg", a), parts))


def product(g: Graph, a: Columns, parts: int) -> Columns:
    """The product of each part: halves are multiplied until one column is left."""
    table = np.asarray(a).reshape(parts, -1)
    while table.shape[1] > 1:
        half = table.shape[1] // 2
        pairs = g.each("mul", table[:, :half].reshape(-1), table[:, half : 2 * half].reshape(-1)).reshape(parts, half)
        table = np.concatenate([pairs, table[:, 2 * half :]], 1)
    return table[:, 0]


def _spread(columns: Columns, width: int) -> Columns:
    return np.repeat(columns, width // len(columns))


def softmax(g: Graph, a: Columns, parts: int) -> Columns:
    """The softmax of each part."""
    e = g.each("exp", g.each("sub", a, _spread(largest(g, a, parts), len(a))))
    return g.each("div", e, _spread(g.sums(e, parts), len(a)))


def cumulated(g: Graph, a: Columns, parts: int) -> Columns:
    """The sums of each part up to each of its columns."""
    return g.cumsum(a, parts)


def log_sum(g: Graph, a: Columns, parts: int) -> Columns:
    """The logarithm of the sum of the exponentials of each part."""
    top = largest(g, a, parts)
    # Nothing is subtracted from infinities: what is left of one would be no number.
    top = g.each("where", g.each("eq", g.each("abs", top), math.inf), 0.0, top)
    e = g.each("exp", g.each("sub", a, _spread(top, len(a))))
    return g.each("add", g.each("log", g.sums(e, parts)), top)


def log_softmax(g: Graph, a: Columns, parts: int) -> Columns:
    """The logarithm of the softmax of each part."""
    # Not less the logarithm of the sum of all, which in large numbers would lose digits.
    below = g.each("sub", a, _spread(largest(g, a, parts), len(a)))
    return g.each("sub", below, _spread(g.each("log", g.sums(g.each("exp", below), parts)), len(a)))


def first_of(formula: Callable[[Graph, Columns, int], Columns]) -> Callable[[Graph, Columns, int], Columns]:
    """The largest or smallest column, whose gradient goes to the first one that is it, and not to all."""

    def first(g: Graph, a: Columns, parts: int) -> Columns:
        if len(a) == parts:
            return a
        top = g.each("stop", formula(g, a, parts))
        is_top = g.each("eq", a, _spread(top, len(a)))
        is_first = g.each("and", is_top, g.each("eq", g.cumsum(is_top, parts), 1.0))
        chosen = g.sums(g.each("where", is_first, a, 0.0), parts)
        return g.each("where", g.each("eq", top, top), chosen, top)  # of a NaN nothing is chosen

    return first


def root(g: Graph, a: Columns) -> Columns:
    """The root of a sum of squares: where that is 0, as at an initial state of zeros, torch has a gradient of 0."""
    is_zero = g.each("eq", a, 0.0)
    return g.each("where", is_zero, 0.0, g.each("sqrt", g.each("where", is_zero, 1.0, a)))


def variance(correction: float) -> Callable[[Graph, Columns, int], Columns]:
    """The variance of each part: the sum of squares over the number of its columns less ``correction``."""

    def formula(g: Graph, a: Columns, parts: int) -> Columns:
        centred = g.each("sub", a, _spread(mean(g, a, parts), len(a)))
        left = len(a) / parts - correction
        if left <= 0:
            raise Refused("it takes the variance of one number")
        return g.each("mul", g.sums(g.each("mul", centred, centred), parts), 1 / left)

    return formula
