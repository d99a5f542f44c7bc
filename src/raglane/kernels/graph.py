"""Any cell in a graph that others execute: what :func:`torch.export.export` sees of the reference kernel.

Python's loop over the steps of a batch would become as many operators as one batch happens to have steps. Here the
loop is an operator itself: ``scan``, a higher-order operator of torch whose body is the cell's own ``step``; or what
:func:`loops_by` puts in its place, for a runtime that is not torch.

The schedule is ``masked``: every row runs to the longest length, and keeps its state where it has no element. What
depends on the lengths is index arithmetic in the graph, which so takes batches of any number of sequences and elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane import segments
from raglane._utils.tracing import constant_when_traced
from raglane.kernels.contract import DirectionResult, Request, Result, run_directions


@dataclass(frozen=True)
class Table:
    """Where the elements of a batch are among the ``T`` steps of its ``B`` rows. ``T`` is at least 1."""

    element: Tensor  # ``(T, B)`` int64, the element at each place; ``N``, which is none, where the sequence has ended
    is_real: Tensor  # ``(T, B)`` bool, whether there is an element
    place: Tensor  # ``(N,)`` int64, the place ``t * B + b`` of each element
    lengths: Tensor  # ``(B,)`` int64

    def padded(self, flat: Tensor) -> Tensor:
        """One row per element, ``(N, size)``, as ``(T, B, size)``; zeros where there is no element."""
        return torch.cat([flat, flat.new_zeros(1, flat.shape[1])])[self.element]

    def flat(self, padded: Tensor) -> Tensor:
        """From ``(T, B, size)`` to one row per element, ``(N, size)``."""
        return padded.flatten(0, 1).index_select(0, self.place)


def table_of(offsets: Tensor, total: int) -> Table:
    """The table of a batch of ``total`` elements."""
    lengths = offsets.diff()
    # A step at least: no runtime has to loop over nothing, and a batch of no sequences has a longest one.
    steps = F.pad(lengths, (0, 1), value=1).max().item()
    torch._check(steps >= 1)
    step = torch.arange(steps, device=offsets.device).unsqueeze(1)
    is_real = step < lengths
    element = torch.where(is_real, step + offsets[:-1], total)
    owner = segments.segment_ids(offsets, total)
    position = segments.positions(offsets, total)
    return Table(element, is_real, position * lengths.shape[0] + owner, lengths)


class Loops(Protocol):
    """What runs the loops of a graph: torch's ``scan``, or what stands for it in another runtime."""

    def run_layer(self, layer: Request, table: Table) -> Result | None:
        """A request of one layer, where the runtime has an operator for all of it; else None."""

    def run_loop(
        self, step: Step, table: Table, prepared: Tensor, state: tuple[Tensor, ...], sizes: list[int], reverse: bool
    ) -> list[Tensor]:
        """See :func:`run_steps`; what is collected has ``sizes`` columns, and a row for each place of the table."""


_loops: ContextVar[Loops | None] = ContextVar("raglane_loops", default=None)


@contextmanager
def loops_by(loops: Loops) -> Iterator[None]:
    """Have all that loops over steps within the block be loops of a graph, run by these."""
    token = _loops.set(loops)
    try:
        yield
    finally:
        _loops.reset(token)


@constant_when_traced
def has_loops() -> bool:
    """Whether :func:`loops_by` is at work: then whatever loops should be a loop of the graph."""
    return _loops.get() is not None


def run_layer(table: Table, layer: Request) -> Result:
    """Run one layer."""
    loops = _loops.get()
    whole = None if loops is None else loops.run_layer(layer, table)
    return run_directions(layer, partial(_run_direction, table)) if whole is None else whole


def run_steps(
    table: Table, step: Step, prepared: Tensor, state: tuple[Tensor, ...], sizes: list[int], *, reverse: bool = False
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Run a step over the elements of each sequence: to its final states, and what it collects of each element.

    ``prepared`` is ``(N, G)``, what the step reads of each element, ``state`` ``(B, size)`` each, and ``sizes`` are the
    columns of the output, and of the states where the step gives them once more.
    """
    loops = _loops.get() or Scans()
    found = loops.run_loop(step, table, prepared, state, sizes, reverse)
    return tuple(found[: step.states]), [table.flat(part) for part in found[step.states :]]


class Scans:
    """The :class:`Loops` of torch: ``scan``."""

    def run_layer(self, layer: Request, table: Table) -> Result | None:  # noqa: ARG002
        """None: torch has no operator of a layer that knows lengths."""
        return None

    def run_loop(
        self,
        step: Step,
        table: Table,
        prepared: Tensor,
        state: tuple[Tensor, ...],
        sizes: list[int],  # noqa: ARG002
        reverse: bool,
    ) -> list[Tensor]:
        """See :class:`Loops`."""
        rows, is_real = table.padded(prepared), table.is_real
        if reverse:
            rows, is_real = rows.flip(0), is_real.flip(0)
        found = self.scan(step, [part.clone() for part in state], [rows, is_real], tuple(step.weights))
        collected = [part.flip(0) if reverse else part for part in found[step.states :]]
        return [*found[: step.states], *collected]

    def scan(
        self, step: nn.Module, state: list[Tensor], read: list[Tensor], weights: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """Call torch's operator on ``read``, ``(T, B, ...)`` each; the step reads ``weights`` at every time."""
        return list(torch.ops.higher_order.scan(step, state, read, weights))


class Step(nn.Module):
    """One step of a cell as a module of tensors alone, for whoever traces it: with the mask, and the weights last.

    ``cell`` has ``states`` and ``step`` as :class:`~raglane.cells.spec.CellSpec`. The weights are those of one layer in
    one direction: the tuple, or the user's module. With ``need_states`` the new states are given once more, as what a
    loop collects.
    """

    def __init__(self, cell: Any, weights: Any, need_states: bool = False) -> None:
        super().__init__()
        self.cell, self.need_states = cell, need_states
        self.states = len(cell.states)
        # Not as parts of this module, which has no parameters: they come as arguments.
        self._of_weights = (weights,)

    @property
    def weights(self) -> list[Tensor]:
        """The tensors among the weights, in the order in which :meth:`forward` takes them."""
        (weights,) = self._of_weights
        if isinstance(weights, nn.Module):
            return [*weights.parameters(), *weights.buffers()]
        return list(_tensors(weights))

    @property
    def is_module(self) -> bool:
        """Whether the equations are a user's module."""
        return isinstance(self._of_weights[0], nn.Module)

    @property
    def present(self) -> tuple[bool, ...]:
        """Which of the weights there are, of a named cell."""
        (weights,) = self._of_weights
        return () if self.is_module else tuple(part is not None for part in weights)

    def forward(self, *args: Tensor) -> list[Tensor]:
        """States, the prepared row ``(R, G)``, ``(R,)`` bool, weights; to the new states, the output and the states."""
        state, (row, is_real), weights = args[: self.states], args[self.states :][:2], args[self.states + 2 :]
        output, new = self._step(weights, row, state)
        kept = [torch.where(is_real.unsqueeze(1), a, b) for a, b in zip(new, state, strict=True)]
        # A loop's operator wants tensors that share no memory.
        return [*kept, output.clone(), *([part.clone() for part in kept] if self.need_states else [])]

    def _step(self, tensors: tuple[Tensor, ...], row: Tensor, state: tuple[Tensor, ...]) -> Any:
        (weights,) = self._of_weights
        if not isinstance(weights, nn.Module):
            return self.cell.step(_like(weights, iter(tensors)), row, state)
        names = [name for name, _ in (*weights.named_parameters(), *weights.named_buffers())]
        with _with_tensors(weights, dict(zip(names, tensors, strict=True))):
            return self.cell.step(weights, row, state)


def _tensors(weights: Any) -> Iterator[Tensor]:
    for part in weights:
        if isinstance(part, tuple):
            yield from _tensors(part)
        elif part is not None:
            yield part


def _like(weights: Any, tensors: Iterator[Tensor]) -> Any:
    """Weights of the same kind made of other tensors."""
    parts = [
        None if part is None else _like(part, tensors) if isinstance(part, tuple) else next(tensors) for part in weights
    ]
    return type(weights)(*parts) if hasattr(weights, "_fields") else tuple(parts)


@contextmanager
def _with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within it a module has other parameters and buffers: what torch.func.functional_call does for one call."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, tensor in tensors.items():
            parent, _, name = path.rpartition(".")
            owner = module.get_submodule(parent)
            home: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            places.append((home, name, home[name]))
            home[name] = tensor
        yield
    finally:
        for home, name, before in reversed(places):
            home[name] = before


def _run_direction(
    table: Table, layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """See :class:`~raglane.kernels.contract.RunDirection`."""
    step = Step(layer.cell, weights, layer.need_states)
    prepared = layer.cell.prepare(weights, layer.values, layer.offsets)
    width = layer.sizes[0] if layer.cell.output_is_state else layer.cell.output_size  # type: ignore[attr-defined]
    sizes = [width, *([part.shape[1] for part in state] if layer.need_states else [])]
    final, collected = run_steps(table, step, prepared, state, sizes, reverse=reverse)
    return DirectionResult(collected[0], final, tuple(collected[1:]))
