"""A cell that a user wrote as a module in plain torch."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from raglane._utils.messages import message
from raglane.cells.spec import CellSpec, States, Stepped
from raglane.errors import ArgumentTypeError, ShapeError


class ModuleCell(CellSpec):
    """The equations of a module with ``step(x_t, state) -> (output, state)``; its weights are the module itself."""

    gates: ClassVar[tuple[str, ...]] = ()
    reads_state: ClassVar[bool] = False
    output_is_state: ClassVar[bool] = False
    follows_autocast: ClassVar[bool] = True

    def __init__(self, module: nn.Module, *, output_size: int, state_sizes: tuple[int, ...], is_tuple: bool) -> None:
        # A name that no faster kernel can take for one that it knows.
        self.name = f"module {type(module).__name__}"
        count = len(state_sizes)
        # Names that parameters can have: a learned initial state is called after them.
        self.states = ("h",) if count == 1 else tuple(f"state_{index}" for index in range(count))  # type: ignore[misc]
        self.output_size = output_size
        self.is_tuple = is_tuple
        self._sizes = state_sizes
        # Everything that affects the result, apart from the module.
        self.facts = ModuleCell, output_size, is_tuple, state_sizes

    def state_sizes(self, hidden_size: int, proj_size: int = 0) -> tuple[int, ...]:  # noqa: ARG002
        """The sizes that the module's own initial state has."""
        return self._sizes

    def prepare(self, weights: Any, values: Tensor, offsets: Tensor) -> Tensor:
        """The result of the module's own ``prepare``, or the values unchanged."""
        if not hasattr(weights, "prepare"):
            return values
        # A module may write over what it is given, which is its caller's.
        prepared = weights.prepare(values.clone(), offsets)
        where, fix = f"{type(weights).__name__}.prepare", "return a tensor with a row for each row of values"
        if not isinstance(prepared, Tensor) or prepared.dim() != 2 or prepared.shape[0] != values.shape[0]:
            rule = f"a tensor with one row per element: ({values.shape[0]}, features)"
            raise ShapeError(message(where, _shape(prepared), rule, fix))
        _check_dtype(where, prepared)
        return prepared

    def step(self, weights: Any, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:  # noqa: ARG002
        """One step of the module: its output, and its states as a tuple."""
        run = weights.step if hasattr(weights, "step") else weights
        # A step may write over what it is given: the caller's values and states, or the output of the step before.
        own = tuple([part.clone() for part in state])
        given = run(prepared.clone(), own if self.is_tuple else own[0])
        if run is weights:  # one of torch's cells: it gives its state, the first of which is the output
            given = (given[0] if self.is_tuple else given, given)
        where = f"{type(weights).__name__}.step"
        if not isinstance(given, tuple | list) or len(given) != 2:
            fix = "return output, state"
            raise ArgumentTypeError(message(where, f"a {type(given).__name__}", "a pair (output, state)", fix))
        output, new = given
        new = tuple(new) if self.is_tuple and isinstance(new, tuple | list) else (new,)
        rows = prepared.shape[0]
        _check(f"{where}: output", output, (rows, self.output_size), "set output_size if it is not hidden_size")
        if len(new) != len(state):
            rule = f"{len(state)} tensors, like the initial state"
            raise ShapeError(message(f"{where}: state", f"{len(new)} tensors", rule, "return all of them"))
        for part, before in zip(new, state, strict=True):
            _check(f"{where}: state", part, tuple(before.shape), "return a state shaped like the one given")
        # A state keeps the dtype that it began with: under autocast a step may give another one, and what a batch
        # returns must not hang on whether it has empty sequences.
        return output, tuple(part.to(before.dtype) for part, before in zip(new, state, strict=True))


def _check(name: str, part: Any, shape: tuple[int, ...], fix: str) -> None:
    if not isinstance(part, Tensor) or tuple(part.shape) != shape:
        raise ShapeError(message(name, _shape(part), f"a tensor of shape {shape}, one row per sequence", fix))
    _check_dtype(name, part)


def _check_dtype(name: str, part: Tensor) -> None:
    if not part.is_floating_point():
        rule = "of a floating-point dtype"
        raise ArgumentTypeError(message(name, str(part.dtype), rule, "convert it before it is returned"))


def _shape(part: Any) -> str:
    return f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
