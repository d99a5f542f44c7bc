"""Columns of a graph as expressions, so that formulas and gradients are written as in
mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from raglane.programs.graph import Columns, Graph


@dataclass(frozen=True, eq=False)
class Expression:
    """Columns of a graph; arithmetic with them and with numbers adds nodes to it."""

    graph: Graph
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, index: Columns | slice) -> Expression:
        return Expression(self.graph, self.columns[index])

    def __add__(self, other: Operand) -> Expression:
        return each("add", self, other)

    def __sub__(self, other: Operand) -> Expression:
        return each("sub", self, other)

    def __rsub__(self, other: float) -> Expression:
        return each("sub", other, self)

    def __mul__(self, other: Operand) -> Expression:
        if not isinstance(other, Expression) and other == 1:
            return self
        return each("mul", self, other)

    def __truediv__(self, other: Operand) -> Expression:
        return each("div", self, other)

    def __rtruediv__(self, other: float) -> Expression:
        return each("div", other, self)

    def __neg__(self) -> Expression:
        return each("neg", self)

    def __abs__(self) -> Expression:
        return each("abs", self)

    def __lt__(self, other: Operand) -> Expression:
        return each("lt", self, other)

    def __le__(self, other: Operand) -> Expression:
        return each("le", self, other)

    def __gt__(self, other: Operand) -> Expression:
        return each("gt", self, other)

    def __ge__(self, other: Operand) -> Expression:
        return each("ge", self, other)

    def __and__(self, other: Operand) -> Expression:
        return each("and", self, other)

    def __or__(self, other: Operand) -> Expression:
        return each("or", self, other)

    def equals(self, other: Operand) -> Expression:
        """Return 1 where the operands are equal, else 0."""
        return each("eq", self, other)

    def differs(self, other: Operand) -> Expression:
        """Return 0 where the operands are equal, else 1."""
        return each("ne", self, other)

    def filled(self, operand: Operand) -> Expression:
        """Return an operand, of which a number is repeated to the width of this expression."""
        if isinstance(operand, Expression):
            return operand
        return Expression(self.graph, self.graph.full(operand, len(self)))

    def spread(self, width: int) -> Expression:
        """Repeat each column, so that there are ``width``."""
        return Expression(self.graph, np.repeat(self.columns, width // len(self)))

    def sums(self, segments: int) -> Expression:
        """Return the sum of each segment."""
        return Expression(self.graph, self.graph.sums(self.columns, segments))

    def cumsum(self, segments: int) -> Expression:
        """Return the cumulative sums of each segment."""
        return Expression(self.graph, self.graph.cumsum(self.columns, segments))


Operand = Expression | float


def each(operation: str, *operands: Operand) -> Expression:
    """Return a pointwise operation; one of the operands at least is an expression."""
    graph = next(operand.graph for operand in operands if isinstance(operand, Expression))
    columns = [
        operand.columns if isinstance(operand, Expression) else operand for operand in operands
    ]
    return Expression(graph, graph.each(operation, *columns))


def function(operation: str) -> Callable[..., Expression]:
    """Return a pointwise operation as a function of its operands."""
    return partial(each, operation)


cos = function("cos")
exp = function("exp")
expm1 = function("expm1")
floor = function("floor")
log = function("log")
log1p = function("log1p")
sigmoid = function("sigmoid")
sign = function("sign")
sin = function("sin")
stop = function("stop")
tanh = function("tanh")
where = function("where")
