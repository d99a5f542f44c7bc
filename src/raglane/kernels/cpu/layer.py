"""One layer of the cpu kernels without its tensors: what is kept from call to call, and how forward and backward go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from raglane._utils import forks
from raglane._utils.messages import message
from raglane.cells import CELLS
from raglane.errors import ArgumentError
from raglane.kernels.checks import check_offsets
from raglane.kernels.cpu.gate import Gate, admit, refuse
from raglane.native import library
from raglane.native.memory import NO_MEMORY

Tensors = tuple[Any, ...]
"""A layer's tensors: the values ``(N, D)``; ``(K, B, size)`` per state, or none where all begin with zeros; and the
weights, those of the cell's ``weights_type``, direction after direction, None for one that is not there."""

Grads = tuple[Tensor | None, ...]
"""Gradients of :data:`Tensors`, in that order; None where there is none."""

Admitted = tuple[Tensor, Tensors, list[int], list[UntypedStorage]]
"""Offsets and tensors as :class:`~raglane.kernels.cpu.gate.Gate` gives them, just before a call of C."""

_HEAD = "abi", "isa", "cell", "dtype", "flags", "threads", "directions"
# What backward reads besides what forward does.
_READ = "output", "gates", "c_states", "grad_output", "grad_c_states", "grad_final_h", "grad_final_c"


class LayerSpec(NamedTuple):
    """A key of ``CELLS``, ``D``, the sizes of the states, ``K`` and the dtype of all tensors.

    And how many steps of a sequence at a time backward computes again; 0 to save all that it needs.
    """

    cell: str
    input_size: int
    sizes: tuple[int, ...]
    directions: int
    dtype: torch.dtype
    checkpoint_every: int = 0


class Ran(NamedTuple):
    """The output ``(N, K * P)``, None where it was not needed; the final states, ``(K, B, size)`` each; what backward
    needs, None where none follows; and ``c`` after each element, where the cell has one and it was kept.
    """

    output: Tensor | None
    final: tuple[Tensor, ...]
    gates: Tensor | None
    c_states: Tensor | None


class Saved(NamedTuple):
    """What backward needs of forward besides the layer; tensors without numbers where there is nothing.

    The output ``(N, K * P)``; ``(K, N, ...)``, as the kernels lay them out; ``c`` after each element, ``(K, N, H)`` of
    an LSTM, ``(N, K * H)`` of an element-wise cell; and whether the caller has ``c_states`` as well.
    """

    output: Tensor
    gates: Tensor
    c_states: Tensor
    is_shared: bool = False


class Given(NamedTuple):
    """The gradients of what running a layer gave; None stands for zeros."""

    output: Tensor | None
    c_states: Tensor | None
    final: tuple[Tensor | None, ...]


_NAMES = (
    *("saved output", "saved gates", "saved c"),
    *("gradient of the output", "gradient of c", "gradient of the final h", "gradient of the final c"),
)


class Layer(ABC):
    """A layer of one cell and certain sizes, in all its directions; raises ValueError or KeyError for no such layer.

    It is shared by threads: nothing in it changes but what is packed once per instruction set.
    """

    # The fields of C's struct that hold the weights of a direction, and what backward writes besides their gradients.
    weight_fields: ClassVar[tuple[str, ...]]
    written: ClassVar[tuple[str, ...]]
    # Whether backward can compute again what it needs.
    checkpoints: ClassVar[bool] = False
    # The widths of what is saved of an element, and the dimensions of ``c`` before the elements.
    gates_width: int
    c_width: int
    c_rows: tuple[int, ...] = ()

    def __init__(self, spec: LayerSpec, number: int, **sizes: int) -> None:
        self.cell, self.input_size, self.sizes, self.directions, self.dtype, self.checkpoint_every = spec
        self.gate = Gate(self.cell, self.input_size, self.sizes, self.directions, self.dtype)
        self.each = len(CELLS[self.cell].weights_type._fields)
        self.weights = self.directions * self.each
        self.number = number
        fields = library.library().structs["raglane_layer"]
        self._pack_head = fields.packer(*_HEAD, end="sequences")
        self._pack_counts = fields.packer("sequences", "elements", begin="sequences", end="input_size")
        self._sizes = fields.packer(*sizes, begin="input_size", end="offsets")(*sizes.values())
        self._heads: dict[tuple[str, int, int, torch.dtype], bytes] = {}
        weights, gradients = [
            [f"{kind}[{direction}].{name}" for direction in range(self.directions) for name in self.weight_fields]
            for kind in ("weights", "grad_weights")
        ]
        given = "offsets", "values", "initial_h", "initial_c", *weights
        results = "packed", "output", "final_h", "final_c", "gates", "c_states"
        self._pack_forward = fields.packer(*given, *results, begin="offsets")
        self._pack_backward = fields.packer(*given, *_READ, *self.written, *gradients, begin="offsets")

    def initial(self, tensors: Tensors) -> Tensors:
        """The initial states among a layer's tensors."""
        return tensors[1 : len(tensors) - self.weights]

    def weights_of(self, tensors: Tensors, direction: int) -> Tensors:
        """One direction's weights among a layer's tensors."""
        begin = len(tensors) - self.weights + direction * self.each
        return tensors[begin : begin + self.each]

    def saved_shapes(self, elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of ``Saved.gates`` and ``Saved.c_states`` for so many elements."""
        return (self.directions, elements, self.gates_width), (*self.c_rows, elements, self.c_width)

    @staticmethod
    @abstractmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """Every state after each element, ``(N, K * size)`` per state."""

    def admit(self, offsets: Any, tensors: Tensors, depth: int = 0) -> Admitted:
        """A layer's tensors in memory that C can read; ``depth`` is the layer's in its stack, for messages."""
        return self.gate.look(offsets, tensors) or self.gate.normalised(offsets, tensors, depth)

    def forward(
        self,
        admitted: Admitted,
        *,
        need_output: bool,
        save: bool,
        need_c: bool,
        packed: Tensor | None = None,
    ) -> Ran:
        """Run the layer.

        Nobody else's code may come between :meth:`admit` and this. With ``save`` backward follows, with ``need_c`` the
        caller wants ``c`` after each element. ``packed`` is what :meth:`packed` made of these weights, whose numbers
        have not changed since.
        """
        offsets, tensors, addresses, _ = admitted
        values, count = tensors[0], self.directions
        elements, sequences = values.shape[0], offsets.shape[0] - 1
        output = gates = c_states = None
        if need_output or save:
            output = values.new_empty(elements, count * self.sizes[0])
        final = tuple([values.new_empty(count, sequences, size) for size in self.sizes])
        if save or need_c:
            gates_shape, c_shape = self.saved_shapes(elements)
            # Torch reads sizes one by one in half the time that it takes for a tuple of them.
            gates = library.empty(values, *gates_shape) if save else None
            c_states = values.new_empty(*c_shape) if need_c else library.empty(values, *c_shape)
        parts = (packed, output, final[0], final[1] if len(final) > 1 else None, gates, c_states)
        pointers = self._pack_forward(*addresses, *[0 if part is None else part.data_ptr() for part in parts])
        head = self._head(sequences, elements, self.dtype if packed is None else self._weights_dtype(packed.dtype))
        try:
            library.call("raglane_forward", head + pointers)
        except ArgumentError:
            check_offsets(offsets, elements, values.device)  # in the words of all backends
            raise
        return Ran(output, final, gates, c_states)

    def _head(self, sequences: int, elements: int, dtype: torch.dtype) -> bytes:
        """The fields of the struct before its pointers; ``dtype`` is that of the weights."""
        kernels = library.library()
        key = kernels.isa, kernels.flags, torch.get_num_threads() if forks.threads_before is None else 1, dtype
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._pack_head(*library.preamble(self.number, dtype), self.directions)
        return head + self._pack_counts(sequences, elements) + self._sizes

    def _weights_dtype(self, packed: torch.dtype) -> torch.dtype:
        """The dtype for C of weights that are packed as int8, or as what the tensors are."""
        if packed is not torch.int8:
            return self.dtype
        if self.dtype is not torch.float32:
            rule, fix = "torch.float32 with int8 weights", "convert the tensors with .to(torch.float32)"
            raise ArgumentError(message("dtype", str(self.dtype), rule, fix))
        return packed

    def packed(self, weights: Tensors, depth: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as the time loop reads them, for many calls of :meth:`forward`."""
        # On the host, whatever torch's default device is.
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        values = torch.empty(0, self.input_size, dtype=self.dtype, device="cpu")
        _, _, addresses, _storages = self.admit(offsets, (values, *weights), depth)
        dtype = dtype or torch.uint8
        fields = self._head(0, 0, self._weights_dtype(dtype)) + self._pack_forward(*addresses, *(0,) * 6)
        return library.packed("raglane_pack", fields, dtype)

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
        """All gradients that are wanted; with ``overwrite`` they may take the memory of what was saved."""
        offsets, tensors, addresses, _storages = self.admit(offsets, tensors, depth)
        values, count, sequences = tensors[0], self.directions, offsets.shape[0] - 1
        output = (values.shape[0], count * self.sizes[0])
        gates, c_states = self.saved_shapes(values.shape[0])
        states = [(count, sequences, size) for size in self.sizes]
        parts = (*saved[:3], given.output, given.c_states, *given.final)
        shapes = (output, gates, c_states, output, c_states, *states)
        own, places, _more_storages = admit(_NAMES, parts, shapes, values)
        saved = Saved(own[0], own[1], own[2], saved.is_shared)  # type: ignore[arg-type]
        fields = addresses + places + [0] * (len(_READ) - len(places))
        return self._backward(offsets, tensors, saved, fields, wanted, overwrite=overwrite)

    @abstractmethod
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
        """The gradients from tensors that were admitted; ``fields`` are the pointers that C reads."""

    def _walk(self, offsets: Tensor, values: Tensor, fields: list[int], written: list[Tensor | None]) -> None:
        """Call C's backward, which writes to the tensors ``written`` and then to the weights' gradients among them."""
        pointers = self._pack_backward(*fields, *[0 if part is None else part.data_ptr() for part in written])
        head = self._head(offsets.shape[0] - 1, values.shape[0], self.dtype)
        try:
            library.call("raglane_backward", head + pointers)
        except ArgumentError:
            check_offsets(offsets, values.shape[0], values.device)
            raise

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


KINDS: dict[type, type[Layer]] = {}
"""The kinds of layers by the type of their weights; each module of a kind has its line."""


def kind_of(cell: str) -> type[Layer] | None:
    """The kind of layer that fits a cell's weights, kernels or not: ``torch.compile`` traces through it."""
    return KINDS.get(CELLS[cell].weights_type) if cell in CELLS else None


@lru_cache(maxsize=512)
def _find_layer(*spec: Any) -> Layer:
    made = LayerSpec(*spec)
    return KINDS[CELLS[made.cell].weights_type](made)  # type: ignore[call-arg]


def layer_of(
    cell: str,
    offsets: Any,
    tensors: Tensors,
    weights: int,
    sizes: tuple[int, ...],
    directions: int,
    depth: int = 0,
    checkpoint_every: int = 0,
) -> Layer:
    """The layer for tensors of which the last ``weights`` are weights; made once for each :class:`LayerSpec`.

    ``depth`` is the layer's in its stack, for messages.
    """
    try:
        values = tensors[0]
        return _find_layer(cell, int(values.shape[1]), sizes, directions, values.dtype, checkpoint_every)
    except NO_MEMORY:
        begin = len(tensors) - weights
        refuse(cell, offsets, tensors[0], tensors[1:begin], tensors[begin:], sizes, directions, depth)
        raise


# ---- gradients beside the kernels ---------------------------------------------------------------------------------

# How many times as high as wide a matrix must be for outer to begin with its transpose; measured.
_TALL = 32

_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def is_last_use() -> bool:
    """Whether the graph is freed after this backward pass, so that what was saved may be overwritten."""
    return _keeps_graph is not None and not _keeps_graph()


def spend(*tensors: Tensor) -> None:
    """Let autograd know that saved tensors were overwritten, so that no later pass reads them."""
    torch.autograd.graph.increment_version(tensors)


def outer(gates: Tensor, inputs: Tensor) -> Tensor:
    """The sum over the elements of the outer products of their rows: ``(N, G)`` and ``(N, D)`` to ``(G, D)``."""
    if inputs.shape[0] < _TALL * inputs.shape[1]:
        return torch.mm(gates.t(), inputs)
    # MKL takes a tall and narrow product a fifth to a third faster from the other side.
    return torch.mm(inputs.t(), gates).t().contiguous()


def add_product(total: Tensor | None, gates: Tensor, weight: Tensor) -> Tensor:
    """The gradients of products x their weights, added to ``total``."""
    return torch.mm(gates, weight) if total is None else total.addmm_(gates, weight)
