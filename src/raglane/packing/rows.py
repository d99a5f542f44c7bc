"""The rows of padded tensors and packs to flat values and back: one call of the kernels each way, or index arithmetic.

Index arithmetic works on every device. It is some fifty operations of NumPy and torch, which for a small batch take as
long as the layer itself.
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
from raglane.native.memory import address, lies_well
from raglane.packing.checks import check_permutation, read_packed, read_padded, read_padded_lengths_on_host
from raglane.packing.layouts import inverse, on_host, padded_rows, rows_of, shape_and_strides, unpacked_rows
from raglane.segments import IntArray, conjugate, lengths_from_offsets, offsets_from_lengths
from raglane.segments.indexing import place_rows, take_rows

# raglane_rows: nine numbers, then sizes, order, offsets, plan, flat, table.
_pack = struct.Struct("=15q").pack
_PLAIN = (Tensor, torch.nn.Parameter)
# Fewer numbers than these are added in Python in less time than it takes to call anything.
_FEW = 64


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where a padded tensor or a pack has the elements of a batch.

    NOTE (plan): the way back must be the way there, whatever became of the caller's lengths or ``sorted_indices`` and
    of the offsets that others were given. So ``plan`` has copies of its own, and is for this class and C alone. It is
    not a tensor, because a tensor takes twice as long to make.
    """

    shape: tuple[int, ...]  # of the tensor, without features
    batch_dim: int | None  # the dimension of the sequences in a padded tensor; None for a pack
    count: int  # ``B``
    steps: int  # ``T``
    offsets: Tensor  # ``(B + 1,)`` int64, for callers that want them
    plan: array[int]  # 64-bit integers, written when the elements are first read; see ``raglane_rows`` in ``raglane.h``

    def to_flat(self, table: Tensor, total: int) -> Tensor:
        """The elements, ``(N, *features)``, of a tensor of this layout."""
        if is_transformed(table):
            rows = table.reshape(math.prod(self.shape), *table.shape[len(self.shape) :])
            return take_rows(rows, self._index())
        return self._read(table, total, ())

    def from_flat(self, flat: Tensor) -> Tensor:
        """A tensor of this layout with elements ``(N, *features)``; zeros where there is none."""
        if is_transformed(flat):
            return place_rows(flat, self._index(), math.prod(self.shape)).view(*self.shape, *flat.shape[1:])
        if flat.requires_grad and torch.is_grad_enabled():
            return _from_flat(flat, self)
        return self._scatter(flat)

    def _read(self, table: Tensor, total: int, given: tuple[Tensor, ...]) -> Tensor:
        """The elements of a tensor; ``given``, where there is any, says for the first time where they are."""
        if table.requires_grad and torch.is_grad_enabled():
            return _to_flat(table, self, total, given)
        return self._gather(table, total, given)

    @index_arithmetic
    def _index(self) -> Tensor:
        """The row of each element ``(N,)``, for tensors that C cannot read."""
        count, plan, here = self.count, torch.tensor(self.plan, dtype=torch.int64, device="cpu"), torch.device("cpu")
        offsets = plan[: count + 1]
        lengths = lengths_from_offsets(offsets).numpy()
        if self.batch_dim is not None:
            return padded_rows(lengths, int(offsets[-1]), shape_and_strides(count, self.steps, not self.batch_dim)[1])
        order, sizes = plan[count + 1 : 2 * count + 1], plan[2 * count + 1 :]
        return unpacked_rows(inverse(order).numpy(), lengths, sizes.numpy(), int(offsets[-1]), here)

    def _gather(self, table: Tensor, total: int, given: tuple[Tensor, ...]) -> Tensor:
        features = table.shape[len(self.shape) :]
        flat = table.new_empty(total, *features)
        self._move("raglane_flatten" if given else "raglane_gather", flat, table, features, given)
        return flat

    def _scatter(self, flat: Tensor) -> Tensor:
        features = flat.shape[1:]
        table = flat.new_empty(*self.shape, *features)
        flat = _resolved("output", flat)
        self._move("raglane_scatter", flat, table, features, ())
        return table

    def _move(
        self, function: str, flat: Tensor, table: Tensor, features: torch.Size, given: tuple[Tensor, ...]
    ) -> None:
        """Let C move rows; one of the two tensors is new."""
        size, strides = table.element_size(), (0, 0)
        if table.shape[: len(self.shape)] != self.shape:
            check_like("input", table, (*self.shape, *features), flat)
        if self.batch_dim is None:
            table = _resolved("packed.data", table)
        else:
            # Sequences and steps may lie anyhow, features side by side.
            if table.stride()[2:] != (1,) or table.is_neg() or table.is_conj():
                table = _resolved("input", table)
            check_storage("input", table)
            stride, batch_dim = table.stride(), self.batch_dim
            strides = stride[batch_dim] * size, stride[1 - batch_dim] * size
        sizes, order = (*given, None, None)[:2]
        call(
            function,
            _pack(
                ABI,
                library().threads(),
                self.batch_dim is None,
                math.prod(features) * size,
                self.count,
                self.steps,
                flat.shape[0],
                *strides,
                address(sizes),
                address(order),
                self.offsets.data_ptr() if given else 0,
                self.plan.buffer_info()[0],
                flat.data_ptr(),
                table.data_ptr(),
            ),
        )


def _resolved(name: str, part: Tensor) -> Tensor:
    """A tensor in memory that C can read row by row."""
    if lies_well(part, part.shape, part.dtype) and not part.is_conj():
        return part
    check_like(name, part, tuple(part.shape), part.new_empty(0, device="cpu"))
    return part.resolve_conj().resolve_neg().contiguous()


class _ToFlat(torch.autograd.Function):
    boxed_grads_call = False  # as in recurrence.py

    @staticmethod
    def forward(ctx: Any, table: Tensor, layout: Layout, total: int, given: tuple[Tensor, ...]) -> Tensor:
        ctx.layout = layout
        return layout._gather(table, total, given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.layout.from_flat(grad), None, None, None


class _FromFlat(torch.autograd.Function):
    boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, flat: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.total = layout, flat.shape[0]
        return layout._scatter(flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.to_flat(grad, ctx.total), None


# What Function.apply calls once it has looked for torch.func's transforms, under which nobody comes here.
_to_flat: Callable[..., Tensor] = super(torch.autograd.Function, _ToFlat).apply
_from_flat: Callable[..., Tensor] = super(torch.autograd.Function, _FromFlat).apply


def flatten_padded(padded: Tensor, lengths: Any, batch_first: bool) -> tuple[Tensor, Layout] | None:
    """The elements of a padded tensor ``(T, B, D)``, or ``(B, T, D)`` with ``batch_first``, and where they stood.

    None where this is not for the kernels: no plain tensor on a CPU, lengths other than a tensor of int64 there, or
    lengths that do not fit, of which :func:`find_padded` says what is wrong.
    """
    batch_dim = 0 if batch_first else 1
    count, steps = padded.shape[batch_dim], padded.shape[1 - batch_dim]
    if not (_is_ours(padded) and _is_list(lengths, count)):
        return None
    total = sum(lengths.tolist()) if count < _FEW else int(lengths.sum())
    if not 0 <= total <= count * steps:
        return None
    return _flatten(padded, _layout(padded.shape[:2], batch_dim, count, steps), total, (lengths,))


def padded_from_flat(flat: Tensor, offsets: Tensor, steps: int, batch_first: bool) -> Tensor | None:
    """A padded tensor of flat elements, with zeros where it has none; None as in :func:`flatten_padded`."""
    if not (_is_ours(flat) and _is_list(offsets, None)):
        return None
    return layout_of_padded(offsets, steps, batch_first).from_flat(flat)


def layout_of_padded(offsets: Tensor, steps: int, batch_first: bool) -> Layout:
    """The layout of a padded tensor, whose plan are its offsets."""
    count = offsets.shape[0] - 1
    shape, _ = shape_and_strides(count, steps, batch_first)
    return Layout(shape, 0 if batch_first else 1, count, steps, offsets, array("q", offsets.tolist()))


def flatten_packed(packed: PackedSequence) -> tuple[Tensor, Layout] | None:
    """The elements of a pack in the caller's order, and where they stood; None as in :func:`flatten_padded`."""
    data, sizes, order, places = packed
    if data.dim() == 0 or not (_is_ours(data) and _is_list(sizes, None)):
        return None
    total = data.shape[0]
    if order is None:
        count = int(sizes[0]) if sizes.shape[0] else 0
        if places is not None or not 0 < count <= total:
            return None
        return _flatten(data, _layout((total,), None, count, sizes.shape[0]), total, (sizes,))
    count = order.shape[0] if order.dim() == 1 else 0
    if not _is_list(order, count):
        return None
    return _flatten(data, _layout((total,), None, count, sizes.shape[0]), total, (sizes, order))


def _layout(shape: tuple[int, ...], batch_dim: int | None, count: int, steps: int) -> Layout:
    """A layout of ``count`` sequences whose offsets and plan are still to be written."""
    offsets = torch.empty(count + 1, dtype=torch.int64, device="cpu")
    room = count + 1 if batch_dim is not None else 2 * count + 1 + steps
    return Layout(shape, batch_dim, count, steps, offsets, array("q", bytes(8 * room)))


def _flatten(table: Tensor, layout: Layout, total: int, given: tuple[Tensor, ...]) -> tuple[Tensor, Layout] | None:
    try:
        return layout._read(table, total, given), layout
    except ShapeError:
        raise  # of the tensor itself
    except ArgumentError:
        return None


def _is_ours(table: Tensor) -> bool:
    """True if the memory of a tensor can be read, and only PyTorch's autograd follows its operations."""
    return (
        not records_operators()
        and table.is_cpu
        and type(table) in _PLAIN
        and forward_ad._current_level < 0
        and not is_transformed(table)
        and missing_kernels() is None
    )


def _is_list(numbers: Any, count: int | None) -> bool:
    """True for ``count`` int64 numbers side by side in the host's memory."""
    return (
        type(numbers) is Tensor
        and numbers.dim() == 1
        and lies_well(numbers, (numbers.shape[0] if count is None else count,), torch.int64)
    )


# -- by index arithmetic ----------------------------------------------------------------------------------------------


class Elements(NamedTuple):
    """Where the elements of a padded batch or a pack are, sequence after sequence."""

    rows: Tensor  # (M, *features), the table that holds them
    index: Tensor  # type: ignore[assignment]  # (N,) int64 with the table: the row of each element, none twice
    lengths: Tensor  # (B,) int64 on the CPU
    offsets: Tensor  # (B + 1,) int64 with the table


@never_traced
def find_padded(
    padded: Tensor, lengths: Any, batch_first: bool = False, left: bool = False, argument: str = "padded"
) -> Elements:
    """The elements of a padded batch, in a table of all its rows as they lie in memory, where that is possible."""
    count, steps = read_padded(padded, argument, batch_first)
    host = read_padded_lengths_on_host(lengths, count, steps, batch_first)
    table, strides = rows_of(padded, batch_first)
    index = padded_rows(host, int(host.sum()), strides, steps if left else None, padded.device)
    # A copy, because the caller may change the lengths that were given.
    return Elements(table, index, *_on(host.copy(), padded.device))


@never_traced
def find_packed(packed: PackedSequence, argument: str) -> Elements:
    """The elements of a pack, of which the data are the table; waits for ``sorted_indices``."""
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
    """The lengths of a pack in the caller's order, and its order on the host, where it has one; checks the order."""
    lengths = conjugate(batch_sizes, count)
    if sorted_indices is None:
        return lengths, None
    order = on_host(sorted_indices)
    check_permutation(order, f"{argument}.sorted_indices", "make the pack anew: one of its tensors was changed")
    mine = np.empty_like(lengths)
    mine[order] = lengths
    return mine, order


def _on(lengths: IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths on the host, and offsets on a device."""
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
    """Flat values as a contiguous padded batch of ``longest`` steps, which no length may exceed; nothing waits."""
    if not left and padding_value == 0:
        placed = padded_from_flat(values, offsets, longest, batch_first)
        if placed is not None:
            return placed
    count = offsets.shape[0] - 1
    shape, strides = shape_and_strides(count, longest, batch_first)
    index = padded_rows(lengths_from_offsets(offsets), values.shape[0], strides, longest if left else None)
    return place_rows(values, index, count * longest, padding_value).view(*shape, *values.shape[1:])
