"""The pictures whose images are kept in tests/plot/images, each as it should be and with one thing wrong.

Run as a script, this draws the images anew: look at them before you commit them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import raglane as rl
from drawn import DPI
from raglane import plot
from raglane.plot import Picture

__all__ = ["EIGHT", "IMAGES", "PICTURES", "SIX", "WRONG"]

IMAGES = Path(__file__).parents[1] / "plot" / "images"

SIX, EIGHT = [9, 8, 6, 4, 3, 2], [4, 6, 8, 5, 4, 3, 7, 8]
_WORDS = [["the", "cat", "sat"], [], ["no"]]


def _lengths(longest: int = 90) -> list[int]:
    return [(37 * place) % longest + place % 7 for place in range(300)]


def _ragged(features: int, slope: float = 0.1) -> rl.Ragged:
    values = (torch.arange(4.0 * features) * slope).view(4, features) % 1
    return rl.Ragged.from_flat(values, lengths=[3, 0, 1])


def _dark(draw: Callable[[], Picture]) -> Callable[[], Picture]:
    def drawn() -> Picture:
        with plot.theme("dark"):
            return draw()

    return drawn


def _times(slowest: float = 4e-7) -> Picture:
    rows = [("padded", 0.25, slowest), ("padded", 1.0, 1e-7), ("lanes", 0.25, 1e-7), ("lanes", 1.0, 1e-7)]
    return plot.times([{"method": method, "fill": fill, "seconds": seconds} for method, fill, seconds in rows])


def _roofline(rate: float = 60e9) -> Picture:
    kernels = [{"name": "lstm", "intensity": 8, "rate": rate}, {"name": "sru", "intensity": 0.5, "rate": 9e9}]
    return plot.roofline(kernels, peak=1e11, bandwidth=2e10)


PICTURES: dict[str, Callable[[], Picture]] = {
    "padded": lambda: plot.padded(SIX),
    "padded-empty": lambda: plot.padded([3, 0, 2]),
    "padded-200": lambda: plot.padded(_lengths()[:200]),
    "packed": lambda: plot.packed(SIX),
    "packed-dark": _dark(lambda: plot.packed(SIX)),
    "lanes": lambda: plot.lanes(EIGHT, 4, threads=2),
    "lanes-sample": lambda: plot.lanes(_lengths()),
    "schedules": lambda: plot.schedules(EIGHT, 4),
    "schedules-dark": _dark(lambda: plot.schedules(EIGHT, 4)),
    "histogram": lambda: plot.histogram(_lengths(), 64),
    "waste": lambda: plot.waste(_lengths()),
    "times": _times,
    "roofline": _roofline,
    "attention": lambda: plot.attention(_ragged(2), labels=_WORDS),
    "gates": lambda: plot.gates({"input": _ragged(3), "forget": _ragged(1)}),
    "norms": lambda: plot.norms({"h": _ragged(5)}),
}

WRONG: dict[str, Callable[[], Picture]] = {
    "padded": lambda: plot.padded([9, 8, 6, 4, 2, 3]),
    "padded-empty": lambda: plot.padded([3, 1, 1]),
    "padded-200": lambda: plot.padded(sorted(_lengths()[:200])),
    "packed": lambda: plot.packed([9, 8, 6, 4, 4, 1]),
    "packed-dark": lambda: plot.packed(SIX),
    "lanes": lambda: plot.lanes(EIGHT, 4),
    "lanes-sample": lambda: plot.lanes(_lengths(91)),
    "schedules": lambda: plot.schedules(EIGHT[::-1], 4),
    "schedules-dark": _dark(lambda: plot.schedules(EIGHT, 5)),
    "histogram": lambda: plot.histogram(_lengths(), 65),
    "waste": lambda: plot.waste(_lengths(80)),
    "times": lambda: _times(3.5e-7),
    "roofline": lambda: _roofline(30e9),
    "attention": lambda: plot.attention(_ragged(2, 0.11), labels=_WORDS),
    "gates": lambda: plot.gates({"input": _ragged(3), "forget": _ragged(1, 0.12)}),
    "norms": lambda: plot.norms({"h": _ragged(5, 0.11)}),
}
"""The same with one thing wrong: no test of the images may let one pass."""

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw().figure.savefig(IMAGES / f"{name}.png", dpi=DPI)
