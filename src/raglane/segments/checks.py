"""What callers give as values, offsets and lengths, checked: kinds, dtypes and shapes everywhere, numbers on a CPU.

The numbers on a device are taken on trust, since looking at them would wait for it; and while torch.compile
traces, nothing is looked at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from raglane._utils.checks import check_tensor, check_value, check_whole
from raglane._utils.tracing import index_arithmetic
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError, message

__all__ = ["check_lengths", "check_offsets", "checked"]

# More elements than any memory holds.
_MOST = 2**62

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@index_arithmetic
def check_lengths(lengths: Tensor, name: str = "lengths") -> None:
    """Refuse lengths on a CPU of which one is below 0, or whose sum is too large to count."""
    # In float64, which a wrong length does not make wrap around.
    if float(lengths.sum(dtype=torch.float64)) >= _MOST:
        rule = "the elements can be counted"
        raise ArgumentError(message(name, "a sum beyond 64-bit integers", rule, "check the data"))
    below = lengths < 0
    if bool(below.any()):
        place = int(below.nonzero()[0, 0])
        fix = "check the data; an empty sequence has length 0"
        raise ArgumentError(message(name, f"{int(lengths[place])} at index {place}", "a length is at least 0", fix))


@index_arithmetic
def check_offsets(offsets: Tensor, total: int, name: str) -> None:
    """Refuse offsets on a CPU, or the lengths that they came from, that do not describe ``total`` elements."""
    # In NumPy, whose operations cost a third of torch's to start.
    given = offsets.resolve_neg().numpy()
    # A sum that wraps around falls somewhere.
    if len(given) and given[0] == 0 and given[-1] == total and not (given[1:] < given[:-1]).any():
        return
    lengths = offsets.diff()
    outside = (lengths < 0) | (lengths > total)
    if bool(outside.any()):
        index = int(outside.nonzero()[0, 0])
        raise ShapeError(
            message(
                name,
                f"length {int(lengths[index])} at index {index}",
                f"each length is from 0 to the {total} elements of values",
                "check that both belong together",
            )
        )
    last = int(offsets[-1]) if offsets.shape[0] else "nothing"
    got = f"a sum of {last}" if name == "lengths" else f"{offsets[:4].tolist()}..., ending in {last}"
    rule = "they add up to" if name == "lengths" else "they start with 0 and end in"
    raise ShapeError(message(name, got, f"{rule} the {total} elements of values", "check that both belong together"))


def checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function of :mod:`raglane.segments` that checks its arguments first, by their names."""
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}

    @functools.wraps(function)
    def face(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            given = dict(zip(names, args, strict=False)) | kwargs
            if needed <= given.keys():  # else Python's own error says what is missing
                _check(function.__name__, given)
        return function(*args, **kwargs)

    return face


def _check(function: str, given: Mapping[str, Any]) -> None:
    """Check the arguments of a function."""
    beside: Tensor | None = None
    total: int | None = check_whole("total", given["total"], 0) if "total" in given else None
    if "values" in given:
        beside = _check_values(function, check_tensor("values", given["values"], 1))
        total = beside.shape[0]
    if "per_sequence" in given:
        beside = check_tensor("per_sequence", given["per_sequence"], 1)
    for name in ("starts", "lengths"):
        if name in given:
            beside = _check_integers(name, given[name], beside, any_dtype=function == "offsets_from_lengths")
    if "offsets" in given:
        _check_batch(given, beside, total or 0)
    if "lengths" in given:
        _check_slices(given["lengths"], given.get("starts"), total)
    if "steps" in given:
        check_whole("steps", given["steps"])
    for name in ("empty", "fill"):
        if name in given and beside is not None:
            check_value(name, given[name], beside.dtype)


def _check_values(function: str, values: Tensor) -> Tensor:
    """Refuse a dtype in which a function means nothing."""
    real = values.is_floating_point()
    if function in ("mean", "softmax", "logsumexp") and not (real or (function == "mean" and values.is_complex())):
        rule = f"{function} is of a floating-point dtype"
        raise ArgumentTypeError(message("values", f"{values.dtype}", rule, "call .to(torch.float32) first"))
    if function in ("max", "min") and values.is_complex():
        rule = f"{function} compares real numbers"
        raise ArgumentTypeError(message("values", f"{values.dtype}", rule, "call .abs() or .real first"))
    return values


def _check_integers(name: str, given: Any, beside: Tensor | None, any_dtype: bool) -> Tensor:
    """One dimension of integers, on the device of the tensor beside it."""
    integers = check_tensor(name, given)
    if integers.is_floating_point() or integers.is_complex() or integers.dtype is torch.bool:
        raise ArgumentTypeError(message(name, f"{integers.dtype}", "integers", "convert with .to(torch.int64)"))
    if not any_dtype and integers.dtype is not torch.int64:
        raise ArgumentTypeError(message(name, f"{integers.dtype}", "int64", "convert with .to(torch.int64)"))
    if integers.dim() != 1:
        shape = f"shape {tuple(integers.shape)}"
        raise ShapeError(message(name, shape, "one dimension", "pass one number per sequence"))
    if beside is not None and integers.device != beside.device:
        got = f"a tensor on {integers.device}"
        raise ShapeError(message(name, got, f"one device for all, {beside.device}", "move it with .to()"))
    return integers


def _check_batch(given: Mapping[str, Any], beside: Tensor | None, total: int) -> None:
    """Check offsets against the values, and ``per_sequence`` against the offsets."""
    offsets = _check_integers("offsets", given["offsets"], beside, any_dtype=False)
    if offsets.shape[0] == 0:
        raise ShapeError(message("offsets", "none", "(B + 1,), the first of them 0", "pass at least [0]"))
    if "per_sequence" in given and given["per_sequence"].shape[0] != offsets.shape[0] - 1:
        got, count = f"{given['per_sequence'].shape[0]} rows", offsets.shape[0] - 1
        raise ShapeError(message("per_sequence", got, f"one per sequence: {count}", "pass a tensor (B, *features)"))
    if offsets.is_cpu:
        check_offsets(offsets, total, "offsets")
    if "longest" in given:
        _check_longest(offsets, check_whole("longest", given["longest"], 0))


@index_arithmetic
def _check_longest(offsets: Tensor, longest: int) -> None:
    if offsets.is_cpu and offsets.shape[0] > 1 and longest < (most := int(offsets.diff().max())):
        rule = f"at least the longest length, {most}"
        raise ArgumentError(message("longest", f"{longest}", rule, "pass int(offsets.diff().max())"))


@index_arithmetic
def _check_slices(lengths: Tensor, starts: Tensor | None, total: int | None) -> None:
    """Check lengths, and with them where slices start."""
    if starts is not None and starts.shape != lengths.shape:
        got = f"{starts.shape[0]} of them"
        raise ShapeError(message("starts", got, f"one per length: {lengths.shape[0]}", "pass as many of both"))
    if not lengths.is_cpu:
        return
    check_lengths(lengths)
    if total is not None and int(lengths.sum()) != total:
        raise ShapeError(message("total", f"{total}", f"the sum of lengths, {int(lengths.sum())}", "pass that"))
    if starts is not None and bool((starts < 0).any()):
        got = f"{int(starts.min())} among them"
        raise ArgumentError(message("starts", got, "at least 0", "pass entries of offsets"))
