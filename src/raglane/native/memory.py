"""Memory that C may read: tensors whose numbers are side by side on the host, and their addresses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_dense, check_storage
from raglane._utils.messages import message
from raglane.errors import ArgumentTypeError, ShapeError

NO_MEMORY = (RuntimeError, AttributeError, ValueError, IndexError, TypeError, KeyError)
"""What is raised where a quick look meets no tensor, or one without memory."""


def place(part: Any, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, torch.UntypedStorage] | None:
    """The address and the memory of a tensor that C can read unchanged; None where it cannot.

    The address is one in the memory that is returned, whatever memory another thread gives the tensor meanwhile.
    """
    try:
        if (
            part.shape != shape
            or part.dtype is not dtype
            or not part.is_cpu
            or not part.is_contiguous()
            or part.is_neg()
        ):
            return None
        storage, begin, room = part.untyped_storage(), part.storage_offset(), math.prod(shape)
        if room == 0:
            return 0, storage
        # A wrapper of other tensors has numbers and no memory. To C its address is that of a tensor which is missing.
        if storage.nbytes() < (begin + room) * dtype.itemsize or not storage.data_ptr():
            return None
        return storage.data_ptr() + begin * dtype.itemsize, storage
    except NO_MEMORY:
        return None


def lies_well(part: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether C can read a tensor unchanged."""
    return place(part, shape, dtype) is not None


def lies_nowhere(part: Tensor) -> bool:
    """Whether a tensor has numbers and no memory, as zeros that nobody has written."""
    return not part.data_ptr() and part.numel() > 0


def plain(name: str, part: Tensor) -> Tensor:
    """A tensor whose numbers are side by side in memory; the same one where they are already."""
    # What torch.func has left behind is wrapped still.
    alive: Tensor = torch._C._functorch.unwrap_if_dead(part)
    try:
        found = alive.resolve_neg().contiguous()
        found = found.clone() if lies_nowhere(found) else found
        if not lies_nowhere(found):
            return found
    except NO_MEMORY:
        pass  # the words follow
    rule, fix = (
        "a tensor with memory of its own, which the cpu kernels read",
        "pass a plain tensor, or choose backend='reference'",
    )
    raise ShapeError(message(name, f"a {type(part).__name__} without memory", rule, fix))


def address(tensor: Tensor | None) -> int:
    """The address of a tensor that was checked, and the null pointer for None."""
    return 0 if tensor is None else tensor.data_ptr()


def checked_rows(name: str, part: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A tensor that C can read: a vector, rows of adjacent numbers, or three dimensions of any strides."""
    try:
        if part.shape == shape and part.dtype in dtypes and part.is_cpu and not part.is_neg() and _lies_in_memory(part):
            return part  # type: ignore[no-any-return]
    except NO_MEMORY:
        pass  # the words follow
    if not isinstance(part, Tensor):
        raise ArgumentTypeError(message(name, f"a {type(part).__name__}", f"a tensor {shape}", "pass a tensor"))
    check_dense(name, part)
    if tuple(part.shape) != shape or part.dtype not in dtypes or not part.is_cpu:
        got = f"shape {tuple(part.shape)}, {part.dtype}, on {part.device}"
        rule = f"{shape}, {' or '.join(map(str, dtypes))}, on cpu"
        raise ShapeError(message(name, got, rule, "pass a tensor of the shape and dtype of the program"))
    check_storage(name, part)
    return plain(name, part).clone(memory_format=torch.contiguous_format)


def _lies_in_memory(part: Tensor) -> bool:
    """Whether all of a tensor is in its storage, and the numbers of a row of it stand side by side."""
    strides, sizes = part.stride(), part.shape
    if len(sizes) < 3 and sizes[-1] > 1 and strides[-1] != 1:
        return False
    if part.numel() == 0:
        return True
    if lies_nowhere(part):
        return False
    last = sum([(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)])
    return part.untyped_storage().nbytes() >= (part.storage_offset() + last + 1) * part.element_size()
