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


def played(faults: dict[str, Fault]) -> tuple[int, str]:
    """What comes of playing faults two at a time, and what is said of them.

    In a process of its own: the server that forks a process for each copy is one for all who fork so here, and others
    have the package in theirs.
    """
    code = f"import sys; from faults.__main__ import play; from faults.fault import Fault; sys.exit(play({faults}, 2))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=False, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def test_what_is_noticed_and_what_is_not() -> None:
    """In a copy: the package of this process, and of those that it starts, stays as it is."""
    file, old = "src/raglane/costs.py", "additions=count.elements - count.sequences"
    before = (ROOT / file).read_text()
    faults = {
        "one-too-many": Fault(file, old, f"{old} + 1", TESTS),
        "nothing-changed": Fault(file, old, f"{old} + 0", TESTS),
        "no-such-text": Fault(file, "a text that is not there", "", TESTS),
    }
    code, said = played(faults)
    assert code == 1, said
    assert "the tests pass without a fault\n" in said
    assert f"noticed: one-too-many, by {TESTS}\n" in said
    assert f"NOT noticed: nothing-changed, in {file}, by {TESTS}\n" in said
    assert f"ERROR: no-such-text: {file} has the old text 0 times, not once" in said
    assert "3 faults, 2 of the lines above need somebody" in said
    assert (ROOT / file).read_text() == before


def test_a_test_that_fails_without_a_fault_notices_nothing() -> None:
    code, said = played({"x": Fault("src/raglane/costs.py", "not there", "", "test_costs.py::test_that_is_not_there")})
    assert code == 1, said
    assert "FAIL without a fault" in said


def test_a_name_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-fault"])
    assert "no fault of the name no-such-fault; there are " in capsys.readouterr().err
