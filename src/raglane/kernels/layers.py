"""Layers and directions: the only loop over layers, whoever runs one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane import segments
from raglane.kernels.contract import DirectionResult, Request, Result

__all__ = ["RunDirection", "run_directions", "run_layers"]


def run_layers(request: Request, run_layer: Callable[[Request], Result]) -> Result:
    """Run every layer on the outputs of the one before.

    What training drops between layers is drawn here, so that all backends draw the same numbers: ``request.dropout`` on
    the output of every layer but the last, ``request.input_dropout`` on the input of every layer.
    """
    drops_inputs = request.training and request.input_dropout > 0
    if request.layers == 1 and not drops_inputs:
        return run_layer(request)
    values, results = request.values, []
    for index in range(request.layers):
        if index and request.dropout > 0:
            values = F.dropout(values, request.dropout, request.training)
        if drops_inputs:
            values = values * _kept_features(request, values)
        result = run_layer(request.layer(index, values))
        results.append(result)
        if result.output is not None:
            values = result.output
    return Result(
        results[-1].output,
        tuple(torch.cat(parts) for parts in zip(*[result.state for result in results], strict=True)),
        tuple(states for result in results for states in result.states or ()) if request.need_states else None,
    )


def _kept_features(request: Request, values: Tensor) -> Tensor:
    """One layer's mask for its input, ``(N, D)``: the same for all elements of a sequence."""
    kept = F.dropout(values.new_ones(request.count, values.shape[1]), request.input_dropout)
    return segments.spread(kept, request.offsets, values.shape[0])


class RunDirection(Protocol):
    """One layer in one direction."""

    def __call__(self, layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool, /) -> DirectionResult:
        """Run it.

        Args:
            layer: one layer, in all its directions.
            weights: those of this direction.
            state: its initial states, one ``(B, size)`` per state of the cell.
            reverse: whether each sequence is read from its end; what comes back is in the order of the values.

        Returns:
            An output where ``layer.need_output``, ``states`` where ``layer.need_states``.
        """


def run_directions(layer: Request, run: RunDirection) -> Result:
    """Run each direction of one layer by itself, and put what they give side by side."""
    initial = layer.initial()
    results = [
        run(layer, layer.weights[direction], tuple([state[direction] for state in initial]), direction == 1)
        for direction in range(layer.directions)
    ]
    outputs = [result.output for result in results if result.output is not None]
    states = [_join(list(parts)) for parts in zip(*[result.states or () for result in results], strict=True)]
    return Result(
        _join(outputs) if layer.need_output else None,
        tuple(torch.stack(parts) for parts in zip(*[result.state for result in results], strict=True)),
        (tuple(states),) if layer.need_states else None,
    )


def _join(directions: list[Tensor]) -> Tensor:
    """Put the directions' rows side by side; one direction alone is not copied."""
    return directions[0] if len(directions) == 1 else torch.cat(directions, 1)
