"""Layers with an element-wise recurrence: IndRNN, minGRU, minLSTM, QRNN and SRU.

The kernels compute the input products, because a library may round a row differently in another
batch. They also run the time loops, which sum the gradients of biases and recurrent factors. Only
large products of the backward pass in bfloat16 are computed by torch, on processors with
instructions for it.
"""

from __future__ import annotations

from torch import Tensor

from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import ArgumentError
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
from raglane.native.library import cell_facts


class ElementwiseLayer(Layer):
    """See :class:`~raglane.kernels.cpu.layer.Layer`."""

    weight_fields = "input", "hidden", "input_bias", "skip"
    summed = 1, 2  # of recurrent factors and biases

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

    def step_shapes(self, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        """See :class:`~raglane.kernels.cpu.layer.Layer`."""
        values = tensors[0]
        count = self.directions
        first = ElementwiseWeights(*self.weights_of(tensors, 0))
        width = first.input.shape[0] + (0 if first.skip is None else self.sizes[0])
        shapes: dict[str, tuple[int, ...]] = {"grad_gates": (count, values.shape[0], width)}
        if self.skips and first.skip is None:
            shapes["grad_skip"] = (count, *values.shape)
        return shapes

    def _by_products(
        self,
        tensors: Tensors,
        needed: tuple[bool, ...],
        grads: list[Tensor | None],
        steps: StepGrads,
    ) -> Grads:
        """See :class:`~raglane.kernels.cpu.layer.Layer`.

        ``steps.grad_skip``, of an SRU without ``skip``, is the gradient that reaches the values
        without a product.
        """
        values = tensors[0]
        first = len(tensors) - self.weights
        grad_values: Tensor | None = None
        for direction in range(self.directions):
            weights = ElementwiseWeights(*self.weights_of(tensors, direction))
            rows = weights.input.shape[0]
            begin = first + direction * self.each
            of_input = steps.grad_gates[direction, :, :rows]
            of_skip = steps.grad_gates[direction, :, rows:]
            if needed[0]:
                grad_values = add_product(grad_values, of_input, weights.input)
                if weights.skip is not None:
                    grad_values = add_product(grad_values, of_skip, weights.skip)
            if needed[begin]:
                grads[begin] = outer(of_input, values)
            if needed[begin + 3] and weights.skip is not None:
                grads[begin + 3] = outer(of_skip, values)
        if grad_values is not None and steps.grad_skip is not None:
            for of_direction in steps.grad_skip:
                grad_values += of_direction
        return grad_values, *grads[1:]


KINDS[ElementwiseWeights] = ElementwiseLayer
