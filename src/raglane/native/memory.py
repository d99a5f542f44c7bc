"""Memory that C may read, and memory for large tensors that only the kernels see, which stays for the next call.

What a training step saves for its backward pass is about as large in the next step. An allocator hands large blocks
back to the system at once, and the pages of new ones take time, so the kernels keep theirs (``csrc/runtime/blocks.h``).

NOTE (whose memory it is): a tensor's storage holds the array over its block, whoever holds the storage: autograd,
another tensor, a hook. The block is given back when the array has gone, and no sooner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_dense, check_storage
from raglane.errors import ArgumentTypeError, ShapeError, message
from raglane.native import library

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
    rule, fix = "numbers in memory, which the cpu kernels read", "pass a plain tensor, or choose backend='reference'"
    raise ShapeError(message(name, f"a {type(part).__name__} without memory of its own", rule, fix))


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
        raise ArgumentTypeError(message(name, f"a {type(part).__name__}", f"a tensor {shape}", "pass one"))
    check_dense(name, part)
    if tuple(part.shape) != shape or part.dtype not in dtypes or not part.is_cpu:
        got = f"shape {tuple(part.shape)}, {part.dtype}, on {part.device}"
        rule = f"{shape}, {' or '.join(map(str, dtypes))}, on cpu"
        raise ShapeError(message(name, got, rule, "pass what the program was made for"))
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


# ---- large tensors ------------------------------------------------------------------------------------------------

_uses_torch = False


def empty(like: Tensor, *shape: int) -> Tensor:
    """A tensor of any content, as ``like.new_empty(*shape)`` gives it, which only the kernels and autograd may hold."""
    count = math.prod(shape)
    bytes_wanted, kernels = count * like.element_size(), library.library()
    if bytes_wanted < kernels.least_block or _uses_torch:
        return like.new_empty(*shape)
    memory = kernels.block(bytes_wanted)
    if memory is None:
        return like.new_empty(*shape)  # or torch's words for a lack of memory
    return torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)


@contextmanager
def from_torch() -> Iterator[None]:
    """Take all memory from torch meanwhile, whose profiler counts it."""
    global _uses_torch
    before, _uses_torch = _uses_torch, True
    try:
        yield
    finally:
        _uses_torch = before
