"""From a graph to a program: instructions on blocks, with few copies.

Pointwise operations read an operand with columns of several blocks piece by piece. For other
operations the pieces are joined in one block, into which their results are written directly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from raglane.programs.allocation import allocate
from raglane.programs.graph import Columns, Graph, Node
from raglane.programs.matrices import Matrices, RowMatrix, order_repeated, scheduled
from raglane.programs.program import Block, Instruction, Kind, Operand, Program, Weight

_SAME = {"at_least": "max", "at_most": "min", "stop": "copy", "through": "copy"}
_WHOLE = ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward", "product")
# Operands of more pieces are moved by one gather.
_PIECES = 16


class Lowered(NamedTuple):
    """A program, with the nodes that are its inputs, and its weights, each with True if it is
    transposed.
    """

    program: Program
    inputs: dict[Kind, tuple[int, ...]]
    weights: tuple[tuple[int, bool], ...]


class _ColumnRun(NamedTuple):
    """Columns ``low`` to ``high - 1`` of an operand that are adjacent, or one repeated column."""

    low: int
    high: int
    is_spread: bool


def _continues(first: Operand, second: Operand, width: int) -> bool:
    """Return True if the second operand follows the ``width`` columns of the first, or is the same
    number or repeated column.
    """
    if first.block < 0 or first.spread or second.spread:
        return first == second and (first.block < 0 or first.spread)
    return second.block == first.block and second.start == first.start + width


def _all_continue(first: tuple[Operand, ...], second: tuple[Operand, ...], width: int) -> bool:
    return all(
        _continues(before, after, width) for before, after in zip(first, second, strict=True)
    )


@dataclass
class Lowering:
    """Makes a program of a graph; the nodes in ``kinds`` are inputs."""

    graph: Graph
    kinds: dict[int, Kind]
    states: Sequence[int]
    has_matrices: bool = True
    blocks: list[Block] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    homes: dict[int, tuple[int, int]] = field(default_factory=dict)
    inputs: dict[Kind, list[int]] = field(default_factory=dict)
    _matrices: dict[int, RowMatrix] = field(default_factory=dict)
    weights: dict[tuple[int, bool], int] = field(default_factory=dict)
    _together: dict[bytes, int] = field(default_factory=dict)
    _done: set[bytes] = field(default_factory=set)
    _moved: dict[bytes, Operand] = field(default_factory=dict)
    _cut: dict[bytes, list[_ColumnRun]] = field(default_factory=dict)

    def run(self, outputs: Sequence[Columns], new: Sequence[Columns]) -> Lowered:
        """Return the program that computes these outputs and new states."""
        needed = self.graph.needed([*outputs, *new], list(self.kinds))
        for index in self.states:
            self._give(index)
        nodes = self._computed(needed, [*outputs, *new])
        for index in needed:
            if index in self.kinds and index not in self.homes:
                self._give(index)
        self._plan_all(nodes, [*outputs, *new])
        order = scheduled(self.graph, nodes, self._matrices) if self._matrices else nodes
        for index in order:
            self._emit(index, nodes[index])
        written = [(self._at_once(columns), len(columns)) for columns in outputs]
        following = [self._next(columns, index) for index, columns in enumerate(new)]
        program = Program(
            tuple(self.blocks),
            tuple([self._shape(*weight) for weight in self.weights]),
            tuple(self.instructions),
            tuple(written),
            tuple(following),
        )
        inputs = {kind: tuple(nodes) for kind, nodes in self.inputs.items()}
        return Lowered(allocate(program), inputs, tuple(self.weights))

    def _plan_all(self, nodes: dict[int, Node], results: list[Columns]) -> None:
        """Choose the blocks of operands and results that have several pieces."""
        operands = [
            operand
            for index, node in nodes.items()
            if index not in self._matrices
            for operand in node.operands
        ]
        in_one = [
            operand
            for index, node in nodes.items()
            if node.operation in _WHOLE and index not in self._matrices
            for operand in node.operands
        ]
        # Longest first, because others may be parts of it. Other operands are in one block only by
        # chance.
        for columns in (*sorted([*in_one, *results], key=len, reverse=True), *operands):
            self._plan(columns, nodes)

    def _shape(self, index: int, is_transposed: bool) -> Weight:
        groups, rows, depth = self.graph.weights[index]
        return Weight(groups, depth, rows) if is_transposed else Weight(groups, rows, depth)

    # Blocks of columns.

    def _give(self, index: int) -> None:
        kind = self.kinds[index]
        inputs = self.inputs.setdefault(kind, [])
        self.blocks.append(Block(kind, self.graph.nodes[index].width, len(inputs)))
        self.homes[index] = (len(self.blocks) - 1, 0)
        inputs.append(index)

    def _local(self, width: int) -> int:
        self.blocks.append(Block("local", width))
        return len(self.blocks) - 1

    def _computed(self, needed: list[int], results: list[Columns]) -> dict[int, Node]:
        """Return the nodes to compute, with the products that only one sum reads fused with it."""
        nodes = {
            index: self.graph.nodes[index]
            for index in needed
            if index not in self.kinds and self.graph.nodes[index].operation != "number"
        }
        if self.has_matrices:
            order_repeated(self.graph, nodes, results)
        readers = self._fuse(nodes, results)
        if self.has_matrices:
            self._matrices = Matrices(self.graph, nodes, readers).operations
        return nodes

    def _fuse(self, nodes: dict[int, Node], results: list[Columns]) -> Columns:
        """Fuse multiplications that only one addition reads with it; return the number of readers
        of each node.
        """
        graph = self.graph
        readers = np.zeros(len(graph.nodes), np.int64)
        operands = (operand for node in nodes.values() for operand in node.operands)
        for operand in (*results, *operands):
            readers[list(set(graph.nodes_of(operand).tolist()))] += 1
        for index, node in list(nodes.items()):
            if node.operation != "add":
                continue
            for position in (0, 1):
                factor = graph.node_of(node.operands[position][0])
                inner = nodes.get(factor)
                if inner is None or inner.operation != "mul" or readers[factor] != 1:
                    continue
                if np.array_equal(node.operands[position], graph.columns(factor)):
                    fused = (*inner.operands, node.operands[1 - position])
                    nodes[index] = replace(node, operation="fma", operands=fused)
                    del nodes[factor]
                    break
        return readers

    def _plan(self, columns: Columns, nodes: dict[int, Node]) -> None:
        """Choose a block for an operand of several nodes, so that their results are written where
        they are read.
        """
        runs = self._runs(columns)
        key = columns.tobytes()
        if len(runs) == 1 or len(runs) > _PIECES or key in self._together:
            return
        block = self._together[key] = self._local(len(columns))
        for run in runs:
            index = self.graph.node_of(columns[run.low])
            node = nodes.get(index)
            is_all = not run.is_spread and node is not None and run.high - run.low == node.width
            if node is not None and is_all and index not in self.homes and node.operation != "norm":
                self.homes[index] = (block, run.low)

    def _is_adjacent(self, columns: Columns, runs: list[_ColumnRun]) -> bool:
        """Return True if the pieces of an operand follow each other."""
        sources = [self._read(columns[run.low : run.high], run.is_spread) for run in runs]
        return all(
            _continues(first, second, run.high - run.low)
            for run, first, second in zip(runs, sources, sources[1:], strict=False)
        )

    def _runs(self, columns: Columns) -> list[_ColumnRun]:
        """Return the pieces of an operand; the list is cut off after the limit."""
        if len(columns) == 1:
            return [_ColumnRun(0, 1, False)]
        key = columns.tobytes()
        if key not in self._cut:
            self._cut[key] = self._runs_of(columns)
        return self._cut[key]

    def _runs_of(self, columns: Columns) -> list[_ColumnRun]:
        nodes = self.graph.nodes_of(columns)
        steps = columns[1:] - columns[:-1]
        kinds = np.where((steps == 1) & (nodes[1:] == nodes[:-1]), 1, np.where(steps == 0, 0, -1))
        turns = [*((kinds[1:] != kinds[:-1]).nonzero()[0] + 1).tolist(), len(kinds)]
        runs: list[_ColumnRun] = []
        low = 0
        while low < len(columns) and len(runs) <= _PIECES:
            is_one = low == len(columns) - 1 or kinds[low] < 0
            high = low + 1 if is_one else turns[bisect_right(turns, low)] + 1
            runs.append(_ColumnRun(low, high, high > low + 1 and bool(kinds[low] == 0)))
            low = high
        return runs

    def _read(self, columns: Columns, is_spread: bool) -> Operand:
        """Return a piece of an operand."""
        index = self.graph.node_of(columns[0])
        node = self.graph.nodes[index]
        if node.operation == "number":
            return Operand(-1, number=node.number)
        block, start = self.homes[index]
        return Operand(block, start + int(columns[0]) - self.graph.starts[index], is_spread)

    def _at_once(self, columns: Columns) -> Operand:
        """Return an operand in one block, joined if necessary."""
        runs = self._runs(columns)
        first = self.graph.nodes[self.graph.node_of(columns[0])]
        if len(runs) == 1 and not runs[0].is_spread and first.operation != "number":
            return self._read(columns, False)
        key = columns.tobytes()
        if key in self._done:
            return Operand(self._together[key])
        if 1 < len(runs) <= _PIECES and self._is_adjacent(columns, runs):
            return self._read(columns[: runs[0].high], False)
        self._done.add(key)
        if len(runs) > _PIECES:
            return Operand(self._gathered(columns, key))
        if key not in self._together:
            self._together[key] = self._local(len(columns))
        block = self._together[key]
        for run in runs:
            source = self._read(columns[run.low : run.high], run.is_spread)
            if source != Operand(block, run.low):
                self._add("copy", (Operand(block, run.low),), (source,), run.high - run.low)
        return Operand(block)

    def _begin(self, columns: Columns) -> Operand:
        """Return the start of a product, which may also be one number."""
        runs = self._runs(columns)
        return self._read(columns, runs[0].is_spread) if len(runs) == 1 else self._at_once(columns)

    def _gathered(self, columns: Columns, key: bytes) -> int:
        """Return an operand of many pieces, gathered from one block that contains them all."""
        graph = self.graph
        indexes = np.unique(graph.nodes_of(columns)).tolist()
        source = np.concatenate([graph.columns(index) for index in indexes])
        # Whole results in the order in which they were computed.
        if np.array_equal(source, columns):
            return self._joined(indexes, columns)
        operand = self._at_once(source)
        picked: Columns = np.searchsorted(source, columns)
        block = self._together[key] = self._local(len(columns))
        order = tuple(picked.tolist())
        self._add("gather", (Operand(block),), (operand,), len(order), columns=order)
        return block

    def _joined(self, indexes: list[int], columns: Columns) -> int:
        block = self._local(len(columns))
        start = 0
        self._together[columns.tobytes()] = block
        for index in indexes:
            width = self.graph.nodes[index].width
            source = self._read(self.graph.columns(index), False)
            self._add("copy", (Operand(block, start),), (source,), width)
            start += width
        return block

    # Instructions.

    def _add(
        self,
        operation: str,
        results: tuple[Operand, ...],
        operands: tuple[Operand, ...],
        width: int,
        node: Node | None = None,
        columns: tuple[int, ...] = (),
    ) -> None:
        weight = -1
        if node is not None and node.operation == "product":
            weight = self.weights.setdefault((node.weight, node.is_transposed), len(self.weights))
        segments = 1 if node is None else node.segments
        epsilon = 0.0 if node is None else node.epsilon
        self.instructions.append(
            Instruction(operation, results, operands, width, segments, epsilon, weight, columns)
        )

    def _emit(self, index: int, node: Node) -> None:
        if index not in self.homes:
            self.homes[index] = (self._local(node.width), 0)
        block, start = self.homes[index]
        if index in self._matrices:
            self._emit_matrix(self._matrices[index], node, Operand(block, start))
            return
        if node.operation in _WHOLE:
            self._emit_whole(node, block, start)
            return
        name = _SAME.get(node.operation, node.operation)
        operands = node.operands[:1] if node.operation == "through" else node.operands
        pieces = [self._pieces(operand) for operand in operands]
        bounds = sorted({run.high for _, runs in pieces for run in runs})
        if len(bounds) > _PIECES:
            wholes = tuple(self._joined_or_repeated(columns, runs) for columns, runs in pieces)
            self._add(name, (Operand(block, start),), wholes, node.width)
            return
        begins: list[int] = []
        sources: list[tuple[Operand, ...]] = []
        low = 0
        for high in bounds:
            source = tuple(self._piece(columns, runs, low, high) for columns, runs in pieces)
            # A piece that continues the previous one is merged with it.
            if not begins or not _all_continue(sources[-1], source, low - begins[-1]):
                begins.append(low)
                sources.append(source)
            low = high
        for begin, end, source in zip(begins, [*begins[1:], node.width], sources, strict=True):
            self._add(name, (Operand(block, start + begin),), source, end - begin)

    def _emit_whole(self, node: Node, block: int, start: int) -> None:
        """Add an operation on rows, which reads operands in one block."""
        first, *others = node.operands
        read = self._begin if node.operation == "product" else self._at_once
        operands = (read(first), *map(self._at_once, others))
        results = [Operand(block, start)]
        if node.operation == "norm":
            results.append(Operand(block, start + node.span))
        self._add(node.operation, tuple(results), operands, node.span, node)

    def _emit_matrix(self, matrix: RowMatrix, node: Node, result: Operand) -> None:
        """Add an operation on a matrix; its row sums are summed again for the sum of all."""
        shape = matrix.shape
        operands = [
            self._read_along(matrix, index)
            for index in range(len(matrix.operands))
            if matrix.operation != "through" or index == 0
        ]
        is_total = matrix.operation == "row_dot" and node.segments == 1
        if matrix.operation in ("row_dot", "column_dot") and len(operands) == 1:
            operands.append(Operand(-1, number=1.0))
        self.instructions.append(
            Instruction(
                _SAME.get(matrix.operation, matrix.operation),
                (Operand(self._local(shape.rows)) if is_total else result,),
                tuple(operands),
                shape.rows * shape.columns,
                shape.rows,
                groups=shape.groups,
            )
        )
        if is_total:
            self._add("row_sum", (result,), self.instructions[-1].results, shape.rows)

    def _read_along(self, matrix: RowMatrix, index: int) -> Operand:
        columns = matrix.operands[index]
        along = matrix.along[index]
        if along == "one":
            return self._read(columns, True)
        if along == "":
            return self._at_once(columns)
        return self._at_once(matrix.read(index))._replace(along=along)

    def _pieces(self, columns: Columns) -> tuple[Columns, list[_ColumnRun]]:
        """Return an operand in few pieces; many are joined first."""
        runs = self._runs(columns)
        if len(runs) <= _PIECES:
            return columns, runs
        joined = self._at_once(columns)
        self._moved[columns.tobytes()] = joined
        return columns, [_ColumnRun(0, len(columns), False)]

    def _joined_or_repeated(self, columns: Columns, runs: list[_ColumnRun]) -> Operand:
        if len(runs) == 1 and columns.tobytes() not in self._moved:
            return self._read(columns, runs[0].is_spread)
        return self._moved.get(columns.tobytes()) or self._at_once(columns)

    def _piece(self, columns: Columns, runs: list[_ColumnRun], low: int, high: int) -> Operand:
        run = next(run for run in runs if run.low <= low and high <= run.high)
        moved = self._moved.get(columns.tobytes())
        if moved is not None:
            return moved._replace(start=moved.start + low)
        return self._read(columns[low:high], run.is_spread and high - low > 1)

    def _next(self, columns: Columns, index: int) -> Operand:
        """Return a state's next value; that of another state is copied, because it is replaced
        too.
        """
        source = self._at_once(columns)
        block = self.blocks[source.block]
        if block.kind == "state" and (block.index, source.start) != (index, 0):
            local = self._local(len(columns))
            self._add("copy", (Operand(local),), (source,), len(columns))
            return Operand(local)
        return source
