"""Checks of arguments that many functions take: each gives the argument as it is, or an error that teaches."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from raglane.errors import ArgumentError, ArgumentTypeError, message, quote

__all__ = [
    "check_clip",
    "check_count",
    "check_dropout",
    "check_dtype",
    "check_every",
    "check_model",
    "check_number",
    "check_signature",
]


def check_number(name: str, value: Any, rule: str, holds: Callable[[float], bool]) -> Any:
    """A number as it is."""
    # NumPy's numbers are such numbers too, which is what sizes and shares often come from.
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _holds(holds, value):
        raise ArgumentError(message(name, quote(value), rule, "pass such a number"))
    return value


def _holds(rule: Callable[[float], bool], value: Any) -> bool:
    """Whether a rule holds for a number, which must not be too large for a float."""
    try:
        return rule(float(value))
    except OverflowError:
        return False


def check_clip(clip: float | None) -> float | None:
    """A cell's ``clip`` as it is."""
    if clip is not None:
        check_number("clip", clip, "a finite number above 0", lambda number: 0 < number < math.inf)
    return clip


def check_count(name: str, value: Any) -> int:
    """A size as it is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ArgumentError(message(name, quote(value), "a whole number of at least 1", "pass 1 or more"))
    if int(value) >= 2**31:
        raise ArgumentError(message(name, quote(value), "at most 2**31 - 1", "pass a smaller one"))
    return int(value)


def check_every(steps: Any) -> int | None:
    """A layer's ``checkpoint_every`` as it is."""
    return None if steps is None else check_count("checkpoint_every", steps)


def check_dropout(dropout: Any) -> float:
    """A dropout between layers as it is."""
    return float(check_number("dropout", dropout, "a probability from 0 to 1", lambda share: 0 <= share <= 1))


def check_dtype(dtype: Any) -> None:
    """Refuse a dtype that parameters cannot have."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        rule = "a floating-point dtype, or None for torch's default"
        raise ArgumentError(message("dtype", quote(dtype), rule, "pass torch.float32, say"))


def check_model(model: Any) -> None:
    """Refuse what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            message("model", type(model).__name__, "a torch.nn.Module", "pass the model, before torch.compile")
        )


def check_signature(name: str, function: Callable[..., Any], rule: str, *args: Any, **kwargs: Any) -> None:
    """Refuse a function of the caller's that does not take what it will be called with."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a function that does not say what it takes
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        got = f"{getattr(function, '__name__', type(function).__name__)}{signature}, with {error}"
        raise ArgumentTypeError(message(name, got, rule, "let it take these arguments")) from None
