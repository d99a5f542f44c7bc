"""Layers and programs with weights packed once, and states in pools: the kernels of streams.

A pool has one row per slot, ``(slots, size)``. A call reads the initial state of each sequence from its slot, and
writes the final state to it. An empty sequence does not change its slot, and a call that raises changes none. Pools of
bfloat16 layers are float32, so that a sequence has the same bits in pieces. No gradients are recorded. Calls without
common pools may run in several threads at once.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from raglane._utils.checks import check_dense, check_storage
from raglane._utils.messages import message
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.checks import Guard, check_offsets, guard_of
from raglane.kernels.cpu.layer import layer_of
from raglane.kernels.cpu.programs import encode
from raglane.native import library
from raglane.native.library import DTYPES, program_preamble
from raglane.native.memory import NO_MEMORY, addresses_of, checked_rows, contiguous
from raglane.programs.program import Program

_CPU = torch.device("cpu")
_pack_program = struct.Struct("=16q").pack


class _Kind(NamedTuple):
    """Tensors that passed all checks but those of their storages: offsets, slots, pools, elements."""

    guard: Guard | None
    rows: int  # of a pool
    pools: tuple[int, ...]  # bytes of each
    widths: tuple[int, ...]  # bytes of a row of each input
    dtypes: tuple[int, ...]  # of the elements, as C's numbers


# The checked tensors of a call: N, B, their kind, addresses and storages. A tuple, which takes less time than a class.
_Admitted = tuple[int, int, _Kind, list[int], list[UntypedStorage]]


class _Prepared:
    """Weights packed once; validates the tensors of calls in the way of :class:`raglane.kernels.checks.Gate`."""

    __slots__ = ("_kinds", "_widths", "state_dtype", "state_sizes")

    def __init__(self, widths: tuple[int, ...], state_sizes: tuple[int, ...], state_dtype: torch.dtype) -> None:
        self._widths, self.state_sizes, self.state_dtype = widths, state_sizes, state_dtype
        self._kinds: dict[int, _Kind] = {}  # the latest kind of tensors, by their number

    def pools(self, slots: int) -> tuple[Tensor, ...]:
        """Return pools of zeros."""
        return tuple([torch.zeros(slots, size, dtype=self.state_dtype, device=_CPU) for size in self.state_sizes])

    def _dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes that elements may have."""
        raise NotImplementedError

    def _admit(self, elements: tuple[Any, ...], offsets: Any, slots: Any, pools: Sequence[Any]) -> _Admitted:
        """Validate the tensors of a call, and copy those that C cannot read."""
        parts = (offsets, *elements) if slots is None else (offsets, slots, *pools, *elements)
        try:
            kind = self._kinds.get(len(parts))
            if kind is not None and kind.guard is not None and kind.guard(*parts):
                admitted = self._placed(kind, parts)
                if admitted is not None:
                    return admitted
        except NO_MEMORY:
            pass
        kind, parts = self._checked(elements, offsets, slots, pools)
        self._kinds[len(parts)] = kind
        admitted = self._placed(kind, parts)
        if admitted is None:
            rule, fix = "unchanged during a call", "do not change them in another thread"
            raise ShapeError(message("rows, offsets, slots, pools", "tensors that changed", rule, fix))
        return admitted

    def _placed(self, kind: _Kind, parts: tuple[Tensor, ...]) -> _Admitted | None:
        """Return addresses within the storages; None if a storage is too small, or two tensors do not match."""
        count, batch = parts[-1].shape[0], parts[0].shape[0] - 1
        sizes = [count * width for width in kind.widths]
        if len(sizes) > 1 and {part.shape[0] for part in parts[-len(sizes) :]} != {count}:
            return None
        if len(parts) > 1 + len(sizes):
            if parts[1].shape[0] != batch:
                return None
            sizes[:0] = (8 * batch, *kind.pools)
        placed = addresses_of(parts, (8 * batch + 8, *sizes))
        return None if placed is None else (count, batch, kind, *placed)

    def _checked(
        self, elements: tuple[Any, ...], offsets: Any, slots: Any, pools: Sequence[Any]
    ) -> tuple[_Kind, tuple[Tensor, ...]]:
        """Return the kind of these tensors, and copies of those that C cannot read; raise if one is wrong."""
        if len(elements) != len(self._widths):
            rule, fix = f"{len(self._widths)} tensors", "pass a tensor for each input of the program"
            raise ShapeError(message("rows", f"{len(elements)} tensors", rule, fix))
        count = elements[0].shape[0] if isinstance(elements[0], Tensor) and elements[0].dim() else 0
        own = []
        for index, (part, width) in enumerate(zip(elements, self._widths, strict=True)):
            name = "rows" if len(elements) == 1 else f"rows[{index}]"
            own.append(_check(name, part, (count, width), self._dtypes()))
        check_offsets(offsets, count, _CPU)
        parts = [contiguous("offsets", offsets)]
        rows, states = 0, self.state_sizes if slots is not None else ()
        if slots is not None:
            if len(pools) != len(states):
                got, rule = f"{len(pools)} tensors", f"{len(states)} tensors, one for each state"
                raise ShapeError(message("pools", got, rule, "pass those of the method pools"))
            parts.append(_check("slots", slots, (len(offsets) - 1,), (torch.int64,)))
            rows = pools[0].shape[0] if pools and isinstance(pools[0], Tensor) and pools[0].dim() else 0
            for index, (pool, size) in enumerate(zip(pools, states, strict=True)):
                parts.append(_check(f"pools[{index}]", pool, (rows, size), (self.state_dtype,)))
                if parts[-1] is not pool:
                    rule, fix = "contiguous, because it is written in place", "pass those of the method pools"
                    raise ShapeError(message(f"pools[{index}]", f"strides {pool.stride()}", rule, fix))
            if rows and len({pool.data_ptr() for pool in pools}) < len(pools):
                rule, fix = "tensors without common memory", "pass those of the method pools"
                raise ShapeError(message("pools", "the same tensor twice", rule, fix))
        parts += own
        shapes: list[tuple[int | None, ...]] = [(None,)]
        if slots is not None:
            shapes += [(None,), *[(rows, size) for size in states]]
        shapes += [(None, width) for width in self._widths]
        pool_bytes = tuple([rows * size * self.state_dtype.itemsize for size in states])
        widths = tuple([width * part.itemsize for width, part in zip(self._widths, own, strict=True)])
        dtypes = tuple([DTYPES[part.dtype] for part in own])
        return _Kind(guard_of(parts, shapes), rows, pool_bytes, widths, dtypes), tuple(parts)


def _check(name: str, part: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """Return a contiguous tensor of a shape and one of the dtypes, the same one if possible."""
    if not isinstance(part, Tensor):
        raise ArgumentTypeError(message(name, f"a {type(part).__name__}", f"a tensor {shape}", "pass a tensor"))
    check_dense(name, part)
    if tuple(part.shape) != shape or part.dtype not in dtypes or not part.is_cpu:
        got = f"shape {tuple(part.shape)}, {part.dtype}, on {part.device}"
        rule = f"of shape {shape}, {' or '.join(map(str, dtypes))}, on cpu"
        raise ShapeError(message(name, got, rule, "pass a tensor of that shape and dtype"))
    check_storage(name, part)
    return contiguous(name, part)


def _call(argument: bytes, function: str, offsets: Any, slots: Any, admitted: _Admitted) -> None:
    """Call C; if it refuses the offsets or slots, raise the message of the other backends."""
    try:
        library.call(function, argument)
    except ArgumentError:
        check_offsets(offsets, admitted[0], _CPU)
        _check_slots(slots, admitted[2].rows)
        raise


def _check_slots(slots: Any, rows: int) -> None:
    """Check the numbers of slots."""
    numbers: list[int] = [] if slots is None else slots.tolist()
    wrong = [number for number in numbers if not 0 <= number < rows]
    if wrong:
        rule = f"from 0 to {rows - 1}, the rows of the pools"
        raise ArgumentError(message("slots", str(wrong[0]), rule, "pass the slots of open streams"))
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ArgumentError(message("slots", f"{twice} twice", "all different", "pass one sequence for each slot"))


class PreparedLayer(_Prepared):
    """One layer and direction of a cell of the cpu kernels, with packed weights.

    ``weights`` are those of the cell's ``weights_type``; later changes of them have no effect. ``sizes`` are those of
    the states. ``dtype`` is torch.int8 for int8 weights.
    """

    __slots__ = ("_layer", "_pack", "_packed", "_weights", "_weights_dtype")

    def __init__(
        self, cell_name: str, weights: Sequence[Any], sizes: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        weights, offsets = tuple(weights), torch.zeros(1, dtype=torch.int64, device=_CPU)
        values = weights[0].new_empty(0, weights[0].shape[1])
        self._layer = layer_of(cell_name, offsets, (values, *weights), len(weights), sizes, 1)
        self._packed = self._layer.packed(weights, dtype=dtype)
        self._weights_dtype = self._layer.dtype if dtype is None else dtype
        # C reads only which weights there are.
        self._weights = tuple([int(part is not None) for part in weights])
        fields = [f"weights[0].{name}" for name in self._layer.weight_fields]
        self._pack = (
            library.library()
            .structs["raglane_layer"]
            .packer(*("offsets", "slots", "values", *fields, "packed", "output", "final_h", "final_c"), begin="offsets")
        )
        state_dtype = torch.float32 if values.dtype is torch.bfloat16 else values.dtype
        super().__init__((values.shape[1],), sizes, state_dtype)

    def run(
        self,
        rows: Tensor,
        offsets: Tensor,
        slots: Tensor | None = None,
        pools: Sequence[Tensor] = (),
        threads: int | None = None,
    ) -> Tensor:
        """Return the output ``(N, size)`` for elements ``(N, D)``; without slots, from states of zeros."""
        admitted = self._admit((rows,), offsets, slots, pools)
        count, batch, kind, addresses, _ = admitted
        output = torch.empty(count, self.state_sizes[0], dtype=self._layer.dtype, device=_CPU)
        if slots is None:
            finals = [output.new_empty(batch, size) for size in self.state_sizes]
            slots_at, states = 0, [part.data_ptr() for part in finals]
        else:
            slots_at, states = addresses[1], addresses[2:-1]
        pointers = self._pack(
            *(addresses[0], slots_at, addresses[-1], *self._weights, self._packed.data_ptr(), output.data_ptr()),
            *(states[0], states[1] if len(states) > 1 else 0),
        )
        head = self._layer._head(batch, count, self._weights_dtype, kind.rows, threads)
        _call(head + pointers, "raglane_forward", offsets, slots, admitted)
        return output

    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return (self._layer.dtype,)


class PreparedProgram(_Prepared):
    """A program with elements, states, vectors and weights, but no sequences; the weights are packed.

    Later changes of ``vectors`` and ``weights`` have no effect. ``output_dtypes`` may have bfloat16 in place of
    float32.
    """

    __slots__ = ("_code", "_output_at", "_outputs", "_packed", "_table", "_vectors")

    def __init__(
        self,
        program: Program,
        *,
        vectors: Sequence[Tensor] = (),
        weights: Sequence[Tensor] = (),
        dtype: torch.dtype = torch.float32,
        output_dtypes: Sequence[torch.dtype] | None = None,
    ) -> None:
        encoded = encode(program)
        elements, sequences, states, *_ = encoded.shapes
        if sequences or not elements:
            got = f"{len(sequences)} inputs per sequence and {len(elements)} per element"
            raise ArgumentError(
                message("program", got, "one of inputs per element alone", "run it without preparing it")
            )
        super().__init__(tuple([width for (width,) in elements]), tuple([width for (width,) in states]), dtype)
        own_vectors, own_weights = [
            [
                checked_rows(f"{name}[{index}]", part, shape, (dtype,))
                for index, (part, shape) in enumerate(zip(parts, shapes, strict=True))
            ]
            for name, parts, shapes in zip(("vectors", "weights"), (vectors, weights), encoded.shapes[3:], strict=True)
        ]
        kinds = [dtype] * len(program.outputs) if output_dtypes is None else output_dtypes
        self._outputs = [(width, own) for (_, width), own in zip(program.outputs, kinds, strict=True)]
        # Memory that C reads in every call, and no other code changes.
        self._code = encoded.code
        self._vectors = [part.clone(memory_format=torch.contiguous_format) for part in own_vectors]
        # The structs of a call's tensors, without the addresses that change from call to call.
        self._table = array("q")
        for width in (*self._widths, *self.state_sizes):
            self._table.extend((0, DTYPES[dtype], width, 0, 0))
        for part in self._vectors:
            self._table.extend((part.data_ptr(), DTYPES[dtype], 0, 0, 0))
        of_weights = len(self._table)
        for part in own_weights:
            self._table.extend((part.data_ptr(), DTYPES[dtype], *part.stride()))
        self._output_at = len(self._table)
        for width, own in (*self._outputs, *[(size, dtype) for size in self.state_sizes]):
            self._table.extend((0, DTYPES[own], width, 0, 0))
        self._packed = library.packed("raglane_pack_program", self._argument(self._table, None, (0, 0, 1, 0, 0, 0), 0))
        self._table[of_weights : self._output_at] = array("q", bytes(8 * (self._output_at - of_weights)))

    def run(
        self,
        rows: Sequence[Tensor],
        offsets: Tensor,
        slots: Tensor | None = None,
        pools: Sequence[Tensor] = (),
        threads: int | None = None,
    ) -> list[Tensor]:
        """Return the outputs ``(N, width)`` for elements ``(N, D)`` each; without slots, from states of zeros."""
        admitted = self._admit(tuple(rows), offsets, slots, pools)
        count, batch, kind, addresses, _ = admitted
        table = self._table[:]
        begin = len(addresses) - len(kind.dtypes)
        for index, number in enumerate(kind.dtypes):
            table[5 * index], table[5 * index + 1] = addresses[begin + index], number
        outputs = [torch.empty(count, width, dtype=dtype, device=_CPU) for width, dtype in self._outputs]
        at = self._output_at
        for output in outputs:
            table[at] = output.data_ptr()
            at += 5
        state_at, slots_at = 5 * len(kind.dtypes), 0
        if slots is not None and self.state_sizes:
            slots_at = addresses[1]
            for address in addresses[2:begin]:
                table[state_at] = address
                state_at += 5
        else:
            states = self.pools(batch)
            for part in states:
                # In place: an initial state is read before the final one is written.
                table[state_at] = table[at] = part.data_ptr()
                state_at, at = state_at + 5, at + 5
        argument = self._argument(
            table, threads, (batch, count, 1, kind.rows, addresses[0], slots_at), self._packed.data_ptr()
        )
        _call(argument, "raglane_run_program", offsets, slots, admitted)
        return outputs

    def _argument(self, table: array[int], threads: int | None, batch: tuple[int, ...], packed: int) -> bytes:
        """Return the struct of a call."""
        pointers = *self._code.buffer_info(), table.buffer_info()[0], len(table) // 5, packed
        return _pack_program(*program_preamble(self.state_dtype, threads), *batch, *pointers)

    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.state_dtype, torch.bfloat16) if self.state_dtype is torch.float32 else (self.state_dtype,)
