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
    only_saved: frozenset[int]  # those of these nodes that only the backward program reads


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
    # The same; or rows that an output contains anyway, whose sum is the gradient.
    vectors: dict[int, Fetch | int]
    over: dict[int, int]  # by output, the saved node whose memory it may take
    # Of each product: the weight, its result's gradient, its operand.
    weights: tuple[tuple[int, Fetch, Fetch], ...]
    # Gradients of elements due after the loop: weight, from, to.
    deferred: tuple[tuple[int, Fetch, Fetch], ...]


@dataclass(eq=False)
class CompiledStep:
    """All programs of one traced step, each made when it is first used."""

    trace: Trace
    key: tuple[Any, ...] = ()
    has_matrices: bool = True  # the machine's programs may have operations on matrices
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
    # Of each state: whether it changes, and its index among those.
    order: list[tuple[bool, int]] = field(init=False)
    # Of each column of the graph, the one that forward saves in its place.
    stored: Columns = field(init=False)

    def __post_init__(self) -> None:
        result = self.trace.result
        graph = self.trace.result.graph
        self.elements = result.elements
        self.vectors = result.vectors
        changes = [
            not np.array_equal(columns, graph.columns(node))
            for node, columns in zip(result.states, result.new, strict=True)
        ]
        self.changing_places = [index for index, flag in enumerate(changes) if flag]
        self.unchanged_places = [index for index, flag in enumerate(changes) if not flag]
        self.states = [result.states[index] for index in self.changing_places]
        self.unchanged = [result.states[index] for index in self.unchanged_places]
        self._new: list[Columns] = [result.new[index] for index in self.changing_places]
        self.order = [(flag, changes[:index].count(flag)) for index, flag in enumerate(changes)]
        self.stored = _activated(graph)
        # Of every call, so a lookup enters no function of Python.
        self.forward = cache(self._forward)
        self.backward = cache(self._backward)
        self.recorded = cache(self._recorded)

    def _kinds(self) -> dict[int, Kind]:
        kinds: dict[int, Kind] = dict.fromkeys(self.elements, "element")
        kinds |= dict.fromkeys(self.states, "state")
        kinds |= dict.fromkeys(self.unchanged, "sequence")
        return kinds | dict.fromkeys(self.vectors, "vector")

    def _forward(self, need_output: bool, need_states: bool, gradients: Wanted | None) -> Forward:
        """Make the program of a forward pass."""
        result = self.trace.result
        graph = self.trace.result.graph
        outputs: list[Columns] = []

        def output_of(columns: Columns) -> int:
            for index, other in enumerate(outputs):
                if np.array_equal(other, columns):
                    return index
            outputs.append(columns)
            return len(outputs) - 1

        output = output_of(result.output) if need_output else None
        states = tuple(output_of(columns) for columns in self._new) if need_states else ()
        nodes = () if gradients is None else self.backward(gradients).saved
        saved = {
            node: output_of(self.stored[graph.columns(node)])
            for node in nodes
            if node not in self.elements
        }
        only_saved = frozenset(
            [node for node, index in saved.items() if index not in (output, *states)]
        )
        lowering = Lowering(graph, self._kinds(), self.states, self.has_matrices)
        lowered = lowering.run(outputs, self._new)
        return Forward(lowered, output, states, saved, only_saved)

    def _backward(self, gradients: Wanted) -> Backward:
        """Make the program of a backward pass."""
        return _BackwardCompiler(self, gradients).make()

    def _recorded(
        self, gradients: Wanted, states: tuple[bool, ...]
    ) -> tuple[bool, tuple[bool, ...]]:
        """Return which of output and new states have a gradient after any number of steps in plain
        torch.
        """
        output, new = self._recorded_once(gradients, states)
        while any(now and not before for now, before in zip(new, states, strict=True)):
            states = tuple(map(max, new, states))
            output, new = self._recorded_once(gradients, states)
        return output, new

    def _recorded_once(
        self, gradients: Wanted, states: tuple[bool, ...]
    ) -> tuple[bool, tuple[bool, ...]]:
        """Return which of the output and the new states of one step have a gradient."""
        result = self.trace.result
        graph = self.trace.result.graph
        has = np.zeros(len(graph.nodes), bool)
        has[self.with_gradient(gradients)] = True
        has[[node for node, flag in zip(self.states, states, strict=True) if flag]] = True
        for index, node in enumerate(graph.nodes):
            operands = node.operands[recorded_from(node.operation)]
            weight = node.operation == "product" and gradients.weights[node.weight]
            has[index] |= weight or any(has[graph.nodes_of(operand)].any() for operand in operands)
        output, *new = (
            bool(has[graph.nodes_of(columns)].any()) for columns in (result.output, *self._new)
        )
        return output, tuple(new)

    def with_gradient(self, gradients: Wanted) -> list[int]:
        """Return the nodes, other than states, whose gradients are computed."""
        nodes = [*self.elements, *self.unchanged, *self.vectors]
        flags = gradients.elements + gradients.unchanged
        return [node for node, flag in zip(nodes, flags + gradients.vectors, strict=True) if flag]


def _activated(graph: Graph) -> Columns:
    """Return all columns, with an activation in place of a product's column that nothing else
    reads.
    """
    columns = np.arange(graph.starts[-1] + graph.nodes[-1].width)
    activated = columns.copy()
    readers = np.zeros(len(columns), np.int64)
    is_product = np.zeros(len(columns), bool)
    for index, node in enumerate(graph.nodes):
        is_product[graph.columns(index)] = node.operation == "product"
        for operand in node.operands:
            np.add.at(readers, operand, 1)
        if node.operation in FROM_RESULT:
            activated[node.operands[0]] = graph.columns(index)
    return np.where(is_product & (readers == 1), activated, columns)


class _BackwardCompiler:
    def __init__(self, compiled: CompiledStep, wishes: Wanted) -> None:
        self.compiled = compiled
        self.wishes = wishes
        self.graph = compiled.trace.result.graph.copy()
        self.kinds: dict[int, Kind] = {}
        self.outputs: list[Columns] = []
        self.fetched: set[int] = set()
        self._old = len(self.graph.nodes)
        self._totals: list[Columns] = []
        self._states: list[int] = []

    def make(self) -> Backward:
        compiled = self.compiled
        wishes = self.wishes
        grad_output, grad_states, seeds = self._seeds()
        reverse = self._reverse(seeds)
        products = self._read_saved(reverse)
        self.kinds = self._kinds(grad_states if grad_output < 0 else [*grad_states, grad_output])
        elements = self._wished(reverse, compiled.elements, wishes.elements)
        after_loop = [product.result for product in (*products, *reverse.deferred)]
        after_loop += [product.operand for product in products]
        self._add_outputs([*after_loop, *elements.values()])
        weights = [
            (product.weight, self._fetch(product.result), self._fetch(product.operand))
            for product in products
        ]
        deferred = [
            (
                product.weight,
                self._fetch(product.result),
                cast(Fetch, self._input(product.operand)),
            )
            for product in reverse.deferred
        ]
        new = [reverse.total(node) for node in compiled.states]
        vectors = self._wished(reverse, compiled.vectors, wishes.vectors)
        fetched: dict[int, Fetch | int] = {
            index: self._fetch(columns)
            for index, columns in vectors.items()
            if self._is_available(columns)
        }
        summed: dict[int, Fetch | int] = {
            index: self._sum(columns, new)
            for index, columns in vectors.items()
            if index not in fetched
        }
        unchanged = {
            index: self._sum(columns, new)
            for index, columns in self._wished(
                reverse, compiled.unchanged, wishes.unchanged
            ).items()
        }
        lowering = Lowering(self.graph, self.kinds, self._states, compiled.has_matrices)
        lowered = lowering.run(self.outputs, new)
        return Backward(
            lowered,
            grad_output=grad_output,
            grad_states=tuple(grad_states),
            saved=self._saved(lowered),
            elements={index: self._fetch(columns) for index, columns in elements.items()},
            unchanged=unchanged,
            vectors=fetched | summed,
            over=self._over(lowered),
            weights=tuple(weights),
            deferred=tuple(deferred),
        )

    def _kinds(self, gradients: list[int]) -> dict[int, Kind]:
        """Return the kinds of the inputs, of which some are gradients of each element."""
        nodes = self.graph.nodes[: self._old]
        products = [index for index, node in enumerate(nodes) if node.operation == "product"]
        kinds = self.compiled._kinds()
        kinds |= dict.fromkeys((*self.compiled.states, *products), "element")
        kinds |= dict.fromkeys(self._states, "state")
        return kinds | dict.fromkeys(gradients, "element")

    def _saved(self, lowered: Lowered) -> tuple[int, ...]:
        """Return the nodes of the forward pass that the backward pass reads."""
        nodes = {*lowered.inputs.get("element", ()), *self.fetched}
        return tuple(sorted(node for node in nodes if node < self._old))

    def _seeds(self) -> tuple[int, list[int], list[tuple[Columns, Columns]]]:
        """Add nodes for the incoming gradients; return them with the columns that they belong
        to.
        """
        compiled = self.compiled
        wishes = self.wishes
        graph = self.graph
        result = compiled.trace.result
        grad_output = -1
        seeds = []
        if wishes.given_output:
            columns = graph.add(Node("element", (), len(result.output)))
            grad_output = len(graph.nodes) - 1
            seeds.append((result.output, columns))
        grad_states = []
        for columns in compiled._new:
            self._states.append(len(graph.nodes))
            seeds.append((columns, graph.add(Node("state", (), len(columns)))))
        for columns in compiled._new if wishes.given_states else ():
            grad_states.append(len(graph.nodes))
            seeds.append((columns, graph.add(Node("element", (), len(columns)))))
        return grad_output, grad_states, seeds

    def _reverse(self, seeds: Sequence[tuple[Columns, Columns]]) -> Reverse:
        compiled = self.compiled
        wishes = self.wishes
        weights = {index for index, is_wanted in enumerate(wishes.weights) if is_wanted}
        nodes = {*compiled.with_gradient(wishes), *compiled.states}
        reverse = Reverse(self.graph, nodes, weights, set(compiled.elements))
        reverse.run(seeds)
        return reverse

    def _read_saved(self, reverse: Reverse) -> list[ProductGradient]:
        """Read saved columns from where they are kept; return the products with a gradient of their
        weight.
        """
        graph = self.graph
        columns = np.arange(self.graph.starts[-1] + self.graph.nodes[-1].width)
        moved = np.flatnonzero(self.compiled.stored != columns[: len(self.compiled.stored)])
        columns[self.compiled.stored[moved]] = moved
        graph.nodes = [
            replace(node, operands=tuple([columns[columns_of] for columns_of in node.operands]))
            for node in graph.nodes
        ]
        return [
            replace(columns_of, operand=columns[columns_of.operand])
            for columns_of in reverse.weight_gradients
        ]

    def _wished(
        self, reverse: Reverse, nodes: list[int], wishes: tuple[bool, ...]
    ) -> dict[int, Columns]:
        """Return the requested gradients that are not zero, by place."""
        zero = self.graph.number(0.0)
        totals = {index: reverse.total(node) for index, node in enumerate(nodes) if wishes[index]}
        return {index: total for index, total in totals.items() if (total != zero).any()}

    # Results of the loop for each element, or for each sequence.

    def _add_outputs(self, wished: Sequence[Columns]) -> None:
        """Choose the outputs, longest first, because others may be parts of them."""
        for columns in sorted(wished, key=len, reverse=True):
            if not self._is_available(columns):
                self.outputs.append(columns)

    def _is_available(self, columns: Columns) -> bool:
        return self._input(columns) is not None or self._written(columns) is not None

    def _input(self, columns: Columns) -> Fetch | None:
        """Return columns of all elements among the inputs of the loop, or None."""
        nodes = np.unique(self.graph.nodes_of(columns))
        is_row = bool((np.diff(columns) == 1).all())
        if len(nodes) != 1 or not is_row or self.kinds.get(int(nodes[0])) != "element":
            return None
        node = int(nodes[0])
        return Fetch(-1, node, int(columns[0]) - self.graph.starts[node], len(columns))

    def _written(self, columns: Columns) -> Fetch | None:
        for index, output in enumerate(self.outputs):
            start = np.flatnonzero(output == columns[0])
            if len(start) and np.array_equal(output[start[0] : start[0] + len(columns)], columns):
                return Fetch(index, -1, int(start[0]), len(columns))
        return None

    def _fetch(self, columns: Columns) -> Fetch:
        """Return columns of all elements after the loop."""
        source = self._input(columns)
        if source is not None:
            self.fetched.add(source.node)
            return source
        return cast(Fetch, self._written(columns))  # ensured by _add_outputs

    def _sum(self, columns: Columns, new: list[Columns]) -> int:
        """Sum columns over the elements of a sequence in a new state; return its place among the
        final states.
        """
        for index, total in enumerate(self._totals):
            if np.array_equal(total, columns):
                return len(self.compiled.states) + index
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
        inputs = lowered.inputs.get("element", ())
        results = (*(operand for operand, _ in program.outputs), *program.next_states)
        blocks = [program.blocks[operand.block] for operand in results if operand.block >= 0]
        written = {inputs[block.index] for block in blocks if block.kind == "element"}
        read = written | self.fetched | set(self.compiled.elements)
        free = [node for node in inputs if node < self._old and node not in read]
        over: dict[int, int] = {}
        for output, (operand, width) in enumerate(program.outputs):
            fitting = next((node for node in free if self.graph.nodes[node].width == width), None)
            is_local = operand.block >= 0 and program.blocks[operand.block].kind == "local"
            if fitting is not None and is_local:
                over[output] = fitting
                free.remove(fitting)
        return over
