"""What a figure of matplotlib draws, as a reader sees it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib import image
from matplotlib.figure import Figure
from matplotlib.text import Text

__all__ = ["DPI", "difference", "faults_of_texts", "pixels", "texts_of"]

DPI = 50


def pixels(figure: Figure) -> npt.NDArray[np.float64]:
    """``(height, width, 4)``, from 0 to 1."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    content.seek(0)
    read: npt.NDArray[np.float64] = image.imread(content).astype(np.float64)
    return read


def difference(figure: Figure, reference: Path) -> float:
    """The root of the mean squared difference of the pixels, from 0 to 1; 1 where the sizes differ."""
    found, known = pixels(figure), image.imread(reference).astype(np.float64)
    return float(np.sqrt(np.mean((found - known) ** 2))) if found.shape == known.shape else 1.0


def texts_of(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, Any]]:
    """Every text that is really drawn, with its size in points and its box in pixels."""
    drawn: dict[int, tuple[str, float, Any]] = {}
    draw = Text.draw

    def record(self: Text, renderer: Any, *args: Any, **options: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn[id(self)] = self.get_text(), float(self.get_fontsize()), self.get_window_extent(renderer)
        draw(self, renderer, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.draw_without_rendering()
    return list(drawn.values())


def faults_of_texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that are below 8 points, overlap another, or leave the figure."""
    texts = texts_of(figure, monkeypatch)
    assert texts
    faults = [f"{text!r} has {size} points" for text, size, _ in texts if size < 8]
    for text, _, box in texts:
        if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            faults.append(f"{text!r} leaves the figure")
    # Of each box, the places of the others after it that it overlaps.
    x0, y0, x1, y1 = np.array([box.extents for _, _, box in texts]).T
    overlaps = (x0[:, None] < x1) & (x0 < x1[:, None]) & (y0[:, None] < y1) & (y0 < y1[:, None])
    for one, other in np.argwhere(np.triu(overlaps, 1)):
        faults.append(f"{texts[one][0]!r} overlaps {texts[other][0]!r}")
    return faults
