"""The seconds from ``raglane predict`` to its first row, and to its last.

    python benchmarks/first_rows.py > benchmarks/results/first-rows.md

A CSV of 100,000 texts of 3 to 12 letters is predicted by a GRU, beside ``python -c "import torch"``.
They take turns, and each figure is a median. Modules are compiled, as in the second command of an
installation.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import raglane as rl
from raglane.native.machine import cpu_name

COUNT = 100_000


def texts(count: int) -> tuple[list[str], list[str]]:
    """Return texts of letters and their labels, which is the alphabet that a text is drawn from."""
    drawn = random.Random(0)
    labels = [drawn.choice("uv") for _ in range(count)]
    letters = {"u": "abcmno", "v": "xyzmno"}
    return [
        "".join(drawn.choices(letters[label], k=drawn.randint(3, 12))) for label in labels
    ], labels


def seconds_of_torch() -> float:
    """Return the seconds of an import of torch in a new process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def seconds_of_rows(run: Path, data: Path) -> tuple[float, float]:
    """Return the seconds until the first row is printed, and until the command ends."""
    command = [sys.executable, "-m", "raglane", "predict", str(run), str(data), "--quiet"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the names of the columns
        process.stdout.readline()
        first = time.perf_counter() - start
        rows = 1 + sum(1 for _ in process.stdout)
    if process.returncode or rows != COUNT:
        raise SystemExit(f"{rows} rows, exit {process.returncode}")
    return first, time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "texts.csv"
        data.write_text("data\n" + "".join(f"{text}\n" for text in texts(COUNT)[0]))
        rl.fit(*texts(2_000), epochs=2, progress=False).save(folder / "model")
        seconds_of_rows(folder / "model", data)
        imports, firsts, wholes = [], [], []
        for _ in range(rounds):
            imports.append(seconds_of_torch())
            first, whole = seconds_of_rows(folder / "model", data)
            firsts.append(first)
            wholes.append(whole)
    imported, first, whole = map(statistics.median, (imports, firsts, wholes))
    print(f"# The first row of raglane predict\n\n{cpu_name()}, torch {torch.__version__}.\n")
    print("| import torch, s | first row, s | ratio | last row, s |\n| --- | --- | --- | --- |")
    print(f"| {imported:.2f} | {first:.2f} | {first / imported:.2f} | {whole:.2f} |")


if __name__ == "__main__":
    main()
