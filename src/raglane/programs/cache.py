"""Programs by what they are made of: each step is traced once in a process, and once on a machine if it can be.

The user's folder of caches holds traces by a key of all that decides them. What is read there is checked, and verified
against torch before its first use, like what was just traced; what does not hold is traced anew, and written again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane._utils import caches
from raglane.cells.module import ModuleCell
from raglane.cells.spec import CellSpec
from raglane.programs import stored
from raglane.programs.compiled import Compiled
from raglane.programs.graph import Refused, Unkept
from raglane.programs.keys import lasting_key
from raglane.programs.step import Step, trace
from raglane.programs.trace import Trace
from raglane.programs.weights import Survey, cell_key, survey

__all__ = ["KIND", "Entry", "Wish", "anew", "forget", "keep", "lookup", "plainly"]

KIND = "programs"
"""The folder among the user's caches."""

_LARGEST = 1024


@dataclass(frozen=True)
class Wish:
    """Of what there is to be a program.

    Attributes:
        cell: the equations.
        weights: what they read.
        width: of the layer's input.
        sizes: of the states.
        output: of the output.
        dtype: that numbers are computed in.
    """

    cell: CellSpec
    weights: Any
    width: int
    sizes: tuple[int, ...]
    output: int
    dtype: torch.dtype

    def given(self, part: Tensor) -> Tensor:
        """A tensor in the dtype that is computed in: bfloat16 is widened."""
        return part.to(self.dtype) if part.dtype is torch.bfloat16 else part


@dataclass
class Entry:
    """A step's programs, or why there are none.

    Attributes:
        compiled: the programs; None where there are none.
        prepares: whether what the cell prepares is part of them.
        reason: why there are none.
        seconds: how long it took to trace or to read them, and to verify them.
        is_verified: whether they were compared with torch.
        is_read: whether they are made of a trace that was read from the disk.
        lasting: the key on the disk; empty where there is none.
        unkept: why they are not kept on the disk; empty where they are.
        calls: how many there were.
    """

    compiled: Compiled | None
    prepares: bool
    reason: str
    seconds: float
    is_verified: bool = False
    is_read: bool = False
    lasting: str = ""
    unkept: str = ""
    calls: int = 0


_entries: OrderedDict[Any, Entry] = OrderedDict()


def lookup(wish: Wish) -> tuple[Entry, Survey]:
    """The programs of a step, traced where there are none yet, and the tensors that its weights hold.

    Example:
        >>> from raglane.cells import CELLS, Weights
        >>> weights = Weights(torch.zeros(4, 3), torch.zeros(4, 4))
        >>> entry, found = lookup(Wish(CELLS["rnn_tanh"], weights, 3, (4,), 4, torch.float32))
        >>> entry.reason, len(found.leaves)
        ('', 2)
    """
    found = survey(wish.weights)
    key = _key(wish, found)
    entry = _entries.get((key, *found.classes))
    if entry is None:
        entry = _remember((key, *found.classes), _make(wish, found, key))
    return entry, found


def anew(wish: Wish, entry: Entry, found: Survey) -> Entry:
    """Programs that are traced, in place of some that were read from the disk."""
    made = _make(wish, found, None)
    made.lasting, made.unkept = entry.lasting, entry.unkept
    return _remember((_key(wish, found), *found.classes), made)


def forget() -> None:
    """Forget all programs of this process; what is on the disk stays."""
    _entries.clear()


def keep(wish: Wish, entry: Entry, found: Survey) -> None:
    """Write the trace of verified programs to the disk, if they can be kept there and are not there already."""
    if entry.compiled is None or entry.is_read or not entry.lasting:
        return
    try:
        text = stored.written(entry.lasting, entry.prepares, entry.compiled.trace)
        _trace_of(text, wish, found, entry.lasting)  # what nobody could read is not written
    except Unkept as error:
        entry.unkept = error.reason
    else:
        caches.save(KIND, entry.lasting, text)


def _key(wish: Wish, found: Survey) -> tuple[Any, ...]:
    return cell_key(wish.cell), found.key, wish.width, wish.sizes, wish.output, wish.dtype


def _remember(key: tuple[Any, ...], entry: Entry) -> Entry:
    _entries[key] = entry
    while len(_entries) > _LARGEST:
        _entries.popitem(last=False)
    return entry


def _make(wish: Wish, found: Survey, key: tuple[Any, ...] | None) -> Entry:
    """Programs: of a trace that the disk has under a key, or else traced now."""
    start = time.perf_counter()
    lasting, unkept = "", ""
    if key is not None:
        try:
            lasting = lasting_key(key)
        except Unkept as error:
            unkept = error.reason
    entry = _read(wish, found, lasting) if lasting else None
    if entry is None:
        # With what a cell prepares inside, all that depends on a row is computed in one order of sums.
        entry = _try(wish, found, True)
        if entry.compiled is None and _prepares(wish):
            entry = _try(wish, found, False)
    entry.lasting, entry.unkept = lasting, unkept
    entry.seconds = time.perf_counter() - start
    return entry


def _read(wish: Wish, found: Survey, lasting: str) -> Entry | None:
    """Programs of a trace on the disk; None where there is none that holds for this step."""
    text = caches.load(KIND, lasting)
    if text is None:
        return None
    try:
        prepares, trace = _trace_of(text, wish, found, lasting)
    except Unkept:
        return None
    return Entry(Compiled(trace), prepares, "", 0.0, is_read=True)


def _trace_of(text: str, wish: Wish, found: Survey, lasting: str) -> tuple[bool, Trace]:
    with torch.inference_mode(False), torch.no_grad(), plainly():
        leaves = [wish.given(part.detach()) for part in found.leaves]
        widths = wish.width, *(part.shape[1] for part in found.elements)
        return stored.read(text, lasting, stored.Shapes(leaves, widths, wish.sizes, wish.output, wish.dtype))


def _prepares(wish: Wish) -> bool:
    return hasattr(wish.weights, "prepare") if isinstance(wish.cell, ModuleCell) else True


def _try(wish: Wish, found: Survey, prepares: bool) -> Entry:
    # Numbers are computed as in any other call, whatever stands around this one.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), plainly():
        try:
            widths = [wish.width if prepares else _prepared_width(wish), *(part.shape[1] for part in found.elements)]
            step = Step(wish.cell, wish.weights, found, prepares)
            leaves = [wish.given(part.detach()) for part in found.leaves]
            compiled = Compiled(trace(step, leaves, found.leaves, widths, wish.sizes, wish.output, wish.dtype))
        except Refused as refused:
            return Entry(None, prepares, refused.reason, 0.0)
    return Entry(compiled, prepares, "", 0.0)


def plainly() -> Any:
    """Whatever mode of torch's functions is at work, such as the one that computes row by row, is left out."""
    return torch._C.DisableTorchFunction()


def _prepared_width(wish: Wish) -> int:
    """How many columns a cell prepares."""
    dtype = next((part.dtype for part in survey(wish.weights).leaves if part.dtype.is_floating_point), wish.dtype)
    try:
        with torch.no_grad():
            rows = torch.zeros(1, wish.width, dtype=dtype, device="cpu")
            prepared = wish.cell.prepare(wish.weights, rows, torch.tensor([0, 1], device="cpu"))
    except Exception as error:
        raise Refused(f"what it prepares raised {type(error).__name__}: {error}") from error
    return int(prepared.shape[1])
