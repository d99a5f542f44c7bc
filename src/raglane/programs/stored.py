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
from raglane.programs.graph import Columns, Graph, Node, Result, Unkept
from raglane.programs.parameters import Call, Known, ParameterOps, Slices, filled
from raglane.programs.rules import RULES
from raglane.programs.step import Step, default_modes
from raglane.programs.trace import Trace

# The folder in the user's cache.
_KIND = "programs"
_MOST_COLUMNS = 1 << 22
_MOST_NUMBERS = 1 << 26
_MOST_MADE = 1 << 28
# Operations on parameters, which neither read files nor write to tensors.
_OPERATIONS = frozenset((*RULES, "_weight_norm_interface"))
_NAMED: dict[str, Any] = {
    str(part): part
    for part in (
        *(
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int32,
            torch.int64,
            torch.bool,
        ),
        *(torch.contiguous_format, torch.preserve_format, torch.device("cpu")),
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
        "moved": None if ops.moved is None else [[part.pieces, part.shape] for part in ops.moved],
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
                Call(_function(name, overload) if name else None, tuple(args), dict(kwargs), count)
                for name, overload, args, kwargs, count in content["calls"]
            ]
            moved = content["moved"] and [Slices(*map(_tuples, part)) for part in content["moved"]]
            if calls:
                _check_sizes(calls, [step.converted(part.detach()) for part in step.leaves])
            vectors, weights = content["known"]
            ops = ParameterOps(calls, vectors, weights, moved)
            return Trace(_Reader(content).result(step), ops, False, content["prepares"])
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


def _tuples(part: Any) -> Any:
    return tuple(map(_tuples, part)) if isinstance(part, list) else part


# ---- the graph -----------------------------------------------------------------------------------


def _runs(columns: Columns) -> list[list[int]]:
    """Return columns as runs of first, step and count."""
    found: list[list[int]] = []
    place = 0
    count = len(columns)
    steps = np.diff(columns)
    turns = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))  # where steps change
    while place < count - 1:
        end = int(turns[np.searchsorted(turns, place, side="right")])
        found.append([int(columns[place]), int(steps[place]), end - place + 1])
        place = end + 1
    return found if place >= count else [*found, [int(columns[place]), 0, 1]]


class _Reader:
    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self._graph = Graph()
        self._left = _MOST_NUMBERS  # so that a short text cannot allocate much memory

    def result(self, step: Step) -> Result:
        content = self._content
        graph = self._graph
        graph.weights = [_tuples(shape) for shape in content["shapes"]]
        count = 0
        for operation, operands, width, segments, *rest in content["nodes"]:
            width = _whole(width, 1, _MOST_COLUMNS - count)
            columns = tuple([self._columns(part, count) for part in operands])
            node = Node(operation, columns, width, _whole(segments, 1, width), *rest)
            if operation == "number":
                _check(graph.number(node.number) == count)  # each number must occur once
            else:
                graph.add(node)
            count += width
        given = content["given"]
        for nodes, kind in zip(given, ("element", "state", "vector"), strict=True):
            _check(
                sorted(nodes)
                == [index for index, node in enumerate(graph.nodes) if node.operation == kind]
            )
        output, *new = (self._columns(part, count) for part in (content["output"], *content["new"]))
        found = [*given[:2], output, *new]
        wanted = [len(step.widths), len(step.sizes), step.output, *step.sizes]
        _check([*map(len, found)] == wanted)
        elements, states, vectors = given
        return Result(graph, elements, states, vectors, output, new)

    def _columns(self, runs: Any, before: int) -> Columns:
        """Return the columns of runs, all below ``before``."""
        self._left -= sum(_whole(count, 1, self._left) for _, _, count in runs)
        parts = [first + step * np.arange(count) for first, step, count in runs]
        found = np.concatenate(parts) if parts else np.empty(0, np.int64)
        _check(found.dtype == np.int64 and bool(((found >= 0) & (found < before)).all()))
        return found


# ---- operations on parameters --------------------------------------------------------------------


def _call_written(call: Call) -> list[Any]:
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


def _tagged(part: Any) -> Any:
    """Return a value that JSON does not have, with a tag."""
    if isinstance(part, np.ndarray):
        return _runs(part)
    if type(part) is Known:
        return {"$known": part.index}
    if isinstance(part, Tensor):
        return {"$tensor": [part.dtype, part.shape, part.reshape(-1).tolist()]}
    if str(part) in _NAMED:
        return {"$named": str(part)}
    raise Unkept(f"it passes a {type(part).__name__} to torch")


_TAGS: dict[str, Callable[[Any], Any]] = {
    "$known": lambda index: Known(_whole(index, 0, 1 << 20)),
    "$tensor": lambda given: torch.tensor(given[2], dtype=given[0], device="cpu").reshape(given[1]),
    "$named": _NAMED.__getitem__,
}


def _untagged(part: dict[str, Any]) -> Any:
    ((tag, given),) = part.items() if len(part) == 1 else (("", None),)
    return _TAGS[tag](given) if tag in _TAGS else part


def _check_sizes(calls: Sequence[Call], leaves: Sequence[Tensor]) -> None:
    """Raise Unkept if calls would allocate much memory, by running them without numbers."""
    meta = torch.device("meta")
    known = [part.to(meta) for part in leaves]
    for call in calls:
        before = len(known)
        args = tuple([part.to(meta) if isinstance(part, Tensor) else part for part in call.args])
        kwargs = {
            name: meta if isinstance(part, torch.device) else part
            for name, part in call.kwargs.items()
        }
        given = [
            filled(part, known)
            for part in (*args, *kwargs.values())
            if isinstance(part, Known | Tensor)
        ]
        if call.function and given and torch.Tag.pointwise in call.function.tags:
            # torch needs 0.8 s to import what runs it.
            known.append(given[-1].new_empty(torch.broadcast_tensors(*given)[-1].shape))
        else:
            Call(call.function, args, kwargs).run(known)
        _check(
            len(known) - before == call.count
            and all(part.numel() <= _MOST_MADE for part in known[before:])
        )
