"""A step as a graph of whole rows: what tracing finds, gradients are taken of and programs are made from.

A node is one operation. Its results are columns, and all columns of a graph are numbered through: an operand is an
array of these numbers, in any order and with repetitions. So whatever moves columns (a view, a slice, a concatenation,
a repetition) needs no node of its own. It is an array that is indexed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Columns = Any  # (w,) int64 of NumPy: numbers of columns
SOURCES = ("element", "state", "vector")
"""Operations of nodes that are given rather than computed; a state that no step changes becomes a sequence's input."""

DEPENDS = "so its results depend on the schedule"
"""In a reason: plain torch runs the step, but another schedule or batch may give a sequence other numbers."""


class Refused(Exception):  # noqa: N818 (an answer, and no error of anybody's)
    """A cell cannot become a program."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unkept(Refused):
    """What was traced has no key or no form in which the disk could hold it, or a text there is not what was traced."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on rows: one of :data:`raglane.programs.program.OPERATIONS` or :data:`SOURCES`, or one of these.

    ``number``; ``at_least`` and ``at_most``, ``max`` and ``min`` whose gradient goes to the first operand where both
    are equal, as torch's ``clamp`` has it; ``stop``, which no gradient passes; and ``through``, the first operand,
    whose gradient goes to the second unchanged.
    """

    operation: str
    operands: tuple[Columns, ...]
    width: int  # columns of its results together
    segments: int = 1
    epsilon: float = 0.0
    weight: int = -1  # of a product: which of the graph's weights
    is_transposed: bool = False  # whether it reads the weight the other way round
    number: float = 0.0

    @property
    def span(self) -> int:
        """``w``, the width of the instruction: that of the operand where the operation reduces."""
        if self.operation in ("row_sum", "row_max"):
            return len(self.operands[0])
        return self.width - self.segments if self.operation == "norm" else self.width


@dataclass
class Graph:
    """Nodes in an order in which they can be computed, and the columns that they give."""

    nodes: list[Node] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # the number of the first column of each node
    weights: list[tuple[int, int, int]] = field(default_factory=list)  # (groups, rows, depth) of each
    _numbers: dict[float | str, int] = field(default_factory=dict)

    def copy(self) -> Graph:
        """A graph that can grow without this one."""
        return Graph(list(self.nodes), list(self.starts), list(self.weights), dict(self._numbers))

    def add(self, node: Node) -> Columns:
        """Append a node, and give its columns."""
        start = self.starts[-1] + self.nodes[-1].width if self.nodes else 0
        self.nodes.append(node)
        self.starts.append(start)
        return np.arange(start, start + node.width)

    def number(self, value: float) -> int:
        """The column that holds a number."""
        value = float(value)
        key = value if value == value and value != 0 else repr(value)  # -0.0 is equal to 0.0, a NaN to nothing
        if key not in self._numbers:
            self._numbers[key] = int(self.add(Node("number", (), 1, number=value))[0])
        return self._numbers[key]

    def full(self, value: float, width: int) -> Columns:
        """Columns that all hold a number."""
        return np.full(width, self.number(value), np.int64)

    def each(self, operation: str, *operands: Columns | float) -> Columns:
        """One number at a time; an operand that is a number stands for as many columns as there are."""
        width = next(len(part) for part in operands if not isinstance(part, float | int))
        columns = [self.full(part, width) if isinstance(part, float | int) else part for part in operands]
        if operation == "mul":
            for one, other in (columns, columns[::-1]):
                if self.holds(one, 1.0):
                    return other
        if operation in ("add", "sub") and self.holds(columns[1], 0.0):
            return columns[0]
        return self.add(Node(operation, tuple(columns), width))

    def sums(self, columns: Columns, segments: int = 1) -> Columns:
        """The sum of each part of a row."""
        return columns if len(columns) == segments else self.reduce("row_sum", columns, segments)

    def reduce(self, operation: str, columns: Columns, segments: int = 1) -> Columns:
        """One number for each part of a row."""
        return self.add(Node(operation, (columns,), segments, segments))

    def cumsum(self, columns: Columns, segments: int = 1) -> Columns:
        """The sums of each part of a row up to each of its columns."""
        return self.add(Node("row_cumsum", (columns,), len(columns), segments))

    def norm(self, columns: Columns, segments: int, epsilon: float) -> tuple[Columns, Columns]:
        """What is normalised, and the factors of the parts."""
        both = self.add(Node("norm", (columns,), len(columns) + segments, segments, epsilon))
        return both[: len(columns)], both[len(columns) :]

    def product(self, start: Columns, columns: Columns, weight: int, is_transposed: bool = False) -> Columns:
        """A row times a weight."""
        return self.add(Node("product", (start, columns), len(start), weight=weight, is_transposed=is_transposed))

    def places(self, columns: Columns) -> Columns:
        """Which node each column belongs to."""
        return np.searchsorted(np.asarray(self.starts), columns, side="right") - 1

    def columns(self, node: int) -> Columns:
        """All columns of a node."""
        return np.arange(self.starts[node], self.starts[node] + self.nodes[node].width)

    def holds(self, columns: Columns, value: float) -> bool:
        """Whether all columns are this number."""
        column = self._numbers.get(value if value else repr(value))
        return column is not None and len(columns) > 0 and bool((columns == column).all())

    def needed(self, results: Sequence[Columns], given: Sequence[int] = ()) -> list[int]:
        """The nodes that results hang on, in order, without what only given nodes hang on."""
        marked = np.zeros(len(self.nodes), bool)
        known = set(given)
        for part in results:
            marked[self.places(part)] = True
        for index in range(len(self.nodes) - 1, -1, -1):
            if marked[index] and index not in known:
                for part in self.nodes[index].operands:
                    marked[self.places(part)] = True
        return [int(index) for index in np.flatnonzero(marked)]


@dataclass
class Result:
    """A step's graph, the nodes that it is given, and the columns of its output and of each new state."""

    graph: Graph
    elements: list[int]
    states: list[int]
    vectors: list[int]  # the same for all rows
    output: Columns
    new: list[Columns]
