"""All attacks in turn, for as long as is asked: ``python -m fuzz SECONDS [SEED]``, or ``make fuzz``.

Each attack runs in a process of its own, which a signal may end, a few seconds at a time, with a new seed each time.
What goes wrong is said with the command that repeats it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent.parent
COMMAND = [sys.executable, "-W", "ignore", "-m"]
# Rounds that take some ten seconds.
ROUNDS = {
    "numbers": 60,
    "memory": 250,
    "programs": 600,
    "malformed_files": 1000,
    "kill_points": 6,
    "killed_ranks": 4,
    "conversions": 12,
    "commands": 40,
    "cells": 150,
}
_LONGEST = 900


def main(seconds: float, seed: int) -> int:
    """Attack until the time is over, each of ``ROUNDS`` at least once.

    Returns:
        How many attacks found something.
    """
    print(f"make fuzz SECONDS={seconds:g} SEED={seed}", flush=True)
    chance, start, turns, faults = random.Random(seed), time.monotonic(), 0, 0
    while turns < len(ROUNDS) or time.monotonic() - start < seconds:
        name = list(ROUNDS)[turns % len(ROUNDS)]
        turns += 1
        attack = [f"fuzz.{name}", str(ROUNDS[name]), str(chance.randrange(10**6))]
        fault = _play(attack)
        if fault is not None:
            faults += 1
            print(f"FAULT: python -m {' '.join(attack)}: {fault}", flush=True)
    print(f"{turns} attacks in {time.monotonic() - start:.0f} s, {faults} found something", flush=True)
    return faults


def _play(attack: Sequence[str]) -> str | None:
    """How an attack ended that found something, and what it said."""
    try:
        done = subprocess.run(
            [*COMMAND, *attack], capture_output=True, text=True, check=False, cwd=HERE, timeout=_LONGEST
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_LONGEST} seconds"
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return f"exit code {done.returncode}\n{said}" if done.returncode != 0 else None


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(float(given[0]) if given else 60, int(given[1]) if len(given) > 1 else random.randrange(10**6)) > 0)
