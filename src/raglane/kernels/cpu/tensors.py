"""Tensors of programs, held against what C will read: rows of any distance, weights of any strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_dense, check_storage
from raglane.errors import ArgumentTypeError, ShapeError, message
from raglane.native.memory import NO_MEMORY, lies_nowhere, plain


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
