"""A layer of the cpu kernels without its tensors, kept from call to call, and its two passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from raglane._utils import forks
from raglane._utils.checks import check_unchanged
from raglane.cells import CELLS
from raglane.errors import ArgumentError
from raglane.kernels.checks import Admitted, Gate, admit, check_layer
from raglane.native import library
from raglane.native.memory import NO_MEMORY, pointer
from raglane.packing.rows import Table

Tensors = tuple[Any, ...]
"""The tensors of a layer: the values ``(N, D)``; ``(K, B, size)`` per state, or none if all begin
with zeros; and the weights of the cell's ``weights_type``, direction after direction, with None for
missing ones."""

Grads = tuple[Tensor | None, ...]
"""Gradients of :data:`Tensors`, in that order; None for those that are not needed."""

_MOST_STEPS = 4096  # sequences of a step with cached offsets
_HEAD = "abi", "isa", "cell", "dtype", "flags", "threads", "directions"
# Fields that backward reads in addition to those of forward.
_READ = (
    "output",
    "gates",
    "c_states",
    "grad_output",
    "grad_c_states",
    "grad_final_h",
    "grad_final_c",
)


class LayerSpec(NamedTuple):
    """The key of a :class:`Layer`."""

    cell: str  # a key of ``CELLS``
    input_size: int  # ``D``
    sizes: tuple[int, ...]  # of the states
    directions: int  # ``K``
    dtype: torch.dtype  # of all tensors
    # Steps of a sequence that backward recomputes at a time; 0 if forward saves the gates.
    checkpoint_every: int = 0


class LayerResult(NamedTuple):
    """The result of a layer's forward pass."""

    output: Tensor | None  # ``(N, K * P)``; None if not needed
    final: tuple[Tensor, ...]  # final states, ``(K, B, size)`` each
    gates: Tensor | None  # saved for backward; None without a backward pass
    c_states: Tensor | None  # ``c`` after each element, if the cell has one and it was saved
    # Of a call with a table, for backward.
    flat_values: Tensor | None = None
    flat_output: Tensor | None = None
    saved_plan: Tensor | None = None  # see ``Layout.of_saved_plan``


class Saved(NamedTuple):
    """Tensors that forward saves for backward; empty ones if the cell does not need them."""

    output: Tensor  # ``(N, K * P)``
    gates: Tensor  # ``(K, N, ...)``, in the layout of the kernels
    c_states: Tensor  # ``(K, N, H)`` of an LSTM, ``(N, K * H)`` of an element-wise cell
    is_shared: bool = False  # True if ``c_states`` was also returned to the caller


class OutputGrads(NamedTuple):
    """The gradients of a layer's results; None for zeros."""

    output: Tensor | None
    c_states: Tensor | None
    final: tuple[Tensor | None, ...]


class BackwardCall(NamedTuple):
    """The arguments of a layer's backward pass after validation."""

    offsets: Tensor
    tensors: Tensors
    saved: Saved
    fields: list[int]  # the pointers that C reads
    needed: tuple[bool, ...]  # per tensor, True if its gradient is needed
    overwrite: bool  # gradients may reuse the memory of ``saved``


_NAMES = (
    *("saved output", "saved gates", "saved c"),
    *(
        "gradient of the output",
        "gradient of c",
        "gradient of the final h",
        "gradient of the final c",
    ),
)


class Layer(ABC):
    """A layer of one cell and certain sizes, in all its directions.

    Raises ValueError or KeyError for no such layer. Threads share it: only the cache of packed
    fields and the gate's templates change.
    """

    # The fields of C's struct for the weights of a direction.
    weight_fields: ClassVar[tuple[str, ...]]
    # The fields that backward writes, without gradients of weights.
    written: ClassVar[tuple[str, ...]]
    checkpoints: ClassVar[bool] = False  # True if backward can recompute the gates
    overwrites_c = False  # True if backward may overwrite ``c``
    # Numbers saved per element, and the dimensions of ``c`` before the elements.
    gates_width: int
    c_width: int
    c_rows: tuple[int, ...] = ()

    def __init__(self, spec: LayerSpec, number: int, **sizes: int) -> None:
        (
            self.cell,
            self.input_size,
            self.sizes,
            self.directions,
            self.dtype,
            self.checkpoint_every,
        ) = spec
        self.gate = Gate(self.cell, self.input_size, self.sizes, self.directions, self.dtype)
        self.each = len(CELLS[self.cell].weights_type._fields)
        self.weights = self.directions * self.each
        self.number = number
        fields = library.library().structs["raglane_layer"]
        names = list(fields.formats)[: list(fields.formats).index("offsets")]
        self._pack_head = fields.packer(*names, end="offsets")
        self._sizes = tuple([sizes.get(name, 0) for name in names[len(_HEAD) :]])
        self._heads: dict[
            tuple[str, int, int, int | None, torch.dtype], tuple[tuple[int, ...], Tensor]
        ] = {}
        inputs = "offsets", "values", "initial_h", "initial_c", *self._fields_of("weights")
        results = "packed", "output", "final_h", "final_c", "gates", "c_states"
        self._pack_forward = fields.packer(*inputs, *results, begin="offsets")
        self._pack_backward = fields.packer(
            *inputs, *_READ, *self.written, *self._fields_of("grad_weights"), begin="offsets"
        )

    def _fields_of(self, array: str) -> list[str]:
        """Return the fields of C's struct for an array with the weights of each direction."""
        return [
            f"{array}[{direction}].{name}"
            for direction in range(self.directions)
            for name in self.weight_fields
        ]

    def initial(self, tensors: Tensors) -> Tensors:
        """Return the initial states among a layer's tensors."""
        return tensors[1 : len(tensors) - self.weights]

    def weights_of(self, tensors: Tensors, direction: int) -> Tensors:
        """Return the weights of one direction among a layer's tensors."""
        begin = len(tensors) - self.weights + direction * self.each
        return tensors[begin : begin + self.each]

    def saved_shapes(self, elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of ``Saved.gates`` and ``Saved.c_states`` for a number of elements."""
        return (self.directions, elements, self.gates_width), (*self.c_rows, elements, self.c_width)

    @staticmethod
    @abstractmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """Return every state after each element, ``(N, K * size)`` per state."""

    def admit(self, offsets: Any, tensors: Tensors, depth: int = 0) -> Admitted:
        """Validate a layer's tensors; copy those that C cannot read. ``depth`` is for messages."""
        return self.gate.try_validate(offsets, tensors) or self.gate.normalised(
            offsets, tensors, depth
        )

    def try_forward(
        self,
        offsets: Tensor | Table,
        tensors: Tensors,
        *,
        need_output: bool,
        save: bool,
        need_c: bool,
        packed: Tensor | None = None,
    ) -> LayerResult | None:
        """Run :meth:`forward` by one call of C++; None if it cannot read a tensor, or is missing.

        With a table in place of offsets, the values and a needed output have its layout.
        """
        run = library.operators()
        if run is None:
            return None
        _, head = self._head(self.dtype if packed is None else self._weights_dtype(packed.dtype))
        # The caller records the call; torch's operators for autograd would warn of one that does
        # not.
        records = save and torch.is_grad_enabled()
        if isinstance(offsets, Table):
            sizes = offsets.sizes
            order = offsets.order
            layout = offsets.number
        else:
            sizes = offsets
            order = None
            layout = 0  # flat
        try:
            if records:
                torch._C._set_grad_enabled(False)
            results = run.forward(
                head,
                sizes,
                tensors[0],
                tensors[1:],
                packed,
                need_output,
                save,
                need_c,
                order,
                layout,
            )
        except NO_MEMORY:
            return None
        finally:
            if records:
                torch._C._set_grad_enabled(True)
        if not results:
            return None
        following = iter(results)
        output = next(following) if need_output or save else None
        final = tuple(islice(following, len(self.sizes)))
        gates = next(following) if save else None
        c_states = next(following) if save or need_c else None
        # After them, of a call with a table: flat values, flat output and plan.
        return LayerResult(output, final, gates, c_states, *following)

    def forward(
        self,
        admitted: Admitted,
        *,
        need_output: bool,
        save: bool,
        need_c: bool,
        packed: Tensor | None = None,
    ) -> LayerResult:
        """Run the layer; no user code may run between :meth:`admit` and this call.

        ``save``: a backward pass follows. ``need_c``: return ``c`` after each element. ``packed``:
        the result of :meth:`packed` for the current numbers of these weights.
        """
        offsets, tensors, addresses, _ = admitted
        values = tensors[0]
        count = self.directions
        elements = values.shape[0]
        sequences = offsets.shape[0] - 1
        output = values.new_empty(elements, count * self.sizes[0]) if need_output or save else None
        final = tuple([values.new_empty(count, sequences, size) for size in self.sizes])
        gates = c_states = None
        if save or need_c:
            gates_shape, c_shape = self.saved_shapes(elements)
            # torch parses sizes as separate arguments in half the time of a tuple.
            gates = library.empty(values, *gates_shape) if save else None
            c_states = values.new_empty(*c_shape) if need_c else library.empty(values, *c_shape)
        final_c = final[1] if len(final) > 1 else None
        results = (packed, output, final[0], final_c, gates, c_states)
        pointers = self._pack_forward(*addresses, *map(pointer, results))
        dtype = self.dtype if packed is None else self._weights_dtype(packed.dtype)
        self._call("raglane_forward", dtype, pointers, offsets, values)
        return LayerResult(output, final, gates, c_states)

    def _head(
        self, dtype: torch.dtype, threads: int | None = None
    ) -> tuple[tuple[int, ...], Tensor]:
        """Return the struct's fields before its addresses, for weights of ``dtype``; no counts."""
        kernels = library.library()
        key = (
            kernels.isa,
            kernels.flags,
            threads or torch.get_num_threads(),
            forks.threads_before,
            dtype,
        )
        head = self._heads.get(key)
        if head is None:
            fields = *library.preamble(self.number, dtype, threads), self.directions, *self._sizes
            head = self._heads[key] = fields, torch.tensor(fields, dtype=torch.int64, device="cpu")
        return head

    def _counted(
        self,
        dtype: torch.dtype,
        sequences: int,
        elements: int,
        slot_count: int = 0,
        threads: int | None = None,
    ) -> bytes:
        """Return the fields of the struct before its addresses, for Python's own call."""
        fields, _ = self._head(dtype, threads)
        return self._pack_head(
            *fields[: len(_HEAD)], sequences, elements, slot_count, *fields[len(_HEAD) + 3 :]
        )

    def _weights_dtype(self, packed: torch.dtype) -> torch.dtype:
        """Return the dtype of packed weights for C: int8, or that of the tensors."""
        if packed is not torch.int8:
            return self.dtype
        if self.dtype is not torch.float32:
            rule = "torch.float32 with int8 weights"
            fix = "convert the tensors"
            raise ArgumentError("dtype", str(self.dtype), rule, fix)
        return packed

    def packed(self, weights: Tensors, depth: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weights in the layout of the time loop, for many calls of :meth:`forward`."""
        # torch's default device may be another one than the CPU.
        offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        values = torch.empty(0, self.input_size, dtype=self.dtype, device="cpu")
        _, _, addresses, _storages = self.admit(offsets, (values, *weights), depth)
        dtype = dtype or torch.uint8
        head = self._counted(self._weights_dtype(dtype), 0, 0)
        return library.packed(
            "raglane_pack", head + self._pack_forward(*addresses, *(0,) * 6), dtype
        )

    def backward(
        self,
        offsets: Tensor,
        tensors: Tensors,
        saved: Saved,
        grads: OutputGrads,
        needed: tuple[bool, ...],
        *,
        overwrite: bool,
        depth: int = 0,
    ) -> Grads:
        """Return the gradients of the ``needed`` tensors; ``overwrite`` as in BackwardCall."""
        gradients = self.try_backward(offsets, tensors, saved, grads, needed, overwrite)
        if gradients is not None:
            return gradients
        offsets, tensors, addresses, _storages = self.admit(offsets, tensors, depth)
        values = tensors[0]
        count = self.directions
        sequences = offsets.shape[0] - 1
        output = (values.shape[0], count * self.sizes[0])
        gates, c_states = self.saved_shapes(values.shape[0])
        states = [(count, sequences, size) for size in self.sizes]
        read = (*saved[:3], grads.output, grads.c_states, *grads.final)
        shapes = (output, gates, c_states, output, c_states, *states)
        readable, pointers, _more_storages = admit(_NAMES, read, shapes, values)
        saved = Saved(readable[0], readable[1], readable[2], saved.is_shared)  # type: ignore[arg-type]
        fields = addresses + pointers + [0] * (len(_READ) - len(pointers))
        return self._backward(BackwardCall(offsets, tensors, saved, fields, needed, overwrite))

    def try_backward(
        self,
        offsets: Any,
        tensors: Tensors,
        saved: Saved,
        grads: OutputGrads,
        needed: tuple[bool, ...],
        overwrite: bool,
        in_layout: bool = False,
    ) -> Grads | None:
        """Run :meth:`backward` by one call of C++; None if it cannot read a tensor, or is missing.

        ``in_layout``: ``offsets`` are the saved plan of a table, and the gradients of output and
        values have its layout.
        """
        run = library.operators()
        if run is None or not self._computes_all_gradients(tensors):
            return None
        over_c = overwrite and not saved.is_shared and self.overwrites_c
        read = (*saved[:3], grads.output, grads.c_states, *grads.final, None)[: len(_READ)]
        try:
            _, head = self._head(self.dtype)
            results = run.backward(
                head,
                offsets,
                tensors[0],
                tensors[1:],
                read,
                needed,
                overwrite,
                over_c,
                in_layout,
            )
        except NO_MEMORY:
            return None
        if not results and any(needed):
            return None
        if overwrite:
            spend(saved.gates)
        if over_c:
            spend(saved.c_states)
        following = iter(results)
        pairs = zip(tensors, needed, strict=True)
        return tuple(
            [
                next(following) if is_needed and tensor is not None else None
                for tensor, is_needed in pairs
            ]
        )

    @abstractmethod
    def _backward(self, call: BackwardCall) -> Grads:
        """Return the gradients."""

    def _run_backward(self, call: BackwardCall, written: list[Tensor | None]) -> None:
        """Call C's backward; ``written``: tensors of the class's fields, gradients of weights."""
        pointers = self._pack_backward(*call.fields, *map(pointer, written))
        self._call("raglane_backward", self.dtype, pointers, call.offsets, call.tensors[0])

    def _call(
        self, function: str, dtype: torch.dtype, pointers: bytes, offsets: Tensor, values: Tensor
    ) -> None:
        """Call a function of C with the struct of this layer; ``dtype`` is that of the weights."""
        head = self._counted(dtype, offsets.shape[0] - 1, values.shape[0])
        try:
            library.call(function, head + pointers)
        except ArgumentError:
            # Raises the message of the other backends.
            check_unchanged(offsets, values.shape[0], values.device)
            raise

    def _computes_all_gradients(self, tensors: Tensors) -> bool:
        """Return True if the kernels, not torch, compute the gradients of values and weights.

        For many elements of bfloat16, torch's products are faster on processors with bfloat16
        instructions, because the kernels widen the numbers first. For few elements the overhead of
        calling torch is larger than this gain.
        """
        kernels = library.library()
        # Recomputed gates exist only in the kernels' scratch.
        if (
            self.checkpoint_every
            or self.dtype is not torch.bfloat16
            or "avx512bf16" not in kernels.isas
        ):
            return True
        products = self.weights_of(tensors, 0)[:2]
        count = sum(weight.numel() for weight in products if weight is not None)
        return bool(tensors[0].shape[0] <= kernels.few_elements and count <= kernels.few_weights)


KINDS: dict[type, type[Layer]] = {}
"""The subclasses of :class:`Layer` by the type of a cell's weights."""


def kind_of(cell: str) -> type[Layer] | None:
    """Return the subclass for a cell, without loading the kernels: ``torch.compile`` traces it."""
    return KINDS.get(CELLS[cell].weights_type) if cell in CELLS else None


@lru_cache(maxsize=512)
def find_layer(*key: Any) -> Layer:
    """Return the layer of a :class:`LayerSpec`."""
    spec = LayerSpec(*key)
    return KINDS[CELLS[spec.cell].weights_type](spec)  # type: ignore[call-arg]


@lru_cache(maxsize=64)
def _few_offsets(batch: int) -> Tensor:
    return torch.arange(batch + 1, device="cpu")


def offsets_of_steps(batch: int) -> Tensor:
    """Return the offsets of sequences of one element; those of few sequences are kept."""
    return _few_offsets(batch) if batch <= _MOST_STEPS else torch.arange(batch + 1, device="cpu")


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
    """Return the layer for tensors, cached by :class:`LayerSpec`.

    The last ``weights`` tensors are weights. ``depth`` is the index of the layer in its stack, for
    messages.
    """
    try:
        values = tensors[0]
        return find_layer(
            cell, int(values.shape[1]), sizes, directions, values.dtype, checkpoint_every
        )
    except NO_MEMORY:
        check_layer(cell, offsets, tensors, weights, sizes, directions, depth)
        raise


# ---- gradients by torch --------------------------------------------------------------------------

# Ratio of rows to columns from which outer computes the transposed product; measured.
_TALL = 32


def are_hooked() -> bool:
    """Return True if hooks pack saved tensors: what they unpack may have other readers."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_last_use() -> bool:
    """Return True if backward frees the graph, so that saved tensors may be overwritten."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def spend(*tensors: Tensor) -> None:
    """Mark saved tensors as overwritten, so that autograd raises if a later pass reads them."""
    torch.autograd.graph.increment_version(tensors)


def outer(gates: Tensor, inputs: Tensor) -> Tensor:
    """Return the sum of the rows' outer products: ``(N, G)`` and ``(N, D)`` to ``(G, D)``."""
    if inputs.shape[0] < _TALL * inputs.shape[1]:
        return torch.mm(gates.t(), inputs)
    # MKL computes the transpose of a tall and narrow product a fifth to a third faster.
    return torch.mm(inputs.t(), gates).t().contiguous()


def add_product(total: Tensor | None, gates: Tensor, weight: Tensor) -> Tensor:
    """Return ``gates @ weight``, added in place to ``total`` if there is one."""
    # With AMX, oneDNN 3.12 multiplies what follows a row, up to a multiple of 32 numbers, by zero:
    # the next row, or uninitialised memory, where NaN may be (oneDNN's issue 5717).
    if (
        gates.dtype is torch.bfloat16
        and (rest := -gates.shape[1] % 32)
        and "amx" in library.library().isas
    ):
        gates = functional.pad(gates, (0, rest))
        weight = functional.pad(weight, (0, 0, 0, rest))
    return torch.mm(gates, weight) if total is None else total.addmm_(gates, weight)
