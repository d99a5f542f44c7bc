"""Time several calls in turns, warm, and long enough per sample."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from raglane.native.library import library, missing_kernels

__all__ = ["YARDSTICKS", "Yardstick", "interleave", "peak"]

# A sample lasts at least this long: shorter calls are repeated.
_SAMPLE_SECONDS = 0.01
# Pauses before a sample, until one passes in which the process uses no processor: threads of the
# previous call go to sleep in the first, and JAX frees memory for up to 50 ms after a training
# step.
_PAUSE_SECONDS = 0.02
_IDLE_SECONDS = 0.001
_MOST_PAUSES = 50
# A shorter call runs this long before its sample, until caches are warm and threads run on separate
# processors.
_WARM_SECONDS = 0.015
_LONG_SECONDS = 1.0
_FEWEST_ROUNDS = 3
_GEMM = (1024, 256, 1024)
_COPY_BYTES = 64 << 20
_PEAK_ROUNDS = 100_000


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    most_seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time calls round by round; the first call of a round rotates.

    Example:
        >>> samples = interleave({"sum": lambda: sum(range(100)), "nothing": lambda: None}, 3)
        >>> {name: len(times) for name, times in samples.items()}
        {'sum': 3, 'nothing': 3}
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        estimates = {name: _warm_up(calls[name], clock) for name in names}
        begun = clock()
        for number in range(rounds):
            if number >= _FEWEST_ROUNDS and clock() - begun > most_seconds:
                break
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                samples[name].append(_sample(calls[name], estimates[name], clock))
    finally:
        if was_enabled:
            gc.enable()
    return samples


@dataclass(frozen=True)
class Yardstick:
    """An operation that torch runs at the machine's rate, with which the rates of calls are
    compared.

    Attributes:
        name: its name.
        work: the work of a call, in the unit.
        unit: floating-point operations or bytes.
        prepare: from a dtype to the call.
    """

    name: str
    work: float
    unit: str
    prepare: Callable[[torch.dtype], Callable[[], object]]

    def rate(self, seconds: float) -> float:
        """Return the work per second from the seconds of a call.

        Example:
            >>> YARDSTICKS["gemm"].rate(0.001) == 2 * 1024 * 256 * 1024 * 1000
            True
        """
        return self.work / seconds


def _gemm(dtype: torch.dtype) -> Callable[[], object]:
    rows, inner, columns = _GEMM
    left, right = (
        torch.randn(rows, inner, device="cpu").to(dtype),
        torch.randn(inner, columns, device="cpu").to(dtype),
    )
    result = left.new_empty(rows, columns)

    def call() -> object:
        with torch.no_grad():
            return torch.mm(left, right, out=result)

    return call


def _copy(dtype: torch.dtype) -> Callable[[], object]:
    count = _COPY_BYTES // dtype.itemsize
    source, target = (
        torch.ones(count, dtype=dtype, device="cpu"),
        torch.zeros(count, dtype=dtype, device="cpu"),
    )
    return lambda: target.copy_(source)


YARDSTICKS = {
    "gemm": Yardstick("torch.mm on 1024 x 256 x 1024", 2 * math.prod(_GEMM), "F", _gemm),
    # Read once and written once.
    "copy": Yardstick("a copy of 64 MiB", 2 * _COPY_BYTES, "B", _copy),
}
"""All yardsticks by name."""


def peak(dtype: torch.dtype) -> Callable[[], int] | None:
    """Return a function that measures the peak rate of products: fused multiply-adds that read no
    memory.

    Example:
        >>> call = peak(torch.float32)
        >>> call is None or call() > 0
        True
    """
    if missing_kernels() is not None:
        return None
    kernels = library()
    return lambda: kernels.multiply_registers(dtype, _PEAK_ROUNDS)


def _warm_up(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Run a call until it is warm, and return its estimated time; a long one is warm after one
    run.
    """
    first = _time(call, 1, clock)
    if first > _LONG_SECONDS:
        return first
    call()
    return _time(call, 1, clock)


def _sample(call: Callable[[], object], estimate: float, clock: Callable[[], float]) -> float:
    """Return the seconds per call of a sample."""
    for _ in range(_MOST_PAUSES):
        used = time.process_time()
        time.sleep(_PAUSE_SECONDS)
        if time.process_time() - used < _IDLE_SECONDS:
            break
    if estimate < _WARM_SECONDS:
        until = clock() + _WARM_SECONDS
        call()
        while clock() < until:
            call()
    repeats = max(1, min(10_000, math.ceil(_SAMPLE_SECONDS / max(estimate, 1e-7))))
    return _time(call, repeats, clock)


def _time(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    begun = clock()
    for _ in range(repeats):
        call()
    return (clock() - begun) / repeats
