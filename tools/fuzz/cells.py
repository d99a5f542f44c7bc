"""Random cells through everything that runs them, against their equations, until one differs.

Run it from ``tests``: ``python -m fuzz.cells ROUNDS SEED``.
"""

from __future__ import annotations

import sys

from fuzz.rounds import play_rounds
from raglane.errors import RaglaneError
from raglane.kernels.dispatch import BACKENDS
from random_cells import RandomCell, ask, difference, engine, naive

__all__ = ["main", "play"]


def play(seed: int) -> str | None:
    """Play one round; returns what went wrong, if anything did."""
    wanted = ask(seed, naive)
    for name in BACKENDS:
        if name not in ("reference", "program"):
            continue  # these know the cells of the library alone
        for schedule in BACKENDS[name].schedules if name == "reference" else ("auto",):
            try:
                fault = difference(ask(seed, engine(backend=name, schedule=schedule)), wanted)
            except RaglaneError as error:  # a cell of this grammar that no program can be made of
                fault = str(error)
            if fault is not None:
                return f"{name} {schedule}: {fault} in\n{RandomCell(seed)}"
    return None


def main(rounds: int = 1000, seed: int = 1) -> int:
    """Play so many rounds from a seed on, and count those that went wrong."""
    return play_rounds("cells", play, rounds, seed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
