"""Conversions of padded tensors and packs to flat values and back, by one call of the kernels or by
index arithmetic.

Index arithmetic works on every device, but takes about fifty operations of NumPy and torch. For a
small batch these take as long as the layer.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_like, check_storage
from raglane._utils.tracing import index_arithmetic, is_transformed, never_traced, records_operators
from raglane.errors import ArgumentError, ShapeError
from raglane.native.library import ABI, call, library, missing_kernels
from raglane.native.memory import address, pointer
from raglane.packing.layouts import (
    inverse,
    on_host,
    padded_rows,
    rows_of,
    shape_and_strides,
    unpacked_rows,
)
from raglane.packing.pack_checks import (
    check_permutation,
    read_packed,
    read_padded,
    read_padded_lengths_on_host,
)
from raglane.segments import IntArray, conjugate, lengths_from_offsets, offsets_from_lengths
from raglane.segments.indexing import place_rows, take_rows

# The struct raglane_rows: nine numbers, then sizes, order, offsets, plan, flat, table.
_pack = struct.Struct("=15q").pack
_PLAIN = (Tensor, torch.nn.Parameter)
# Fewer numbers than these are added faster in Python than by a call of torch.
_FEW = 64


class RowTable(NamedTuple):
    """The rows of a padded tensor or a pack, which C++ reads in place of flat values."""

    batch_dim: int | None  # as in :class:`Layout`
    sizes: Tensor  # of a padded tensor its lengths, of a pack its batch sizes
    order: Tensor | None = None  # the ``sorted_indices`` of a pack
    # True if all lengths are equal, and the elements have the order of flat values; then ``sizes``
    # is not read, and there are no gradients.
    is_even: bool = False

    @property
    def number(self) -> int:
        """The number of the layout in ``csrc/torch/rows.h``."""
        if self.is_even:
            return 5 if self.batch_dim else 4
        return 3 if self.batch_dim is None else 1 + self.batch_dim


@dataclass(slots=True, eq=False)
class Layout:
    """The rows of a batch's elements in a padded tensor or a pack.

    NOTE (plan): the conversion back must invert the conversion there, even if the caller has
    changed its lengths, ``sorted_indices`` or ``offsets`` meanwhile. So ``plan`` contains copies,
    which only this class and C use. It is not a tensor, because a tensor takes twice as long to
    create.
    """

    shape: tuple[int, ...]  # of the tensor, without features
    batch_dim: int | None  # the dimension of the sequences in a padded tensor; None for a pack
    count: int  # ``B``
    steps: int  # ``T``
    offsets: Tensor  # ``(B + 1,)`` int64, for the caller
    plan: array[
        int
    ]  # 64-bit integers, written when the elements are first read; see ``raglane_rows`` in ``raglane.h``

    @classmethod
    def of_saved_plan(cls, saved: Tensor) -> Layout:
        """Return the layout that a call with a :class:`RowTable` saved; raise if a hook changed it."""
        numbers = saved.tolist() if _is_list(saved, None) else []
        number, steps, *plan = numbers if len(numbers) > 2 else (0, 0, 0)
        is_pack = number == 3
        rest = len(plan) - 1 - (steps if is_pack else 0)
        if number not in (1, 2, 3) or steps < 0 or rest < 0 or (is_pack and rest % 2):
            got = f"shape {tuple(saved.shape)} of {saved.dtype} on {saved.device}"
            fix = "return from hooks on saved tensors what they received"
            raise ShapeError("saved places", got, "those that forward saved", fix)
        count = rest // 2 if is_pack else rest
        offsets = torch.tensor(plan[: count + 1], dtype=torch.int64, device="cpu")
        if is_pack:
            return cls((plan[count],), None, count, steps, offsets, array("q", plan))
        shape = (count, steps) if number == 1 else (steps, count)
        return cls(shape, number - 1, count, steps, offsets, array("q", plan))

    def to_flat(self, table: Tensor, total: int) -> Tensor:
        """Return the elements ``(N, *features)`` of a tensor of this layout."""
        if is_transformed(table):
            rows = table.reshape(math.prod(self.shape), *table.shape[len(self.shape) :])
            return take_rows(rows, self._index())
        return self._read(table, total, ())

    def from_flat(self, flat: Tensor) -> Tensor:
        """Return a tensor of this layout with elements ``(N, *features)``, padded with zeros."""
        if is_transformed(flat):
            return place_rows(flat, self._index(), math.prod(self.shape)).view(
                *self.shape, *flat.shape[1:]
            )
        if flat.requires_grad and torch.is_grad_enabled():
            return _from_flat(flat, self)
        return self._scatter(flat)

    def _read(self, table: Tensor, total: int, sources: tuple[Tensor, ...]) -> Tensor:
        """Return the elements of a tensor; ``sources``, lengths or sizes and order, are passed if
        plan is unwritten.
        """
        if table.requires_grad and torch.is_grad_enabled():
            return _to_flat(table, self, total, sources)
        return self._gather(table, total, sources)

    @index_arithmetic
    def _index(self) -> Tensor:
        """Return the row of each element ``(N,)``, for tensors that C cannot read."""
        count = self.count
        plan = torch.tensor(self.plan, dtype=torch.int64, device="cpu")
        offsets = plan[: count + 1]
        lengths = lengths_from_offsets(offsets).numpy()
        if self.batch_dim is not None:
            return padded_rows(
                lengths,
                int(offsets[-1]),
                shape_and_strides(count, self.steps, not self.batch_dim)[1],
            )
        order = plan[count + 1 : 2 * count + 1]
        sizes = plan[2 * count + 1 :]
        return unpacked_rows(
            inverse(order).numpy(), lengths, sizes.numpy(), int(offsets[-1]), torch.device("cpu")
        )

    def _gather(self, table: Tensor, total: int, sources: tuple[Tensor, ...]) -> Tensor:
        features = table.shape[len(self.shape) :]
        flat = table.new_empty(total, *features)
        if table.shape[: len(self.shape)] != self.shape:
            check_like("input", table, (*self.shape, *features), flat)
        if self.batch_dim is None:
            table = _resolved("packed.data", table)
        else:
            # Only the features must be contiguous.
            if table.stride()[2:] != (1,) or table.is_neg() or table.is_conj():
                table = _resolved("input", table)
            check_storage("input", table)
        self._move("raglane_flatten" if sources else "raglane_gather", flat, table, sources)
        return flat

    def _scatter(self, flat: Tensor) -> Tensor:
        flat = _resolved("output", flat)
        table = flat.new_empty(*self.shape, *flat.shape[1:])
        self._move("raglane_scatter", flat, table, ())
        return table

    def _move(
        self, function: str, flat: Tensor, table: Tensor, sources: tuple[Tensor, ...]
    ) -> None:
        """Call a function of C that copies rows; one of the two tensors is new, the other one
        validated.
        """
        size = table.element_size()
        strides = (0, 0)
        if self.batch_dim is not None:
            stride = table.stride()
            batch_dim = self.batch_dim
            strides = stride[batch_dim] * size, stride[1 - batch_dim] * size
        head = ABI, library().threads(), self.batch_dim is None, math.prod(flat.shape[1:]) * size
        sizes, order = (*sources, None, None)[:2]
        offsets = self.offsets.data_ptr() if sources else 0
        plan = self.plan.buffer_info()[0]
        pointers = pointer(sizes), pointer(order), offsets, plan, flat.data_ptr(), table.data_ptr()
        call(function, _pack(*head, self.count, self.steps, flat.shape[0], *strides, *pointers))


def _resolved(name: str, tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, the same one if possible."""
    if address(tensor, tensor.shape, tensor.dtype) is not None and not tensor.is_conj():
        return tensor
    check_like(name, tensor, tuple(tensor.shape), tensor.new_empty(0, device="cpu"))
    return tensor.resolve_conj().resolve_neg().contiguous()


class _ToFlat(torch.autograd.Function):
    boxed_grads_call = False  # as in kernels/cpu/backend.py

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, layout: Layout, total: int, sources: tuple[Tensor, ...]
    ) -> Tensor:
        ctx.layout = layout
        return layout._gather(table, total, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.layout.from_flat(grad), None, None, None


class _FromFlat(torch.autograd.Function):
    boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, flat: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        ctx.total = flat.shape[0]
        return layout._scatter(flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.to_flat(grad, ctx.total), None


# Function.apply without its check for transforms of torch.func, under which these are not called.
_to_flat: Callable[..., Tensor] = super(torch.autograd.Function, _ToFlat).apply
_from_flat: Callable[..., Tensor] = super(torch.autograd.Function, _FromFlat).apply


def flatten_padded(padded: Tensor, lengths: Any, batch_first: bool) -> tuple[Tensor, Layout] | None:
    """Return the elements and the layout of a padded tensor ``(T, B, D)``, or ``(B, T, D)`` with
    ``batch_first``.

    Return None if the kernels do not support the call: they require a plain tensor and int64
    lengths on the CPU. Return None also for wrong lengths, for which :func:`find_padded` raises.
    """
    batch_dim = 0 if batch_first else 1
    count = padded.shape[batch_dim]
    steps = padded.shape[1 - batch_dim]
    if not (_is_readable(padded) and _is_list(lengths, count)):
        return None
    total = sum(lengths.tolist()) if count < _FEW else int(lengths.sum())
    if not 0 <= total <= count * steps:
        return None
    return _flatten(padded, _layout(padded.shape[:2], batch_dim, count, steps), total, (lengths,))


def table_of_padded(padded: Tensor, lengths: Any, batch_first: bool) -> RowTable | None:
    """Return the table of a padded tensor; None if C++ cannot read its kind.

    No mode may record operators. C++ validates the rest.
    """
    is_plain = type(padded) in _PLAIN and type(lengths) is Tensor and not is_transformed(padded)
    batch_dim = 0 if batch_first else 1
    return RowTable(batch_dim, lengths) if is_plain else None


def table_of_packed(packed: PackedSequence) -> RowTable | None:
    """Return the table of a pack; None as in :func:`table_of_padded`."""
    data, sizes, order, ranks = packed
    has_order = type(order) is Tensor or (order is None and ranks is None)
    is_plain = (
        type(data) in _PLAIN and type(sizes) is Tensor and has_order and not is_transformed(data)
    )
    return RowTable(None, sizes, order) if is_plain else None


def layout_of_padded(offsets: Tensor, steps: int, batch_first: bool) -> Layout:
    """Return the layout of a padded tensor; its plan are the offsets."""
    count = offsets.shape[0] - 1
    shape, _ = shape_and_strides(count, steps, batch_first)
    return Layout(
        shape, 0 if batch_first else 1, count, steps, offsets, array("q", offsets.tolist())
    )


def flatten_packed(packed: PackedSequence) -> tuple[Tensor, Layout] | None:
    """Return the elements of a pack in the caller's order, and its layout; None as in
    :func:`flatten_padded`.
    """
    data, sizes, order, ranks = packed
    if data.dim() == 0 or data.is_quantized or not (_is_readable(data) and _is_list(sizes, None)):
        return None
    total = data.shape[0]
    if order is None:
        count = int(sizes[0]) if sizes.shape[0] else 0
        if ranks is not None or not 0 < count <= total:
            return None
        return _flatten(data, _layout((total,), None, count, sizes.shape[0]), total, (sizes,))
    count = order.shape[0] if order.dim() == 1 else 0
    if not _is_list(order, count):
        return None
    return _flatten(data, _layout((total,), None, count, sizes.shape[0]), total, (sizes, order))


def _layout(shape: tuple[int, ...], batch_dim: int | None, count: int, steps: int) -> Layout:
    """Return a layout of ``count`` sequences with unwritten offsets and plan."""
    offsets = torch.empty(count + 1, dtype=torch.int64, device="cpu")
    room = count + 1 if batch_dim is not None else 2 * count + 1 + steps
    return Layout(shape, batch_dim, count, steps, offsets, array("q", bytes(8 * room)))


def _flatten(
    table: Tensor, layout: Layout, total: int, sources: tuple[Tensor, ...]
) -> tuple[Tensor, Layout] | None:
    try:
        return layout._read(table, total, sources), layout
    except ShapeError:
        raise  # the tensor is wrong, not its lengths
    except ArgumentError:
        return None


def _is_readable(table: Tensor) -> bool:
    """Return True if C can read a tensor, and nothing but autograd records its operations."""
    return (
        not records_operators()
        and table.is_cpu
        and type(table) in _PLAIN
        and forward_ad._current_level < 0
        and not is_transformed(table)
        and missing_kernels() is None
    )


def _is_list(numbers: Any, count: int | None) -> bool:
    """Return True for a contiguous tensor of ``count`` int64 on the CPU."""
    if type(numbers) is not Tensor or numbers.dim() != 1:
        return False
    shape = (numbers.shape[0] if count is None else count,)
    return address(numbers, shape, torch.int64) is not None


# -- by index arithmetic
# ----------------------------------------------------------------------------------------------


class Elements(NamedTuple):
    """The rows of the elements of a padded batch or a pack, sequence after sequence."""

    rows: Tensor  # (M, *features), a table with the elements
    index: Tensor  # type: ignore[assignment]  # (N,) int64 on the device of rows: the row of each element, none twice
    lengths: Tensor  # (B,) int64 on the CPU
    offsets: Tensor  # (B + 1,) int64 on the device of rows


@never_traced
def find_padded(
    padded: Tensor,
    lengths: Any,
    batch_first: bool = False,
    left: bool = False,
    argument: str = "padded",
) -> Elements:
    """Return the elements of a padded batch in a table of all its rows, a view if possible."""
    count, steps = read_padded(padded, argument, batch_first)
    host = read_padded_lengths_on_host(lengths, count, steps, batch_first)
    table, strides = rows_of(padded, batch_first)
    index = padded_rows(host, int(host.sum()), strides, steps if left else None, padded.device)
    # A copy, because the caller may change its lengths.
    return Elements(table, index, *_on(host.copy(), padded.device))


@never_traced
def find_packed(packed: PackedSequence, argument: str) -> Elements:
    """Return the elements of a pack, whose data is the table; waits for a device's order."""
    batch_sizes, sorted_indices, count = read_packed(packed, argument)
    data = packed.data
    lengths, order = lengths_of_packed(batch_sizes, sorted_indices, count, argument)
    ranks: IntArray = np.arange(count, dtype=np.int64)
    if order is not None:
        ranks[order] = np.arange(count, dtype=np.int64)
    index = unpacked_rows(ranks, lengths, batch_sizes, data.shape[0], data.device)
    return Elements(data, index, *_on(lengths, data.device))


def lengths_of_packed(
    batch_sizes: IntArray, sorted_indices: Tensor | None, count: int, argument: str
) -> tuple[IntArray, IntArray | None]:
    """Return the lengths of a pack in the caller's order, and its checked order on the host."""
    by_rank = conjugate(batch_sizes, count)
    if sorted_indices is None:
        return by_rank, None
    order = on_host(sorted_indices)
    check_permutation(
        order,
        f"{argument}.sorted_indices",
        "make a new pack, because one of its tensors was changed",
    )
    lengths = np.empty_like(by_rank)
    lengths[order] = by_rank
    return lengths, order


def _on(lengths: IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lengths on the host, and offsets on a device."""
    host = torch.from_numpy(lengths)
    return host, offsets_from_lengths(host).to(device, non_blocking=True)


def flat_to_padded(
    values: Tensor,
    offsets: Tensor,
    longest: int,
    batch_first: bool = False,
    padding_value: float = 0.0,
    left: bool = False,
) -> Tensor:
    """Return flat values as a padded batch of ``longest`` steps, the maximum, without waiting."""
    if not left and padding_value == 0 and _is_readable(values) and _is_list(offsets, None):
        return layout_of_padded(offsets, longest, batch_first).from_flat(values)
    count = offsets.shape[0] - 1
    shape, strides = shape_and_strides(count, longest, batch_first)
    index = padded_rows(
        lengths_from_offsets(offsets), values.shape[0], strides, longest if left else None
    )
    return place_rows(values, index, count * longest, padding_value).view(*shape, *values.shape[1:])
