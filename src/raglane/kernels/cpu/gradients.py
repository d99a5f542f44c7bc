"""What the gradients of both kinds of layers share: products over all elements, and the second derivative."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from raglane.cells import CELLS
from raglane.errors import ArgumentError
from raglane.kernels import reference
from raglane.kernels.checks import check_offsets
from raglane.kernels.contract import Request
from raglane.kernels.cpu.memory import Given, Layer, Saved
from raglane.native.library import call, library
from raglane.native.memory import address, addresses

__all__ = [
    "Grads",
    "Kind",
    "Ran",
    "call_layer",
    "outer",
    "product_dtype",
    "reference_gradients",
    "spend",
    "to_dtype",
]

# How many times as high as wide a matrix must be for outer to begin with its transpose; measured.
_TALL = 32

Grads = tuple[Tensor | None, ...]
"""Gradients of ``Layer.tensors()``, in that order; None where there is none."""


class Ran(NamedTuple):
    """What running a layer gives.

    Attributes:
        output: ``(N, K * P)``, or None where it was not needed.
        final: the final states, ``(K, B, size)`` each.
        saved: what backward needs, where one follows.
        cells: ``c`` after each element as in :class:`Saved`, where the cell has one and it was kept.
    """

    output: Tensor | None
    final: tuple[Tensor, ...]
    saved: Saved | None
    cells: Tensor | None


class Kind(ABC):
    """One kind of layers: what differs between those with matrices on the state and the element-wise ones.

    Attributes:
        function: the name of the kernels' forward function.
        pack: makes its argument of the numbers of its fields; those of backward alone are zeros.
    """

    function: ClassVar[str]
    pack: Callable[..., bytes]

    @abstractmethod
    def head(self, layer: Layer) -> tuple[int, ...]:
        """The fields of the argument up to the results."""

    def forward(self, layer: Layer, *, need_output: bool, save: bool, need_cells: bool) -> Ran:
        """Run a layer.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as :meth:`~raglane.kernels.cpu.memory.Layer.checked`.
        """
        layer = layer.checked()
        fields = self.head(layer)
        values, count, sequences = layer.values, layer.directions, layer.offsets.shape[0] - 1
        output = None
        if need_output or save:
            output = values.new_empty(values.shape[0], count * layer.sizes[0])
        final = tuple([values.new_empty(count, sequences, size) for size in layer.sizes])
        gates_shape, cells_shape = self.saved_shapes(layer)
        # Torch reads sizes one by one in half the time that it takes for a tuple of them.
        gates = values.new_empty(*gates_shape) if save else None
        cells = values.new_empty(*cells_shape) if save or need_cells else None
        call_layer(
            layer,
            self.function,
            self.pack(
                *fields,
                address(output),
                *addresses(final, 2),
                address(gates),
                address(cells),
            ),
        )
        saved = None
        if save and output is not None and gates is not None and cells is not None:
            saved = Saved(output, gates, cells, need_cells)
        return Ran(output, final, saved, cells if need_cells else None)

    def backward(self, layer: Layer, saved: Saved, given: Given, wanted: tuple[bool, ...], *, overwrite: bool) -> Grads:
        """All gradients that are wanted.

        Args:
            layer: what forward ran.
            saved: what it saved.
            given: the gradients that came in.
            wanted: which of ``layer.tensors()`` want theirs.
            overwrite: whether results may take the memory of ``saved.gates`` and of ``saved.cells`` that are not
                shared, which are lost then: autograd refuses to read them again.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: what forward ran or saved has changed since.
        """
        layer = layer.checked()
        output = (layer.values.shape[0], layer.directions * layer.sizes[0])
        gates, cells = self.saved_shapes(layer)
        given = given.checked(layer, output, cells)
        return self._backward(layer, saved.checked(layer, (output, gates, cells)), given, wanted, overwrite=overwrite)

    @abstractmethod
    def _backward(
        self, layer: Layer, saved: Saved, given: Given, wanted: tuple[bool, ...], *, overwrite: bool
    ) -> Grads:
        """What :meth:`backward` gives, of tensors that are checked."""

    @abstractmethod
    def saved_shapes(self, layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of ``Saved.gates`` and ``Saved.cells``."""

    @abstractmethod
    def states(self, layer: Layer, output: Tensor, cells: Tensor | None) -> tuple[Tensor, ...]:
        """Every state after each element, ``(N, K * size)`` a state."""


def call_layer(layer: Layer, function: str, fields: bytes) -> None:
    """Call a kernel on a layer.

    Args:
        layer: what ``fields`` say where it lies.
        function: the kernel's name.
        fields: of its struct.

    Raises:
        ArgumentError: the offsets are wrong, which the kernel alone has looked at.
        MemoryError: there was not enough for its scratch; nothing was written.
    """
    try:
        call(function, fields)
    except ArgumentError:
        check_offsets(layer.offsets, layer.values.shape[0], layer.values.device)  # in the words of all backends
        raise


def spend(*tensors: Tensor) -> None:
    """Let autograd know that saved tensors were overwritten, so that no later pass reads them."""
    torch.autograd.graph.increment_version(tensors)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what products over all elements are computed fastest.

    Without instructions for it torch's products of bfloat16 take three times as long as those of float32, and what
    widening takes is little beside either. It is not asked of the instruction set in use, but of the processor.
    """
    return torch.float32 if dtype is torch.bfloat16 and "avx512bf16" not in library().isas else dtype


def to_dtype(tensors: Iterable[Tensor | None], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """The tensors that there are, in another dtype."""
    return tuple([None if part is None else part.to(dtype) for part in tensors])


def outer(gates: Tensor, inputs: Tensor) -> Tensor:
    """The sum over the elements of the outer products of their rows: ``(N, G)`` and ``(N, D)`` to ``(G, D)``."""
    if inputs.shape[0] < _TALL * inputs.shape[1]:
        return torch.mm(gates.t(), inputs)
    # MKL takes a tall and narrow product a fifth to a third faster from the other side.
    return torch.mm(inputs.t(), gates).t().contiguous()


def reference_gradients(layer: Layer, given: Given) -> Grads:
    """All gradients by way of the reference kernel: where they are to be differentiated, or torch.func is at work."""
    keep = torch.is_grad_enabled()
    # Views, so that a gradient stops here where one of them was computed from another.
    inputs: list[Any] = [None if part is None else part.view_as(part) for part in layer.tensors()]
    if not keep:
        inputs = [None if part is None else part.detach().requires_grad_(part.requires_grad) for part in inputs]
    cell, count, states = CELLS[layer.cell], layer.directions, len(layer.initial)
    weights = inputs[1 + states :]
    each = len(weights) // count
    request = Request(
        cell,
        inputs[0],
        layer.offsets,
        None,
        tuple(inputs[1 : 1 + states]),
        tuple(cell.weights_type(*weights[each * d :][:each]) for d in range(count)),
        directions=count,
        need_states=given.cells is not None,
        state_sizes=layer.sizes,
    )
    with torch.enable_grad():
        result = reference.BACKEND.run(request, "lanes")
    cells = None if result.states is None else result.states[0][1]
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(
            (result.output, cells, *result.state), (given.output, given.cells, *given.final), strict=True
        )
        if tensor is not None and grad is not None and tensor.requires_grad
    ]
    leaves = [part for part in inputs if part is not None and part.requires_grad]
    found = iter(
        torch.autograd.grad(
            [tensor for tensor, _ in pairs], leaves, [grad for _, grad in pairs], create_graph=keep, allow_unused=True
        )
    )
    return tuple(next(found) if part is not None and part.requires_grad else None for part in inputs)
