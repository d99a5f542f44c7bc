"""Layers whose recurrence is element-wise: IndRNN, minGRU, minLSTM, QRNN and SRU.

The products are the kernels' own, because a library's may round a row differently in another batch, and so are the
time loops, the sums for biases and recurrent factors among them. Only large products of the backward pass in bfloat16
are torch's, where an instruction multiplies it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from raglane._utils.messages import message
from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import ArgumentError
from raglane.kernels.cpu.layer import KINDS, Grads, Layer, LayerSpec, Saved, Tensors, add_product, outer, spend
from raglane.native import library
from raglane.native.library import cell_facts


class ElementwiseLayer(Layer):
    """See :class:`~raglane.kernels.cpu.layer.Layer`."""

    weight_fields = "input", "hidden", "input_bias", "skip"
    written = "grad_gates", "grad_skip", "grad_initial_h", "grad_initial_c", "grad_values"

    def __init__(self, spec: LayerSpec) -> None:
        if spec.checkpoint_every:
            rule = "0 for element-wise cells, which save what the backward pass needs"
            raise ArgumentError(message("checkpoint_every", repr(spec.checkpoint_every), rule, "pass 0"))
        facts = cell_facts()[spec.cell]
        super().__init__(spec, facts.number, input_size=spec.input_size, hidden_size=spec.sizes[0])
        # What skips the cell has a product of its own, where D is not H.
        self.skips = facts.skips
        saved = facts.saved + (facts.skips and self.input_size != self.sizes[0])
        self.gates_width = saved * self.sizes[0]
        self.c_width = self.directions * self.sizes[0] if len(self.sizes) > 1 else 0

    @staticmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """See :class:`~raglane.kernels.cpu.layer.Layer`."""
        return (output,) if c_states is None else (output, c_states)

    def _backward(
        self,
        offsets: Tensor,
        tensors: Tensors,
        saved: Saved,
        fields: list[int],
        wanted: tuple[bool, ...],
        *,
        overwrite: bool,
    ) -> Grads:
        values, count, size = tensors[0], self.directions, self.sizes[0]
        weights = [ElementwiseWeights(*self.weights_of(tensors, d)) for d in range(count)]
        rows = weights[0].input.shape[0]
        skips = self.skips and weights[0].skip is None
        width = rows if weights[0].skip is None else rows + size
        keeps = overwrite and saved.gates.numel() > 0
        gates = saved.gates if keeps else library.empty(values, count, values.shape[0], width)
        skipped = library.empty(values, count, *values.shape) if skips else None
        initial = tuple([torch.empty_like(part) for part in self.initial(tensors)])
        makes_all = self._makes_all(tensors)
        grad_values = torch.empty_like(values) if makes_all and wanted[0] else None
        begin = len(tensors) - self.weights
        # The sums for factors and biases are the time loop's.
        made = [
            torch.empty_like(part) if part is not None and want and (makes_all or place % self.each in (1, 2)) else None
            for place, (part, want) in enumerate(zip(tensors[begin:], wanted[begin:], strict=True))
        ]
        written = [gates, skipped, *initial, *[None] * (2 - len(initial)), grad_values, *made]
        self._walk(offsets, values, fields, written)
        if keeps:
            spend(saved.gates)
        if makes_all:
            return grad_values, *initial, *made
        return self._by_products(values, weights, gates, skipped, made, initial, wanted)

    def _by_products(
        self,
        values: Tensor,
        weights: list[ElementwiseWeights],
        gates: Tensor,
        skipped: Tensor | None,
        made: list[Tensor | None],
        initial: Grads,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The gradients of values and weights by torch's products, and those that the kernels have made.

        ``gates`` are gradients of the input products, ``(K, N, S * H)``; ``skipped`` is, of an SRU without ``skip``,
        what reaches the values past all products, ``(K, N, H)``.
        """
        rows, states = weights[0].input.shape[0], len(initial)
        grad_values: Tensor | None = None
        found: list[Tensor | None] = []
        for d, (part, of_input) in enumerate(zip(weights, gates[..., :rows].unbind(), strict=True)):
            wants = wanted[1 + states + 4 * d :][:4]
            of_skip = None if part.skip is None else gates[d, :, rows:]
            if wanted[0]:
                grad_values = add_product(grad_values, of_input, part.input)
                if of_skip is not None:
                    grad_values = add_product(grad_values, of_skip, cast(Tensor, part.skip))
            found += [
                outer(of_input, values) if wants[0] else None,
                *made[4 * d + 1 : 4 * d + 3],
                outer(of_skip, values) if wants[3] and of_skip is not None else None,
            ]
        if grad_values is not None and skipped is not None:
            for part in skipped:
                grad_values += part
        return grad_values, *initial, *found


KINDS[ElementwiseWeights] = ElementwiseLayer
