"""The class of all pictures, and their themes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raglane._utils import drawing
from raglane._utils.checks import check_choice, check_kind
from raglane._utils.drawing import DARK, LIGHT, Look, new_figure
from raglane._utils.files import check_suffix
from raglane._utils.messages import require
from raglane.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SMALL = 8.0
"""The smallest size of text in points: of ticks and of texts in cells."""
TEXT = 9.0
"""The size of the names of axes."""
TITLE = 10.0
"""The size of titles."""

_LOOKS = {"light": LIGHT, "dark": DARK}
_look: ContextVar[Look] = ContextVar("look", default=LIGHT)


@contextmanager
def theme(name: str) -> Iterator[None]:
    """Draw the pictures of a block of code in dark on light (the default), or in light on dark.

    Args:
        name: ``"light"`` or ``"dark"``.

    Raises:
        ArgumentError: another name.

    Example:
        >>> import raglane as rl
        >>> with rl.plot.theme("dark"):
        ...     picture = rl.plot.packed([3, 1])
        >>> picture.figure.get_facecolor() < (0.1, 0.1, 0.1)
        True
    """
    token = _look.set(_LOOKS[check_choice("name", name, tuple(_LOOKS))])
    try:
        yield
    finally:
        _look.reset(token)


def look() -> Look:
    """Return the colours of the current theme."""
    return _look.get()


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure with its axes: the result of every function of :mod:`raglane.plot`.

    A notebook shows it, unless it was drawn into axes of the caller, who shows their figure.

    Attributes:
        figure: matplotlib's figure. It is not registered in pyplot, so it need not be closed.
        axes: the axes, in the order that the function documents.
        is_given: True if the axes are the caller's.

    Example:
        >>> import raglane as rl
        >>> picture = rl.plot.padded([3, 1])
        >>> len(picture.axes), picture._repr_svg_()[:5]
        (1, '<?xml')
    """

    figure: Figure
    axes: tuple[Axes, ...]
    is_given: bool = False

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture to an SVG or PNG file, depending on the suffix; an existing file is
        overwritten.

        The same picture gives the same bytes. The letters of an SVG are shapes, so it looks the
        same everywhere.

        Raises:
            ArgumentTypeError: ``path`` is not a path.
            ArgumentError: the suffix is neither ``.svg`` nor ``.png``.
            OSError: the file cannot be written.
        """
        check_kind("path", path, (str, PathLike), "the path of a file", 'pass e.g. "picture.svg"')
        file = Path(path)
        check_suffix(
            "path", file, (".svg", ".png"), "call picture.figure.savefig for other formats"
        )
        encode = drawing.svg if file.suffix.lower() == ".svg" else drawing.png
        file.write_bytes(encode(self.figure))

    def _repr_svg_(self) -> str | None:
        """Return the SVG that a notebook shows."""
        return None if self.is_given else drawing.svg(self.figure).decode()


class Box(NamedTuple):
    """The rectangle of axes in a figure, in inches from its left and bottom edge."""

    left: float
    bottom: float
    width: float
    height: float


def picture_in(axes: Any, size: tuple[float, float], boxes: Sequence[Box]) -> Picture:
    """Return a picture with the caller's axes, or with new ones in a new figure, in the colours of
    the theme.
    """
    if axes is None:
        return _new_picture(size, boxes)
    require("matplotlib.axes", "plot")
    from matplotlib.axes import Axes

    plots = [axes]
    if isinstance(axes, np.ndarray):
        plots = list(axes.flat)
    elif isinstance(axes, list | tuple):
        plots = list(axes)
    fix = "pass the result of figure.subplots(), or None for a new figure"
    for plot in plots:
        check_kind("axes", plot, Axes, "axes of matplotlib", fix)
    if len(plots) != len(boxes):
        rule = f"{len(boxes)} axes, one for each part of the picture"
        raise ShapeError("axes", f"{len(plots)} axes", rule, fix)
    for plot in plots:
        drawing.frame(plot, look(), grid="")
    return Picture(plots[0].figure, tuple(plots), is_given=True)


def _new_picture(size: tuple[float, float], boxes: Sequence[Box]) -> Picture:
    figure = new_figure(*size, "plot", look(), layout=None)
    scale = np.array([*size, *size])
    plots = tuple(figure.add_axes(tuple((np.array(box) / scale).tolist())) for box in boxes)
    for plot in plots:
        plot.set_facecolor(look().paper)
    return Picture(figure, plots)


def width_of(text: str, size: float = SMALL) -> float:
    """Return the width of a line of text in inches."""
    # All digits have the same width, so most numbers are measured once.
    return _measure(re.sub("[0-9]", "0", text), size)


@lru_cache(maxsize=10_000)
def _measure(text: str, size: float) -> float:
    require("matplotlib.textpath", "plot")
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    # Dollar signs must not begin a formula. Control points bound the curves; the extents of the
    # curves take a hundred times as long.
    path = TextPath((0, 0), text.replace("$", r"\$"), size=size)
    return float(path.vertices[:, 0].max(initial=0.0)) / 72


def label(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Write the title and the names of both axes in the colours of the theme."""
    ink = look().ink
    axes.set_title(title, fontsize=TITLE, color=ink, loc="left", parse_math=False)
    axes.set_xlabel(x, fontsize=TEXT, color=ink, loc="left", parse_math=False)
    axes.set_ylabel(y, fontsize=TEXT, color=ink, parse_math=False)
    axes.tick_params(which="both", colors=ink, labelsize=SMALL)
