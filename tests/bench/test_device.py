"""``benchmarks/device.py`` without a GPU: it rehearses, resumes, names missing parts, and keeps its
results.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import device as device_script
import pytest
import torch
from on_device import speed, suite, waits
from on_device.base import BrokenError, Context, Item, NotHereError, Part, Record, play

from scripts import Script
from yardsticks import short_samples  # noqa: F401

pytestmark = pytest.mark.usefixtures("short_samples")

HOME = Path(__file__).parents[2]


def _context(call: str = "now", seconds: float = 60) -> Context:
    return Context(torch.device("cpu"), True, time.monotonic() + seconds, call)


def _part(*items: Item) -> Part:
    return Part("some", "what?", lambda _: items, lambda rows: [f"{len(rows)} rows"])


@pytest.mark.parametrize(
    ("code", "expected"), [(0, {"errors": "none"}), (9, {"fault": "racecheck: a hazard"})]
)
def test_the_sanitizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: dict[str, str]
) -> None:
    """A tool in its place compiles the code that it is given."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!/bin/sh\n\"$5\" -c \"compile('''$7''', '', 'exec')\" || exit 1\necho a hazard\nexit {code}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert (
        waits._sanitized(replace(_context(), device=torch.device("cuda")), "racecheck") == expected
    )


def test_a_rehearsal(tmp_path: Path, script: Script) -> None:
    """In a separate process, because it sets global switches of torch; a second call reuses the
    results.
    """
    given = ["--out", str(tmp_path), "--parts", "machine,waits,scaling", "--rehearse"]
    code = f"""
import os, sys
sys.path += {[str(HOME / "benchmarks"), str(HOME / "tests" / "support")]}
import device, torch, yardsticks
from on_device import scaling
scaling._ROUNDS, scaling.TORCH = 1, scaling.TORCH[:1]
torch.set_num_threads(1)
yardsticks.shorten(setattr)
first = device.main({given})
print("AGAIN")
del os.environ[device._CALL]
sys.exit(first or device.main({given}))
"""
    done = script(code, 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    first, again = done.stdout.split("AGAIN")
    assert " 0 fault" in first
    assert "not run: gpu: a GPU" in first
    report = (tmp_path / "report.md").read_text()
    for words in ("A rehearsal", "products: float32, GF/s", "lstm 4x8x8 lognormal train"):
        assert words in report
    assert (tmp_path / "report.png").read_bytes()[1:4] == b"PNG"
    assert "\n0 done, 0 fault" in again


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_parts_that_need_one_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device_script.main(["--out", str(tmp_path), "--parts", "waits,speed,loops"]) == 0
    printed = capsys.readouterr().out
    for name in ("waits", "speed", "loops"):
        assert f"not run: {name}: a GPU" in printed
    assert "0 done, 0 fault, 3 not run" in printed
    assert "- speed: a GPU" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "{}/new", "--parts", "speed,nothing"], "got 'nothing'"),
        (
            ["--out", "{}/new", "--minutes", "nan"],
            "--minutes must be above 0 and below 10,000, got nan",
        ),
        (["--out", "{}/file"], "--out: "),
        (["--out", "{}/odd"], "a line that this program did not write"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "speed.jsonl").write_text("mine\n")
    with pytest.raises(SystemExit) as ended:
        device_script.main([argument.format(tmp_path) for argument in arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "odd" / "speed.jsonl").read_text() == "mine\n"


def test_a_failed_case_runs_again_last_in_the_next_call(tmp_path: Path) -> None:
    asked: list[str] = []

    def item(name: str, fails: bool = False) -> Item:
        def run() -> dict[str, Any]:
            asked.append(name)
            if fails:
                raise ValueError("wrong")
            return {"number": 3}

        return Item(name, run)

    def missing() -> dict[str, Any]:
        raise NotHereError("a lake")

    record = Record(tmp_path / "some.jsonl")
    part = _part(item("one", fails=True), item("two"), Item("three", missing))
    late = list(play(part, _context(seconds=-1), record))
    assert [(row["key"], row["state"]) for row in late] == [("some", "not run")]
    rows = list(play(part, _context(), record))
    assert [row["state"] for row in rows] == ["fault", "done", "not run"]
    assert rows[0]["fault"] == "ValueError: wrong"
    assert "raise ValueError" in rows[0]["trace"]
    # The same call, resumed in another process, repeats nothing.
    again = Record(tmp_path / "some.jsonl")
    assert again.rows == record.rows
    assert [row["state"] for row in play(part, _context(), again)] == ["not run"]
    # A later call repeats failed items, last.
    part = _part(item("one"), item("two"), item("four"))
    asked.clear()
    assert [row["key"] for row in play(part, _context("later"), again)] == ["four", "one"]
    assert asked == ["four", "one"]
    assert "fault" not in Record(tmp_path / "some.jsonl").rows["one"]


def test_a_call_that_was_cut_off_leaves_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    record = Record(path)
    record.add({"key": "one", "number": 1})
    record.add({"key": "two", "number": 2})
    path.write_bytes(path.read_bytes()[:-5])
    assert list(Record(path).rows) == ["one"]
    Record(path).add({"key": "two", "number": 3})
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_device_that_is_unusable_ends_the_process(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    record = Record(tmp_path / "some.jsonl")
    with pytest.raises(BrokenError):
        list(play(_part(Item("one", broken), Item("two", dict)), _context(), record))
    assert list(Record(tmp_path / "some.jsonl").rows) == ["one"]


def test_a_wrong_answer_of_ours_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong answer of torch is not a fault, but it is not timed."""
    case, steps = speed.cases(True)[0], speed._steps
    assert "fault" not in speed._run(_context(), case)

    def wrong(*given: Any) -> dict[str, speed.Step]:
        found = steps(*given)
        if given[1] is not None:  # None: the steps of the reference
            for name in ("ours", "torch padded"):
                right = found[name]
                found[name] = lambda right=right: [part * 1.1 for part in right()]  # type: ignore[misc]
        return found

    monkeypatch.setattr(speed, "_steps", wrong)
    row = speed._run(_context(), case)
    assert "off by" in row["fault"]
    assert set(row["faults"]) == {"ours", "torch padded"}
    assert set(row["milliseconds"]) == {"ours padded", "torch packed", "torch masked"}
    assert "off by" in "\n".join(speed.PART.table([row | {"key": "case"}]))


def test_the_tests_of_the_device_exist() -> None:
    (item,) = suite._items(replace(_context(), is_rehearsal=False))
    assert all((HOME / "tests" / name).exists() for name in item.run.args[1])  # type: ignore[attr-defined]


def test_a_suite_that_does_not_end_in_time_reports_what_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text(
        "import time\ndef test_one(): pass\ndef test_two(): assert 1 == 2\ndef test_three(): time.sleep(60)\n"
    )
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--device')\n"
    )
    monkeypatch.setattr(suite, "_TESTS", tmp_path)
    monkeypatch.setattr(suite, "_PATIENCE", 5.0)
    row = suite._run(_context(), ["test_some.py"])
    assert row["interrupted after, s"] == 5
    assert row["fault"].startswith("1 failed: ")
    assert row["fault"].endswith("test_some::test_two")
    assert "1 == 2" in row["failures listed"][0]["trace"]
