"""The model card of a run, as Markdown and as a page, from plain numbers and texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raglane.errors import printable
from raglane.report import html
from raglane.report.figures import by_length_svg, curves_svg, lengths_svg, points_svg
from raglane.report.page import COLORS, page
from raglane.report.svg import inline

# Classes of a matrix that is drawn.
_WIDEST = 30


@dataclass(frozen=True)
class Table:
    """Rows under their names."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    words: int = 1

    @property
    def cells(self) -> list[list[str]]:
        """The rows as texts."""
        return [[_cell(value) for value in row] for row in self.rows]


@dataclass(frozen=True)
class Card:
    """What there is to say of a run."""

    name: str
    sentence: str
    about: str
    facts: tuple[tuple[str, str], ...]
    results: Table
    classes: Table | None
    by_length: Table | None
    hardest: Table | None
    data: Table
    labels: Table | None
    model: Table
    settings: Table
    time: Table
    shell: tuple[str, ...]
    python: tuple[str, ...]
    notes: tuple[str, ...] = ()
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict, repr=False)
    history: Sequence[dict[str, float]] = field(default=(), repr=False)
    metric: str = ""
    best_epoch: int = 0
    drawn: tuple[str, ...] = ()
    confusion: Sequence[Sequence[int]] = ()
    names: tuple[str, ...] = ()
    points: Sequence[tuple[float, float]] = field(default=(), repr=False)
    version: str = ""


def as_markdown(card: Card) -> str:
    """A card as Markdown."""
    parts = [f"# {_escaped(card.name)}", _escaped(card.sentence), *map(_escaped, card.notes)]
    for title, tables in _parts(card).items():
        parts.append(f"## {title}")
        if title == "How to use it":
            parts += ["```sh\n" + "\n".join(map(printable, card.shell)) + "\n```"]
            parts += ["```python\n" + "\n".join(map(printable, card.python)) + "\n```"]
        if title == "Curves":
            parts.append(f"![loss and {_escaped(card.metric.replace('_', ' '))} by epoch](curves.png)")
        parts += [as_table(table) for table in tables]
    return "\n\n".join([*parts, _origin(card)]) + "\n"


def as_page(card: Card) -> bytes:
    """A card as a page that asks nothing of the network."""
    drawn = {"Results": _matrix(card), "By length": _by_length(card), "Curves": _curves(card), "Data": _lengths(card)}
    sections: dict[str, tuple[str, str]] = {}
    for title, tables in _parts(card).items():
        inside = [_html(table) for table in tables]
        if title == "How to use it":
            inside += [html.command(*card.shell), html.command(*card.python)]
        pictures = drawn.get(title, "")
        # What there is to see comes first, but for the numbers that matter most.
        parts = [*inside, pictures] if title == "Results" else [pictures, *inside]
        sections[title.lower().replace(" ", "-")] = title, "\n".join(part for part in parts if part)
    notes = html.paragraphs(*card.notes, kind="note") if card.notes else ""
    return page(
        "raglane train",
        card.name,
        card.sentence,
        html.facts(card.facts) + notes,
        sections,
        _origin(card),
        card.version,
    )


def _origin(card: Card) -> str:
    """What the numbers are, beside those that a later evaluation leaves."""
    return (
        f"Written by raglane {card.version} at the end of the training; what raglane evaluate measures later stands in "
        "evaluation.json."
    )


def as_table(table: Table) -> str:
    """A table as Markdown, below its caption."""
    return f"{_escaped(table.caption)}:\n\n{_markdown(table)}"


def _parts(card: Card) -> dict[str, list[Table]]:
    """The tables by the titles of the parts in which they stand."""
    parts: dict[str, list[Table | None]] = {
        "Results": [card.results],
        "By class": [card.classes],
        "By length": [card.by_length],
        "Hardest sequences": [card.hardest],
        "Curves": [],
        "How to use it": [],
        "Data": [card.data, card.labels],
        "Model": [card.model],
        "Time and versions": [card.time],
        "Settings": [card.settings],
    }
    listed = {title: [table for table in tables if table is not None] for title, tables in parts.items()}
    return {title: tables for title, tables in listed.items() if tables or not parts[title]}


def _html(table: Table) -> str:
    return html.table(table.caption, table.columns, table.cells, words=table.words)


def _picture(svg: str, prefix: str, words: str, caption: str) -> str:
    return html.picture(inline(svg, prefix, COLORS), words, caption)


def _curves(card: Card) -> str:
    last, metric = card.history[-1], card.metric.replace("_", " ")
    part = "validation" if "validation_loss" in last else "train"
    words = f"Loss and {metric} over {len(card.history)} epochs; the best is epoch {card.best_epoch}, "
    words += f"with a {part} loss of {card.history[card.best_epoch - 1][f'{part}_loss']:.4f}."
    drawn = curves_svg(card.history, card.metric, card.about, card.best_epoch)
    return _picture(drawn, "c", words, f"Loss and {metric} after each epoch. The model of the best epoch is kept.")


def _lengths(card: Card) -> str:
    parts = {name: lengths for name, lengths in card.lengths.items() if len(lengths)}
    if not parts:
        return ""
    counts = ", ".join(
        f"{name} {len(lengths):,} of {min(lengths):,} to {max(lengths):,} steps" for name, lengths in parts.items()
    )
    caption = "How many sequences have which length, the axis logarithmic above 10."
    return _picture(lengths_svg(parts, card.about), "l", f"Sequences by length: {counts}.", caption)


def _by_length(card: Card) -> str:
    if card.by_length is None:
        return ""
    columns = [name.replace(" ", "_") for name in card.by_length.columns]
    rows = [dict(zip(columns, row, strict=True)) for row in card.by_length.rows]
    worst = max(rows, key=lambda row: row["loss"])
    words = f"Loss and metric by length; the largest loss, {worst['loss']:.3f}, is that of {worst['lengths']} steps."
    drawn = by_length_svg(rows, card.drawn, card.about)
    return _picture(drawn, "b", words, "Do long sequences fare worse? Each bar is a range of lengths.")


def _matrix(card: Card) -> str:
    if card.points:
        words = f"Predicted numbers against the true ones, {len(card.points):,} of them."
        return _picture(points_svg(card.points, card.about), "p", words, "On the line, predictions are right.")
    if not 0 < len(card.names) <= _WIDEST:
        return ""
    return "<h3>Which class is taken for which</h3>\n" + html.matrix(
        "Counts: a row is a true class, a column a predicted one", card.names, card.confusion
    )


def _markdown(table: Table) -> str:
    marks = [":--" if place < table.words else "--:" for place in range(len(table.columns))]
    rows = [list(map(str, table.columns)), marks, *table.cells]
    return "\n".join("| " + " | ".join(map(_in_table, row)) + " |" for row in rows)


def _in_table(text: str) -> str:
    return text if set(text) <= set(":-") else _escaped(text)


def _escaped(text: str) -> str:
    r"""A text that Markdown shows as it is."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#!" else sign for sign in printable(text))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def table_of(caption: str, rows: Iterable[Mapping[str, Any]], words: int = 1) -> Table | None:
    """A table of rows with the same keys; None where there are none."""
    listed = list(rows)
    if not listed:
        return None
    columns = tuple(name.replace("_", " ") for name in listed[0])
    return Table(caption, columns, tuple(tuple(row.values()) for row in listed), words)
