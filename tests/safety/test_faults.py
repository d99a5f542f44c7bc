"""Every fault has a place in the source, and tools/faults tells a fault that is noticed from one
that is not.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from commands import Capsys
from faults import place
from faults.__main__ import main, play
from faults.place import ROOT, Fault, NoPlaceError, all_faults
from scripts import Script


@pytest.mark.parametrize("room", sorted({fault.room for fault in all_faults().values()}))
def test_every_fault_has_a_place_and_its_tests(room: str, capsys: Capsys) -> None:
    """If this fails, the source has changed: tools/faults/README.md says how to mend a fault."""
    assert main(["--check", room]) == 0, capsys.readouterr().out


_SOURCE = """
LIMIT = 3

def first(values, most):
    if most > LIMIT:
        raise ValueError("too many")
    return clipped(values, most, low=0, high=most - 1)

def clipped(values, *others, low, high):
    return values[low:high]

class Batch:
    size: int = 1

    def first(self, rows):
        return rows[0] and self.size and rows
"""
# Where, old text and new text of a fault; the text that it changes, and its replacement.
_CASES = [
    ("LIMIT", "3", "4", "LIMIT = 3", "LIMIT = 4"),
    ("Batch.size", "1", "2", "int = 1", "int = 2"),
    ("Batch.first", "rows[ 0 ]", "rows[1]", "rows[0]", "rows[1]"),
    ("Batch.first", "lines[0]", "lines[1]", "rows[0]", "rows[1]"),
    (
        "Batch.first",
        "... and self.size and ...",
        "... and ...",
        "rows[0] and self.size and rows",
        "rows[0] and rows",
    ),
    ("first", "if most > LIMIT: ...", "if True: ...", "if most > LIMIT", "if True"),
    ("first", "if m > LIMIT: ...", "if m < LIMIT: ...", "if most > LIMIT", "if most < LIMIT"),
    ("first", "raise ValueError('too many')", "return", 'raise ValueError("too many")', "return"),
    ("first", "clipped(..., high=m - 1)", "clipped(..., high=m)", "most - 1", "most"),
    (
        "first",
        "clipped(v, ..., low=0)",
        "clipped(..., v, low=1)",
        "values, most, low=0",
        "most, values, low=1",
    ),
    ("gone", "(most-1)", "most", "most - 1", "most"),
]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a package with one module."""
    path = tmp_path / "src/raglane/room/here.py"
    path.parent.mkdir(parents=True)
    path.write_text(_SOURCE)
    monkeypatch.setattr(place, "ROOT", tmp_path)
    module = place._Module("src/raglane/room/here.py", _SOURCE)
    monkeypatch.setattr(place, "_modules", lambda: [module])
    return path


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("room", ["room", "another"])
@pytest.mark.parametrize(("where", "old", "new", "this", "other"), _CASES)
def test_a_fault_is_found_by_function_and_operation(
    room: str, where: str, old: str, new: str, this: str, other: str
) -> None:
    path, text = Fault(room, where, old, new, "").changed()
    assert path == "src/raglane/room/here.py"
    assert _SOURCE.count(this) == 1
    assert _dump(text) == _dump(_SOURCE.replace(this, other))


def _dump(text: str) -> str:
    """Return the syntax with keyword arguments in alphabetical order."""
    tree = ast.parse(text)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        call.keywords.sort(key=lambda keyword: str(keyword.arg))
    return ast.dump(tree)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("where", "old", "new", "words"),
    [
        (
            "gone",
            "most",
            "0",
            "the function gone is no place; the old text is in .* must be there once",
        ),
        (
            "first",
            "2 * most",
            "0",
            "the function first is src/.*here.py first, src/.*here.py Batch.first; .* nowhere",
        ),
        ("Batch.first", "rows", "0", "is in src/.*here.py Batch.first"),
        ("Batch.first", "rows[0]", "columns[0]", "has no columns, which the new text names"),
        ("first", "most >", "0", "no Python"),
    ],
)
def test_a_fault_without_a_place_says_what_there_is(
    where: str, old: str, new: str, words: str
) -> None:
    with pytest.raises(NoPlaceError, match=words):
        Fault("room", where, old, new, "").changed()


def test_text_of_c_is_found_however_it_is_spaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "csrc").mkdir()
    for name, text in (("a.h", "int one = f(x,\n  2 );"), ("b.h", "int one = 1; int two;")):
        (tmp_path / "csrc" / name).write_text(text)
    monkeypatch.setattr(place, "ROOT", tmp_path)
    assert Fault("csrc", "moved.h", "f( x, 2)", "f(x, 3)", "").changed() == (
        "csrc/a.h",
        "int one = f(x, 3);",
    )
    assert Fault("csrc", "b.h", "int one", "int none", "").changed() == (
        "csrc/b.h",
        "int none = 1; int two;",
    )
    with pytest.raises(NoPlaceError, match=r"is in csrc/a.h, csrc/b.h, and must be there once"):
        Fault("csrc", "moved.h", "int one", "", "").changed()


@pytest.mark.parametrize(
    "name", ["test_that_is_not_there", "test_costs.py::test_that_is_not_there", "test_mistakes"]
)
def test_a_test_that_is_not_there_once(name: str) -> None:
    with pytest.raises(NoPlaceError, match=r"name it as FILE\.py::NAME"):
        Fault("room", "", "", "", name).arguments()


_PLACE = "schedules", "cost", "one.elements - one.sequences"
_TEST = "test_multiplications_and_additions"
_TOO_MANY = Fault(*_PLACE, f"{_PLACE[-1]} + 1", _TEST)
_CODE = f"""
from faults import copies
from faults.__main__ import play
from faults.place import Fault
copies._PRELOADED = ["pytest", "torch", "typer.main"]
print("exit code", play({{"one-too-many": {_TOO_MANY}}}, 2))
"""


def test_a_fault_is_noticed(script: Script) -> None:
    """The source does not change. In a new process, because the forkserver of this one has imported
    the package.
    """
    before = (ROOT / "src/raglane/schedules.py").read_text()
    done = script(_CODE, 600)
    assert "the tests pass without a fault\n" in done.stdout
    assert f"\nnoticed: one-too-many, by test_costs.py::{_TEST}\n" in f"\n{done.stdout}"
    assert done.stdout.endswith("1 faults, all noticed\nexit code 0\n")
    assert (ROOT / "src/raglane/schedules.py").read_text() == before


def test_unnoticed_faults_and_faults_without_a_place_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr("faults.copies.Copy.run", lambda *_: (0, "1 passed"))
    nowhere = Fault("schedules", "cost", "one.of_nothing", "0", _TEST)
    assert play({"one-too-many": _TOO_MANY, "no-such-text": nowhere}, 2) == 1
    printed = capsys.readouterr().out
    assert f"NOT noticed: one-too-many, in schedules, by {_TEST}\n" in printed
    assert (
        "ERROR: no-such-text of schedules.toml: the function cost is src/raglane/schedules.py cost"
        in printed
    )
    assert printed.endswith("2 faults, 2 of the lines above need a change\n")


def test_tests_that_do_not_run_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr("faults.copies.Copy.run", lambda *_: (4, "no such case"))
    assert play({"no-such-case": Fault(*_PLACE, "0", _TEST)}, 2) == 1
    printed = capsys.readouterr().out
    assert "FAIL without a fault:\nno such case\n" in printed
    assert (
        f"ERROR: no-such-case: the tests {_TEST} did not run (exit code 4):\nno such case\n"
        in printed
    )


def test_faults_are_named_by_pattern_or_room(capsys: Capsys) -> None:
    assert main(["--check", "ragged", "gru-turned-*"]) == 0
    count = sum(fault.room == "ragged" for fault in all_faults().values()) + 1
    assert capsys.readouterr().out == f"{count} faults, 0 without a place\n"
    with pytest.raises(SystemExit):
        main(["no-such-fault"])
    assert "no fault or room of the name no-such-fault; there are " in capsys.readouterr().err
