"""Random cells on every backend that runs user-defined cells, compared with a plain loop over their
equations.
"""

from __future__ import annotations

from raglane.kernels.dispatch import BACKENDS
from random_cells import RandomCell, ask, difference, engine, naive

# The other backends run only the cells of the library.
_WAYS = [("reference", schedule) for schedule in BACKENDS["reference"].schedules] + [
    ("program", "auto")
]


def play(number: int) -> None:
    truth = ask(number, naive)
    for backend, schedule in _WAYS:
        fault = difference(ask(number, engine(backend=backend, schedule=schedule)), truth)
        assert fault is None, f"{backend} {schedule}: {fault} in\n{RandomCell(number)}"
