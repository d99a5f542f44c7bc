"""The memory that torch holds at the peak of a call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from raglane.native import large

__all__ = ["peak_bytes"]

_LOUDNESS = "KINETO_LOG_LEVEL"


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """What a call adds to the memory that torch has allocated, at most, in bytes.

    The scratch of the CPU kernels, at most 256 MB, is not torch's and not counted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    # The profiler reports its own start and end on the error stream, unless it is told not to before its first use.
    said = os.environ.get(_LOUDNESS)
    os.environ[_LOUDNESS] = said or "99"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with large.from_torch(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
                call()
        results: Any = getattr(record.profiler, "kineto_results", None)
        events = [event for event in results.events() if event.name() == "[memory]"]
    finally:
        if said is None:
            del os.environ[_LOUDNESS]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
