"""All attacks in turn, for as long as is asked: ``python -m attacks SECONDS [SEED]``, or ``make fuzz``.

Each attack runs in a process of its own, which a signal may end, a few seconds at a time, with a new seed each time.
What goes wrong is said with the command that repeats it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time

# Rounds that take some ten seconds.
ROUNDS = {"numbers": 60, "memory": 250, "malformed_files": 60, "kill_points": 12}


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
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            f"attacks.{name}",
            str(ROUNDS[name]),
            str(chance.randrange(10**6)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            faults += 1
            print(f"FAULT (exit code {done.returncode}): {' '.join(command[3:])}")
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", flush=True)
    print(f"{turns} attacks in {time.monotonic() - start:.0f} s, {faults} found something", flush=True)
    return faults


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(float(given[0]) if given else 60, int(given[1]) if len(given) > 1 else random.randrange(10**6)) > 0)
