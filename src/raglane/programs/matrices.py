"""Operations on matrices of a row, such as outer products, or a memory that is read by attention.

Columns of a row are a matrix if an operand repeats them by its rows or columns: ``v[:, None] *
k[None]`` reads a column of ``v`` for each row of the matrix, and a column of ``k`` for each of its
columns. Programs read such operands where they are, and sum products along rows and columns
without storing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from raglane.programs.graph import Columns, Graph, Node

Along = Literal["", "one", "rows", "columns"]
# Smaller ones are computed as rows, because each row of a matrix has its cost.
_LEAST_ROWS = 4
_LEAST_COLUMNS = 16


class Shape(NamedTuple):
    """A matrix, or several one above the other."""

    rows: int  # of all groups
    columns: int
    groups: int = 1


@dataclass(frozen=True)
class Matrix:
    """An operation on matrices: its operands row by row, and how they repeat columns."""

    operation: str
    shape: Shape
    operands: tuple[Columns, ...]
    along: tuple[Along, ...]

    def read(self, index: int) -> Columns:
        """Return the columns of an operand without repetitions."""
        return self._without_repetitions(self.operands[index], self.along[index])

    def _without_repetitions(self, columns: Columns, along: Along) -> Columns:
        table = columns.reshape(self.shape.groups, -1, self.shape.columns)
        if along == "rows":
            return table[:, :, 0].reshape(-1)
        return table[:, 0].reshape(-1) if along == "columns" else columns


class Matrices:
    """The operations of a program that are on matrices, by node.

    Products that only a sum reads are computed with it, and are removed from ``nodes``.
    """

    def __init__(self, graph: Graph, nodes: dict[int, Node], readers: Columns) -> None:
        self._graph = graph
        self._nodes = nodes
        self._readers = readers
        self._shapes: dict[int, Shape] = {}
        self.found: dict[int, Matrix] = {}
        for index, node in nodes.items():
            if is_each(node.operation) and node.width >= _LEAST_ROWS * _LEAST_COLUMNS:
                self._add(index, self._each(node))
        for index, node in list(nodes.items()):
            if (
                node.operation == "row_sum"
                and len(node.operands[0]) >= _LEAST_ROWS * _LEAST_COLUMNS
            ):
                self._add_sum(index, node)
        for index, node in nodes.items():
            shape = self._shapes.get(node.width)
            if shape is not None and index not in self.found and is_each(node.operation):
                along = tuple([self._along(columns, shape) or "" for columns in node.operands])
                self.found[index] = Matrix(node.operation, shape, node.operands, along)

    def _add(self, index: int, matrix: Matrix | None) -> None:
        if matrix is None:
            return
        self.found[index] = matrix
        shape = matrix.shape
        self._shapes.setdefault(shape.rows * shape.columns, shape._replace(groups=1))

    def _add_sum(self, index: int, node: Node) -> None:
        """Add a sum, with the product of which it is the sum if nothing else reads that."""
        graph = self._graph
        (columns,) = node.operands
        inner = graph.node_of(columns[0])
        product = self._nodes.get(inner)
        if product is not None and product.operation == "mul" and self._readers[inner] == 1:
            picked = columns - graph.starts[inner]
            if bool(((picked >= 0) & (picked < product.width)).all()):
                factors = tuple([operand[picked] for operand in product.operands])
                matrix = self._sum(node.segments, factors)
                if matrix is not None:
                    self._add(index, matrix)
                    self.found.pop(inner, None)
                    del self._nodes[inner]
                    return
        self._add(index, self._sum(node.segments, node.operands))

    def _each(self, node: Node) -> Matrix | None:
        """Return a pointwise operation of which an operand is repeated."""
        shape = _shape(node.operands)
        if shape is None:
            return None
        along = tuple([self._along(columns, shape) or "" for columns in node.operands])
        repeats = self._repeats(node.operands, shape)
        return Matrix(node.operation, shape, node.operands, along) if repeats else None

    def _repeats(self, operands: tuple[Columns, ...], shape: Shape) -> bool:
        """Return True if an operand is repeated by rows or columns of enough of them."""
        if shape.rows < _LEAST_ROWS or shape.columns < _LEAST_COLUMNS:
            return False
        return any(self._along(columns, shape) in ("rows", "columns") for columns in operands)

    def _sum(self, segments: int, factors: tuple[Columns, ...]) -> Matrix | None:
        """Return the sums of products along the rows or the columns of a matrix; None for others."""
        count = len(factors[0])
        part = count // segments
        shape = _shape(factors)
        known = self._shapes.get(count)
        if shape is None and known is not None and segments == 1:
            shape = known  # the sums of its rows are summed again
        elif shape is None or (shape.rows, shape.columns) != (segments, part):
            shape = Shape(segments, part)
        is_matrix = known is not None or shape.groups > 1 or self._repeats(factors, shape)
        along = tuple([self._along(columns, shape) for columns in factors])
        if is_matrix and None not in along and shape.columns >= _LEAST_COLUMNS:
            return Matrix("row_dot", shape, factors, along)  # type: ignore[arg-type]
        return self._down(factors, part)

    def _down(self, factors: tuple[Columns, ...], part: int) -> Matrix | None:
        """Return sums along the columns of matrices whose rows are adjacent."""
        first = next((item for item in factors if len(np.unique(item)) == len(item)), None)
        if first is None or part < _LEAST_ROWS:
            return None
        sums = first.reshape(-1, part)[:, 0]
        # As many adjacent sums as a row has columns are those of one group.
        turns = np.flatnonzero(np.diff(sums) != 1)
        wide = int(turns[0]) + 1 if len(turns) else len(sums)
        if wide < _LEAST_COLUMNS or len(sums) % wide:
            return None
        shape = Shape(len(sums) // wide * part, wide, len(sums) // wide)
        turned = tuple(
            [
                columns.reshape(shape.groups, wide, part).transpose(0, 2, 1).reshape(-1)
                for columns in factors
            ]
        )
        along = tuple([self._along(columns, shape) for columns in turned])
        return None if None in along else Matrix("column_dot", shape, turned, along)  # type: ignore[arg-type]

    def _along(self, columns: Columns, shape: Shape) -> Along | None:
        """Return how an operand repeats columns; None if it has no such form."""
        if bool((columns == columns[0]).all()):
            return "one"
        if bool((np.diff(columns) == 1).all()):
            is_one = self._graph.node_of(columns[0]) == self._graph.node_of(columns[-1])
            return "" if is_one else None
        table = columns.reshape(shape.groups, -1, shape.columns)
        if bool((table == table[:, :, :1]).all()):
            return "rows"
        return "columns" if bool((table == table[:, :1]).all()) else None


_NOT_EACH = frozenset(
    "row_sum row_max row_cumsum norm norm_backward gather product number element state vector".split()
)


def is_each(operation: str) -> bool:
    """Return True for an operation of a node that is pointwise."""
    return operation not in _NOT_EACH


def scheduled(graph: Graph, nodes: dict[int, Node], found: dict[int, Matrix]) -> list[int]:
    """Return an order of the nodes in which those on matrices of one shape are adjacent, as far as
    they read only the same row of each other's results.
    """
    operands = {
        index: found[index].operands if index in found else node.operands
        for index, node in nodes.items()
    }
    behind = {
        index: {
            int(other)
            for columns in read
            for other in np.unique(graph.nodes_of(columns))
            if int(other) in nodes
        }
        for index, read in operands.items()
    }
    left = list(nodes)
    order: list[int] = []
    done: set[int] = set()
    while left:
        for index in [*left]:
            if index not in found and behind[index] <= done:
                order.append(index)
                done.add(index)
        left = [index for index in left if index not in done]
        first = next((index for index in left if behind[index] <= done), None)
        if first is None:
            continue
        walk: set[int] = set()
        for index in left:
            if index in found and _may_join(graph, index, first, found, behind[index] - done, walk):
                walk.add(index)
                order.append(index)
        done |= walk
        left = [index for index in left if index not in done]
    return order


def _may_join(
    graph: Graph,
    index: int,
    first: int,
    found: dict[int, Matrix],
    open_nodes: set[int],
    walk: set[int],
) -> bool:
    """Return True if an operation may be computed row by row with those of a walk."""
    matrix = found[index]
    if matrix.shape[:2] != found[first].shape[:2] or not open_nodes <= walk:
        return False
    for position, along in enumerate(matrix.along):
        read = {int(node) for node in np.unique(graph.nodes_of(matrix.operands[position]))}
        for other in read & open_nodes:
            operation = found[other].operation
            is_row = operation == "row_dot" and along == "rows"
            is_whole = along == "" and operation not in ("row_dot", "column_dot")
            if not is_row and not is_whole:
                return False
    return True


def _shape(operands: Sequence[Columns]) -> Shape | None:
    """Return the shape of a matrix, from the repetitions of its operands; None without any."""
    for columns in operands:
        width = _row(columns)
        if not width or len(columns) % width:
            continue
        rows = len(columns) // width
        if width < _LEAST_COLUMNS or rows < _LEAST_ROWS:
            return None
        return Shape(rows, width, _groups(operands, width))
    return None


def _row(columns: Columns) -> int:
    """Return the columns of a row, which are all one, or those of the row before; 0 for none."""
    same = np.flatnonzero(columns == columns[0])
    if len(same) in (1, len(columns)):
        return 0
    if same[1] != 1:
        return int(same[1])
    turns = np.flatnonzero(np.diff(columns))
    return int(turns[0]) + 1 if len(turns) else 0


def _groups(operands: Sequence[Columns], width: int) -> int:
    """Return the number of groups of rows: in each, an operand has the same numbers in all rows."""
    for columns in operands:
        table = columns.reshape(-1, width)
        if bool((table == table[:, :1]).all()) or not np.array_equal(table[0], table[1]):
            continue
        turns = np.flatnonzero((table[1:] != table[:-1]).any(1)) + 1
        if len(turns):
            return len(table) // int(turns[0]) if len(table) % turns[0] == 0 else 1
    return 1
