"""Pictures of a training run and of its mistakes, as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raglane.drawing import BLUE, LIGHT, VERMILION, frame, new_figure, png, title_of
from raglane.errors import printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["confusion_png", "curves_png", "points_png"]

_DPI = 150


def curves_png(history: Sequence[dict[str, float]], metric: str, title: str, best_epoch: int = 0) -> bytes:
    """Loss and metric over the epochs, side by side.

    Args:
        history: one row per epoch, with ``epoch``, ``train_loss``, ``train_<metric>`` and, where there was a
            validation part, the same of ``validation``; at least one row.
        metric: the name of the metric.
        title: above both.
        best_epoch: the epoch to mark; 0 for none.

    Returns:
        The bytes of a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> row = {"epoch": 1, "train_loss": 0.5, "train_accuracy": 0.8}
        >>> curves_png([row], "accuracy", "a run")[1:4]
        b'PNG'
    """
    figure = new_figure(9.0, 3.6, "train")
    title_of(figure, title)
    from matplotlib.ticker import MaxNLocator

    epochs = [row["epoch"] for row in history]
    for place, name in enumerate(("loss", metric)):
        axes = figure.add_subplot(1, 2, place + 1)
        frame(axes)
        for part, color in (("train", BLUE), ("validation", VERMILION)):
            if f"{part}_{name}" in history[0]:
                values = [row[f"{part}_{name}"] for row in history]
                label = "training" if part == "train" else part
                axes.plot(epochs, values, color=color, label=label, linewidth=1.8, marker="o", markersize=3)
        baseline = next((key for key in history[0] if key.endswith(f"_{name}") and _is_baseline(key)), None)
        if baseline is not None:
            axes.axhline(history[-1][baseline], color=LIGHT.faint, linestyle="--", label=baseline.split("_")[0])
        if best_epoch:
            axes.axvline(best_epoch, color=LIGHT.ink, linestyle=":", linewidth=1, label=f"best (epoch {best_epoch})")
        axes.set_xlabel("epoch")
        axes.set_title(name, fontsize=11)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9)
        if name == "accuracy":
            axes.set_ylim(None, 1.02)
        else:
            axes.set_ylim(0, None)
    return png(figure, _DPI)


def confusion_png(matrix: Sequence[Sequence[int]], labels: Sequence[str], title: str) -> bytes:
    """A confusion matrix: the share of each true class in colour, the count in each cell.

    Args:
        matrix: ``K`` rows of ``K`` counts; row is the true class, column the predicted one.
        labels: the ``K`` names.
        title: above it.

    Returns:
        The bytes of a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> confusion_png([[3, 1], [0, 2]], ["a", "b"], "a run")[1:4]
        b'PNG'
    """
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
    """Predicted numbers against the true ones.

    Args:
        points: pairs of a true and a predicted number, at least one.
        title: above them.

    Returns:
        The bytes of a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> points_png([(1.0, 1.5), (2.0, 1.8)], "a run")[1:4]
        b'PNG'
    """
    figure = new_figure(4.8, 4.8, "train")
    title_of(figure, title)
    axes = figure.add_subplot(1, 1, 1)
    frame(axes)
    true, told = zip(*points, strict=True)
    ends = [min(true), max(true)]
    axes.plot(ends, ends, color=LIGHT.faint, linestyle="--", linewidth=1, label="as it is")
    axes.plot(true, told, color=BLUE, linestyle="", marker="o", markersize=3, alpha=0.5, label="predicted")
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.legend(frameon=False, fontsize=9)
    return png(figure, _DPI)


def _write_counts(axes: Axes, matrix: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], size: float) -> None:
    """The count in each cell that is not empty, light on dark and dark on light."""
    digits = max(len(str(count)) for row in matrix for count in row)
    size = min(size, 8.0 * math.sqrt(3 / max(digits, 3)) if digits > 3 else size)
    for row, counts in enumerate(matrix):
        for column, count in enumerate(counts):
            if count:
                color = "white" if shares[row][column] > 0.5 else LIGHT.ink
                axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=size)


def _is_baseline(key: str) -> bool:
    return not key.startswith(("train_", "validation_"))
