"""Layers with an element-wise recurrence: IndRNN, minGRU, minLSTM, QRNN and SRU.

The kernels compute the input products, because a library may round a row differently in another
batch. They also run the time loops, which sum the gradients of biases and recurrent factors. Only
large products of the backward pass in bfloat16 are computed by torch, on processors with
instructions for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import ArgumentError
from raglane.kernels.cpu.layer import (
    KINDS,
    BackwardCall,
    Grads,
    Layer,
    LayerSpec,
    add_product,
    outer,
    spend,
)
from raglane.native import library
from raglane.native.library import cell_facts


class ElementwiseLayer(Layer):
    """See :class:`~raglane.kernels.cpu.layer.Layer`."""

    weight_fields = "input", "hidden", "input_bias", "skip"
    written = "grad_gates", "grad_skip", "grad_initial_h", "grad_initial_c", "grad_values"

    def __init__(self, spec: LayerSpec) -> None:
        if spec.checkpoint_every:
            rule = "0 for an element-wise cell, whose kernels do not recompute gates"
            raise ArgumentError("checkpoint_every", repr(spec.checkpoint_every), rule, "pass 0")
        facts = cell_facts()[spec.cell]
        super().__init__(spec, facts.number, input_size=spec.input_size, hidden_size=spec.sizes[0])
        # If D is not H, the input that skips the cell has its own product.
        self.skips = facts.skips
        saved = facts.saved + (facts.skips and self.input_size != self.sizes[0])
        self.gates_width = saved * self.sizes[0]
        self.c_width = self.directions * self.sizes[0] if len(self.sizes) > 1 else 0

    @staticmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """See :class:`~raglane.kernels.cpu.layer.Layer`."""
        return (output,) if c_states is None else (output, c_states)

    def _backward(self, call: BackwardCall) -> Grads:
        tensors = call.tensors
        needed = call.needed
        saved_gates = call.saved.gates
        values = tensors[0]
        count = self.directions
        size = self.sizes[0]
        first = ElementwiseWeights(*self.weights_of(tensors, 0))
        width = first.input.shape[0] + (0 if first.skip is None else size)
        reuse_gates = call.overwrite and saved_gates.numel() > 0
        gates = saved_gates if reuse_gates else library.empty(values, count, values.shape[0], width)
        skipped = (
            library.empty(values, count, *values.shape)
            if self.skips and first.skip is None
            else None
        )
        initial = [torch.empty_like(state) for state in self.initial(tensors)]
        computes_all = self._computes_all_gradients(tensors)
        grad_values = torch.empty_like(values) if computes_all and needed[0] else None
        begin = len(tensors) - self.weights
        # The time loop always sums the gradients of recurrent factors and biases, at index 1 and 2.
        grads = [
            torch.empty_like(weight)
            if weight is not None and is_needed and (computes_all or index % self.each in (1, 2))
            else None
            for index, (weight, is_needed) in enumerate(
                zip(tensors[begin:], needed[begin:], strict=True)
            )
        ]
        self._run_backward(
            call, [gates, skipped, *initial, *[None] * (2 - len(initial)), grad_values, *grads]
        )
        if reuse_gates:
            spend(saved_gates)
        if not computes_all:
            grad_values = self._add_products(call, gates, skipped, grads)
        return grad_values, *initial, *grads

    def _add_products(
        self, call: BackwardCall, gates: Tensor, skipped: Tensor | None, grads: list[Tensor | None]
    ) -> Tensor | None:
        """Return the gradient of the values, and write those of the weights to ``grads``.

        ``gates`` are gradients of the input products, ``(K, N, S * H)``; ``skipped``, of an SRU
        without ``skip``, is the gradient that reaches the values without a product, ``(K, N, H)``.
        """
        values = call.tensors[0]
        needed = call.needed[len(call.tensors) - self.weights :]
        grad_values: Tensor | None = None
        for direction in range(self.directions):
            weights = ElementwiseWeights(*self.weights_of(call.tensors, direction))
            rows = weights.input.shape[0]
            begin = direction * self.each
            of_input = gates[direction, :, :rows]
            of_skip = gates[direction, :, rows:]
            if call.needed[0]:
                grad_values = add_product(grad_values, of_input, weights.input)
                if weights.skip is not None:
                    grad_values = add_product(grad_values, of_skip, weights.skip)
            if needed[begin]:
                grads[begin] = outer(of_input, values)
            if needed[begin + 3] and weights.skip is not None:
                grads[begin + 3] = outer(of_skip, values)
        if grad_values is not None and skipped is not None:
            for of_direction in skipped:
                grad_values += of_direction
        return grad_values


KINDS[ElementwiseWeights] = ElementwiseLayer
