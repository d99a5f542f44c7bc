"""The operations per sequence of ``Ragged``."""

# To type checkers a Ragged is a Tensor; its own attributes are declared here.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_device, check_flag, check_tensor, check_whole, read_index
from raglane._utils.messages import quote
from raglane._utils.tracing import refuse_jit_trace
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.interop import conversion_of
from raglane.segments.indexing import place_rows, take_rows

Kind = TypeVar("Kind")


def _explained(**fixes: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator of a class: wrong arguments of its public methods raise an
    ArgumentTypeError with the signature, and the fix of a method.
    """

    def decorate(kind: type[Kind]) -> type[Kind]:
        for name, method in list(vars(kind).items()):
            if not name.startswith("_") and callable(method):
                setattr(kind, name, _explains(method, fixes.get(name, "pass those")))
        return kind

    return decorate


def _explains(method: Callable[..., Any], fix: str) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by the method, not by its call
        passed = [*map(quote, args), *(f"{name}={quote(value)}" for name, value in kwargs.items())]
        _, *parameters = signature(method).parameters.values()
        plain = [each.replace(annotation=Parameter.empty) for each in parameters]
        name, got = method.__name__, f"({', '.join(passed)})"
        raise ArgumentTypeError(f"the arguments of {name}", got, f"{Signature(plain)}", fix)

    return call


@_explained(
    first="index r[:, :2] for the first 2 steps, or pass empty=",
    last="index r[:, -2:] for the last 2 steps, or pass empty=",
    reverse="call r.flip(dims) for other dimensions",
)
class SequenceOperations(FlatBatch):
    """Operations per sequence, without loops over sequences. They wait for a device only where
    stated.
    """

    __slots__ = ()

    # -- one value per sequence
    # ---------------------------------------------------------------------------------

    def first(self, *, empty: float = 0.0) -> Tensor:
        """Return the first element of each sequence, ``(B, *features)``, or ``empty`` for an empty
        one.

        Example:
            >>> Ragged([torch.tensor([4., 5.]), torch.empty(0)]).first(empty=-1).tolist()
            [4.0, -1.0]
        """
        return segments.first(self.values, self.offsets, self._value("empty", empty))

    def last(self, *, empty: float = 0.0) -> Tensor:
        """Return the last element of each sequence, ``(B, *features)``, or ``empty`` for an empty
        one.

        The reverse half of the last output of a bidirectional layer has read only one element: use
        ``layer.final(out, state)`` there.

        Example:
            >>> Ragged([torch.tensor([4., 5.]), torch.tensor([6.])]).last().tolist()
            [5.0, 6.0]
        """
        return segments.last(self.values, self.offsets, self._value("empty", empty))

    def order_by_length(self, descending: bool = False) -> Tensor:
        """Return the index that sorts the sequences by length, ``(B,)`` int64 on the CPU; the sort
        is stable.

        Example:
            >>> r = Ragged([torch.ones(2), torch.ones(3), torch.ones(2)])
            >>> r.order_by_length(descending=True).tolist()
            [1, 0, 2]
        """
        return torch.argsort(
            self.lengths_cpu, stable=True, descending=check_flag("descending", descending)
        )

    # -- one value per element
    # -----------------------------------------------------------------------------------

    def reverse(self) -> Self:
        """Reverse each sequence.

        Example:
            >>> Ragged([torch.tensor([1, 2]), torch.tensor([5])]).reverse().values.tolist()
            [2, 1, 5]
        """
        return self._like(segments.reverse(self.values, self.offsets))

    def shift(self, steps: int, fill_value: float | None = None) -> Self:
        """Shift each sequence by ``steps`` and fill the vacated elements; lengths do not change.

        Args:
            steps: an element takes the value ``steps`` before it; if negative, after it.
            fill_value: the value of vacated elements; None for 0, or False. Integers need one,
                because 0 may be a class: -100, which losses ignore, for targets.

        Raises:
            ArgumentTypeError: integers without ``fill_value``, or not a whole number of steps.

        Example:
            >>> r = Ragged([torch.tensor([1, 2, 3]), torch.tensor([5])])
            >>> r.shift(-1, fill_value=-100).values.tolist()
            [2, 3, -100, -100]
        """
        if fill_value is None:
            is_integer = not (self.dtype.is_floating_point or self.dtype.is_complex)
            if is_integer and self.dtype is not torch.bool:
                rule = "given for integers, of which 0 may be a class"
                fix = "pass fill_value=-100 for targets, which losses ignore, or fill_value=0"
                raise ArgumentTypeError("fill_value", "none", rule, fix)
            fill_value = 0.0
        fill = self._value("fill_value", fill_value)
        steps = check_whole("steps", steps)
        return self._like(segments.shift(self.values, self.offsets, steps, fill))

    def broadcast(self, per_sequence: Tensor) -> Self:
        """Return a batch of the same lengths in which each element has the value of its sequence.

        Args:
            per_sequence: ``(B, *anything)`` on the device of the values.

        Raises:
            ArgumentTypeError: not a dense tensor.
            ShapeError: not one row per sequence, or on another device.

        Example:
            >>> r = Ragged([torch.tensor([1., 3.]), torch.tensor([5.])])
            >>> (r - r.broadcast(r.mean(1))).values.tolist()
            [-1.0, 1.0, 0.0]
        """
        count = self.offsets.shape[0] - 1
        check_tensor("per_sequence", per_sequence, 1, "pass a tensor (B, *features)")
        check_device("per_sequence", per_sequence, self.values.device)
        if per_sequence.shape[0] != count:
            rule, fix = (
                f"a tensor with one row for each of the {count} sequences",
                "pass a tensor (B, *features)",
            )
            raise ShapeError("per_sequence", f"shape {tuple(per_sequence.shape)}", rule, fix)
        return self._like(segments.spread(per_sequence, self.offsets, self.values.shape[0]))

    # -- other lengths
    # ------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> Self:
        """Return the first ``length`` elements of each sequence; shorter sequences do not change.

        Raises:
            ArgumentTypeError: not a whole number.
            ArgumentError: ``length`` below 0.

        Example:
            >>> Ragged([torch.tensor([1, 2, 3]), torch.tensor([5])]).truncate(2).values.tolist()
            [1, 2, 5]
        """
        length = check_whole("length", length, 0, "pass how many elements to keep")
        return self[:, :length]  # type: ignore[return-value]

    def windows(self, size: int, stride: int | None = None) -> Self:
        """Split every sequence into windows, each a sequence of the result, in order.

        Windows start at 0, ``stride``, 2 ``stride``, ... as long as they contain an element that no
        earlier window contains. The last one may be shorter than ``size``. An empty sequence gives
        none.

        Args:
            size: the largest number of elements of a window, at least 1.
            stride: distance of the starts, from 1 to ``size``; by default ``size``, without overlap.

        Raises:
            ArgumentTypeError: not whole numbers.
            ArgumentError: ``size`` or ``stride`` out of range.

        Example:
            >>> r = Ragged([torch.arange(5), torch.arange(2)])
            >>> r.windows(2).lengths.tolist()
            [2, 2, 1, 2]
            >>> [w.tolist() for w in r.windows(3, stride=2)]
            [[0, 1, 2], [2, 3, 4], [0, 1]]
        """
        size = check_whole("size", size)
        stride = size if stride is None else check_whole("stride", stride)
        if size < 1 or not 1 <= stride <= size:
            rule = "at least 1, and stride at most size, so that no element is left out"
            raise ArgumentError(
                "size, stride",
                f"{size}, {stride}",
                rule,
                "pass e.g. windows(50) or windows(50, stride=25)",
            )
        lengths = self.lengths_cpu
        counts = torch.where(
            lengths > 0, ((lengths - size).clamp(min=0) + stride - 1) // stride + 1, 0
        )
        window_offsets = segments.offsets_from_lengths(counts)
        total = int(window_offsets[-1])
        within = segments.positions(window_offsets, total) * stride
        remaining = segments.spread(lengths, window_offsets, total) - within
        owners = segments.segment_ids(window_offsets, total)
        owners, within = (part.to(self.device, non_blocking=True) for part in (owners, within))
        starts = self.offsets[:-1].index_select(0, owners) + within
        return self._slices(starts, remaining.clamp(max=size), repeats=stride < size)

    def split_at(self, begins: FlatBatch) -> Self:
        """Cut every sequence before the elements where ``begins`` is True, e.g. into episodes.

        The pieces are the sequences of the result, in order. A sequence begins a piece in any case;
        an empty one gives none.

        Args:
            begins: a Ragged of one bool per element.

        Raises:
            ArgumentTypeError: not a Ragged of bools.
            ShapeError: other lengths.

        Example:
            >>> r = Ragged([torch.arange(5), torch.arange(2)])
            >>> starts = Ragged([[False, False, True, True, False], [False, False]])
            >>> r.split_at(starts).tolist()
            [[0, 1], [2], [3, 4], [0, 1]]
        """
        is_mask = isinstance(begins, FlatBatch) and begins.dtype is torch.bool
        if not is_mask or begins.feature_shape:
            got = (
                f"a Ragged of {begins.dtype}"
                if isinstance(begins, FlatBatch)
                else type(begins).__name__
            )
            rule = "a Ragged of one bool per element, True where a piece begins"
            raise ArgumentTypeError("begins", got, rule, "pass e.g. done.shift(1)")
        begins._needs_lengths_of("begins", self, "the batch")
        is_first = begins.values.cpu() | (self._with_host(segments.positions) == 0)
        bounds = is_first.nonzero().view(-1)
        ends = torch.cat([bounds[1:], bounds.new_full((min(len(bounds), 1),), len(is_first))])
        return self._build(self.values, ends - bounds)

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each step of the batch: the sequences that have it, and their elements.

        Its inverse is :meth:`from_steps`. Waits for a GPU if the lengths are only there.

        Yields:
            ``rows`` ``(n,)`` int64, the sequences that have the step, in order; and their elements
            ``(n, *features)``.

        Example:
            >>> for rows, x_t in Ragged([[1, 2], [3], [4, 5]]).steps():
            ...     print(rows.tolist(), x_t.tolist())
            [0, 1, 2] [1, 3, 4]
            [0, 2] [2, 5]
        """
        order = torch.argsort(self._with_host(segments.positions), stable=True)
        owners = self._with_host(segments.segment_ids)[order].to(self.device, non_blocking=True)
        values = take_rows(self.values, order.to(self.device, non_blocking=True))
        counts = segments.conjugate(self.lengths_cpu.numpy(), self.max_length).tolist()
        yield from zip(owners.split(counts), values.split(counts), strict=True)

    def _with_host(self, function: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return a function of the offsets on the host."""
        return function(self._host_offsets(), self.values.shape[0])

    def concat(self, *others: FlatBatch) -> Self:
        """Concatenate the sequences of several batches pairwise.

        Args:
            *others: batches with the same number of sequences, features, dtype and device.

        Raises:
            ArgumentTypeError: something that is not a ragged batch.
            ShapeError: another number of sequences, other features, another dtype or device.

        Example:
            >>> a = Ragged([torch.tensor([1]), torch.tensor([2, 3])])
            >>> b = Ragged([torch.tensor([8, 9]), torch.tensor([7])])
            >>> [s.tolist() for s in a.concat(b)]
            [[1, 8, 9], [2, 3, 7]]
        """
        batches: list[FlatBatch] = [self, *others]
        for other in batches[1:]:
            if not isinstance(other, FlatBatch):
                raise ArgumentTypeError(
                    "others", type(other).__name__, "a Ragged", conversion_of(other)
                )
            if (other.dtype, other.device) != (self.dtype, self.device):
                got, rule = (
                    f"{other.dtype} on {other.device}",
                    f"{self.dtype} on {self.device}, like this batch",
                )
                raise ShapeError("others", got, rule, "convert it with .to(...)")
            if (
                other.offsets.shape != self.offsets.shape
                or other.values.shape[1:] != self.values.shape[1:]
            ):
                got = f"{other.offsets.shape[0] - 1} sequences of features {tuple(other.values.shape[1:])}"
                features = tuple(self.values.shape[1:])
                rule = (
                    f"{self.offsets.shape[0] - 1} sequences of features {features}, like this batch"
                )
                raise ShapeError(
                    "others", got, rule, "call Ragged([*a, *b]) to put more sequences into a batch"
                )
        lengths = torch.stack([batch.lengths_cpu for batch in batches]).sum(0)
        device = self.offsets.device
        goal = segments.offsets_from_lengths(lengths).to(device, non_blocking=True)[:-1]
        index = []
        for batch in batches:
            total = batch.values.shape[0]
            shifts = goal - batch.offsets[:-1]
            index.append(
                segments.spread(shifts, batch.offsets, total) + torch.arange(total, device=device)
            )
            goal = goal + batch.offsets.diff()
        values = torch.cat([batch.values for batch in batches])
        return self._build(place_rows(values, torch.cat(index), values.shape[0]), lengths)

    def select(self, index: Tensor | Sequence[int] | NDArray[Any]) -> Self:
        """Return the sequences of an index, in its order and possibly repeated, or of a mask.

        Args:
            index: ``(M,)`` integers, negative ones counting from the end, or ``(B,)`` bools: a
                tensor, a list or an array. An index on a device is copied to the host, which waits
                for it.

        Raises:
            ArgumentTypeError: neither integers nor bools.
            ShapeError: not one-dimensional, a mask of another length, or an index out of range
                (also an IndexError).

        Example:
            >>> r = Ragged([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])])
            >>> r.select(torch.tensor([2, 0])).values.tolist()
            [4, 5, 1, 2]
        """
        chosen = read_index(index, len(self))
        is_mask = isinstance(index, Tensor) and index.dtype is torch.bool
        starts = self.offsets[:-1].index_select(0, chosen.to(self.device, non_blocking=True))
        # A mask has no repetitions.
        return self._slices(starts, self.lengths_cpu[chosen], repeats=not is_mask)

    def _slices(
        self, starts: Any, lengths_cpu: Any, repeats: bool = False, stride: int = 1
    ) -> Self:
        """Return a batch of slices of the flat values; ``repeats`` if slices may overlap.

        Starts and lengths are tensors, or arrays for offsets on the host.
        """
        refuse_jit_trace("a choice of elements by their lengths")
        if isinstance(starts, np.ndarray):
            ends = np.zeros(starts.shape[0] + 1, np.int64)
            np.cumsum(lengths_cpu, out=ends[1:])
            shifts = np.repeat(starts - ends[:-1] * stride, lengths_cpu)
            index = torch.from_numpy(np.arange(0, ends[-1] * stride, stride) + shifts)
            offsets = torch.from_numpy(ends)
        else:
            total: Any = lengths_cpu.sum().item()  # symbolic in an export
            lengths = lengths_cpu.to(starts.device, non_blocking=True)
            offsets = segments.offsets_from_lengths(lengths)
            index = segments.strided_index(starts, offsets, lengths, total, stride)
        # NOTE: take_rows requires rows without repetition; index_select sums the gradients of
        # repeated rows.
        values = self.values.index_select(0, index) if repeats else take_rows(self.values, index)
        return self._make(values, offsets, None if self.is_cpu else lengths_cpu)
