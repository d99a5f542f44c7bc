"""One layer of the cpu kernels, without its tensors: what stays from call to call, and how forward and backward go.

C takes an address at its word. Whatever a caller can reach may have changed since it was last looked at: by
``.data =``, ``set_``, ``resize_``, ``functional_call``, a parametrization, a hook on saved tensors, an attribute of
the layer. So nothing is remembered of tensors, and every one is looked at between the last line of the caller's code
and the call (:mod:`raglane.kernels.cpu.memory`).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane.cells import CELLS
from raglane.errors import ArgumentError, message
from raglane.kernels.checks import check_offsets
from raglane.kernels.cpu.memory import Given, Rules, Saved
from raglane.native import large, library
from raglane.native.memory import address, addresses

__all__ = ["Grads", "Layer", "LayerSpec", "Ran", "Tensors", "pack", "pack_backward"]

# raglane_layer: fourteen numbers, then offsets, values, two states, twelve weights, packed ones, five results; then
# what is backward's alone, eleven gradients of the time loop and thirteen that are made after it.
pack = struct.Struct("=36q192x").pack
pack_backward = struct.Struct("=60q").pack

Tensors = tuple[Any, ...]
"""A layer's tensors: the values ``(N, D)``; ``(K, B, size)`` per state, or none where all begin with zeros; and the
weights, those of the cell's ``weights_type``, direction after direction, None for one that is not there."""

Grads = tuple[Tensor | None, ...]
"""Gradients of :data:`Tensors`, in that order; None where there is none."""


class LayerSpec(NamedTuple):
    """What a layer is made for.

    Attributes:
        cell: a key of ``CELLS``.
        input_size: ``D``.
        sizes: of the states.
        directions: ``K``.
        dtype: of all tensors.
        checkpoint_every: 0 to save what backward needs of every element; else of how many steps of a sequence at a time
            backward computes it again. Layers with matrices on the state alone have that.
    """

    cell: str
    input_size: int
    sizes: tuple[int, ...]
    directions: int
    dtype: torch.dtype
    checkpoint_every: int = 0


class Ran(NamedTuple):
    """What running a layer gives.

    Attributes:
        output: ``(N, K * P)``, or None where it was not needed.
        final: the final states, ``(K, B, size)`` each.
        saved: what backward needs, where one follows.
        c_states: ``c`` after each element as in :class:`Saved`, where the cell has one and it was kept.
    """

    output: Tensor | None
    final: tuple[Tensor, ...]
    saved: Saved | None
    c_states: Tensor | None


class Layer(ABC):
    """A layer of one cell and certain sizes, in all its directions. ``K`` directions, other letters as in ``Request``.

    The two kinds, with matrices on the state and without, differ in what is abstract here.

    Args:
        spec: what it is made for.

    Raises:
        ValueError, KeyError: no such layer; :func:`raglane.kernels.cpu.memory.refuse` has the words.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.cell, self.input_size, self.sizes, self.directions, self.dtype, self.checkpoint_every = spec
        self.rules = Rules(self.cell, self.input_size, self.sizes, self.directions, self.dtype)
        self.each = len(CELLS[self.cell].weights_type._fields)
        self.weights = self.directions * self.each

    def initial(self, tensors: Tensors) -> Tensors:
        """The initial states among a layer's tensors."""
        return tensors[1 : len(tensors) - self.weights]

    def weights_of(self, tensors: Tensors, direction: int) -> Tensors:
        """One direction's weights among a layer's tensors."""
        begin = len(tensors) - self.weights + direction * self.each
        return tensors[begin : begin + self.each]

    @abstractmethod
    def head(
        self, offsets: Tensor, tensors: Tensors, packed: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> tuple[int, ...]:
        """The fields of the argument up to the results, of tensors that are checked; see :meth:`forward`.

        ``dtype`` is what :meth:`_weights_dtype` gave; None stands for the tensors' own.
        """

    def _weights_dtype(self, packed: torch.dtype) -> torch.dtype:
        """What C is told of weights that are packed as int8, or as what the tensors are."""
        if packed is not torch.int8:
            return self.dtype
        if self.dtype is not torch.float32:
            rule, fix = "int8 weights stand beside float32", "convert the tensors"
            raise ArgumentError(message("dtype", str(self.dtype), rule, fix))
        return packed

    def packed(self, weights: Tensors, depth: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as the time loop reads them, for many calls of :meth:`forward`."""
        # On the host, whatever torch's default device is.
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        values = torch.empty(0, self.input_size, dtype=self.dtype, device="cpu")
        offsets, tensors, _storages = self.rules.checked(offsets, (values, *weights), depth)
        results = (0,) * 5
        dtype = dtype or torch.uint8
        fields = pack(*self.head(offsets, tensors, None, self._weights_dtype(dtype)), *results)
        return library.packed("raglane_pack", fields, dtype)

    def _fields_back(self, offsets: Tensor, tensors: Tensors, saved: Saved, given: Given) -> tuple[int, ...]:
        """The fields of backward's argument up to what it writes, of tensors that are checked."""
        return (
            *self.head(offsets, tensors),
            saved.output.data_ptr(),
            0,
            0,
            saved.gates.data_ptr(),
            saved.c_states.data_ptr(),
            address(given.output),
            address(given.c_states),
            *addresses(given.final, 2),
        )

    @abstractmethod
    def saved_shapes(self, elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of ``Saved.gates`` and ``Saved.c_states`` for so many elements."""

    @staticmethod
    @abstractmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """Every state after each element, ``(N, K * size)`` per state."""

    @abstractmethod
    def _backward(
        self,
        offsets: Tensor,
        tensors: Tensors,
        saved: Saved,
        given: Given,
        wanted: tuple[bool, ...],
        *,
        overwrite: bool,
    ) -> Grads:
        """What :meth:`backward` gives, of tensors that are checked."""

    def forward(
        self,
        offsets: Tensor,
        tensors: Tensors,
        *,
        need_output: bool,
        save: bool,
        need_c: bool,
        depth: int = 0,
        packed: Tensor | None = None,
    ) -> Ran:
        """Run the layer.

        Args:
            offsets: ``(B + 1,)`` int64.
            tensors: the rest.
            need_output: whether the output must be built.
            save: whether backward follows.
            need_c: whether ``c`` after each element is wanted.
            depth: which layer of a stack this is, for messages.
            packed: what :meth:`packed` made of these weights, whose numbers have not changed since.
        """
        offsets, tensors, _storages = self.rules.checked(offsets, tensors, depth)
        return self.run(offsets, tensors, need_output=need_output, save=save, need_c=need_c, packed=packed)

    def run(
        self,
        offsets: Tensor,
        tensors: Tensors,
        *,
        need_output: bool,
        save: bool,
        need_c: bool,
        packed: Tensor | None = None,
    ) -> Ran:
        """What :meth:`forward` does, of tensors that were checked a moment ago, with nobody else's code in between.

        The caller holds their memory, see :data:`raglane.kernels.cpu.memory.Storages`.
        """
        fields = self.head(offsets, tensors, packed, None if packed is None else self._weights_dtype(packed.dtype))
        values, count, sequences = tensors[0], self.directions, offsets.shape[0] - 1
        output = None
        if need_output or save:
            output = values.new_empty(values.shape[0], count * self.sizes[0])
        final = tuple([values.new_empty(count, sequences, size) for size in self.sizes])
        gates = c_states = None
        if save or need_c:
            gates_shape, c_shape = self.saved_shapes(values.shape[0])
            # Torch reads sizes one by one in half the time that it takes for a tuple of them.
            gates = large.empty(values, *gates_shape) if save else None
            c_states = values.new_empty(*c_shape) if need_c else large.empty(values, *c_shape)
        argument = pack(*fields, address(output), *addresses(final, 2), address(gates), address(c_states))
        self._call("raglane_forward", argument, offsets, values)
        saved = None
        if save and output is not None and gates is not None and c_states is not None:
            saved = Saved(output, gates, c_states, need_c)
        return Ran(output, final, saved, c_states if need_c else None)

    def backward(
        self,
        offsets: Tensor,
        tensors: Tensors,
        saved: Saved,
        given: Given,
        wanted: tuple[bool, ...],
        *,
        overwrite: bool,
        depth: int = 0,
    ) -> Grads:
        """All gradients that are wanted."""
        offsets, tensors, _storages = self.rules.checked(offsets, tensors, depth)
        values, count = tensors[0], self.directions
        output = (values.shape[0], count * self.sizes[0])
        gates, c_states = self.saved_shapes(values.shape[0])
        states = [(count, offsets.shape[0] - 1, size) for size in self.sizes]
        given = given.checked((output, c_states, *states), values)
        saved = saved.checked((output, gates, c_states), values)
        return self._backward(offsets, tensors, saved, given, wanted, overwrite=overwrite)

    def _makes_all(self, tensors: Tensors) -> bool:
        """Whether the kernels make the gradients of values and weights as well.

        Of bfloat16 they widen the numbers first. Where an instruction spares torch that, its products are faster, and
        take longer to call than to compute where there is little to do. Where that begins, the kernels say.
        """
        kernels = library.library()
        # What is computed again is there for the kernels alone.
        if self.checkpoint_every or self.dtype is not torch.bfloat16 or "avx512bf16" not in kernels.isas:
            return True
        few = sum(part.numel() for part in self.weights_of(tensors, 0)[:2] if part is not None)
        return bool(tensors[0].shape[0] <= kernels.few_elements and few <= kernels.few_weights)

    def _call(self, function: str, fields: bytes, offsets: Tensor, values: Tensor) -> None:
        """Call a kernel."""
        try:
            library.call(function, fields)
        except ArgumentError:
            check_offsets(offsets, values.shape[0], values.device)  # in the words of all backends
            raise
