"""The list of faults fits today's source, and what plays them tells a fault that is noticed from one that is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from faults.__main__ import FAULTS, main
from faults.fault import ROOT, Fault
from looped import looped

TESTS = "test_costs.py::test_multiplications_and_additions"


@looped("name", FAULTS)
def test_what_a_fault_changes_is_there_once(name: str) -> None:
    """Where this fails the source has changed: write the fault anew, so that it spoils what it spoilt."""
    fault = FAULTS[name]
    assert fault.changed() != (ROOT / fault.file).read_text()
    for test in fault.tests.split():
        path, *parts = test.split("::")
        text = (ROOT / "tests" / path).read_text()
        assert all(f"def {part.partition('[')[0]}(" in text for part in parts), test
    assert fault.tests


_FILE, _OLD = "src/raglane/schedules/costs.py", "additions=count.elements - count.sequences"
# Two plays: one whose tests pass without a fault, and one whose tests do not.
_PLAYS = [
    {
        "one-too-many": Fault(_FILE, _OLD, f"{_OLD} + 1", TESTS),
        "nothing-changed": Fault(_FILE, _OLD, f"{_OLD} + 0", TESTS),
        "no-such-text": Fault(_FILE, "a text that is not there", "", TESTS),
    },
    {"x": Fault(_FILE, "not there", "", "test_costs.py::test_that_is_not_there")},
]
_CODE = f"""
from faults.__main__ import play
from faults.fault import Fault
for faults in {_PLAYS}:
    print("exit code", play(faults, 2))
"""


def test_what_is_noticed_and_what_is_not() -> None:
    """In copies: the package of this process, and of those that it starts, stays as it is.

    In a process of its own: the server that forks a process for each copy is one for all who fork so here, and others
    have the package in theirs.
    """
    before = (ROOT / _FILE).read_text()
    done = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=ROOT / "tests", capture_output=True, text=True, check=False, timeout=600
    )
    first, second, _ = done.stdout.split("exit code 1\n")
    assert "the tests pass without a fault\n" in first
    assert f"noticed: one-too-many, by {TESTS}\n" in first
    assert f"NOT noticed: nothing-changed, in {_FILE}, by {TESTS}\n" in first
    assert f"ERROR: no-such-text: {_FILE} has the old text 0 times, not once" in first
    assert "3 faults, 2 of the lines above need somebody" in first
    assert "FAIL without a fault" in second
    assert (ROOT / _FILE).read_text() == before


def test_a_name_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-fault"])
    assert "no fault of the name no-such-fault; there are " in capsys.readouterr().err
