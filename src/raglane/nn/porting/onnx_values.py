"""The values of an ONNX graph that follow from constants and from sizes of its inputs.

Exporters compute initial states and lengths from the shape of the input, e.g. an Expand of zeros to
the number of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from raglane._utils.messages import quote
from raglane.errors import ArgumentError, RaglaneError
from raglane.nn.porting.onnx_file import Message, OnnxGraph, OnnxNode
from raglane.nn.porting.onnx_rules import (
    RULES,
    Constant,
    NodeCall,
    UnsupportedError,
    integers_of,
)

Times = Mapping[str, tuple[int, int]]
"""By the name of a value: its axis of steps, and the number of steps to assume."""


@dataclass(frozen=True)
class Computed:
    """A value that is not constant.

    Attributes:
        reason: how the value is computed, for messages.
        from_input: True if it depends on numbers of an input of the model.
        is_input: True if it is an input of the model, or a part of one, in any layout.
    """

    reason: str
    from_input: bool
    is_input: bool = False


Value: TypeAlias = Constant | Computed


class Values:
    """The values of a graph, computed when they are read.

    Args:
        graph: the graph.
        times: numbers of steps to assume.
    """

    def __init__(self, graph: OnnxGraph, times: Times | None = None) -> None:
        self._graph = graph
        self._times = times or {}
        self._values: dict[str, Value] = {}

    def of(self, name: str) -> Value:
        """Return a value. A stack in place of recursion: a chain of nodes may be long."""
        entered: set[str] = set()
        stack = [name]
        while stack:
            current = stack[-1]
            node = self._graph.producers.get(current)
            if current in self._values:
                stack.pop()
            elif node is None:
                self._values[current] = self._end(current)
            elif missing := [name for name in node.inputs if name and name not in self._values]:
                if current in entered:
                    rule = "computed from constants and inputs"
                    raise ArgumentError(
                        f"source: {current}", "a circle of nodes", rule, "check the model"
                    )
                entered.add(current)
                stack += missing
            else:
                self._compute(node)
        return self._values[name]

    def _end(self, name: str) -> Value:
        """Return a value that no node computes."""
        if name in self._graph.stored:
            return Constant(self._graph.tensor_of(self._graph.stored[name]))
        if name in self._graph.inputs:
            return Computed(f"the input {quote(name)}", from_input=True, is_input=True)
        return Computed(f"{quote(name)}, which the model does not contain", from_input=False)

    def _compute(self, node: OnnxNode) -> None:
        """Compute the outputs of a node whose inputs are computed."""
        results: Sequence[Value]
        try:
            results = self._results(node)
        except RaglaneError:
            raise
        except (UnsupportedError, *_ERRORS):
            results = []
        rest = [_unsupported(node)] * (len(node.outputs) - len(results))
        self._values |= zip(node.outputs, [*results, *rest], strict=False)

    def _results(self, node: OnnxNode) -> Sequence[Value]:
        """Return the outputs of a node, of which the last ones may be missing."""
        inputs: list[Constant | None] = []
        computed = []
        for name in node.inputs:
            value = self._values[name] if name else None
            if isinstance(value, Computed):
                computed.append(value)
            else:
                inputs.append(value)
        if computed:
            if node.operator in ("Shape", "Size"):
                return [self._shape_of(node)]
            return [_derived(node, computed)] * len(node.outputs)
        attributes = {
            name: self._graph.tensor_of(value) if isinstance(value, Message) else value
            for name, value in node.attributes.items()
        }
        rule = RULES.get(node.operator)
        if rule is None:
            return []
        result = rule(NodeCall(attributes, inputs, len(node.outputs)))
        return result if isinstance(result, list) else [result]

    def _shape_of(self, node: OnnxNode) -> Value:
        """Return the shape of a value that is not constant."""
        name = node.inputs[0]
        shape = self._graph.shapes.get(name)
        sizes = [size if isinstance(size, int) and size >= 0 else math.nan for size in shape or []]
        if name in self._times:
            axis, steps = self._times[name]
            sizes = sizes or [math.nan] * 3
            sizes[axis] = steps
        start = node.attributes.get("start", 0)
        end = node.attributes.get("end")
        if node.operator == "Size":
            return Constant(torch.tensor(math.nan, dtype=torch.float64, device="cpu"))
        if sizes:
            return Constant(integers_of(sizes[start:end]))
        if end is not None and 0 <= start < end:
            return Constant(integers_of([math.nan] * (end - start)))
        return Constant(integers_of([math.nan]), {0})


_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
_LAYOUT = {
    *("Identity", "Cast", "Transpose", "Squeeze", "Unsqueeze", "Reshape", "Flatten"),
    *("Slice", "Split", "Gather"),
}


def _derived(node: OnnxNode, inputs: list[Computed]) -> Computed:
    """Return the result of a node of which some inputs are computed."""
    first = next((value for value in inputs if value.from_input), inputs[0])
    if node.operator in _LAYOUT:
        return replace(first, is_input=first.is_input and len(inputs) == 1)
    reason = f"the result of {node.operator}" if first.from_input else first.reason
    return Computed(reason, first.from_input)


def _unsupported(node: OnnxNode) -> Computed:
    """Return the result of a node that is not evaluated."""
    return Computed(f"the result of {node.operator}", from_input=False)
