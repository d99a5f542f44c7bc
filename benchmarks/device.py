"""Everything that a GPU, or a machine of many processors, can show, in one call::

    python benchmarks/device.py --out FOLDER --minutes 9

It installs nothing: it requires torch 2.11 or newer, NumPy and this repository. The cpu kernels are
those of the installation, or are built in ``build/device`` if CMake and a compiler are available;
pytest and hypothesis may be wheels on ``PYTHONPATH``. A part that lacks a requirement reports it.
The most informative parts and items run first, and each result is written at once: after an
interruption, a call with the same ``--out`` continues. Items that failed run again, last. After an
error that leaves the GPU unusable for a process, another process continues.

In the folder: a file of JSON lines for each part, ``report.md`` and ``report.png``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from on_device import compilation, facts, loops, rivals, scaling, speed, suite, waits
from on_device.base import BrokenError, Context, Part, Record, Row, play
from on_device.report import write_report

_HOME = Path(__file__).resolve().parent.parent
PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        facts.PART,
        compilation.PART,
        waits.PART,
        rivals.PART,
        loops.PART,
        speed.PART,
        suite.PART,
        scaling.PART,
    )
}
# The environment variable with the name of a call, which continues in another process after some
# errors.
_CALL = "RAGLANE_DEVICE_CALL"
# Seconds between two reports while a part runs.
_EVERY = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts.

    Returns:
        0, or 1 if an item failed; wrong arguments exit with 2.
    """
    given = _parse(arguments)
    context = Context(
        torch.device("cpu" if given.rehearse else "cuda" if torch.cuda.is_available() else "cpu"),
        given.rehearse,
        time.monotonic() + 60 * given.minutes,
        os.environ.setdefault(_CALL, f"{time.time_ns()}"),
        _kernels(),
    )
    # TorchRL's kernels are tuned once, in the part that compiles.
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    parts = [PARTS[name] for name in given.parts]
    records: dict[str, Record] = given.records
    not_run: list[Row] = []
    counts = {"done": 0, "fault": 0, "not run": 0}

    def report() -> None:
        rows = {name: list(record.rows.values()) for name, record in records.items()}
        write_report(given.out, list(PARTS.values()), rows, not_run, is_rehearsal=given.rehearse)

    for part in parts:
        print(f"== {part.name}: {part.question}", flush=True)
        reported = time.monotonic()
        try:
            for row in play(part, context, records[part.name]):
                counts[row["state"]] += 1
                if row["state"] == "not run":
                    not_run.append(row)
                print(_line(row), flush=True)
                if time.monotonic() - reported > _EVERY:
                    report()
                    reported = time.monotonic()
        except BrokenError:
            print("the device is unusable for this process; another one goes on", flush=True)
            minutes = max(context.left(), 1) / 60
            again = [
                "--out",
                str(given.out),
                "--parts",
                ",".join(given.parts),
                "--minutes",
                f"{minutes:.3f}",
            ]
            os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *again])
        report()
    print(
        ", ".join(f"{number} {name}" for name, number in counts.items())
        + f"; {given.out / 'report.md'}",
        flush=True,
    )
    return int(counts["fault"] > 0)


def _line(row: Row) -> str:
    if row["state"] == "not run":
        return f"not run: {row['key']}: {row['why']}"
    if row["state"] == "fault":
        return f"FAULT    {row['key']}: {' '.join(str(row['fault']).split())}"
    times = row.get("milliseconds", {})
    told = ", ".join(f"{name} {time:.3g} ms" for name, time in times.items())
    return f"{row['took']:7.1f} s {row['key']}" + (f": {told}" if told else "")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for what is found; an earlier one goes on"
    )
    parser.add_argument(
        "--parts", default="all", help=f"some of {','.join(PARTS)}, or all; in this order"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="after which nothing more begins; default 9"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny sizes on the CPU, to see that it runs; its times say nothing",
    )
    given = parser.parse_args(arguments)
    if not 0 < given.minutes < 10_000:
        parser.error(f"--minutes must be above 0 and below 10,000, got {given.minutes:g}")
    chosen = list(PARTS) if given.parts == "all" else given.parts.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(
            f"--parts must be a comma-separated list of {', '.join(PARTS)}, got {unknown[0]!r}"
        )
    given.parts = [name for name in PARTS if name in chosen]
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        given.records = {name: Record(given.out / f"{name}.jsonl") for name in PARTS}
    except (OSError, ValueError) as error:
        parser.error(f"--out: {error}")
    return given


def _kernels() -> Path | None:
    """Return the folder of the cpu kernels built for this call, or None if they are installed or
    not built.
    """
    import raglane.native as native

    if native.missing_kernels() is None:
        return None
    folder = _HOME / "build" / "device"
    fault = _build(folder)
    found = _load(folder)  # built now, or included
    if fault is not None:
        print(
            f"the cpu kernels were not built ({fault}); "
            + ("others are there" if found else "none are there")
        )
    return found


def _build(folder: Path) -> str | None:
    """Build the kernels unless they are up to date; print the reason if this fails."""
    if shutil.which("cmake") is None:
        return "CMake is not here"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", str(_HOME), "-B", str(folder), *generator],
        ["cmake", "--build", str(folder), "--parallel"],
        ["cmake", "--install", str(folder), "--prefix", str(folder / "installed")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return " ".join((done.stdout + done.stderr)[-500:].split())
    return None


def _load(folder: Path) -> Path | None:
    """Use the kernels that were built in a folder, if they are of this version."""
    import raglane.native as native
    from raglane.native.library import library

    found = folder / "installed" / "raglane" / "native"
    native.__path__.insert(0, str(found))
    library.cache_clear()
    if native.missing_kernels() is None:
        return found
    native.__path__.remove(str(found))
    library.cache_clear()
    return None


if __name__ == "__main__":
    sys.exit(main())
