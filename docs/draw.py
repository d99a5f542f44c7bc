"""Draw the pictures of the documents anew, in light and dark: python docs/draw.py.

They lie in docs/pictures. A test draws them again and compares.
"""

from __future__ import annotations

from pathlib import Path

import raglane as rl

FOLDER = Path(__file__).parent / "pictures"

CODE = {
    "padded": "rl.plot.padded([9, 8, 6, 4, 3, 2])",
    "packed": "rl.plot.packed([9, 8, 6, 4, 3, 2])",
    "schedules": "rl.plot.schedules([4, 6, 8, 5, 4, 3, 7, 8], lanes=4)",
    "waste": "rl.plot.waste([number % 97 + 3 for number in range(3000)])",
}
"""Each picture by its name: what draws it, as the documents show it."""


def draw(folder: Path) -> None:
    """Write every picture to a folder, for both themes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in CODE.items():
        for theme, ending in (("light", ""), ("dark", "-dark")):
            with rl.plot.theme(theme):
                eval(code, {"rl": rl}).save(folder / f"{name}{ending}.svg")


if __name__ == "__main__":
    draw(FOLDER)
