"""The recurrence of the RG-LRU, whose decays and inputs have gates."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from raglane.kernels.cpu.recurrences import RGLRU, wide
from raglane.nn.mixers.row_functions import bounded_root, expm1, sigmoid, softplus
from raglane.nn.recurrences.chunks import Diagonal, run_chunks
from raglane.nn.recurrences.loops import RecurrenceSteps, States, run_loop
from raglane.nn.recurrences.recurrence_operator import Operator


def rates_of(parameter: Tensor) -> Tensor:
    """Return minus the logarithms of the decays of open gates, with the constant c of the paper."""
    return 8.0 * softplus(wide(parameter))


def decayed_inputs(
    x: Tensor,
    entry: Tensor,
    recurrent: Tensor,
    entry_bias: Tensor,
    recurrent_bias: Tensor,
    rates: Tensor,
    fresh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return minus the logarithms of decays, and what is added to states, both ``(R, E)``.

    The gates are before their biases and sigmoids; ``fresh`` is 1 for rows that begin sequences.
    """
    logs = sigmoid(wide(recurrent) + recurrent_bias) * rates
    factor = bounded_root(-expm1(-2 * logs))
    if fresh is not None:
        factor = factor + fresh.unsqueeze(1) * (1 - factor)
    return logs, wide(x) * sigmoid(wide(entry) + entry_bias) * factor


def _steps(tensors: tuple[Any, ...], offsets: Tensor) -> RecurrenceSteps:
    """Return the steps, whose elements are those of :func:`decayed_inputs`."""
    *parts, initial = tensors
    logs, inputs = decayed_inputs(*parts)
    start = logs.new_zeros(offsets.shape[0] - 1, logs.shape[1]) if initial is None else initial

    def step(elements: list[Any], states: States) -> tuple[Tensor, States]:
        log_t, input_t = elements
        state = (-log_t).exp() * states[0] + input_t
        return state, (state,)

    return RecurrenceSteps(step, [logs, inputs], (start,), tensors[0].new_empty(0, logs.shape[1]))


class _Decayed(Diagonal):
    """The effect of chunks on states of channels."""

    def factor(self, chunks: Any) -> Tensor:
        """Return the factor of the states before each chunk."""
        logs: Tensor = chunks.columns[0]
        return (-logs.sum(1)).exp()


accumulate = Operator(
    "rglru",
    RGLRU,
    partial(run_loop, _steps),
    partial(run_chunks, _steps, lambda *_: _Decayed()),
    "fresh initial",
)
