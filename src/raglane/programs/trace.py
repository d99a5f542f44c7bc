"""The tracer, which runs a step on symbolic tensors and records its operations.

While the step runs, torch passes each operation to a :class:`Tracer`. The tensors are on the device
``meta``, without numbers. A tensor that depends only on parameters is *known*: the tracer computes
it and records its operations (:class:`Call`), which torch repeats before each time loop, under
autograd. Any other tensor has rows: it has marks (:mod:`raglane.programs.rows`), and its operations
become nodes of a graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from raglane.programs.graph import DEPENDS, Columns, Graph, Node, Refused, Result
from raglane.programs.parameters import Call, Known, ParameterOps, Slices, slices_of
from raglane.programs.rows import FREE, SHIFT, Reading, RowsMeet, align, free, marks_of
from raglane.programs.step import stand_in

# Candidates for the number of traced rows. It must divide no size, so that it can be recognised.
_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
_META = torch.device("meta")


@dataclass
class Trace:
    """A traced step."""

    result: Result
    parameters: ParameterOps
    reads_itself: bool  # the step reads a parameter not from its module, but e.g. from a closure
    prepares: bool = True  # the step contains the cell's prepare


@dataclass(eq=False)
class _Part:
    """The marks or the known value of a tensor; neither if it must not be read."""

    stand_in: Tensor
    marks: Tensor | None = None
    known: int = -1
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
    _originals: dict[int, _Part] = field(default_factory=dict)
    _calls: list[Call] = field(default_factory=list)
    _known: list[_Part] = field(default_factory=list)
    _parts: dict[int, _Part] = field(default_factory=dict)
    _vectors: dict[int, int] = field(default_factory=dict)
    _weights: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _weight_known: list[int] = field(default_factory=list)
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
        made = stand_in(
            self._add_known(tensor.detach(), not tensor.dtype.is_floating_point), original
        )
        self._originals[id(original)] = self._parts[id(made)]
        return made

    def source(self, kind: str, width: int) -> tuple[Tensor, int]:
        """Add an input ``(rows, width)`` of each step; return it and its node."""
        columns = self.graph.add(Node(kind, (), width))
        return self.wrap(marks_of(columns, self.rows), self.dtype), len(self.graph.nodes) - 1

    def nothing(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor that a step must not read."""
        return self._add(_Part(torch.empty(shape, dtype=dtype, device=_META)))

    # Results of operations.

    def wrap(self, marks: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor with marks."""
        return self._add(
            _Part(
                torch.empty_strided(marks.shape, marks.stride(), dtype=dtype, device=_META), marks
            )
        )

    def _add(self, part: _Part) -> Tensor:
        self._parts[id(part.stand_in)] = part
        return part.stand_in

    def _add_known(self, value: Tensor, is_constant: bool) -> Tensor:
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        part = _Part(like, None, len(self._known), value, is_constant)
        self._known.append(part)
        return self._add(part)

    def part(self, tensor: Tensor) -> _Part:
        """Return the record of a tensor."""
        part = self._parts.get(id(tensor))
        if part is None and id(tensor) in self._originals:
            self.reads_itself = True
            part = self._originals[id(tensor)]
        if part is None:
            raise Refused(
                "it reads a tensor that is no parameter, buffer or attribute of its modules"
            )
        if part.marks is None and part.value is None:
            raise Refused("it reads values that are not computed row by row, such as offsets")
        return part

    def _is_nothing(self, tensor: Tensor) -> bool:
        part = self._parts.get(id(tensor))
        return part is not None and part.marks is None and part.value is None

    def is_known(self, tensor: Tensor) -> bool:
        """Return True if a tensor is computed only from parameters."""
        return self.part(tensor).marks is None

    def call(self, function: Any, flat: list[Any], spec: Any) -> Any:
        """Record one operation of torch."""
        name = function._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise Refused(f"it draws random numbers inside the step, {DEPENDS}")
        tensors = [part for part in flat if isinstance(part, Tensor)]
        if name == "lift_fresh" and id(tensors[0]) not in self._parts:
            return self.fixed(tensors[0].detach().clone())  # a tensor made of Python numbers
        if name == "detach" and self._is_nothing(tensors[0]):
            return self.nothing(
                *tensors[0].shape, dtype=tensors[0].dtype
            )  # as autograd does with some results
        parts = [self.part(part) for part in tensors]
        if all(part.is_constant for part in parts):
            return self._call_constants(function, flat, spec)
        if not torch.is_grad_enabled() and not function._schema.is_mutable:
            raise Refused(
                "it computes without gradients, under no_grad() or in a torch.autograd.Function of its own"
            )
        dynamic = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(
            function.tags
        )
        if (dynamic and name not in self.rules) or name in (
            "equal",
            "is_nonzero",
            "_local_scalar_dense",
        ):
            depends = "" if all(self.is_known(part) for part in tensors) else f", {DEPENDS}"
            raise Refused(f"its operations depend on the numbers that it computes{depends}")
        has_rows = any(part.marks is not None for part in parts)
        if not has_rows and not any(
            type(part) is int and part and part % self.rows == 0 for part in flat
        ):
            return self._call_known(function, flat, spec)
        args, kwargs = tree_unflatten(flat, spec)
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
        self._calls.append(Call(None, (value,), {}))
        return self._add_known(value, True)

    def _values(self, flat: list[Any]) -> list[Any]:
        return [
            self.part(part).value if isinstance(part, Tensor) else part for part in _on_host(flat)
        ]

    def _call_constants(self, function: Any, flat: list[Any], spec: Any) -> Any:
        """Compute a constant from constants."""
        if function._schema.is_mutable:
            raise Refused(f"it changes a buffer or a constant in place, {DEPENDS}")
        args, kwargs = tree_unflatten(self._values(flat), spec)
        found = function(*args, **kwargs)
        if isinstance(found, Tensor):
            return self.fixed(found.clone())
        if isinstance(found, tuple | list):
            return [self.fixed(part.clone()) for part in found]
        return found

    def _call_known(self, function: Any, flat: list[Any], spec: Any) -> Any:
        if function._schema.is_mutable:
            raise Refused(f"it changes a parameter or a buffer in place, {DEPENDS}")
        args, kwargs = tree_unflatten(self._values(flat), spec)
        found = function(*args, **kwargs)
        if found is None:
            return None  # an assertion that holds
        if not isinstance(found, Tensor) and not all(isinstance(part, Tensor) for part in found):
            raise Refused(f"{function._schema.name} does not return a tensor")
        arguments = [
            Known(self.part(part).known) if isinstance(part, Tensor) else part
            for part in _on_host(flat)
        ]
        args, kwargs = tree_unflatten(arguments, spec)
        self._calls.append(
            Call(function, tuple(args), kwargs, 1 if isinstance(found, Tensor) else len(found))
        )
        if isinstance(found, Tensor):
            return self._add_known(found, False)
        return [self._add_known(part, False) for part in found]

    def note(self, function: Any, *args: Any) -> Tensor:
        """Compute from known tensors, here and before each run."""
        flat, spec = tree_flatten((args, {}))
        made: Tensor = self._call_known(function, flat, spec)
        return made

    def _call_in_place(
        self, rule: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        target = self.part(args[0])
        if target.marks is None:
            raise Refused(f"it changes a parameter, a buffer or a constant in place, {DEPENDS}")
        if target.marks.untyped_storage().data_ptr() in self._detached:
            raise Refused("it changes a detached tensor in place")
        found = rule(self, function, *args, **kwargs)
        if found.dtype is not args[0].dtype:
            raise Refused("it writes numbers of one dtype over those of another")
        if not torch.is_grad_enabled() and found.dtype.is_floating_point:
            found = self.rules["through"](self, None, found, args[0])  # autograd does not record it
        # The marks of all views of the target share memory.
        target.marks.copy_(self.marks(found).expand(target.marks.shape))
        return args[0]

    def marks(self, tensor: Tensor | float) -> Tensor:
        """Return the marks of a tensor or a number."""
        if not isinstance(tensor, Tensor):
            return free(np.asarray([self.graph.number(float(tensor))])).reshape(())
        part = self.part(tensor)
        if part.marks is not None:
            return part.marks
        value = cast(Tensor, part.value)
        if part.is_constant:
            numbers = [self.graph.number(number) for number in value.reshape(-1).tolist()]
            return free(np.asarray(numbers, np.int64)).reshape(value.shape)
        if value.dtype is not self.dtype:
            raise Refused(f"it mixes {self.dtype} with {value.dtype}")
        if part.known not in self._vectors:
            self._vectors[part.known] = int(
                self.graph.add(Node("vector", (), max(1, value.numel())))[0]
            )
        start = self._vectors[part.known]
        return free(np.arange(start, start + value.numel())).reshape(value.shape)

    def detach(self, source: Tensor, found: Tensor) -> Tensor:
        """Record that a tensor shares memory with its detached copy: neither may change in
        place.
        """
        marks = self.marks(source)
        if not bool(
            (marks >> SHIFT == FREE).all()
        ):  # autograd itself detaches values that all rows share
            self._detached |= {
                part.untyped_storage().data_ptr() for part in (marks, self.marks(found))
            }
        return found

    def constant(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a constant tensor of indices."""
        part = self.part(tensor)
        if part.value is None or not part.is_constant:
            raise Refused("it picks columns by numbers that it computes")
        return part.value

    def weight(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> int:
        """Return the index of a weight ``(groups, rows, depth)`` of the graph; ``make`` computes a
        new one.
        """
        if key not in self._weights:
            part = self.part(make())
            value = cast(Tensor, part.value)
            if value.dtype is not self.dtype:
                raise Refused(f"it mixes {self.dtype} with {value.dtype}")
            self._weights[key] = len(self.graph.weights)
            groups, rows, depth = value.shape
            self.graph.weights.append((groups, rows, depth))
            self._weight_known.append(part.known)
        return self._weights[key]

    def weight_known(self, weight: int) -> Tensor:
        """Return the known tensor of a weight."""
        return self._known[self._weight_known[weight]].stand_in

    def vector_known(self, start: int) -> Tensor:
        """Return the known tensor of a vector, by its first column."""
        return next(
            self._known[known].stand_in for known, first in self._vectors.items() if first == start
        )

    # Outputs.

    def columns(self, tensor: Any, width: int) -> Columns:
        """Return the columns of a result ``(rows, width)``."""
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != (self.rows, width):
            raise Refused("it returns no tensor with one row for each sequence")
        if tensor.dtype is not self.dtype:
            raise Refused(f"it returns {tensor.dtype} for {self.dtype}")
        # Each row must have its own numbers, or shared ones.
        own = marks_of(np.zeros(width, np.int64), self.rows)
        both = torch.stack([own.reshape(-1), self.marks(tensor).reshape(-1)], 1)
        return align([both], self.rows).columns[0][:, 1]

    def finish(self, result: Result, prepares: bool) -> Trace:
        """Return the trace."""
        starts = {start: index for index, start in enumerate(self.graph.starts)}
        result.vectors = [starts[start] for start in self._vectors.values()]
        values = [cast(Tensor, part.value) for part in self._known]
        all_moved = slices_of(self._calls, values, len(self._originals))
        wanted = [all_moved[index] for index in (*self._vectors, *self._weight_known)]
        only_moved = None if None in wanted else cast(list[Slices], wanted)
        calls = self._calls if only_moved is None else []
        ops = ParameterOps(calls, list(self._vectors), self._weight_known, only_moved)
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
    return [torch.device("cpu") if part == _META else part for part in arguments]


def rows_for(sizes: Iterable[int]) -> int:
    """Return a number of rows that divides none of these sizes."""
    found = list(sizes)
    return next((prime for prime in _PRIMES if all(size % prime for size in found)), 59)


def draws_random_numbers(run: Callable[[], Any]) -> tuple[Any, bool]:
    """Run a function; return True with its result if it drew random numbers, whose generators are
    reset.
    """
    before = _generators()
    try:
        found = run()
    finally:
        after = _generators()
        moved = any(one != other for one, other in zip(before, after, strict=True))
        if moved:
            torch.set_rng_state(torch.from_numpy(np.frombuffer(before[0], np.uint8).copy()))
            name, keys, *rest = before[1]
            np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
            random.setstate(before[2])
    return found, moved


def _generators() -> tuple[Any, Any, Any]:
    state: Any = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        (state[0], state[1].tobytes(), *state[2:]),
        random.getstate(),
    )
