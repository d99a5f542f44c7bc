"""Draws the pictures of the pages into docs/pictures, in light and dark: python docs/draw.py.

A test draws them again and compares.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from matplotlib.figure import Figure

import raglane as rl
from raglane._utils.drawing import BLUE, DARK, LIGHT, ORANGE, Look, frame, new_figure, svg

sys.path.insert(0, str(Path(__file__).parent))
from charts import tables

FOLDER = Path(__file__).parent / "pictures"
RESULTS = FOLDER.parents[1] / "benchmarks" / "results"

CODE = {
    "padded": "rl.plot.padded([9, 8, 6, 4, 3, 2])",
    "packed": "rl.plot.packed([9, 8, 6, 4, 3, 2])",
    "schedules": "rl.plot.schedules([4, 6, 8, 5, 4, 3, 7, 8], lanes=4)",
    "waste": "rl.plot.waste([number % 97 + 3 for number in range(3000)])",
}
"""The code of each picture by name, as shown in the pages."""

MODES = {"train": ("training", BLUE), "infer": ("inference", ORANGE)}
KINDS = {
    "sequences of different lengths": ("lognormal", "ewt"),
    "sequences of equal length": ("equal",),
}
CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}


def speedups(name: str = "layers") -> dict[tuple[str, str, str], list[float]]:
    """Return the speedups in float32 of a page of results, by mode, kind of lengths and cell."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    found: dict[tuple[str, str, str], list[float]] = {}
    for place, rows in tables(text):
        heading = text[:place].rpartition("\n## ")[2].split("\n")[0]
        mode = heading.removeprefix("grid: ").split(",")[0]
        for row in rows if heading.startswith("grid: ") else ():
            if row["who"] == "**ours**":
                cell, lengths = row["cell BxHxD"].split()[0], row["lengths (N; density)"].split()[0]
                kind = next(kind for kind, names in KINDS.items() if lengths in names)
                found.setdefault((mode, kind, cell), []).append(float(row["ratio"]))
    return found


def mean(numbers: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, numbers)) / len(numbers))


def speed(look: Look) -> bytes:
    """Draw the speedups over PyTorch: a bar up to the mean with its number on the left, and a line
    from the lowest to the highest.
    """
    figure = new_figure(6.0, 5.0, "plot", look)
    known = speedups()
    panels = figure.subplots(2, 1, sharex=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        axes.set_xscale("log")
        frame(axes, look, hidden=("top", "right", "left"), grid="x")
        axes.axvline(1, color=look.ink, linewidth=1.2)
        ticks = {}
        for place, (cell_name, cell) in enumerate(CELLS.items()):
            for mode, (name, color) in MODES.items():
                is_first = mode == "train"
                numbers = known[mode, kind, cell]
                y = place + (-0.2 if is_first else 0.2)
                middle = mean(numbers)
                axes.barh(
                    y,
                    middle - 1,
                    left=1,
                    height=0.34,
                    color=color,
                    zorder=2,
                    label=name if place == 0 else None,
                )
                axes.plot(
                    [min(numbers), max(numbers)], [y, y], color=look.ink, linewidth=1, zorder=3
                )
                ticks[y] = f"{cell_name if is_first else ''}   {middle:.2f}"
        # The numbers are a column beside the bars: at their ends are the lines of the ranges.
        axes.set_yticks([*ticks], [*ticks.values()], fontsize=11)
        axes.set_ylim(len(CELLS) - 0.5, -0.5)
        axes.tick_params(length=0)
        axes.minorticks_off()
        axes.set_title(kind.capitalize(), fontsize=11, color=look.ink, loc="left")
    shown = (1, 2, 5, 10, 20, 50)
    panels[1].set_xticks(shown, [f"{tick}x" for tick in shown], fontsize=11)
    panels[1].set_xlim(0.7, 60)
    panels[1].set_xlabel(
        "times as fast as PyTorch's fastest way\n(numbers and bars: mean; lines: lowest to highest)",
        fontsize=11,
    )
    panels[1].legend(loc="lower right", frameon=False, fontsize=11, labelcolor=look.ink)
    return svg(clear(figure))


def clear(figure: Figure) -> Figure:
    """Remove the backgrounds of a figure, which would be boxes on pages of another colour."""
    for part in (figure, *figure.axes):
        part.patch.set_alpha(0)
    return figure


def draw(folder: Path) -> None:
    """Write every picture to a folder, in both themes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in CODE.items():
        for theme, ending in (("light", ""), ("dark", "-dark")):
            with rl.plot.theme(theme):
                picture = eval(code, {"rl": rl})
            clear(picture.figure)
            picture.save(folder / f"{name}{ending}.svg")
    for look, ending in ((LIGHT, ""), (DARK, "-dark")):
        (folder / f"speed{ending}.svg").write_bytes(speed(look))


if __name__ == "__main__":
    draw(FOLDER)
