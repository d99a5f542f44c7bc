"""Layers with a matrix product of the state in each step: RNN, LSTM and GRU.

The kernels run the time loops and the products of the backward pass. Only large products of
bfloat16 are computed by torch, on processors with instructions for it, where torch is faster.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from raglane.cells.spec import Weights
from raglane.kernels.cpu.layer import (
    KINDS,
    Grads,
    Layer,
    LayerSpec,
    StepGrads,
    Tensors,
    add_product,
    outer,
)
from raglane.native import library
from raglane.native.library import cell_facts


class MatrixLayer(Layer):
    """See :class:`~raglane.kernels.cpu.layer.Layer`."""

    weight_fields = "input", "hidden", "input_bias", "hidden_bias", "projection"
    checkpoints = True

    def __init__(self, spec: LayerSpec) -> None:
        facts = cell_facts()[spec.cell]
        self.slots = facts.slots
        self.hidden_size = spec.sizes[-1]
        self.stride = library.row_length(facts.slots * (-(-self.hidden_size // 16) * 16))
        projection = 0 if spec.sizes[0] == self.hidden_size else spec.sizes[0]
        super().__init__(
            spec,
            facts.number,
            input_size=spec.input_size,
            hidden_size=self.hidden_size,
            projection_size=projection,
            gate_stride=self.stride,
            checkpoint_every=spec.checkpoint_every,
        )
        self.saves = facts.saved > 0 and not self.checkpoint_every
        self.gates_width = self.stride if self.saves else 0
        self.c_rows = (self.directions,)
        self.c_width = self.sizes[1] if len(self.sizes) > 1 else 0
        self.overwrites_c = len(self.sizes) > 1 and not projection and not self.checkpoint_every

    @staticmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """See :class:`~raglane.kernels.cpu.layer.Layer`."""
        if c_states is None:
            return (output,)
        return output, c_states[0] if c_states.shape[0] == 1 else torch.cat(c_states.unbind(), 1)

    def step_shapes(self, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        """See :class:`~raglane.kernels.cpu.layer.Layer`."""
        count = self.directions
        # With recomputed gates these gradients are in the kernels' scratch.
        total = 0 if self.checkpoint_every else tensors[0].shape[0]
        shapes: dict[str, tuple[int, ...]] = {
            "grad_gates": (count, total, self.stride),
            "previous_h": (count, total, self.sizes[0]),
        }
        if self.weights_of(tensors, 0)[4] is not None:
            shapes["grad_h"] = (count, total, self.sizes[0])
            shapes["unprojected"] = (count, total, self.hidden_size)
        return shapes

    def _by_products(
        self,
        tensors: Tensors,
        needed: tuple[bool, ...],
        grads: list[Tensor | None],
        steps: StepGrads,
    ) -> Grads:
        begin = len(tensors) - self.weights
        grad_values: Tensor | None = None
        grad_weights: list[Tensor | None] = []
        for direction in range(self.directions):
            weights = Weights(*self.weights_of(tensors, direction))
            if needed[0]:
                gates = steps.grad_gates[direction, :, : weights.input.shape[0]]
                grad_values = add_product(grad_values, gates, weights.input)
            of_direction = needed[begin + self.each * direction :][: self.each]
            grad_weights += self._weight_gradients(
                tensors[0], steps, direction, weights, of_direction
            )
        return grad_values, *grads[1:begin], *grad_weights

    def _weight_gradients(
        self,
        values: Tensor,
        steps: StepGrads,
        direction: int,
        weights: Weights,
        needed: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """Compute the gradients of the five weights of one direction."""
        rows = weights.input.shape[0]
        hidden_size = self.hidden_size
        gates = steps.grad_gates[direction, :, : self.slots * hidden_size]
        h_before = cast(Tensor, steps.previous_h)[direction]
        result: list[Tensor | None] = [None] * 5
        # The input and hidden product of a GRU's candidate have different gradients.
        split = gates.shape[1] > rows
        if needed[0]:
            result[0] = outer(gates[:, :rows], values)
        if needed[1]:
            result[1] = (
                torch.cat(
                    [
                        outer(gates[:, : rows - hidden_size], h_before),
                        outer(gates[:, rows:], h_before),
                    ]
                )
                if split
                else outer(gates, h_before)
            )
        if needed[2] or needed[3]:
            sums = gates.sum(0)
            result[2] = sums[:rows] if needed[2] else None
            if needed[3]:
                result[3] = (
                    torch.cat([sums[: rows - hidden_size], sums[rows:]]) if split else sums.clone()
                )
        if needed[4] and steps.grad_h is not None and steps.unprojected is not None:
            result[4] = torch.mm(steps.grad_h[direction].t(), steps.unprojected[direction])
        return result


KINDS[Weights] = MatrixLayer


# The constants of ``lane_capacity`` in csrc/scan/lanes.h, for caches that fit the maximum of lanes.
_SURPLUS = 1.15  # lanes in relation to those that a thread would need without gaps
_MOST = 48  # lanes of a thread
_EVEN = 6  # their number is a multiple of this one


def lanes_of(lengths: Tensor, threads: int) -> int:
    """Return the lanes of all threads together, at least 1; for predictions of run times."""
    count = int(lengths.count_nonzero())
    total = int(lengths.sum())
    if count == 0:
        return 1
    needed = int(_SURPLUS * total / (threads * int(lengths.max()))) + 1
    share = -(-count // threads)
    return threads * min(share, _MOST, -(-needed // _EVEN) * _EVEN)
