"""A user-defined cell: a module in plain torch."""

from __future__ import annotations

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
        fix = "return a tensor with a row for each row of values"
        if (
            not isinstance(prepared, Tensor)
            or prepared.dim() != 2
            or prepared.shape[0] != values.shape[0]
        ):
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
            if run is not weights and not hasattr(weights, "initial_state"):
                error.add_note(
                    "The state is one tensor; a cell with several returns them from initial_state"
                )
            raise
        if run is weights:
            # One of torch's cells, which returns its state; the first one is the output.
            result = (result[0] if self.is_tuple else result, result)
        where = f"{type(weights).__name__}.step"
        if not isinstance(result, tuple | list) or len(result) != 2:
            fix = "return output, state"
            raise ArgumentTypeError(
                where, f"a {type(result).__name__}", "a pair (output, state)", fix
            )
        output, new = result
        new = tuple(new) if self.is_tuple and isinstance(new, tuple | list) else (new,)
        rows = prepared.shape[0]
        fix = "set output_size if it is not hidden_size"
        _check(f"{where}: output", output, (rows, self.output_size), fix)
        if len(new) != len(state):
            rule = f"{len(state)} tensors, like the initial state"
            raise ShapeError(f"{where}: state", f"{len(new)} tensors", rule, "return all of them")
        for tensor, before in zip(new, state, strict=True):
            _check(
                f"{where}: state", tensor, tuple(before.shape), "return a state of the same shape"
            )
        # States keep their first dtype. Under autocast a step may return another one, and the dtype
        # of a result must not depend on whether the batch has empty sequences.
        return output, tuple(
            tensor.to(before.dtype) for tensor, before in zip(new, state, strict=True)
        )


def _check(name: str, tensor: Any, shape: tuple[int, ...], fix: str) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
        rule = f"a tensor of shape {shape}, one row per sequence"
        raise ShapeError(name, _shape(tensor), rule, fix)
    _check_dtype(name, tensor)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        fix = "convert it before it is returned"
        raise ArgumentTypeError(name, str(tensor.dtype), "of a floating-point dtype", fix)


def _shape(value: Any) -> str:
    return (
        f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
