"""A trace as text and back: what a file may hold of it, and what must hold of a file before anybody believes it.

A file can be anything: old, cut off, or written by somebody with another idea. So all that is read is checked: kinds,
counts, places, shapes. What was checked is a graph in which each node reads nodes before it, and it is compared with
torch before its first use as any other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raglane.programs.graph import SOURCES, Columns, Graph, Node, Result, Unkept
from raglane.programs.known import Moved
from raglane.programs.program import OPERATIONS
from raglane.programs.stored_calls import MOST_MADE, call_read, call_written, check, shapes_of, whole
from raglane.programs.trace import Trace

__all__ = ["Shapes", "read", "written"]

_MOST_NODES, _MOST_COLUMNS, _MOST_NUMBERS, _MOST_CALLS = 1 << 14, 1 << 22, 1 << 26, 1 << 12
_ROWS = ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward", "product")
_EACH = {name: count for name, count in OPERATIONS.items() if name not in (*_ROWS, "gather")}
_EACH |= {"at_least": 2, "at_most": 2, "stop": 1, "through": 2}


class Shapes(NamedTuple):
    """What a trace must fit.

    Attributes:
        leaves: the parameters, in the dtype that is computed in.
        elements: columns of each tensor that is given for each element; -1 for any.
        sizes: of the states.
        output: columns of the output.
        dtype: that numbers are computed in.
    """

    leaves: Sequence[Tensor]
    elements: tuple[int, ...]
    sizes: tuple[int, ...]
    output: int
    dtype: torch.dtype


def written(key: str, prepares: bool, trace: Trace) -> str:
    """A trace as text."""
    if trace.reads_itself:
        raise Unkept("it reaches a parameter by another way than its module")
    result, graph = trace.result, trace.result.graph
    content: dict[str, Any] = {
        "key": key,
        "prepares": prepares,
        "nodes": [_node_written(node) for node in graph.nodes],
        "shapes": [list(shape) for shape in graph.weights],
        "elements": result.elements,
        "states": result.states,
        "vectors": result.vectors,
        "output": _runs(result.output),
        "new": [_runs(columns) for columns in result.new],
    }
    if trace.moved is not None:
        content["moved"] = [[list(map(list, part.pieces)), list(part.shape)] for part in trace.moved]
    else:
        content["calls"] = [call_written(call) for call in trace.calls]
        content["known"] = [list(trace.vectors), list(trace.weights)]
    body = json.dumps(content, separators=(",", ":"))
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n"


def read(text: str, key: str, shapes: Shapes) -> tuple[bool, Trace]:
    """A trace from text."""
    try:
        digest, body, rest = text.split("\n")
        if rest or hashlib.sha256(body.encode()).hexdigest() != digest:
            raise Unkept("it was changed")
        return _Reader(json.loads(body), shapes).read(key)
    except Unkept:
        raise
    except Exception as error:  # whatever is in it, it is no trace
        raise Unkept(f"{type(error).__name__}: {error}") from error


# ---- columns ------------------------------------------------------------------------------------------------------


def _runs(columns: Columns) -> list[int]:
    """Columns as runs of first, step and count, one after the other."""
    columns = np.asarray(columns, np.int64)
    found: list[int] = []
    place, count = 0, len(columns)
    steps = np.diff(columns)
    turns = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))  # where steps change
    while place < count:
        if place == count - 1:
            found += int(columns[place]), 0, 1
            break
        end = int(turns[np.searchsorted(turns, place, side="right")])
        found += int(columns[place]), int(steps[place]), end - place + 1
        place = end + 1
    return found


class _Columns:
    """Reads columns, and counts them, so that a short text cannot ask for much memory."""

    def __init__(self) -> None:
        self._left = _MOST_NUMBERS

    def read(self, runs: Any, before: int, width: int) -> Columns:
        """``width`` columns, all below ``before``."""
        check(type(runs) is list and len(runs) % 3 == 0)
        counts = [whole(count, 1, width) for count in runs[2::3]]
        check(sum(counts) == width)
        self._left -= width
        check(self._left >= 0)
        parts = []
        for first, step, count in zip(runs[0::3], runs[1::3], counts, strict=True):
            last = whole(first, 0, before - 1) + whole(step, -before, before) * (count - 1)
            whole(last, 0, before - 1)
            parts.append(np.arange(count, dtype=np.int64) * step + first)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _real(number: Any) -> float:
    check(type(number) is float)
    return float(number)


def _width(runs: Any) -> int:
    """How many columns runs say that there are."""
    check(type(runs) is list and len(runs) % 3 == 0)
    return sum(whole(count, 1, _MOST_COLUMNS) for count in runs[2::3])


# ---- nodes --------------------------------------------------------------------------------------------------------


def _node_written(node: Node) -> list[Any]:
    operands = [_runs(part) for part in node.operands]
    numbers = [node.width, node.segments, float(node.epsilon), node.weight, int(node.is_transposed), float(node.number)]
    return [node.operation, operands, *numbers]


class _Reader:
    def __init__(self, content: Any, shapes: Shapes) -> None:
        check(type(content) is dict)
        self._content: dict[str, Any] = content
        self._shapes = shapes
        self._columns = _Columns()
        self._graph = Graph()

    def read(self, key: str) -> tuple[bool, Trace]:
        content, shapes, graph = self._content, self._shapes, self._graph
        prepares = content["prepares"]
        check(content["key"] == key and type(prepares) is bool)
        graph.weights = [self._weight(shape) for shape in self._list("shapes", _MOST_NODES)]
        for given in self._list("nodes", _MOST_NODES):
            self._node(given)
        elements, states = self._sources("element"), self._sources("state")
        # What a cell prepares is as wide as it likes where it is not a part of the step.
        widths = shapes.elements if prepares else (-1, *shapes.elements[1:])
        check(len(elements) == len(widths) and [graph.nodes[index].width for index in states] == list(shapes.sizes))
        check(all(width in (-1, graph.nodes[index].width) for index, width in zip(elements, widths, strict=True)))
        output = self._columns.read(content["output"], self._count, shapes.output)
        check(len(self._list("new", _MOST_NODES)) == len(shapes.sizes))
        pairs = zip(content["new"], shapes.sizes, strict=True)
        new = [self._columns.read(runs, self._count, size) for runs, size in pairs]
        result = Result(graph, elements, states, self._sources("vector"), output, new)
        return prepares, self._known(result)

    def _list(self, name: str, most: int) -> list[Any]:
        found = self._content[name]
        check(type(found) is list and len(found) <= most)
        return found  # type: ignore[no-any-return]

    @property
    def _count(self) -> int:
        """Columns so far."""
        graph = self._graph
        return graph.starts[-1] + graph.nodes[-1].width if graph.nodes else 0

    def _weight(self, shape: Any) -> tuple[int, int, int]:
        groups, rows, depth = (whole(size, 1, 1 << 20) for size in shape)
        check(groups * rows <= 1 << 20 and groups * depth <= 1 << 20)
        return groups, rows, depth

    def _sources(self, kind: str) -> list[int]:
        """The nodes of a kind, which the file has in their order."""
        found = [whole(index, 0, len(self._graph.nodes) - 1) for index in self._list(f"{kind}s", _MOST_NODES)]
        there = [index for index, node in enumerate(self._graph.nodes) if node.operation == kind]
        check(sorted(found) == there)
        return found

    def _node(self, given: Any) -> None:
        operation, runs, width, segments, epsilon, weight, is_transposed, number = given
        before = self._count
        width = whole(width, 1, _MOST_COLUMNS - before)
        segments, transposed = whole(segments, 1, width), bool(whole(is_transposed, 0, 1))
        check(type(operation) is str and type(runs) is list and len(runs) <= 3)
        weight = whole(weight, -1, len(self._graph.weights) - 1)
        node = Node(operation, (), width, segments, _real(epsilon), weight, transposed, _real(number))
        widths = self._widths(node, runs)
        check(len(widths) == len(runs))
        operands = tuple([self._columns.read(part, before, own) for part, own in zip(runs, widths, strict=True)])
        if operation == "number":
            check(self._graph.number(node.number) == before)  # each number once
        else:
            self._graph.add(Node(operation, operands, width, segments, node.epsilon, weight, transposed, node.number))

    def _widths(self, node: Node, runs: list[Any]) -> list[int]:
        """The columns of each operand of a node."""
        operation, width, segments = node.operation, node.width, node.segments
        if operation in SOURCES or operation == "number":
            check(operation != "number" or width == 1)
            return []
        if operation in _EACH:
            return [width] * _EACH[operation]
        check(operation in _ROWS and len(runs) > 0)
        if operation == "product":
            check(node.weight >= 0)
            groups, rows, depth = self._graph.weights[node.weight]
            gives, takes = (depth, rows) if node.is_transposed else (rows, depth)
            check(width == groups * gives)
            return [width, groups * takes]
        if operation in ("row_sum", "row_max"):
            reduced = _width(runs[0])
            check(width == segments and reduced % segments == 0)
            return [reduced]
        if operation == "norm":
            check(width > segments and (width - segments) % segments == 0)
            return [width - segments]
        check(width % segments == 0)
        return [width] if operation == "row_cumsum" else [width, width, segments]

    # What is computed from parameters alone.

    def _known(self, result: Result) -> Trace:
        shapes, graph = self._shapes, self._graph
        wanted = [(graph.nodes[index].width,) for index in result.vectors] + [tuple(shape) for shape in graph.weights]
        if "moved" in self._content:
            parts = self._list("moved", 2 * _MOST_NODES)
            check(len(parts) == len(wanted))
            moved = [self._moved(pieces, own, shape) for (pieces, own), shape in zip(parts, wanted, strict=True)]
            return Trace(result, [], [], [], False, moved)
        calls = [call_read(given) for given in self._list("calls", _MOST_CALLS)]
        made = shapes_of(calls, shapes.leaves)
        known = [[whole(index, 0, len(made) - 1) for index in part] for part in self._list("known", 2)]
        vectors, weights = known
        check(len(vectors) == len(result.vectors) and len(weights) == len(graph.weights))
        for index, shape in zip([*vectors, *weights], wanted, strict=True):
            own = made[index]
            found = (own.numel(),) if len(shape) == 1 else tuple(own.shape)
            check(own.dtype is shapes.dtype and found == shape)
        return Trace(result, calls, vectors, weights, False, None)

    def _moved(self, pieces: Any, shape: Any, wanted: tuple[int, ...]) -> Moved:
        leaves = self._shapes.leaves
        sizes = tuple([whole(size, 1, MOST_MADE) for size in shape])
        count = math.prod(sizes)
        check(len(sizes) <= 8 and type(pieces) is list and 0 < len(pieces) <= _MOST_CALLS)
        check(sizes == wanted if len(wanted) > 1 else count == wanted[0])
        found = []
        for leaf, begin, end in pieces:
            own = leaves[whole(leaf, 0, len(leaves) - 1)]
            check(own.dtype is self._shapes.dtype)
            found.append((leaf, whole(begin, 0, own.numel()), whole(end, 0, own.numel())))
            check(end - begin == count)
        return Moved(tuple(found), sizes)
