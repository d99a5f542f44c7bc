"""Layers and directions: the loop that is the same for every backend that runs one layer in one direction."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec
from raglane.kernels.contract import LayerResult, Request, Result

__all__ = ["RunLayer", "run_stack"]


class RunLayer(Protocol):
    """One layer in one direction."""

    def __call__(
        self,
        cell: CellSpec,
        weights: Any,
        values: Tensor,
        offsets: Tensor,
        lengths: Tensor,
        state: tuple[Tensor, ...],
        reverse: bool,
        need_output: bool,
    ) -> LayerResult:
        """Run one layer in one direction.

        Args:
            cell: the equations.
            weights: this layer's, of this direction.
            values: ``(N, D)``, this layer's input.
            offsets: ``(B + 1,)`` int64 on the device of ``values``.
            lengths: ``(B,)`` int64 on the CPU.
            state: the initial states, one ``(B, size)`` a state of the cell.
            reverse: whether each sequence is read from its end; what comes back is in ``values``' order.
            need_output: whether the output must be built.

        Returns:
            With ``states`` where the request that the backend is running needs them.
        """


def run_stack(request: Request, run_layer: RunLayer) -> Result:
    """Run every layer in every direction, each layer on the outputs of the one before.

    Args:
        request: the whole network and its batch.
        run_layer: runs one layer in one direction. It must give an output wherever it is asked for one, and
            ``states`` where ``request.need_states``.

    Returns:
        The result for ``request``. Dropout acts on the output of every layer but the last, in training.
    """
    values, initial, lengths = request.values, request.initial(), request.host_lengths
    finals: list[tuple[Tensor, ...]] = []
    histories: list[tuple[Tensor, ...]] = []
    output: Tensor | None = None
    for layer in range(request.layers):
        is_last = layer == request.layers - 1
        if layer > 0 and request.dropout > 0:
            values = F.dropout(values, request.dropout, request.training)
        results = []
        for direction in range(request.directions):
            index = layer * request.directions + direction
            results.append(
                run_layer(
                    request.cell,
                    request.weights[index],
                    values,
                    request.offsets,
                    lengths,
                    tuple(state[index] for state in initial),
                    direction == 1,
                    request.need_output or not is_last,
                )
            )
        finals.extend(result.state for result in results)
        if request.need_states:
            histories.append(_side_by_side([result.states or () for result in results]))
        if request.need_output or not is_last:
            outputs = [result.output for result in results if result.output is not None]
            output = values = _join(outputs)
    return Result(
        output if request.need_output else None,
        tuple(torch.stack(parts) for parts in zip(*finals, strict=True)),
        tuple(histories) if request.need_states else None,
    )


def _join(directions: list[Tensor]) -> Tensor:
    """Put the directions' rows side by side; one direction alone is not copied."""
    return directions[0] if len(directions) == 1 else torch.cat(directions, 1)


def _side_by_side(directions: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Join the states of all directions, state by state."""
    return tuple(_join(list(parts)) for parts in zip(*directions, strict=True))
