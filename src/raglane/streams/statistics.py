"""Counts of an engine, and the times of its last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

_MEASUREMENTS = 4096


class StepCounts:
    """Counts since the start, and measurements of the last steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.frames = 0
        self.opened = 0
        self.late = 0  # pushes while earlier frames of the stream waited
        self.refused = 0  # pushes and opens
        self.evicted = 0  # streams that were idle
        self.busy_seconds = 0.0  # of the processor, in which the model ran
        self.sizes = deque[float](maxlen=_MEASUREMENTS)  # streams of a step
        self.step_times = deque[float](maxlen=_MEASUREMENTS)
        self.waits = deque[float](maxlen=_MEASUREMENTS)  # from a push to its step

    def counts(self) -> dict[str, Any]:
        """Return the counts since the start."""
        names = ("busy_seconds", "steps", "frames", "opened", "late", "refused", "evicted")
        return {name: getattr(self, name) for name in names}

    def summaries(self) -> dict[str, dict[str, float]]:
        """Return percentiles of the last steps."""
        return {
            "step_streams": _summary(self.sizes, 1),
            "step_ms": _summary(self.step_times, 1e3),
            "queue_ms": _summary(self.waits, 1e3),
        }


def _summary(numbers: Iterable[float], scale: float) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum; zeros without numbers."""
    values = scale * np.fromiter(numbers, np.float64)
    middle, high = np.percentile(values, (50, 99)) if len(values) else (0.0, 0.0)
    return {"p50": float(middle), "p99": float(high), "most": float(values.max(initial=0.0))}
