"""Calls of a layer by ctypes, with the arguments and the answers of the operators in ``csrc/torch``.

They run where those operators are missing, and on tensors that these refuse although no argument is
wrong: those of which a copy had to be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from raglane.kernels.tensor_checks import Admitted, Gate, admit
from raglane.native import library
from raglane.native.memory import pointer

_INPUTS = "offsets", "values", "initial_h", "initial_c"
_RESULTS = "packed", "output", "final_h", "final_c", "gates", "c_states"
# Fields that backward reads in addition to those of forward, and their names in messages.
_READ = {
    "output": "saved output",
    "gates": "saved gates",
    "c_states": "saved c",
    "grad_output": "gradient of the output",
    "grad_c_states": "gradient of c",
    "grad_final_h": "gradient of the final h",
    "grad_final_c": "gradient of the final c",
}
# Fields that backward writes, without gradients of weights.
_STEPS = "grad_gates", "previous_h", "grad_h", "unprojected", "grad_skip"
_GRADS = "grad_initial_h", "grad_initial_c", "grad_values"


class Answer(NamedTuple):
    """The answer of a call."""

    results: list[Tensor]  # in the order of ``csrc/torch/operators.cpp``; empty after a refusal
    status: int  # a ``raglane_status``, or that of a call which must not be tried again
    reason: str  # of a refusal


class Sizes(Protocol):
    """The facts of a layer, without its tensors: see :class:`raglane.kernels.cpu.layer.Layer`."""

    gate: Gate
    sizes: tuple[int, ...]
    directions: int
    weights: int
    gates_width: int
    weight_fields: tuple[str, ...]

    def saved_shapes(self, elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]: ...  # noqa: D102
    def step_shapes(self, tensors: tuple[Any, ...]) -> dict[str, tuple[int, ...]]: ...  # noqa: D102


class CtypesCalls:
    """Runs a layer by ctypes."""

    def __init__(self, layer: Any) -> None:
        self._layer: Sizes = layer
        fields = library.library().structs["raglane_layer"]
        names = list(fields.formats)[: list(fields.formats).index("offsets")]
        self._pack_head = fields.packer(*names, end="offsets")
        inputs = *_INPUTS, *self._fields_of("weights")
        self._pack_forward = fields.packer(*inputs, *_RESULTS, begin="offsets")
        grads = *_STEPS, *_GRADS, *self._fields_of("grad_weights")
        self._pack_backward = fields.packer(*inputs, *_READ, *grads, begin="offsets")

    def _fields_of(self, array: str) -> list[str]:
        """Return the fields of C's struct for an array with the weights of each direction."""
        return [
            f"{array}[{direction}].{name}"
            for direction in range(self._layer.directions)
            for name in self._layer.weight_fields
        ]

    def counted(self, fields: Sequence[int], *counts: int) -> bytes:
        """Return the struct's fields before its addresses; ``counts`` of sequences, elements and
        slots.
        """
        before = library.HEAD.index("sequences")
        return self._pack_head(*fields[:before], *counts, *fields[before + 3 :])

    def pack(self, fields: Sequence[int], admitted: Admitted, dtype: torch.dtype) -> Tensor:
        """Return packed weights of ``dtype``."""
        pointers = self._pack_forward(*admitted[2], *(0,) * len(_RESULTS))
        return library.packed("raglane_pack", self.counted(fields, 0, 0, 0) + pointers, dtype)

    def forward(
        self,
        head: Tensor,
        offsets: Any,
        values: Any,
        parts: tuple[Any, ...],
        packed: Tensor | None,
        need_output: bool,
        save: bool,
        need_c: bool,
        order: Tensor | None,  # noqa: ARG002
        layout: int,
    ) -> Answer:
        """Run the layer like the operator ``forward``, which also reads tables."""
        admitted = None if layout else self._layer.gate.try_validate(offsets, (values, *parts))
        if admitted is None:
            return _REFUSED
        return self.forward_of(head, admitted, packed, need_output, save, need_c)

    def forward_of(
        self,
        head: Tensor,
        admitted: Admitted,
        packed: Tensor | None,
        need_output: bool,
        save: bool,
        need_c: bool,
    ) -> Answer:
        """Run the layer on validated tensors; no user code may run after the validation."""
        offsets, tensors, addresses, _ = admitted
        values = tensors[0]
        layer = self._layer
        count = layer.directions
        elements = values.shape[0]
        output = values.new_empty(elements, count * layer.sizes[0]) if need_output or save else None
        rows = offsets.shape[0] - 1
        final = [values.new_empty(count, rows, size) for size in layer.sizes]
        gates = None
        c_states = None
        if save or need_c:
            gates_shape, c_shape = layer.saved_shapes(elements)
            # torch parses sizes as separate arguments in half the time of a tuple.
            gates = library.empty(values, *gates_shape) if save else None
            c_states = values.new_empty(*c_shape) if need_c else library.empty(values, *c_shape)
        final_c = final[1] if len(final) > 1 else None
        written = (packed, output, final[0], final_c, gates, c_states)
        pointers = self._pack_forward(*addresses, *map(pointer, written))
        results = [output, *final, gates, c_states]
        return self._call("raglane_forward", head, pointers, admitted, results)

    def backward(
        self,
        head: Tensor,
        offsets: Any,
        values: Any,
        parts: tuple[Any, ...],
        saved: tuple[Any, ...],
        needed: tuple[bool, ...],
        over_gates: bool,
        over_c: bool,
        in_layout: bool,
        with_steps: bool,
    ) -> Answer:
        """Compute gradients like the operator ``backward``, which also reads tables."""
        admitted = None if in_layout else self._layer.gate.try_validate(offsets, (values, *parts))
        if admitted is None:
            return _REFUSED
        return self.backward_of(head, admitted, saved, needed, over_gates, over_c, with_steps)

    def backward_of(
        self,
        head: Tensor,
        admitted: Admitted,
        saved: tuple[Any, ...],
        needed: tuple[bool, ...],
        over_gates: bool,
        over_c: bool,
        with_steps: bool,
    ) -> Answer:
        """Compute the gradients of validated tensors; raise if a saved one or a gradient is wrong."""
        offsets, tensors, addresses, _ = admitted
        values = tensors[0]
        layer = self._layer
        elements = values.shape[0]
        output = (elements, layer.directions * layer.sizes[0])
        gates, c_states = layer.saved_shapes(elements)
        states = [(layer.directions, offsets.shape[0] - 1, size) for size in layer.sizes]
        shapes = (output, gates, c_states, output, c_states, *states)
        readable, pointers, _storages = admit(_READ.values(), saved, shapes, values)
        steps: dict[str, Tensor | None] = {}
        if over_gates and layer.gates_width:
            steps["grad_gates"] = readable[1]
        if over_c:
            steps["previous_h"] = readable[2]
        own = {
            name: library.empty(values, *shape)
            for name, shape in layer.step_shapes(tensors).items()
            if name not in steps
        }
        steps |= own
        pairs = zip(tensors, needed, strict=True)
        grads = [
            torch.empty_like(tensor) if is_needed and tensor is not None else None
            for tensor, is_needed in pairs
        ]
        begin = len(tensors) - layer.weights
        initial = (*grads[1:begin], None, None)[:2]
        written = [*[steps.get(name) for name in _STEPS], *initial, grads[0], *grads[begin:]]
        read = pointers + [0] * (len(_READ) - len(pointers))
        fields = self._pack_backward(*addresses, *read, *map(pointer, written))
        results = [*grads, *(own.values() if with_steps else ())]
        return self._call("raglane_backward", head, fields, admitted, results)

    def _call(
        self,
        function: str,
        head: Tensor,
        pointers: bytes,
        admitted: Admitted,
        results: list[Tensor | None],
    ) -> Answer:
        """Call a function of C with the struct of the layer."""
        counts = admitted[0].shape[0] - 1, admitted[1][0].shape[0], 0
        fields = self.counted(head.tolist()[:-1], *counts) + pointers
        status, reason = library.answer(function, fields)
        if status:
            return Answer([], status, reason)
        return Answer([tensor for tensor in results if tensor is not None], status, reason)


_REFUSED = Answer([], library.BAD_ARGUMENT, "the kernels cannot read a tensor")
