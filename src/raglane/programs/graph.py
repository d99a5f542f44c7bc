"""A step as a graph of operations on whole rows: the result of tracing, from which programs are
made.

A node is one operation. Its results are columns, which are numbered through all nodes of a graph.
An operand is an array of these numbers, in any order and with repetitions. So operations that move
columns (views, slices, concatenations, repetitions) have no nodes: they index arrays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Columns = Any  # (w,) int64 of NumPy: numbers of columns
SOURCES = ("element", "state", "vector")
"""Operations of nodes that are inputs; a state that no step changes becomes an input of the
sequence."""

DEPENDS = "so its results depend on the schedule"
"""Part of a reason: results of the step in plain torch may differ between schedules and batches."""


class Refused(Exception):  # noqa: N818 (an answer, not an error)
    """A cell cannot become a program."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unkept(Refused):
    """A trace cannot be stored on the disk, or a stored one is not valid."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on rows: one of :data:`raglane.programs.program.OPERATIONS` or :data:`SOURCES`,
    or one of these.

    ``number``; ``at_least`` and ``at_most``, which are ``max`` and ``min`` with the gradient of
    ties for the first operand, as torch's ``clamp`` has it; ``stop``, which no gradient passes; and
    ``through``, the first operand, whose gradient goes to the second unchanged.
    """

    operation: str
    operands: tuple[Columns, ...]
    width: int  # columns of its results together
    segments: int = 1
    epsilon: float = 0.0
    weight: int = -1  # of a product: index among the graph's weights
    is_transposed: bool = False  # the product reads the weight transposed
    number: float = 0.0

    @property
    def span(self) -> int:
        """``w``, the width of the instruction, which is that of the operand for reductions."""
        if self.operation in ("row_sum", "row_max"):
            return len(self.operands[0])
        return self.width - self.segments if self.operation == "norm" else self.width


@dataclass
class Graph:
    """Nodes in topological order, and the numbers of their columns."""

    nodes: list[Node] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # the number of the first column of each node
    # (groups, rows, depth) of each.
    weights: list[tuple[int, int, int]] = field(default_factory=list)
    _numbers: dict[float | str, int] = field(default_factory=dict)

    def copy(self) -> Graph:
        """Return a copy that can grow independently."""
        return Graph(list(self.nodes), list(self.starts), list(self.weights), dict(self._numbers))

    def add(self, node: Node) -> Columns:
        """Append a node; return its columns."""
        start = self.starts[-1] + self.nodes[-1].width if self.nodes else 0
        self.nodes.append(node)
        self.starts.append(start)
        return np.arange(start, start + node.width)

    def number(self, value: float) -> int:
        """Return the column of a number."""
        value = float(value)
        # -0.0 equals 0.0, a NaN equals nothing.
        key = value if value == value and value != 0 else repr(value)
        if key not in self._numbers:
            self._numbers[key] = int(self.add(Node("number", (), 1, number=value))[0])
        return self._numbers[key]

    def full(self, value: float, width: int) -> Columns:
        """Return columns that are all one number."""
        return np.full(width, self.number(value), np.int64)

    def each(self, operation: str, *operands: Columns | float) -> Columns:
        """Add a pointwise operation; an operand that is a number is repeated."""
        width = next(len(operand) for operand in operands if not isinstance(operand, float | int))
        columns = [
            self.full(operand, width) if isinstance(operand, float | int) else operand
            for operand in operands
        ]
        if operation == "mul" and self.holds(columns[0], 1.0):
            return columns[1]
        if operation == "mul" and self.holds(columns[1], 1.0):
            return columns[0]
        if operation in ("add", "sub") and self.holds(columns[1], 0.0):
            return columns[0]
        return self.add(Node(operation, tuple(columns), width))

    def sums(self, columns: Columns, segments: int = 1) -> Columns:
        """Add the sum of each segment of a row."""
        return columns if len(columns) == segments else self.reduce("row_sum", columns, segments)

    def reduce(self, operation: str, columns: Columns, segments: int = 1) -> Columns:
        """Add a reduction of each segment of a row to one number."""
        return self.add(Node(operation, (columns,), segments, segments))

    def cumsum(self, columns: Columns, segments: int = 1) -> Columns:
        """Add the cumulative sums of each segment of a row."""
        return self.add(Node("row_cumsum", (columns,), len(columns), segments))

    def norm(self, columns: Columns, segments: int, epsilon: float) -> tuple[Columns, Columns]:
        """Add a normalisation; return the normalised columns and the factor of each segment."""
        both = self.add(Node("norm", (columns,), len(columns) + segments, segments, epsilon))
        return both[: len(columns)], both[len(columns) :]

    def product(
        self,
        start: Columns,
        columns: Columns,
        weight: int,
        segments: int = 1,
        is_transposed: bool = False,
    ) -> Columns:
        """Add the product of each segment of a row and a weight to ``start``."""
        node = Node(
            "product",
            (start, columns),
            len(start),
            segments,
            weight=weight,
            is_transposed=is_transposed,
        )
        return self.add(node)

    def nodes_of(self, columns: Columns) -> Columns:
        """Return the node of each column."""
        return np.array(self.starts).searchsorted(columns, "right") - 1

    def node_of(self, column: int) -> int:
        """Return the node of one column."""
        return bisect_right(self.starts, column) - 1

    def columns(self, node: int) -> Columns:
        """Return all columns of a node."""
        return np.arange(self.starts[node], self.starts[node] + self.nodes[node].width)

    def holds(self, columns: Columns, value: float) -> bool:
        """Return True if all columns are this number."""
        column = self._numbers.get(value if value else repr(value))
        return column is not None and len(columns) > 0 and bool((columns == column).all())

    def needed(self, results: Sequence[Columns], inputs: Sequence[int] = ()) -> list[int]:
        """Return the nodes that results depend on, in order, without those behind ``inputs``."""
        marked = np.zeros(len(self.nodes), bool)
        is_input = set(inputs)
        for columns in results:
            marked[self.nodes_of(columns)] = True
        for index in range(len(self.nodes) - 1, -1, -1):
            if marked[index] and index not in is_input:
                for columns in self.nodes[index].operands:
                    marked[self.nodes_of(columns)] = True
        return np.flatnonzero(marked).tolist()


@dataclass
class StepGraph:
    """A step's graph, its input nodes, and the columns of its output and of each new state."""

    graph: Graph
    elements: list[int]
    states: list[int]
    vectors: list[int]  # the same for all rows
    output: Columns
    new: list[Columns]
