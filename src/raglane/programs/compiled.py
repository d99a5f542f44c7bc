"""The programs of a traced step: forward, and backward for certain gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from raglane.programs.gradients import FROM_RESULT, ProductGradient, Reverse, recorded_from
from raglane.programs.graph import Columns, Graph, Node
from raglane.programs.lower import Lowered, Lowering
from raglane.programs.program import Kind
from raglane.programs.trace import Trace


class Wanted(NamedTuple):
    """The gradients that a backward pass receives, and those that it computes, in the order of the
    step's nodes.
    """

    given_output: bool
    given_states: bool  # of the states of every step
    elements: tuple[bool, ...]
    unchanged: tuple[bool, ...]
    vectors: tuple[bool, ...]
    weights: tuple[bool, ...]


class Fetch(NamedTuple):
    """Columns of every element, in an output of a program or in one of its inputs."""

    output: int  # -1 for an input
    node: int  # of the input
    start: int
    width: int


class Forward(NamedTuple):
    """A forward program, and the contents of its outputs."""

    lowered: Lowered
    output: int | None
    states: tuple[int, ...]
    saved: dict[int, int]  # by the nodes that the backward program reads
    own: frozenset[int]  # those of these nodes that only the backward program reads


class Backward(NamedTuple):
    """A backward program, and where gradients are after its loop; by place, as in
    :class:`Wanted`.
    """

    lowered: Lowered
    grad_output: int  # the node of the output's gradients; -1 without
    grad_states: tuple[int, ...]
    saved: tuple[int, ...]  # nodes that the forward pass must save
    elements: dict[int, Fetch]
    unchanged: dict[int, int]  # sums over a sequence's elements: the place among the final states
    vectors: dict[
        int, Fetch | int
    ]  # the same; or rows that an output contains anyway, whose sum is the gradient
    over: dict[int, int]  # by output, the saved node whose memory it may take
    weights: tuple[
        tuple[int, Fetch, Fetch], ...
    ]  # of each product: the weight, its result's gradient, its operand
    deferred: tuple[
        tuple[int, Fetch, Fetch], ...
    ]  # gradients of elements due after the loop: weight, from, to


@dataclass(eq=False)
class CompiledStep:
    """All programs of one traced step, each made when it is first used."""

    trace: Trace
    key: tuple[Any, ...] = ()
    is_read: bool = False  # the trace was read from the disk
    not_kept: str = ""  # why the trace is not on the disk
    disk_key: str = ""
    seconds: float = 0.0  # to trace or read, and to verify
    calls: int = 0
    # Of the graph, the nodes of elements, of states that a step changes and of others, and of
    # vectors.
    elements: list[int] = field(init=False)
    states: list[int] = field(init=False)
    unchanged: list[int] = field(init=False)
    vectors: list[int] = field(init=False)
    # Of the cell's states, the places of those that a step changes, and of the others.
    changing_places: list[int] = field(init=False)
    unchanged_places: list[int] = field(init=False)
    order: list[tuple[bool, int]] = field(
        init=False
    )  # of each state: whether it changes, and its place among those
    kept: Columns = field(
        init=False
    )  # of each column of the graph, the one that forward saves in its place

    def __post_init__(self) -> None:
        result = self.trace.result
        graph = self.trace.result.graph
        self.elements = result.elements
        self.vectors = result.vectors
        changes = [
            not np.array_equal(columns, graph.columns(node))
            for node, columns in zip(result.states, result.new, strict=True)
        ]
        self.changing_places = [place for place, flag in enumerate(changes) if flag]
        self.unchanged_places = [place for place, flag in enumerate(changes) if not flag]
        self.states = [result.states[place] for place in self.changing_places]
        self.unchanged = [result.states[place] for place in self.unchanged_places]
        self._new: list[Columns] = [result.new[place] for place in self.changing_places]
        self.order = [(flag, changes[:place].count(flag)) for place, flag in enumerate(changes)]
        self.kept = _activated(graph)
        # Of every call, so a lookup enters no function of Python.
        self.forward = cache(self._forward)
        self.backward = cache(self._backward)
        self.recorded = cache(self._recorded)

    def _kinds(self) -> dict[int, Kind]:
        kinds: dict[int, Kind] = dict.fromkeys(self.elements, "element")
        kinds |= dict.fromkeys(self.states, "state")
        kinds |= dict.fromkeys(self.unchanged, "sequence")
        return kinds | dict.fromkeys(self.vectors, "vector")

    def _forward(self, need_output: bool, need_states: bool, wanted: Wanted | None) -> Forward:
        """Make the program of a forward pass."""
        result = self.trace.result
        graph = self.trace.result.graph
        outputs: list[Columns] = []

        def place(columns: Columns) -> int:
            for index, other in enumerate(outputs):
                if np.array_equal(other, columns):
                    return index
            outputs.append(columns)
            return len(outputs) - 1

        output = place(result.output) if need_output else None
        states = tuple(place(columns) for columns in self._new) if need_states else ()
        saved = () if wanted is None else self.backward(wanted).saved
        kept = {
            node: place(self.kept[graph.columns(node)])
            for node in saved
            if node not in self.elements
        }
        own = frozenset([node for node, index in kept.items() if index not in (output, *states)])
        return Forward(
            Lowering(graph, self._kinds(), self.states).run(outputs, self._new),
            output,
            states,
            kept,
            own,
        )

    def _backward(self, wanted: Wanted) -> Backward:
        """Make the program of a backward pass."""
        return _Backward(self, wanted).make()

    def _recorded(self, wanted: Wanted, states: tuple[bool, ...]) -> tuple[bool, tuple[bool, ...]]:
        """Return which of output and new states have a gradient after any number of steps in plain
        torch.
        """
        output, new = self._recorded_once(wanted, states)
        while any(now and not before for now, before in zip(new, states, strict=True)):
            states = tuple(map(max, new, states))
            output, new = self._recorded_once(wanted, states)
        return output, new

    def _recorded_once(
        self, wanted: Wanted, states: tuple[bool, ...]
    ) -> tuple[bool, tuple[bool, ...]]:
        """Return which of the output and the new states of one step have a gradient."""
        result = self.trace.result
        graph = self.trace.result.graph
        has = np.zeros(len(graph.nodes), bool)
        has[self.with_gradient(wanted)] = True
        has[[node for node, flag in zip(self.states, states, strict=True) if flag]] = True
        for index, node in enumerate(graph.nodes):
            operands = node.operands[recorded_from(node.operation)]
            weight = node.operation == "product" and wanted.weights[node.weight]
            has[index] |= weight or any(has[graph.places(part)].any() for part in operands)
        output, *new = (
            bool(has[graph.places(columns)].any()) for columns in (result.output, *self._new)
        )
        return output, tuple(new)

    def with_gradient(self, wanted: Wanted) -> list[int]:
        """Return the nodes, other than states, whose gradients are computed."""
        nodes = [*self.elements, *self.unchanged, *self.vectors]
        flags = wanted.elements + wanted.unchanged
        return [node for node, flag in zip(nodes, flags + wanted.vectors, strict=True) if flag]


def _activated(graph: Graph) -> Columns:
    """Return all columns, with an activation in place of a product's column that nothing else
    reads.
    """
    columns = np.arange(graph.starts[-1] + graph.nodes[-1].width)
    found = columns.copy()
    readers = np.zeros(len(columns), np.int64)
    is_product = np.zeros(len(columns), bool)
    for index, node in enumerate(graph.nodes):
        is_product[graph.columns(index)] = node.operation == "product"
        for part in node.operands:
            np.add.at(readers, part, 1)
        if node.operation in FROM_RESULT:
            found[node.operands[0]] = graph.columns(index)
    return np.where(is_product & (readers == 1), found, columns)


class _Backward:
    def __init__(self, compiled: CompiledStep, wanted: Wanted) -> None:
        self.compiled = compiled
        self.wanted = wanted
        self.graph = compiled.trace.result.graph.copy()
        self.outputs: list[Columns] = []
        self.fetched: set[int] = set()
        self._old = len(self.graph.nodes)
        self._totals: list[Columns] = []
        self._states: list[int] = []

    def make(self) -> Backward:
        compiled = self.compiled
        wanted = self.wanted
        grad_output, grad_states, seeds = self._seeds()
        reverse = self._reverse(seeds)
        products = self._read_kept(reverse)
        self.kinds: dict[int, Kind] = compiled._kinds()
        self.kinds |= dict.fromkeys(compiled.states, "element")
        saved = [
            index for index in range(self._old) if self.graph.nodes[index].operation == "product"
        ]
        self.kinds |= dict.fromkeys(saved, "element")
        self.kinds |= dict.fromkeys(self._states, "state")
        self.kinds |= dict.fromkeys(
            [*grad_states, *([grad_output] if wanted.given_output else [])], "element"
        )
        elements = self._wished(reverse, compiled.elements, wanted.elements)
        rows = [part.result for part in products] + [part.result for part in reverse.deferred]
        self._place([*rows, *[part.operand for part in products], *elements.values()])
        weights = [
            (part.weight, self._fetch(part.result), self._fetch(part.operand)) for part in products
        ]
        to = [cast(Fetch, self._given(part.operand)) for part in reverse.deferred]
        deferred = [
            (part.weight, self._fetch(part.result), at)
            for part, at in zip(reverse.deferred, to, strict=True)
        ]
        new = [reverse.total(node) for node in compiled.states]
        vectors = self._wished(reverse, compiled.vectors, wanted.vectors)
        summed: dict[int, Fetch | int] = {
            place: self._fetch(columns)
            for place, columns in vectors.items()
            if self._is_available(columns)
        }
        summed |= {
            place: self._sum(columns, new)
            for place, columns in vectors.items()
            if place not in summed
        }
        unchanged = self._wished(reverse, compiled.unchanged, wanted.unchanged)
        lowered_unchanged = {place: self._sum(columns, new) for place, columns in unchanged.items()}
        lowered = Lowering(self.graph, self.kinds, self._states).run(self.outputs, new)
        read = {
            node for node in (*lowered.given.get("element", ()), *self.fetched) if node < self._old
        }
        return Backward(
            lowered,
            grad_output,
            tuple(grad_states),
            tuple(sorted(read)),
            {place: self._fetch(columns) for place, columns in elements.items()},
            lowered_unchanged,
            summed,
            self._over(lowered),
            tuple(weights),
            tuple(deferred),
        )

    def _seeds(self) -> tuple[int, list[int], list[tuple[Columns, Columns]]]:
        """Add nodes for the incoming gradients; return them with the columns that they belong
        to.
        """
        compiled = self.compiled
        wanted = self.wanted
        graph = self.graph
        result = compiled.trace.result
        grad_output = -1
        seeds = []
        if wanted.given_output:
            columns = graph.add(Node("element", (), len(result.output)))
            grad_output = len(graph.nodes) - 1
            seeds.append((result.output, columns))
        grad_states = []
        for columns in compiled._new:
            self._states.append(len(graph.nodes))
            seeds.append((columns, graph.add(Node("state", (), len(columns)))))
        for columns in compiled._new if wanted.given_states else ():
            grad_states.append(len(graph.nodes))
            seeds.append((columns, graph.add(Node("element", (), len(columns)))))
        return grad_output, grad_states, seeds

    def _reverse(self, seeds: Sequence[tuple[Columns, Columns]]) -> Reverse:
        compiled = self.compiled
        wanted = self.wanted
        weights = {index for index, is_wanted in enumerate(wanted.weights) if is_wanted}
        nodes = {*compiled.with_gradient(wanted), *compiled.states}
        reverse = Reverse(self.graph, nodes, weights, set(compiled.elements))
        reverse.run(seeds)
        return reverse

    def _read_kept(self, reverse: Reverse) -> list[ProductGradient]:
        """Read saved columns from where they are kept; return the products with a gradient of their
        weight.
        """
        graph = self.graph
        columns = np.arange(self.graph.starts[-1] + self.graph.nodes[-1].width)
        moved = np.flatnonzero(self.compiled.kept != columns[: len(self.compiled.kept)])
        columns[self.compiled.kept[moved]] = moved
        graph.nodes = [
            replace(node, operands=tuple([columns[part] for part in node.operands]))
            for node in graph.nodes
        ]
        return [replace(part, operand=columns[part.operand]) for part in reverse.weight_gradients]

    def _wished(
        self, reverse: Reverse, nodes: list[int], wishes: tuple[bool, ...]
    ) -> dict[int, Columns]:
        """Return the requested gradients that are not zero, by place."""
        zero = self.graph.number(0.0)
        totals = {place: reverse.total(node) for place, node in enumerate(nodes) if wishes[place]}
        return {place: total for place, total in totals.items() if (total != zero).any()}

    # Results of the loop for each element, or for each sequence.

    def _place(self, wished: Sequence[Columns]) -> None:
        """Choose the outputs, longest first, because others may be parts of them."""
        for columns in sorted(wished, key=len, reverse=True):
            if not self._is_available(columns):
                self.outputs.append(columns)

    def _is_available(self, columns: Columns) -> bool:
        return self._given(columns) is not None or self._written(columns) is not None

    def _given(self, columns: Columns) -> Fetch | None:
        """Return the place of columns among the inputs of the loop, or None."""
        places = np.unique(self.graph.places(columns))
        is_row = bool((np.diff(columns) == 1).all())
        if len(places) != 1 or not is_row or self.kinds.get(int(places[0])) != "element":
            return None
        node = int(places[0])
        return Fetch(-1, node, int(columns[0]) - self.graph.starts[node], len(columns))

    def _written(self, columns: Columns) -> Fetch | None:
        for index, known in enumerate(self.outputs):
            start = np.flatnonzero(known == columns[0])
            if len(start) and np.array_equal(known[start[0] : start[0] + len(columns)], columns):
                return Fetch(index, -1, int(start[0]), len(columns))
        return None

    def _fetch(self, columns: Columns) -> Fetch:
        """Return the place of columns of all elements after the loop."""
        found = self._given(columns)
        if found is not None:
            self.fetched.add(found.node)
            return found
        return cast(Fetch, self._written(columns))  # ensured by _place

    def _sum(self, columns: Columns, new: list[Columns]) -> int:
        """Sum columns over the elements of a sequence in a new state; return its place among the
        final states.
        """
        for place, known in enumerate(self._totals):
            if np.array_equal(known, columns):
                return len(self.compiled.states) + place
        before = self.graph.add(Node("state", (), len(columns)))
        self._states.append(len(self.graph.nodes) - 1)
        self.kinds[self._states[-1]] = "state"
        new.append(self.graph.each("add", columns, before))
        self._totals.append(columns)
        return len(new) - 1

    def _over(self, lowered: Lowered) -> dict[int, int]:
        """Return the outputs that may overwrite a saved tensor, which the same row has read before,
        by place.
        """
        program = lowered.program
        given = lowered.given.get("element", ())
        places = [place for place, _ in program.outputs]
        kept = {
            given[program.blocks[place.block].index]
            for place in (*places, *program.next_states)
            if place.block >= 0 and program.blocks[place.block].kind == "element"
        }
        saved = [node for node in given if node < self._old and node not in kept | self.fetched]
        free = [node for node in saved if node not in self.compiled.elements]
        found: dict[int, int] = {}
        for output, (place, width) in enumerate(program.outputs):
            fitting = next((node for node in free if self.graph.nodes[node].width == width), None)
            is_local = place.block >= 0 and program.blocks[place.block].kind == "local"
            if fitting is not None and is_local:
                found[output] = fitting
                free.remove(fitting)
        return found
