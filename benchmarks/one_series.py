"""Time a prediction of one series, in Python and as a command.

    python benchmarks/one_series.py > benchmarks/results/one-series.md

A model of 64 units is trained for an epoch on made series of one channel. In Python a run that is
loaded predicts a series of 200 steps, again and again; a command loads the model and reads the
series from a file each time. Each row is the 50th and the 99th percentile, of ``--calls`` calls and
of ``--commands`` commands, in milliseconds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import raglane as rl
from raglane.native.machine import cpu_name

STEPS = 200
TASKS = ("classify", "regress", "forecast")


def main() -> None:
    """Train a model per task, and print a table of times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--commands", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("# Predictions of one series\n")
    print(f"{STEPS} steps of one channel, a GRU of 64 units, one thread. {cpu_name()}.\n")
    print("`python benchmarks/one_series.py` makes this page. Milliseconds.\n")
    print("| task | where | p50 | p99 |\n| --- | --- | --- | --- |")
    for task in TASKS:
        with tempfile.TemporaryDirectory() as folder:
            _task(task, Path(folder), options.calls, options.commands)


def _task(task: str, folder: Path, calls: int, commands: int) -> None:
    random = np.random.default_rng(0)
    series = [random.normal(size=(STEPS, 1)).astype(np.float32) for _ in range(40)]
    labels = {"classify": ["a", "b"] * 20, "regress": [float(x.mean()) for x in series]}
    rl.fit(series, labels.get(task), task=task, epochs=1, threads=1, output=folder / "run")
    run = rl.load(folder / "run")
    horizon = {"horizon": 24} if task == "forecast" else {}
    _row(task, "Python", calls, lambda: run.predict([series[0]], **horizon))
    path = folder / "one.npz"
    np.savez(path, x=series[0], lengths=np.array([STEPS]))
    words = [sys.executable, "-m", "raglane", "predict", str(folder / "run"), str(path), "-q"]
    words += ["--horizon", "24"] if horizon else []
    _row(task, "command", commands, lambda: subprocess.run(words, check=True, capture_output=True))


def _row(task: str, where: str, count: int, call: Callable[[], object]) -> None:
    times = []
    for _ in range(count + 1):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    middle, high = np.percentile(times[1:], [50, 99])
    task = f"{task}, 24 steps ahead" if task == "forecast" else task
    print(f"| {task} | {where} | {middle:,.1f} | {high:,.1f} |", flush=True)


if __name__ == "__main__":
    main()
