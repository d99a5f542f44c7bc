"""Does a test notice it? ``make faults``, or from ``tools``: ``python -m faults [--check] [--kernels] [NAME...]``.

Each fault is put into a copy of the repository, and the tests that it names run there until one fails. The same tests
run in a copy without a fault as well: what fails there notices nothing.
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

from faults.copies import Copy
from faults.place import Fault, NoPlaceError, all_faults

# Exit codes of pytest.
_PASSED, _FAILED = 0, 1


def main(arguments: Sequence[str]) -> int:
    """Play faults, all of Python's where none is named, and say of each whether its tests notice it.

    Returns:
        0 where every fault was noticed, or has a place with --check, else 1.
    """
    faults = all_faults()
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault, a pattern such as 'a-*', or a room; or all")
    parser.add_argument("--kernels", action="store_true", help="also those of csrc, each of which is built: minutes")
    parser.add_argument("--check", action="store_true", help="only whether each has a place and its tests: seconds")
    given = parser.parse_args(arguments)
    for name in given.names:
        if not any(fnmatch(known, name) or fault.room == name for known, fault in faults.items()):
            parser.error(f"no fault or room of the name {name}; there are {', '.join(faults)}")
    chosen = {
        name: fault
        for name, fault in faults.items()
        if (
            any(fnmatch(name, wanted) or fault.room == wanted for wanted in given.names)
            if given.names
            else given.kernels or given.check or not fault.needs_build
        )
    }
    return check(chosen) if given.check else play(chosen, jobs=os.cpu_count() or 1)


def check(faults: dict[str, Fault]) -> int:
    """Print which faults have no place in today's source, or tests that are not there.

    Returns:
        0 where there is none, else 1.
    """
    bad = 0
    for name, fault in faults.items():
        try:
            fault.changed()
            fault.arguments()
        except NoPlaceError as error:
            bad += 1
            print(f"{fault.room}.toml: {name}: {error}\n")
    print(f"{len(faults)} faults, {f'{bad} without a place' if bad else 'each has its place'}")
    return int(bad > 0)


def play(faults: dict[str, Fault], jobs: int) -> int:
    """Play faults, several side by side, and print what comes of each as it comes.

    Args:
        faults: by their names.
        jobs: how many run at once; those that need a build run one after the other, after the rest.

    Returns:
        0 where every fault was noticed, else 1.
    """
    quick = {name: fault for name, fault in faults.items() if not fault.needs_build}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        right = Copy(Path(folder, "right"))
        # First what takes longest. Places are found in this thread alone, while others play.
        found = [pool.submit(_without, Copy(Path(folder, "without"), of=right), faults)]
        found += [pool.submit(_with, right, name, fault, _change(fault)) for name, fault in quick.items()]
        good = [_say(*done.result()) for done in as_completed(found)]
        # In one folder, where a build compiles only what this fault and the one before changed.
        built = Copy(Path(folder, "built"), of=right)
        good += [_say(*_with_build(built, name, fault)) for name, fault in faults.items() if fault.needs_build]
    bad = good.count(False)
    print(f"{len(faults)} faults, {f'{bad} of the lines above need somebody' if bad else 'all noticed'}")
    return int(bad > 0)


def _say(good: bool, words: str) -> bool:
    print(words, flush=True)
    return good


def _without(copy: Copy, faults: dict[str, Fault]) -> tuple[bool, str]:
    """Run the tests of all faults where there is none; a fault without a place is told of by itself."""
    tests: dict[str, None] = {}
    for fault in faults.values():
        try:
            tests |= dict.fromkeys(fault.arguments())
        except NoPlaceError:
            continue
    code, said = copy.run(list(tests))
    return (True, "the tests pass without a fault") if code == _PASSED else (False, f"FAIL without a fault:\n{said}")


def _change(fault: Fault) -> tuple[str, str] | NoPlaceError:
    try:
        return fault.changed()
    except NoPlaceError as error:
        return error


def _with(right: Copy, name: str, fault: Fault, change: tuple[str, str] | NoPlaceError) -> tuple[bool, str]:
    """Run the tests of a fault of Python's in a copy of its own."""
    try:
        if isinstance(change, NoPlaceError):
            raise change
        with right.changed(name, *change) as copy:
            return _verdict(name, fault, *copy.run(fault.arguments()))
    except NoPlaceError as error:
        return False, f"ERROR: {name}: {error}"


def _with_build(copy: Copy, name: str, fault: Fault) -> tuple[bool, str]:
    """Build the kernels with a fault, run its tests, and take the fault out of the copy again."""
    try:
        with copy.built(*fault.changed()):
            return _verdict(name, fault, *copy.run(fault.arguments()))
    except (NoPlaceError, RuntimeError) as error:
        return False, f"ERROR: {name}: {error}"


def _verdict(name: str, fault: Fault, code: int | None, said: str) -> tuple[bool, str]:
    if code == _PASSED:
        return False, f"NOT noticed: {name}, in {fault.room}, by {fault.tests}"
    lines = [line.split() for line in said.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    # A process that failed by itself, and no test, ends with the same code.
    if code != _FAILED or not lines:
        return False, f"ERROR: {name}: the tests {fault.tests} did not run (exit code {code}):\n{said}"
    return True, f"noticed: {name}, by {lines[0][1].removeprefix('tests/')}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
