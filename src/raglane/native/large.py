"""Memory for large tensors that nobody but the kernels sees: it stays for the next call.

What a training step saves for its backward pass is about as large in the next step. An allocator hands large blocks
back to the system at once, and the pages of new ones take time, so the kernels keep theirs (``csrc/runtime/blocks.h``).

NOTE (whose memory it is): a tensor's storage holds the array over its block, whoever holds the storage: autograd,
another tensor, a hook. The block is given back when the array has gone, and no sooner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from raglane.native import library

_uses_torch = False


def empty(like: Tensor, *shape: int) -> Tensor:
    """A tensor of any content, as ``like.new_empty(*shape)`` gives it, which only the kernels and autograd may hold.

    Example:
        >>> empty(torch.zeros(1), 2, 3).shape, empty(torch.zeros(1), 2048, 1024).shape
        (torch.Size([2, 3]), torch.Size([2048, 1024]))
    """
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
