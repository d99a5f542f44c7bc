"""The CPU kernels in ``csrc``: the ``lanes`` schedule at the speed of the machine. The only file with ctypes.

A layer is one call, whatever its directions. Tensors go down as pointers; what each must be stands in
``csrc/raglane.h``. What the kernels compute is wrapped for autograd in :mod:`raglane.kernels.recurrence`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from raglane.errors import ArgumentError, MissingExtraError, explain

__all__ = ["Layer", "Library", "Saved", "gate_stride", "layer_backward", "layer_forward", "library"]

_ABI = 2
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_CELLS = {"rnn_tanh": 0, "rnn_relu": 1, "lstm": 2, "gru": 3}
_ISAS = {"avx512": 2, "avx2": 1, "portable": 0}
_FUNCTIONS = {"exp": 0, "tanh": 1, "sigmoid": 2}
_OUT_OF_MEMORY = 2
# raglane_layer: thirteen numbers, then offsets, values, two states, ten weights, five results, nine gradients.
_pack = struct.Struct("=41q").pack
_NO_GRADIENTS = (0,) * 9
_NO_WEIGHTS = (0,) * 5


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
    if handle.raglane_abi() != _ABI:
        raise MissingExtraError(
            f"the cpu kernels at {found[0]} are of another version of raglane. Fix: reinstall raglane."
        )
    handle.raglane_has_isa.argtypes = [ctypes.c_int64]
    text, integer, pointer = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
    for function in (handle.raglane_forward, handle.raglane_backward):
        function.argtypes = [text, text, integer]
    handle.raglane_apply.argtypes = [integer, integer, integer, pointer, pointer, integer, text, integer]
    isas = tuple(name for name, number in _ISAS.items() if handle.raglane_has_isa(number))
    loaded = Library(handle, isas, isas[0], process=os.getpid())
    wanted = os.environ.get("RAGLANE_ISA")
    return loaded if not wanted else loaded.with_isa(wanted)


def _run(function: Callable[..., int], layer: bytes) -> None:
    """Call a kernel, and raise what its status stands for."""
    status = function(layer, None, 0)
    if status != 0:  # the message is worth a second call only now
        message = ctypes.create_string_buffer(256)
        _check(function(layer, message, 256), message)


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
        initial: ``(K, B, size)`` a state.
        weights: five a direction, in the order of :class:`~raglane.cells.spec.Weights`.
    """

    cell: str
    values: Tensor
    offsets: Tensor
    initial: tuple[Tensor, ...]
    weights: tuple[Tensor | None, ...]

    @property
    def directions(self) -> int:
        """``K``."""
        return len(self.weights) // 5

    def contiguous(self) -> Layer:
        """The same layer in memory without gaps; what has none is not copied."""
        parts = (self.values, self.offsets, *self.initial, *self.weights)
        if all([part is None or part.is_contiguous() for part in parts]):  # noqa: C419 (a list is quicker here)
            return self
        return Layer(
            self.cell,
            self.values.contiguous(),
            self.offsets.contiguous(),
            tuple(part.contiguous() for part in self.initial),
            tuple(None if part is None else part.contiguous() for part in self.weights),
        )

    def head(self) -> tuple[int, ...]:
        """The fields of ``raglane_layer`` up to the results."""
        values, weights, kernels = self.values, self.weights, library()
        hidden, projection = cast(Tensor, weights[1]), weights[4]
        hidden_size = hidden.shape[0] // _GATES[self.cell]
        return (
            _ABI,
            _ISAS[kernels.isa],
            _CELLS[self.cell],
            _DTYPES[values.dtype],
            kernels.flags,
            kernels.threads(),
            len(weights) // 5,
            self.offsets.shape[0] - 1,
            values.shape[0],
            values.shape[1],
            hidden_size,
            0 if projection is None else projection.shape[0],
            gate_stride(self.cell, hidden_size),
            self.offsets.data_ptr(),
            values.data_ptr(),
            self.initial[0].data_ptr(),
            self.initial[1].data_ptr() if len(self.initial) > 1 else 0,
            *[0 if part is None else part.data_ptr() for part in weights],
            *(_NO_WEIGHTS if len(weights) == 5 else ()),
        )


_GATES = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}
# Blocks of H that forward keeps of each element, and that backward gives for each.
_SAVED = {"rnn_tanh": 0, "rnn_relu": 0, "lstm": 4, "gru": 4}
_SLOTS = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 4}


def gate_stride(cell: str, hidden_size: int) -> int:
    """The row length of a cell's saved gates and of their gradients, see ``raglane.h``."""
    stride = _SLOTS[cell] * (-(-hidden_size // 16) * 16)
    # Rows of whole pages would all meet in the same few sets of a cache.
    return stride + 16 if stride % 256 == 0 else stride


class Saved(NamedTuple):
    """What backward needs of forward besides the layer.

    Attributes:
        output: ``(N, K * P)``.
        gates: ``(K, N, gate_stride)`` in the kernels' own order, empty where the cell saves none.
        cells: ``(K, N, H)``, an LSTM's ``c``; else empty.
    """

    output: Tensor
    gates: Tensor
    cells: Tensor


class Gradients(NamedTuple):
    """What the backward time loop gives.

    Attributes:
        gates: ``(K, N, S * H)``: gradients of the gates' arguments; rows may be apart.
        previous: ``(K, N, P)``: ``h`` before each element.
        projected: with a projection, the gradient of ``h`` ``(K, N, P)``; else None.
        unprojected: with a projection, what it reads, ``(K, N, H)``; else None.
        initial: ``(K, B, size)`` a state.
    """

    gates: Tensor
    previous: Tensor
    projected: Tensor | None
    unprojected: Tensor | None
    initial: tuple[Tensor, ...]


def layer_forward(
    layer: Layer, need_output: bool, save: bool
) -> tuple[tuple[Tensor, ...], Saved | None, Tensor | None]:
    """Run a layer whose tensors are contiguous.

    Returns:
        The final states, shaped like the initial ones; what backward needs, if ``save``; the output ``(N, K * P)``,
        or None where it was not needed.
    """
    head = layer.head()
    values, count = layer.values, layer.directions
    total, hidden_size, width = values.shape[0], head[10], layer.initial[0].shape[2]
    output = values.new_empty(total, count * width) if need_output or save else None
    final = tuple([torch.empty_like(part) for part in layer.initial])
    gates = cells = None
    if save:
        gates = values.new_empty(count, total, gate_stride(layer.cell, hidden_size) if _SAVED[layer.cell] else 0)
        cells = values.new_empty(count, total, hidden_size if len(final) > 1 else 0)
    _run(
        library().handle.raglane_forward,
        _pack(
            *head,
            0 if output is None else output.data_ptr(),
            final[0].data_ptr(),
            final[1].data_ptr() if len(final) > 1 else 0,
            0 if gates is None else gates.data_ptr(),
            0 if cells is None else cells.data_ptr(),
            *_NO_GRADIENTS,
        ),
    )
    if output is None or gates is None or cells is None:
        return final, None, output
    return final, Saved(output, gates, cells), output


def layer_backward(
    layer: Layer,
    saved: Saved,
    grad_output: Tensor | None,
    grad_final: tuple[Tensor | None, ...],
    *,
    overwrite: bool,
) -> Gradients:
    """Walk a layer back in time. All tensors are contiguous.

    Args:
        layer: what forward ran.
        saved: what it saved.
        grad_output: ``(N, K * P)``, or None for zeros.
        grad_final: one a state, shaped like the final states, or None for zeros.
        overwrite: whether the results may take the memory of ``saved``, which is lost then.
    """
    head = layer.head()
    values, count = layer.values, layer.directions
    total, hidden_size, width = values.shape[0], head[10], layer.initial[0].shape[2]
    projects = head[11] > 0
    is_lstm = len(layer.initial) > 1
    reuse_gates = overwrite and _SAVED[layer.cell] == _SLOTS[layer.cell]
    stride = gate_stride(layer.cell, hidden_size)
    gates = saved.gates if reuse_gates else values.new_empty(count, total, stride)
    previous = saved.cells if overwrite and is_lstm and not projects else values.new_empty(count, total, width)
    projected = values.new_empty(count, total, width) if projects else None
    unprojected = values.new_empty(count, total, hidden_size) if projects else None
    initial = tuple(torch.empty_like(part) for part in layer.initial)
    _run(
        library().handle.raglane_backward,
        _pack(
            *head,
            saved.output.data_ptr(),
            0,
            0,
            saved.gates.data_ptr(),
            saved.cells.data_ptr(),
            0 if grad_output is None else grad_output.data_ptr(),
            *[0 if part is None else part.data_ptr() for part in grad_final],
            *(() if is_lstm else (0,)),
            gates.data_ptr(),
            previous.data_ptr(),
            0 if projected is None else projected.data_ptr(),
            0 if unprojected is None else unprojected.data_ptr(),
            *[part.data_ptr() for part in initial],
            *(() if is_lstm else (0,)),
        ),
    )
    return Gradients(gates[..., : _SLOTS[layer.cell] * hidden_size], previous, projected, unprojected, initial)
