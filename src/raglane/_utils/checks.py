"""What callers give, checked one by one: each function gives the argument as it is, or an error that teaches.

Nothing here waits for a device: numbers that are on one are taken on trust.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Complex, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.arrays import as_tensor
from raglane._utils.tracing import records_operators
from raglane.errors import (
    ArgumentError,
    ArgumentTypeError,
    DimensionError,
    RaglaneError,
    ShapeError,
    message,
    quote,
)

__all__ = [
    "check_choice",
    "check_dense",
    "check_fits",
    "check_flag",
    "check_kind",
    "check_like",
    "check_real",
    "check_storage",
    "check_tensor",
    "check_value",
    "check_whole",
    "read_index",
]

# More elements than any memory holds, and few enough that sums of them are exact.
_MOST = 2**62

_CAST_BY_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(name: str, given: Any, least: int = 0, fix: str = "pass a torch.Tensor") -> Tensor:
    """A dense tensor as it is."""
    if not isinstance(given, Tensor):
        raise ArgumentTypeError(message(name, f"a {type(given).__name__}", "a tensor", fix))
    if given.is_nested or given.layout is not torch.strided or given.is_quantized:
        kind = "nested" if given.is_nested else "quantized" if given.is_quantized else f"{given.layout}"
        raise ArgumentTypeError(message(name, f"a tensor that is {kind}", "a dense tensor", "convert it first"))
    if given.dim() < least:
        what = f"at least {least} dimension" + "s" * (least > 1)
        raise ShapeError(message(name, f"shape {tuple(given.shape)}", what, "the first dimension counts elements"))
    return given


def check_dense(name: str, given: Tensor) -> None:
    """Refuse a sparse tensor."""
    if given.layout is not torch.strided:
        raise ShapeError(message(name, f"a tensor of layout {given.layout}", "dense tensors", "call .to_dense() on it"))


def check_fits(name: str, given: Tensor, other: Tensor) -> None:
    """Refuse a tensor of another dtype, device or layout than what it meets.

    Autocast converts float32, bfloat16 and float16 into each other by itself, and nothing else.
    """
    check_dense(name, given)
    if given.device != other.device:
        raise ShapeError(
            message(name, f"a tensor on {given.device}", f"one device for all, {other.device}", "move it with .to()")
        )
    if given.dtype == other.dtype:
        return
    casts = given.dtype in _CAST_BY_AUTOCAST and other.dtype in _CAST_BY_AUTOCAST
    if not (casts and torch.is_autocast_enabled(given.device.type)):
        rule, fix = f"one dtype for weights, input and state, {other.dtype}", f"convert it with .to({other.dtype})"
        if given.is_floating_point():
            fix = f"{fix}, or the layer with .to({given.dtype})"
        raise ShapeError(message(name, str(given.dtype), rule, fix))


def check_like(name: str, given: Any, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse what a kernel cannot compute with."""
    if not isinstance(given, Tensor):
        raise ArgumentTypeError(message(name, f"a {type(given).__name__}", f"a tensor {shape}", "set it to one"))
    check_dense(name, given)
    if tuple(given.shape) != shape:
        raise ShapeError(
            message(
                name,
                f"shape {tuple(given.shape)}",
                f"{shape}, from the layer's cell and its sizes as they are now",
                "give it a tensor of that shape, or build a layer of the sizes that you need",
            )
        )
    check_fits(name, given, like)
    check_storage(name, given)


def check_storage(name: str, given: Tensor) -> None:
    """Refuse a tensor whose storage was made smaller than what the tensor shows of it."""
    if records_operators() or given.numel() == 0:
        return
    try:
        there = given.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return  # a tensor that others compute with, and which has no memory of its own
    if given.is_contiguous() and there >= given.storage_offset() * given.element_size() + given.nbytes:
        return
    last = sum([(size - 1) * stride for size, stride in zip(given.shape, given.stride(), strict=True)])
    needed = (given.storage_offset() + last + 1) * given.element_size()
    if there < needed:
        raise ShapeError(
            message(
                name,
                f"a storage of {there} bytes",
                f"{needed} bytes, which its shape {tuple(given.shape)} needs",
                "do not shrink or free the storage of a tensor that is still used",
            )
        )


def check_kind(name: str, given: Any, kind: Any, rule: str, fix: str) -> None:
    """Refuse what is not an instance of a class."""
    if not isinstance(given, kind):
        raise ArgumentTypeError(message(name, quote(given), rule, fix))


def check_flag(name: str, given: Any, error: type[RaglaneError] = ArgumentTypeError) -> bool:
    """A yes or no as a bool."""
    if not isinstance(given, (bool, np.bool_)):
        raise error(message(name, quote(given), "True or False", "choose one of them"))
    return bool(given)


def check_choice(name: str, given: Any, choices: Sequence[str], fix: str = "pass one of these") -> str:
    """One of several names as it is."""
    if not isinstance(given, str) or given not in choices:
        raise ArgumentError(message(name, quote(given), f"one of {', '.join(choices)}", fix))
    return given


def check_real(name: str, given: Any, rule: str, holds: Callable[[float], bool], fix: str) -> float:
    """A real number as a float."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise ArgumentTypeError(message(name, quote(given), rule, fix))
    if not _fits(float, given) or not holds(float(given)):
        raise ArgumentError(message(name, quote(given), rule, fix))
    return float(given)


def check_whole(name: str, given: Any, least: int | None = None, fix: str = "check where it comes from") -> int:
    """A whole number as an int."""
    whole: int | None = None
    is_bool = isinstance(given, bool) or (isinstance(given, Tensor) and given.dtype is torch.bool)
    if not is_bool and not isinstance(given, np.ndarray):
        try:
            whole = operator.index(given)
        except (TypeError, RuntimeError):
            whole = None
    if whole is None:
        raise ArgumentTypeError(message(name, quote(given), "a whole number", "pass an int"))
    if (least is not None and whole < least) or not -_MOST < whole < _MOST:
        rule = "below 2**62" if least is None else f"at least {least}" + " and below 2**62" * (whole >= _MOST)
        raise ArgumentError(message(name, quote(given), rule, fix))
    return whole


def check_value(name: str, given: Any, dtype: torch.dtype) -> Any:
    """A number that a dtype can hold, as torch takes it; another would be cut off, wrapped around or refused."""
    if isinstance(given, Tensor) and given.numel() == 1 and given.is_cpu and not given.is_quantized:
        given = given.item()
    kind: Callable[[Any], Any] = complex if dtype.is_complex else float if dtype.is_floating_point else int
    fits, fix = isinstance(given, Complex) and _fits(kind, given), "pass a number"
    if fits and kind is int:
        fix = "pass an integer, or convert the batch"
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fits = given % 1 == 0 and low <= given <= high
    if not fits:
        raise ArgumentTypeError(message(name, quote(given), f"a value of {dtype}", fix))
    return bool(given) if dtype is torch.bool else kind(given)


def _fits(kind: Callable[[Any], Any], given: Any) -> bool:
    """Whether a number can be made one of a kind: it is not complex where that is not, and not too large."""
    try:
        kind(given)
    except (OverflowError, TypeError, ValueError):
        return False
    return True


def read_index(index: Any, count: int) -> Tensor:
    """Which of several sequences are chosen."""
    rule, fix = "integer or bool numbers", "pass a list of integers, or a tensor: index.long(), or a mask"
    try:
        # Numbers that the caller wrote down stay on the host, whatever torch's default device is.
        read = as_tensor(index, "cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(message("index", quote(index), rule, fix)) from error
    check_tensor("index", read)
    if read.dim() == 1 and read.shape[0] == 0:  # an empty list has no dtype of its own
        read = read.new_empty(0, dtype=torch.int64)
    if read.is_floating_point() or read.is_complex() or read.is_meta:
        raise ArgumentTypeError(message("index", f"{read.dtype} on {read.device}", rule, fix))
    is_mask = read.dtype is torch.bool
    if read.dim() != 1 or (is_mask and read.shape[0] != count):
        got = f"shape {tuple(read.shape)}, {read.dtype}"
        what = f"one dimension, and for a mask one entry for each of the {count} sequences"
        raise ShapeError(message("index", got, what, "pass the positions of the sequences, or a mask (B,)"))
    on_host = read.cpu()
    if is_mask:
        return on_host.nonzero().view(-1)
    # Before uint64, which torch cannot compare, becomes int64, in which its largest numbers count from the end.
    numbers: Any = on_host.numpy() if on_host.dtype is torch.uint64 else on_host
    outside = (numbers < -count) | (numbers >= count)
    if bool(outside.any()):
        what = f"from {-count} to {count - 1}, since there are {count} sequences"
        raise DimensionError(message("index", f"{int(numbers[outside][0])}", what, "choose among them"))
    chosen = on_host.long()
    return torch.where(chosen < 0, chosen + count, chosen)
