"""Facts of the machine: names, sizes, and peak rates."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from on_device.base import Context, Item, NotHereError, Part, Row
from on_device.timing import clock_of
from raglane.native import machine

__all__ = ["PART"]

_SOURCE = Path(__file__).parent / "fma_peak.cpp"
# Seconds after which a rate is precise enough.
_PATIENCE = 1.0
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _names() -> Row:
    return machine.facts(["triton", "numpy"])


def _gpu(context: Context) -> Row:
    if context.device.type != "cuda":
        raise NotHereError("a GPU")
    properties = torch.cuda.get_device_properties(context.device)
    row: Row = {
        "name": properties.name,
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }
    if shutil.which("nvidia-smi") is not None:
        command = [
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm",
            "--format=csv,noheader",
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        row["driver, highest clock"] = told.stdout.strip()
    return row


def _fma(context: Context) -> Row:
    """Return the rate of one thread, and of all threads."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NotHereError("g++")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fma_peak"
        flags = ["-O3", "-march=native", "-ffp-contract=fast"]
        subprocess.run(
            [compiler, *flags, str(_SOURCE), "-o", str(program)], check=True, capture_output=True
        )

        def rates(count: int) -> float:
            running = [
                subprocess.Popen([program], stdout=subprocess.PIPE, text=True) for _ in range(count)
            ]
            return sum(float(process.communicate()[0].split()[0]) for process in running)

        rounds = 1 if context.is_rehearsal else 5
        one = statistics.median(rates(1) for _ in range(rounds))
        every = statistics.median(rates(machine.processors()) for _ in range(rounds))
    return {
        "one thread, GF/s": round(one, 1),
        f"{machine.processors()} processes, GF/s": round(every, 1),
    }


def _rate(context: Context, device: torch.device, work: float, call: Callable[[], object]) -> float:
    """Return the median rate of a call, in billions per second."""
    clock = clock_of(device)
    call()
    seconds: list[float] = []
    # Some dtypes take seconds on some processors.
    while len(seconds) < (3 if context.is_rehearsal else 15) and sum(seconds) < _PATIENCE:
        begun = clock()
        call()
        seconds.append(clock() - begun)
    return work / statistics.median(seconds) / 1e9


def _products(context: Context, device: torch.device) -> Row:
    size = 128 if context.is_rehearsal else 8192 if device.type == "cuda" else 1024
    row: Row = {"size": size}
    for dtype in _DTYPES:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        result = torch.empty_like(left)
        rate = _rate(context, device, 2 * size**3, partial(torch.mm, left, right, out=result))
        row[f"{dtype}".removeprefix("torch.") + ", GF/s"] = round(rate, 1)
    return row


def _copy(context: Context, device: torch.device) -> Row:
    count = 1 << (20 if context.is_rehearsal else 28 if device.type == "cuda" else 26)
    source, target = (torch.ones(count, device=device) for _ in range(2))
    rate = _rate(context, device, 8 * count, partial(target.copy_, source))
    return {"bytes": 4 * count, "read and written, GB/s": round(rate, 1)}


def _items(context: Context) -> Iterator[Item]:
    here = torch.device("cpu")
    yield Item("names", _names)
    yield Item("gpu", partial(_gpu, context))
    if context.device.type == "cuda":
        yield Item("products on the GPU", partial(_products, context, context.device))
        yield Item("copy on the GPU", partial(_copy, context, context.device))
    yield Item("fused multiply-adds", partial(_fma, context))
    yield Item("products", partial(_products, context, here))
    yield Item("copy", partial(_copy, context, here))


def _table(rows: list[Row]) -> list[str]:
    lines = ["| | |", "| --- | --- |"]
    for row in rows:
        facts = {
            name: value
            for name, value in row.items()
            if name not in ("key", "took", "trace", "call")
        }
        lines += [f"| {row['key']}: {name} | {_text(value)} |" for name, value in facts.items()]
    return lines


def _text(value: object) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int | float) and math.isfinite(value)
        else str(value).replace("|", "/")
    )


PART = Part("machine", "what is this machine, and what are its rates?", _items, _table)
