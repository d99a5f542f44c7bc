"""The rounds of an attack that a number each repeats."""

from __future__ import annotations

import sys
from collections.abc import Callable

from guarded import release


def play_rounds(name: str, play: Callable[[int], str | None], rounds: int, seed: int) -> int:
    """Play rounds from a seed on; prints what went wrong, with the command that repeats it.

    Args:
        name: the attack's module.
        play: a round by its number; what went wrong, or None.
        rounds: how many.
        seed: the number of the first.

    Returns:
        How many rounds went wrong.
    """
    faults = 0
    for number in range(seed, seed + rounds):
        print(f"\r{name}: round {number}", end="", file=sys.stderr, flush=True)  # the last word, where a signal ends it
        fault = play(number)
        release()
        if fault is not None:
            faults += 1
            print(file=sys.stderr)
            print(f"python -m fuzz.{name} 1 {number}: {fault}", flush=True)
    print(file=sys.stderr)
    return faults
