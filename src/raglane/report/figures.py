"""Pictures and tables of runs and of their mistakes: PNG for files, SVG in dark colours for
pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raglane._utils import drawing
from raglane._utils.drawing import (
    BLUE,
    DARK,
    GREEN,
    LIGHT,
    PALETTE,
    VERMILION,
    Look,
    frame,
    png,
    svg,
)
from raglane._utils.messages import metric_words, printable, shorten
from raglane._utils.table import PrintedTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The most bars of a histogram.
_BARS = 40
# The most characters of a run's name.
_LONGEST = 24
# The most drawn runs.
_MOST = 40
# The most runs with a colour.
_COLORED = 6
# The ratio of the largest to the smallest value above which an axis is logarithmic.
_WIDE = 20
_SCORES = ("recall", "precision", "f1")
# The width of a picture of a page in inches, which is that of a phone.
_WIDTH = 4.4
# Its size of text in points.
_TEXT = 10.5


def curves(
    history: Sequence[dict[str, float]], metric: str, title: str, best_epoch: int = 0
) -> bytes:
    """Draw loss and metric over the epochs, side by side, as PNG."""
    figure = _figure(9.0, 3.6, title)
    for index, name in enumerate(("loss", metric)):
        axes = figure.add_subplot(1, 2, index + 1)
        _draw_curve(axes, history, name, best_epoch)
        axes.set_title(metric_words(name), fontsize=11)
    return png(figure)


def curve_svg(history: Sequence[dict[str, float]], name: str, best_epoch: int) -> bytes:
    """Draw the loss or a metric over the epochs."""
    figure, axes = _panel(2.9)
    _draw_curve(axes, history, name, best_epoch, DARK)
    axes.set_ylabel(metric_words(name))
    return svg(figure)


def _draw_curve(
    axes: Axes, history: Sequence[dict[str, float]], name: str, best_epoch: int, look: Look = LIGHT
) -> None:
    from matplotlib.ticker import MaxNLocator

    frame(axes, look)
    epochs = [row["epoch"] for row in history]
    drawn = []
    for split, color in (("train", BLUE), ("validation", VERMILION)):
        if f"{split}_{name}" in history[0]:
            values = [row[f"{split}_{name}"] for row in history]
            label = "training" if split == "train" else split
            drawn += [value for value in values if math.isfinite(value)]
            axes.plot(
                epochs, values, color=color, label=label, linewidth=1.8, marker="o", markersize=3
            )
    metrics = [key for key in history[0] if key.endswith(f"_{name}")]
    rules = (key for key in metrics if not key.startswith(("train_", "validation_")))
    baseline = next(rules, None)
    if baseline is not None:
        value = history[-1][baseline]
        rule = f"{baseline.split('_')[0]} ({_short(value)})"
        axes.axhline(value, color=look.faint, linestyle="--", label=rule)
        drawn += [value] if _is_near(value, drawn) else []
    if best_epoch:
        axes.axvline(
            best_epoch,
            color=look.ink,
            linestyle=":",
            linewidth=1,
            label=f"best (epoch {best_epoch})",
        )
    axes.set_xlabel("epoch")
    axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(frameon=False, fontsize=9, labelcolor=look.ink)
    _show(axes, drawn)


def _is_near(value: float, drawn: Sequence[float]) -> bool:
    """Return True if an axis with room for this value too is at most twice as long."""
    if not drawn or not math.isfinite(value):
        return False
    span = max(drawn) - min(drawn)
    return min(drawn) - span <= value <= max(drawn) + span


def _show(axes: Axes, drawn: Sequence[float]) -> None:
    """Set the limits of the vertical axis to the drawn numbers, so that changes are seen."""
    from matplotlib.ticker import LogLocator

    if not drawn:
        return
    low = min(drawn)
    high = max(drawn)
    if low > 0 and high > _WIDE * low:
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: _short(value))
        axes.set_ylim(low / 1.2, high * 1.2)
        return
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    axes.set_ylim(low - room, high + room)


def _panel(height: float, title: str | None = None, look: Look = DARK) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, by default for a page."""
    figure = _figure(_WIDTH, height, title, look)
    axes = figure.add_subplot(1, 1, 1)
    frame(axes, look)
    axes.tick_params(labelsize=_TEXT - 1)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(_TEXT)
    return figure, axes


def _figure(width: float, height: float, title: str | None, look: Look = LIGHT) -> Figure:
    figure = drawing.new_figure(width, height, "train", look)
    if title is not None:
        drawing.title_of(figure, title, look)
    return figure


def confusion_table(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> PrintedTable:
    """Return a confusion matrix with the recall, precision and F1 score of each class."""
    names = [shorten(printable(label), 60) for label in labels]
    rows = [
        (name, *(count or "." for count in counts), *(row[score] for score in _SCORES))
        for name, counts, row in zip(names, matrix, class_rows(matrix, labels), strict=True)
    ]
    return PrintedTable(
        "Confusion", ["true \\ predicted", *names, *map(metric_words, _SCORES)], rows
    )


def class_rows(matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the recall, precision, F1 score and count of each class."""
    predicted = [sum(column) for column in zip(*matrix, strict=True)]
    rows = []
    for index, label in enumerate(labels):
        right = matrix[index][index]
        true = sum(matrix[index])
        wholes = (right, true), (right, predicted[index]), (2 * right, true + predicted[index])
        scores = [count / whole if whole else math.nan for count, whole in wholes]
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
    rotation = 90 if any(len(label) > 3 for label in labels) else 0
    axes.set_xticks(range(classes), names, rotation=rotation, fontsize=size, parse_math=False)
    axes.set_yticks(range(classes), names, fontsize=size, parse_math=False)
    axes.tick_params(length=0, colors=LIGHT.ink)
    axes.set(xlabel="predicted", ylabel="true")
    for edge in axes.spines.values():
        edge.set_visible(False)
    # White lines between the cells.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([border - 0.5 for border in range(1, classes)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    if classes <= 50:
        _write_counts(axes, matrix, shares, size)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label("share of the true class", labelpad=8)
    bar.outline.set_visible(False)
    return png(figure)


def points(pairs: Sequence[tuple[float, float]], title: str | None = None) -> bytes:
    """Draw pairs of a true and a predicted number: for a page, or with a title as PNG."""
    look = DARK if title is None else LIGHT
    figure, axes = _panel(_WIDTH, title, look)
    true, predicted = zip(*pairs, strict=True)
    ends = [min(true), max(true)]
    axes.plot(ends, ends, color=look.faint, linestyle="--", linewidth=1, label="exact")
    axes.plot(
        true,
        predicted,
        color=BLUE,
        linestyle="",
        marker="o",
        markersize=3,
        alpha=0.5,
        label="predicted",
    )
    axes.set(xlabel="true", ylabel="predicted")
    axes.legend(frameon=False, fontsize=9, labelcolor=look.ink)
    return svg(figure) if title is None else png(figure)


@dataclass(frozen=True)
class Forecasted:
    """The last elements of a series, of which the last ones were forecast."""

    truth: Sequence[float]
    forecast: Sequence[float]
    label: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    shares: tuple[float, float] = (0.0, 1.0)  # the quantiles of low and high


def forecast_svg(drawn: Forecasted) -> bytes:
    """Draw a series, and the forecast of its last elements; with two quantiles their range."""
    figure, axes = _panel(2.9)
    count = len(drawn.forecast)
    steps = range(1, count + 1)
    before = len(drawn.truth) - count
    axes.plot(range(1 - before, count + 1), drawn.truth, color=BLUE, linewidth=1.8, label="truth")
    if drawn.low:
        label = f"{drawn.shares[0]:g} to {drawn.shares[1]:g}"
        axes.fill_between(
            steps, drawn.low, drawn.high, color=VERMILION, alpha=0.25, linewidth=0, label=label
        )
    axes.plot(
        steps,
        drawn.forecast,
        color=VERMILION,
        linewidth=1.8,
        marker="o",
        markersize=3,
        label="forecast",
    )
    axes.axvline(0.5, color=DARK.ink, linestyle=":", linewidth=1)
    axes.set_xlabel("steps after the last element that was read")
    axes.set_ylabel(printable(drawn.label), parse_math=False)
    axes.locator_params(axis="x", integer=True)
    _legend_above(axes)
    return svg(figure)


def _legend_above(axes: Axes) -> None:
    """Add a legend above the axes of a picture whose lines fill them."""
    axes.legend(
        frameon=False,
        fontsize=9,
        labelcolor=DARK.ink,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderpad=0,
    )


def lengths_svg(lengths_of: Mapping[str, Sequence[int]]) -> bytes:
    """Draw a histogram of the lengths of each split, by its name."""
    figure, axes = _panel(2.9)
    longest = max(max(lengths, default=0) for lengths in lengths_of.values())
    least = min(min(lengths, default=longest) for lengths in lengths_of.values())
    width = -(-(longest - least + 1) // _BARS)
    edges = [least - 0.5 + width * index for index in range((longest - least) // width + 2)]
    # Superimposed outlines: bars side by side would be too thin.
    for (name, lengths), color in zip(lengths_of.items(), (BLUE, VERMILION, GREEN), strict=False):
        axes.hist(
            lengths,
            bins=edges,
            color=color,
            label=f"{name}: {len(lengths):,}",
            histtype="step",
            linewidth=1.8,
        )
    axes.set_yscale("symlog", linthresh=10)
    axes.set(xlabel="steps of a sequence", ylabel="sequences")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    _legend_above(axes)
    return svg(figure)


def rows_svg(
    names: Sequence[str], values: Sequence[float | None], label: str, *, are_dots: bool = False
) -> bytes:
    """Draw a bar from zero, or a dot, for each name, the first at the top."""
    figure, axes = _panel(0.8 + 0.28 * len(names))
    _draw_rows(axes, names, values, label, DARK, are_dots=are_dots)
    return svg(figure)


def _draw_rows(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float | None],
    label: str,
    look: Look = LIGHT,
    *,
    are_dots: bool = False,
) -> None:
    finite = {
        index: value
        for index, value in enumerate(values)
        if value is not None and math.isfinite(value)
    }
    if are_dots:
        axes.plot([*finite.values()], [*finite], "o", color=BLUE, markersize=6)
    else:
        axes.barh([*finite], [*finite.values()], color=BLUE, height=0.7)
        axes.grid(visible=False, axis="y")
    for index, value in finite.items():
        offset: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(_short(value), (value, index), fontsize=9, color=look.ink, **offset)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    # The numbers follow the marks.
    axes.margins(x=0.2)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel(label)


def _short(value: float) -> str:
    """Return a number with three digits, or a whole number."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def _write_counts(
    axes: Axes, matrix: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], size: float
) -> None:
    """Write the counts that are not 0, light on dark and dark on light."""
    digits = max(len(str(count)) for row in matrix for count in row)
    size = min(size, 8.0 * math.sqrt(3 / digits) if digits > 3 else size)
    for row, counts in enumerate(matrix):
        for column, count in enumerate(counts):
            if count:
                color = "white" if shares[row][column] > 0.5 else LIGHT.ink
                axes.text(
                    column, row, str(count), ha="center", va="center", color=color, fontsize=size
                )


@dataclass(frozen=True)
class Compared(PrintedTable):
    """A table of comparable runs, the best first, with the columns ``run``, ``weights`` and
    ``seconds``.
    """

    drawn: str = "seconds"  # the metric that pictures show
    settings: Sequence[str] = ()  # the columns of settings, which differ
    losses: Sequence[Sequence[float]] = ()  # of each run, by epoch

    def column(self, name: str, *, whole: bool = False) -> list[Any]:
        """Return a column of the drawn runs, or of all."""
        return [row[self.columns.index(name)] for row in self.rows[: None if whole else _MOST]]

    @property
    def names(self) -> list[str]:
        """The short names of the drawn runs."""
        paths = self.column("run")
        names = [Path(path).name for path in paths]
        if len(set(names)) < len(names):
            names = paths
        return [shorten(printable(name), _LONGEST) for name in names]


MEASURES = {"seconds": "seconds of training", "weights": "weights"}
"""The costs of a run with their labels."""


def compared_picture(groups: Sequence[Compared], is_svg: bool) -> bytes:
    """Draw metric, training time and weights of each run, a row per run."""
    heights = [1.0 + 0.26 * len(group.names) for group in groups]
    figure = drawing.new_figure(10.0, sum(heights), "train")
    grid = figure.add_gridspec(len(groups), 3, height_ratios=heights)
    for line, group in enumerate(groups):
        labels = {group.drawn: group.drawn.replace("_", " "), **MEASURES}
        for number, (column, label) in enumerate(labels.items()):
            axes = figure.add_subplot(grid[line, number])
            frame(axes)
            names = group.names if number == 0 else [""] * len(group.names)
            _draw_rows(axes, names, group.column(column), label, are_dots=column == group.drawn)
            if number == 0:
                axes.set_title(
                    printable(group.caption),
                    fontsize=10,
                    color=LIGHT.ink,
                    parse_math=False,
                    loc="left",
                )
    return svg(figure) if is_svg else png(figure)


def losses_svg(group: Compared) -> bytes:
    """Draw the loss of each run over the epochs, the best in colours."""
    figure, axes = _panel(3.4)
    for rank, losses in reversed(list(enumerate(group.losses))):
        is_colored = rank < _COLORED
        color = PALETTE[rank] if is_colored else DARK.faint
        label = group.names[rank] if is_colored else None
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            color=color,
            label=label,
            linewidth=1.8 if is_colored else 0.8,
        )
    axes.set(xlabel="epoch", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    legend = figure.legend(
        frameon=False,
        fontsize=9,
        labelcolor=DARK.ink,
        reverse=True,
        ncols=2,
        loc="outside lower left",
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return svg(figure)


def setting_svg(group: Compared, name: str) -> bytes:
    """Draw the metric of each run against a setting; the best run has another colour."""
    figure, axes = _panel(2.6)
    values = group.column(name)
    metric = group.column(group.drawn)
    try:
        values = [float(value) for value in values]
    except (TypeError, ValueError):  # words, or lists
        values = [str(value) for value in values]
    listed = sorted(set(values))
    if isinstance(values[0], str) or len(listed) <= _COLORED:
        words = [value if isinstance(value, str) else _short(value) for value in listed]
        values = [listed.index(value) for value in values]
        axes.set_xticks(range(len(words)), words, parse_math=False)
        axes.set_xlim(-0.5, len(words) - 0.5)
    elif listed[0] > 0 and listed[-1] > _WIDE * listed[0]:
        axes.set_xscale("log")
    axes.plot(values, metric, "o", color=BLUE, alpha=0.7, markersize=6)
    axes.plot(values[:1], metric[:1], "o", color=VERMILION, markersize=8)
    axes.set(xlabel=name, ylabel=group.drawn.replace("_", " "))
    return svg(figure)
