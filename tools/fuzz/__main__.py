"""Run one fuzzer, or all in turn: ``make fuzz``, or from ``tools``: ``python -m fuzz [NAME]
[--rounds N] [--seed N]``.

A fuzzer is a module with a function ``play(number)``, which plays one round and raises if something
is wrong, or with ``start(folder)``, which returns one. The number of a round is its seed, so each
round can be repeated alone.
"""

from __future__ import annotations

import argparse
import importlib
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import raglane.native
from guarded import release

HERE = Path(__file__).parents[1]
COMMAND = [sys.executable, "-W", "ignore", "-m", "fuzz"]
# Rounds that take about ten seconds.
ROUNDS = {
    "numbers": 60,
    "memory": 250,
    "operators": 3000,
    "programs": 600,
    "malformed_files": 1000,
    "kill_points": 6,
    "killed_ranks": 4,
    "conversions": 12,
    "commands": 40,
    "cells": 150,
    "streams": 20,
}
_LONGEST = 900


def main(arguments: Sequence[str]) -> int:
    """Return the number of rounds, or of runs of a fuzzer, that failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "name",
        nargs="?",
        choices=ROUNDS,
        help="a fuzzer; default: all in turn, each in a new process",
    )
    parser.add_argument(
        "--rounds", type=int, default=100, help="rounds of one fuzzer; default: %(default)s"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="time for all fuzzers; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, help="number of the first round; default: random")
    parser.add_argument(
        "--kernels", help="a folder whose lib/ contains another build of the kernels"
    )
    options = parser.parse_args(arguments)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    if options.kernels is not None:
        raglane.native.__path__.insert(0, options.kernels)
    return (
        play_all(options.seconds, seed)
        if options.name is None
        else play(options.name, options.rounds, seed)
    )


def play(name: str, rounds: int, seed: int) -> int:
    """Play rounds, print each failure with the command that repeats it, and return the number of
    failures.
    """
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = importlib.import_module(f"fuzz.{name}")
        play_round = (
            fuzzer.start(Path(folder).resolve()) if hasattr(fuzzer, "start") else fuzzer.play
        )
        for number in range(seed, seed + rounds):
            # If a signal ends the process, this line tells the round.
            print(f"\r{name}: round {number}", end="", file=sys.stderr, flush=True)
            try:
                play_round(number)
            except Exception as error:
                failures += 1
                print(f"python -m fuzz {name} --rounds 1 --seed {number}: {error}", flush=True)
                traceback.print_exc()
            release()
    print(f"\n{name}: {rounds} rounds, {failures} failures", file=sys.stderr)
    return failures


def play_all(seconds: float, seed: int) -> int:
    """Run each fuzzer at least once, and again until the time is over; return how many runs
    failed.
    """
    print(f"make fuzz SECONDS={seconds:g} SEED={seed}", flush=True)
    chance, start, turns, failures = random.Random(seed), time.monotonic(), 0, 0
    while turns < len(ROUNDS) or time.monotonic() - start < seconds:
        name = list(ROUNDS)[turns % len(ROUNDS)]
        turns += 1
        arguments = [name, "--rounds", str(ROUNDS[name]), "--seed", str(chance.randrange(10**6))]
        failure = _run(arguments)
        if failure is not None:
            failures += 1
            print(f"FAILED: python -m fuzz {' '.join(arguments)}: {failure}", flush=True)
    print(f"{turns} runs in {time.monotonic() - start:.0f} s, {failures} failed", flush=True)
    return failures


def _run(arguments: Sequence[str]) -> str | None:
    """Run a fuzzer in a new process; return its exit code and output if it failed."""
    try:
        done = subprocess.run(
            [*COMMAND, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=HERE,
            timeout=_LONGEST,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_LONGEST} seconds"
    if done.returncode == 0:
        return None
    # Of the lines of progress, only the last one counts.
    *lines, last = done.stderr.splitlines() or [""]
    errors = "\n".join([*(line for line in lines if ": round " not in line), last])
    return f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{errors[-4000:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
