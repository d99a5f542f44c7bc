"""Loads the library compiled from ``csrc``, and calls its functions; the only file with ctypes.

Tensors are passed as addresses. ``csrc/abi/raglane.h`` states the shape and dtype of each, and
:mod:`raglane.kernels.tensor_checks` validates them.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils import forks
from raglane._utils.messages import warn_caller
from raglane._utils.tracing import constant_when_traced, refuse_jit_trace
from raglane.errors import ArgumentError, MissingExtraError

ABI = 25
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
"""The numbers in ``raglane.h`` of the dtypes in which the kernels compute."""

# int8 is the dtype of weights in calls whose tensors are float32.
_NUMBERS = {**DTYPES, torch.int8: 3}
_FUNCTIONS = {
    name: number
    for number, name in enumerate(
        (
            "exp",
            "tanh",
            "sigmoid",
            "expm1",
            "log",
            "log1p",
            "erf",
            "sqrt",
            "softplus",
            "gelu",
            "silu",
        )
    )
}
OK = 0
BAD_ARGUMENT = 1
"""Statuses of ``raglane.h``: that of a call that ran, and that of a refused one."""

_OUT_OF_MEMORY = 2
_MESSAGE = 256

HEAD = (
    *("abi", "isa", "cell", "dtype", "flags", "threads", "directions"),
    *("sequences", "elements", "slot_count"),
)
"""The first fields of a layer's struct."""

# The bytes of the structs that are packed with a fixed format.
_SIZES = {
    "raglane_program": 16 * 8,
    "raglane_tensor": 5 * 8,
    "raglane_outer": 15 * 8,
    "raglane_factors": 24 * 8,
    "raglane_rows": 15 * 8,
    "raglane_lattices": 11 * 8,
}


def leave_lost_threads() -> None:
    """Set torch to one thread in a forked process, unless the number was changed since the fork.

    An operation on several threads would wait forever for threads of the parent process. torch's
    DataLoader does the same in its workers. Must be called before the first computation.
    """
    before = forks.threads_before
    if before not in (None, 1) and torch.get_num_threads() == before:
        torch.set_num_threads(1)


class Struct(NamedTuple):
    """A struct of ``csrc/abi/raglane.h``: its size in bytes, and the formats of its fields in the
    order of memory.

    A format is ``q``, ``d`` or e.g. ``24s``. Each field of nested weights has its entry, e.g.
    ``weights[1].hidden``.
    """

    size: int
    formats: Mapping[str, str]

    def packer(self, *names: str, begin: str = "", end: str = "") -> Callable[..., bytes]:
        """Return a function that packs these fields, in the order of memory, and zeros for all
        others.

        ``begin`` and ``end`` select a range of fields, ``end`` not included.
        """
        fields = list(self.formats)
        chosen = fields[fields.index(begin) if begin else 0 : fields.index(end) if end else None]
        if [name for name in chosen if name in names] != list(names):
            rule = "fields of the struct, in the order of csrc/abi/raglane.h"
            raise ArgumentError("names", ", ".join(names), rule, "reinstall raglane")
        formats = [
            self.formats[name] if name in names else f"{struct.calcsize('=' + self.formats[name])}x"
            for name in chosen
        ]
        return struct.Struct("=" + "".join(formats)).pack


@dataclass(frozen=True)
class Library:
    """The loaded library."""

    handle: ctypes.CDLL
    structs: Mapping[str, Struct]  # by their names in ``csrc/abi/raglane.h``
    numbers: Mapping[
        str, int
    ]  # of the instruction sets that build and processor support, by name, best first
    isa: str  # the instruction set in use
    # Up to this many elements and weights per direction, the kernels compute the gradients of
    # values and weights faster than torch; see ``csrc/runtime/tuning.h``.
    few_elements: int
    few_weights: int
    least_block: int  # in bytes, the size from which :func:`empty` takes a block
    border: int  # elements of a sequence between saved states of linear recurrences
    own_threads: bool  # not OpenMP's
    flags: int = 0  # ``raglane_flags``, which divide the work in another way, for tests

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that build and processor support, best first."""
        return tuple(self.numbers)

    def with_isa(self, isa: str) -> Library:
        """Return the same kernels for another instruction set."""
        if isa not in self.isas:
            rule = f"one of the instruction sets available here, {', '.join(self.isas)}"
            raise ArgumentError("RAGLANE_ISA", repr(isa), rule, "unset it")
        return replace(self, isa=isa)

    def threads(self, asked: int | None = None) -> int:
        """Return the number of threads of a call: the given one, or torch's for None.

        It is 1 in a forked process, unless the library has threads of its own.
        """
        forked = forks.threads_before is not None and not self.own_threads
        return 1 if forked else asked or torch.get_num_threads()

    def apply(self, function: str, values: Tensor, factor: Tensor | None = None) -> Tensor:
        """Compute a ``raglane_function`` as cells do, times a factor, of contiguous float32 or float64
        of one shape.
        """
        for each in (values,) if factor is None else (values, factor):
            is_right = each.dtype is values.dtype and each.shape == values.shape
            if not (
                is_right
                and each.dtype in (torch.float32, torch.float64)
                and each.is_contiguous()
                and each.is_cpu
            ):
                got = f"{each.dtype} {tuple(each.shape)} on {each.device}, strides {each.stride()}"
                rule = "contiguous float32 or float64 on the CPU, as is a factor of that shape"
                raise ArgumentError("values", got, rule, "convert them")
        result = torch.empty_like(values)
        head = self.numbers[self.isa], DTYPES[values.dtype], self.threads(), _FUNCTIONS[function]
        by = None if factor is None else factor.data_ptr()
        call("raglane_apply", *head, values.data_ptr(), by, result.data_ptr(), values.numel())
        return result

    def block(self, size_needed: int) -> ctypes.Array[ctypes.c_char] | None:
        """Return a block of the allocator, which is freed when the array is gone; None if memory is
        exhausted.
        """
        size = ctypes.c_int64()
        address = self.handle.raglane_take_block(size_needed, ctypes.byref(size))
        if not address:
            return None
        memory = (ctypes.c_char * size.value).from_address(address)
        weakref.finalize(memory, self.handle.raglane_give_block, address, size.value).atexit = False
        return memory

    def multiply_registers(self, dtype: torch.dtype, rounds: int) -> int:
        """Run multiply-adds in registers, the peak for products, on all threads of a call; return
        their number.
        """
        operations = ctypes.c_int64()
        head = self.numbers[self.isa], DTYPES[dtype], self.threads(), rounds
        call("raglane_multiply_registers", *head, ctypes.byref(operations))
        return operations.value


def location() -> Path | None:
    """Return the path of the library; None if this installation was built without it."""
    # An editable installation has two folders: the source, and the compiled files.
    folders = sys.modules[__package__].__path__
    paths = [
        path for folder in folders for path in sorted(Path(folder, "lib").glob("libraglane_cpu.*"))
    ]
    return paths[0] if paths else None


# What to do about an error of the system's loader, by a part of its text.
_FIXES = {
    "libgomp": "Install the OpenMP runtime libgomp, Debian's package libgomp1",
    "map segment": "Free memory or raise its limit, and start again",
    "allocate memory": "Free memory or raise its limit, and start again",
}


@cache
def _mapped(path: Path) -> ctypes.CDLL | str:
    """Return the library; or, after a warning, why the system cannot load it, and a fix."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        reason = f"the cpu kernels cannot be loaded: {error}"
        warn_caller(f"{reason}. Layers run on PyTorch's kernels, slower", RuntimeWarning)
        fixes = (fix for message, fix in _FIXES.items() if message in reason)
        return f"{reason}. {next(fixes, 'Reinstall raglane on this system')}"


@cache
def library() -> Library:
    """Load the library, once."""
    path = location()
    if path is None:
        raise MissingExtraError(
            "the cpu kernels are missing: raglane was installed without a C++20 compiler. Install g++ or"
            " clang++, then run pip install --force-reinstall --no-deps --no-binary raglane raglane"
        )
    # torch was imported before, so the library shares torch's OpenMP runtime.
    handle = _mapped(path)
    if isinstance(handle, str):
        raise MissingExtraError(handle)
    # Another library may have no such function.
    if not hasattr(handle, "raglane_abi") or handle.raglane_abi() != ABI:
        raise MissingExtraError(
            f"the cpu kernels at {path} are of another version of raglane. Reinstall raglane."
        )
    structs = _structs(handle)
    for name, size in _SIZES.items():
        if structs[name].size != size:
            raise MissingExtraError(
                f"the cpu kernels at {path} have a struct {name} of {structs[name].size} bytes, but this version of"
                f" raglane requires {size}. Reinstall raglane."
            )
    _declare(handle)
    numbers = _numbers(handle)
    if not numbers:
        raise MissingExtraError(
            f"the cpu kernels at {path} were built for another processor alone. Reinstall raglane on"
            " this machine, in a clone with make setup"
        )
    threads = os.environ.get("RAGLANE_THREADS")
    if threads not in (None, "", "own"):
        rule = "own, for threads of the kernels' own, or nothing, for those of OpenMP"
        raise ArgumentError("RAGLANE_THREADS", repr(threads), rule, "unset it")
    sizes = (
        handle.raglane_few_elements(),
        handle.raglane_few_weights(),
        handle.raglane_least_block(),
        handle.raglane_border(),
    )
    loaded = Library(
        handle, structs, numbers, next(iter(numbers)), *sizes, bool(handle.raglane_own_threads())
    )
    isa = os.environ.get("RAGLANE_ISA")
    return loaded if not isa else loaded.with_isa(isa)


@cache
def packer(struct: str) -> Any:
    """Return a function that packs all fields of a struct."""
    layout = library().structs[struct]
    return layout.packer(*layout.formats)


class Operators(NamedTuple):
    """The operators of ``csrc/torch``, as functions without torch's dispatch in Python."""

    forward: Any
    backward: Any
    run_program: Any
    infer: Any
    infer_packed: Any


@cache
def operators() -> Operators | None:
    """Return the operators of ``csrc/torch``; None if they are missing or refused."""
    path = location()
    path = path and path.with_name(f"libraglane_torch{path.suffix}")
    try:
        if path is None or not path.is_file():
            return None
        if not hasattr(torch.ops.raglane, "forward"):  # a program may have loaded a copy
            torch.ops.load_library(str(path))
        raglane = torch.ops.raglane
        return Operators(
            raglane.forward.default._op,
            raglane.backward.default._op,
            raglane.run_program.default._op,
            raglane.infer.default._op,
            raglane.infer_packed.default._op,
        )
    except (OSError, RuntimeError, AttributeError):
        return None


def _structs(handle: ctypes.CDLL) -> dict[str, Struct]:
    """Return all structs, from the library's lines of name, type and offset."""
    handle.raglane_fields.restype = ctypes.c_char_p
    structs: dict[str, Struct] = {}
    while text := handle.raglane_fields(len(structs)):
        (name, size), *fields = [line.split() for line in text.decode().splitlines()]
        formats = {field: _format(kind) for field, kind, _ in fields}
        structs[name] = Struct(int(size), formats)
    return structs


def _format(kind: str) -> str:
    """Return the format of the module ``struct`` for a type of C."""
    if kind.startswith("char"):
        return f"{kind[5:-1]}s"
    return "d" if kind == "double" else "q"


def _declare(handle: ctypes.CDLL) -> None:
    """Set the types of the library's functions, which ``csrc/abi/raglane.h`` declares."""
    text = ctypes.c_char_p
    integer = ctypes.c_int64
    pointer = ctypes.c_void_p
    for name in (
        "forward",
        "backward",
        "flatten",
        "gather",
        "scatter",
        "run_program",
        "outer_products",
        "gate_norm",
        "product",
        "align",
    ):
        getattr(handle, f"raglane_{name}").argtypes = [text, text, integer]
    for name in ("best_alignment", "soft_dtw", "soft_dtw_shares", "edits"):
        getattr(handle, f"raglane_{name}").argtypes = [text, text, integer]
    for name in (
        "scan_selectively",
        "scan_selectively_backward",
        "attend",
        "attend_backward",
        "convolve",
        "convolve_backward",
        "accumulate",
        "accumulate_backward",
    ):
        getattr(handle, f"raglane_{name}").argtypes = [text, text, integer]
    handle.raglane_border.restype = integer
    handle.raglane_run_stages.argtypes = [pointer, *[integer] * 4, text, integer]
    for name in ("pack", "pack_program"):
        getattr(handle, f"raglane_{name}").argtypes = [
            text,
            pointer,
            ctypes.POINTER(integer),
            text,
            integer,
        ]
    handle.raglane_find_prefixes.argtypes = [
        text,
        ctypes.POINTER(pointer),
        ctypes.POINTER(integer),
        text,
        integer,
    ]
    handle.raglane_take_prefixes.argtypes = [pointer, pointer, pointer, text, integer]
    handle.raglane_apply.argtypes = [*[integer] * 4, *[pointer] * 3, integer, text, integer]
    handle.raglane_multiply_registers.argtypes = [
        *[integer] * 4,
        ctypes.POINTER(integer),
        text,
        integer,
    ]
    handle.raglane_describe_cell.argtypes = [integer, text, text, integer]
    handle.raglane_few_elements.restype = handle.raglane_few_weights.restype = integer
    handle.raglane_take_block.argtypes = [integer, ctypes.POINTER(integer)]
    handle.raglane_take_block.restype = pointer
    handle.raglane_give_block.argtypes = [pointer, integer]
    handle.raglane_give_block.restype = None
    handle.raglane_least_block.restype = integer


def _numbers(handle: ctypes.CDLL) -> dict[str, int]:
    """Return the numbers of the supported instruction sets, best first."""
    handle.raglane_isa_name.argtypes = [ctypes.c_int64]
    handle.raglane_isa_name.restype = ctypes.c_char_p
    handle.raglane_has_isa.argtypes = [ctypes.c_int64]
    names: list[str] = []
    while name := handle.raglane_isa_name(len(names)):
        names.append(name.decode())
    return {
        name: number
        for number, name in reversed([*enumerate(names)])
        if handle.raglane_has_isa(number)
    }


def build_note() -> str | None:
    """Return how the kernels differ from those of a wheel that use vector instructions; None if
    they do not.
    """
    isas = library().isas
    if "portable" not in isas:
        return f"the kernels were built for this machine's processor alone: {', '.join(isas)}"
    if platform.machine() not in ("x86_64", "AMD64") or isas != ("portable",):
        return None
    return "the kernels run portable code, slower, because this processor has no AVX2"


@constant_when_traced
def missing_kernels() -> str | None:
    """Return the reason why the kernels cannot be loaded; None if they can."""
    try:
        library()
    except MissingExtraError as missing:
        return str(missing).rstrip(".")
    return None


class _Messages(threading.local):
    """The message of a failed call; thread-local, because ctypes releases the GIL."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_MESSAGE)


_messages = _Messages()


def answer(name: str, *args: Any) -> tuple[int, str]:
    """Call a function of the library, e.g. with the fields of its struct; return its status and
    the reason of a failure.
    """
    refuse_jit_trace("a call of raglane's cpu kernels")
    buffer = _messages.buffer
    status = getattr(library().handle, name)(*args, buffer, _MESSAGE)
    return status, buffer.value.decode(errors="replace") if status else ""


def require_ok(status: int, reason: str) -> None:
    """Raise if a call of the library or of its operators failed."""
    if status == _OUT_OF_MEMORY:
        raise MemoryError(
            f"raglane's cpu kernels: {reason}. Pass a smaller batch, or shorter sequences."
        )
    if status:
        raise ArgumentError(f"raglane's cpu kernels: {reason}.")


def call(name: str, *args: Any) -> None:
    """Call a function of the library; raise if it fails."""
    require_ok(*answer(name, *args))


def packed(name: str, fields: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Call a function that packs weights, and return them."""
    count = ctypes.c_int64()
    call(name, fields, None, ctypes.byref(count))
    # torch's allocator aligns memory for vectors.
    memory = torch.empty(count.value, dtype=dtype, device="cpu")
    call(name, fields, memory.data_ptr(), ctypes.byref(count))
    return memory


def found_state(fields: bytes, sequences: int) -> tuple[Tensor, Tensor]:
    """Run a beam search; return its state and the offsets of its records, both int64."""
    address = ctypes.c_void_p()
    size = ctypes.c_int64()
    call("raglane_find_prefixes", fields, ctypes.byref(address), ctypes.byref(size))
    to: tuple[int | None, ...] = (None, None)
    try:
        state = torch.empty(size.value, dtype=torch.int64, device="cpu")
        offsets = torch.empty(sequences + 1, dtype=torch.int64, device="cpu")
        to = offsets.data_ptr(), state.data_ptr()
    finally:
        call("raglane_take_prefixes", address, *to)  # which also frees the memory
    return state, offsets


def preamble(cell: int, dtype: torch.dtype, threads: int | None = None) -> tuple[int, ...]:
    """Return the first fields of a layer's struct; dtype int8 is that of the weights, and float32
    of the rest.
    """
    abi, isa, *rest = program_preamble(dtype, threads)
    return abi, isa, cell, *rest


def program_preamble(dtype: torch.dtype, threads: int | None = None) -> tuple[int, ...]:
    """Return a program's first fields: ABI, instruction set, dtype, flags, threads."""
    kernels = library()
    return (
        ABI,
        kernels.numbers[kernels.isa],
        _NUMBERS[dtype],
        kernels.flags,
        kernels.threads(threads),
    )


class CellFacts(NamedTuple):
    """The kernels' description of a cell: ``raglane_cell_facts`` in ``csrc/abi/raglane.h``."""

    number: int  # of the cell in calls of the kernels
    is_elementwise: bool  # a unit reads only its own state; otherwise a matrix multiplies the state
    gates: int  # input products per unit
    slots: int  # blocks of ``H`` per element in the gradients of the gates
    saved: int  # blocks of ``H`` per element that forward saves for backward
    has_c: bool  # the cell has a second state, ``c``
    projects: bool  # ``h`` may be a projection
    skips: bool  # the output adds the input, unchanged or by weights with one more slot and one more saved block
    factors: int  # recurrent factors per unit
    biases: int  # blocks of ``H`` in a bias


@cache
def cell_facts() -> Mapping[str, CellFacts]:
    """Return the facts of all cells by name: the lines of ``csrc/cells/table.h``."""
    kernels = library()
    facts = dict[str, CellFacts]()
    line = kernels.structs["raglane_cell_facts"]
    unpack = struct.Struct("=" + "".join(line.formats.values())).unpack
    fields = ctypes.create_string_buffer(line.size)
    while kernels.handle.raglane_describe_cell(len(facts), fields, _messages.buffer, _MESSAGE) == 0:
        name, is_elementwise, gates, slots, saved, *flags, factors, biases = unpack(fields.raw)
        numbers = (
            len(facts),
            bool(is_elementwise),
            gates,
            slots,
            saved,
            *map(bool, flags),
            factors,
            biases,
        )
        facts[name.rstrip(b"\0").decode()] = CellFacts._make(numbers)
    return facts


@constant_when_traced
def has_cell(name: str) -> bool:
    """Return True if the kernels are built and support a cell."""
    try:
        return name in cell_facts()
    except MissingExtraError:
        return False


# ---- the allocator for large tensors -------------------------------------------------------------

# The tensors that a training step saves for its backward pass have about the same size in the next
# step. The system's allocator returns large blocks to the system at once, and the page faults of
# new ones take time, so the kernels keep theirs (csrc/runtime/blocks.h).
#
# NOTE (lifetime): the storage of a tensor owns the array over its block. The block is freed when
# the array is gone, so not before every reference to the storage: autograd's, another tensor's or a
# hook's.
_uses_torch = False


def least_block() -> int:
    """Return the bytes from which tensors of :func:`empty` and of the operators are blocks."""
    return sys.maxsize if _uses_torch else library().least_block


def row_length(columns: int) -> int:
    """Return a length for rows of saved numbers: whole pages would map to few sets of a cache."""
    return columns + 16 if columns % 256 == 0 else columns


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor, as ``like.new_empty(*shape)``, for use only by the kernels
    and autograd.
    """
    count = math.prod(shape)
    size = count * like.element_size()
    if size < least_block():
        return like.new_empty(*shape)
    memory = library().block(size)
    if memory is None:
        return like.new_empty(*shape)  # raises torch's error if memory is exhausted
    return torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape)


@contextmanager
def from_torch() -> Iterator[None]:
    """Allocate by torch in a ``with`` block, so that torch's profiler counts the memory."""
    global _uses_torch
    before = _uses_torch
    _uses_torch = True
    try:
        yield
    finally:
        _uses_torch = before
