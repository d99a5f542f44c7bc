"""Charts of the tables of results, as HTML: a line of dots per name, on the axis of the numbers of
one column.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TABLE = re.compile(r"(?:^\|.*\n)+", flags=re.MULTILINE)
_SIZE = re.compile(r" (\(.*|\d+x\d+x\d+)$")


@dataclass(frozen=True)
class Chart:
    """The chart of every table with these columns: that of the numbers, and those that name a
    line.
    """

    value: str
    names: tuple[str, ...]
    text: str
    is_log: bool = True
    parity: float | None = 1  # the place of the vertical line


CHARTS = (
    Chart(
        "ratio",
        ("cell BxHxD", "lengths (N; density)", "who"),
        "PyTorch's fastest time over Raglane's: one dot per size, the line is equal speed",
    ),
    Chart(
        "us per stream",
        ("way",),
        "Microseconds per stream and frame: one dot per number of streams",
        parity=None,
    ),
    Chart(
        "other / this",
        ("cell", "lengths"),
        "The other version's time over this one's: one dot per size",
    ),
    Chart(
        "time over that without",
        ("cell", "B, H, D"),
        "Time over that without recomputation: one dot per setting",
    ),
    Chart(
        "float32 / int8",
        ("layer",),
        "Time in float32 over that with int8 weights: one dot per size",
    ),
    Chart(
        "times as fast",
        ("layer", "H"),
        "Plain torch's time over that now: one dot per mode and list of lengths",
    ),
    Chart(
        "program / by hand",
        ("mode",),
        "Time as a program over that of the kernel: one dot per size",
    ),
    Chart("torch / ours", ("layer", "mode"), "PyTorch's fastest time over Raglane's"),
    Chart(
        "cell / ours",
        ("layer", "H"),
        "The time of torch's cell over that of layer.step: one dot per batch size",
    ),
    Chart(
        "forward ratio",
        ("function",),
        "Raglane's time over torch's, forward: one dot per size, layout and threads",
    ),
    Chart(
        "median miss",
        ("list",),
        "The median error of the predicted times, in percent: one dot per cell",
        is_log=False,
        parity=None,
    ),
    Chart(
        "density",
        ("order",),
        "The density of padded batches: one dot per list",
        is_log=False,
        parity=None,
    ),
    Chart("time", ("step",), "Seconds of each step", parity=None),
    Chart(
        "time, ms", ("float32 numbers",), "Milliseconds of a sum over both processes", parity=None
    ),
    Chart(
        "checked, us per direction",
        ("layer",),
        "Microseconds of checks per direction",
        is_log=False,
        parity=None,
    ),
)


def tables(text: str) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Yield the place of each table of a Markdown text, and its rows by the names of the
    columns.
    """
    for found in _TABLE.finditer(text):
        names, _, *rows = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in found[0].splitlines()
        )
        yield found.start(), [dict(zip(names, row, strict=True)) for row in rows]


def lines_of(chart: Chart, rows: list[dict[str, str]]) -> dict[str, list[float]]:
    """Return the numbers of each line of a chart by its name. Competitors of layers are left
    out.
    """
    lines: dict[str, list[float]] = {}
    for row in rows:
        who = row.get("who", "ours").strip("*")
        number = re.match(r"[+-]?[\d,]*\.?\d+", row[chart.value].strip("*"))
        found = float(number[0].replace(",", "")) if number else math.nan
        if not who.startswith("ours") or not (found > 0 or (found == 0 and not chart.is_log)):
            continue
        words = {**row, "who": who, "H": f"H {row.get('H')}"}
        parts = [_SIZE.sub("", words[name]) for name in chart.names]
        name = ", ".join(part for part in parts if part != "ours")
        lines.setdefault(name, []).append(found)
    return lines


def with_charts(text: str) -> str:
    """Return a Markdown text with a chart before each table that has one. All of one kind have the
    same axis.
    """
    found = []
    for place, rows in tables(text):
        chart = next(
            (chart for chart in CHARTS if rows and {chart.value, *chart.names} <= rows[0].keys()),
            None,
        )
        if chart is not None and (lines := lines_of(chart, rows)):  # none without a competitor
            found.append((place, chart, lines))
    for place, chart, lines in reversed(found):
        known = [
            number
            for _, other, same in found
            if other is chart
            for numbers in same.values()
            for number in numbers
        ]
        text = f"{text[:place]}{_draw(chart, lines, known)}\n{text[place:]}"
    return text


def _draw(chart: Chart, lines: dict[str, list[float]], known: list[float]) -> str:
    """Return the HTML of a chart, whose axis has room for all known numbers."""
    ticks = _ticks(chart, known)
    low, high = (math.log(tick) if chart.is_log else tick for tick in (ticks[0], ticks[-1]))

    def at(number: float) -> str:
        return f"{100 * ((math.log(number) if chart.is_log else number) - low) / (high - low):.1f}%"

    drawn = "".join(
        f'<div class="line"><span>{html.escape(name)}</span><span class="track">'
        + "".join(f'<i style="left: {at(number)}"></i>' for number in numbers)
        + f"</span><span>{_range(numbers)}</span></div>\n"
        for name, numbers in lines.items()
    )
    axis = "".join(f'<b style="left: {at(tick)}">{tick:g}</b>' for tick in ticks)
    style = f' style="--parity: {at(chart.parity)}"' if chart.parity is not None else ""
    return (
        f'<figure class="chart"{style}>\n<figcaption>{chart.text}.</figcaption>\n{drawn}'
        f'<div class="line" aria-hidden="true"><span></span><span class="axis">{axis}</span></div>\n</figure>\n'
    )


def _ticks(chart: Chart, known: list[float]) -> list[float]:
    """Return round numbers around all known ones."""
    low, high = min(known), max(known)
    if not chart.is_log:
        step = 10 ** math.floor(math.log10(high))
        step = next(part * step for part in (0.2, 0.5, 1, 2) if high / (part * step) <= 6)
        return [step * count for count in range(math.ceil(high / step) + 1)]
    if chart.parity is not None:
        low, high = min(low, chart.parity), max(high, chart.parity)
    steps = [part * 10.0**power for power in range(-3, 6) for part in (1, 2, 5)]
    first = max(place for place, step in enumerate(steps) if step <= low)
    last = min(place for place, step in enumerate(steps) if step >= high)
    return steps[first : last + 1]


def _range(numbers: list[float]) -> str:
    low, high = (f"{number:.3g}" for number in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"
