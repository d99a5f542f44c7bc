"""Gradients of a graph, as more nodes of the same graph.

Each rule is torch's derivative of the operation, including the choice of the operand that gets the
gradient of a tie.
"""

# ruff: noqa: ARG001, ARG005 (all rules have the same arguments)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from raglane.programs.graph import Columns, Graph, Node

# So many gradients, each of adjacent columns, are added one by one, and others in a reduction.
_FEW = 4
Give = Callable[[int, Columns], None]
_RECORDED = dict.fromkeys(
    ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "stop"), slice(0)
)
_RECORDED |= {"where": slice(1, None), "through": slice(1, None)}


def recorded_from(operation: str) -> slice:
    """Return the operands of an operation whose gradients torch records, even if they are zero."""
    return _RECORDED.get(operation, slice(None))


@dataclass(frozen=True, eq=False)
class ProductGradient:
    """A product whose gradient of the weight or operand is computed for all elements after the
    loop.
    """

    weight: int
    result: Columns  # the gradient of the result
    operand: Columns


@dataclass
class Reverse:
    """Computes the gradients of a graph's nodes, from the last to the first."""

    graph: Graph
    wanted: set[int]
    wanted_weights: set[int]
    elements: set[int]
    weight_gradients: list[ProductGradient] = field(default_factory=list)
    deferred: list[ProductGradient] = field(default_factory=list)
    _totals: dict[int, Columns] = field(default_factory=dict)

    def run(self, seeds: Iterable[tuple[Columns, Columns]]) -> None:
        """Add the nodes that compute the gradients, from the gradients of some columns."""
        graph = self.graph
        count = len(self.graph.nodes)
        self._zero = graph.number(0.0)
        needs = np.zeros(len(graph.nodes), bool)
        needs[list(self.wanted)] = True
        for index in range(count):
            node = graph.nodes[index]
            is_wanted = node.operation == "product" and node.weight in self.wanted_weights
            if is_wanted or any(needs[graph.places(part)].any() for part in node.operands):
                needs[index] = True
        self._needs = needs
        for columns, gradient in seeds:
            self._give(columns, gradient)
        for index in range(count - 1, -1, -1):
            if index in self._totals and graph.nodes[index].operands:
                self._back(graph.nodes[index], graph.columns(index), self._totals[index])

    def total(self, node: int) -> Columns:
        """Return the gradient of a node's columns, zeros if no result depends on them."""
        if node in self._totals:
            return self._totals[node]
        return self.graph.full(0.0, self.graph.nodes[node].width)

    # Sums of gradients.

    def _give(self, columns: Columns, gradient: Columns) -> None:
        """Add to the gradient of columns, some of which may occur several times."""
        graph = self.graph
        places = graph.places(columns)
        for index in sorted(set(places.tolist())):
            if index >= len(self._needs) or not self._needs[index]:
                continue
            here = np.flatnonzero((places == index) & (gradient != self._zero))
            if not len(here):
                continue
            local: Columns = columns[here] - graph.starts[index]
            given = gradient[here]
            share = np.full(graph.nodes[index].width, self._zero)
            if not (local[1:] > local[:-1]).all():
                unique, counts = np.unique(local, return_counts=True)
                if len(unique) < len(local):
                    given = self._summed(local, given, counts)
                    local = unique
            share[local] = given
            before = self._totals.get(index)
            self._totals[index] = share if before is None else self._sum(before, share)

    def _summed(self, local: Columns, given: Columns, counts: Columns) -> Columns:
        """Return the sums of gradients of the same column, in the order of the columns."""
        order = np.argsort(local, kind="stable")
        table: Columns = np.full((len(counts), counts.max()), self._zero)
        rows = np.repeat(np.arange(len(counts)), counts)
        table[rows, np.arange(len(local)) - np.repeat(np.cumsum(counts) - counts, counts)] = given[
            order
        ]
        if len(table.T) <= _FEW and (np.diff(table.T) == 1).all():
            return functools.reduce(self._sum, table.T)
        return self.graph.sums(table.reshape(-1), len(counts))

    def _sum(self, one: Columns, other: Columns) -> Columns:
        """Return the sum of two gradients, computed only where neither is zero."""
        both = np.flatnonzero((one != self._zero) & (other != self._zero))
        total: Columns = np.where(one == self._zero, other, one)
        if len(both):
            total[both] = self.graph.each("add", one[both], other[both])
        return total

    # One node.

    def _back(self, node: Node, columns: Columns, gradient: Columns) -> None:
        graph = self.graph
        if node.operation == "product":
            self._product(node, gradient)
        elif node.operation in ("row_sum", "row_max", "row_cumsum", "norm"):
            self._row(node, columns, gradient)
        elif node.operation in _RULES:
            # Only for columns with a gradient.
            here = np.flatnonzero(gradient != self._zero)
            operands = [part[here] for part in node.operands]
            wanted = [bool(self._needs[self._old(part)].any()) for part in operands]
            for place, found in _RULES[node.operation](
                graph, gradient[here], columns[here], operands, wanted
            ):
                self._give(operands[place], found)

    def _old(self, columns: Columns) -> Columns:
        places = self.graph.places(columns)
        return places[places < len(self._needs)]

    def _product(self, node: Node, gradient: Columns) -> None:
        graph = self.graph
        start, operand = node.operands
        self._give(start, gradient)
        parts = [
            ProductGradient(node.weight, *part)
            for part in zip(
                np.split(gradient, node.segments), np.split(operand, node.segments), strict=True
            )
        ]
        if node.weight in self.wanted_weights:
            self.weight_gradients += parts
        places = graph.places(operand)
        if not self._needs[places].any():
            return
        is_in_one = len(set(places.tolist())) == 1 and bool((np.diff(operand) == 1).all())
        if is_in_one and int(places[0]) in self.elements:
            self.deferred += parts
            return
        zero = np.full(len(operand), self._zero)
        self._give(
            operand,
            graph.product(zero, gradient, node.weight, node.segments, not node.is_transposed),
        )

    def _row(self, node: Node, columns: Columns, gradient: Columns) -> None:
        graph = self.graph
        (a,) = node.operands
        each = len(a) // node.segments
        if node.operation == "row_sum":
            self._give(a, np.repeat(gradient, each))
        elif node.operation == "row_cumsum":
            turned = np.arange(len(a)).reshape(node.segments, each)[:, ::-1].reshape(-1)
            self._give(a, graph.cumsum(gradient[turned], node.segments)[turned])
        elif node.operation == "row_max":
            is_top = graph.each("eq", a, np.repeat(columns, each))
            share = graph.each("div", gradient, graph.sums(is_top, node.segments))
            self._give(a, graph.each("mul", is_top, np.repeat(share, each)))
        else:
            found = columns[: len(a)]
            scale = columns[len(a) :]
            operands = (gradient[: len(a)], found, scale)
            self._give(a, graph.add(Node("norm_backward", operands, len(a), node.segments)))


# Pointwise operations: functions of the graph, the gradient, the results, the operands, and flags
# of the operands that need gradients. They return pairs of an operand's place and its gradient.

_Pairs = list[tuple[int, Columns]]
_Rule = Callable[[Graph, Columns, Columns, list[Columns], list[bool]], _Pairs]


def _one(formula: Callable[[Graph, Columns, Columns, Columns], Columns]) -> _Rule:
    """Return the rule of an operation with one operand, from a function of graph, gradient, result
    and operand.
    """
    return lambda g, d, y, operands, wanted: [(0, formula(g, d, y, operands[0]))]


def _div(g: Graph, d: Columns, y: Columns, operands: list[Columns], wanted: list[bool]) -> _Pairs:
    share = g.each("div", d, operands[1])
    return [(0, share), *([(1, g.each("neg", g.each("mul", share, y)))] if wanted[1] else [])]


def _larger(wins: str) -> _Rule:
    def rule(
        g: Graph, d: Columns, y: Columns, operands: list[Columns], wanted: list[bool]
    ) -> _Pairs:
        half = g.each("mul", d, g.each("mul", g.each("eq", *operands), 0.5))
        return [
            (place, g.each("where", g.each(wins, operands[place], operands[1 - place]), d, half))
            for place in (0, 1)
            if wanted[place]
        ]

    return rule


def _held(wins: str) -> _Rule:
    return lambda g, d, y, operands, wanted: [(0, g.each("where", g.each(wins, *operands), d, 0.0))]


def _where(g: Graph, d: Columns, y: Columns, operands: list[Columns], wanted: list[bool]) -> _Pairs:
    branches: tuple[tuple[Columns | float, Columns | float], ...] = (d, 0.0), (0.0, d)
    return [(i, g.each("where", operands[0], *branches[i - 1])) for i in (1, 2) if wanted[i]]


def _pow(g: Graph, d: Columns, y: Columns, operands: list[Columns], wanted: list[bool]) -> _Pairs:
    base, exponent = operands
    pairs = []
    if wanted[0]:
        slope = g.each("mul", exponent, g.each("pow", base, g.each("sub", exponent, 1.0)))
        pairs.append(
            (0, g.each("where", g.each("eq", exponent, 0.0), 0.0, g.each("mul", d, slope)))
        )
    if wanted[1]:
        is_flat = g.each("and", g.each("eq", base, 0.0), g.each("ge", exponent, 0.0))
        pairs.append(
            (
                1,
                g.each(
                    "where", is_flat, 0.0, g.each("mul", d, g.each("mul", y, g.each("log", base)))
                ),
            )
        )
    return pairs


def _erf(g: Graph, d: Columns, y: Columns, a: Columns) -> Columns:
    bell = g.each("exp", g.each("neg", g.each("mul", a, a)))
    return g.each("mul", d, g.each("mul", bell, 2 / math.sqrt(math.pi)))


_RULES: dict[str, _Rule] = {
    "copy": _one(lambda g, d, y, a: d),
    "through": lambda g, d, y, operands, wanted: [(1, d)],
    "neg": _one(lambda g, d, y, a: g.each("neg", d)),
    "abs": _one(lambda g, d, y, a: g.each("mul", d, g.each("sign", a))),
    "relu": _one(lambda g, d, y, a: g.each("where", g.each("gt", y, 0.0), d, 0.0)),
    "exp": _one(lambda g, d, y, a: g.each("mul", d, y)),
    "expm1": _one(lambda g, d, y, a: g.each("mul", d, g.each("add", y, 1.0))),
    "log": _one(lambda g, d, y, a: g.each("div", d, a)),
    "log1p": _one(lambda g, d, y, a: g.each("div", d, g.each("add", a, 1.0))),
    "sqrt": _one(lambda g, d, y, a: g.each("div", d, g.each("mul", y, 2.0))),
    "rsqrt": _one(
        lambda g, d, y, a: g.each(
            "mul", g.each("mul", d, -0.5), g.each("mul", y, g.each("mul", y, y))
        )
    ),
    "reciprocal": _one(lambda g, d, y, a: g.each("neg", g.each("mul", d, g.each("mul", y, y)))),
    "sigmoid": _one(lambda g, d, y, a: g.each("sigmoid_backward", d, y)),
    "tanh": _one(lambda g, d, y, a: g.each("tanh_backward", d, y)),
    "erf": _one(_erf),
    "sin": _one(lambda g, d, y, a: g.each("mul", d, g.each("cos", a))),
    "cos": _one(lambda g, d, y, a: g.each("neg", g.each("mul", d, g.each("sin", a)))),
    "add": lambda g, d, y, operands, wanted: [(0, d), (1, d)],
    "sub": lambda g, d, y, operands, wanted: [
        (0, d),
        *([(1, g.each("neg", d))] if wanted[1] else []),
    ],
    "mul": lambda g, d, y, operands, wanted: [
        (i, g.each("mul", d, operands[1 - i])) for i in (0, 1) if wanted[i]
    ],
    "div": _div,
    "pow": _pow,
    "max": _larger("gt"),
    "min": _larger("lt"),
    "at_least": _held("ge"),
    "at_most": _held("le"),
    "where": _where,
}
"""The rules of operations with a derivative; the gradients of others are zero."""

FROM_RESULT = frozenset(("relu", "exp", "expm1", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh"))
"""The operations whose rules read the result, not the operand."""
