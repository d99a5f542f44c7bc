"""Functions of windows of steps: poolings, and what convolutions share with them.

NOTE (gaps): all sequences of a batch are one long row with gaps between them, which are the
padding, so one call computes all windows. A gap is as long as the larger padding of the two sides,
because the end of a sequence and the start of the next one share it. Windows across the borders of
sequences are computed too, and not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raglane import segments
from raglane._utils.checks import check_count, check_whole
from raglane._utils.tracing import index_arithmetic, is_exporting, never_traced, refuse_jit_trace
from raglane.errors import ArgumentError
from raglane.ragged import Ragged
from raglane.ragged.face.entry import check_floating
from raglane.ragged.interop import check_ragged
from raglane.segments.indexing import place_rows, take_rows


class Windows(NamedTuple):
    """The windows over the steps of a sequence; shorter sequences than ``least`` have none."""

    size: int
    stride: int
    left: int
    right: int
    dilation: int = 1
    least: int = 0

    @property
    def span(self) -> int:
        """The distance from the first step of a window to the end of its last."""
        return self.dilation * (self.size - 1) + 1

    @property
    def surplus(self) -> int | None:
        """How many more windows than steps every sequence has; None if that depends on its
        length.
        """
        surplus = self.left + self.right + 1 - self.span
        is_equal = self.stride == 1 and (surplus == 0 or (surplus > 0 and self.least == 0))
        return surplus if is_equal else None

    def numbers(self, lengths: Tensor) -> Tensor:
        """Return the number of windows of sequences, by torch's formula."""
        counts = (lengths + (self.left + self.right - self.span)) // self.stride + 1
        return torch.where(lengths >= self.least, counts.clamp(min=0), 0)

    def room(self, lengths: Tensor) -> Tensor:
        """Return the strides of the row that sequences with their gaps take."""
        strides = (lengths + (max(self.left, self.right) + self.stride - 1)) // self.stride
        return torch.maximum(strides, self.numbers(lengths))


def slide(
    batch: Ragged, windows: Windows, fill: float, function: Callable[[Tensor], Tensor]
) -> Ragged:
    """Return a function of the windows of each sequence, ``(N, C)`` to ``(windows, D)``.

    ``function`` is that of one row without padding, from ``(steps, C)`` to ``(windows, D)``.
    """
    refuse_jit_trace("a convolution or pooling over windows")
    if windows.surplus is None:
        return _slide_counted(batch, windows, fill, function)
    count = batch._count
    total = batch.values.shape[0]
    room = total + count * max(windows.left, windows.right, windows.surplus)
    rows = _rows(batch, windows, fill, function, room, total + count * windows.surplus)
    if windows.surplus == 0:
        return batch._like(rows)
    steps = torch.arange(count + 1, device=batch.device)
    lengths = None if batch._host_lengths is None else batch._host_lengths + windows.surplus
    return batch._make(rows, batch.offsets + steps * windows.surplus, lengths)


# The number of windows is a sum of lengths, which a graph does not have.
@never_traced
def _slide_counted(
    batch: Ragged, windows: Windows, fill: float, function: Callable[[Tensor], Tensor]
) -> Ragged:
    if is_exporting():
        got = "windows whose number depends on the numbers of the lengths"
        rule = "as many steps as before within torch.export: stride=1 and padding='same'"
        raise ArgumentError("windows", got, rule, "export the other layers")
    lengths = batch.lengths_cpu
    counts = windows.numbers(lengths)
    room = int(windows.room(lengths).sum())
    rows = _rows(batch, windows, fill, function, room, int(counts.sum()))
    return Ragged._build(rows, counts)


def _rows(
    batch: Ragged,
    windows: Windows,
    fill: float,
    function: Callable[[Tensor], Tensor],
    room: int,
    total: int,
) -> Tensor:
    """Return the result for each window, ``(total, D)``, of a row of ``room`` strides."""
    places, picks = _indexes(batch.offsets, windows, batch.values.shape[0], total)
    # Windows of the last sequence end in the smaller padding; torch requires one whole window.
    size = room * windows.stride + min(windows.left, windows.right) + windows.span
    return take_rows(function(place_rows(batch.values, places, size, fill)), picks)


@index_arithmetic
def _indexes(offsets: Tensor, windows: Windows, elements: int, total: int) -> tuple[Tensor, Tensor]:
    """Return the place of each element in the row, and that of each window in its result."""
    lengths = segments.lengths_from_offsets(offsets)
    starts = segments.offsets_from_lengths(windows.room(lengths))[:-1]
    places = segments.element_index(starts * windows.stride + windows.left, lengths, elements)
    if windows.surplus == 0:
        return places, places - windows.left
    return places, segments.element_index(starts, windows.numbers(lengths), total)


class _StepPooling(nn.Module):
    """The base of poolings over windows of steps."""

    fill = 0.0

    def __init__(self, kernel_size: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__()
        self.kernel_size = check_count("kernel_size", kernel_size)
        self.stride = self.kernel_size if stride is None else check_count("stride", stride)
        half = self.kernel_size // 2
        fix = f"pass at most {half}, half of kernel_size"
        self.padding = check_whole("padding", padding, 0, fix, most=half)

    def forward(self, batch: Ragged) -> Ragged:
        """Pool the windows of each sequence.

        Args:
            batch: ``(N, *features)``, floating-point; lengths may be 0.

        Returns:
            One step per window, with the features of ``batch``. A sequence of L steps has ``(L + 2
            * padding - kernel_size) // stride + 1``, and none if that is negative or L is 0.

        Raises:
            ArgumentTypeError: ``batch`` is not a Ragged, or contains no floating-point numbers.
            ArgumentError: the call is exported, and the number of windows depends on the lengths.
        """
        check_ragged("batch", batch)
        check_floating(type(self).__name__, batch.values)
        windows = Windows(self.kernel_size, self.stride, self.padding, self.padding, least=1)
        width = math.prod(batch.feature_shape)
        flat = batch._like(batch.values.reshape(batch.values.shape[0], width))
        pooled = slide(flat, windows, self.fill, self._pooled)
        return pooled._like(pooled.values.reshape(pooled.values.shape[0], *batch.feature_shape))

    if TYPE_CHECKING:

        def __call__(self, batch: Ragged) -> Ragged: ...

    def _pooled(self, row: Tensor) -> Tensor:
        return self._pool(row.t().unsqueeze(0)).squeeze(0).t()

    def _pool(self, steps: Tensor) -> Tensor:
        """Return torch's pooling of ``(1, C, steps)``."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the sizes, as torch's poolings do."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool1d(_StepPooling):
    """The maximum of each feature in windows over the steps of each sequence.

    It equals :class:`torch.nn.MaxPool1d` on each sequence without others. For one vector per
    sequence use :class:`Pooling`.

    Args:
        kernel_size: the number of steps of a window.
        stride: the distance between windows; None for ``kernel_size``.
        padding: the number of steps that windows reach beyond each end of a sequence, at most half
            of ``kernel_size``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is out of its range.

    Example:
        >>> batch = Ragged([torch.tensor([[1.], [5.], [2.], [3.], [0.]]), torch.tensor([[4.]])])
        >>> MaxPool1d(2)(batch).to_list()
        [tensor([[5.],
                [3.]]), tensor([], size=(0, 1))]
    """

    fill = -math.inf

    def _pool(self, steps: Tensor) -> Tensor:
        # An export of max_pool1d would fix the number of steps.
        sizes = ((1, self.kernel_size), (1, self.stride))
        return F.max_pool2d(steps.unsqueeze(2), *sizes).squeeze(2)


class AvgPool1d(_StepPooling):
    """The mean of each feature in windows over the steps of each sequence.

    It equals :class:`torch.nn.AvgPool1d` on each sequence without others; as there, the padding
    counts as zeros. For one vector per sequence use :class:`Pooling`.

    Args:
        kernel_size: the number of steps of a window.
        stride: the distance between windows; None for ``kernel_size``.
        padding: the number of zeros before and after each sequence, at most half of
            ``kernel_size``.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is out of its range.

    Example:
        >>> batch = Ragged([torch.tensor([[1.], [5.], [2.], [3.], [0.]]), torch.tensor([[4.]])])
        >>> AvgPool1d(2)(batch).lengths.tolist(), AvgPool1d(2)(batch).values.tolist()
        ([2, 0], [[3.0], [2.5]])
    """

    def _pool(self, steps: Tensor) -> Tensor:
        return F.avg_pool1d(steps, self.kernel_size, self.stride)
