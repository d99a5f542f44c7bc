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
        where, fix = (
            f"{type(weights).__name__}.prepare",
            "return a tensor with a row for each row of values",
        )
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
        own = tuple([part.clone() for part in state])
        try:
            given = run(prepared.clone(), own if self.is_tuple else own[0])
        except Exception as error:
            if run is not weights and not hasattr(weights, "initial_state"):
                error.add_note(
                    "The state is one tensor; a cell with several returns them from initial_state"
                )
            raise
        if (
            run is weights
        ):  # one of torch's cells, which returns its state; the first one is the output
            given = (given[0] if self.is_tuple else given, given)
        where = f"{type(weights).__name__}.step"
        if not isinstance(given, tuple | list) or len(given) != 2:
            fix = "return output, state"
            raise ArgumentTypeError(
                where, f"a {type(given).__name__}", "a pair (output, state)", fix
            )
        output, new = given
        new = tuple(new) if self.is_tuple and isinstance(new, tuple | list) else (new,)
        rows = prepared.shape[0]
        _check(
            f"{where}: output",
            output,
            (rows, self.output_size),
            "set output_size if it is not hidden_size",
        )
        if len(new) != len(state):
            rule = f"{len(state)} tensors, like the initial state"
            raise ShapeError(f"{where}: state", f"{len(new)} tensors", rule, "return all of them")
        for part, before in zip(new, state, strict=True):
            _check(f"{where}: state", part, tuple(before.shape), "return a state of the same shape")
        # States keep their first dtype. Under autocast a step may return another one, and the dtype
        # of a result must not depend on whether the batch has empty sequences.
        return output, tuple(part.to(before.dtype) for part, before in zip(new, state, strict=True))


def _check(name: str, part: Any, shape: tuple[int, ...], fix: str) -> None:
    if not isinstance(part, Tensor) or tuple(part.shape) != shape:
        raise ShapeError(
            name, _shape(part), f"a tensor of shape {shape}, one row per sequence", fix
        )
    _check_dtype(name, part)


def _check_dtype(name: str, part: Tensor) -> None:
    if not part.is_floating_point():
        raise ArgumentTypeError(
            name, str(part.dtype), "of a floating-point dtype", "convert it before it is returned"
        )


def _shape(part: Any) -> str:
    return f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
