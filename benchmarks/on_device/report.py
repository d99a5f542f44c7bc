"""The report as Markdown and as a picture, which is rewritten after each result."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from on_device.base import Part, Row
from on_device.scaling import efficiencies
from on_device.speed import ratio

__all__ = ["write_report"]

_INK, _GRID, _FASTER, _SLOWER = "#333333", "#DDDDDD", "#0072B2", "#D55E00"
# The most cases of a picture.
_ROOM = 60


def write_report(
    folder: Path,
    parts: Sequence[Part],
    rows: Mapping[str, list[Row]],
    not_run: Sequence[Row],
    *,
    is_rehearsal: bool,
) -> None:
    """Write ``report.md``, and ``report.png`` if there are timed cases and matplotlib is
    installed.
    """
    lines = [
        "# What this machine shows",
        "",
        "`python benchmarks/device.py`, one part after the other.",
        "",
    ]
    if is_rehearsal:
        lines += ["**A rehearsal on tiny sizes: its times say nothing.**", ""]
    for part in parts:
        found = rows.get(part.name, [])
        if found:
            faults = sum("fault" in row for row in found)
            lines += [
                f"## {part.name}: {part.question}",
                "",
                f"{len(found)} items, {faults} with a fault.",
                "",
            ]
            lines += [*part.table(found), ""]
    if not_run:
        lines += ["## Not run", ""]
        lines += [f"- {row['key']}: {row['why']}" for row in not_run] + [""]
    _replace(folder / "report.md", "\n".join(lines).encode())
    picture = _picture(rows, "a rehearsal: its times say nothing" if is_rehearsal else "")
    if picture is not None:
        _replace(folder / "report.png", picture)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(content)
    partial.replace(path)


def _picture(rows: Mapping[str, list[Row]], title: str) -> bytes | None:
    speed = [
        (row["key"], found)
        for row in rows.get("speed", [])
        if (found := ratio(row.get("milliseconds", {}))) is not None
    ][:_ROOM]
    scaling = efficiencies(rows.get("scaling", []))
    if not speed and not scaling:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    height = 1.5 + max(0.24 * len(speed), 4.0 if scaling else 0)
    figure = Figure(
        figsize=(7.5 * ((len(speed) > 0) + (len(scaling) > 0)), height), layout="constrained"
    )
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10, color=_SLOWER)
    panels = list(figure.subplots(1, (len(speed) > 0) + (len(scaling) > 0), squeeze=False)[0])
    if speed:
        _draw_ratios(panels.pop(0), speed)
    if scaling:
        _draw_scaling(panels.pop(0), scaling)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _draw_ratios(axes: Any, speed: Sequence[tuple[str, float]]) -> None:
    axes.set_xscale("log")
    for place, (_, found) in enumerate(speed):
        color = _FASTER if found >= 1 else _SLOWER
        axes.barh(place, found - 1, left=1, height=0.7, color=color, zorder=2)
        axes.text(max(found, 1), place, f" {found:.2f}", va="center", fontsize=7)
    axes.axvline(1, color=_INK, linewidth=1)
    axes.set_yticks(range(len(speed)), [name for name, _ in speed], fontsize=7)
    axes.set_ylim(len(speed) - 0.4, -0.6)
    axes.set_xlim(right=1.25 * max(found for _, found in speed))
    ticks = [
        tick
        for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
        if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=_GRID)
    axes.set_axisbelow(True)
    axes.set_title("time of the fastest of torch's ways, over ours", fontsize=10, color=_INK)


def _draw_scaling(
    axes: Any, scaling: Mapping[str, Mapping[int, tuple[float, float, float | None]]]
) -> None:
    counts = sorted({threads for each in scaling.values() for threads in each})
    for name, each in scaling.items():
        threads = sorted(each)
        axes.plot(threads, [each[count][1] for count in threads], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(
        0, max(1.1, *(value[1] for each in scaling.values() for value in each.values())) * 1.05
    )
    axes.axhline(0.7, color=_INK, linewidth=1, linestyle=":")
    axes.grid(color=_GRID)
    axes.set_xlabel("threads", fontsize=9)
    axes.set_title("parallel efficiency of the cpu kernels", fontsize=10, color=_INK)
    axes.legend(fontsize=7, frameon=False, ncols=max(1, math.ceil(len(scaling) / 12)))
