"""Any cell in a graph that others execute: what :func:`torch.export.export` sees of the reference kernel.

Python's loop over the steps of a batch would become as many operators as one batch happens to have steps. Here the
loop is an operator itself: ``scan``, a higher-order operator of torch whose body is the cell's own ``step``; or what
:func:`loops_by` puts in its place, for a runtime that is not torch.

The schedule is ``masked``: every row runs to the longest length, and keeps its state where it has no element. What
depends on the lengths is index arithmetic in the graph, which so takes batches of any number of sequences and elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane.cells.spec import CellSpec
from raglane.kernels.contract import DirectionResult, Request, Result
from raglane.kernels.layers import run_directions
from raglane.segments import plain as segments

__all__ = ["Step", "Table", "loops_by", "run_layer", "table_of"]


@dataclass(frozen=True)
class Table:
    """Where the elements of a batch are among the ``T`` steps of its ``B`` rows. ``T`` is at least 1.

    Attributes:
        element: ``(T, B)`` int64, the element at each place; ``N``, which is none, where the sequence has ended.
        is_real: ``(T, B)`` bool, whether there is an element.
        place: ``(N,)`` int64, the place ``t * B + b`` of each element.
        lengths: ``(B,)`` int64.
    """

    element: Tensor
    is_real: Tensor
    place: Tensor
    lengths: Tensor

    def padded(self, flat: Tensor) -> Tensor:
        """One row per element, ``(N, size)``, as ``(T, B, size)``; zeros where there is no element."""
        return torch.cat([flat, flat.new_zeros(1, flat.shape[1])])[self.element]

    def flat(self, padded: Tensor) -> Tensor:
        """From ``(T, B, size)`` to one row per element, ``(N, size)``."""
        return padded.flatten(0, 1).index_select(0, self.place)


def table_of(offsets: Tensor, total: int) -> Table:
    """The table of a batch.

    Args:
        offsets: ``(B + 1,)`` int64.
        total: ``N``.

    Example:
        >>> table = table_of(torch.tensor([0, 1, 3]), 3)
        >>> table.element.tolist(), table.place.tolist()
        ([[0, 1], [3, 2]], [0, 1, 3])
    """
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


RunLayer = Callable[[Request, Table], Result]

_loops: ContextVar[RunLayer | None] = ContextVar("raglane_loops", default=None)


@contextmanager
def loops_by(run: RunLayer) -> Iterator[None]:
    """Have the layers of a graph run by something else than torch's ``scan``.

    Args:
        run: from a request of one layer, and the table of its batch, to the layer's result.
    """
    token = _loops.set(run)
    try:
        yield
    finally:
        _loops.reset(token)


def run_layer(table: Table, layer: Request) -> Result:
    """Run one layer.

    Args:
        table: of the request's batch.
        layer: a request of one layer.
    """
    run = _loops.get()
    return run_directions(layer, partial(_run_direction, table)) if run is None else run(layer, table)


class Step(nn.Module):
    """One step of a cell as a module of tensors alone, for whoever traces it: with the mask, and the weights last.

    Args:
        cell: the equations.
        weights: of one layer in one direction: the tuple, or the user's module.
        need_states: whether the new states are given once more, as what a loop collects.
    """

    def __init__(self, cell: CellSpec, weights: Any, need_states: bool = False) -> None:
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
    """See :class:`~raglane.kernels.layers.RunDirection`."""
    step = Step(layer.cell, weights, layer.need_states)
    rows = table.padded(layer.cell.prepare(weights, layer.values, layer.offsets))
    is_real = table.is_real
    if reverse:
        rows, is_real = rows.flip(0), is_real.flip(0)
    scan: Any = torch.ops.higher_order.scan
    found = list(scan(step, [part.clone() for part in state], [rows, is_real], tuple(step.weights)))
    collected = [table.flat(part.flip(0) if reverse else part) for part in found[step.states :]]
    return DirectionResult(collected[0], tuple(found[: step.states]), tuple(collected[1:]))
