"""Pictures and tables of a training run and of its mistakes: PNG, or SVG for a page."""

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
# Bars of a histogram, at most; and characters of a run's name.
_BARS, _LONGEST = 60, 24
# So many times the least make an axis logarithmic.
_WIDE = 20
_SCORES = ("recall", "precision", "F1")


def curves_png(history: Sequence[dict[str, float]], metric: str, title: str, best_epoch: int = 0) -> bytes:
    """Loss and metric over the epochs, side by side."""
    return png(_curves(history, metric, title, best_epoch, LIGHT), _DPI)


def curves_svg(history: Sequence[dict[str, float]], metric: str, title: str, best_epoch: int = 0) -> str:
    """The same as :func:`curves_png`, for a page."""
    return svg(_curves(history, metric, title, best_epoch, DARK)).decode()


def _curves(history: Sequence[dict[str, float]], metric: str, title: str, best_epoch: int, look: Look) -> Figure:
    figure = new_figure(9.0, 3.6, "train", look)
    title_of(figure, title, look)
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
        measured = ("train_", "validation_")
        others = (key for key in history[0] if key.endswith(f"_{name}") and not key.startswith(measured))
        baseline = next(others, None)
        if baseline is not None:
            axes.axhline(history[-1][baseline], color=look.faint, linestyle="--", label=baseline.split("_")[0])
        if best_epoch:
            axes.axvline(best_epoch, color=look.ink, linestyle=":", linewidth=1, label=f"best (epoch {best_epoch})")
        axes.set_xlabel("epoch")
        axes.set_title(name.replace("_", " "), fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9, labelcolor=look.ink)
        if name == "accuracy":
            axes.set_ylim(None, 1.02)
        else:
            axes.set_ylim(0, None)
    return figure


def confusion_table(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> Table:
    """A confusion matrix, and the recall, precision and F1 score of each class."""
    names = [shorten(printable(label), 60) for label in labels]
    rows = [
        (name, *(count or "." for count in counts), *(row[score] for score in _SCORES))
        for name, counts, row in zip(names, matrix, class_rows(matrix, labels), strict=True)
    ]
    return Table("Confusion", ["true \\ predicted", *names, *_SCORES], rows)


def class_rows(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """The recall, precision and F1 score of each class, and how often it occurs."""
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    rows = []
    for place, label in enumerate(labels):
        right, true, told = matrix[place][place], sum(matrix[place]), predicted[place]
        scores = (_share(right, true), _share(right, told), _share(2 * right, true + told))
        rows.append({"label": label, **dict(zip(_SCORES, scores, strict=True)), "count": true})
    return rows


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def confusion_png(matrix: Sequence[Sequence[int]], labels: Sequence[str], title: str) -> bytes:
    """A confusion matrix: the share of each true class in colour, the count in each cell."""
    classes = len(labels)
    side = min(max(4.2, 0.42 * classes + 1.8), 24.0)
    figure = new_figure(side + 0.9, side, "train")
    title_of(figure, title)
    axes = figure.add_subplot(1, 1, 1)
    shares = [[count / max(sum(row), 1) for count in row] for row in matrix]
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    longest = max(map(len, labels), default=0)
    names = [shorten(printable(label), 24) for label in labels]
    size = max(5.0, min(10.0, 260.0 / max(classes, 1)))
    axes.set_xticks(range(classes), names, rotation=90 if longest > 3 else 0, fontsize=size, parse_math=False)
    axes.set_yticks(range(classes), names, fontsize=size, parse_math=False)
    axes.tick_params(length=0, colors=LIGHT.ink)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    for edge in axes.spines.values():
        edge.set_visible(False)
    # White lines between the cells.
    axes.set_xticks([place - 0.5 for place in range(1, classes)], minor=True)
    axes.set_yticks([place - 0.5 for place in range(1, classes)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    if classes <= 50:
        _write_counts(axes, matrix, shares, size)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label("share of the true class", labelpad=8)
    bar.outline.set_visible(False)
    return png(figure, _DPI)


def points_png(points: Sequence[tuple[float, float]], title: str) -> bytes:
    """Predicted numbers against the true ones."""
    return png(_points(points, title, LIGHT), _DPI)


def points_svg(points: Sequence[tuple[float, float]], title: str) -> str:
    """The same as :func:`points_png`, for a page."""
    return svg(_points(points, title, DARK)).decode()


def _points(points: Sequence[tuple[float, float]], title: str, look: Look) -> Figure:
    figure = new_figure(4.8, 4.8, "train", look)
    title_of(figure, title, look)
    axes = figure.add_subplot(1, 1, 1)
    frame(axes, look)
    true, told = zip(*points, strict=True)
    ends = [min(true), max(true)]
    axes.plot(ends, ends, color=look.faint, linestyle="--", linewidth=1, label="as it is")
    axes.plot(true, told, color=BLUE, linestyle="", marker="o", markersize=3, alpha=0.5, label="predicted")
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.legend(frameon=False, fontsize=9, labelcolor=look.ink)
    return figure


def lengths_svg(parts: Mapping[str, Sequence[int]], title: str) -> str:
    """How many sequences have which length, for a page."""
    figure = new_figure(9.0, 3.0, "train", DARK)
    title_of(figure, title, DARK)
    axes = figure.add_subplot(1, 1, 1)
    frame(axes, DARK)
    longest = max(max(lengths, default=0) for lengths in parts.values())
    least = min(min(lengths, default=longest) for lengths in parts.values())
    width = -(-(longest - least + 1) // _BARS)
    edges = [least - 0.5 + width * place for place in range((longest - least) // width + 2)]
    colors = (BLUE, VERMILION, GREEN)
    # One upon the other, as stairs: bars side by side would be too thin.
    for (name, lengths), color in zip(parts.items(), colors, strict=False):
        axes.hist(lengths, bins=edges, color=color, label=f"{name}: {len(lengths):,}", histtype="step", linewidth=1.8)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_xlabel("steps of a sequence")
    axes.set_ylabel("sequences")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    axes.legend(frameon=False, fontsize=9, labelcolor=DARK.ink)
    return svg(figure).decode()


def by_length_svg(rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str) -> str:
    """A metric and the loss, by the length of sequences, for a page."""
    figure = new_figure(9.0, 3.0, "train", DARK)
    title_of(figure, title, DARK)
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        frame(axes, DARK, grid="y")
        axes.bar([row["lengths"] for row in rows], [row[name] for row in rows], color=BLUE, width=0.7)
        axes.set_title(name.replace("_", " "), fontsize=11)
        axes.set_xlabel("steps of a sequence")
        axes.tick_params(axis="x", labelsize=9)
    return svg(figure).decode()


def _write_counts(axes: Axes, matrix: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], size: float) -> None:
    """The count in each cell that is not empty, light on dark and dark on light."""
    digits = max(len(str(count)) for row in matrix for count in row)
    size = min(size, 8.0 * math.sqrt(3 / max(digits, 3)) if digits > 3 else size)
    for row, counts in enumerate(matrix):
        for column, count in enumerate(counts):
            if count:
                color = "white" if shares[row][column] > 0.5 else LIGHT.ink
                axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=size)


@dataclass(frozen=True)
class Compared(Table):
    """Runs that can be compared: ``run``, ``weights`` and ``seconds`` are among the columns."""

    drawn: str = "seconds"  # the column that a picture shows


def compared_picture(groups: Sequence[Compared], is_svg: bool) -> bytes:
    """A metric against time and against weights, a row of pictures per group."""
    figure = new_figure(10.0, 3.8 * len(groups) + 0.4, "train")
    title_of(figure, "Runs by what they took")
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
