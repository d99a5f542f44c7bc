"""Does a test notice it? ``make faults``, or from ``tests``: ``python -m faults [--kernels] [NAME...]``.

Each fault is put into a copy of the repository, and the tests that it names run there until one fails. The same tests
run in a copy without a fault as well: what fails there notices nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from faults import (
    batches,
    commands,
    datasets,
    exports,
    inspection,
    kernels,
    layers,
    native,
    order,
    pictures,
    planning,
    programs,
    ranks,
    tasks,
    traced,
)
from faults.fault import Copy, Fault, NoPlaceError

__all__ = ["FAULTS", "main", "play"]

FAULTS: dict[str, Fault] = {
    **batches.FAULTS,
    **layers.FAULTS,
    **kernels.FAULTS,
    **commands.FAULTS,
    **datasets.FAULTS,
    **inspection.FAULTS,
    **native.FAULTS,
    **pictures.FAULTS,
    **planning.FAULTS,
    **order.FAULTS,
    **exports.FAULTS,
    **programs.FAULTS,
    **ranks.FAULTS,
    **tasks.FAULTS,
    **traced.FAULTS,
}
# Exit codes of pytest.
_PASSED, _FAILED = 0, 1


def main(arguments: Sequence[str]) -> int:
    """Play faults, all of Python's where none is named, and say of each whether its tests notice it.

    Returns:
        0 where every fault was noticed, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault; all of them where none is named")
    parser.add_argument("--kernels", action="store_true", help="also those of csrc, each of which is built: minutes")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(FAULTS)):
        parser.error(f"no fault of the name {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    chosen = {
        name: fault
        for name, fault in FAULTS.items()
        if (name in given.names if given.names else given.kernels or not fault.needs_build)
    }
    return play(chosen, jobs=os.cpu_count() or 1)


def play(faults: dict[str, Fault], jobs: int) -> int:
    """Play faults, several side by side, and print what comes of each as it comes.

    Args:
        faults: by their names.
        jobs: how many run at once; those that need a build run one after the other, after the rest.

    Returns:
        0 where every fault was noticed, else 1.
    """
    quick = [name for name, fault in faults.items() if not fault.needs_build]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        # First what takes longest.
        found = [pool.submit(_without, Path(folder, "without"), faults.values())]
        found += [pool.submit(_with, Path(folder, name), name, faults[name]) for name in quick]
        good = [_say(*done.result()) for done in as_completed(found)]
        # In one folder, where a build compiles only what this fault and the one before changed.
        built = Copy(Path(folder, "built")) if len(quick) < len(faults) else None
        for name, fault in faults.items():
            if built is not None and fault.needs_build:
                good.append(_say(*_with_build(built, name, fault)))
    bad = good.count(False)
    print(f"{len(faults)} faults, {f'{bad} of the lines above need somebody' if bad else 'all noticed'}")
    return int(bad > 0)


def _say(good: bool, words: str) -> bool:
    print(words, flush=True)
    return good


def _without(folder: Path, faults: Iterable[Fault]) -> tuple[bool, str]:
    """Run the tests of all faults where there is none."""
    tests = dict.fromkeys(name for fault in faults for name in fault.tests.split())
    code, said = Copy(folder).run(" ".join(tests))
    return (True, "the tests pass without a fault") if code == _PASSED else (False, f"FAIL without a fault:\n{said}")


def _with(folder: Path, name: str, fault: Fault) -> tuple[bool, str]:
    """Run the tests of one fault of Python's in a copy of its own."""
    try:
        text = fault.changed()
    except NoPlaceError as error:
        return False, f"ERROR: {name}: {error}"
    copy = Copy(folder)
    (copy.folder / fault.file).write_text(text)
    verdict = _verdict(name, fault, *copy.run(fault.tests))
    shutil.rmtree(folder)
    return verdict


def _with_build(copy: Copy, name: str, fault: Fault) -> tuple[bool, str]:
    """Build the kernels with one fault, run its tests, and take the fault out of the copy again."""
    path = copy.folder / fault.file
    right = path.read_text()
    try:
        path.write_text(fault.changed())
        copy.build()
        return _verdict(name, fault, *copy.run(fault.tests))
    except (NoPlaceError, RuntimeError) as error:
        return False, f"ERROR: {name}: {error}"
    finally:
        path.write_text(right)


def _verdict(name: str, fault: Fault, code: int | None, said: str) -> tuple[bool, str]:
    if code == _PASSED:
        return False, f"NOT noticed: {name}, in {fault.file}, by {fault.tests}"
    lines = [line.split() for line in said.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    # A process that failed by itself, and no test, ends with the same code.
    if code != _FAILED or not lines:
        return False, f"ERROR: {name}: the tests {fault.tests} did not run (exit code {code}):\n{said}"
    return True, f"noticed: {name}, by {lines[0][1].removeprefix('tests/')}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
