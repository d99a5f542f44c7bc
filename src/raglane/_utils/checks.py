"""Checks of the arguments of public functions. Each function returns the argument or raises an
error.

No function waits for a device: numbers on a device are not checked.
"""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from numbers import Complex, Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.messages import count_of, nearest, quote
from raglane._utils.tracing import index_arithmetic, records_operators
from raglane.errors import (
    ArgumentError,
    ArgumentTypeError,
    DimensionError,
    MistypedError,
    RaglaneError,
    ShapeError,
)

# Larger than any number of elements, and small enough for exact sums.
_MOST = 2**62

# Fewer numbers than these are compared faster in Python than by NumPy.
_FEW = 128

_CAST_BY_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)

_NO_ARRAY = (TypeError, ValueError, RuntimeError, OverflowError)
"""Errors of torch and NumPy for objects that are not arrays of numbers."""


# -- tensors
# --------------------------------------------------------------------------------------------------


def as_tensor(data: Any, device: str | None = None) -> Tensor:
    """Convert to a tensor that shares memory with a tensor or NumPy array, and copies anything
    else.
    """
    if isinstance(data, Tensor):
        return data
    check_unmasked("an array", data)
    if hasattr(data, "__array__"):  # e.g. of pandas and polars
        data = np.asarray(data)
    if isinstance(data, np.ndarray) and (
        not data.dtype.isnative or min(data.strides, default=0) < 0
    ):
        # torch supports neither foreign byte order nor negative strides.
        data = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("="))
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            return torch.as_tensor(data, device=device)
    return torch.as_tensor(data, device=device)


def check_unmasked(name: str, value: Any) -> None:
    """Raise if elements of a NumPy array are masked: its conversion would show the numbers under
    the mask.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(
        value
    ):  # torch.compile enters no function of NumPy
        raise ArgumentTypeError(
            name, "masked elements", "an array without them", "call .filled(numpy.nan) on it"
        )


def check_tensor(name: str, value: Any, least: int = 0, fix: str = "pass a torch.Tensor") -> Tensor:
    """Return a dense tensor unchanged."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(name, f"a {type(value).__name__}", "a tensor", fix)
    check_dense(name, value, ArgumentTypeError)
    if value.dim() < least:
        rule = f"at least {count_of(least, 'dimension')}"
        fix = "pass a tensor whose first dimension is the elements"
        raise ShapeError(name, f"shape {tuple(value.shape)}", rule, fix)
    return value


def _kind_of_storage(tensor: Tensor) -> str | None:
    """Return a word for the storage of a tensor; None if it is dense."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return None if tensor.layout is torch.strided else f"{tensor.layout}"


def check_dense(name: str, value: Tensor, error: type[RaglaneError] = ShapeError) -> None:
    """Raise if a tensor is sparse, nested or quantized."""
    kind = _kind_of_storage(value)
    if kind is not None:
        raise error(
            name,
            f"a tensor that is {kind}",
            "a dense tensor",
            "call .to_dense() or .dequantize() on it",
        )


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """Raise if a tensor is on another device."""
    if value.device != device:
        rule = f"on {device}, like the other tensors"
        raise ShapeError(name, f"a tensor on {value.device}", rule, "move it with .to()")


def check_fits(name: str, value: Tensor, other: Tensor) -> None:
    """Raise if a tensor differs from another in layout, device or dtype, unless autocast converts
    the dtype.
    """
    check_dense(name, value)
    check_device(name, value, other.device)
    if value.dtype == other.dtype:
        return
    casts = value.dtype in _CAST_BY_AUTOCAST and other.dtype in _CAST_BY_AUTOCAST
    if not (casts and torch.is_autocast_enabled(value.device.type)):
        rule = f"of dtype {other.dtype}, like weights, input and state"
        fix = f"convert it with .to({other.dtype})"
        if value.is_floating_point():
            fix = f"{fix}, or the layer with .to({value.dtype})"
        raise ShapeError(name, str(value.dtype), rule, fix)


def check_like(name: str, value: Any, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise if an argument is not a tensor of a shape that a kernel can use with ``like``."""
    if _is_whole(value, shape, like):
        return
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(
            name, f"a {type(value).__name__}", f"a tensor {shape}", "set it to a tensor"
        )
    check_dense(name, value)
    if tuple(value.shape) != shape:
        rule = f"of shape {shape}, which the sizes of the layer require"
        fix = "give it a tensor of that shape, or build a layer of the sizes that you need"
        raise ShapeError(name, f"shape {tuple(value.shape)}", rule, fix)
    check_fits(name, value, like)
    check_storage(name, value)


def _is_whole(value: Any, shape: tuple[int, ...], like: Tensor) -> bool:
    """Return True for the common case: a contiguous tensor of a shape and dtype, on one device,
    within its storage.
    """
    try:
        if value.shape != shape or value.dtype is not like.dtype or records_operators():
            return False
        # Devices take longer to compare.
        is_here = (value.is_cpu and like.is_cpu) or value.device == like.device
        if not is_here:
            return False
        return is_stored(value)
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        return False


def is_stored(value: Tensor) -> bool:
    """Return True for a contiguous tensor within its storage; False requires
    :func:`check_storage`.
    """
    if not value.is_contiguous():
        return False
    size = value.storage_offset() * value.element_size() + value.nbytes
    return bool(value.untyped_storage().nbytes() >= size)


def check_storage(name: str, value: Tensor) -> None:
    """Raise if the storage of a tensor is smaller than its shape and strides require."""
    if records_operators() or value.numel() == 0:
        return
    try:
        if is_stored(value):
            return
        there = value.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return  # a wrapper without memory
    last = sum(
        [(size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)]
    )
    needed = (value.storage_offset() + last + 1) * value.element_size()
    if there < needed:
        rule = f"a tensor whose storage has {needed} bytes, for the shape {tuple(value.shape)}"
        fix = "do not shrink or free the storage of a tensor that is still used"
        raise ShapeError(name, f"a storage of {there} bytes", rule, fix)


# -- kinds, names and numbers
# -----------------------------------------------------------------------------------------


def check_kind(name: str, value: Any, kind: Any, rule: str, fix: str) -> None:
    """Raise if an argument is not an instance of a class."""
    if not isinstance(value, kind):
        # The numbers of a tensor may be many, or on a device.
        got = f"a {type(value).__name__}" if isinstance(value, Tensor) else quote(value)
        raise ArgumentTypeError(name, got, rule, fix)


def check_flag(name: str, value: Any, error: type[RaglaneError] = ArgumentTypeError) -> bool:
    """Return a flag as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise error(name, quote(value), "True or False", "choose one of them")
    return bool(value)


def check_choice(
    name: str, value: Any, choices: Sequence[str], fix: str = "pass one of these"
) -> str:
    """Return one of several names unchanged."""
    if not isinstance(value, str) or value not in choices:
        near = nearest(value, choices) if isinstance(value, str) else None
        fix = f"pass {near}" if near else fix
        raise ArgumentError(name, quote(value), f"one of {', '.join(choices)}", fix)
    return value


def check_real(
    name: str,
    value: Any,
    rule: str,
    holds: Callable[[float], bool],
    fix: str,
    kind: type[RaglaneError] = ArgumentTypeError,
) -> float:
    """Return a real number for which a rule holds as a float; raise ``kind`` if it is not a real
    number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise kind(name, quote(value), rule, fix)
    if not _converts(float, value) or not holds(float(value)):
        raise ArgumentError(name, quote(value), rule, fix)
    return float(value)


def check_number(name: str, value: Any, rule: str, holds: Callable[[float], bool]) -> float:
    """Return a number of a layer or loss as a float; raise ArgumentError for any other value."""
    return check_real(name, value, rule, holds, "pass such a number", ArgumentError)


def check_whole(
    name: str, value: Any, least: int | None = None, fix: str = "", *, most: int = _MOST - 1
) -> int:
    """Return a whole number as an int; without ``fix``, the message has one of its own."""
    whole: int | None = None
    is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool)
    if not is_bool and not isinstance(value, np.ndarray):
        try:
            whole = operator.index(value)
        except (TypeError, RuntimeError):
            whole = None
    if whole is None:
        raise ArgumentTypeError(name, quote(value), "a whole number", "pass an int")
    if least is not None and whole < least:
        raise ArgumentError(name, quote(value), f"at least {least}", fix or f"pass {least} or more")
    if not -_MOST < whole <= most:
        rule = "below 2**62" if most == _MOST - 1 else f"at most {most}"
        raise ArgumentError(name, quote(value), rule, fix or "pass a smaller one")
    return whole


def check_value(name: str, value: Any, dtype: torch.dtype) -> Any:
    """Return a number that a dtype can represent; torch would truncate, wrap around or reject
    another.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_cpu and not value.is_quantized:
        value = value.item()
    kind = _python_type(dtype)
    fix = "pass a number"
    fits = isinstance(value, Complex) and _converts(int if kind is bool else kind, value)
    if fits and kind in (int, bool):
        fix = "pass an integer, or convert the batch"
        fits = _is_integer_of(dtype, value)
    if not fits:
        raise ArgumentTypeError(name, quote(value), f"a value of {dtype}", fix)
    if kind is float and abs(value) > torch.finfo(dtype).max:
        value = math.copysign(math.inf, value)  # torch would raise
    return kind(value)


def _python_type(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return the type of the Python numbers that a dtype holds."""
    if dtype is torch.bool:
        return bool
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else int


def _is_integer_of(dtype: torch.dtype, value: Any) -> bool:
    """Return True if a number is whole, and in the range of an integer dtype or bool."""
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return bool(value % 1 == 0 and limits.min <= value <= limits.max)


def _converts(kind: Callable[[Any], Any], value: Any) -> bool:
    """Return True if a number converts to a kind without an error."""
    try:
        kind(value)
    except (OverflowError, TypeError, ValueError):
        return False
    return True


# -- arguments of layers
# ----------------------------------------------------------------------------------------------


def check_count(name: str, value: Any) -> int:
    """Return a size as an int."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < 1:
        error = ArgumentError if is_whole else MistypedError
        raise error(name, quote(value), "a whole number of at least 1", "pass 1 or more")
    if int(value) >= 2**31:
        raise ArgumentError(name, quote(value), "at most 2**31 - 1", "pass a smaller one")
    return int(value)


def check_eps(eps: Any) -> float:
    """Return a number that is added to a divisor, or to a mean square in one."""
    return check_number("eps", eps, "finite and at least 0", lambda number: 0 <= number < math.inf)


def check_every(steps: Any) -> int | None:
    """Return a layer's ``checkpoint_every``."""
    return None if steps is None else check_count("checkpoint_every", steps)


def check_clip(clip: float | None) -> float | None:
    """Return a cell's ``clip``."""
    if clip is not None:
        check_number("clip", clip, "a finite number above 0", lambda number: 0 < number < math.inf)
    return clip


def check_dropout(dropout: Any) -> float:
    """Return the dropout between layers."""
    return check_number(
        "dropout", dropout, "a probability from 0 to 1", lambda share: 0 <= share <= 1
    )


def check_dtype(dtype: Any) -> None:
    """Raise if parameters cannot have a dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        rule = "a floating-point dtype, or None for torch's default"
        error = ShapeError if isinstance(dtype, torch.dtype) else MistypedError
        raise error("dtype", quote(dtype), rule, "pass e.g. torch.float32")


def check_model(model: Any) -> None:
    """Raise if an argument is not a module."""
    if not isinstance(model, torch.nn.Module):
        fix = "pass the model, before torch.compile"
        raise ArgumentTypeError("model", type(model).__name__, "a torch.nn.Module", fix)


def check_signature(
    name: str, function: Callable[..., Any], rule: str, *args: Any, **kwargs: Any
) -> None:
    """Raise if a function does not accept the arguments with which it will be called."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function without a signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        got = f"{getattr(function, '__name__', type(function).__name__)}{signature}, with {error}"
        raise ArgumentTypeError(name, got, rule, "give it these parameters") from None


# -- values, lengths and offsets
# --------------------------------------------------------------------------------------


def read_values(data: Any, name: str) -> Tensor:
    """Return flat values ``(N, *features)``; a tensor or NumPy array is not copied."""
    fix = "pass a tensor or an array of numbers; Ragged(sequences) takes a list of them"
    try:
        if not isinstance(data, str | bytes):
            return check_tensor(name, as_tensor(data), 1)
    except _NO_ARRAY as error:
        if isinstance(error, RaglaneError):
            raise
    raise ArgumentTypeError(
        name, f"a {type(data).__name__} that is not an array of numbers", "numbers", fix
    )


def _given_integers(data: Any, name: str) -> Tensor:
    """Return one-dimensional integers in their own dtype, without a copy."""
    try:
        # Python numbers stay on the host for any default device of torch.
        tensor = as_tensor(data, "cpu")
    except _NO_ARRAY as error:
        got = f"a {type(data).__name__} that is not an array of numbers"
        fix = "pass a list of them, or wrap sequences"
        raise ArgumentTypeError(name, got, "integers", f"{fix} with rl.Ragged") from error
    check_tensor(name, tensor)
    if tensor.dim() != 1:
        raise ShapeError(
            name, f"shape {tuple(tensor.shape)}", "one-dimensional", "pass them in a flat list"
        )
    if tensor.shape[0] == 0:  # an empty list has no integer dtype
        return tensor.new_empty(0, dtype=torch.int64)
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise ArgumentTypeError(
            name, f"{tensor.dtype}", "integers", "convert with .to(torch.int64)"
        )
    check_storage(name, tensor)
    # NumPy sums uint64 to floats.
    return (
        tensor.detach()
        .resolve_neg()
        .to(torch.int64 if tensor.dtype is torch.uint64 else tensor.dtype)
    )


@index_arithmetic
def read_integers(data: Any, name: str) -> Tensor:
    """Return lengths or offsets ``(M,)`` as int64 on their device, without checking numbers."""
    return _given_integers(data, name).to(torch.int64)


@index_arithmetic
def given_lengths(data: Any) -> Tensor:
    """Return lengths ``(B,)`` on the CPU in their dtype (uint64 as int64), without checking
    numbers.
    """
    value = _given_integers(data, "lengths")
    if value.is_meta:
        raise ArgumentTypeError(
            "lengths", "a tensor without data, on meta", "integers", "pass a tensor with data"
        )
    return value.cpu()


@index_arithmetic
def read_lengths(data: Any) -> Tensor:
    """Return lengths ``(B,)`` int64 on the CPU, each at least 0. Waits for lengths on a device."""
    lengths = given_lengths(data).to(torch.int64)
    check_lengths(lengths)
    return lengths


@index_arithmetic
def check_lengths(lengths: Tensor) -> None:
    """Raise if a length ``(B,)`` on the CPU is negative, or their sum does not fit 64 bits."""
    # A sum in float64 does not wrap around.
    if float(lengths.sum(dtype=torch.float64)) >= _MOST:
        rule = "lengths whose sum fits 64 bits"
        raise ArgumentError("lengths", "a sum beyond 64-bit integers", rule, "check the data")
    below = lengths < 0
    if bool(below.any()):
        index = int(below.nonzero()[0, 0])
        got = f"{int(lengths[index])} at index {index}"
        fix = "check the data; an empty sequence has length 0"
        raise ArgumentError("lengths", got, "at least 0", fix)


@index_arithmetic
def check_offsets(offsets: Tensor, total: int, name: str) -> None:
    """Raise if int64 offsets on the CPU, or the lengths they came from, do not describe ``total``
    elements.
    """
    # NumPy's operations have a third of torch's overhead.
    value = offsets.resolve_neg().numpy()
    # Offsets that wrap around fall somewhere.
    if len(value) and value[0] == 0 and value[-1] == total and not (value[1:] < value[:-1]).any():
        return
    fix = "pass lengths or offsets of these values"
    lengths = offsets.diff()
    outside = (lengths < 0) | (lengths > total)
    if bool(outside.any()):
        index = int(outside.nonzero()[0, 0])
        rule = f"from 0 to {total}, the number of elements of values"
        raise ShapeError(name, f"length {int(lengths[index])} at index {index}", rule, fix)
    last = int(offsets[-1]) if offsets.shape[0] else "nothing"
    got = (
        f"a sum of {last}" if name == "lengths" else f"{offsets[:4].tolist()}..., ending in {last}"
    )
    rule = "lengths that add up to" if name == "lengths" else "offsets that start with 0 and end in"
    raise ShapeError(name, got, f"{rule} the {total} elements of values", fix)


def check_unchanged(offsets: Any, total: int, device: torch.device) -> None:
    """Check the offsets of a batch of ``total`` elements, which a caller can change in place;
    numbers only on a CPU.
    """
    if not isinstance(offsets, Tensor):
        raise ArgumentTypeError(
            "offsets", f"a {type(offsets).__name__}", "a tensor (B + 1,)", "pass one"
        )
    check_offsets_tensor(offsets, device)
    if offsets.is_cpu and not records_operators():
        _check_numbers(offsets, total)


def check_offsets_tensor(offsets: Tensor, device: torch.device) -> None:
    """Check everything about the offsets of a batch but their numbers."""
    check_dense("offsets", offsets)
    if (
        offsets.dim() != 1
        or not offsets.shape[0]
        or offsets.dtype is not torch.int64
        or offsets.device != device
    ):
        got = f"shape {tuple(offsets.shape)}, {offsets.dtype}, on {offsets.device}"
        rule = f"(B + 1,), torch.int64, on {device}, the device of the values"
        raise ShapeError("offsets", got, rule, "build a new batch")
    check_storage("offsets", offsets)


def check_host_offsets(offsets: Tensor, total: int) -> None:
    """:func:`check_unchanged` for offsets on a CPU whose operators run at once, in less time."""
    is_whole = offsets.dim() == 1 and offsets.dtype is torch.int64 and offsets.shape[0] > 0
    if is_whole and is_stored(offsets):
        _compare(offsets, total)
    else:
        check_unchanged(offsets, total, offsets.device)


def _compare(offsets: Tensor, total: int) -> None:
    if (
        type(offsets) is not Tensor
    ):  # a wrapper of another tensor, which has neither a list nor an array
        offsets = torch.tensor([int(offset) for offset in offsets])
    # Python compares few numbers, and NumPy many, in less time than torch.
    value: Any = offsets.tolist() if offsets.shape[0] < _FEW else offsets.resolve_neg().numpy()
    falls = value != sorted(value) if isinstance(value, list) else (value[1:] < value[:-1]).any()
    if value[0] == 0 and value[-1] == total and not falls:
        return
    if value[0] != 0:
        index = 0
    elif falls:
        index = 1 + int((offsets[1:] < offsets[:-1]).nonzero()[0])
    else:
        index = -1
    rule = {0: "0", -1: f"the number of elements, {total}"}.get(
        index, "at least the offset before it"
    )
    got = f"{value[index]}"
    fix = "build a new batch, because its offsets were changed"
    raise ArgumentError(
        f"offsets[{index}]", got + (f" after {value[index - 1]}" if index > 0 else ""), rule, fix
    )


_check_numbers = index_arithmetic(_compare)


@index_arithmetic
def read_index(index: Any, count: int) -> Tensor:
    """Return the non-negative positions ``(M,)`` of the sequences that an index or mask chooses, on
    the CPU.
    """
    rule = "integers or bools"
    fix = "pass a list of integers, or a tensor: index.long(), or a mask"
    try:
        # Python numbers stay on the host for any default device of torch.
        read = as_tensor(index, "cpu")
    except _NO_ARRAY as error:
        raise ArgumentTypeError("index", quote(index), rule, fix) from error
    check_tensor("index", read)
    if read.dim() == 1 and read.shape[0] == 0:  # an empty list has no integer dtype
        read = read.new_empty(0, dtype=torch.int64)
    if read.is_floating_point() or read.is_complex() or read.is_meta:
        raise ArgumentTypeError("index", f"{read.dtype} on {read.device}", rule, fix)
    is_mask = read.dtype is torch.bool
    if read.dim() != 1 or (is_mask and read.shape[0] != count):
        got = f"shape {tuple(read.shape)}, {read.dtype}"
        what = f"one-dimensional, and a mask must have one entry for each of the {count} sequences"
        raise ShapeError("index", got, what, "pass the positions of the sequences, or a mask (B,)")
    on_host = read.cpu()
    if is_mask:
        return on_host.nonzero().view(-1)
    # In a narrow dtype, the limits would wrap around. As int64, the largest numbers of uint64 are
    # negative.
    chosen = on_host.long()
    outside = (
        (chosen < (0 if on_host.dtype is torch.uint64 else -count)) | (chosen >= count)
    ).numpy()
    if outside.any():
        what = f"from {-count} to {count - 1}, for {count} sequences"
        raise DimensionError(
            "index",
            f"{on_host.numpy()[outside][0]}",
            what,
            "pass indices of sequences of the batch",
        )
    return torch.where(chosen < 0, chosen + count, chosen)
