"""Traces on the disk: a digest, and JSON of the graph and of the operations on parameters.

A file may be old, truncated or malicious. Reading allocates no more memory than a trace needs,
nodes read only earlier nodes, and only operations of programs are called. Other errors are found
when the program is compared with torch before its first use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils import caches
from raglane.programs.graph import Columns, Graph, Node, StepGraph, Unkept
from raglane.programs.parameters import Computation, Known, ParameterOps, Slices, filled
from raglane.programs.rules import RULES
from raglane.programs.step import Step, default_modes
from raglane.programs.trace import Trace

# The folder in the user's cache.
_KIND = "programs"
_MOST_COLUMNS = 1 << 22  # of a graph
_MOST_NUMBERS = 1 << 26  # of all operands of a graph
_MOST_MADE = 1 << 28  # numbers of a tensor computed from parameters
# Operations on parameters, which neither read files nor write to tensors.
_OPERATIONS = frozenset((*RULES, "_weight_norm_interface"))
_NAMED: dict[str, Any] = {
    str(value): value
    for value in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.contiguous_format,
        torch.preserve_format,
        torch.device("cpu"),
    )
}


def load(step: Step, key: str) -> Trace | None:
    """Return the trace that was saved under a key; None without a valid one for this step."""
    text = caches.load(_KIND, key)
    try:
        return None if text is None else read(text, key, step)
    except Unkept:
        return None


def save(step: Step, key: str, trace: Trace) -> None:
    """Write a trace; raises Unkept with the reason if it cannot be written and read again."""
    text = written(key, trace)
    read(text, key, step)
    if reason := caches.save(_KIND, key, text):
        raise Unkept(reason)


def remove(key: str) -> None:
    """Remove the trace that was saved under a key."""
    caches.save(_KIND, key, "")


def written(key: str, trace: Trace) -> str:
    """Return a trace as text."""
    if trace.reads_itself:
        raise Unkept("it reaches a parameter by another way than its module")
    result = trace.result
    ops = trace.parameters
    content = {
        "key": key,
        "prepares": trace.prepares,
        "nodes": [[*vars(node).values()] for node in result.graph.nodes],
        "shapes": result.graph.weights,
        "given": [result.elements, result.states, result.vectors],
        "output": result.output,
        "new": result.new,
        "calls": [_call_written(call) for call in ops.calls],
        "known": [ops.vectors, ops.weights],
        "moved": None
        if ops.moved is None
        else [[slices.pieces, slices.shape] for slices in ops.moved],
    }
    body = json.dumps(content, separators=(",", ":"), default=_tagged)
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n"


def read(text: str, key: str, step: Step) -> Trace:
    """Return a trace from text; raises Unkept if it is not one of this step."""
    try:
        digest, body, rest = text.split("\n")
        _check(not rest and hashlib.sha256(body.encode()).hexdigest() == digest)
        with default_modes(grad=False):
            content = json.loads(body, object_hook=_untagged)
            _check(content["key"] == key and type(content["prepares"]) is bool)
            calls = [
                Computation(
                    _function(name, overload) if name else None, tuple(args), dict(kwargs), count
                )
                for name, overload, args, kwargs, count in content["calls"]
            ]
            moved = content["moved"] and [
                Slices(*map(_tuples, pieces)) for pieces in content["moved"]
            ]
            if calls:
                _check_sizes(calls, [step.converted(pieces.detach()) for pieces in step.leaves])
            vectors, weights = content["known"]
            ops = ParameterOps(calls, vectors, weights, moved)
            return Trace(_ByteReader(content).result(step), ops, False, content["prepares"])
    except Unkept:
        raise
    except Exception as error:  # an invalid file may cause any error
        raise Unkept(f"{type(error).__name__}: {error}") from error


def _check(holds: bool) -> None:
    if not holds:
        raise Unkept("its parts do not fit together")


def _whole(number: Any, least: int, most: int) -> int:
    _check(type(number) is int and least <= number <= most)
    return int(number)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# ---- the graph -----------------------------------------------------------------------------------


def _runs(columns: Columns) -> list[list[int]]:
    """Return columns as runs of first, step and count."""
    runs: list[list[int]] = []
    first = 0
    count = len(columns)
    steps = np.diff(columns)
    turns = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))  # where steps change
    while first < count - 1:
        end = int(turns[np.searchsorted(turns, first, side="right")])
        runs.append([int(columns[first]), int(steps[first]), end - first + 1])
        first = end + 1
    return runs if first >= count else [*runs, [int(columns[first]), 0, 1]]


class _ByteReader:
    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._graph = Graph()
        self._left = _MOST_NUMBERS  # so that a short text cannot allocate much memory

    def result(self, step: Step) -> StepGraph:
        content = self._content
        graph = self._graph
        graph.weights = [_tuples(shape) for shape in content["shapes"]]
        count = 0
        for operation, operands, width, segments, *rest in content["nodes"]:
            width = _whole(width, 1, _MOST_COLUMNS - count)
            columns = tuple([self._columns(operand, count) for operand in operands])
            node = Node(operation, columns, width, _whole(segments, 1, width), *rest)
            if operation == "number":
                _check(graph.number(node.number) == count)  # each number must occur once
            else:
                graph.add(node)
            count += width
        inputs = content["given"]
        for nodes, kind in zip(inputs, ("element", "state", "vector"), strict=True):
            of_kind = [index for index, node in enumerate(graph.nodes) if node.operation == kind]
            _check(sorted(nodes) == of_kind)
        elements, states, vectors = inputs
        output = self._columns(content["output"], count)
        new = [self._columns(state, count) for state in content["new"]]
        sizes = [len(step.widths), len(step.sizes), step.output, *step.sizes]
        _check([*map(len, (elements, states, output, *new))] == sizes)
        return StepGraph(graph, elements, states, vectors, output, new)

    def _columns(self, runs: Any, before: int) -> Columns:
        """Return the columns of runs, all below ``before``."""
        self._left -= sum(_whole(count, 1, self._left) for _, _, count in runs)
        pieces = [first + step * np.arange(count) for first, step, count in runs]
        columns = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        _check(columns.dtype == np.int64 and bool(((columns >= 0) & (columns < before)).all()))
        return columns


# ---- operations on parameters --------------------------------------------------------------------


def _call_written(call: Computation) -> list[Any]:
    """Return an operation with its overload, arguments and number of results; a constant has no
    name.
    """
    name, _, overload = str(call.function or "").removeprefix("aten.").partition(".")
    if name:
        _function(name, overload)
    return [name, overload, call.args, call.kwargs, call.count]


def _function(name: str, overload: str) -> Any:
    if name not in _OPERATIONS:
        raise Unkept(f"it computes {name} from its parameters")
    function = getattr(getattr(torch.ops.aten, name), overload)
    if function._schema.is_mutable:
        raise Unkept(f"it changes a computed value in place, by {name}")
    return function


def _tagged(value: Any) -> Any:
    """Return a value that JSON does not have, with a tag."""
    if isinstance(value, np.ndarray):
        return _runs(value)
    if type(value) is Known:
        return {"$known": value.index}
    if isinstance(value, Tensor):
        return {"$tensor": [value.dtype, value.shape, value.reshape(-1).tolist()]}
    if str(value) in _NAMED:
        return {"$named": str(value)}
    raise Unkept(f"it passes a {type(value).__name__} to torch")


def _tensor(dtype: torch.dtype, shape: list[int], numbers: list[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu").reshape(shape)


_TAGS: dict[str, Callable[[Any], Any]] = {
    "$known": lambda index: Known(_whole(index, 0, 1 << 20)),
    "$tensor": lambda content: _tensor(*content),
    "$named": _NAMED.__getitem__,
}


def _untagged(value: dict[str, Any]) -> Any:
    ((tag, content),) = value.items() if len(value) == 1 else (("", None),)
    return _TAGS[tag](content) if tag in _TAGS else value


def _check_sizes(calls: Sequence[Computation], leaves: Sequence[Tensor]) -> None:
    """Raise Unkept if calls would allocate much memory, by running them without numbers."""
    meta = torch.device("meta")
    tensors = [argument.to(meta) for argument in leaves]
    for call in calls:
        before = len(tensors)
        args = tuple([item.to(meta) if isinstance(item, Tensor) else item for item in call.args])
        kwargs = {
            name: meta if isinstance(argument, torch.device) else argument
            for name, argument in call.kwargs.items()
        }
        operands = [
            filled(argument, tensors)
            for argument in (*args, *kwargs.values())
            if isinstance(argument, Known | Tensor)
        ]
        if call.function and operands and torch.Tag.pointwise in call.function.tags:
            # torch needs 0.8 s to import what runs it.
            tensors.append(operands[-1].new_empty(torch.broadcast_tensors(*operands)[-1].shape))
        else:
            Computation(call.function, args, kwargs).run(tensors)
        _check(
            len(tensors) - before == call.count
            and all(argument.numel() <= _MOST_MADE for argument in tensors[before:])
        )
