"""From a graph to a program: instructions on blocks, with few copies.

Pointwise operations read an operand with columns in several places piece by piece. For other
operations the pieces are joined in one block, into which their results are written directly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from raglane.programs.graph import Columns, Graph, Node
from raglane.programs.program import OPERATIONS, Block, Instruction, Kind, Operand, Program, Weight

_SAME = {"at_least": "max", "at_most": "min", "stop": "copy", "through": "copy"}
_WHOLE = ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward", "product")
# Operands of more pieces are moved by one gather.
_PIECES = 16


class Lowered(NamedTuple):
    """A program, with the nodes that are its inputs, and its weights, each with True if it is
    transposed.
    """

    program: Program
    given: dict[Kind, tuple[int, ...]]
    weights: tuple[tuple[int, bool], ...]


class _Run(NamedTuple):
    """Columns ``low`` to ``high - 1`` of an operand that are adjacent, or one repeated column."""

    low: int
    high: int
    is_spread: bool


def _continues(one: Operand, other: Operand, width: int) -> bool:
    """Return True if ``other`` follows the ``width`` columns of ``one``, or is the same number or
    repeated column.
    """
    if one.block < 0 or one.spread or other.spread:
        return one == other and (one.block < 0 or one.spread)
    return other.block == one.block and other.start == one.start + width


@dataclass
class Lowering:
    """Makes a program of a graph; the nodes in ``kinds`` are inputs."""

    graph: Graph
    kinds: dict[int, Kind]
    states: Sequence[int]
    blocks: list[Block] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    homes: dict[int, tuple[int, int]] = field(default_factory=dict)
    given: dict[Kind, list[int]] = field(default_factory=dict)
    weights: dict[tuple[int, bool], int] = field(default_factory=dict)
    _together: dict[bytes, int] = field(default_factory=dict)
    _done: set[bytes] = field(default_factory=set)
    _moved: dict[bytes, Operand] = field(default_factory=dict)
    _cut: dict[bytes, list[_Run]] = field(default_factory=dict)

    def run(self, outputs: Sequence[Columns], new: Sequence[Columns]) -> Lowered:
        """Return the program that computes these outputs and new states."""
        needed = self.graph.needed([*outputs, *new], list(self.kinds))
        for index in self.states:
            self._give(index)
        nodes = self._fused(needed, [*outputs, *new])
        for index in needed:
            if index in self.kinds and index not in self.homes:
                self._give(index)
        wholes = [
            part for node in nodes.values() if node.operation in _WHOLE for part in node.operands
        ]
        operands = [part for node in nodes.values() for part in node.operands]
        # Longest first, because others may be parts of it. Other operands are in one place only by
        # chance.
        for columns in (*sorted([*wholes, *outputs, *new], key=len, reverse=True), *operands):
            self._plan(columns, nodes)
        for index, node in nodes.items():
            self._emit(index, node)
        written = [(self._at_once(columns), len(columns)) for columns in outputs]
        following = [self._next(columns, place) for place, columns in enumerate(new)]
        shapes = tuple(
            Weight(shape[0], shape[2], shape[1]) if turned else Weight(*shape)
            for shape, turned in (
                (self.graph.weights[index], turned) for index, turned in self.weights
            )
        )
        raw = Program(
            tuple(self.blocks), shapes, tuple(self.instructions), tuple(written), tuple(following)
        )
        kinds: dict[Kind, tuple[int, ...]] = {
            kind: tuple(found) for kind, found in self.given.items()
        }
        return Lowered(allocate(raw), kinds, tuple(self.weights))

    # Places of columns.

    def _give(self, index: int) -> None:
        kind = self.kinds[index]
        known = self.given.setdefault(kind, [])
        self.blocks.append(Block(kind, self.graph.nodes[index].width, len(known)))
        self.homes[index] = (len(self.blocks) - 1, 0)
        known.append(index)

    def _local(self, width: int) -> int:
        self.blocks.append(Block("local", width))
        return len(self.blocks) - 1

    def _fused(self, needed: list[int], results: list[Columns]) -> dict[int, Node]:
        """Return the nodes to compute, with multiplications that only one addition reads fused with
        it.
        """
        graph = self.graph
        nodes = {
            index: graph.nodes[index]
            for index in needed
            if index not in self.kinds and graph.nodes[index].operation != "number"
        }
        readers = np.zeros(len(graph.nodes), np.int64)
        for part in [*results, *(part for node in nodes.values() for part in node.operands)]:
            readers[list(set(graph.places(part).tolist()))] += 1
        for index, node in list(nodes.items()):
            if node.operation != "add":
                continue
            for place in (0, 1):
                factor = graph.place(node.operands[place][0])
                inner = nodes.get(factor)
                if inner is None or inner.operation != "mul" or readers[factor] != 1:
                    continue
                if np.array_equal(node.operands[place], graph.columns(factor)):
                    nodes[index] = replace(
                        node, operation="fma", operands=(*inner.operands, node.operands[1 - place])
                    )
                    del nodes[factor]
                    break
        return nodes

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
            index = self.graph.place(columns[run.low])
            node = nodes.get(index)
            is_all = not run.is_spread and node is not None and run.high - run.low == node.width
            if node is not None and is_all and index not in self.homes and node.operation != "norm":
                self.homes[index] = (block, run.low)

    def _is_adjacent(self, columns: Columns, runs: list[_Run]) -> bool:
        """Return True if the pieces of an operand follow each other."""
        places = [self._read(columns[run.low : run.high], run.is_spread) for run in runs]
        return all(
            _continues(one, other, run.high - run.low)
            for run, one, other in zip(runs, places, places[1:], strict=False)
        )

    def _runs(self, columns: Columns) -> list[_Run]:
        """Return the pieces of an operand; the list is cut off after the limit."""
        if len(columns) == 1:
            return [_Run(0, 1, False)]
        key = columns.tobytes()
        if key not in self._cut:
            self._cut[key] = self._found_runs(columns)
        return self._cut[key]

    def _found_runs(self, columns: Columns) -> list[_Run]:
        places = self.graph.places(columns)
        steps = columns[1:] - columns[:-1]
        kinds = np.where((steps == 1) & (places[1:] == places[:-1]), 1, np.where(steps == 0, 0, -1))
        turns = [*((kinds[1:] != kinds[:-1]).nonzero()[0] + 1).tolist(), len(kinds)]
        runs: list[_Run] = []
        low = 0
        while low < len(columns) and len(runs) <= _PIECES:
            is_one = low == len(columns) - 1 or kinds[low] < 0
            high = low + 1 if is_one else turns[bisect_right(turns, low)] + 1
            runs.append(_Run(low, high, high > low + 1 and bool(kinds[low] == 0)))
            low = high
        return runs

    def _read(self, columns: Columns, is_spread: bool) -> Operand:
        """Return the place of a piece of an operand."""
        index = self.graph.place(columns[0])
        node = self.graph.nodes[index]
        if node.operation == "number":
            return Operand(-1, number=node.number)
        block, start = self.homes[index]
        return Operand(block, start + int(columns[0]) - self.graph.starts[index], is_spread)

    def _at_once(self, columns: Columns) -> Operand:
        """Return an operand in one place, joined if necessary."""
        runs = self._runs(columns)
        first = self.graph.nodes[self.graph.place(columns[0])]
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
        indexes = np.unique(graph.places(columns)).tolist()
        source = np.concatenate([graph.columns(index) for index in indexes])
        if np.array_equal(
            source, columns
        ):  # whole results in the order in which they were computed
            return self._joined(indexes, columns)
        place = self._at_once(source)
        picked: Columns = np.searchsorted(source, columns)
        block = self._together[key] = self._local(len(columns))
        self._add(
            "gather", (Operand(block),), (place,), len(columns), columns=tuple(picked.tolist())
        )
        return block

    def _joined(self, indexes: list[int], columns: Columns) -> int:
        block = self._local(len(columns))
        start = 0
        self._together[columns.tobytes()] = block
        for index in indexes:
            width = self.graph.nodes[index].width
            self._add(
                "copy",
                (Operand(block, start),),
                (self._read(self.graph.columns(index), False),),
                width,
            )
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
        segments, epsilon = (1, 0.0) if node is None else (node.segments, node.epsilon)
        self.instructions.append(
            Instruction(operation, results, operands, width, segments, epsilon, weight, columns)
        )

    def _emit(self, index: int, node: Node) -> None:
        if index not in self.homes:
            self.homes[index] = (self._local(node.width), 0)
        block, start = self.homes[index]
        if node.operation in _WHOLE:
            is_product = node.operation == "product"
            operands = tuple(
                self._begin(part) if is_product and not place else self._at_once(part)
                for place, part in enumerate(node.operands)
            )
            results = [Operand(block, start)]
            if node.operation == "norm":
                results.append(Operand(block, start + node.span))
            self._add(node.operation, tuple(results), operands, node.span, node)
            return
        name = _SAME.get(node.operation, node.operation)
        read = node.operands[:1] if node.operation == "through" else node.operands
        parts = [self._pieces(part) for part in read]
        bounds = sorted({run.high for _, runs in parts for run in runs})
        if len(bounds) > _PIECES:
            whole = tuple(self._whole_or_one(columns, runs) for columns, runs in parts)
            self._add(name, (Operand(block, start),), whole, node.width)
            return
        pieces: list[tuple[int, tuple[Operand, ...]]] = []
        low = 0
        for high in bounds:
            operands = tuple(self._piece(columns, runs, low, high) for columns, runs in parts)
            # A piece that continues the previous one is merged with it.
            begin = pieces[-1][0] if pieces else 0
            if not pieces or not all(
                map(partial(_continues, width=low - begin), pieces[-1][1], operands)
            ):
                pieces.append((low, operands))
            low = high
        ends = [begin for begin, _ in pieces[1:]] + [node.width]
        for (begin, operands), end in zip(pieces, ends, strict=True):
            self._add(name, (Operand(block, start + begin),), operands, end - begin)

    def _pieces(self, columns: Columns) -> tuple[Columns, list[_Run]]:
        """Return an operand in few pieces; many are joined first."""
        runs = self._runs(columns)
        if len(runs) <= _PIECES:
            return columns, runs
        place = self._at_once(columns)
        self._moved[columns.tobytes()] = place
        return columns, [_Run(0, len(columns), False)]

    def _whole_or_one(self, columns: Columns, runs: list[_Run]) -> Operand:
        if len(runs) == 1 and columns.tobytes() not in self._moved:
            return self._read(columns, runs[0].is_spread)
        return self._moved.get(columns.tobytes()) or self._at_once(columns)

    def _piece(self, columns: Columns, runs: list[_Run], low: int, high: int) -> Operand:
        run = next(run for run in runs if run.low <= low and high <= run.high)
        moved = self._moved.get(columns.tobytes())
        if moved is not None:
            return moved._replace(start=moved.start + low)
        return self._read(columns[low:high], run.is_spread and high - low > 1)

    def _next(self, columns: Columns, place: int) -> Operand:
        """Return the place of a state's next value; another state is copied, because it is replaced
        too.
        """
        found = self._at_once(columns)
        block = self.blocks[found.block]
        if block.kind == "state" and (block.index, found.start) != (place, 0):
            local = self._local(len(columns))
            self._add("copy", (Operand(local),), (found,), len(columns))
            return Operand(local)
        return found


_ROWS = ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward", "gather", "product")
_EACH = frozenset(OPERATIONS) - frozenset(_ROWS)


def allocate(program: Program) -> Program:
    """Return the program with locals shared by values that are not alive together; results keep
    their own.
    """
    end = len(program.instructions)
    # Results of a step have their own blocks, so that they can be computed in place. So have
    # products of elements: the kernels compute them before the loop if nothing else writes there.
    last = {
        place.block: end
        for place in (*program.next_states, *(place for place, _ in program.outputs))
    }
    last |= {
        one.results[0].block: end
        for one in program.instructions
        if _reads_only_elements(program, one)
    }
    left = frozenset(last)
    for index in range(end - 1, -1, -1):
        instruction = program.instructions[index]
        for place in (*instruction.operands, *instruction.results):
            last.setdefault(place.block, index)
    blocks = [block for block in program.blocks if block.kind != "local"]
    kept = [index for index, block in enumerate(program.blocks) if block.kind != "local"]
    home = {old: new for new, old in enumerate(kept)}
    free: list[int] = []
    for index, instruction in enumerate(program.instructions):
        for place in instruction.results:
            if place.block in home:
                continue
            width = program.blocks[place.block].width
            is_left = place.block in left
            replaced = None if is_left else _replaced(program, instruction, last, index)
            if replaced is not None:
                home[place.block] = home[replaced]
                last[replaced] = -1
                continue
            fitting = [] if is_left else [block for block in free if blocks[block].width >= width]
            if fitting:
                found = min(fitting, key=lambda block: blocks[block].width)
                free.remove(found)
            else:
                blocks.append(Block("local", width))
                found = len(blocks) - 1
            home[place.block] = found
        ended = {
            place.block
            for place in (*instruction.operands, *instruction.results)
            if last[place.block] == index
        }
        free += [
            home[block] for block in ended if block >= 0 and program.blocks[block].kind == "local"
        ]

    def moved(places: Iterable[Operand]) -> tuple[Operand, ...]:
        return tuple(
            [it if it.block < 0 else Operand(home[it.block], it.start, it.spread) for it in places]
        )

    instructions = [
        replace(
            instruction, results=moved(instruction.results), operands=moved(instruction.operands)
        )
        for instruction in program.instructions
    ]
    written = tuple([(moved([place])[0], width) for place, width in program.outputs])
    return Program(
        tuple(blocks), program.weights, tuple(instructions), written, moved(program.next_states)
    )


def _reads_only_elements(program: Program, instruction: Instruction) -> bool:
    """Return True for a product that does not depend on the step before."""
    kinds = {program.blocks[place.block].kind for place in instruction.operands if place.block >= 0}
    return instruction.operation == "product" and kinds <= {"element", "vector"}


def _replaced(
    program: Program, instruction: Instruction, last: dict[int, int], index: int
) -> int | None:
    """Return an operand that the result may overwrite: a whole local that is not read again."""
    (result, *others) = instruction.results
    width = program.blocks[result.block].width
    if others or instruction.operation not in _EACH or result.start or instruction.width != width:
        return None
    for place in instruction.operands:
        if place.block < 0 or place.block == result.block or place.start or place.spread:
            continue
        block = program.blocks[place.block]
        spread = any(
            other.block == place.block and other != place for other in instruction.operands
        )
        if (
            block.kind == "local"
            and block.width == width
            and last[place.block] == index
            and not spread
        ):
            return place.block
    return None
