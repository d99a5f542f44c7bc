"""The CPU kernels in ``csrc``: the ``lanes`` schedule at the speed of the machine. The only file with ctypes.

A layer is one call, whatever its directions. Tensors go down as pointers; what each must be stands in
``csrc/raglane.h``. The calls of the two kinds of layers are in :mod:`raglane.kernels.cpu.matrix` and
:mod:`raglane.kernels.cpu.elementwise`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from raglane.errors import ArgumentError, MissingExtraError, explain

__all__ = ["ABI", "Layer", "Library", "Saved", "address", "addresses", "call", "library", "preamble"]

ABI = 5
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_ISAS = {"amx": 4, "avx512bf16": 3, "avx512": 2, "avx2": 1, "portable": 0}
_FUNCTIONS = {"exp": 0, "tanh": 1, "sigmoid": 2}
_OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class Library:
    """The loaded kernels.

    Attributes:
        handle: of the shared library.
        isas: the instruction sets that this build and this processor have, best first.
        isa: the one in use.
        flags: how the work is divided, ``raglane_flags`` in ``raglane.h``; 0 outside of tests.
        process: the process that loaded it. OpenMP's threads do not survive a fork, so a child uses one thread.
    """

    handle: ctypes.CDLL
    isas: tuple[str, ...]
    isa: str
    flags: int = 0
    process: int = 0

    def with_isa(self, isa: str) -> Library:
        """The same kernels for another instruction set.

        Raises:
            ArgumentError: there is no such instruction set here.
        """
        if isa not in self.isas:
            raise ArgumentError(
                explain("RAGLANE_ISA", repr(isa), f"one of those there are here, {', '.join(self.isas)}", "unset it")
            )
        return replace(self, isa=isa)

    def threads(self) -> int:
        """How many threads a call may use: as many as torch."""
        return torch.get_num_threads() if os.getpid() == self.process else 1

    def apply(self, function: str, values: Tensor) -> Tensor:
        """``exp``, ``tanh`` or ``sigmoid`` as the cells compute it, for tests: float32 or float64, contiguous."""
        result, message = torch.empty_like(values), ctypes.create_string_buffer(256)
        status = self.handle.raglane_apply(
            _ISAS[self.isa],
            _DTYPES[values.dtype],
            _FUNCTIONS[function],
            values.data_ptr(),
            result.data_ptr(),
            values.numel(),
            message,
            256,
        )
        _check(status, message)
        return result


@cache
def library() -> Library:
    """Load the kernels, once.

    Raises:
        MissingExtraError: this installation was built without them.
        ArgumentError: ``RAGLANE_ISA`` names an instruction set that is not there.
    """
    # In an editable installation the package lies in two folders: its source, and what was built of it.
    folders = sys.modules[__package__].__path__
    found = [path for folder in folders for path in sorted(Path(folder, "lib").glob("libraglane_cpu.*"))]
    if not found:
        raise MissingExtraError(
            "the cpu kernels are missing: raglane was installed without them, mostly because there was no C++20"
            " compiler with OpenMP. Fix: install g++ or clang++, then install raglane again"
        )
    # torch is imported by now, so the library shares the OpenMP runtime that torch brought.
    handle = ctypes.CDLL(str(found[0]))
    if handle.raglane_abi() != ABI:
        raise MissingExtraError(
            f"the cpu kernels at {found[0]} are of another version of raglane. Fix: reinstall raglane."
        )
    handle.raglane_has_isa.argtypes = [ctypes.c_int64]
    text, integer, pointer = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
    for name in ("forward", "backward", "elementwise_forward", "elementwise_backward", "flatten", "gather", "scatter"):
        getattr(handle, f"raglane_{name}").argtypes = [text, text, integer]
    handle.raglane_apply.argtypes = [integer, integer, integer, pointer, pointer, integer, text, integer]
    isas = tuple(name for name, number in _ISAS.items() if handle.raglane_has_isa(number))
    loaded = Library(handle, isas, isas[0], process=os.getpid())
    wanted = os.environ.get("RAGLANE_ISA")
    return loaded if not wanted else loaded.with_isa(wanted)


def call(name: str, fields: bytes) -> None:
    """Call one of the kernels with the fields of its struct, and raise what its status stands for."""
    function = getattr(library().handle, name)
    status = function(fields, None, 0)
    if status != 0:  # the message is worth a second call only now
        message = ctypes.create_string_buffer(256)
        _check(function(fields, message, 256), message)


def _check(status: int, message: ctypes.Array[ctypes.c_char]) -> None:
    """Raise what a status stands for."""
    if status == 0:
        return
    text = message.value.decode(errors="replace")
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"raglane's cpu kernels: {text}. Fix: a smaller batch, or shorter sequences.")
    raise ArgumentError(f"raglane's cpu kernels: {text}.")


# ---------------------------------------------------------------------------------------------------------------
# One layer
# ---------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer and its batch: what forward and backward both read. ``K`` directions, other letters as in ``Request``.

    Attributes:
        cell: a key of ``CELLS``.
        values: ``(N, D)``.
        offsets: ``(B + 1,)`` int64.
        initial: ``(K, B, size)`` a state, or nothing where all begin with zeros.
        weights: those of the cell's ``weights_type``, direction after direction.
        sizes: of the states.
        directions: ``K``.
    """

    cell: str
    values: Tensor
    offsets: Tensor
    initial: tuple[Tensor, ...]
    weights: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    directions: int

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that may have a gradient, in the order in which gradients are given."""
        return (self.values, *self.initial, *self.weights)

    def contiguous(self) -> Layer:
        """The same layer in memory without gaps; what has none is not copied."""
        for part in (self.offsets, *self.tensors()):
            if part is not None and not part.is_contiguous():
                break
        else:
            return self
        return self._replace(
            values=self.values.contiguous(),
            offsets=self.offsets.contiguous(),
            initial=tuple(part.contiguous() for part in self.initial),
            weights=tuple(None if part is None else part.contiguous() for part in self.weights),
        )


class Saved(NamedTuple):
    """What backward needs of forward besides the layer; tensors without numbers where there is nothing.

    Attributes:
        output: ``(N, K * P)``.
        gates: ``(K, N, ...)``, as the kernels lay them out.
        cells: ``c`` after each element, where the cell has one: ``(K, N, H)`` of an LSTM, ``(N, K * H)`` of an
            element-wise cell.
        is_shared: whether the caller has got ``cells`` as well.
    """

    output: Tensor
    gates: Tensor
    cells: Tensor
    is_shared: bool = False


def preamble(cell: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The first fields of both structs: ABI, instruction set, cell, dtype, flags, threads."""
    kernels = library()
    return ABI, _ISAS[kernels.isa], cell, _DTYPES[dtype], kernels.flags, kernels.threads()


def address(tensor: Tensor | None) -> int:
    """Where a tensor lies, and the null pointer where there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor | None], count: int) -> list[int]:
    """Where tensors lie, and null pointers where there are none, and for those that are missing of ``count``."""
    found = [0 if part is None else part.data_ptr() for part in tensors]
    return found + [0] * (count - len(found))
