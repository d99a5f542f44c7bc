"""Check that tests notice faults: ``make faults``, or from ``tools``: ``python -m faults [--check]
[NAME...]``.

Each fault is put into a copy of the repository, and its tests run there until one fails. The tests
also run in a copy without a fault, where they must pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGSEGV

from faults.copies import Copy
from faults.place import Fault, NoPlaceError, all_faults

# Exit codes of pytest.
_PASSED, _FAILED = 0, 1
# Exit codes of a process that a fault in memory ended; in parallel runs the test fails.
_CRASHES = {-number: number.name for number in (SIGSEGV, SIGBUS, SIGABRT, SIGFPE)}


def main(arguments: Sequence[str]) -> int:
    """Return 0 if every chosen fault is noticed, or with --check has a place, else 1."""
    faults = all_faults()
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a fault, a pattern such as 'a-*', or a room; or all",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="also the faults of csrc, of which each is built: hours",
    )
    parser.add_argument(
        "--check", action="store_true", help="only find the place and the tests of each: seconds"
    )
    options = parser.parse_args(arguments)
    chosen: dict[str, Fault] = {}
    for pattern in options.names:
        matching = {
            name: fault
            for name, fault in faults.items()
            if fnmatch(name, pattern) or fault.room == pattern
        }
        if not matching:
            parser.error(f"no fault or room of the name {pattern}; there are {', '.join(faults)}")
        chosen |= matching
    if not options.names:
        chosen = {
            name: it
            for name, it in faults.items()
            if options.kernels or options.check or not it.needs_build
        }
    return check(chosen) if options.check else play(chosen, jobs=os.cpu_count() or 1)


def check(faults: dict[str, Fault]) -> int:
    """Print the faults without a place or a test; return 1 if there are any, else 0."""
    bad = len(faults) - len(_placed(faults))
    print(f"{len(faults)} faults, {bad} without a place")
    return int(bad > 0)


def _placed(faults: dict[str, Fault]) -> dict[str, tuple[tuple[str, str], list[str]]]:
    """Return the changed file with its text, and the tests, of each fault; print why others have no
    place.
    """
    placed = {}
    for name, fault in faults.items():
        try:
            placed[name] = fault.changed(), fault.arguments()
        except NoPlaceError as error:
            print(f"ERROR: {name} of {fault.room}.toml: {error}", flush=True)
    return placed


def play(faults: dict[str, Fault], jobs: int) -> int:
    """Play faults in parallel, those that need a build one after the other; return 0 if all are
    noticed, else 1.
    """
    placed = _placed(faults)
    bad = len(faults) - len(placed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        right = Copy(Path(folder, "right"))
        # The longest run first.
        runs = [pool.submit(_play_none, Copy(Path(folder, "without"), of=right), placed)]
        runs += [
            pool.submit(_play, right, name, faults[name], *placed[name])
            for name in placed
            if not faults[name].needs_build
        ]
        bad += sum(not run.result() for run in as_completed(runs))
        # One folder for all builds, so that each compiles only what differs from the one before.
        built = Copy(Path(folder, "built"), of=right)
        bad += sum(
            not _play(built, name, faults[name], *placed[name])
            for name in placed
            if faults[name].needs_build
        )
    print(
        f"{len(faults)} faults, {f'{bad} of the lines above need a change' if bad else 'all noticed'}"
    )
    return int(bad > 0)


def _play_none(copy: Copy, placed: dict[str, tuple[tuple[str, str], list[str]]]) -> bool:
    """Run the tests of all faults without a fault; return True if they pass."""
    code, output = copy.run(
        list(dict.fromkeys(test for _, tests in placed.values() for test in tests))
    )
    print(
        "the tests pass without a fault" if code == _PASSED else f"FAIL without a fault:\n{output}",
        flush=True,
    )
    return code == _PASSED


def _play(right: Copy, name: str, fault: Fault, change: tuple[str, str], tests: list[str]) -> bool:
    """Run the tests of a fault in a copy with the fault; return True if one of them fails."""
    try:
        with right.built(*change) if fault.needs_build else right.changed(name, *change) as copy:
            code, output = copy.run(tests)
    except RuntimeError as error:
        code, output = None, str(error)
    failed = [
        line.split()
        for line in output.splitlines()
        if line.startswith(("FAILED tests/", "ERROR tests/"))
    ]
    # Pytest ends with the same code if no test failed but the process did.
    is_noticed = code == _FAILED and bool(failed)
    if code in _CRASHES:
        print(f"noticed: {name}, by {_CRASHES[code]} in {fault.tests}", flush=True)
        return True
    if is_noticed:
        told = f"noticed: {name}, by {failed[0][1].removeprefix('tests/')}"
    elif code == _PASSED:
        told = f"NOT noticed: {name}, in {fault.room}, by {fault.tests}"
    else:
        told = f"ERROR: {name}: the tests {fault.tests} did not run (exit code {code}):\n{output}"
    print(told, flush=True)
    return is_noticed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
