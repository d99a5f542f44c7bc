"""Tensors whose numbers C can read in memory, and their addresses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_dense, check_like, check_storage
from raglane.errors import ArgumentTypeError, ShapeError

NO_MEMORY = (RuntimeError, AttributeError, ValueError, IndexError, TypeError, KeyError)
"""The errors raised by the fast checks for an object that is not a tensor, or a tensor without
storage."""


def address(
    tensor: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, torch.UntypedStorage] | None:
    """Return the address and storage of a contiguous tensor on the CPU; None if C cannot read it.

    The address is inside the returned storage, even if another thread replaces the storage of the
    tensor meanwhile.
    """
    try:
        is_right = tensor.shape == shape and tensor.dtype is dtype and tensor.is_cpu
        if not is_right or not tensor.is_contiguous() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        begin = tensor.storage_offset()
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


def has_no_storage(tensor: Tensor) -> bool:
    """Return True if a tensor has elements but no storage, such as zeros never written."""
    return not tensor.data_ptr() and tensor.numel() > 0


def contiguous(name: str, tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with storage, the same one if possible."""
    # Wrappers of torch.func can outlive the transformation.
    alive: Tensor = torch._C._functorch.unwrap_if_dead(tensor)
    try:
        copy = alive.resolve_neg().contiguous()
        copy = copy.clone() if has_no_storage(copy) else copy
        if not has_no_storage(copy):
            return copy
    except NO_MEMORY:
        pass  # the error is raised below
    rule = "a tensor with storage, which C can read"
    fix = "pass a plain tensor, or choose backend='reference'"
    raise ShapeError(name, f"a {type(tensor).__name__} without storage", rule, fix)


def readable(
    *arguments: tuple[str, Tensor, tuple[int, ...], torch.dtype],
) -> tuple[list[int], list[Any]]:
    """Return the addresses of tensors that C can read, and their owners.

    An argument is a name, a tensor, its shape and its dtype.
    """
    addresses = []
    owners = []
    for name, tensor, shape, dtype in arguments:
        memory = address(tensor, shape, dtype)
        if memory is None:
            check_like(name, tensor, shape, torch.empty(0, dtype=dtype, device="cpu"))
            tensor = contiguous(name, tensor)
            memory = address(tensor, shape, dtype)
            if memory is None:
                rule = "unchanged during a call"
                fix = "do not change it in another thread"
                raise ShapeError(name, "a tensor that changed", rule, fix)
        begin, storage = memory
        addresses.append(begin)
        owners.append((tensor, storage))
    return addresses, owners


def pointer(tensor: Tensor | None) -> int:
    """Return the address of a validated tensor, and a null pointer for None."""
    return 0 if tensor is None else tensor.data_ptr()


def checked_rows(
    name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    """Return a tensor that C can read: a vector, contiguous rows, or any three dimensions."""
    try:
        if (
            tensor.shape == shape
            and tensor.dtype in dtypes
            and tensor.is_cpu
            and not tensor.is_neg()
            and _has_rows(tensor)
        ):
            return tensor
    except NO_MEMORY:
        pass  # the error is raised below
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            name, f"a {type(tensor).__name__}", f"a tensor {shape}", "pass a tensor"
        )
    check_dense(name, tensor)
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_cpu:
        got = f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
        rule = f"{shape}, {' or '.join(map(str, dtypes))}, on cpu"
        raise ShapeError(name, got, rule, "pass the tensors for which the program was made")
    check_storage(name, tensor)
    return contiguous(name, tensor).clone(memory_format=torch.contiguous_format)


def _has_rows(tensor: Tensor) -> bool:
    """Return True if a tensor is within its storage, and its rows are contiguous."""
    strides = tensor.stride()
    sizes = tensor.shape
    if len(sizes) < 3 and sizes[-1] > 1 and strides[-1] != 1:
        return False
    if tensor.numel() == 0:
        return True
    if has_no_storage(tensor):
        return False
    last = sum([(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)])
    return (
        tensor.untyped_storage().nbytes()
        >= (tensor.storage_offset() + last + 1) * tensor.element_size()
    )
