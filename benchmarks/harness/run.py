"""Run cases: check every competitor, time the correct ones, and collect results."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from harness import memory
from harness.batch import Batch
from harness.cases import SUITES, Case, operations, streamed
from harness.check import find_fault
from harness.competitors import COMPETITORS, RIVALS, ours
from harness.competitors.base import Answer, Competitor, Runner
from harness.results import OURS, CaseResult, Row, rows_of
from harness.timing import YARDSTICKS, interleave, peak
from raglane.native import machine

__all__ = ["Report", "Truths", "installed", "measure", "measure_case"]

_YARDSTICK = "yardstick"
_PEAK = "peak"
# The most characters of an error in a table.
_LONGEST_FAULT = 160
# A competitor that takes longer is timed once, warm, rather than in every round.
_SLOW_SECONDS = 10.0
# The seconds of a round above which a case has fewer rounds.
_ROUND_SECONDS = 1.2

_Result = TypeVar("_Result")


@dataclass
class Report:
    """A run of the benchmark.

    Attributes:
        facts: facts of the machine by name.
        competitors: the competitors of ours.
        notes: missing competitors, the backend of ours, and cases that were not measured.
        results: one per case.
    """

    facts: dict[str, str]
    competitors: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """The failed checks of Raglane, one line each."""
        return [
            f"{result.case.name}, {result.case.mode}, {result.case.dtype}: {row.competitor}: {row.fault}"
            for result in self.results
            for row in result.rows
            if row.fault and COMPETITORS[row.competitor].family == OURS
        ]


def installed(names: Iterable[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the competitors that are installed, and a line on each that is not.

    Example:
        >>> installed(["torch-packed"])
        (('torch-packed',), [])
    """
    there, lines = [], []
    for name in names:
        missing = [
            module
            for module in COMPETITORS[name].modules
            if importlib.util.find_spec(module) is None
        ]
        if missing:
            lines.append(
                f"{name} takes no part: {', '.join(missing)} not installed. Fix: pip install 'raglane[bench]'"
            )
        else:
            there.append(name)
    return tuple(there), lines


def measure(
    cases: Sequence[Case],
    competitors: Sequence[str] = RIVALS,
    *,
    rounds: int = 7,
    watch: Callable[[CaseResult], None] | None = None,
) -> Report:
    """Run cases one after the other."""
    there, notes = installed(competitors)
    packages = dict.fromkeys(module for name in there for module in COMPETITORS[name].modules)
    report = Report(machine.facts(packages), there, notes)
    report.facts["load before"] = f"{machine.load():.2f}"
    threads = torch.get_num_threads()
    choices: dict[str, None] = {}
    truths = Truths()
    try:
        for case in cases:
            if SUITES[case.suite].measures_memory and not memory.is_measurable():
                report.notes.append(
                    f"{case.name}: this system does not report a process's peak of memory"
                )
                continue
            torch.set_num_threads(case.threads)
            choices[f"ours in {case.dtype}: {ours.choice_of(Batch.of(case))}"] = None
            result = measure_case(case, there, rounds, truths)
            report.results.append(result)
            if watch is not None:
                watch(result)
    finally:
        torch.set_num_threads(threads)
    report.notes += choices
    report.facts["load after"] = f"{machine.load():.2f}"
    return report


def measure_case(
    case: Case, competitors: Sequence[str], rounds: int, truths: Truths | None = None
) -> CaseResult:
    """Run one case with torch's number of threads."""
    batch = Batch.of(case)
    timed: dict[str, Any] = {}
    if SUITES[case.suite].measures_memory:
        rows = _memory_rows(case, competitors)
    else:
        names = [OURS, *SUITES[case.suite].competitors, *competitors]
        able = [COMPETITORS[name] for name in names if COMPETITORS[name].runs(case)]
        rows, timed = _timed_rows(case, batch, able, rounds, Truths() if truths is None else truths)
    average = machine.load()
    return CaseResult(
        case,
        batch.elements,
        batch.longest,
        batch.density,
        tuple(rows),
        load=average,
        is_busy=machine.is_busy(average),
        **timed,
    )


class Truths:
    """The reference kernel's answers, cached so that those of training serve inference too."""

    def __init__(self) -> None:
        self._name = ""
        self._answers: dict[tuple[object, ...], Answer] = {}

    def of(self, case: Case, batch: Batch) -> Answer:
        """Return the answer for a batch of a case."""
        if case.name != self._name:
            self._answers.clear()
            self._name = case.name
        # Keyed by bits: a batch rounded to bfloat16 and its float32 copy are equal.
        key = (batch.cell, batch.dtype, *batch.lengths.tolist())
        known = self._answers.get((*key, "train"))
        if case.mode == "infer" and known is not None:
            return replace(known, gradients={})
        if (*key, case.mode) not in self._answers:
            self._answers[(*key, case.mode)] = ours.reference(batch, case.mode)
        return self._answers[(*key, case.mode)]


def _timed_rows(
    case: Case, batch: Batch, competitors: Sequence[Competitor], rounds: int, truths: Truths
) -> tuple[list[Row], dict[str, Any]]:
    """Time all competitors; return their rows and the other attributes of :class:`CaseResult`."""
    yardstick = YARDSTICKS[SUITES[case.suite].yardstick]
    rows: dict[str, Row] = {}
    ready: dict[str, Runner] = {}
    once: dict[str, float] = {}
    work: dict[str, int] = {}
    for competitor in competitors:
        name, view = competitor.name, competitor.view(batch)
        try:
            runner = competitor.prepare(view, case.mode, case.threads)
            seconds, answer = _clock(runner.answer)
            fault = find_fault(answer, truths.of(case, view), view.dtype)
            if fault is None and seconds > _SLOW_SECONDS:
                once[name], _ = _clock(runner.call)
        # Any error ends only this row.
        except Exception as error:
            fault = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[
                :_LONGEST_FAULT
            ]
        rows[name] = Row(name, fault=fault or "")
        if fault is None:
            if (done := _work(case, view, name)) is not None:
                work[name] = done
            if name not in once:
                ready[name] = runner
    calls = {name: runner.call for name, runner in ready.items()}
    # Right after ours, because the threads of some engines stay active after their turn.
    first = next(iter(calls), None)
    turns = {name: call for name, call in calls.items() if name == first}
    turns |= {_YARDSTICK: yardstick.prepare(batch.dtype)}
    most = peak(batch.dtype) if yardstick.unit == "F" else None
    turns |= {_PEAK: most} if most is not None else {}
    turns |= calls
    samples = interleave(turns, rounds, most_seconds=rounds * _ROUND_SECONDS)
    lasted = samples.pop(_YARDSTICK)
    timed: dict[str, Any] = {
        "rate": yardstick.rate(statistics.median(lasted)),
        "rounds": len(lasted),
    }
    if most is not None:
        timed["peak"] = most() / statistics.median(samples.pop(_PEAK))
    samples |= {name: [seconds] * len(lasted) for name, seconds in once.items()}
    for row in rows_of(samples, work, timed["rate"]):
        rows[row.competitor] = replace(row, is_once=row.competitor in once)
    return list(rows.values()), timed


def _work(case: Case, view: Batch, name: str) -> int | None:
    """Return the work of a call in the unit of the suite's yardstick, or None if it does not
    apply.
    """
    if SUITES[case.suite].yardstick == "gemm":
        return operations(view.cell, case.size, case.mode) * view.elements
    return (
        streamed(view.cell, case.size) * view.dtype.itemsize * view.elements
        if name == "ours-loop"
        else None
    )


def _clock(call: Callable[[], _Result]) -> tuple[float, _Result]:
    """Return the seconds of a call, and its result."""
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def _memory_rows(case: Case, competitors: Sequence[str]) -> list[Row]:
    """Measure the memory of each competitor in a separate process."""
    names = [OURS, *(name for name in competitors if COMPETITORS[name].family == "torch")]
    held: dict[str, float] = {}
    faults: dict[str, str] = {}
    for name in names:
        try:
            held[name] = memory.peak_floats(case, name)
        except Exception as error:
            faults[name] = f"failed: {' '.join(str(error).split())}"[:_LONGEST_FAULT]
    best = min((floats for name, floats in held.items() if name != OURS), default=None)
    return [
        Row(
            name,
            memory=held.get(name),
            ratio=None if best is None or name not in held else best / held[name],
            of_ours=held[OURS] / held[name] if OURS in held and name in held else None,
            fault=faults.get(name, ""),
        )
        for name in names
    ]
