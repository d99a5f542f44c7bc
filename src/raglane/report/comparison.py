"""Runs beside each other, as text, Markdown, CSV and a picture, from plain rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raglane._utils.drawing import PALETTE, frame, new_figure, png, svg, title_of
from raglane._utils.files import no_formula
from raglane.errors import printable, shorten
from raglane.report.card import Table, as_table
from raglane.report.tables import rows_table

_DPI = 150
# Characters of a run's name in a picture.
_LONGEST = 24
# So many times the least make an axis logarithmic.
_WIDE = 20


@dataclass(frozen=True)
class Group:
    """Runs that can be compared."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    drawn: str


def as_text(groups: Sequence[Group]) -> str:
    """A table for each group, for a terminal."""
    parts = []
    for group in groups:
        rows = [{name: _filled(value) for name, value in zip(group.columns, row, strict=True)} for row in group.rows]
        parts.append(f"{printable(group.title)}\n{rows_table(rows)}")
    return "\n\n".join(parts)


def as_markdown(groups: Sequence[Group]) -> str:
    """The same as Markdown."""
    parts = []
    for group in groups:
        rows = tuple(tuple(map(_filled, row)) for row in group.rows)
        parts.append(as_table(Table(group.title, group.columns, rows)))
    return "\n\n".join(parts) + "\n"


def as_csv(groups: Sequence[Group]) -> bytes:
    """The same as one table, with the group in its first column, and every digit."""
    columns = list(dict.fromkeys(name for group in groups for name in group.columns))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["data", *columns], lineterminator="\n")
    writer.writeheader()
    for group in groups:
        for row in group.rows:
            entries = zip(group.columns, map(no_formula, row), strict=True)
            writer.writerow({"data": no_formula(group.title), **dict(entries)})
    return text.getvalue().encode(errors="backslashreplace")


def as_picture(groups: Sequence[Group], is_svg: bool) -> bytes:
    """A metric against time and against weights, a row of pictures per group."""
    figure = new_figure(10.0, 3.8 * len(groups) + 0.4, "train")
    title_of(figure, "Runs by what they took")
    for line, group in enumerate(groups):
        for place, against in enumerate(("seconds", "weights")):
            axes = figure.add_subplot(len(groups), 2, 2 * line + place + 1)
            frame(axes)
            axes.set_title(printable(group.title), fontsize=10, parse_math=False)
            for number, row in enumerate(group.rows):
                named = dict(zip(group.columns, row, strict=True))
                if named[group.drawn] is None:
                    continue
                name = shorten(printable(str(named["run"])), _LONGEST)
                # Beyond the colours that there are, shapes tell runs apart.
                marker = "os^Dv*XP"[number // len(PALETTE) % 8]
                color = PALETTE[number % len(PALETTE)]
                axes.plot([named[against]], [named[group.drawn]], marker, color=color, markersize=7, label=name)
            taken = [row[group.columns.index(against)] for row in group.rows]
            if max(taken) > _WIDE * max(min(taken), 1e-9):
                axes.set_xscale("log")
            else:
                axes.set_xlim(0, 1.05 * max(taken))
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axes.set_xlabel("seconds of training" if against == "seconds" else "weights")
            axes.set_ylabel(group.drawn.replace("_", " "))
            if place == 1 and len(group.rows) <= 16:
                legend = axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
                for text in legend.get_texts():
                    text.set_parse_math(False)
    return svg(figure) if is_svg else png(figure, _DPI)


def _filled(value: Any) -> Any:
    return float("nan") if value is None else value
