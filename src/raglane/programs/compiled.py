"""A traced cell's programs: forward, and backward for the gradients that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raglane.programs.gradients import Reverse
from raglane.programs.graph import Columns, Node
from raglane.programs.lower import Lowered, lower
from raglane.programs.program import Kind
from raglane.programs.trace import Trace

__all__ = ["Backward", "Compiled", "Fetch", "Forward", "Wanted"]


@dataclass(frozen=True)
class Wanted:
    """What a backward pass gets and gives.

    Attributes:
        given_output, given_states: whether there are gradients of the outputs, and of the states of every step.
        elements, unchanged, vectors, weights: of which there are to be gradients, in the order of
            :attr:`Compiled.elements`, and so on.
    """

    given_output: bool
    given_states: bool
    elements: tuple[bool, ...]
    unchanged: tuple[bool, ...]
    vectors: tuple[bool, ...]
    weights: tuple[bool, ...]


@dataclass(frozen=True)
class Fetch:
    """Where columns of every element are found: in an output of a program, or in what was given to it.

    Attributes:
        output: which output; -1 where they were given.
        node: the node that was given.
        start, width: the columns.
    """

    output: int
    node: int
    start: int
    width: int


@dataclass(frozen=True)
class Forward:
    """A forward program.

    Attributes:
        lowered: the program.
        output: where the output is; None where nobody needs it.
        states: where the states of every step are, where they are needed.
        saved: which outputs the backward program reads as which nodes.
    """

    lowered: Lowered
    output: int | None
    states: tuple[int, ...]
    saved: dict[int, int]


@dataclass(frozen=True)
class Backward:
    """A backward program.

    Attributes:
        lowered: the program.
        grad_output: the node of the output's gradients; -1 where there are none.
        grad_states: those of the gradients of the states of every step.
        saved: the nodes that the forward pass must have saved.
        elements, unchanged, vectors: where the gradients of these are, by their place.
        weights: for each product of a weight whose gradient is wanted, the weight, and where the gradient of the
            product's result and its operand are.
        deferred: for each product whose gradient is due after the loop, the weight, where the gradient of the result
            is, and the node and its first column that it is for.
    """

    lowered: Lowered
    grad_output: int
    grad_states: tuple[int, ...]
    saved: tuple[int, ...]
    elements: dict[int, Fetch]
    unchanged: dict[int, Fetch]
    vectors: dict[int, Fetch]
    weights: tuple[tuple[int, Fetch, Fetch], ...]
    deferred: tuple[tuple[int, Fetch, tuple[int, int, int]], ...]


@dataclass
class Compiled:
    """All programs of one traced step.

    Attributes:
        trace: the trace.
        elements: the nodes that are given for each element.
        states: those that are states.
        unchanged: those that are given as states, but which no step changes.
        vectors: those that all rows share.
        order: of each state as the cell has it, whether it changes, and its place among the states or the unchanged.
    """

    trace: Trace
    elements: list[int] = field(init=False)
    states: list[int] = field(init=False)
    unchanged: list[int] = field(init=False)
    vectors: list[int] = field(init=False)
    order: list[tuple[bool, int]] = field(init=False)

    def __post_init__(self) -> None:
        result, graph = self.trace.result, self.trace.result.graph
        self.elements, self.vectors = result.elements, result.vectors
        self.states, self.unchanged, self.order = [], [], []
        self._new: list[Columns] = []
        for node, columns in zip(result.states, result.new, strict=True):
            changes = not np.array_equal(columns, graph.columns(node))
            known = self.states if changes else self.unchanged
            self.order.append((changes, len(known)))
            known.append(node)
            if changes:
                self._new.append(columns)
        self._forwards: dict[tuple[bool, bool, Wanted | None], Forward] = {}
        self._backwards: dict[Wanted, Backward] = {}

    def _kinds(self) -> dict[int, Kind]:
        kinds: dict[int, Kind] = dict.fromkeys(self.elements, "element")
        kinds |= dict.fromkeys(self.states, "state")
        kinds |= dict.fromkeys(self.unchanged, "sequence")
        return kinds | dict.fromkeys(self.vectors, "vector")

    def forward(self, need_output: bool, need_states: bool, wanted: Wanted | None = None) -> Forward:
        """The program of a forward pass.

        Args:
            need_output: whether the outputs are read.
            need_states: whether the states of every step are.
            wanted: what the backward pass that follows is to give; None where none follows.
        """
        key = need_output, need_states, wanted
        if key not in self._forwards:
            self._forwards[key] = self._make_forward(*key)
        return self._forwards[key]

    def _make_forward(self, need_output: bool, need_states: bool, wanted: Wanted | None) -> Forward:
        result, graph = self.trace.result, self.trace.result.graph
        outputs: list[Columns] = []

        def place(columns: Columns) -> int:
            for index, known in enumerate(outputs):
                if np.array_equal(known, columns):
                    return index
            outputs.append(columns)
            return len(outputs) - 1

        output = place(result.output) if need_output else None
        states = tuple(place(columns) for columns in self._new) if need_states else ()
        saved = () if wanted is None else self.backward(wanted).saved
        kept = {node: place(graph.columns(node)) for node in saved if node not in self.elements}
        lowered = lower(graph, outputs, self._new, self._kinds(), self.states)
        return Forward(lowered, output, states, kept)

    def backward(self, wanted: Wanted) -> Backward:
        """The program of a backward pass."""
        if wanted not in self._backwards:
            self._backwards[wanted] = _Backward(self, wanted).make()
        return self._backwards[wanted]


class _Backward:
    """How a backward program is made."""

    def __init__(self, compiled: Compiled, wanted: Wanted) -> None:
        self.compiled, self.wanted = compiled, wanted
        self.graph = compiled.trace.result.graph.copy()
        self.outputs: list[Columns] = []
        self.fetched: set[int] = set()
        self._old = len(self.graph.nodes)

    def make(self) -> Backward:
        compiled, wanted, graph = self.compiled, self.wanted, self.graph
        result = compiled.trace.result
        grad_output, seeds = -1, []
        if wanted.given_output:
            columns = graph.add(Node("element", (), len(result.output)))
            grad_output = len(graph.nodes) - 1
            seeds.append((result.output, columns))
        grads, grad_states = [], []
        for columns in compiled._new:
            grads.append(len(graph.nodes))
            seeds.append((columns, graph.add(Node("state", (), len(columns)))))
        for columns in compiled._new if wanted.given_states else ():
            grad_states.append(len(graph.nodes))
            seeds.append((columns, graph.add(Node("element", (), len(columns)))))
        reverse = self._reverse(seeds)
        # What comes in is as many columns as a result: a gradient of its own for each.
        self.kinds: dict[int, Kind] = compiled._kinds()
        self.kinds |= dict.fromkeys(compiled.states, "element")
        products = [index for index in range(self._old) if graph.nodes[index].operation == "product"]
        self.kinds |= dict.fromkeys(products, "element")
        self.kinds |= dict.fromkeys(grads, "state")
        self.kinds |= dict.fromkeys([*grad_states, *([grad_output] if wanted.given_output else [])], "element")
        weights = tuple(
            (part.weight, self._fetch(part.result), self._fetch(part.operand)) for part in reverse.weight_gradients
        )
        deferred = []
        for part in reverse.deferred:
            found = self._fetch(part.result)
            node = int(graph.places(part.operand[:1])[0])
            start = int(part.operand[0]) - graph.starts[node]
            deferred.append((part.weight, found, (node, start, len(part.operand))))
        elements = self._totals(reverse, compiled.elements, wanted.elements)
        unchanged = self._totals(reverse, compiled.unchanged, wanted.unchanged)
        vectors = self._totals(reverse, compiled.vectors, wanted.vectors)
        new = [reverse.total(node) for node in compiled.states]
        lowered = lower(graph, self.outputs, new, self.kinds, grads)
        read = {node for node in (*lowered.given.get("element", ()), *self.fetched) if node < self._old}
        return Backward(
            lowered,
            grad_output,
            tuple(grad_states),
            tuple(sorted(read)),
            elements,
            unchanged,
            vectors,
            weights,
            tuple(deferred),
        )

    def _reverse(self, seeds: Sequence[tuple[Columns, Columns]]) -> Reverse:
        compiled, wanted = self.compiled, self.wanted
        pairs = (
            (compiled.elements, wanted.elements),
            (compiled.unchanged, wanted.unchanged),
            (compiled.vectors, wanted.vectors),
        )
        nodes = {node for known, wishes in pairs for node, is_wanted in zip(known, wishes, strict=True) if is_wanted}
        weights = {index for index, is_wanted in enumerate(wanted.weights) if is_wanted}
        reverse = Reverse(self.graph, nodes | set(compiled.states), weights, set(compiled.elements))
        reverse.run(seeds)
        return reverse

    def _totals(self, reverse: Reverse, nodes: list[int], wishes: tuple[bool, ...]) -> dict[int, Fetch]:
        zero = self.graph.number(0.0)
        found = {}
        for place, (node, is_wanted) in enumerate(zip(nodes, wishes, strict=True)):
            total = reverse.total(node)
            if is_wanted and (total != zero).any():
                found[place] = self._fetch(total)
        return found

    def _fetch(self, columns: Columns) -> Fetch:
        """Where columns will be found after the loop: what is not there already becomes an output."""
        places = np.unique(self.graph.places(columns))
        is_row = bool((np.diff(columns) == 1).all())
        if len(places) == 1 and is_row and self.kinds.get(int(places[0])) == "element":
            node = int(places[0])
            self.fetched.add(node)
            return Fetch(-1, node, int(columns[0]) - self.graph.starts[node], len(columns))
        for index, known in enumerate(self.outputs):
            start = np.flatnonzero(known == columns[0])
            if len(start) and np.array_equal(known[start[0] : start[0] + len(columns)], columns):
                return Fetch(index, -1, int(start[0]), len(columns))
        self.outputs.append(columns)
        return Fetch(len(self.outputs) - 1, -1, 0, len(columns))
