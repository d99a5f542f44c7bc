"""The results as text: lines for a terminal, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence

from harness.cases import SUITES
from harness.check import TOLERANCES
from harness.competitors import COMPETITORS
from harness.results import (
    OURS,
    CaseResult,
    Efficiency,
    Row,
    Summary,
    efficiencies,
    summarize,
)
from harness.run import Report

__all__ = ["COLUMNS", "case_line", "csv_text", "heading_line", "markdown", "summary_lines"]

COLUMNS = (
    "suite cell batch hidden input lengths elements longest density mode dtype threads competitor milliseconds ratio "
    "ours_over_this share of_peak floats_per_unit giga_a_second rounds load ahead note"
).split()
"""The columns of the CSV file; a row is one competitor on one case."""

_WIDTHS = (38, 6, 9, 9)


def csv_text(report: Report) -> str:
    """Return all rows of all cases as CSV with the header ``COLUMNS``; missing values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in report.results:
        case, size = result.case, result.case.size
        batch = [case.suite, case.cell, size.batch, size.hidden, size.input, case.lengths.name]
        batch += [
            result.elements,
            result.longest,
            f"{result.density:.4f}",
            case.mode,
            case.dtype,
            case.threads,
        ]
        rate = "" if result.rate is None else f"{result.rate / 1e9:.1f}"
        load = "" if math.isnan(result.load) else f"{result.load:.2f}"
        for row in result.rows:
            numbers = [
                row.milliseconds,
                row.ratio,
                row.of_ours,
                row.share,
                result.of_peak(row),
                row.memory,
            ]
            shown = ["" if number is None else f"{number:.5g}" for number in numbers]
            ahead = (result.ahead or "") if row.competitor == OURS else ""
            writer.writerow(
                [
                    *batch,
                    row.competitor,
                    *shown,
                    rate,
                    result.rounds,
                    load,
                    ahead,
                    row.fault or ("timed once" if row.is_once else ""),
                ]
            )
    return text.getvalue()


def heading_line() -> str:
    """The names of the columns of :func:`case_line`."""
    return _line(
        "case", "mode", "ours", "ratio", "share of the yardstick's rate; the others' time over ours"
    )


def case_line(result: CaseResult) -> str:
    """Return a case in one line: ours, its ratio to the fastest torch variant, its share, and all
    others.

    Example:
        >>> from harness.cases import SIZES, Case
        >>> from harness.lengths import LENGTHS
        >>> case = Case("grid", "gru", SIZES[0], LENGTHS["ewt"], "train", "float32", 1)
        >>> rows = (Row("ours", 2.0, 1.5, 1.0, 0.25), Row("torch-packed", 3.0, 1.0, 2 / 3, 0.17))
        >>> print(case_line(CaseResult(case, 90, 12, 0.9, rows)))
        gru 8x64x64 ewt                        train    2.00 ms   x  1.50  0.25; torch-packed 1.50
    """
    ours = result.row(OURS) or Row(OURS, fault="not run")
    others = [_against(row) for row in result.rows if row.competitor != OURS]
    share = "-" if ours.share is None else f"{ours.share:.2f}"
    rest = "; ".join([share, ", ".join(others)])
    if ours.fault:
        rest += f"  << ours: {ours.fault}"
    if result.ahead is not None:
        rest += f"  << {result.ahead} is ahead"
    if result.is_busy:
        rest += f"  (load {result.load:.1f})"
    name = (
        result.case.name
        if result.case.dtype == "float32"
        else f"{result.case.name} {result.case.dtype}"
    )
    ratio = "-" if ours.ratio is None else f"x{ours.ratio:6.2f}"
    return _line(name, result.case.mode, _amount(ours), ratio, rest)


def summary_lines(report: Report) -> list[str]:
    """Return the means in lines."""
    lines = []
    for entry in summarize(report.results):
        head = (
            f"{entry.suite}, {entry.mode}, {entry.dtype}, {_threads(entry.threads)}, {entry.group}"
        )
        tail = f"mean x{entry.mean:.2f}, worst x{entry.worst:.2f} ({entry.worst_case})"
        lines.append(f"{head}: cases {_cases(entry)}, {tail}" + _behind(entry))
    return lines


def markdown(report: Report) -> str:
    """Return the report as Markdown: the machine, the means, every case, and the method."""
    parts = ["# Recurrent layers: benchmark", ""]
    parts += _table(["the machine", ""], report.facts.items())
    parts += [*(f"- {note}" for note in report.notes), ""]
    busy = [result for result in report.results if result.is_busy]
    if busy:
        parts += [
            f"**Warning: the load was above the number of processors in {len(busy)} of {len(report.results)} cases; "
            "they are marked `busy`. Their times say as much about what else ran.**",
            "",
        ]
    parts += _summary_part(summarize(report.results))
    groups: dict[tuple[str, str, str, int], list[CaseResult]] = {}
    for result in report.results:
        case = result.case
        groups.setdefault((case.suite, case.mode, case.dtype, case.threads), []).append(result)
    for (suite, mode, dtype, threads), results in groups.items():
        parts += [
            f"## {suite}: {mode}, {dtype}, {_threads(threads)}",
            "",
            f"Asks: {SUITES[suite].question}.",
            "",
        ]
        parts += _rate_part(results)
        parts += _cases_part(results)
    parts += _efficiency_part(efficiencies(report.results))
    return "\n".join([*parts, *_method(report)])


def _summary_part(summaries: Sequence[Summary]) -> list[str]:
    rows = [
        [
            entry.suite,
            entry.mode,
            entry.dtype,
            str(entry.threads),
            entry.group,
            _cases(entry),
            f"{entry.mean:.2f}",
            f"{entry.worst:.2f}",
            entry.worst_case,
            "" if entry.behind == 0 else f"**in {entry.behind}**",
        ]
        for entry in summaries
    ]
    if not rows:
        return []
    names = "suite, mode, dtype, threads, cell, cases, geometric mean, worst, which, ours not the fastest".split(
        ", "
    )
    return ["## Ratio of ours to the fastest torch variant", "", *_table(names, rows)]


def _rate_part(results: Sequence[CaseResult]) -> list[str]:
    """Return the machine's rate during some cases."""
    rates = [result.rate / 1e9 for result in results if result.rate is not None]
    if not rates:
        return []
    middle = statistics.median(rates)
    name, unit = results[0].yardstick.name, results[0].yardstick.unit
    name = name[0].upper() + name[1:] if name[0] == "a" else name
    said = (
        f"{name} ran at {middle:,.0f} G{unit}/s meanwhile ({min(rates):,.0f} to {max(rates):,.0f})"
    )
    shares = [
        result.rate / result.peak
        for result in results
        if result.rate is not None and result.peak is not None
    ]
    if shares:
        most = statistics.median(result.peak for result in results if result.peak is not None) / 1e9
        share = statistics.median(shares)
        said += (
            f", {share:.2f} of the peak: fused multiply-adds in registers, {most:,.0f} G{unit}/s"
        )
    return [f"{said}.", ""]


def _cases_part(results: Sequence[CaseResult]) -> list[str]:
    """Return a line for each competitor of each case."""
    is_memory = SUITES[results[0].case.suite].measures_memory
    rows = []
    for result in results:
        for row in result.rows:
            mark = ""
            if row.competitor == OURS and result.ahead is not None:
                mark = f"**not the fastest: {result.ahead} is**"
            marks = [
                mark,
                f"**{row.fault}**" if row.fault else "",
                "timed once" if row.is_once else "",
                "busy" if result.is_busy else "",
            ]
            rows.append(
                [
                    f"{result.case.cell} {result.case.size}",
                    f"{result.case.lengths.name} ({result.elements:,}; {result.density:.2f})",
                    f"**{row.competitor}**" if row.competitor == OURS else row.competitor,
                    _number(row.memory if is_memory else row.milliseconds),
                    _number(row.ratio),
                    _number(row.of_ours),
                    *(
                        []
                        if is_memory
                        else [_number(row.share), _number(result.of_peak(row)), str(result.rounds)]
                    ),
                    " ".join(filter(None, marks)),
                ]
            )
    amount = "floats of N*H" if is_memory else "ms"
    names = ["cell BxHxD", "lengths (N; density)", "who", amount, "ratio", "ours over this"]
    return _table([*names, *([] if is_memory else ["share", "of peak", "rounds"]), ""], rows)


def _efficiency_part(found: Sequence[Efficiency]) -> list[str]:
    if not found:
        return []
    counts = sorted({count for efficiency in found for count in efficiency.milliseconds})
    rows = []
    for efficiency in found:
        case, shares = efficiency.case, efficiency.shares
        cells = [
            f"{efficiency.milliseconds[count]:.3g} ({shares[count]:.2f})" if count in shares else ""
            for count in counts
        ]
        rows.append([case.suite, case.name, case.mode, case.dtype, *cells])
    names = ["suite", "case", "mode", "dtype", *(_threads(count) for count in counts)]
    note = (
        "Milliseconds of ours, and its parallel efficiency: speed-up over threads. Not interleaved."
    )
    return ["## Threads", "", note, "", *_table(names, rows)]


def _method(report: Report) -> list[str]:
    """Return the meaning of columns, and the method."""
    asked = [
        COMPETITORS[name]
        for name in dict.fromkeys(row.competitor for r in report.results for row in r.rows)
    ]
    dtypes = {result.case.dtype for result in report.results}
    tolerances = [f"{name} {bound:.0e}" for name, bound in _tolerances().items() if name in dtypes]
    lengths = {
        result.case.lengths.name: result.case.lengths.description for result in report.results
    }
    return [
        "## How it was measured",
        "",
        "- ms: the median over the rounds; slow cases have fewer, at least three. All take turns in every round, "
        "another one first each time; a sample of short calls is as many as last 5 ms. Everything is warm. A "
        "competitor that takes over 10 s is timed once. Only the layer is timed; its input was padded, sorted or "
        "packed before. Training is forward and backward to weights and input, with a fixed gradient on the real "
        "outputs.",
        "- ratio: the time of the fastest torch variant over this one, the median of the rounds' own ratios. Above 1 "
        "is faster than torch. ours over this: the time of ours over this one's, likewise.",
        "- share: operations of the elements that exist in matrix products (for an LSTM 2 N 4 H (D + H) forward, "
        "three times that for training) per second, over the rate of torch.mm on 1024 x 256 x 1024 of the same dtype "
        "in the same rounds. In the suite loop: bytes read and written, over the rate of a copy of 64 MiB.",
        "- of peak: the same operations per second, over those of fused multiply-adds in registers, on as many "
        "threads and in the same rounds, which no product can exceed.",
        "- Before it was timed, every competitor's output, final states and gradients were compared with the kernel "
        "`reference` in float64, on the real elements; allowed, as a share of the largest number: "
        f"{', '.join(tolerances) or '-'}. A wrong answer is not timed. The final states of torch on padding are not "
        "compared.",
        *(f"- lengths {name}: {description}." for name, description in lengths.items()),
        *(f"- {competitor.name}: {competitor.description}." for competitor in asked),
        "",
    ]


def _tolerances() -> dict[str, float]:
    return {str(dtype).removeprefix("torch."): bound for dtype, bound in TOLERANCES.items()}


def _table(names: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

    return [line(names), "|" + " --- |" * len(names), *map(line, rows), ""]


def _line(name: str, mode: str, amount: str, ratio: str, rest: str) -> str:
    first, second, third, fourth = _WIDTHS
    return f"{name:{first}} {mode:{second}} {amount:>{third}} {ratio:>{fourth}}  {rest}"


def _amount(row: Row) -> str:
    if row.memory is not None:
        return f"{row.memory:.1f} N*H"
    if row.milliseconds is None:
        return "-"
    return (
        f"{row.milliseconds:.2f} ms"
        if row.milliseconds >= 1
        else f"{1e3 * row.milliseconds:.0f} us"
    )


def _against(row: Row) -> str:
    if row.fault:
        return f"{row.competitor} {row.fault.partition(':')[0]}"
    return (
        f"{row.competitor} {1 / row.of_ours:.2f}"
        if row.of_ours
        else f"{row.competitor} {_amount(row)}"
    )


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _cases(entry: Summary) -> str:
    missing = f", {entry.missing} without a ratio" if entry.missing else ""
    return f"{entry.count}{missing}"


def _behind(entry: Summary) -> str:
    return f"  << ours is not the fastest in {entry.behind}" if entry.behind else ""
