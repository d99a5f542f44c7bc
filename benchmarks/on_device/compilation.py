"""How long kernels and compiled steps take to make, in as many processes as processors; later parts
find them made.

Triton and Inductor keep on the disk what they compile.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from multiprocessing.pool import AsyncResult
from typing import Any

import torch

from on_device import loops, rivals, speed, waits
from on_device.base import Context, Item, NotHereError, Part, Row
from on_device.layers import LAYERS, LOOPS, build
from raglane.native import machine

__all__ = ["PART"]

# TorchRL compiles 25 kernels for its GRU, one after the other.
_SHARES = 10


def _prepare(device: torch.device, name: str, sizes: tuple[int, int], resets: bool) -> Row:
    layer: Any = build(
        name, sizes, device, torch.float32, backend="triton" if device.type == "cuda" else "auto"
    )
    begun = time.monotonic()
    layer.warm_up()
    row: Row = {"first use, s": round(time.monotonic() - begun, 1)}
    if resets:
        layer.warm_up(resets=True)
    return row


def _compile(device: torch.device, name: str, count: int, hidden: int) -> Row:
    row: Row = {}
    ways, _ = loops.calls_of(device, name, count, hidden)
    for way in ("layer, train", "compiled, train", "compiled, infer"):
        begun = time.monotonic()
        ways[way]()()
        row[f"{way}, s"] = round(time.monotonic() - begun, 1)
    return row


def _begin() -> None:
    """Set up a process: its own compilers are one process each."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


class _Pool:
    """The processes of the part, begun with its first job."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._made: dict[str, AsyncResult[Row]] = {}

    def begin(
        self, context: Context, key: str, function: Callable[..., Row], given: tuple[Any, ...]
    ) -> None:
        if self._pool is None:
            processes = 1 if context.is_rehearsal else max(1, machine.processors() - 1)
            self._pool = multiprocessing.get_context("spawn").Pool(processes, _begin)
        self._made[key] = self._pool.apply_async(function, (context.device, *given))

    def result(self, context: Context, key: str) -> Row:
        try:
            return self._made[key].get(max(1.0, context.left()))
        except multiprocessing.TimeoutError:
            raise NotHereError("more time") from None

    def end(self) -> None:
        """End the processes, which would disturb what is timed later."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
        self._pool = None


_POOL = _Pool()


def _items(context: Context) -> Iterator[Item]:
    if context.device.type != "cuda" and not context.is_rehearsal:
        raise NotHereError("a GPU")
    for key, function, given in _jobs(context.is_rehearsal):
        begin = partial(_POOL.begin, context, key, function, given)
        yield Item(key, partial(_POOL.result, context, key), begin)


def _jobs(is_rehearsal: bool) -> Iterator[tuple[str, Callable[..., Row], tuple[Any, ...]]]:
    """Yield what to compile, in the order of the parts that need it."""
    if is_rehearsal:
        yield "MinGRU H 8", _prepare, ("MinGRU", (8, 8), True)
        return
    for share in range(_SHARES) if find_spec("torchrl") is not None else ():
        yield f"GRU of TorchRL, {share + 1} of {_SHARES}", rivals.compile_torchrl, (share, _SHARES)
    for hidden in speed.TRITON:
        for name in speed.CELLS:
            yield f"{name} H {hidden}", _prepare, (name, (hidden, hidden), hidden == rivals.HIDDEN)
    for count, hidden in loops.SIZES:
        for name in LOOPS:
            yield f"{name} H {hidden}", _compile, (name, count, hidden)
    for name in LAYERS:
        yield f"{name} H {waits.SIZES[1]}", _prepare, (name, waits.SIZES, True)


def _table(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row if name.endswith(", s")))
    lines = [f"| layer | {' | '.join(names)} |", "|" + " --- |" * (len(names) + 1)]
    return lines + [
        f"| {row['key']} | {' | '.join(str(row.get(name, '-')) for name in names)} |"
        for row in rows
    ]


PART = Part(
    "compilation", "how long do kernels take to compile?", _items, _table, share=0.3, end=_POOL.end
)
