"""The reference kernel as a graph for :func:`torch.export.export`, for any cell.

A Python loop over the steps would be unrolled to the number of steps of the example batch. Here the
loop is one operator: torch's higher-order operator ``scan``, whose body is the cell's ``step``, or
the replacement that :func:`loops_by` sets for another runtime.

The schedule is ``masked``: every row runs to the longest length, and keeps its state past its end.
The index arithmetic on lengths is part of the graph, which therefore accepts any number of
sequences and elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane import segments
from raglane._utils.tracing import constant_when_traced
from raglane.cells.regularised import MarkedWeights, Resetting
from raglane.kernels.contract import DirectionResult, Request, Result, run_directions


class StepLayout(NamedTuple):
    """The layout of a batch as ``T`` steps, at least 1, of ``B`` rows."""

    element: Tensor  # ``(T, B)`` int64, the index of each element; ``N`` past the end of a sequence
    is_real: Tensor  # ``(T, B)`` bool, False past the end of a sequence
    row: Tensor  # ``(N,)`` int64, the row ``t * B + b`` of each element
    lengths: Tensor  # ``(B,)`` int64

    def padded(self, flat: Tensor) -> Tensor:
        """Return ``(N, size)`` as ``(T, B, size)``, padded with zeros."""
        return torch.cat([flat, flat.new_zeros(1, flat.shape[1])])[self.element]

    def flat(self, padded: Tensor) -> Tensor:
        """Return ``(T, B, size)`` as ``(N, size)``, without padding."""
        return padded.flatten(0, 1).index_select(0, self.row)


def table_of(offsets: Tensor, total: int) -> StepLayout:
    """Return the table of a batch of ``total`` elements."""
    lengths = offsets.diff()
    # At least one step: runtimes need not support empty loops, and max of no lengths would raise.
    steps = F.pad(lengths, (0, 1), value=1).max().item()
    torch._check(steps >= 1)
    step = torch.arange(steps, device=offsets.device).unsqueeze(1)
    is_real = step < lengths
    element = torch.where(is_real, step + offsets[:-1], total)
    owner = segments.segment_ids(offsets, total)
    position = segments.positions(offsets, total)
    return StepLayout(element, is_real, position * lengths.shape[0] + owner, lengths)


_loops: ContextVar[Loops | None] = ContextVar("raglane_loops", default=None)


@contextmanager
def loops_by(loops: Loops) -> Iterator[None]:
    """Run loops over steps in a ``with`` block by operators of ``loops``."""
    token = _loops.set(loops)
    try:
        yield
    finally:
        _loops.reset(token)


@constant_when_traced
def has_loops() -> bool:
    """Return True in a block of :func:`loops_by`: loops over steps must be loops of the graph."""
    return _loops.get() is not None


def run_layer(table: Callable[[], StepLayout], layer: Request) -> Result:
    """Run one layer; ``table`` returns the table of its batch, for which a device would wait."""
    whole = (_loops.get() or Loops()).run_layer(layer, table)
    return run_directions(layer, partial(_run_direction, table())) if whole is None else whole


def run_steps(
    table: StepLayout,
    step: MaskedStep,
    prepared: Tensor,
    state: tuple[Tensor, ...],
    sizes: list[int],
    *,
    reverse: bool = False,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Run a step over all elements; return final states and collected tensors ``(N, size)``.

    ``prepared`` is the input ``(N, G)`` of the step, ``state`` ``(B, size)`` each. ``sizes`` are
    the columns of the collected tensors: of the output, and of the states if the step returns them
    twice.
    """
    results = (_loops.get() or Loops()).run_loop(step, table, prepared, state, sizes, reverse)
    return tuple(results[: step.states]), [table.flat(rows) for rows in results[step.states :]]


class Loops:
    """Runs the loops of a graph by torch's ``scan``; subclasses use other operators."""

    def run_layer(self, layer: Request, table: Callable[[], StepLayout]) -> Result | None:  # noqa: ARG002
        """Run a whole layer by one operator; return None: torch has none for ragged batches."""
        return None

    def run_loop(
        self,
        step: MaskedStep,
        table: StepLayout,
        prepared: Tensor,
        state: tuple[Tensor, ...],
        sizes: list[int],  # noqa: ARG002
        reverse: bool,
    ) -> list[Tensor]:
        """Return final states and collected tensors ``(T, B, size)``; see :func:`run_steps`."""
        rows = table.padded(prepared)
        is_real = table.is_real
        if reverse:
            rows = rows.flip(0)
            is_real = is_real.flip(0)
        copies = [tensor.clone() for tensor in state]
        results = self.scan(step, copies, [rows, is_real], tuple(step.weights))
        collected = results[step.states :]
        if reverse:
            collected = [tensor.flip(0) for tensor in collected]
        return [*results[: step.states], *collected]

    def scan(
        self, step: nn.Module, state: list[Tensor], read: list[Tensor], weights: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """Call torch's operator on ``read``, ``(T, B, ...)`` each, and on constant ``weights``."""
        return list(torch.ops.higher_order.scan(step, state, read, weights))


class MaskedStep(nn.Module):
    """One masked step of a cell as a module, whose arguments are all tensors, for tracing.

    ``cell`` has ``states`` and ``step`` as :class:`~raglane.cells.spec.CellSpec`. The weights, a
    tuple or the user's module, are those of one layer in one direction. With ``need_states`` the
    new states are also collected.
    """

    def __init__(self, cell: Any, weights: Any, need_states: bool = False) -> None:
        super().__init__()
        self.cell = cell
        self.need_states = need_states
        self.states = len(cell.states)
        # In a tuple, so that a user's module does not become a submodule: its parameters are
        # arguments.
        self._of_weights = (weights,)

    @property
    def weights(self) -> list[Tensor]:
        """The tensors of the weights, in the order of :meth:`forward`'s arguments."""
        (weights,) = self._of_weights
        if self.module is not None:
            return [*self.module.parameters(), *self.module.buffers()]
        return list(_tensors(weights))

    @property
    def module(self) -> nn.Module | None:
        """The user's module, also that of a cell with resets."""
        (weights,) = self._of_weights
        inner = (
            weights.inner
            if isinstance(weights, MarkedWeights) and weights.marks is None
            else weights
        )
        return inner if isinstance(inner, nn.Module) else None

    @property
    def present(self) -> tuple[bool, ...]:
        """Which optional weights of a named cell exist."""
        (weights,) = self._of_weights
        return tuple(weight is not None for weight in weights) if self.module is None else ()

    def forward(self, *args: Tensor) -> list[Tensor]:
        """Map states, the row ``(R, G)``, mask ``(R,)`` and weights to states, output, states."""
        state = args[: self.states]
        row, is_real, *weights = args[self.states :]
        output, new = self._step(tuple(weights), row, state)
        masked = [torch.where(is_real.unsqueeze(1), a, b) for a, b in zip(new, state, strict=True)]
        # torch's scan requires tensors that share no memory.
        states = [tensor.clone() for tensor in masked] if self.need_states else []
        return [*masked, output.clone(), *states]

    def _step(self, tensors: tuple[Tensor, ...], row: Tensor, state: tuple[Tensor, ...]) -> Any:
        (weights,) = self._of_weights
        module = self.module
        if module is None:
            return self.cell.step(_like(weights, iter(tensors)), row, state)
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        with _with_tensors(module, dict(zip(names, tensors, strict=True))):
            return self.cell.step(weights, row, state)


def _tensors(weights: Any) -> Iterator[Tensor]:
    for weight in weights:
        if isinstance(weight, tuple):
            yield from _tensors(weight)
        elif weight is not None:
            yield weight


def _like(weights: Any, tensors: Iterator[Tensor]) -> Any:
    """Return weights of the same structure with other tensors."""
    if weights is None:
        return None
    if not isinstance(weights, tuple):
        return next(tensors)
    others = [_like(weight, tensors) for weight in weights]
    return type(weights)(*others) if hasattr(weights, "_fields") else tuple(others)


@contextmanager
def _with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Replace parameters and buffers of a module in a ``with`` block.

    It does for the block what torch.func.functional_call does for a call.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, tensor in tensors.items():
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            home: dict[str, Any] = (
                owner._parameters if name in owner._parameters else owner._buffers
            )
            replaced.append((home, name, home[name]))
            home[name] = tensor
        yield
    finally:
        for home, name, before in reversed(replaced):
            home[name] = before


def _run_direction(
    table: StepLayout, layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """See :class:`~raglane.kernels.contract.RunDirection`."""
    prepared = layer.cell.prepare(weights, layer.values, layer.offsets)
    # The prepared rows have the marks of resets.
    if isinstance(layer.cell, Resetting):
        step = MaskedStep(layer.cell, weights._replace(marks=None), layer.need_states)
    else:
        step = MaskedStep(layer.cell, weights, layer.need_states)
    width = layer.sizes[0] if layer.cell.output_is_state else layer.cell.output_size  # type: ignore[attr-defined]
    sizes = [width]
    if layer.need_states:
        sizes += [tensor.shape[1] for tensor in state]
    final, collected = run_steps(table, step, prepared, state, sizes, reverse=reverse)
    return DirectionResult(collected[0], final, tuple(collected[1:]))
