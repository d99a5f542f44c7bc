"""Memory that C may read: tensors whose numbers stand side by side on the host, and their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raglane.errors import ShapeError, message

__all__ = ["NO_MEMORY", "address", "addresses", "lies_nowhere", "lies_well", "plain"]

NO_MEMORY = (RuntimeError, AttributeError, ValueError, IndexError, TypeError, KeyError)
"""What is raised where a quick look meets no tensor, or one without memory."""


def lies_well(part: Any, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> bool:
    """Whether C can read a tensor as it is: side by side in the host's memory, and all of it there.

    Example:
        >>> part = torch.zeros(3, 2)
        >>> lies_well(part, (3, 2), torch.float32, 4), lies_well(part.t(), (2, 3), torch.float32, 4)
        (True, False)
    """
    try:
        return (
            part.shape == shape
            and part.dtype is dtype
            and part.is_cpu
            and part.is_contiguous()
            and not part.is_neg()
            and not lies_nowhere(part)
            and part.untyped_storage().nbytes() >= part.nbytes + part.storage_offset() * size
        )
    except NO_MEMORY:
        return False


def lies_nowhere(part: Tensor) -> bool:
    """Whether a tensor has numbers and no memory: a wrapper of other tensors, say, or zeros that nobody has written.

    To C its address is that of a tensor which is missing.

    Example:
        >>> lies_nowhere(torch.zeros(2)), lies_nowhere(torch.zeros(0)), lies_nowhere(torch._efficientzerotensor((2,)))
        (False, False, True)
    """
    return not part.data_ptr() and part.numel() > 0


def plain(name: str, part: Tensor) -> Tensor:
    """A tensor whose numbers stand in memory as they are, side by side."""
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
    """Where a tensor that was checked lies, and the null pointer where there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor | None], count: int) -> list[int]:
    """Where tensors lie, and null pointers where there are none, and for those that are missing of ``count``."""
    found = [0 if part is None else part.data_ptr() for part in tensors]
    return found + [0] * (count - len(found))
