"""A user-defined cell: a module in plain torch."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from raglane.cells.spec import CellSpec, States, Stepped
from raglane.errors import ArgumentTypeError, ShapeError


class ModuleCell(CellSpec):
    """The equations of a module with ``step(x_t, state) -> (output, state)``; its weights are the
    module itself.
    """

    gates: ClassVar[tuple[str, ...]] = ()
    reads_state: ClassVar[bool] = False
    output_is_state: ClassVar[bool] = False
    follows_autocast: ClassVar[bool] = True

    def __init__(
        self, module: nn.Module, *, output_size: int, state_sizes: tuple[int, ...], is_tuple: bool
    ) -> None:
        # A name that differs from those of cells with kernels.
        self.name = f"module {type(module).__name__}"
        count = len(state_sizes)
        # Learned initial states are parameters with these names.
        self.states = ("h",) if count == 1 else tuple(f"state_{index}" for index in range(count))  # type: ignore[misc]
        self.output_size = output_size
        self.is_tuple = is_tuple
        self._sizes = state_sizes
        # Everything that affects the result, apart from the module.
        self.facts = ModuleCell, output_size, is_tuple, state_sizes

    def state_sizes(self, hidden_size: int, proj_size: int = 0) -> tuple[int, ...]:  # noqa: ARG002
        """See :meth:`CellSpec.state_sizes`; the sizes of the module's initial state."""
        return self._sizes

    def prepare(self, weights: Any, values: Tensor, offsets: Tensor) -> Tensor:
        """The result of the module's own ``prepare``, or the values unchanged."""
        if not hasattr(weights, "prepare"):
            return values
        # Copied, because a module may overwrite its arguments.
        prepared = weights.prepare(values.clone(), offsets)
        where = f"{type(weights).__name__}.prepare"
        is_matrix = isinstance(prepared, Tensor) and prepared.dim() == 2
        if not is_matrix or prepared.shape[0] != values.shape[0]:
            fix = "return a tensor with a row for each row of values"
            rule = f"a tensor with one row per element: ({values.shape[0]}, features)"
            raise ShapeError(where, _shape(prepared), rule, fix)
        _check_dtype(where, prepared)
        return prepared

    def step(
        self,
        weights: Any,
        prepared: Tensor,
        state: States,
        mask: Tensor | None = None,  # noqa: ARG002
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        run = weights.step if hasattr(weights, "step") else weights
        # Copied, because a step may overwrite its arguments, such as the output of the previous
        # step.
        copies = tuple([tensor.clone() for tensor in state])
        try:
            result = run(prepared.clone(), copies if self.is_tuple else copies[0])
        except Exception as error:
            if run is not weights:
                _explain(error, weights, copies)
            raise
        if run is weights:
            # One of torch's cells, which returns its state; the first one is the output.
            result = (result[0] if self.is_tuple else result, result)
        where = f"{type(weights).__name__}.step"
        output, new = self._pair(where, result)
        _check_count(where, new, state)
        rows = prepared.shape[0]
        fix = "set output_size if it is not hidden_size"
        _check(f"{where}: output", output, rows, self.output_size, fix)
        for after, before in zip(new, state, strict=True):
            fix = "return a state of the same shape"
            _check(f"{where}: state", after, rows, before.shape[1], fix)
        # States keep their first dtype. Under autocast a step may return another one, and the dtype
        # of a result must not depend on whether the batch has empty sequences.
        return output, tuple(
            after.to(before.dtype) for after, before in zip(new, state, strict=True)
        )

    def _pair(self, where: str, result: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the output and the states of a step's result; their tensors are not checked."""
        if not isinstance(result, tuple | list) or len(result) != 2:
            fix = "return output, state"
            raise ArgumentTypeError(
                where, f"a {type(result).__name__}", "a pair (output, state)", fix
            )
        output, new = result
        if self.is_tuple and isinstance(new, tuple | list):
            return output, tuple(new)
        if not self.is_tuple and isinstance(new, tuple | list):
            rule = "one tensor, like the initial state"
            fix = "return as many tensors from initial_state"
            raise ShapeError(f"{where}: state", _count(new), rule, fix)
        return output, (new,)


class WholeCell(ModuleCell):
    """The equations of a module that also runs whole sequences, with ``run_whole(values, offsets,
    states) -> (outputs, final states)``.
    """


def _check_count(where: str, new: States, state: States) -> None:
    """Raise if a step returns another number of states than it gets."""
    if len(new) != len(state):
        rule = f"{_count(state)}, like the initial state"
        raise ShapeError(f"{where}: state", _count(new), rule, "return all of them")


def _explain(error: Exception, module: Any, state: States) -> None:
    """Raise if a step unpacks another number of states than it gets; else note what it gets."""
    has_own = hasattr(module, "initial_state")
    unpacked = _UNPACKED.search(str(error)) if isinstance(error, ValueError) else None
    if unpacked is not None and int(unpacked[1]) != len(state) and _is_of_step(error):
        where = f"{type(module).__name__}.initial_state"
        rule = f"a method that returns a tuple of {unpacked[1]} tensors, which step unpacks"
        fix = "return each state as a tensor (batch_size, size)"
        raise ArgumentTypeError(where, _count(state) if has_own else "none", rule, fix) from error
    counted = f"The state is {_count(state)}, as initial_state returns it"
    alone = "The state is one tensor; a cell with several returns them from initial_state"
    error.add_note(counted if has_own else alone)


# Of Python, for a name too many or too few on the left side of an assignment.
_UNPACKED = re.compile(r"values to unpack \(expected (\d+)")


def _is_of_step(error: Exception) -> bool:
    """Return True if an error comes from a line of a method ``step``."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_name == "step"


def _check(name: str, result: Any, rows: int, size: int, fix: str) -> None:
    """Raise if a result is not a tensor with a row for each of the ``rows`` running sequences."""
    if not isinstance(result, Tensor) or tuple(result.shape) != (rows, size):
        rule = f"a tensor of shape (R, {size}), one row for each of R sequences"
        raise ShapeError(name, _shape(result, rows), rule, fix)
    _check_dtype(name, result)


def _check_dtype(name: str, result: Tensor) -> None:
    if not result.is_floating_point():
        raise ArgumentTypeError(
            name, str(result.dtype), "of a floating-point dtype", "convert it before it is returned"
        )


def _shape(result: Any, rows: int = -1) -> str:
    """Return the shape of a tensor as text, with R for a number of rows."""
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__}"
    if result.dim() and result.shape[0] == rows:
        return f"shape ({', '.join(['R', *map(str, result.shape[1:])])})"
    return f"shape {tuple(result.shape)}"


def _count(tensors: Sequence[Any]) -> str:
    return "one tensor" if len(tensors) == 1 else f"a tuple of {len(tensors)} tensors"
