"""Tensors next to unreadable pages: an access beyond the tensor ends the process with a signal."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from raglane.native import library as library_module
from raglane.native.library import Library

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[tuple[mmap.mmap, Any]] = []


def guarded(tensor: Tensor, *, before: bool = False) -> Tensor:
    """Copy a dense CPU tensor to the end of a page before an unreadable one, or to the start of a
    page after one.

    The memory is kept until :func:`release`, so that a pointer that outlives the tensor is still
    valid.
    """
    if tensor.numel() == 0:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    bytes_ = tensor.numel() * tensor.element_size()
    pages = -(-bytes_ // _PAGE)
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + (pages + 1) * _PAGE):
        if _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    first = start + _PAGE if before else start + (pages + 1) * _PAGE - bytes_
    numbers = (ctypes.c_char * bytes_).from_address(first)
    _kept.append((memory, numbers))
    copy = torch.frombuffer(numbers, dtype=tensor.dtype).view(tensor.shape)
    copy.copy_(tensor.detach())
    return copy.requires_grad_(tensor.requires_grad)


def release() -> None:
    """Free all guarded memory; no tensor in it may be used any more."""
    _kept.clear()


@contextmanager
def guarded_allocations(*, before: bool = False) -> Iterator[list[Tensor]]:
    """Within the block, tensors that the library allocates are guarded too, and full of NaN; yield
    them.

    Torch's functions are replaced, because no mode of torch is active during a backward pass.
    """
    made: list[Tensor] = []

    def guards(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if (
                not tensor.is_cpu
                or tensor.requires_grad
                or type(tensor) is not Tensor
                or not tensor.numel()
            ):
                return tensor
            made.append(guarded(tensor, before=before))
            made[-1].view(-1).view(torch.uint8).fill_(255)
            return made[-1]

        return allocated

    owners: list[Any] = [Tensor, torch, torch]
    names = ["new_empty", "empty_like", "empty"]
    originals = [getattr(owner, name) for owner, name in zip(owners, names, strict=True)]
    for owner, name, original in zip(owners, names, originals, strict=True):
        setattr(owner, name, guards(original))
    try:
        yield made
    finally:
        for owner, name, original in zip(owners, names, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def chosen_library(library: Library) -> Iterator[None]:
    """Within the block, the cpu kernels use the instruction set and the division of the work of
    ``library``.
    """
    original = library_module.library
    library_module.library = lambda: library  # type: ignore[assignment]
    try:
        yield
    finally:
        library_module.library = original
