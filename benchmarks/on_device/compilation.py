"""How long kernels and compiled steps take to make, in as many processes as processors; later parts find them made.

Triton and Inductor keep on the disk what they compile.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.pool import AsyncResult
from typing import Any

import torch

from on_device import loops, rivals, speed, waits
from on_device.base import Context, Item, NotHereError, Part, Row
from on_device.layers import LAYERS, LOOPS, build
from raglane.planner import machine

__all__ = ["PART"]

_RIVALS = "kernels by others"


def _prepare(device: torch.device, name: str, sizes: tuple[int, int], resets: bool) -> Row:
    layer: Any = build(name, sizes, device, torch.float32, backend="triton" if device.type == "cuda" else "auto")
    begun = time.monotonic()
    layer.prepare()
    row: Row = {"first use, s": round(time.monotonic() - begun, 1)}
    if resets:
        layer.prepare(resets=True)
    return row


def _compile(device: torch.device, name: str, count: int, hidden: int) -> Row:
    row: Row = {}
    ways, _ = loops.calls_of(device, name, count, hidden)
    for way in ("layer, train", "compiled, train", "compiled, infer"):
        begun = time.monotonic()
        ways[way]()()
        row[f"{way}, s"] = round(time.monotonic() - begun, 1)
    return row


def _try_rivals(device: torch.device, cell: str, batch: int, steps: int) -> Row:
    rivals.measure(device, cell, batch, steps, rounds=1)
    return {}


def _begin() -> None:
    """Set up a process: its own compilers are one process each."""
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _items(context: Context) -> Iterator[Item]:
    if context.device.type != "cuda" and not context.is_rehearsal:
        raise NotHereError("a GPU")
    processes = 1 if context.is_rehearsal else max(1, machine.processors() - 1)
    pool = multiprocessing.get_context("spawn").Pool(processes, _begin)

    def result(made: AsyncResult[Row]) -> Row:
        try:
            return made.get(max(1.0, context.left()))
        except multiprocessing.TimeoutError:
            pool.terminate()
            raise NotHereError("more time") from None

    made = {
        key: pool.apply_async(function, (context.device, *given))
        for key, function, given in _jobs(context.is_rehearsal)
    }
    # What takes longest begins first, and is waited for last.
    for key in sorted(made, key=lambda key: key.startswith(_RIVALS)):
        yield Item(key, partial(result, made[key]))
    pool.close()


def _jobs(is_rehearsal: bool) -> Iterator[tuple[str, Callable[..., Row], tuple[Any, ...]]]:
    """Yield what to compile, in the order of the parts that need it."""
    if is_rehearsal:
        yield "MinGRU H 8", _prepare, ("MinGRU", (8, 8), True)
        return
    for cell in rivals.CELLS:
        yield f"{_RIVALS} for {cell}", _try_rivals, (cell, *rivals.SIZES[0])
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
    return lines + [f"| {row['key']} | {' | '.join(str(row.get(name, '-')) for name in names)} |" for row in rows]


PART = Part("compilation", "how long do kernels take to compile?", _items, _table, share=0.25)
