"""Draws the pictures of the pages into docs/pictures, in light and dark: python docs/draw.py.

A test draws them again and compares.
"""

from __future__ import annotations

import json
from pathlib import Path

import raglane as rl

FOLDER = Path(__file__).parent / "pictures"
MEASURED = FOLDER.parents[1] / "benchmarks" / "results" / "measured.json"

CODE = {
    "padded": "rl.plot.padded([9, 8, 6, 4, 3, 2])",
    "packed": "rl.plot.packed([9, 8, 6, 4, 3, 2])",
    "schedules": "rl.plot.schedules([4, 6, 8, 5, 4, 3, 7, 8], lanes=4)",
    "waste": "rl.plot.waste([number % 97 + 3 for number in range(3000)])",
}
"""The code of each picture by name, as shown in the pages."""

OF_MEASUREMENTS = {
    "times": 'rl.plot.times(measured["times"])',
    "roofline": 'rl.plot.roofline(**measured["roofline"])',
}
"""Pictures of results of ``benchmarks/measured.py``, which the pages show without the code."""


def draw(folder: Path) -> None:
    """Write every picture to a folder, in both themes."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"rl": rl, "measured": json.loads(MEASURED.read_text(encoding="utf-8"))}
    for name, code in (CODE | OF_MEASUREMENTS).items():
        for theme, ending in (("light", ""), ("dark", "-dark")):
            with rl.plot.theme(theme):
                eval(code, names).save(folder / f"{name}{ending}.svg")


if __name__ == "__main__":
    draw(FOLDER)
