"""Layers and programs with weights packed once, which run one after the other on live streams.

The stages of a model read and add rows, one per element. Their states are in pools, with a row per
stream: a call reads the initial state of each sequence from its slot, and writes the final state to
it. An empty sequence does not change its slot. Pools of bfloat16 layers are float32, so that a
sequence has the same bits in pieces. No gradients are recorded.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu.layer import layer_of
from raglane.kernels.cpu.programs import encode
from raglane.native import library
from raglane.native.library import DTYPES, program_preamble
from raglane.native.memory import address, checked_rows
from raglane.programs.program import Program, product_program

_CPU = torch.device("cpu")
_pack_program = struct.Struct("=16q").pack


def as_array(rows: Tensor) -> npt.NDArray[Any]:
    """Return rows as an array, int16 for bfloat16, which NumPy does not have."""
    array: npt.NDArray[Any] = (
        rows.contiguous().view(torch.int16) if rows.dtype is torch.bfloat16 else rows
    ).numpy()
    return array


class Rows(NamedTuple):
    """The rows of a batch that one stage reads and writes, in the memory of a runner."""

    inputs: list[Tensor]
    output: Tensor
    offsets: Tensor
    slots: Tensor
    pools: list[Tensor]


class Kernel:
    """One stage of a model. Stages without a C kernel implement ``run``."""

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        sizes: Sequence[int] = (),
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        # of the new rows
        self.width = width
        self.dtype = dtype
        # of the states
        self.sizes = tuple(sizes)
        self.state_dtype = state_dtype

    def pools(self, slots: int) -> list[Tensor]:
        """Return a pool ``(slots, size)`` for each state, without numbers."""
        return [
            torch.empty(slots, size, dtype=self.state_dtype, device=_CPU) for size in self.sizes
        ]

    def check(self, rows: Rows, widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        """Raise if C cannot read the rows of these widths, and one of these dtypes."""
        inputs = [(tensor.shape[1], tensor.dtype) for tensor in rows.inputs]
        sizes = [pool.shape[1] for pool in rows.pools]
        got = (inputs, sizes)
        if [width for width, _ in inputs] != list(widths) or sizes != list(self.sizes):
            rule = f"widths {list(widths)} and states {list(self.sizes)}"
            fix = "pass the rows of the stage"
            raise ShapeError("rows", repr(got), rule, fix)
        if any(dtype not in dtypes for _, dtype in inputs):
            raise ShapeError(
                "rows", repr(got), f"of {' or '.join(map(str, dtypes))}", "convert them"
            )
        shapes = [(rows.pools[0].shape[0], size) for size in self.sizes]
        filled = [pool for pool in rows.pools if pool.numel()]
        addresses = [
            address(pool, shape, self.state_dtype)
            for pool, shape in zip(rows.pools, shapes, strict=True)
        ]
        if None in addresses or len({pool.data_ptr() for pool in filled}) < len(filled):
            got_pools = [(tuple(pool.shape), pool.dtype, pool.stride()) for pool in rows.pools]
            rule = f"contiguous tensors {shapes} of {self.state_dtype} without common memory"
            raise ShapeError("pools", repr(got_pools), rule, "pass those of the method pools")

    def run(self, rows: Rows) -> None:
        """Compute the output."""
        raise NotImplementedError


class Runner:
    """Runs stages in memory of its own: a caller writes a batch, and reads a stage's rows.

    ``stages`` are pairs of a kernel and the indexes of the rows that it reads: 0 is the input,
    ``(n, width)``, and i the output of stage i - 1. ``pools`` are those of each kernel. All other
    tensors are made here, so that C can read and write them.
    """

    def __init__(
        self,
        stages: Sequence[tuple[Kernel, Sequence[int]]],
        width: int,
        dtype: torch.dtype,
        pools: list[list[Tensor]],
        threads: int | None = None,
    ) -> None:
        self._stages = stages
        self._pools = pools
        self._threads = threads
        self._sizes = [(width, dtype), *[(kernel.width, kernel.dtype) for kernel, _ in stages]]
        self._elements = 0
        self._sequences = 0

    def reserve(self, elements: int, sequences: int) -> None:
        """Make room for a batch; ``rows``, ``arrays``, ``offsets`` and ``slots`` may be new."""
        if elements <= self._elements and sequences <= self._sequences:
            return
        # Twice as much as before, so that growing streams rarely need new memory.
        elements = max(elements, 2 * self._elements, 1)
        sequences = max(sequences, 2 * self._sequences)
        # Until there is memory for all of it.
        self._elements = 0
        self._sequences = 0
        self.rows = [
            torch.empty(elements, width, dtype=dtype, device=_CPU) for width, dtype in self._sizes
        ]
        self.arrays = [as_array(rows) for rows in self.rows]
        self.offsets = np.zeros(sequences + 1, np.int64)
        self.slots = np.zeros(sequences, np.int64)
        self._offsets = torch.from_numpy(self.offsets)
        self._slots = torch.from_numpy(self.slots)
        self._calls: list[_Calls | int] = []
        for index, (kernel, _) in enumerate(self._stages):
            if not isinstance(kernel, PreparedLayer | PreparedProgram):
                self._calls.append(index)
                continue
            last = self._calls[-1] if self._calls else 0
            if isinstance(last, int):
                last = _Calls(array("q"), [])
                self._calls.append(last)
            last.add(kernel, self._rows_of(index, elements, sequences))
        self._elements = elements
        self._sequences = sequences

    def run(self, elements: int, sequences: int) -> None:
        """Run all stages on the first ``elements`` rows, as ``sequences`` sequences."""
        if elements > self._elements or sequences > self._sequences:
            got = f"{elements} elements of {sequences} sequences"
            rule = "those of the last call of reserve, at most"
            raise ArgumentError("elements", got, rule, "call reserve first")
        threads = library.library().threads(self._threads)
        for calls in self._calls:
            if isinstance(calls, int):
                kernel, _ = self._stages[calls]
                kernel.run(self._rows_of(calls, elements, sequences))
            else:
                table, count = calls.table.buffer_info()
                library.call("raglane_run_stages", table, count // 2, threads, sequences, elements)

    def _rows_of(self, index: int, elements: int, sequences: int) -> Rows:
        _, sources = self._stages[index]
        return Rows(
            [self.rows[read][:elements] for read in sources],
            self.rows[index + 1][:elements],
            self._offsets[: sequences + 1],
            self._slots[:sequences],
            self._pools[index],
        )


class _Calls(NamedTuple):
    """The structs of calls that follow each other, and the table of their addresses."""

    table: array[int]
    owners: list[Any]  # of all memory that C reads

    def add(self, kernel: PreparedLayer | PreparedProgram, rows: Rows) -> None:
        fields, owners = kernel.fields(rows)
        memory = ctypes.create_string_buffer(fields, len(fields))
        self.owners.append((memory, owners))
        struct = ctypes.addressof(memory)
        self.table.extend((struct, 0) if isinstance(kernel, PreparedLayer) else (0, struct))


class PreparedLayer(Kernel):
    """One layer and direction of a cell of the cpu kernels, with packed weights.

    ``weights`` are those of the cell's ``weights_type``; later changes of them have no effect.
    ``sizes`` are those of the states. ``dtype`` is torch.int8 for int8 weights.
    """

    def __init__(
        self,
        cell_name: str,
        weights: Sequence[Any],
        sizes: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        weights = tuple(weights)
        offsets = torch.zeros(1, dtype=torch.int64, device=_CPU)
        values = weights[0].new_empty(0, weights[0].shape[1])
        self._layer = layer_of(cell_name, offsets, (values, *weights), len(weights), sizes, 1)
        self._packed = self._layer.packed(weights, dtype=dtype)
        self._weights_dtype = self._layer.dtype if dtype is None else dtype
        self.is_int8 = dtype is torch.int8
        # With packed weights, the kernels only test whether each pointer is null.
        self._weights = tuple([int(weight is not None) for weight in weights])
        fields = [f"weights[0].{name}" for name in self._layer.weight_fields]
        self._pack = (
            library.library()
            .structs["raglane_layer"]
            .packer(
                *("offsets", "slots", "values", *fields, "packed", "output", "final_h", "final_c"),
                begin="offsets",
            )
        )
        state_dtype = torch.float32 if values.dtype is torch.bfloat16 else values.dtype
        super().__init__(sizes[0], values.dtype, sizes, state_dtype)

    def fields(self, rows: Rows) -> tuple[bytes, Any]:
        """Return the struct of a call with all rows, and what else C reads."""
        self.check(rows, [self._layer.input_size], [self.dtype])
        read = (rows.offsets, rows.slots, *rows.inputs)
        pools = [pool.data_ptr() for pool in rows.pools]
        pointers = self._pack(
            *[tensor.data_ptr() for tensor in read],
            *self._weights,
            self._packed.data_ptr(),
            rows.output.data_ptr(),
            pools[0],
            pools[1] if pools[1:] else 0,
        )
        slots = rows.pools[0].shape[0]
        head = self._layer.counted(
            self._weights_dtype, rows.slots.shape[0], rows.output.shape[0], slots, 1
        )
        return head + pointers, (read, rows)


class PreparedProgram(Kernel):
    """A program without inputs per sequence and with one output; its weights are packed.

    Later changes of ``vectors`` and ``weights`` have no effect. ``output_dtype`` may be bfloat16 in
    place of float32.
    """

    def __init__(
        self,
        program: Program,
        *,
        vectors: Sequence[Tensor] = (),
        weights: Sequence[Tensor] = (),
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        encoded = encode(program)
        elements, sequences, states, *_ = encoded.shapes
        if sequences or not elements or len(program.outputs) != 1:
            counts = f"{len(sequences)} inputs per sequence, {len(elements)} per element"
            got = f"{counts} and {len(program.outputs)} outputs"
            rule = "one of inputs per element alone, and one output"
            raise ArgumentError("program", got, rule, "run it without preparing it")
        self._dtypes = (dtype, torch.bfloat16) if dtype is torch.float32 else (dtype,)
        self._widths = [width for (width,) in elements]
        sizes = [width for (width,) in states]
        output_dtype = dtype if output_dtype is None else output_dtype
        super().__init__(program.outputs[0][1], output_dtype, sizes, dtype)
        *_, of_vectors, of_weights = encoded.shapes
        vectors = _checked("vectors", vectors, of_vectors, dtype)
        weights = _checked("weights", weights, of_weights, dtype)
        # Memory that C reads in every call, and no other code changes.
        self._code = encoded.code
        self._vectors = [vector.clone(memory_format=torch.contiguous_format) for vector in vectors]
        # The structs of a call's tensors, without the addresses that change from call to call.
        self._table = array("q")
        for width in (*self._widths, *sizes):
            self._table.extend((0, DTYPES[dtype], width, 0, 0))
        for vector in self._vectors:
            self._table.extend((vector.data_ptr(), DTYPES[dtype], 0, 0, 0))
        weights_at = len(self._table)
        for weight in weights:
            self._table.extend((weight.data_ptr(), DTYPES[dtype], *weight.stride()))
        self._output_at = len(self._table)
        self._table.extend((0, DTYPES[output_dtype], self.width, 0, 0))
        for size in sizes:
            self._table.extend((0, DTYPES[dtype], size, 0, 0))
        self._packed = library.packed(
            "raglane_pack_program", self._argument(self._table, None, (0, 0, 1, 0, 0, 0), 0)
        )
        packed = self._output_at - weights_at
        self._table[weights_at : self._output_at] = array("q", bytes(8 * packed))

    def fields(self, rows: Rows) -> tuple[bytes, Any]:
        """Return the struct of a call with all rows, and what else C reads."""
        self.check(rows, self._widths, self._dtypes)
        table = self._table[:]
        for index, tensor in enumerate((*rows.inputs, *rows.pools)):
            table[5 * index] = tensor.data_ptr()
            table[5 * index + 1] = DTYPES[tensor.dtype]
        table[self._output_at] = rows.output.data_ptr()
        batch = (
            rows.slots.shape[0],
            rows.output.shape[0],
            1,
            rows.pools[0].shape[0] if rows.pools else 0,
            rows.offsets.data_ptr(),
            rows.slots.data_ptr() if rows.pools else 0,
        )
        return self._argument(table, 1, batch, self._packed.data_ptr()), (table, rows)

    def apply(self, values: Tensor) -> Tensor:
        """Return the output for rows ``(N, width)``, of a program without states, in one thread."""
        count = values.shape[0]
        output = torch.empty(count, self.width, dtype=self.dtype, device=_CPU)
        offsets = torch.frombuffer(array("q", (0, count)), dtype=torch.int64)
        argument, _owners = self.fields(Rows([values], output, offsets, offsets[:1], []))
        library.call("raglane_run_program", argument)
        return output

    def _argument(
        self, table: array[int], threads: int | None, batch: tuple[int, ...], packed: int
    ) -> bytes:
        """Return the struct of a call."""
        pointers = (
            self._code.data_ptr(),
            len(self._code),
            table.buffer_info()[0],
            len(table) // 5,
            packed,
        )
        return _pack_program(*program_preamble(self.state_dtype, threads), *batch, *pointers)


def prepared_product(weight: Tensor) -> PreparedProgram:
    """Return the product of rows with a weight ``(width, depth)`` of float32 or float64."""
    packed = weight.unsqueeze(0)
    return PreparedProgram(product_program(*packed.shape), weights=[packed], dtype=weight.dtype)


def _checked(
    argument: str, tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[Tensor]:
    """Return tensors of a program that C can read."""
    return [
        checked_rows(f"{argument}[{index}]", tensor, shape, (dtype,))
        for index, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True))
    ]
