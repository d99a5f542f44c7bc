"""The test suite on the device, some files at a time: what fails, and where."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from on_device.base import Context, Item, NotHereError, Part, Row

__all__ = ["PART"]

_TESTS = Path(__file__).parent.parent.parent / "tests"
_REHEARSED = ("test_layouts.py", "schedules/test_schedules.py")
# Files that take more than seven seconds on two cores, longest last; quick files run first.
_LONG = (
    "training/test_folder.py", "nn/test_crf.py", "nn/test_losses.py", "nn/test_cell_layers.py",
    "kernels/test_cpu_elementwise.py", "nn/test_torch_layers.py",
    "kernels/test_reference.py", "cli/test_bench.py", "kernels/test_cpu_torch.py", "bench/test_device.py",
    "safety/test_threads_and_processes.py", "bench/test_run.py", "safety/test_fuzz.py", "kernels/test_cpu_matrix.py",
    "safety/test_kill_points.py", "nn/test_transformations.py", "cli/test_process.py",
)  # fmt: skip
_COUNTS = ("tests", "failures", "errors", "skipped")
# The number of quick files per process, which takes seconds to start.
_TOGETHER = 12
_NEEDS = ("pytest", "hypothesis")
# The most seconds of a file, and the most failures of a file that are stored with their traces.
_PATIENCE, _KEPT, _TRACE = 300.0, 20, 3000
# The most failures with traces in the report; the others are in the file of the part.
_SHOWN = 30


def _run(context: Context, names: Sequence[str]) -> Row:
    """Run files in one process; one by one after an error that left the device unusable."""
    row = _run_together(context, names)
    if len(names) == 1 or not any("CUDA error" in each["trace"] for each in row.get("failures listed", [])):
        return row
    rows = [_run_together(context, [name]) for name in names]
    merged: Row = {count: sum(each.get(count, 0) for each in rows) for count in _COUNTS}
    faults = [f"{name}: {each['fault']}" for name, each in zip(names, rows, strict=True) if "fault" in each]
    merged["failures listed"] = [failure for each in rows for failure in each.get("failures listed", [])]
    return merged | ({"fault": "; ".join(faults)} if faults else {})


def _run_together(context: Context, names: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "--device", str(context.device), "--junitxml", str(report)]
        if context.kernels is not None:
            options += ["--kernels", str(context.kernels)]
        patience = max(5.0, min(_PATIENCE, context.left()))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *(str(_TESTS / name) for name in names), *options],
                cwd=_TESTS.parent,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                capture_output=True,
                text=True,
                check=False,
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            if patience < _PATIENCE:
                raise NotHereError(f"more than the {patience:.0f} s that were left") from None
            return {"fault": f"no end within {patience:.0f} s"}
        # 5: the file has no tests. After any other code above 1, the file was not run.
        if not report.is_file() or done.returncode not in (0, 1, 5):
            return {"fault": f"pytest ended with {done.returncode}", "trace": (done.stdout + done.stderr)[-_TRACE:]}
        return read_report(report)


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
                    failures.append({"test": name, "message": fault.get("message", "")[:400], "trace": fault.text})
    row: Row = dict(counts)
    if failures:
        row["fault"] = f"{len(failures)} failed: " + ", ".join(entry["test"] or "" for entry in failures[:5])
        row["failures listed"] = [entry | {"trace": (entry["trace"] or "")[-_TRACE:]} for entry in failures[:_KEPT]]
    return row


def _items(context: Context) -> Iterator[Item]:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHereError(f"{' and '.join(missing)} (carry them along as wheels)")
    names = [path.relative_to(_TESTS).as_posix() for path in sorted(_TESTS.rglob("test_*.py"))]
    quick = list(_REHEARSED) if context.is_rehearsal else [name for name in names if name not in _LONG]
    for begin in range(0, len(quick), _TOGETHER):
        group = quick[begin : begin + _TOGETHER]
        yield Item(f"{group[0]} to {group[-1]}", partial(_run, context, group))
    for name in () if context.is_rehearsal else _LONG:
        yield Item(name, partial(_run, context, [name]))


def _table(rows: list[Row]) -> list[str]:
    total = {name: sum(row.get(name, 0) for row in rows) for name in _COUNTS}
    lines = [", ".join(f"{number:,} {name}" for name, number in total.items()) + f", in {len(rows)} runs.", ""]
    faulty = [row for row in rows if "fault" in row]
    if faulty:
        lines += ["| files | fault |", "| --- | --- |"]
        lines += [f"| {row['key']} | {' '.join(row['fault'].split()).replace('|', '/')} |" for row in faulty]
    for failure in [each for row in faulty for each in row.get("failures listed", [])][:_SHOWN]:
        # Indented lines are code in Markdown.
        trace = [f"    {line}" for line in failure["trace"].strip().splitlines()]
        lines += ["", f"### {failure['test']}", "", *trace]
    return lines


PART = Part("tests", "what of the test suite fails on the device?", _items, _table)
