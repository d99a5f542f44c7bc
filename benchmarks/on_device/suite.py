"""The test suite on the device, in as many processes as processors: what fails, and where."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from on_device.base import Context, Item, NotHereError, Part, Row
from raglane.native import machine

__all__ = ["PART"]

_TESTS = Path(__file__).parent.parent.parent / "tests"
_REHEARSED = ("test_layouts.py", "schedules/test_schedules.py")
# Folders and files whose tests compute on the device; those marked ``host`` are skipped there.
_ROOMS = ("nn", "ragged", "cells", "segments", "schedules", "packing")
_COMPUTING = ("kernels/test_on_a_gpu.py", "kernels/test_reference.py", *_ROOMS)
_COUNTS = ("tests", "failures", "errors", "skipped")
_NEEDS = ("pytest", "hypothesis")
# The most seconds of a run, those to write its report after an interruption, and the most failures
# and characters of a trace that are stored.
_PATIENCE, _TO_WRITE, _KEPT, _TRACE = 300.0, 20.0, 40, 3000
# The most failures with traces in the report; the others are in the file of the part.
_SHOWN = 30


def _run(context: Context, names: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
            "--device",
            str(context.device),
        ]
        options += ["--junitxml", str(report)]
        if importlib.util.find_spec("xdist") is not None and not context.is_rehearsal:
            options += ["-n", str(max(1, machine.processors() - 2)), "--dist", "worksteal"]
        if context.kernels is not None:
            options += ["--kernels", str(context.kernels)]
        patience = max(5.0, min(_PATIENCE, context.left() - _TO_WRITE))
        own = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            *(str(_TESTS / name) for name in names),
            *options,
        ]
        with subprocess.Popen(
            command,
            cwd=_TESTS.parent,
            env=own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running:
            told, is_whole = _output(running, patience)
        # 2: interrupted; 5: no tests. After any other code above 1, nothing was run.
        if not report.is_file() or running.returncode not in (0, 1, 2, 5):
            return {"fault": f"pytest ended with {running.returncode}", "trace": told[-_TRACE:]}
        return read_report(report) | ({} if is_whole else {"interrupted after, s": round(patience)})


def _output(running: subprocess.Popen[str], patience: float) -> tuple[str, bool]:
    """Return the output of pytest, and False if it was interrupted; it writes its report then."""
    try:
        return running.communicate(timeout=patience)[0], True
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
    try:
        return running.communicate(timeout=_TO_WRITE)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # its workers too, which have the same output
        return running.communicate()[0], False


def read_report(path: Path) -> Row:
    """Return the counts and failures of pytest's report."""
    counts = dict.fromkeys(_COUNTS, 0)
    failures = []
    # Trusted: pytest has just written it.
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        counts = {name: number + int(suite.get(name, 0)) for name, number in counts.items()}
        for case in suite.iter("testcase"):
            for kind in ("failure", "error"):
                if (fault := case.find(kind)) is not None:
                    name = f"{case.get('classname')}::{case.get('name')}"
                    failures.append(
                        {
                            "test": name,
                            "message": fault.get("message", "")[:400],
                            "trace": fault.text,
                        }
                    )
    row: Row = dict(counts)
    if failures:
        row["fault"] = f"{len(failures)} failed: " + ", ".join(
            entry["test"] or "" for entry in failures[:5]
        )
        row["failed"] = [entry["test"] for entry in failures]
        row["failures listed"] = [
            entry | {"trace": (entry["trace"] or "")[-_TRACE:]} for entry in failures[:_KEPT]
        ]
    return row


def _items(context: Context) -> Iterator[Item]:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHereError(f"{' and '.join(missing)} (carry them along as wheels)")
    if context.is_rehearsal:
        yield Item("two files", partial(_run, context, _REHEARSED))
        return
    yield Item("tests that compute on the device", partial(_run, context, _COMPUTING))


def _table(rows: list[Row]) -> list[str]:
    total = {name: sum(row.get(name, 0) for row in rows) for name in _COUNTS}
    lines = [
        ", ".join(f"{number:,} {name}" for name, number in total.items())
        + f", in {len(rows)} runs.",
        "",
    ]
    lines += [
        f"{row['key']}: {key} {row[key]}."
        for row in rows
        for key in row
        if key.startswith("interrupted")
    ]
    faulty = [row for row in rows if "fault" in row]
    if faulty:
        lines += ["", "| files | fault |", "| --- | --- |"]
        lines += [
            f"| {row['key']} | {' '.join(row['fault'].split()).replace('|', '/')} |"
            for row in faulty
        ]
    for failure in [each for row in faulty for each in row.get("failures listed", [])][:_SHOWN]:
        # Indented lines are code in Markdown.
        trace = [f"    {line}" for line in failure["trace"].strip().splitlines()]
        lines += ["", f"### {failure['test']}", "", *trace]
    return lines


PART = Part("tests", "what of the test suite fails on the device?", _items, _table, share=0.8)
