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

from raglane.programs.expressions import Expression, Operand, cos, each, exp, log, sign, sin, where
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
    nodes: set[int]  # whose gradients are computed
    weights: set[int]  # of those products, whose gradients are computed
    elements: set[int]
    weight_gradients: list[ProductGradient] = field(default_factory=list)
    deferred: list[ProductGradient] = field(default_factory=list)
    _totals: dict[int, Columns] = field(default_factory=dict)

    def run(self, seeds: Iterable[tuple[Columns, Columns]]) -> None:
        """Add the nodes that compute the gradients, from the gradients of some columns."""
        graph = self.graph
        count = len(graph.nodes)
        self._zero = graph.number(0.0)
        needs = np.zeros(len(graph.nodes), bool)
        needs[list(self.nodes)] = True
        for index in range(count):
            node = graph.nodes[index]
            needs_weight = node.operation == "product" and node.weight in self.weights
            if needs_weight or any(
                needs[graph.nodes_of(columns)].any() for columns in node.operands
            ):
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
        nodes = graph.nodes_of(columns)
        for index in sorted(set(nodes.tolist())):
            if index >= len(self._needs) or not self._needs[index]:
                continue
            here = np.flatnonzero((nodes == index) & (gradient != self._zero))
            if not len(here):
                continue
            local: Columns = columns[here] - graph.starts[index]
            terms = gradient[here]
            share = np.full(graph.nodes[index].width, self._zero)
            if not (local[1:] > local[:-1]).all():
                unique, counts = np.unique(local, return_counts=True)
                if len(unique) < len(local):
                    terms = self._summed(local, terms, counts)
                    local = unique
            share[local] = terms
            before = self._totals.get(index)
            self._totals[index] = share if before is None else self._sum(before, share)

    def _summed(self, local: Columns, terms: Columns, counts: Columns) -> Columns:
        """Return the sums of gradients of the same column, in the order of the columns."""
        order = np.argsort(local, kind="stable")
        table: Columns = np.full((len(counts), counts.max()), self._zero)
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        table[rows, np.arange(len(local)) - first[rows]] = terms[order]
        if len(table.T) <= _FEW and (np.diff(table.T) == 1).all():
            return functools.reduce(self._sum, table.T)
        return self.graph.sums(table.reshape(-1), len(counts))

    def _sum(self, first: Columns, second: Columns) -> Columns:
        """Return the sum of two gradients, computed only where neither is zero."""
        both = np.flatnonzero((first != self._zero) & (second != self._zero))
        total: Columns = np.where(first == self._zero, second, first)
        if len(both):
            total[both] = self.graph.each("add", first[both], second[both])
        return total

    # One node.

    def _back(self, node: Node, columns: Columns, gradient: Columns) -> None:
        if node.operation == "product":
            self._product(node, gradient)
        elif node.operation in ("row_sum", "row_max", "row_cumsum", "norm"):
            self._row(node, columns, gradient)
        elif node.operation in _RULES:
            # Only for columns with a gradient.
            here = np.flatnonzero(gradient != self._zero)
            operands = [Expression(self.graph, operand[here]) for operand in node.operands]
            needs = [bool(self._needs[self._old(operand.columns)].any()) for operand in operands]
            d = Expression(self.graph, gradient[here])
            y = Expression(self.graph, columns[here])
            for index, share in _RULES[node.operation](d, y, operands, needs):
                self._give(operands[index].columns, share.columns)

    def _old(self, columns: Columns) -> Columns:
        """Return the nodes of columns that the graph had before its gradients."""
        nodes = self.graph.nodes_of(columns)
        return nodes[nodes < len(self._needs)]

    def _product(self, node: Node, gradient: Columns) -> None:
        graph = self.graph
        start, operand = node.operands
        self._give(start, gradient)
        results = np.split(gradient, node.segments)
        segments = [
            ProductGradient(node.weight, *pair)
            for pair in zip(results, np.split(operand, node.segments), strict=True)
        ]
        if node.weight in self.weights:
            self.weight_gradients += segments
        nodes = graph.nodes_of(operand)
        if not self._needs[nodes].any():
            return
        is_adjacent = len(set(nodes.tolist())) == 1 and bool((np.diff(operand) == 1).all())
        if is_adjacent and int(nodes[0]) in self.elements:
            self.deferred += segments
            return
        zero = np.full(len(operand), self._zero)
        turned = not node.is_transposed
        self._give(operand, graph.product(zero, gradient, node.weight, node.segments, turned))

    def _row(self, node: Node, columns: Columns, gradient: Columns) -> None:
        graph = self.graph
        (a,) = node.operands
        width = len(a) // node.segments
        if node.operation == "row_sum":
            self._give(a, np.repeat(gradient, width))
        elif node.operation == "row_cumsum":
            turned = np.arange(len(a)).reshape(node.segments, width)[:, ::-1].reshape(-1)
            self._give(a, graph.cumsum(gradient[turned], node.segments)[turned])
        elif node.operation == "row_max":
            d = Expression(graph, gradient)
            top = Expression(graph, columns).spread(len(a))
            is_top = Expression(graph, a).equals(top)
            share = d / is_top.sums(node.segments)
            self._give(a, (is_top * share.spread(len(a))).columns)
        else:
            normal = columns[: len(a)]
            scale = columns[len(a) :]
            operands = (gradient[: len(a)], normal, scale)
            self._give(a, graph.add(Node("norm_backward", operands, len(a), node.segments)))


# Rules of pointwise operations: functions of the gradient, the result, the operands, and flags of
# the operands that need gradients. They return pairs of an operand's index and its gradient.

_Pairs = list[tuple[int, Expression]]
_Rule = Callable[[Expression, Expression, list[Expression], list[bool]], _Pairs]


def _unary(formula: Callable[[Expression, Expression, Expression], Expression]) -> _Rule:
    """Return the rule of an operation with one operand, from a function of gradient, result and
    operand.
    """
    return lambda d, y, operands, needs: [(0, formula(d, y, operands[0]))]


def _sub(d: Expression, y: Expression, operands: list[Expression], needs: list[bool]) -> _Pairs:
    return [(0, d), (1, -d)] if needs[1] else [(0, d)]


def _mul(d: Expression, y: Expression, operands: list[Expression], needs: list[bool]) -> _Pairs:
    return [(index, d * operands[1 - index]) for index in (0, 1) if needs[index]]


def _div(d: Expression, y: Expression, operands: list[Expression], needs: list[bool]) -> _Pairs:
    share = d / operands[1]
    return [(0, share), (1, -(share * y))] if needs[1] else [(0, share)]


def _extreme(wins: str) -> _Rule:
    def rule(d: Expression, y: Expression, operands: list[Expression], needs: list[bool]) -> _Pairs:
        half = d * (operands[0].equals(operands[1]) * 0.5)
        return [
            (index, where(each(wins, operands[index], operands[1 - index]), d, half))
            for index in (0, 1)
            if needs[index]
        ]

    return rule


def _clamped(wins: str) -> _Rule:
    return lambda d, y, operands, needs: [(0, where(each(wins, *operands), d, 0.0))]


def _where(d: Expression, y: Expression, operands: list[Expression], needs: list[bool]) -> _Pairs:
    branches: tuple[tuple[Operand, Operand], ...] = (d, 0.0), (0.0, d)
    return [(index, where(operands[0], *branches[index - 1])) for index in (1, 2) if needs[index]]


def _pow(d: Expression, y: Expression, operands: list[Expression], needs: list[bool]) -> _Pairs:
    base, exponent = operands
    pairs = []
    if needs[0]:
        slope = exponent * each("pow", base, exponent - 1.0)
        pairs.append((0, where(exponent.equals(0.0), 0.0, d * slope)))
    if needs[1]:
        is_flat = base.equals(0.0) & (exponent >= 0.0)
        pairs.append((1, where(is_flat, 0.0, d * (y * log(base)))))
    return pairs


_RULES: dict[str, _Rule] = {
    "copy": _unary(lambda d, y, a: d),
    "through": lambda d, y, operands, needs: [(1, d)],
    "neg": _unary(lambda d, y, a: -d),
    "abs": _unary(lambda d, y, a: d * sign(a)),
    "relu": _unary(lambda d, y, a: where(y > 0.0, d, 0.0)),
    "exp": _unary(lambda d, y, a: d * y),
    "expm1": _unary(lambda d, y, a: d * (y + 1.0)),
    "log": _unary(lambda d, y, a: d / a),
    "log1p": _unary(lambda d, y, a: d / (a + 1.0)),
    "sqrt": _unary(lambda d, y, a: d / (y * 2.0)),
    "rsqrt": _unary(lambda d, y, a: (d * -0.5) * (y * (y * y))),
    "reciprocal": _unary(lambda d, y, a: -(d * (y * y))),
    "sigmoid": _unary(lambda d, y, a: each("sigmoid_backward", d, y)),
    "tanh": _unary(lambda d, y, a: each("tanh_backward", d, y)),
    "erf": _unary(lambda d, y, a: d * (exp(-(a * a)) * (2 / math.sqrt(math.pi)))),
    "sin": _unary(lambda d, y, a: d * cos(a)),
    "cos": _unary(lambda d, y, a: -(d * sin(a))),
    "add": lambda d, y, operands, needs: [(0, d), (1, d)],
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "max": _extreme("gt"),
    "min": _extreme("lt"),
    "at_least": _clamped("ge"),
    "at_most": _clamped("le"),
    "where": _where,
}
"""The rules of operations with a derivative; the gradients of others are zero."""

FROM_RESULT = frozenset(("relu", "exp", "expm1", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh"))
"""The operations whose rules read the result, not the operand."""
