"""Measurements of cases, and figures derived from them: ratios, shares of the machine's rate,
means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.cases import SUITES, Case
from harness.competitors import COMPETITORS
from harness.timing import YARDSTICKS, Yardstick

__all__ = [
    "OURS",
    "CaseResult",
    "Efficiency",
    "Row",
    "Summary",
    "efficiencies",
    "rows_of",
    "summarize",
]

OURS = "ours"


@dataclass(frozen=True)
class Row:
    """One competitor on one case.

    Attributes:
        competitor: a key of ``COMPETITORS``.
        milliseconds: the median time of a call over the rounds; None if it was not timed.
        ratio: the time of the fastest torch variant over this one's: above 1 this one is faster.
        of_ours: the time of ``ours`` over this one's.
        share: the share of the rate of the suite's yardstick, counting real elements.
        memory: the peak memory in floats of N * H, if memory is measured.
        fault: the reason why it was not timed, or an empty string.
        is_once: True if it was so slow that it was timed only once.
    """

    competitor: str
    milliseconds: float | None = None
    ratio: float | None = None
    of_ours: float | None = None
    share: float | None = None
    memory: float | None = None
    fault: str = ""
    is_once: bool = False


@dataclass(frozen=True)
class CaseResult:
    """All rows of a case.

    Attributes:
        case: the case.
        elements, longest, density: properties of its batch.
        rows: one per competitor.
        rate: the rate of the suite's yardstick in the same rounds, per second; None if no time was
            measured.
        rounds: the number of rounds.
        load: the load average of the machine after the case; NaN on systems without one.
        is_busy: True if the load was above the number of processors, so that the times are
            unreliable.
        peak: operations per second of fused multiply-adds that read no memory, in the same rounds:
            an upper bound for products. None if the yardstick is not a product, or the kernels are
            not built.
    """

    case: Case
    elements: int
    longest: int
    density: float
    rows: tuple[Row, ...]
    rate: float | None = None
    rounds: int = 0
    load: float = math.nan
    is_busy: bool = False
    peak: float | None = None

    @property
    def yardstick(self) -> Yardstick:
        """The yardstick of the suite."""
        return YARDSTICKS[SUITES[self.case.suite].yardstick]

    def row(self, competitor: str) -> Row | None:
        """Return the row of a competitor, or None."""
        return next((row for row in self.rows if row.competitor == competitor), None)

    def of_peak(self, row: Row) -> float | None:
        """Return the share of :attr:`peak` that a row reaches, counting real elements."""
        if row.share is None or self.rate is None or self.peak is None:
            return None
        return row.share * self.rate / self.peak

    @property
    def ratio(self) -> float | None:
        """The speed, or inverse memory, of ``ours`` relative to the best torch variant."""
        ours = self.row(OURS)
        return None if ours is None else ours.ratio

    @property
    def ahead(self) -> str | None:
        """The first competitor that is ahead of ``ours``; None if there is none, or ours was not
        timed.
        """
        rivals = [
            (row.of_ours, row.competitor)
            for row in self.rows
            if row.of_ours is not None and COMPETITORS[row.competitor].family != OURS
        ]
        most, name = max(rivals, default=(0.0, ""))
        return name if most > 1 else None


def rows_of(
    samples: Mapping[str, Sequence[float]], work: Mapping[str, int], rate: float
) -> list[Row]:
    """Return the rows of the timed competitors.

    A ratio is taken in each round, which a busy machine disturbs least, and the median of the
    rounds is reported.

    Example:
        >>> rows = rows_of({"ours": [1.0, 1.0], "torch-packed": [4.0, 2.0]}, {"ours": 1, "torch-packed": 1}, rate=1.0)
        >>> [(row.competitor, row.milliseconds, row.ratio) for row in rows]
        [('ours', 1000.0, 3.0), ('torch-packed', 3000.0, 1.0)]
    """
    medians = {name: statistics.median(times) for name, times in samples.items()}
    torch = [name for name in samples if COMPETITORS[name].family == "torch"]
    best = samples[min(torch, key=medians.__getitem__)] if torch else None
    return [
        Row(
            name,
            milliseconds=1e3 * medians[name],
            ratio=_ratio(best, times),
            of_ours=_ratio(samples.get(OURS), times),
            share=work[name] / medians[name] / rate if name in work else None,
        )
        for name, times in samples.items()
    ]


def _ratio(over: Sequence[float] | None, under: Sequence[float]) -> float | None:
    if over is None:
        return None
    return statistics.median(first / second for first, second in zip(over, under, strict=True))


@dataclass(frozen=True)
class Summary:
    """The ratios of ``ours`` over some cases.

    Attributes:
        suite, mode, dtype, threads: common to the cases.
        group: a cell, ``all``, or ``all, H <= 128``.
        count: the number of cases with a ratio.
        mean: the geometric mean of the ratios.
        worst: the smallest ratio.
        worst_case: the name of its case.
        behind: the number of cases in which a competitor is ahead.
        missing: the number of cases without a ratio.
    """

    suite: str
    mode: str
    dtype: str
    threads: int
    group: str
    count: int
    mean: float
    worst: float
    worst_case: str
    behind: int
    missing: int


def summarize(results: Iterable[CaseResult]) -> list[Summary]:
    """Return geometric means and worst cases of ``ours`` by suite, mode, dtype and threads: per
    cell, and of all.
    """
    groups: dict[tuple[str, str, str, int], list[CaseResult]] = {}
    for result in results:
        case = result.case
        if not SUITES[case.suite].measures_memory:
            groups.setdefault((case.suite, case.mode, case.dtype, case.threads), []).append(result)
    summaries = []
    for key, members in groups.items():
        cells = list(dict.fromkeys(result.case.cell for result in members))
        chosen = {
            cell: [result for result in members if result.case.cell == cell] for cell in cells
        }
        small = [result for result in members if result.case.size.hidden <= 128]
        if len(cells) > 1:
            chosen["all"] = members
        if 0 < len(small) < len(members):
            chosen["all, H <= 128"] = small
        summaries += [_summary(key, group, part) for group, part in chosen.items()]
    return summaries


def _summary(key: tuple[str, str, str, int], group: str, results: Sequence[CaseResult]) -> Summary:
    ratios = [(result.ratio, result.case.name) for result in results if result.ratio is not None]
    worst, worst_case = min(ratios, default=(math.nan, "-"))
    mean = (
        math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios)) if ratios else math.nan
    )
    behind = sum(result.ahead is not None for result in results)
    return Summary(
        *key, group, len(ratios), mean, worst, worst_case, behind, len(results) - len(ratios)
    )


@dataclass(frozen=True)
class Efficiency:
    """Times of ``ours`` on one case by the number of threads.

    Attributes:
        case: with the fewest threads.
        milliseconds: by the number of threads.
    """

    case: Case
    milliseconds: dict[int, float] = field(default_factory=dict)

    @property
    def shares(self) -> dict[int, float]:
        """The parallel efficiency by the number of threads, relative to the fewest threads.

        Example:
            >>> from harness.cases import SIZES
            >>> from harness.lengths import LENGTHS
            >>> case = Case("grid", "gru", SIZES[0], LENGTHS["ewt"], "train", "float32", 1)
            >>> Efficiency(case, {1: 8.0, 4: 2.5}).shares
            {1: 1.0, 4: 0.8}
        """
        fewest = min(self.milliseconds)
        whole = fewest * self.milliseconds[fewest]
        return {threads: whole / (threads * time) for threads, time in self.milliseconds.items()}


def efficiencies(results: Iterable[CaseResult]) -> list[Efficiency]:
    """Return the scaling of ``ours`` on cases that were measured with several numbers of
    threads.
    """
    found: dict[tuple[object, ...], Efficiency] = {}
    for result in results:
        case, ours = result.case, result.row(OURS)
        if ours is not None and ours.milliseconds is not None:
            key = (case.suite, case.cell, case.size, case.lengths, case.mode, case.dtype)
            found.setdefault(key, Efficiency(case)).milliseconds[case.threads] = ours.milliseconds
    return [efficiency for efficiency in found.values() if len(efficiency.milliseconds) > 1]
