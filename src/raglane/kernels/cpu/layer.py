"""A layer of the cpu kernels without its tensors, kept from call to call, and its two passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
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
from raglane.kernels.cpu.by_ctypes import Answer, CtypesCalls
from raglane.kernels.tensor_checks import Admitted, Gate, check_layer
from raglane.native import library
from raglane.native.memory import NO_MEMORY
from raglane.packing.flat_values import RowTable

Tensors = tuple[Any, ...]
"""The tensors of a layer: the values ``(N, D)``; ``(K, B, size)`` per state, or none if all begin
with zeros; and the weights of the cell's ``weights_type``, direction after direction, with None for
missing ones."""

Grads = tuple[Tensor | None, ...]
"""Gradients of :data:`Tensors`, in that order; None for those that are not needed."""

_MOST_STEPS = 4096  # sequences of a step with cached offsets


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
    were_copied: bool = False  # C could not read one of the tensors, and read copies


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


class StepGrads(NamedTuple):
    """Results of the backward time loop, from which torch computes gradients of values and weights."""

    grad_gates: Tensor  # gradients of the gates' arguments, ``(K, N, ...)``
    previous_h: Tensor | None = None  # ``h`` before each element, ``(K, N, P)``
    grad_h: Tensor | None = None  # with a projection, the gradient of ``h``, ``(K, N, P)``
    unprojected: Tensor | None = None  # with a projection, its input, ``(K, N, H)``
    grad_skip: Tensor | None = None  # what reaches the values without a product, ``(K, N, H)``


class TableRefusedError(Exception):
    """C cannot read a table, whose rows the caller must flatten."""


class Layer(ABC):
    """A layer of one cell and certain sizes, in all its directions.

    Raises ValueError or KeyError for no such layer. Threads share it: only the cache of packed
    fields and the gate's templates change.
    """

    # The fields of C's struct for the weights of a direction.
    weight_fields: ClassVar[tuple[str, ...]]
    # Of each direction the indexes of the weights whose gradients the time loop sums.
    summed: ClassVar[tuple[int, ...]] = ()
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
        formats = list(library.library().structs["raglane_layer"].formats)
        names = formats[len(library.HEAD) : formats.index("offsets")]
        self._sizes = tuple([sizes.get(name, 0) for name in names])
        self._heads: dict[tuple[Any, ...], tuple[tuple[int, ...], Tensor]] = {}
        # The head of the last call in inference, and what it depends on.
        self._last: tuple[tuple[Any, ...], Any] = (), None
        self._calls = CtypesCalls(self)

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

    @abstractmethod
    def step_shapes(self, tensors: Tensors) -> dict[str, tuple[int, ...]]:
        """Return the fields of :class:`StepGrads` that the layer has, and their shapes."""

    @staticmethod
    @abstractmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """Return every state after each element, ``(N, K * size)`` per state."""

    def admit(self, offsets: Any, tensors: Tensors, depth: int = 0) -> Admitted:
        """Validate a layer's tensors; copy those that C cannot read. ``depth`` is for messages."""
        return self.gate.try_validate(offsets, tensors) or self.gate.normalised(
            offsets, tensors, depth
        )

    def forward(
        self,
        offsets: Any,
        tensors: Tensors,
        *,
        need_output: bool,
        save: bool,
        need_c: bool,
        packed: Tensor | None = None,
        depth: int = 0,
    ) -> LayerResult:
        """Run the layer by one call of C, which checks the tensors.

        ``save``: a backward pass follows. ``need_c``: return ``c`` after each element. ``packed``:
        the result of :meth:`packed` for the current numbers of these weights. ``depth`` is for
        messages. With a :class:`RowTable` in place of offsets, the values and a needed output have its
        layout, and :class:`TableRefusedError` is raised if C cannot read it.
        """
        run = library.operators() or self._calls
        _, head = self._head(self.dtype if packed is None else self._weights_dtype(packed.dtype))
        # The caller records the call; torch's operators for autograd would warn of one that does
        # not.
        records = save and torch.is_grad_enabled()
        sizes = offsets
        order = None
        layout = 0  # flat
        if isinstance(offsets, RowTable):
            sizes = offsets.sizes
            order = offsets.order
            layout = offsets.number
        options = (packed, need_output, save, need_c)
        admitted = None
        try:
            if records:
                torch._C._set_grad_enabled(False)
            results, status, reason = run.forward(
                head, sizes, tensors[0], tensors[1:], *options, order, layout
            )
        except NO_MEMORY as error:  # one is not a tensor, or has another device or layout
            results, status, reason = Answer([], library.BAD_ARGUMENT, str(error))
        finally:
            if records:
                torch._C._set_grad_enabled(True)
        if status:
            self._check_refusal(status, reason, layout > 0)
            admitted = self.gate.normalised(offsets, tensors, depth)
            results, status, reason = self._calls.forward_of(head, admitted, *options)
            self._require_ok(status, reason, admitted)
        following = iter(results)
        output = next(following) if need_output or save else None
        final = tuple(islice(following, len(self.sizes)))
        gates = next(following) if save else None
        c_states = next(following) if save or need_c else None
        # After them, of a call with a table: flat values, flat output and plan.
        if admitted is not None:
            return LayerResult(output, final, gates, c_states, were_copied=True)
        return LayerResult(output, final, gates, c_states, *following)

    def _check_refusal(self, status: int, reason: str, is_table: bool) -> None:
        """Raise unless C has refused a tensor, and the caller may name it or copy it."""
        if status != library.BAD_ARGUMENT:
            library.require_ok(status, reason)
        if is_table:
            raise TableRefusedError(reason)

    def head(self, packed: Tensor | None) -> Tensor:
        """Return the head of a call in inference, with packed weights or others."""
        dtype = self.dtype if packed is None else packed.dtype
        facts = library.library(), dtype, torch.get_num_threads(), forks.threads_before
        last = self._last
        if last[0] != facts:
            kind = self.dtype if packed is None else self._weights_dtype(dtype)
            last = self._last = facts, self._head(kind)[1]
        return last[1]

    def _head(
        self, dtype: torch.dtype, threads: int | None = None
    ) -> tuple[tuple[int, ...], Tensor]:
        """Return the struct's fields before its addresses, for weights of ``dtype``, with 0 for
        counts; and the head of ``csrc/torch/layer.h``.
        """
        kernels = library.library()
        least = library.least_block()
        key = (
            kernels.isa,
            kernels.flags,
            threads or torch.get_num_threads(),
            forks.threads_before,
            dtype,
            least,
        )
        head = self._heads.get(key)
        if head is None:
            begin = *library.preamble(self.number, dtype, threads), self.directions
            fields = *begin, *(0,) * (len(library.HEAD) - len(begin)), *self._sizes
            numbers = torch.tensor((*fields, least), dtype=torch.int64, device="cpu")
            head = self._heads[key] = fields, numbers
        return head

    def counted(
        self,
        dtype: torch.dtype,
        sequences: int,
        elements: int,
        slot_count: int = 0,
        threads: int | None = None,
    ) -> bytes:
        """Return the fields of the struct before its addresses, for Python's own call."""
        return self._calls.counted(self._head(dtype, threads)[0], sequences, elements, slot_count)

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
        admitted = self.admit(offsets, (values, *weights), depth)
        dtype = dtype or torch.uint8
        return self._calls.pack(self._head(self._weights_dtype(dtype))[0], admitted, dtype)

    def backward(
        self,
        offsets: Any,
        tensors: Tensors,
        saved: Saved,
        grads: OutputGrads,
        needed: tuple[bool, ...],
        *,
        overwrite: bool,
        depth: int = 0,
        in_layout: bool = False,
    ) -> Grads:
        """Return the gradients of the ``needed`` tensors.

        ``overwrite``: gradients may reuse the memory of ``saved``. ``depth`` is for messages.
        ``in_layout``: ``offsets`` are the saved plan of a table, and the gradients of output and
        values have its layout; :class:`TableRefusedError` is raised as in :meth:`forward`.
        """
        by_products = not self._computes_all_gradients(tensors)
        if in_layout and by_products:
            raise TableRefusedError
        run = library.operators() or self._calls
        _, head = self._head(self.dtype)
        over_c = overwrite and not saved.is_shared and self.overwrites_c
        read = (*saved[:3], grads.output, grads.c_states, *grads.final, None)[:7]
        by_c = self._summed_of(needed) if by_products else needed
        options = (read, by_c, overwrite, over_c)
        try:
            results, status, reason = run.backward(
                head, offsets, tensors[0], tensors[1:], *options, in_layout, by_products
            )
        except NO_MEMORY as error:
            results, status, reason = Answer([], library.BAD_ARGUMENT, str(error))
        if status:
            self._check_refusal(status, reason, in_layout)
            admitted = self.gate.normalised(offsets, tensors, depth)
            results, status, reason = self._calls.backward_of(head, admitted, *options, by_products)
            self._require_ok(status, reason, admitted)
            tensors = admitted[1]
        if overwrite:
            spend(saved.gates)
        if over_c:
            spend(saved.c_states)
        following = iter(results)
        pairs = zip(tensors, by_c, strict=True)
        gradients = [
            next(following) if is_needed and tensor is not None else None
            for tensor, is_needed in pairs
        ]
        if not by_products:
            return tuple(gradients)
        steps = self._steps_of(tensors, saved, overwrite, over_c, following)
        return self._by_products(tensors, needed, gradients, steps)

    def _steps_of(
        self, tensors: Tensors, saved: Saved, overwrite: bool, over_c: bool, own: Iterator[Tensor]
    ) -> StepGrads:
        """Return the results of a time loop; ``own`` are those in memory of their own."""
        steps: dict[str, Any] = {}
        if overwrite and self.gates_width:
            steps["grad_gates"] = saved.gates
        if over_c:
            steps["previous_h"] = saved.c_states
        names = [name for name in self.step_shapes(tensors) if name not in steps]
        return StepGrads(**steps, **dict(zip(names, own, strict=True)))

    def _summed_of(self, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return which of the needed gradients the time loop computes, without a product."""
        begin = len(needed) - self.weights
        return tuple(
            [
                is_needed
                and index > 0
                and (index < begin or (index - begin) % self.each in self.summed)
                for index, is_needed in enumerate(needed)
            ]
        )

    @abstractmethod
    def _by_products(
        self,
        tensors: Tensors,
        needed: tuple[bool, ...],
        grads: list[Tensor | None],
        steps: StepGrads,
    ) -> Grads:
        """Add to ``grads`` those of the values and weights that torch's products compute."""

    def _require_ok(self, status: int, reason: str, admitted: Admitted) -> None:
        """Raise if C refused validated tensors; if its offsets are wrong, as other backends do."""
        if status == library.BAD_ARGUMENT:
            values = admitted[1][0]
            check_unchanged(admitted[0], values.shape[0], values.device)
        library.require_ok(status, reason)

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
            or not {"avx512bf16", "amx"}.intersection(kernels.isas)
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


def heads_of(layers: tuple[Layer, ...], packed: tuple[Tensor, ...]) -> Tensor:
    """Return the heads of the layers of a stack, one after the other."""
    if len(layers) == 1:
        return layers[0].head(packed[0] if packed else None)
    return _joined(
        *[layer.head(packed[index] if packed else None) for index, layer in enumerate(layers)]
    )


@lru_cache(maxsize=64)
def _joined(*heads: Tensor) -> Tensor:
    return torch.cat(heads)


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
