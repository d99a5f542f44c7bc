"""Programs by what they are made of: each step is traced once in a process."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane.cells.module import ModuleCell
from raglane.cells.spec import CellSpec
from raglane.programs.compiled import Compiled
from raglane.programs.graph import Refused
from raglane.programs.step import Step, trace
from raglane.programs.weights import Survey, cell_key, survey

__all__ = ["Entry", "Wish", "forget", "lookup", "plainly"]

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
        seconds: how long it took to trace and to verify them.
        is_verified: whether they were compared with torch.
    """

    compiled: Compiled | None
    prepares: bool
    reason: str
    seconds: float
    is_verified: bool = False


_entries: OrderedDict[Any, Entry] = OrderedDict()


def lookup(wish: Wish) -> tuple[Entry, Survey]:
    """The programs of a step, traced where there are none yet, and the tensors that its weights hold.

    Raises:
        Refused: the weights hold what no program can follow.

    Example:
        >>> from raglane.cells import CELLS, Weights
        >>> weights = Weights(torch.zeros(4, 3), torch.zeros(4, 4))
        >>> entry, found = lookup(Wish(CELLS["rnn_tanh"], weights, 3, (4,), 4, torch.float32))
        >>> entry.reason, len(found.leaves)
        ('', 2)
    """
    found = survey(wish.weights)
    key = (cell_key(wish.cell), found.key, wish.width, wish.sizes, wish.output, wish.dtype)
    entry = _entries.get(key)
    if entry is None:
        entry = _entries[key] = _make(wish, found)
        while len(_entries) > _LARGEST:
            _entries.popitem(last=False)
    return entry, found


def forget() -> None:
    """Forget all programs of this process."""
    _entries.clear()


def _make(wish: Wish, found: Survey) -> Entry:
    start = time.perf_counter()
    # With what a cell prepares inside, all that depends on a row is computed in one order of sums.
    entry = _try(wish, found, True)
    if entry.compiled is None and _prepares(wish):
        entry = _try(wish, found, False)
    entry.seconds = time.perf_counter() - start
    return entry


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
