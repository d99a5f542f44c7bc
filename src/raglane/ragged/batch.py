"""The ragged batch: flat values, sequence after sequence, and the offsets of the sequences."""

# To type checkers a Ragged is a Tensor; its own attributes are declared here.
# mypy: disable-error-code="override"

from __future__ import annotations

import _collections_abc
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from raglane import segments
from raglane._utils.checks import as_tensor, check_kind, check_unchanged
from raglane._utils.drawing import LIGHT, PALETTE
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError, ExportError, ShapeError
from raglane.ragged.base import FlatBatch
from raglane.ragged.conversions import Conversions
from raglane.ragged.face import indexing, table
from raglane.ragged.face.refusals import attribute_error, refusal
from raglane.ragged.interop import from_list
from raglane.ragged.operations import SequenceOperations

# Attributes that torch's functions of packs read first.
_OF_PACKS = ("batch_sizes", "sorted_indices", "unsorted_indices")
_SHOWN = 10  # lengths in a repr before an ellipsis
_ROWS = 24  # rows of a picture
_WIDTH, _ROW = 240, 8  # pixels


def _operator(
    function: Callable[..., Any], swapped: bool = False
) -> Callable[[Ragged, Any], Ragged]:
    """Return a Python operator of Ragged that calls a torch function."""

    def apply(self: Ragged, other: Any) -> Ragged:
        if isinstance(other, np.ndarray):
            other = as_tensor(other)
        if not isinstance(other, Tensor | Ragged | Number):
            return NotImplemented
        result: Ragged = function(other, self) if swapped else function(self, other)
        return result

    return apply


def _unary(function: Callable[..., Any]) -> Callable[[Ragged], Ragged]:
    """Return a unary Python operator."""

    def apply(self: Ragged) -> Ragged:
        result: Ragged = function(self)
        return result

    return apply


class _NotIterable(type):
    """A class whose objects ``iter`` accepts, but ``isinstance(..., Iterable)`` does not.

    Packages that weight means by the size of a batch, such as Lightning, search in Iterables for a
    tensor, and would take the length of the first sequence. Iterable searches the classes of
    ``__mro__`` for ``__iter__``, and only it does not get those that have one. A Ragged with
    ``__getitem__`` alone would be no Iterable either, but a loop over it has a quadratic backward
    pass.
    """

    @property
    def __mro__(cls) -> tuple[type, ...]:
        classes: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
        if sys._getframe(1).f_code is not _SEARCH:
            return classes
        return tuple(kind for kind in classes if "__iter__" not in vars(kind))


# Where another Python has no such function, a Ragged is Iterable.
_SEARCH = getattr(getattr(_collections_abc, "_check_methods", None), "__code__", None)


class Ragged(SequenceOperations, Conversions, metaclass=_NotIterable):  # type: ignore[metaclass]
    """A batch of sequences of different lengths, without padding.

    ``values`` ``(N, *features)`` contains the sequences one after the other, in the caller's order,
    and ``offsets`` ``(B + 1,)`` their starts. A Ragged is immutable: operations return a new one,
    which shares unchanged tensors. Gradients flow through ``values``. Lengths of 0 and batches of 0
    sequences are legal.

    A batch on a GPU keeps a copy of its lengths on the host, so that nothing waits for the GPU to
    read them. Only a batch built from offsets or lengths on a GPU has no copy: ``lengths_cpu``,
    ``max_length``, ``density``, indexing, ``truncate``, ``to_padded`` and the other conversions then
    wait for the device.

    It means what a tensor ``(B, *, *features)`` would mean in which only real elements exist:
    dimension 0 are the sequences, dimension 1 the steps, the others the features, and without
    ``dim`` a function reads all real values. Functions and methods of torch (``torch.relu(r)``,
    ``r.mean(1)``, ``r[:, 1:]``, ``torch.cat([a, b])``, ``torch.nn.Linear``) have torch's arguments,
    results and gradients for each sequence; losses (``F.cross_entropy(r, tags)``) count each real
    element once. Anything else raises an error that names a replacement.

    Args:
        sequences: tensors or NumPy arrays ``(L_i, *features)``, ``L_i`` at least 0, of one dtype
            and device, or nested lists of numbers. They are copied once.

    Raises:
        ArgumentTypeError: a single tensor, or something that is not a list of sequences.
        ShapeError: sequences whose features, dtypes or devices differ.

    Example:
        >>> r = Ragged([torch.ones(4, 12), torch.ones(2, 12), torch.ones(8, 12)])
        >>> r
        Ragged(shape=(3, *, 12), dtype=torch.float32, device=cpu, lengths=[4, 2, 8], density=0.583)
        >>> r.last().shape, r[1].shape
        (torch.Size([3, 12]), torch.Size([2, 12]))
    """

    __slots__ = ()
    locals().update(table.methods())

    def __init__(
        self, sequences: Iterable[Tensor] | Iterable[NDArray[Any]] | Iterable[Sequence[Any]]
    ) -> None:
        values, lengths = from_list(sequences)
        self._values = values
        self._offsets = segments.offsets_from_lengths(lengths).to(values.device, non_blocking=True)
        self._host_lengths = None if self._offsets.is_cpu else lengths

    # -- as a container
    # ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tensor]:
        """Yield a view of each sequence. Waits for a GPU if the lengths are only there."""
        return iter(self.to_list())

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(
        self,
        index: slice
        | list[Any]
        | Tensor
        | NDArray[Any]
        | tuple[slice, slice]
        | tuple[EllipsisType, int | slice | None],
    ) -> Self: ...
    @overload
    def __getitem__(self, index: tuple[slice, int]) -> Tensor: ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a view of one sequence for an integer, or a batch for a slice, an index or a mask.

        Waits for a GPU if the lengths are only there, or if an index tensor is on one.

        Example:
            >>> r = Ragged([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])])
            >>> r[-1].tolist(), r[1:].lengths.tolist(), r[torch.tensor([2, 0])].values.tolist()
            ([4, 5], [1, 2], [4, 5, 1, 2])
        """
        if isinstance(index, slice):
            return self._slice(index)
        if isinstance(index, list) or (isinstance(index, Tensor | np.ndarray) and index.ndim > 0):
            return self.select(index)
        if isinstance(index, tuple | FlatBatch) or index is Ellipsis or index is None:
            return indexing.index(self, index)
        try:
            position = operator.index(index)
        except (TypeError, RuntimeError):
            rule = "an integer, a slice, a list, an index tensor, a mask or a tuple of them"
            fix = "pass e.g. r[0], r[:, :5], r[:, -1] or r[..., 0]"
            raise ArgumentTypeError("index", quote(index), rule, fix) from None
        if not -len(self) <= position < len(self):
            rule = f"from {-len(self)} to {len(self) - 1}, for {len(self)} sequences"
            raise IndexError(message("index", quote(position), rule, "use an index below len(r)"))
        host_offsets = self._host_offsets()
        position %= len(self)
        start, end = int(host_offsets[position]), int(host_offsets[position + 1])
        # A check of all offsets would make a loop over the sequences quadratic.
        if not (torch.compiler.is_compiling() or 0 <= start <= end <= self._values.shape[0]):
            check_unchanged(host_offsets, self._values.shape[0], host_offsets.device)
        return self._values[start:end]

    def _slice(self, index: slice) -> Self:
        try:
            start, stop, step = index.indices(len(self))
        except (TypeError, ValueError, RuntimeError) as error:
            rule = "a slice of integers or None, with a step other than 0"
            kind = ArgumentError if isinstance(error, ValueError) else ArgumentTypeError
            raise kind("index", quote(index), rule, "pass e.g. r[2:5]") from error
        if step != 1:
            return self.select(
                torch.tensor(range(start, stop, step), dtype=torch.int64, device="cpu")
            )
        stop = max(start, stop)
        host_offsets = self._host_offsets()
        first, end = int(host_offsets[start]), int(host_offsets[stop])
        offsets = self._offsets[start : stop + 1] - first
        return self._make(self._values[first:end], offsets, self.lengths_cpu[start:stop])

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to the flat values, ``(N, *features)`` in and ``(N, *anything)`` out.

        Args:
            function: it must treat each row independently, which is not checked.

        Raises:
            ArgumentTypeError: not a function.
            ShapeError: the function does not return one row per element.

        Example:
            >>> Ragged([torch.ones(2, 3)]).map(lambda values: values.sum(-1)).values.tolist()
            [3.0, 3.0]
        """
        check_kind(
            "function", function, Callable, "a function of the flat values", "pass e.g. torch.relu"
        )
        values = function(self._values)
        if not isinstance(values, Tensor) or values.shape[:1] != self._values.shape[:1]:
            got = (
                f"shape {tuple(values.shape)}"
                if isinstance(values, Tensor)
                else type(values).__name__
            )
            rule = f"a tensor with one row for each of the {self._values.shape[0]} elements"
            fix = "return (N, *anything), or call the function on r.values"
            raise ShapeError("function", f"a result of {got}", rule, fix)
        return self._like(values)

    def to(
        self,
        device: torch.device | str | int | torch.dtype | Tensor | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Self:
        """Move or convert the values like :meth:`torch.Tensor.to`; offsets move to the same device.

        Args:
            device: a device; or, as the only one of the first two, a dtype or a tensor with the
                device and dtype.
            dtype: the dtype of the values.
            non_blocking: True to copy asynchronously from pinned memory.
            copy: True to copy values that have the device and dtype.

        Raises:
            ArgumentTypeError: invalid arguments of ``torch.Tensor.to``, or a device that is not
                available.

        Example:
            >>> Ragged([[1, 2]]).to(torch.float64).dtype
            torch.float64
        """
        target: Any = (device,) if dtype is None else (device, dtype)
        options: dict[str, Any] = {
            name: value for name, value in (("non_blocking", non_blocking), ("copy", copy)) if value
        }
        try:
            values = self._values.to(*target, **options)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            _refuse_to(target, options, error)
            raise
        offsets = self._like(values)._offsets.to(values.device, non_blocking=bool(non_blocking))
        return self._make(values, offsets, self._known_lengths())

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Self:
        """Return the batch on a GPU, by default the current one."""
        target = torch.device("cuda") if device is None else torch.device(device)
        return self.to(target, non_blocking=non_blocking)

    def cpu(self) -> Self:
        """Return the batch on the CPU."""
        return self.to("cpu")

    def type_as(self, other: Any) -> Self:
        """Return the batch with the dtype and device of a tensor or batch."""
        return self.to(other.device, other.dtype)

    def contiguous(self) -> Self:
        """Return the batch with contiguous values."""
        return self._like(self._values.contiguous())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the values require gradients, and return this batch."""
        self._values.requires_grad_(requires_grad)
        return self

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, for asynchronous copies to a GPU.

        A DataLoader with ``pin_memory=True`` calls this method.
        """
        return self._make(self._values.pin_memory(), self._offsets.pin_memory(), self._host_lengths)

    def detach(self) -> Self:
        """Return the batch detached from the autograd graph."""
        return self._like(self._values.detach())

    # -- torch functions and operators
    # ------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return table.call(function, args, dict(kwargs) if kwargs else {})

    if not TYPE_CHECKING:  # typed.pyi has their types
        __add__ = _operator(torch.add)
        __radd__ = _operator(torch.add, swapped=True)
        __sub__ = _operator(torch.sub)
        __rsub__ = _operator(torch.sub, swapped=True)
        __mul__ = _operator(torch.mul)
        __rmul__ = _operator(torch.mul, swapped=True)
        __truediv__ = _operator(torch.true_divide)
        __rtruediv__ = _operator(torch.true_divide, swapped=True)
        __floordiv__ = _operator(torch.floor_divide)
        __mod__ = _operator(torch.remainder)
        __pow__ = _operator(torch.pow)
        __rpow__ = _operator(torch.pow, swapped=True)
        __and__ = _operator(torch.bitwise_and)
        __rand__ = _operator(torch.bitwise_and, swapped=True)
        __or__ = _operator(torch.bitwise_or)
        __ror__ = _operator(torch.bitwise_or, swapped=True)
        __xor__ = _operator(torch.bitwise_xor)
        __rxor__ = _operator(torch.bitwise_xor, swapped=True)
        __lt__ = _operator(torch.lt)
        __le__ = _operator(torch.le)
        __gt__ = _operator(torch.gt)
        __ge__ = _operator(torch.ge)
        __eq__ = _operator(torch.eq)
        __ne__ = _operator(torch.ne)
        __matmul__ = _operator(torch.matmul)
        __rmatmul__ = _operator(torch.matmul, swapped=True)
        __rmod__ = _operator(torch.remainder, swapped=True)
        __rfloordiv__ = _operator(torch.floor_divide, swapped=True)
        __neg__ = _unary(torch.neg)
        __abs__ = _unary(torch.abs)
        __invert__ = _unary(torch.bitwise_not)
        # `x in batch` has no meaning.
        __contains__ = None

    __hash__ = object.__hash__
    # NumPy leaves `array + batch` to the batch.
    __array_ufunc__ = None

    def __bool__(self) -> bool:
        # By its length as a container, `if a == b` would be true for any values.
        rule = "compared or counted before it is used as a bool"
        fix = "write len(r) > 0, torch.equal(a, b) or (a == b).all()"
        raise ArgumentTypeError(
            "a Ragged", "a batch of values, which is neither true nor false", rule, fix
        )

    if not TYPE_CHECKING:  # so that checkers find a typing error in a name

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes, to name a replacement of those of torch.Tensor.
            if name in _OF_PACKS:
                says = f"A Ragged does not have the attribute {name} of a PackedSequence."
                fix = "Call r.to_padded() or r.to_list(); r.to_packed() returns a PackedSequence."
                raise AttributeError(f"{says} {fix}")
            if name.startswith("__") or not hasattr(Tensor, name):
                raise AttributeError(f"Ragged has no attribute {name!r}")
            raise attribute_error(name)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refusal("__setitem__")

    # -- pickling and display
    # ------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._values, self._offsets, self._host_lengths)

    def __repr__(self) -> str:
        lengths = self._known_lengths()
        shape = self._shape_text()
        of_lengths = "lengths=on the device"
        # NOTE: a repr never waits for a device, so a debugger does not change the timing.
        if lengths is not None:
            shown = ", ".join(map(str, lengths[:_SHOWN].tolist())) + (
                ", ..." if len(self) > _SHOWN else ""
            )
            of_lengths = f"lengths=[{shown}], density={self.density:.3g}"
        return f"Ragged(shape={shape}, dtype={self.dtype}, device={self.device}, {of_lengths})"

    def _repr_html_(self) -> str:
        lengths = self._known_lengths()
        return _picture(repr(self), [] if lengths is None else lengths.tolist())


def _picture(title: str, lengths: list[int]) -> str:
    """Return an HTML picture with a bar per sequence, grey for padding."""
    from html import escape  # slow to import, and used only in notebooks

    rows = lengths[:_ROWS]
    longest = max([1, *rows])
    bars = []
    for row, length in enumerate(rows):
        top = row * (_ROW + 2)
        width = length / longest * _WIDTH
        colour = PALETTE[row % len(PALETTE)]
        bars.append(
            f'<rect x="0" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="{LIGHT.padding}"/>'
            f'<rect x="0" y="{top}" width="{width:.1f}" height="{_ROW}" fill="{colour}"/>'
            f'<text x="{_WIDTH + 6}" y="{top + _ROW}" font-size="9" fill="currentColor">{length}</text>'
        )
    height = len(rows) * (_ROW + 2)
    more = f"<div>and {len(lengths) - _ROWS} more</div>" if len(lengths) > _ROWS else ""
    return (
        f"<div><code>{escape(title)}</code></div>"
        f'<svg width="{_WIDTH + 60}" height="{height}" role="img" aria-label="lengths">{"".join(bars)}</svg>{more}'
    )


def _refuse_to(args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raise if the arguments of ``to`` are wrong, i.e. an empty tensor cannot be converted
    either.
    """
    try:
        torch.empty(0, device="cpu").to(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError, AssertionError):
        got = ", ".join(
            [*map(quote, args), *(f"{name}={quote(value)}" for name, value in kwargs.items())]
        )
        rule = (
            f"arguments of torch.Tensor.to, and an available device ({str(error).splitlines()[0]})"
        )
        raise ArgumentTypeError("to", got, rule, "pass a device, a dtype or both") from error


def _rebuild(values: Tensor, offsets: Tensor, lengths_cpu: Tensor | None) -> Ragged:
    """Rebuild a pickled batch."""
    return Ragged._make(values, offsets, lengths_cpu)


def _flatten(batch: Ragged) -> tuple[list[Tensor], None]:
    # NOTE: lengths on the host are a tensor among the children, never integers in the context, for
    # which torch.compile would compile again for every batch.
    host = [] if batch._host_lengths is None else [batch._host_lengths]
    return [batch._values, batch._offsets, *host], None


def _flatten_with_keys(batch: Ragged) -> tuple[list[tuple[Any, Any]], None]:
    children, context = _flatten(batch)
    names = ("values", "offsets", "lengths_cpu")[: len(children)]
    return [
        (pytree.GetAttrKey(name), child) for name, child in zip(names, children, strict=True)
    ], context


def _unflatten(children: Iterable[Any], context: None) -> Ragged:  # noqa: ARG001
    if torch.onnx.is_in_onnx_export():
        got, rule = "a Ragged", "a tensor within torch.onnx.export, whose graph has no batches"
        fix = "call rl.export.onnx(model, path, example=batch)"
        raise ExportError("an argument or result of the model", got, rule, fix)
    values, offsets, *host = children
    return Ragged._make(values, offsets, host[0] if host else None)


# Programs of torch.export contain their example, which torch loads with weights_only=True.
torch.serialization.add_safe_globals([_rebuild])
pytree.register_pytree_node(
    Ragged,
    _flatten,
    _unflatten,
    serialized_type_name="raglane.Ragged",
    flatten_with_keys_fn=_flatten_with_keys,
)
