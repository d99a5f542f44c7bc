"""The ratios of a run as a picture: one bar per case, by mode, dtype and number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.cases import SUITES
from harness.results import OURS, CaseResult
from raglane._utils.drawing import (
    BLUE,
    LIGHT,
    ORANGE,
    PURPLE,
    VERMILION,
    frame,
    new_figure,
    png,
    title_of,
)

__all__ = ["ratios_png"]

_FASTER, _SLOWER = BLUE, VERMILION
_ENGINES = {"onnxruntime": (ORANGE, "D"), "openvino": (PURPLE, "s"), "jax": (LIGHT.paper, "^")}
# Inches, but for the last.
_ROW, _PANEL, _MARGIN, _TALLEST, _DPI = 0.24, 5.6, 1.1, 120.0, 110
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def ratios_png(results: Sequence[CaseResult], title: str) -> bytes:
    """Ratios to the fastest torch variant on a logarithmic axis: a bar for ours, a marker for every
    other engine.
    """
    lines = _lines(results)
    columns = max(len(line) for line in lines)
    heights = [_MARGIN + _ROW * max(len(part) for _, part in line) for line in lines]
    height = min(sum(heights) + 1.0, _TALLEST)
    figure = new_figure(_PANEL * columns + 1.6, height, "bench")
    title_of(figure, title)
    grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
    known = [
        ratio
        for result in results
        for name in (OURS, *_ENGINES)
        if (ratio := _ratio(result, name)) is not None
    ]
    # One axis for all, so that panels can be compared.
    limits = min([0.8, *known]) / 1.15, max([1.25, *known]) * 1.8
    handles: dict[str, Any] = {}
    for place, line in enumerate(lines):
        for column, (name, part) in enumerate(line):
            axes = figure.add_subplot(grid[place, column])
            _draw(axes, name, part, limits)
            found = {engine: _points(axes, engine, part) for engine in _ENGINES}
            handles |= {engine: handle for engine, handle in found.items() if handle is not None}
    if handles:
        figure.legend(
            handles=list(handles.values()),
            frameon=False,
            fontsize=9,
            loc="outside lower center",
            ncols=3,
        )
    return png(figure, _DPI)


def _lines(results: Sequence[CaseResult]) -> list[list[tuple[str, list[CaseResult]]]]:
    """Return panels with their titles: a row per suite, dtype and number of threads, a column per
    mode.
    """
    panels: dict[tuple[str, str, int], dict[str, list[CaseResult]]] = {}
    for result in results:
        case = result.case
        line = panels.setdefault((case.suite, case.dtype, case.threads), {})
        line.setdefault(case.mode, []).append(result)
    return [
        [
            (f"{suite}: {mode}, {dtype}, {threads} thread{'' if threads == 1 else 's'}", part)
            for mode, part in line.items()
        ]
        for (suite, dtype, threads), line in panels.items()
    ]


def _draw(axes: Any, name: str, results: Sequence[CaseResult], limits: tuple[float, float]) -> None:
    """Draw a panel: the first case on top, a bar from 1 to the ratio of ours."""
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.axvline(1, color=LIGHT.ink, linewidth=1)
    for place, result in enumerate(results):
        ratio = _ratio(result, OURS)
        if ratio is None:
            axes.text(1, place, " no ratio", va="center", fontsize=7, color=_SLOWER)
            continue
        axes.barh(
            place, ratio - 1, left=1, height=0.7, color=_FASTER if ratio >= 1 else _SLOWER, zorder=2
        )
        axes.text(
            limits[1],
            place,
            f"{ratio:.2f}",
            va="center",
            ha="right",
            fontsize=8,
            color=LIGHT.ink,
            zorder=4,
        )
    axes.set_yticks(
        range(len(results)), [result.case.name for result in results], fontsize=8, parse_math=False
    )
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_title(name, fontsize=10, color=LIGHT.ink)
    is_memory = SUITES[results[0].case.suite].measures_memory
    what = "memory of the leanest" if is_memory else "time of the fastest"
    axes.set_xlabel(
        f"{what} torch variant, over ours" + ("" if is_memory else " or the engine's"), fontsize=8
    )
    ticks = [tick for tick in _TICKS if limits[0] <= tick <= limits[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()
    frame(axes, hidden=("top", "right", "left"), grid="x")
    axes.tick_params(length=0)


def _points(axes: Any, engine: str, results: Sequence[CaseResult]) -> Any:
    """Draw the markers of an engine; return its entry of the legend, or None if it was not
    timed.
    """
    points = [
        (ratio, place)
        for place, result in enumerate(results)
        if (ratio := _ratio(result, engine)) is not None
    ]
    if not points:
        return None
    color, marker = _ENGINES[engine]
    across, down = zip(*points, strict=True)
    return axes.scatter(
        across,
        down,
        s=22,
        color=color,
        marker=marker,
        edgecolor=LIGHT.ink,
        linewidth=0.7,
        label=engine,
        zorder=5,
    )


def _ratio(result: CaseResult, competitor: str) -> float | None:
    row = result.row(competitor)
    return None if row is None or not row.ratio else row.ratio
