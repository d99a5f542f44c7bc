"""Tensors whose numbers C can read in memory, and their addresses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_dense, check_storage
from raglane.errors import ArgumentTypeError, ShapeError

NO_MEMORY = (RuntimeError, AttributeError, ValueError, IndexError, TypeError, KeyError)
"""The errors raised by the fast checks for an object that is not a tensor, or a tensor without
storage."""


def place(
    part: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, torch.UntypedStorage] | None:
    """Return the address and the storage of a contiguous tensor on the CPU; None if C cannot read
    it.

    The address is inside the returned storage, even if another thread replaces the storage of the
    tensor meanwhile.
    """
    try:
        is_right = part.shape == shape and part.dtype is dtype and part.is_cpu
        if not is_right or not part.is_contiguous() or part.is_neg():
            return None
        storage = part.untyped_storage()
        begin = part.storage_offset()
        count = math.prod(shape)
        if count == 0:
            return 0, storage
        # A tensor subclass that wraps other tensors has numbers but no storage. C reads its address
        # as a null pointer.
        if storage.nbytes() < (begin + count) * dtype.itemsize or not storage.data_ptr():
            return None
        return storage.data_ptr() + begin * dtype.itemsize, storage
    except NO_MEMORY:
        return None


def has_no_storage(part: Tensor) -> bool:
    """Return True if a tensor has elements but no storage, such as zeros that were never
    written.
    """
    return not part.data_ptr() and part.numel() > 0


def contiguous(name: str, part: Tensor) -> Tensor:
    """Return a contiguous tensor with storage, the same one if possible."""
    # Wrappers of torch.func can outlive the transformation.
    alive: Tensor = torch._C._functorch.unwrap_if_dead(part)
    try:
        copy = alive.resolve_neg().contiguous()
        copy = copy.clone() if has_no_storage(copy) else copy
        if not has_no_storage(copy):
            return copy
    except NO_MEMORY:
        pass  # the error is raised below
    rule = "a tensor with storage, which C can read"
    fix = "pass a plain tensor, or choose backend='reference'"
    raise ShapeError(name, f"a {type(part).__name__} without storage", rule, fix)


def address(tensor: Tensor | None) -> int:
    """Return the address of a validated tensor, and a null pointer for None."""
    return 0 if tensor is None else tensor.data_ptr()


def checked_rows(
    name: str, part: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    """Return a tensor that C can read: a vector, contiguous rows, or three dimensions of any
    strides.
    """
    try:
        if (
            part.shape == shape
            and part.dtype in dtypes
            and part.is_cpu
            and not part.is_neg()
            and _has_rows(part)
        ):
            return part
    except NO_MEMORY:
        pass  # the error is raised below
    if not isinstance(part, Tensor):
        raise ArgumentTypeError(
            name, f"a {type(part).__name__}", f"a tensor {shape}", "pass a tensor"
        )
    check_dense(name, part)
    if tuple(part.shape) != shape or part.dtype not in dtypes or not part.is_cpu:
        got = f"shape {tuple(part.shape)}, {part.dtype}, on {part.device}"
        rule = f"{shape}, {' or '.join(map(str, dtypes))}, on cpu"
        raise ShapeError(name, got, rule, "pass the tensors for which the program was made")
    check_storage(name, part)
    return contiguous(name, part).clone(memory_format=torch.contiguous_format)


def _has_rows(part: Tensor) -> bool:
    """Return True if a tensor is within its storage, and its rows are contiguous."""
    strides = part.stride()
    sizes = part.shape
    if len(sizes) < 3 and sizes[-1] > 1 and strides[-1] != 1:
        return False
    if part.numel() == 0:
        return True
    if has_no_storage(part):
        return False
    last = sum([(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)])
    return (
        part.untyped_storage().nbytes() >= (part.storage_offset() + last + 1) * part.element_size()
    )
