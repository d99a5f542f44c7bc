"""The tracer, which runs a step on symbolic tensors and records its operations.

While the step runs, torch passes each operation to a :class:`Tracer`. The tensors are on the device
``meta``, without numbers. A tensor that depends only on parameters is *known*: the tracer computes
it and records its operations (:class:`Computation`), which torch repeats before each time loop, under
autograd. Any other tensor has rows: it has marks (:mod:`raglane.programs.row_counts`), and its operations
become nodes of a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from raglane.programs.graph import DEPENDS, Columns, Graph, Node, Refused, StepGraph
from raglane.programs.parameters import Computation, Known, ParameterOps, Slices, slices_of
from raglane.programs.row_counts import FREE, SHIFT, Reading, RowsMeet, align, free, marks_of
from raglane.programs.step import stand_in

# Candidates for the number of traced rows. It must divide no size, so that it can be recognised.
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
_META = torch.device("meta")
_DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass
class Trace:
    """A traced step."""

    result: StepGraph
    parameters: ParameterOps
    reads_itself: bool  # the step reads a parameter not from its module, but e.g. from a closure
    prepares: bool = True  # the step contains the cell's prepare


class Source(NamedTuple):
    """An input of a step: its tensor and its node."""

    values: Tensor
    node: int


@dataclass(eq=False)
class _Record:
    """The marks or the known value of a tensor; neither if it must not be read."""

    stand_in: Tensor
    marks: Tensor | None = None
    index: int = -1  # among the known tensors
    value: Tensor | None = None
    is_constant: bool = False


@dataclass
class Tracer:
    """Records one trace as a graph."""

    dtype: torch.dtype
    rows: int
    rules: dict[str, Callable[..., Any]]
    graph: Graph = field(default_factory=Graph)
    reads_itself: bool = False
    _originals: dict[int, _Record] = field(default_factory=dict)
    _calls: list[Computation] = field(default_factory=list)
    _known: list[_Record] = field(default_factory=list)
    _records: dict[int, _Record] = field(default_factory=dict)
    _vectors: dict[int, int] = field(default_factory=dict)
    _weights: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _weight_indexes: list[int] = field(default_factory=list)
    _detached: set[int] = field(default_factory=set)

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a function and record its operations."""
        # With gradients enabled, so that parts without gradients can be detected.
        reading = Reading(self.rows, self._is_nothing)
        with torch.enable_grad(), torch._C._EnableTorchFunction(), reading, _Follow(self):
            return step()

    # Inputs.

    def leaf(self, tensor: Tensor, original: Tensor) -> Tensor:
        """Add a parameter, converted to the dtype of the computation; integers are constants."""
        leaf = stand_in(
            self._add_known(tensor.detach(), not tensor.dtype.is_floating_point), original
        )
        self._originals[id(original)] = self._records[id(leaf)]
        return leaf

    def source(self, kind: str, width: int) -> Source:
        """Add an input ``(rows, width)`` of each step."""
        columns = self.graph.add(Node(kind, (), width))
        values = self.wrap(marks_of(columns, self.rows), self.dtype)
        return Source(values, len(self.graph.nodes) - 1)

    def nothing(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor that a step must not read."""
        return self._add(_Record(torch.empty(shape, dtype=dtype, device=_META)))

    # Results of operations.

    def wrap(self, marks: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor with marks."""
        return self._add(
            _Record(
                torch.empty_strided(marks.shape, marks.stride(), dtype=dtype, device=_META), marks
            )
        )

    def _add(self, record: _Record) -> Tensor:
        self._records[id(record.stand_in)] = record
        return record.stand_in

    def _add_known(self, value: Tensor, is_constant: bool) -> Tensor:
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        record = _Record(like, None, len(self._known), value, is_constant)
        self._known.append(record)
        return self._add(record)

    def record(self, tensor: Tensor) -> _Record:
        """Return the record of a tensor."""
        record = self._records.get(id(tensor))
        if record is None and id(tensor) in self._originals:
            self.reads_itself = True
            record = self._originals[id(tensor)]
        if record is None:
            raise Refused(
                "it reads a tensor that is no parameter, buffer or attribute of its modules"
            )
        if record.marks is None and record.value is None:
            raise Refused("it reads values that are not computed row by row, such as offsets")
        return record

    def _is_nothing(self, tensor: Tensor) -> bool:
        record = self._records.get(id(tensor))
        return record is not None and record.marks is None and record.value is None

    def is_known(self, tensor: Tensor) -> bool:
        """Return True if a tensor is computed only from parameters."""
        return self.record(tensor).marks is None

    def call(self, function: Any, flat: list[Any], spec: Any) -> Any:
        """Record one operation of torch."""
        name = function._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise Refused(f"it draws random numbers inside the step, {DEPENDS}")
        tensors = [argument for argument in flat if isinstance(argument, Tensor)]
        if name == "lift_fresh" and id(tensors[0]) not in self._records:
            return self.fixed(tensors[0].detach().clone())  # a tensor made of Python numbers
        if name == "detach" and self._is_nothing(tensors[0]):
            # As autograd does with some results.
            return self.nothing(*tensors[0].shape, dtype=tensors[0].dtype)
        records = [self.record(tensor) for tensor in tensors]
        if all(record.is_constant for record in records):
            return self._call_constants(function, flat, spec)
        if not torch.is_grad_enabled() and not function._schema.is_mutable:
            raise Refused(
                "it computes without gradients, under no_grad() or in a torch.autograd.Function of its own"
            )
        self._check_shapes(function, name, tensors)
        has_rows = any(record.marks is not None for record in records)
        if not has_rows and not any(map(self._is_count, flat)):
            return self._call_known(function, flat, spec)
        return self._call_rule(function, name, *tree_unflatten(flat, spec))

    def _check_shapes(self, function: Any, name: str, tensors: list[Tensor]) -> None:
        """Raise Refused if the operations that follow depend on numbers of tensors."""
        is_dynamic = name not in self.rules and not _DYNAMIC.isdisjoint(function.tags)
        if is_dynamic or name in ("equal", "is_nonzero", "_local_scalar_dense"):
            depends = "" if all(self.is_known(tensor) for tensor in tensors) else f", {DEPENDS}"
            raise Refused(f"its operations depend on the numbers that it computes{depends}")

    def _is_count(self, argument: Any) -> bool:
        """Return True for a number of rows."""
        return type(argument) is int and argument != 0 and argument % self.rows == 0

    def _call_rule(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Record an operation on rows."""
        rule = self.rules.get(name)
        if rule is None and name.endswith("_") and name[:-1] in self.rules:
            return self._call_in_place(self.rules[name[:-1]], function, args, kwargs)
        if rule is None or "out" in kwargs:
            raise Refused(f"no program has the operation {name}")
        try:
            return rule(self, function, *args, **kwargs)
        except RowsMeet as met:
            # E.g. the sum of all numbers in an ``if``, meant for one sequence.
            reason = f"{met.reason} in its operation {name}, where each row is a sequence of its own, {DEPENDS}"
            raise Refused(reason) from None

    def fixed(self, value: Tensor) -> Tensor:
        """Add a known tensor of constants."""
        self._calls.append(Computation(None, (value,), {}))
        return self._add_known(value, True)

    def _values(self, flat: list[Any]) -> list[Any]:
        return [
            self.record(argument).value if isinstance(argument, Tensor) else argument
            for argument in _on_host(flat)
        ]

    def _call_constants(self, function: Any, flat: list[Any], spec: Any) -> Any:
        """Compute a constant from constants."""
        if function._schema.is_mutable:
            raise Refused(f"it changes a buffer or a constant in place, {DEPENDS}")
        args, kwargs = tree_unflatten(self._values(flat), spec)
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            return self.fixed(result.clone())
        if isinstance(result, tuple | list):
            return [self.fixed(piece.clone()) for piece in result]
        return result

    def _call_known(self, function: Any, flat: list[Any], spec: Any) -> Any:
        if function._schema.is_mutable:
            raise Refused(f"it changes a parameter or a buffer in place, {DEPENDS}")
        args, kwargs = tree_unflatten(self._values(flat), spec)
        result = function(*args, **kwargs)
        if result is None:
            return None  # an assertion that holds
        results = (result,) if isinstance(result, Tensor) else result
        if not all(isinstance(item, Tensor) for item in results):
            raise Refused(f"{function._schema.name} does not return a tensor")
        arguments = [
            Known(self.record(argument).index) if isinstance(argument, Tensor) else argument
            for argument in _on_host(flat)
        ]
        args, kwargs = tree_unflatten(arguments, spec)
        self._calls.append(Computation(function, tuple(args), kwargs, len(results)))
        if isinstance(result, Tensor):
            return self._add_known(result, False)
        return [self._add_known(item, False) for item in results]

    def note(self, function: Any, *args: Any) -> Tensor:
        """Compute from known tensors, here and before each run."""
        flat, spec = tree_flatten((args, {}))
        result: Tensor = self._call_known(function, flat, spec)
        return result

    def _call_in_place(
        self, rule: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        target = self.record(args[0])
        if target.marks is None:
            raise Refused(f"it changes a parameter, a buffer or a constant in place, {DEPENDS}")
        if target.marks.untyped_storage().data_ptr() in self._detached:
            raise Refused("it changes a detached tensor in place")
        result = rule(self, function, *args, **kwargs)
        if result.dtype is not args[0].dtype:
            raise Refused("it writes numbers of one dtype over those of another")
        if not torch.is_grad_enabled() and result.dtype.is_floating_point:
            # Autograd does not record it.
            result = self.rules["through"](self, None, result, args[0])
        # The marks of all views of the target share memory.
        target.marks.copy_(self.marks(result).expand(target.marks.shape))
        return args[0]

    def marks(self, tensor: Tensor | float) -> Tensor:
        """Return the marks of a tensor or a number."""
        if not isinstance(tensor, Tensor):
            return free(np.asarray([self.graph.number(float(tensor))])).reshape(())
        record = self.record(tensor)
        if record.marks is not None:
            return record.marks
        value = cast(Tensor, record.value)
        if record.is_constant:
            numbers = [self.graph.number(number) for number in value.reshape(-1).tolist()]
            return free(np.asarray(numbers, np.int64)).reshape(value.shape)
        if value.dtype is not self.dtype:
            raise Refused(f"it mixes {self.dtype} with {value.dtype}")
        if record.index not in self._vectors:
            self._vectors[record.index] = int(
                self.graph.add(Node("vector", (), max(1, value.numel())))[0]
            )
        start = self._vectors[record.index]
        return free(np.arange(start, start + value.numel())).reshape(value.shape)

    def detach(self, source: Tensor, copy: Tensor) -> Tensor:
        """Record that a tensor shares memory with its detached copy: neither may change in
        place.
        """
        marks = self.marks(source)
        # Autograd itself detaches values that all rows share.
        if not bool((marks >> SHIFT == FREE).all()):
            self._detached.add(marks.untyped_storage().data_ptr())
            self._detached.add(self.marks(copy).untyped_storage().data_ptr())
        return copy

    def constant(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a constant tensor of indices."""
        record = self.record(tensor)
        if record.value is None or not record.is_constant:
            raise Refused("it picks columns by numbers that it computes")
        return record.value

    def weight(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> int:
        """Return the index of a weight ``(groups, rows, depth)`` of the graph; ``make`` computes a
        new one.
        """
        if key not in self._weights:
            record = self.record(make())
            value = cast(Tensor, record.value)
            if value.dtype is not self.dtype:
                raise Refused(f"it mixes {self.dtype} with {value.dtype}")
            self._weights[key] = len(self.graph.weights)
            groups, rows, depth = value.shape
            self.graph.weights.append((groups, rows, depth))
            self._weight_indexes.append(record.index)
        return self._weights[key]

    def weight_tensor(self, weight: int) -> Tensor:
        """Return the known tensor of a weight."""
        return self._known[self._weight_indexes[weight]].stand_in

    def vector_tensor(self, start: int) -> Tensor:
        """Return the known tensor of a vector, by its first column."""
        indexes = (index for index, first in self._vectors.items() if first == start)
        return self._known[next(indexes)].stand_in

    # Outputs.

    def columns(self, tensor: Any, width: int) -> Columns:
        """Return the columns of a result ``(rows, width)``."""
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != (self.rows, width):
            raise Refused("it returns no tensor with one row for each sequence")
        if tensor.dtype is not self.dtype:
            raise Refused(f"it returns {tensor.dtype} for {self.dtype}")
        # Each row must have its own numbers, or shared ones.
        expected = marks_of(np.zeros(width, np.int64), self.rows)
        both = torch.stack([expected.reshape(-1), self.marks(tensor).reshape(-1)], 1)
        return align([both], self.rows).columns[0][:, 1]

    def finish(self, result: StepGraph, prepares: bool) -> Trace:
        """Return the trace."""
        starts = {start: index for index, start in enumerate(self.graph.starts)}
        result.vectors = [starts[start] for start in self._vectors.values()]
        values = [cast(Tensor, record.value) for record in self._known]
        all_moved = slices_of(self._calls, values, len(self._originals))
        moved = [all_moved[index] for index in (*self._vectors, *self._weight_indexes)]
        only_moved = None if None in moved else cast(list[Slices], moved)
        calls = self._calls if only_moved is None else []
        ops = ParameterOps(calls, list(self._vectors), self._weight_indexes, only_moved)
        return Trace(result, ops, self.reads_itself, prepares)


class _Follow(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's default imports the compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        return self._tracer.call(func, flat, spec)


def _on_host(arguments: list[Any]) -> list[Any]:
    return [torch.device("cpu") if argument == _META else argument for argument in arguments]


def rows_for(sizes: Iterable[int]) -> int:
    """Return a number of rows that divides none of these sizes."""
    all_sizes = list(sizes)
    return next((prime for prime in _PRIMES if all(size % prime for size in all_sizes)), 59)


def draws_random_numbers(run: Callable[[], Any]) -> tuple[Any, bool]:
    """Run a function; return True with its result if it drew random numbers, whose generators are
    reset.
    """
    before = _generators()
    try:
        result = run()
    finally:
        after = _generators()
        moved = any(old != other for old, other in zip(before, after, strict=True))
        if moved:
            torch.set_rng_state(torch.from_numpy(np.frombuffer(before[0], np.uint8).copy()))
            name, keys, *rest = before[1]
            np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
            random.setstate(before[2])
    return result, moved


def _generators() -> tuple[Any, Any, Any]:
    state: Any = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        (state[0], state[1].tobytes(), *state[2:]),
        random.getstate(),
    )
