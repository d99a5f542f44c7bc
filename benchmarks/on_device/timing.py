"""Timing of calls on a device: in turns, warm, and until the device has finished."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from harness.timing import interleave

from on_device.base import Row

__all__ = ["clock_of", "milliseconds", "times_table"]


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock that synchronises with the device."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def milliseconds(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    most_seconds: float,
) -> dict[str, float]:
    """Return the median times of warm calls, which take turns."""
    samples = interleave(calls, rounds, most_seconds=most_seconds, clock=clock_of(device))
    return {name: 1e3 * statistics.median(times) for name, times in samples.items()}


def times_table(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> list[str]:
    """Return a table of milliseconds, or errors, with a line per row.

    Args:
        rows: rows with ``milliseconds`` and ``faults`` by name.
        columns: functions for further columns, by heading, before the times.
    """
    timed = [row for row in rows if "milliseconds" in row]
    names = list(
        dict.fromkeys(
            name for row in timed for name in (*row["milliseconds"], *row.get("faults", {}))
        )
    )
    heads = [*columns, *names]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in timed:
        times, faults = row["milliseconds"], row.get("faults", {})
        cells = [told(row) for told in columns.values()]
        cells += [
            f"{times[name]:.3g}" if name in times else faults.get(name, "-") for name in names
        ]
        lines.append(
            "| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |"
        )
    return lines
