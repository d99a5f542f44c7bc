"""Tables read and converted, against pyarrow alone: processor time and peak memory.

    python benchmarks/readers.py FOLDER > benchmarks/results/readers.md
    python benchmarks/readers.py FOLDER --megabytes 100 --rows 1000000

A CSV file of ten channels with sorted ids, and a Parquet file of rows with ids, are written to
``FOLDER`` and kept. Each step runs in a process of its own, with one thread, after a small file was
read; the times are those of the processor, so that other work on the machine changes them little.
``--python`` measures another checkout too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

CHANNELS = 10
# The rows of a sequence.
STEPS = 1000
# Rounds of each step, of which the fastest is reported.
ROUNDS = 2


def write(folder: Path, megabytes: int, rows: int) -> None:
    """Write the files that are not there."""
    random = np.random.default_rng(0)
    table = folder / f"rows-{megabytes}.csv"
    for path, size in ((table, megabytes * 1_000_000), (folder / "small.csv", 2_000_000)):
        if path.exists():
            continue
        with path.open("w") as file:
            file.write("id,t," + ",".join(f"x{channel}" for channel in range(CHANNELS)) + "\n")
            number = 0
            while file.tell() < size:
                values = random.normal(size=(STEPS, CHANNELS)).tolist()
                lines = (
                    f"s{number:06},{step},{','.join(map(repr, row))}\n"
                    for step, row in enumerate(values)
                )
                file.write("".join(lines))
                number += 1
    for path, count in ((folder / f"rows-{rows}.parquet", rows), (folder / "small.parquet", 2000)):
        if not path.exists():
            steps = np.arange(count)
            columns = {"id": steps // 100, "t": steps % 100, "x": random.normal(size=count)}
            pq.write_table(pa.table(columns), path)


def arrow_csv(path: Path) -> None:
    """Read a CSV file with pyarrow alone."""
    pyarrow.csv.read_csv(path, read_options=pyarrow.csv.ReadOptions(use_threads=False))


def arrow_parquet(path: Path) -> None:
    """Read a Parquet file with pyarrow alone."""
    pq.read_table(path, use_threads=False)


def read(path: Path) -> None:
    """Read a file into memory."""
    import raglane as rl

    rl.data.read(path, rl.data.Columns(task="forecast"))


def convert(path: Path) -> None:
    """Convert a file to a folder."""
    import raglane as rl

    output = path.with_suffix(".converted")
    shutil.rmtree(output, ignore_errors=True)
    rl.data.convert(path, output, rl.data.Columns(task="forecast"))


STEPS_OF: dict[str, Callable[[Path], None]] = {
    "pyarrow alone": arrow_csv,
    "pyarrow.parquet alone": arrow_parquet,
    "read": read,
    "convert": convert,
}


def measure(name: str, path: Path) -> dict[str, float]:
    """Run a step in this process; return its seconds and peak memory."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    step = STEPS_OF[name]
    step(path.with_name("small" + path.suffix))
    before = time.process_time()
    step(path)
    seconds = time.process_time() - before
    return {
        "seconds": seconds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def best(python: str, name: str, path: Path) -> dict[str, float]:
    """Run a step in fresh processes; return the fastest."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [python, __file__, str(path.parent), "--step", name, "--path", str(path)]
    runs = []
    for _ in range(ROUNDS):
        done = subprocess.run(command, check=True, capture_output=True, env=environment)
        runs.append(json.loads(done.stdout))
    return min(runs, key=lambda run: run["seconds"])


def table_of(pythons: dict[str, str], path: Path, alone: str, steps: tuple[str, ...]) -> None:
    """Print a table of steps, each against pyarrow alone in the same run."""
    size = path.stat().st_size / 1e6
    print(f"\n{path.name}, {size:,.0f} MB:\n")
    print("| step | seconds | MB/s | times as long as pyarrow alone | peak memory |")
    print("| --- | --- | --- | --- | --- |")
    first: float | None = None
    for name in (alone, *steps):
        for label, python in pythons.items():
            if name == alone and first is not None:
                continue
            run = best(python, name, path)
            first = run["seconds"] if first is None else first
            where = f", {label}" if label and name != alone else ""
            print(
                f"| {name}{where} | {run['seconds']:.2f} | {size / run['seconds']:.0f} "
                f"| {run['seconds'] / first:.2f} | {run['peak']:,.0f} MiB |"
            )


def main() -> None:
    """Write the files, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--python", help="the Python of another checkout")
    parser.add_argument("--step")
    parser.add_argument("--path", type=Path)
    options: Any = parser.parse_args()
    if options.step is not None:
        print(json.dumps(measure(options.step, options.path)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder, options.megabytes, options.rows)
    others = {} if options.python is None else {"the other checkout": options.python}
    pythons = {"": sys.executable} | others
    load = os.getloadavg()[0]
    print("# Tables read and converted\n")
    print("`python benchmarks/readers.py FOLDER`, one thread; processor time, the fastest of")
    print(f"{ROUNDS} processes; the load of the machine was {load:.0f} on {os.cpu_count()} cores.")
    rows = options.folder / f"rows-{options.megabytes}.csv"
    table_of(pythons, rows, "pyarrow alone", ("read", "convert"))
    parquet = options.folder / f"rows-{options.rows}.parquet"
    table_of(pythons, parquet, "pyarrow.parquet alone", ("read",))


if __name__ == "__main__":
    main()
