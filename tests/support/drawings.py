"""The pictures with images in tests/plot/images, each right and with one mistake, and the contents
of a figure.

Run as a script, this draws the images again: look at them before you commit them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image
from matplotlib.figure import Figure
from matplotlib.text import Text

import raglane as rl
from raglane import plot
from raglane.plot.picture import Picture

_DPI = 50
IMAGES = Path(__file__).parents[1] / "plot" / "images"

SIX, EIGHT = [9, 8, 6, 4, 3, 2], [4, 6, 8, 5, 4, 3, 7, 8]
_WORDS = [["the", "cat", "sat"], [], ["no"]]


def _lengths(longest: int = 90) -> list[int]:
    return [(37 * place) % longest + place % 7 for place in range(300)]


def _ragged(features: int, slope: float = 0.1) -> rl.Ragged:
    return rl.Ragged.from_flat(
        (torch.arange(4.0 * features) * slope).view(4, features) % 1, lengths=[3, 0, 1]
    )


def _dark(draw: Callable[[], Picture]) -> Callable[[], Picture]:
    def drawn() -> Picture:
        with plot.theme("dark"):
            return draw()

    return drawn


PICTURES: dict[str, tuple[Callable[[], Picture], Callable[[], Picture]]] = {
    "padded": (lambda: plot.padded(SIX), lambda: plot.padded([9, 8, 6, 4, 2, 3])),
    "padded-empty": (lambda: plot.padded([3, 0, 2]), lambda: plot.padded([3, 1, 1])),
    "padded-200": (
        lambda: plot.padded(_lengths()[:200]),
        lambda: plot.padded(sorted(_lengths()[:200])),
    ),
    "packed": (lambda: plot.packed(SIX), lambda: plot.packed([9, 8, 6, 4, 4, 1])),
    "packed-dark": (_dark(lambda: plot.packed(SIX)), lambda: plot.packed(SIX)),
    "lanes": (lambda: plot.lanes(EIGHT, 4, threads=2), lambda: plot.lanes(EIGHT, 4)),
    "lanes-sample": (lambda: plot.lanes(_lengths()), lambda: plot.lanes(_lengths(91))),
    "schedules": (lambda: plot.schedules(EIGHT, 4), lambda: plot.schedules(EIGHT[::-1], 4)),
    "histogram": (lambda: plot.histogram(_lengths(), 64), lambda: plot.histogram(_lengths(), 65)),
    "waste": (lambda: plot.waste(_lengths()), lambda: plot.waste(_lengths(80))),
    "attention": (
        lambda: plot.attention(_ragged(2), labels=_WORDS),
        lambda: plot.attention(_ragged(2, 0.11), labels=_WORDS),
    ),
    "gates": (
        lambda: plot.gates({"input": _ragged(3), "forget": _ragged(1)}),
        lambda: plot.gates({"input": _ragged(3), "forget": _ragged(1, 0.12)}),
    ),
    "norms": (lambda: plot.norms({"h": _ragged(5)}), lambda: plot.norms({"h": _ragged(5, 0.11)})),
}
"""Each picture, and the same with one mistake, which the test of the images must find."""


def difference(figure: Figure, reference: Path) -> float:
    """Return the root mean square difference of the pixels, from 0 to 1; 1 if the sizes differ."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    content.seek(0)
    found, known = (
        image.imread(content).astype(np.float64),
        image.imread(reference).astype(np.float64),
    )
    return float(np.sqrt(np.mean((found - known) ** 2))) if found.shape == known.shape else 1.0


def texts_at(axes: Any) -> dict[tuple[float, float], str]:
    """Return the texts in axes by their positions."""
    return {text.get_position(): text.get_text() for text in axes.texts}


def faults_of_texts(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return descriptions of texts below 8 points, over another text, or beyond the figure."""
    drawn: dict[int, tuple[str, float, Any]] = {}
    draw = Text.draw

    def record(self: Text, renderer: Any, *args: Any, **options: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn[id(self)] = (
                self.get_text(),
                float(self.get_fontsize()),
                self.get_window_extent(renderer),
            )
        draw(self, renderer, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.draw_without_rendering()
    assert drawn
    texts = list(drawn.values())
    faults = [f"{text!r} has {size} points" for text, size, _ in texts if size < 8]
    for text, _, box in texts:
        if box.x0 < 0 or box.y0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            faults.append(f"{text!r} leaves the figure")
    x0, y0, x1, y1 = np.array([box.extents for _, _, box in texts]).T
    overlaps = (x0[:, None] < x1) & (x0 < x1[:, None]) & (y0[:, None] < y1) & (y0 < y1[:, None])
    for one, other in np.argwhere(np.triu(overlaps, 1)):
        faults.append(f"{texts[one][0]!r} overlaps {texts[other][0]!r}")
    return faults


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, (draw, _) in PICTURES.items():
        draw().figure.savefig(IMAGES / f"{name}.png", dpi=_DPI)
