"""The CPU kernels on 1 to 16 threads, against torch on as many."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness.cases import Case, Size
from harness.competitors import TORCH
from harness.lengths import LENGTHS
from harness.run import Truths, measure_case

from on_device.base import Context, Item, NotHereError, Part, Row
from raglane.native import machine, missing_kernels

__all__ = ["PART", "efficiencies"]

_THREADS, _FEWEST = (1, 2, 4, 8, 16), 4
_ROUNDS = 5
_OURS = "ours"
_TRUTHS = Truths()


def _run(case: Case) -> Row:
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        result = measure_case(case, TORCH, _ROUNDS, _TRUTHS)
    finally:
        torch.set_num_threads(before)
    found: Row = {
        "case": f"{case.name} {case.mode}",
        "threads": case.threads,
        "batch": case.size.batch,
        "milliseconds": {
            row.competitor: row.milliseconds for row in result.rows if row.milliseconds is not None
        },
        "load": result.load,
    }
    faults = {row.competitor: row.fault for row in result.rows if row.fault}
    return found | (
        {"fault": faults[_OURS]} if _OURS in faults else {"faults": faults} if faults else {}
    )


def _items(context: Context) -> Iterator[Item]:
    reason = missing_kernels()
    if reason is not None:
        raise NotHereError(f"the cpu kernels: {reason}")
    if machine.processors() < _FEWEST and not context.is_rehearsal:
        raise NotHereError(f"{_FEWEST} processors; this machine has {machine.processors()}")
    counts = [count for count in _THREADS if count <= machine.processors()]
    sizes = [(4, 8)] if context.is_rehearsal else [(256, 128), (32, 128), (256, 512), (32, 512)]
    for batch, hidden in sizes:
        for cell in ("lstm",) if context.is_rehearsal else ("lstm", "gru"):
            for mode in ("train", "infer"):
                # The extremes first, because they are the most informative.
                for threads in sorted(counts, key=lambda count: (1 < count < max(counts), count)):
                    case = Case(
                        "grid",
                        cell,
                        Size(batch, hidden, hidden),
                        LENGTHS["lognormal"],
                        mode,
                        "float32",
                        threads,
                    )
                    yield Item(f"{case.name} {mode} {threads}", partial(_run, case))


def efficiencies(rows: list[Row]) -> dict[str, dict[int, tuple[float, float, float | None]]]:
    """Return for each case by threads: milliseconds of ours, parallel efficiency, and torch's
    fastest over ours.
    """
    found: dict[str, dict[int, tuple[float, float, float | None]]] = {}
    for name in dict.fromkeys(row["case"] for row in rows if "case" in row):
        times = {row["threads"]: row["milliseconds"] for row in rows if row.get("case") == name}
        times = {threads: each for threads, each in times.items() if _OURS in each}
        if 1 not in times:
            continue
        one = times[1][_OURS]
        found[name] = {}
        for threads, each in sorted(times.items()):
            others = [time for who, time in each.items() if who != _OURS]
            ratio = min(others) / each[_OURS] if others else None
            found[name][threads] = (each[_OURS], one / (threads * each[_OURS]), ratio)
    return found


def _table(rows: list[Row]) -> list[str]:
    found = efficiencies(rows)
    counts = sorted({threads for each in found.values() for threads in each})
    lines = [
        "Milliseconds of ours (parallel efficiency; the fastest of torch's ways over ours).",
        "",
        "| case | "
        + " | ".join("1 thread" if count == 1 else f"{count} threads" for count in counts)
        + " |",
        "|" + " --- |" * (len(counts) + 1),
    ]
    for name, each in found.items():
        cells = [_cell(each[count]) if count in each else "" for count in counts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(found: tuple[float, float, float | None]) -> str:
    time, efficiency, ratio = found
    return f"{time:.3g} ({efficiency:.2f}; {'-' if ratio is None else f'{ratio:.2f}'})"


PART = Part("scaling", "how do the cpu kernels scale over threads?", _items, _table)
