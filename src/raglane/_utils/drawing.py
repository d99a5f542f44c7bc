"""Colours of all pictures, and figures of matplotlib without pyplot's global state or a display.

matplotlib is imported when a figure is created.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal, NamedTuple

from raglane._utils.messages import printable, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito, which suit all kinds of colour vision; their black is replaced by
# the ink.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
VERMILION = "#D55E00"
YELLOW = "#F0E442"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW)


class Look(NamedTuple):
    """The colours of everything except data."""

    paper: str  # the background
    ink: str  # text and axes
    faint: str  # hatching and baselines
    grid: str  # lines behind the data
    padding: str  # elements that do not exist


LIGHT = Look(paper="#FFFFFF", ink="#333333", faint="#666666", grid="#DDDDDD", padding="#E4E4E4")
DARK = Look(paper="#15181D", ink="#E0E0E0", faint="#A8A8A8", grid="#3A3F46", padding="#31363D")


def new_figure(
    width: float,
    height: float,
    extra: str,
    look: Look = LIGHT,
    layout: Literal["constrained"] | None = "constrained",
) -> Figure:
    """Create an empty figure, outside of pyplot."""
    for module in ("matplotlib", "matplotlib.figure"):
        require(module, extra)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout, facecolor=look.paper)
    FigureCanvasAgg(figure)  # so that its user can read pixels
    return figure


def title_of(figure: Figure, text: str, look: Look = LIGHT) -> None:
    """Write a title above all axes; dollar signs are not formulas."""
    figure.suptitle(
        "\n".join(map(printable, text.splitlines())), fontsize=12, color=look.ink, parse_math=False
    )


def frame(
    axes: Axes,
    look: Look = LIGHT,
    hidden: tuple[str, ...] = ("top", "right"),
    grid: Literal["x", "y", "both", ""] = "both",
) -> None:
    """Set the colours, grid and edges of axes."""
    axes.set_facecolor(look.paper)
    if grid:
        axes.grid(axis=grid, color=look.grid, linewidth=0.8)
    else:
        axes.grid(visible=False)
    axes.set_axisbelow(True)
    for name, edge in axes.spines.items():
        edge.set_visible(name not in hidden)
        edge.set_color(look.ink)
    axes.tick_params(which="both", colors=look.ink)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(look.ink)


def png(figure: Figure, dpi: int = 150) -> bytes:
    """Return a figure as a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    return content.getvalue()


def svg(figure: Figure) -> bytes:
    """Return a figure as an SVG file, with text as paths; equal figures give equal bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "raglane", "svg.fonttype": "path"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()
