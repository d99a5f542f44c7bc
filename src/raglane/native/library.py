"""The CPU kernels in ``csrc``: the ``lanes`` schedule at the speed of the machine. The only file with ctypes.

A layer is one call, whatever its directions. Tensors go down as addresses; what each must be stands in
``csrc/abi/raglane.h``, and :mod:`raglane.kernels.cpu.gate` holds them against it. The calls of the two kinds of
layers are in :mod:`raglane.kernels.cpu.matrix` and :mod:`raglane.kernels.cpu.elementwise`.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from raglane._utils import forks
from raglane._utils.messages import message
from raglane._utils.tracing import constant_when_traced
from raglane.errors import ArgumentError, MissingExtraError

ABI = 14
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""What the kernels compute in, by its number in ``raglane.h``."""

# Weights of int8 and all else float32: a number too, but no dtype that a call's tensors may have.
_NUMBERS = {**DTYPES, torch.int8: 3}
_FUNCTIONS = {"exp": 0, "tanh": 1, "sigmoid": 2, "expm1": 3, "log": 4, "log1p": 5, "erf": 6}
_OUT_OF_MEMORY = 2
_MESSAGE = 256

# The bytes of the structs whose formats are written out where they are packed.
_SIZES = {
    "raglane_program": 13 * 8,
    "raglane_tensor": 5 * 8,
    "raglane_outer": 15 * 8,
    "raglane_rows": 15 * 8,
}


def leave_lost_threads() -> None:
    """In a process that was forked, have torch use one thread, unless it was told otherwise since.

    An operation on more would wait forever for those that the fork has left behind, and what surrounds the kernels in
    a network is torch's. Torch's own DataLoader does the same in its workers. To be called before anything is computed.
    """
    before = forks.threads_before
    if before not in (None, 1) and torch.get_num_threads() == before:
        torch.set_num_threads(1)


class Struct(NamedTuple):
    """A struct of ``csrc/abi/raglane.h``: its bytes, and the formats of its fields in the order of memory.

    A format is ``q`` or ``24s``; fields of weights stand by themselves, as ``weights[1].hidden``.
    """

    size: int
    formats: Mapping[str, str]

    def packer(self, *names: str, begin: str = "", end: str = "") -> Callable[..., bytes]:
        """Packs these fields, given in the order of memory; all others are zeros.

        ``begin`` and ``end`` are the first field of a part of the struct, and the first one after it.
        """
        fields = list(self.formats)
        part = fields[fields.index(begin) if begin else 0 : fields.index(end) if end else None]
        if [name for name in part if name in names] != list(names):
            rule = "fields of the struct, in the order of csrc/abi/raglane.h"
            raise ArgumentError(message("names", ", ".join(names), rule, "reinstall raglane"))
        formats = [
            self.formats[name] if name in names else f"{struct.calcsize('=' + self.formats[name])}x" for name in part
        ]
        return struct.Struct("=" + "".join(formats)).pack


@dataclass(frozen=True)
class Library:
    """The loaded kernels.

    Attributes:
        handle: of the shared library.
        structs: those that calls pass, by their names in ``csrc/abi/raglane.h``.
        numbers: of the instruction sets that this build and this processor have, by their names, best first.
        isa: the one in use.
        few_elements: up to this many, the kernels make the gradients of values and weights best,
        few_weights: where a direction has at most this many; see ``csrc/runtime/tuning.h``.
        least_block: bytes that are worth a block; see :func:`empty`.
        flags: how the work is divided, ``raglane_flags`` in ``raglane.h``; 0 outside of tests.
    """

    handle: ctypes.CDLL
    structs: Mapping[str, Struct]
    numbers: Mapping[str, int]
    isa: str
    few_elements: int
    few_weights: int
    least_block: int
    flags: int = 0

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that this build and this processor have, best first."""
        return tuple(self.numbers)

    def with_isa(self, isa: str) -> Library:
        """The same kernels for another instruction set."""
        if isa not in self.isas:
            rule = f"one of the instruction sets available here, {', '.join(self.isas)}"
            raise ArgumentError(message("RAGLANE_ISA", repr(isa), rule, "unset it"))
        return replace(self, isa=isa)

    def threads(self) -> int:
        """How many threads a call may use: as many as torch, and one in a process that was forked from another."""
        return torch.get_num_threads() if forks.threads_before is None else 1

    def apply(self, function: str, values: Tensor) -> Tensor:
        """A function of ``raglane_function`` as cells compute it, for tests: float32 or float64, contiguous."""
        if values.dtype not in (torch.float32, torch.float64) or not values.is_contiguous() or not values.is_cpu:
            got = f"{values.dtype} on {values.device}, strides {values.stride()}"
            raise ArgumentError(message("values", got, "contiguous float32 or float64 on the CPU", "convert them"))
        result, words = torch.empty_like(values), _messages.buffer
        status = self.handle.raglane_apply(
            self.numbers[self.isa],
            DTYPES[values.dtype],
            _FUNCTIONS[function],
            values.data_ptr(),
            result.data_ptr(),
            values.numel(),
            words,
            _MESSAGE,
        )
        if status != 0:
            _raise(status, words)
        return result

    def block(self, wanted: int) -> ctypes.Array[ctypes.c_char] | None:
        """Memory that stays for the next call; it is given back when the array has gone."""
        size = ctypes.c_int64()
        address = self.handle.raglane_take_block(wanted, ctypes.byref(size))
        if not address:
            return None
        memory = (ctypes.c_char * size.value).from_address(address)
        weakref.finalize(memory, self.handle.raglane_give_block, address, size.value).atexit = False
        return memory

    def multiply_registers(self, dtype: torch.dtype, rounds: int) -> int:
        """The most that products can reach: multiply-adds in registers alone, on as many threads as a call has."""
        operations, words = ctypes.c_int64(), _messages.buffer
        status = self.handle.raglane_multiply_registers(
            self.numbers[self.isa], DTYPES[dtype], self.threads(), rounds, ctypes.byref(operations), words, _MESSAGE
        )
        if status != 0:
            _raise(status, words)
        return operations.value


def location() -> Path | None:
    """The file of the kernels; None where this installation was built without them."""
    # In an editable installation the package lies in two folders: its source, and what was built of it.
    folders = sys.modules[__package__].__path__
    found = [path for folder in folders for path in sorted(Path(folder, "lib").glob("libraglane_cpu.*"))]
    return found[0] if found else None


@cache
def _mapped(path: Path) -> ctypes.CDLL | str:
    """The shared library, or the reason why the system cannot map it, such as a want of memory; a warning gives it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        reason = f"the cpu kernels cannot be loaded: {error}"
        warnings.warn(f"{reason}. PyTorch runs the layers, slower", RuntimeWarning, stacklevel=2)
        return reason


@cache
def library() -> Library:
    """Load the kernels, once."""
    found = location()
    if found is None:
        raise MissingExtraError(
            "the cpu kernels are missing: raglane was installed without them, usually because there was no C++20"
            " compiler with OpenMP. Install g++ or clang++, then install raglane again"
        )
    # torch is imported by now, so the library shares the OpenMP runtime that torch brought.
    handle = _mapped(found)
    if isinstance(handle, str):
        raise MissingExtraError(f"{handle}. Free memory or raise its limit, and start again")
    if handle.raglane_abi() != ABI:
        raise MissingExtraError(f"the cpu kernels at {found} are of another version of raglane. Reinstall raglane.")
    structs = _structs(handle)
    for name, size in _SIZES.items():
        if structs[name].size != size:
            raise MissingExtraError(
                f"the cpu kernels at {found} have a struct {name} of {structs[name].size} bytes, where"
                f" this version of raglane builds {size}. Reinstall raglane."
            )
    text, integer, pointer = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
    for name in ("forward", "backward", "flatten", "gather", "scatter", "run_program", "outer_products"):
        getattr(handle, f"raglane_{name}").argtypes = [text, text, integer]
    handle.raglane_pack.argtypes = [text, pointer, ctypes.POINTER(integer), text, integer]
    handle.raglane_apply.argtypes = [integer, integer, integer, pointer, pointer, integer, text, integer]
    handle.raglane_multiply_registers.argtypes = [*[integer] * 4, ctypes.POINTER(integer), text, integer]
    handle.raglane_describe_cell.argtypes = [integer, text, text, integer]
    handle.raglane_few_elements.restype = handle.raglane_few_weights.restype = integer
    handle.raglane_take_block.argtypes, handle.raglane_take_block.restype = [integer, ctypes.POINTER(integer)], pointer
    handle.raglane_give_block.argtypes, handle.raglane_give_block.restype = [pointer, integer], None
    handle.raglane_least_block.restype = integer
    numbers = _numbers(handle)
    sizes = handle.raglane_few_elements(), handle.raglane_few_weights(), handle.raglane_least_block()
    loaded = Library(handle, structs, numbers, next(iter(numbers)), *sizes)
    wanted = os.environ.get("RAGLANE_ISA")
    return loaded if not wanted else loaded.with_isa(wanted)


def _structs(handle: ctypes.CDLL) -> dict[str, Struct]:
    """All structs, from the library's own lines of name, type and offset."""
    handle.raglane_fields.restype = ctypes.c_char_p
    found: dict[str, Struct] = {}
    while text := handle.raglane_fields(len(found)):
        (name, size), *fields = [line.split() for line in text.decode().splitlines()]
        formats = {field: f"{kind[5:-1]}s" if kind.startswith("char") else "q" for field, kind, _ in fields}
        found[name] = Struct(int(size), formats)
    return found


def _numbers(handle: ctypes.CDLL) -> dict[str, int]:
    """The numbers of the instruction sets that are here, best first."""
    handle.raglane_isa_name.argtypes, handle.raglane_isa_name.restype = [ctypes.c_int64], ctypes.c_char_p
    handle.raglane_has_isa.argtypes = [ctypes.c_int64]
    names: list[str] = []
    while name := handle.raglane_isa_name(len(names)):
        names.append(name.decode())
    return {name: number for number, name in reversed([*enumerate(names)]) if handle.raglane_has_isa(number)}


@constant_when_traced
def missing_kernels() -> str | None:
    """Why the kernels cannot be loaded, in words, or None where they can."""
    try:
        library()
    except MissingExtraError as missing:
        return str(missing).rstrip(".")
    return None


class _Messages(threading.local):
    """Where a failed call leaves its message: each thread's own, for calls let go of Python's lock."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_MESSAGE)


_messages = _Messages()


def call(name: str, fields: bytes) -> None:
    """Call one of the kernels with the fields of its struct, and raise what its status stands for."""
    words = _messages.buffer
    status = getattr(library().handle, name)(fields, words, _MESSAGE)
    if status != 0:
        _raise(status, words)


def packed(name: str, fields: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Weights packed by one of the functions for that."""
    function, words, count = getattr(library().handle, name), _messages.buffer, ctypes.c_int64()
    status = function(fields, None, ctypes.byref(count), words, _MESSAGE)
    # Torch's allocator gives memory that is aligned as vectors want it.
    memory = torch.empty(count.value, dtype=dtype, device="cpu")
    if status == 0:
        status = function(fields, memory.data_ptr(), ctypes.byref(count), words, _MESSAGE)
    if status != 0:
        _raise(status, words)
    return memory


def _raise(status: int, words: ctypes.Array[ctypes.c_char]) -> NoReturn:
    """Raise what a status stands for."""
    text = words.value.decode(errors="replace")
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"raglane's cpu kernels: {text}. Pass a smaller batch, or shorter sequences.")
    raise ArgumentError(f"raglane's cpu kernels: {text}.")


def preamble(cell: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The first fields of a layer's struct: ABI, instruction set, cell, dtype, flags, threads.

    A dtype of int8 stands for weights of int8, and float32 for all else.
    """
    abi, isa, *rest = program_preamble(dtype)
    return abi, isa, cell, *rest


def program_preamble(dtype: torch.dtype) -> tuple[int, ...]:
    """The first fields of a program's struct: ABI, instruction set, dtype, flags, threads."""
    kernels = library()
    return ABI, kernels.numbers[kernels.isa], _NUMBERS[dtype], kernels.flags, kernels.threads()


class CellFacts(NamedTuple):
    """The kernels' line on a cell besides its arithmetic: ``raglane_cell_facts`` in ``csrc/abi/raglane.h``."""

    number: int  # of the cell in calls of the kernels
    is_elementwise: bool  # a unit's past is its own alone; else weights meet the state as a matrix
    gates: int  # input products per unit
    slots: int  # blocks of ``H`` per element that backward gives
    saved: int  # blocks of ``H`` per element that forward keeps for backward
    has_c: bool  # there is a second state, ``c``
    projects: bool  # ``h`` may be a projection
    skips: bool  # the output takes up the input: as it is, or by weights, with one more slot and one more saved
    factors: int  # recurrent factors per unit
    biases: int  # blocks of ``H`` in a bias


@cache
def cell_facts() -> Mapping[str, CellFacts]:
    """The facts of all cells, by the cells' names: the lines of ``csrc/cells/table.h``."""
    kernels, found = library(), dict[str, CellFacts]()
    line = kernels.structs["raglane_cell_facts"]
    unpack = struct.Struct("=" + "".join(line.formats.values())).unpack
    fields = ctypes.create_string_buffer(line.size)
    while kernels.handle.raglane_describe_cell(len(found), fields, _messages.buffer, _MESSAGE) == 0:
        name, is_elementwise, gates, slots, saved, *flags, factors, biases = unpack(fields.raw)
        facts = (len(found), bool(is_elementwise), gates, slots, saved, *map(bool, flags), factors, biases)
        found[name.rstrip(b"\0").decode()] = CellFacts._make(facts)
    return found


@constant_when_traced
def has_cell(name: str) -> bool:
    """Whether the kernels are built and know a cell, for every call of a layer."""
    try:
        return name in cell_facts()
    except MissingExtraError:
        return False


# ---- large tensors ------------------------------------------------------------------------------------------------

# What a training step saves for its backward pass is about as large in the next step. An allocator hands large blocks
# back to the system at once, and the pages of new ones take time, so the kernels keep theirs (csrc/runtime/blocks.h).
#
# NOTE (whose memory it is): a tensor's storage holds the array over its block, whoever holds the storage: autograd,
# another tensor, a hook. The block is given back when the array has gone, and no sooner.
_uses_torch = False


def empty(like: Tensor, *shape: int) -> Tensor:
    """A tensor of any content, as ``like.new_empty(*shape)`` gives it, which only the kernels and autograd may hold."""
    count = math.prod(shape)
    bytes_wanted, kernels = count * like.element_size(), library()
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
