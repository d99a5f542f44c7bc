"""Numbers that callers give, as tensors: values, lengths and offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.arrays import as_tensor
from raglane._utils.checks import check_tensor
from raglane._utils.tracing import index_arithmetic
from raglane.errors import ArgumentTypeError, RaglaneError, ShapeError, message
from raglane.segments.checks import check_lengths

__all__ = ["given_lengths", "read_integers", "read_lengths", "read_values"]


def read_values(data: Any, name: str) -> Tensor:
    """What a caller gives as flat values; a tensor or NumPy array is not copied."""
    fix = "pass a tensor or an array of numbers; Ragged(sequences) takes a list of them"
    try:
        if not isinstance(data, str | bytes):
            return check_tensor(name, as_tensor(data), 1)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, RaglaneError):
            raise
    raise ArgumentTypeError(message(name, f"a {type(data).__name__} that is not an array of numbers", "numbers", fix))


@index_arithmetic
def read_integers(data: Any, name: str) -> Tensor:
    """What a caller gives as lengths or offsets, as integers in one dimension; on the device where they are."""
    return _given_integers(data, name).to(torch.int64)


def _given_integers(data: Any, name: str) -> Tensor:
    """Integers in one dimension, in the dtype in which they are given, so that they need not be copied."""
    try:
        # Numbers that the caller wrote down stay on the host, whatever torch's default device is.
        tensor = as_tensor(data, "cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(
            message(
                name,
                f"a {type(data).__name__} that is not an array of numbers",
                "integers",
                "pass a list of them, or wrap sequences with rl.Ragged",
            )
        ) from error
    check_tensor(name, tensor)
    if tensor.dim() != 1:
        raise ShapeError(
            message(name, f"shape {tuple(tensor.shape)}", "integers in one dimension", "pass them in a flat list")
        )
    if tensor.shape[0] == 0:  # an empty list has no dtype of its own
        return tensor.new_empty(0, dtype=torch.int64)
    if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise ArgumentTypeError(message(name, f"{tensor.dtype}", "integers", "convert with .to(torch.int64)"))
    # NumPy adds 64 bits up without a sign to floats.
    return tensor.detach().resolve_neg().to(torch.int64 if tensor.dtype is torch.uint64 else tensor.dtype)


@index_arithmetic
def given_lengths(data: Any) -> Tensor:
    """Lengths as a caller gives them, on the CPU, in the dtype and memory that they have; no number is looked at."""
    given = _given_integers(data, "lengths")
    if given.is_meta:
        raise ArgumentTypeError(message("lengths", "a tensor without data, on meta", "integers", "pass real ones"))
    return given.cpu()


@index_arithmetic
def read_lengths(data: Any) -> Tensor:
    """What a caller gives as lengths, on the CPU, each at least 0; lengths on a device are waited for."""
    lengths = given_lengths(data).to(torch.int64)
    check_lengths(lengths)
    return lengths
