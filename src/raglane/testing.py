"""Comparison of ragged batches in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from raglane.ragged import Ragged

__all__ = ["assert_close"]


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    check_dtype: bool = True,
    check_device: bool = True,
) -> None:
    """Raise unless two results are close, like :func:`torch.testing.assert_close`, which does not
    compare a Ragged.

    Args:
        actual: a Ragged, whatever ``torch.testing.assert_close`` accepts, or tuples, lists and
            mappings of them.
        expected: the same kind; a Ragged must have the same lengths.
        rtol: the relative tolerance; None for that of the dtype.
        atol: the absolute tolerance; None for that of the dtype.
        equal_nan: True if NaN equals NaN.
        check_dtype: True to require the same dtypes.
        check_device: True to require the same devices.

    Raises:
        AssertionError: they differ; the message names the sequence and the step.

    Example:
        >>> a = Ragged([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        >>> assert_close(a + 1e-9, a)
        >>> assert_close(a.shift(1), a)
        Traceback (most recent call last):
        AssertionError: sequence 0, step 0: Tensor-likes are not close!
        ...
    """
    options = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
    checks = {"check_dtype": check_dtype, "check_device": check_device}
    _compare(actual, expected, "", options | checks)


def _compare(actual: Any, expected: Any, place: str, options: dict[str, Any]) -> None:
    if isinstance(actual, Ragged) or isinstance(expected, Ragged):
        _compare_ragged(actual, expected, place, options)
        return
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        if actual.keys() != expected.keys():
            raise AssertionError(f"{place}keys {sorted(actual)}, expected {sorted(expected)}")
        for key in actual:
            _compare(actual[key], expected[key], f"{place}[{key!r}] ", options)
        return
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            raise AssertionError(f"{place}{len(actual)} items, expected {len(expected)}")
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            _compare(one, other, f"{place}[{index}] ", options)
        return
    torch.testing.assert_close(actual, expected, msg=_at(place), **options)


def _compare_ragged(actual: Any, expected: Any, place: str, options: dict[str, Any]) -> None:
    if type(actual) is not type(expected):
        kinds = f"a {type(actual).__name__}, expected a {type(expected).__name__}"
        raise AssertionError(f"{place}{kinds}")
    lengths = actual.lengths_cpu
    if not torch.equal(lengths, expected.lengths_cpu):
        text = f"lengths {lengths.tolist()}, expected {expected.lengths_cpu.tolist()}"
        raise AssertionError(f"{place}{text}")
    values = actual.values
    try:
        torch.testing.assert_close(values, expected.values, **options)
    except AssertionError as error:
        where = _first_difference(actual, expected, options)
        raise AssertionError(f"{place}{where}{error}") from None


def _first_difference(actual: Ragged, expected: Ragged, options: dict[str, Any]) -> str:
    """Return the first element that differs; nothing if it is e.g. the dtype."""
    for index, (rows, others) in enumerate(zip(actual, expected, strict=True)):
        for step, (row, other) in enumerate(zip(rows, others, strict=True)):
            try:
                torch.testing.assert_close(row, other, **options | {"check_dtype": False})
            except AssertionError:
                return f"sequence {index}, step {step}: "
    return ""


def _at(place: str) -> Callable[[str], str] | None:
    return (lambda text: f"{place}{text}") if place else None
