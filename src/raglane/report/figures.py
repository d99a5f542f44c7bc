"""Pictures and tables of runs and of their mistakes: PNG for files, SVG in dark colours for pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raglane._utils.drawing import (
    BLUE,
    DARK,
    GREEN,
    LIGHT,
    PALETTE,
    VERMILION,
    Look,
    frame,
    new_figure,
    png,
    svg,
    title_of,
)
from raglane._utils.messages import printable, shorten
from raglane._utils.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_DPI = 150
# The most bars of a histogram, the most characters of a run's name, and the ratio of the largest to the smallest value
# above which an axis is logarithmic.
_BARS, _LONGEST, _WIDE = 60, 24, 20
_SCORES = ("recall", "precision", "F1")


def curves(
    history: Sequence[dict[str, float]], metric: str, title: str, best_epoch: int = 0, *, is_svg: bool = False
) -> bytes:
    """Draw loss and metric over the epochs, side by side."""
    look = DARK if is_svg else LIGHT
    figure = _figure(9.0, 3.6, title, look)
    from matplotlib.ticker import MaxNLocator

    epochs = [row["epoch"] for row in history]
    for place, name in enumerate(("loss", metric)):
        axes = figure.add_subplot(1, 2, place + 1)
        frame(axes, look)
        for part, color in (("train", BLUE), ("validation", VERMILION)):
            if f"{part}_{name}" in history[0]:
                values = [row[f"{part}_{name}"] for row in history]
                label = "training" if part == "train" else part
                axes.plot(epochs, values, color=color, label=label, linewidth=1.8, marker="o", markersize=3)
        others = (
            key for key in history[0] if key.endswith(f"_{name}") and not key.startswith(("train_", "validation_"))
        )
        baseline = next(others, None)
        if baseline is not None:
            axes.axhline(history[-1][baseline], color=look.faint, linestyle="--", label=baseline.split("_")[0])
        if best_epoch:
            axes.axvline(best_epoch, color=look.ink, linestyle=":", linewidth=1, label=f"best (epoch {best_epoch})")
        axes.set_xlabel("epoch")
        axes.set_title(name.replace("_", " "), fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9, labelcolor=look.ink)
        axes.set_ylim(*((None, 1.02) if name == "accuracy" else (0, None)))
    return _render(figure, is_svg)


def _figure(width: float, height: float, title: str, look: Look = LIGHT) -> Figure:
    figure = new_figure(width, height, "train", look)
    title_of(figure, title, look)
    return figure


def _render(figure: Figure, is_svg: bool) -> bytes:
    return svg(figure) if is_svg else png(figure, _DPI)


def confusion_table(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> Table:
    """Return a confusion matrix with the recall, precision and F1 score of each class."""
    names = [shorten(printable(label), 60) for label in labels]
    rows = [
        (name, *(count or "." for count in counts), *(row[score] for score in _SCORES))
        for name, counts, row in zip(names, matrix, class_rows(matrix, labels), strict=True)
    ]
    return Table("Confusion", ["true \\ predicted", *names, *_SCORES], rows)


def class_rows(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the recall, precision, F1 score and count of each class."""
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    rows = []
    for place, label in enumerate(labels):
        right, true = matrix[place][place], sum(matrix[place])
        wholes = (right, true), (right, predicted[place]), (2 * right, true + predicted[place])
        scores = [part / whole if whole else math.nan for part, whole in wholes]
        rows.append({"label": label, **dict(zip(_SCORES, scores, strict=True)), "count": true})
    return rows


def confusion_png(matrix: Sequence[Sequence[int]], labels: Sequence[str], title: str) -> bytes:
    """Draw a confusion matrix: colours are shares of the true class, numbers are counts."""
    classes = len(labels)
    side = min(max(4.2, 0.42 * classes + 1.8), 24.0)
    figure = _figure(side + 0.9, side, title)
    axes = figure.add_subplot(1, 1, 1)
    shares = [[count / max(sum(row), 1) for count in row] for row in matrix]
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    names = [shorten(printable(label), 24) for label in labels]
    size = max(5.0, min(10.0, 260.0 / max(classes, 1)))
    axes.set_xticks(
        range(classes),
        names,
        rotation=90 if any(len(label) > 3 for label in labels) else 0,
        fontsize=size,
        parse_math=False,
    )
    axes.set_yticks(range(classes), names, fontsize=size, parse_math=False)
    axes.tick_params(length=0, colors=LIGHT.ink)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    for edge in axes.spines.values():
        edge.set_visible(False)
    # White lines between the cells.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([place - 0.5 for place in range(1, classes)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    if classes <= 50:
        _write_counts(axes, matrix, shares, size)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label("share of the true class", labelpad=8)
    bar.outline.set_visible(False)
    return png(figure, _DPI)


def points(points: Sequence[tuple[float, float]], title: str, *, is_svg: bool = False) -> bytes:
    """Draw predicted numbers against the true ones."""
    look = DARK if is_svg else LIGHT
    figure = _figure(4.8, 4.8, title, look)
    axes = figure.add_subplot(1, 1, 1)
    frame(axes, look)
    true, predicted = zip(*points, strict=True)
    ends = [min(true), max(true)]
    axes.plot(ends, ends, color=look.faint, linestyle="--", linewidth=1, label="exact")
    axes.plot(true, predicted, color=BLUE, linestyle="", marker="o", markersize=3, alpha=0.5, label="predicted")
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.legend(frameon=False, fontsize=9, labelcolor=look.ink)
    return _render(figure, is_svg)


def lengths_svg(parts: Mapping[str, Sequence[int]], title: str) -> bytes:
    """Draw a histogram of the lengths of each part."""
    figure = _figure(9.0, 3.0, title, DARK)
    axes = figure.add_subplot(1, 1, 1)
    frame(axes, DARK)
    longest = max(max(lengths, default=0) for lengths in parts.values())
    least = min(min(lengths, default=longest) for lengths in parts.values())
    width = -(-(longest - least + 1) // _BARS)
    edges = [least - 0.5 + width * place for place in range((longest - least) // width + 2)]
    # Superimposed outlines: bars side by side would be too thin.
    for (name, lengths), color in zip(parts.items(), (BLUE, VERMILION, GREEN), strict=False):
        axes.hist(lengths, bins=edges, color=color, label=f"{name}: {len(lengths):,}", histtype="step", linewidth=1.8)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_xlabel("steps of a sequence")
    axes.set_ylabel("sequences")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    axes.legend(frameon=False, fontsize=9, labelcolor=DARK.ink)
    return svg(figure)


def by_length_svg(rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str) -> bytes:
    """Draw loss and metric by length of sequence."""
    figure = _figure(9.0, 3.0, title, DARK)
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        frame(axes, DARK, grid="y")
        axes.bar([row["lengths"] for row in rows], [row[name] for row in rows], color=BLUE, width=0.7)
        axes.set_title(name.replace("_", " "), fontsize=11)
        axes.set_xlabel("steps of a sequence")
        axes.tick_params(axis="x", labelsize=9)
    return svg(figure)


def _write_counts(axes: Axes, matrix: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], size: float) -> None:
    """Write the counts that are not 0, light on dark and dark on light."""
    digits = max(len(str(count)) for row in matrix for count in row)
    size = min(size, 8.0 * math.sqrt(3 / max(digits, 3)) if digits > 3 else size)
    for row, counts in enumerate(matrix):
        for column, count in enumerate(counts):
            if count:
                color = "white" if shares[row][column] > 0.5 else LIGHT.ink
                axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=size)


@dataclass(frozen=True)
class Compared(Table):
    """A table of comparable runs, with the columns ``run``, ``weights`` and ``seconds``."""

    drawn: str = "seconds"  # the column that the picture shows


def compared_picture(groups: Sequence[Compared], is_svg: bool) -> bytes:
    """Draw a metric against training time and against weights, a row of axes per group."""
    figure = _figure(10.0, 3.8 * len(groups) + 0.4, "Runs by time and size")
    for line, group in enumerate(groups):
        for place, against in enumerate(("seconds", "weights")):
            axes = figure.add_subplot(len(groups), 2, 2 * line + place + 1)
            frame(axes)
            axes.set_title(printable(group.caption), fontsize=10, parse_math=False)
            for number, row in enumerate(group.rows):
                named = dict(zip(group.columns, row, strict=True))
                if named[group.drawn] is None:
                    continue
                name = shorten(printable(str(named["run"])), _LONGEST)
                # When the colours are used up, the marker changes.
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
    return _render(figure, is_svg)
