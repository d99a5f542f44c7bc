"""Operations on matrices of a row, such as outer products, or a memory that is read by attention.

Columns of a row are a matrix if an operand repeats them by its rows or columns: ``v[:, None] *
k[None]`` reads a column of ``v`` for each row of the matrix, and a column of ``k`` for each of its
columns. Programs read such operands where they are, and sum products along rows and columns
without storing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from raglane.programs.graph import Columns, Graph, Node

Along = Literal["", "one", "rows", "columns"]
# Smaller ones are computed as rows, because each row of a matrix has its cost.
_LEAST_ROWS = 4
_LEAST_COLUMNS = 16


class MatrixShape(NamedTuple):
    """A matrix, or several one above the other."""

    rows: int  # of all groups
    columns: int
    groups: int = 1


@dataclass(frozen=True)
class RowMatrix:
    """An operation on matrices: its operands row by row, and how they repeat columns."""

    operation: str
    shape: MatrixShape
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
        self._shapes: dict[int, MatrixShape] = {}
        self.operations: dict[int, RowMatrix] = {}
        each = {index: node for index, node in nodes.items() if is_each(node.operation)}
        for index, node in each.items():
            self._add(index, self._each(node))
        for index, node in list(nodes.items()):
            if node.operation == "row_sum":
                self._add_sum(index, node)
        # Others of the same width are computed with them, row by row.
        for index, node in each.items():
            shape = self._shapes.get(node.width)
            if shape is not None and index in nodes and index not in self.operations:
                along = tuple([self._along(columns, shape) or "" for columns in node.operands])
                self.operations[index] = RowMatrix(node.operation, shape, node.operands, along)

    def _add(self, index: int, matrix: RowMatrix | None) -> None:
        if matrix is None:
            return
        self.operations[index] = matrix
        shape = matrix.shape
        self._shapes.setdefault(shape.rows * shape.columns, shape._replace(groups=1))

    def _add_sum(self, index: int, node: Node) -> None:
        """Add a sum, with the product of which it is the sum if nothing else reads that."""
        (columns,) = node.operands
        inner = self._graph.node_of(columns[0])
        factors = self._factors(columns, inner)
        matrix = None if factors is None else self._sum(node.segments, factors)
        if matrix is None:
            self._add(index, self._sum(node.segments, node.operands))
            return
        self._add(index, matrix)
        self.operations.pop(inner, None)
        del self._nodes[inner]

    def _factors(self, columns: Columns, inner: int) -> tuple[Columns, ...] | None:
        """Return the factors of the products that are summed, if nothing else reads them."""
        product = self._nodes.get(inner)
        if product is None or product.operation != "mul" or self._readers[inner] != 1:
            return None
        picked = columns - self._graph.starts[inner]
        if bool((picked < 0).any() or (picked >= product.width).any()):
            return None
        return tuple([operand[picked] for operand in product.operands])

    def _each(self, node: Node) -> RowMatrix | None:
        """Return a pointwise operation of which an operand is repeated."""
        shape = _shape(node.operands) if node.width >= _LEAST_ROWS * _LEAST_COLUMNS else None
        if shape is None:
            return None
        along = tuple([self._along(columns, shape) or "" for columns in node.operands])
        repeats = self._repeats(node.operands, shape)
        return RowMatrix(node.operation, shape, node.operands, along) if repeats else None

    def _repeats(self, operands: tuple[Columns, ...], shape: MatrixShape) -> bool:
        """Return True if an operand is repeated by rows or columns of enough of them."""
        if shape.rows < _LEAST_ROWS or shape.columns < _LEAST_COLUMNS:
            return False
        return any(self._along(columns, shape) in ("rows", "columns") for columns in operands)

    def _sum(self, segments: int, factors: tuple[Columns, ...]) -> RowMatrix | None:
        """Return the sums of products along the rows or the columns of a matrix; None for others."""
        count = len(factors[0])
        if count < _LEAST_ROWS * _LEAST_COLUMNS:
            return None
        shape = self._shape_of_sums(segments, factors)
        is_matrix = count in self._shapes or self._repeats(factors, shape)
        along = tuple([self._along(columns, shape) for columns in factors])
        if is_matrix and None not in along and shape.columns >= _LEAST_COLUMNS:
            return RowMatrix("row_dot", shape, factors, along)  # type: ignore[arg-type]
        return self._down(factors, count // segments)

    def _shape_of_sums(self, segments: int, factors: tuple[Columns, ...]) -> MatrixShape:
        """Return the shape whose rows are summed: for the sum of all those of the others, which are
        summed again.
        """
        count = len(factors[0])
        shape = _shape(factors)
        if shape is None and segments == 1 and count in self._shapes:
            return self._shapes[count]
        by_row = MatrixShape(segments, count // segments)
        return shape if shape is not None and shape[:2] == by_row[:2] else by_row

    def _down(self, factors: tuple[Columns, ...], rows: int) -> RowMatrix | None:
        """Return sums along the columns of matrices whose rows are adjacent."""
        first = next((item for item in factors if len(np.unique(item)) == len(item)), None)
        if first is None or rows < _LEAST_ROWS:
            return None
        sums = first.reshape(-1, rows)[:, 0]
        # As many adjacent sums as a row has columns are those of one group.
        turns = np.flatnonzero(np.diff(sums) != 1)
        wide = int(turns[0]) + 1 if len(turns) else len(sums)
        if wide < _LEAST_COLUMNS or len(sums) % wide:
            return None
        shape = MatrixShape(len(sums) // wide * rows, wide, len(sums) // wide)
        turned = tuple(
            [
                columns.reshape(shape.groups, wide, rows).transpose(0, 2, 1).reshape(-1)
                for columns in factors
            ]
        )
        along = tuple([self._along(columns, shape) for columns in turned])
        return None if None in along else RowMatrix("column_dot", shape, turned, along)  # type: ignore[arg-type]

    def _along(self, columns: Columns, shape: MatrixShape) -> Along | None:
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


def order_repeated(graph: Graph, nodes: dict[int, Node], results: Sequence[Columns]) -> None:
    """Compute the numbers of operands that are all repeated, such as an outer product, in the one
    order in which others read them.
    """
    readers: dict[int, list[tuple[int, int]]] = {}
    for index, node in nodes.items():
        for position, columns in enumerate(node.operands):
            for read in np.unique(graph.nodes_of(columns)).tolist():
                readers.setdefault(read, []).append((index, position))
    for columns in results:
        for read in np.unique(graph.nodes_of(columns)).tolist():
            readers.pop(read, None)
    for index, node in reversed(nodes.items()):
        if index not in readers or not all(map(_is_repeated, node.operands)):
            continue
        reads = [nodes[reader].operands[position] for reader, position in readers[index]]
        order = _order(reads, graph.columns(index)) if is_each(node.operation) else None
        if order is None:
            continue
        nodes[index] = replace(node, operands=tuple([columns[order] for columns in node.operands]))
        for reader, position in readers[index]:
            operands = list(nodes[reader].operands)
            operands[position] = graph.columns(index)
            nodes[reader] = replace(nodes[reader], operands=tuple(operands))


def _order(reads: Sequence[Columns], columns: Columns) -> Columns | None:
    """Return the order in which all columns are read, if it is one, and another than their own."""
    first = reads[0]
    if any(not np.array_equal(read, first) for read in reads) or np.array_equal(first, columns):
        return None
    return first - columns[0] if np.array_equal(np.sort(first), columns) else None


def _is_repeated(columns: Columns) -> bool:
    return len(columns) >= _LEAST_ROWS * _LEAST_COLUMNS and (
        len(np.unique(columns)) <= len(columns) // _LEAST_ROWS
    )


def scheduled(graph: Graph, nodes: dict[int, Node], matrices: dict[int, RowMatrix]) -> list[int]:
    """Return an order of the nodes in which those on matrices of one shape are adjacent, as far as
    they read only the same row of each other's results.
    """
    behind = {
        index: _nodes_behind(graph, matrices.get(index, node).operands) & nodes.keys()
        for index, node in nodes.items()
    }
    left = list(nodes)
    order: list[int] = []
    while left:
        done = set(order)
        for index in left:
            if index not in matrices and behind[index] <= done:
                order.append(index)
                done.add(index)
        left = [index for index in left if index not in done]
        first = next((index for index in left if behind[index] <= done), None)
        walk: set[int] = set()
        for index in left if first is not None and first in matrices else ():
            if _may_join(graph, index, first, matrices, behind[index] - done, walk):
                walk.add(index)
                order.append(index)
        left = [index for index in left if index not in walk]
    return order


def _nodes_behind(graph: Graph, operands: Sequence[Columns]) -> set[int]:
    return {node for columns in operands for node in np.unique(graph.nodes_of(columns)).tolist()}


def _may_join(
    graph: Graph,
    index: int,
    first: int | None,
    matrices: dict[int, RowMatrix],
    open_nodes: set[int],
    walk: set[int],
) -> bool:
    """Return True if an operation may be computed row by row with those of a walk."""
    matrix = matrices.get(index)
    if first is None or matrix is None or not open_nodes <= walk:
        return False
    if matrix.shape[:2] != matrices[first].shape[:2]:
        return False
    for position, along in enumerate(matrix.along):
        for other in _nodes_behind(graph, [matrix.operands[position]]) & open_nodes:
            operation = matrices[other].operation
            is_row = operation == "row_dot" and along == "rows"
            is_whole = along == "" and operation not in ("row_dot", "column_dot")
            if not is_row and not is_whole:
                return False
    return True


def _shape(operands: Sequence[Columns]) -> MatrixShape | None:
    """Return the shape of a matrix, from the repetitions of its operands; None without any."""
    for columns in operands:
        width = _row(columns)
        if not width or len(columns) % width:
            continue
        rows = len(columns) // width
        if width < _LEAST_COLUMNS or rows < _LEAST_ROWS:
            return None
        return MatrixShape(rows, width, _groups(operands, width))
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
