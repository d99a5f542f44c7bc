"""Candidates for the defaults of training, on sets on which no default was chosen.

    python benchmarks/defaults.py run classify >> runs.csv
    python benchmarks/defaults.py table runs.csv > benchmarks/results/defaults.md

Each set of ``harness/sets.py`` is trained with each candidate and the seeds 0 to 2, and measured on
its test part. A candidate is chosen by the best mean rank over the sets; the check leaves one set
out at a time, chooses on the others, and compares the choice with today's defaults on the one left
out. ``run`` goes on after the rows of a file that ``--after`` names.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from harness.sets import SETS, Split

import raglane as rl
from raglane.native.machine import cpu_name

SEEDS = (0, 1, 2)
TODAY = "today"
BOTH: dict[str, Any] = {"bidirectional": True}
FORWARDS: dict[str, Any] = {"bidirectional": False}
MEAN: dict[str, Any] = {"pooling": "mean"}
DROPPED: dict[str, Any] = {"dropout": 0.3}
PER_SEQUENCE: dict[str, dict[str, Any]] = {
    TODAY: {},
    "bidirectional": BOTH,
    "mean": MEAN,
    "mean, dropout": MEAN | DROPPED,
    "bidirectional, mean": BOTH | MEAN,
    "bidirectional, dropout": BOTH | DROPPED,
    "bidirectional, mean, dropout": BOTH | MEAN | DROPPED,
}
CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "classify": PER_SEQUENCE,
    "regress": PER_SEQUENCE,
    # Today's were one direction.
    "tag": {
        TODAY: FORWARDS,
        "dropout": FORWARDS | DROPPED,
        "bidirectional": BOTH,
        "bidirectional, dropout": BOTH | DROPPED,
        "bidirectional, LSTM": BOTH | {"cell": "lstm"},
        "bidirectional, lr 0.001": BOTH | {"lr": 0.001},
    },
    "forecast": {
        TODAY: {},
        "LSTM": {"cell": "lstm"},
        "dropout": DROPPED,
        "lr 0.001": {"lr": 0.001},
        "MAE": {"loss": "mae"},
        "no season": {"season": 0},
        "no season, MAE": {"season": 0, "loss": "mae"},
        "no season, weight decay": {"season": 0, "weight_decay": 0.01},
    },
    "language": {
        TODAY: {},
        "LSTM": {"cell": "lstm"},
        "dropout": DROPPED,
        "lr 0.01": {"lr": 0.01},
        "100 units": {"hidden_size": 100},
    },
}
# The measure of a task, and whether more of it is better.
MEASURES = {
    "classify": ("accuracy", True),
    "regress": ("mae", False),
    "tag": ("accuracy", True),
    "forecast": ("mae", False),
    "language": ("perplexity", False),
}
COLUMNS = ("task", "set", "candidate", "seed", "measure", "seconds")
Scores = dict[str, dict[str, list[float]]]


def measure(task: str, split: Split, options: dict[str, Any], seed: int) -> tuple[float, float]:
    """Train once, and return the measure on the test part and the seconds of the training."""
    start = time.perf_counter()
    run = rl.fit(split.train, split.train_labels, task=task, seed=seed, progress=False, **options)
    seconds = time.perf_counter() - start
    found = run.evaluate(split.test, split.test_labels, horizon=split.horizon)
    numbers = found.ahead() if split.horizon > 1 else found
    return float(numbers[MEASURES[task][0]]), seconds


def run(tasks: list[str], after: Path | None) -> None:
    """Print a row per task, set, candidate and seed; those of a file are left out."""
    rows = [] if after is None else list(csv.reader(after.read_text().splitlines()))
    finished = {tuple(row[:4]) for row in rows}
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for task in tasks:
        for name, load in SETS[task].items():
            split = load()
            for seed in SEEDS:
                for candidate, options in CANDIDATES[task].items():
                    if (task, name, candidate, str(seed)) in finished:
                        continue
                    value, seconds = measure(task, split, options, seed)
                    writer.writerow([task, name, candidate, seed, value, f"{seconds:.1f}"])
                    sys.stdout.flush()


def mean_ranks(scores: Scores, names: list[str], is_more: bool) -> dict[str, float]:
    """Return the mean rank of each candidate over sets, 1 the best; equal means share a rank."""
    ranks: dict[str, list[float]] = defaultdict(list)
    for name in names:
        means = {each: statistics.mean(values) for each, values in scores[name].items()}
        for each, value in means.items():
            better = sum(other > value if is_more else other < value for other in means.values())
            equal = sum(other == value for other in means.values())
            ranks[each].append(better + (equal + 1) / 2)
    return {each: statistics.mean(values) for each, values in ranks.items()}


def best(scores: Scores, names: list[str], is_more: bool) -> str:
    """Return the candidate with the best mean rank."""
    ranks = mean_ranks(scores, names, is_more)
    return min(ranks, key=lambda each: ranks[each])


def shown(values: list[float]) -> str:
    """Return a mean with its range."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(path: Path) -> None:
    """Print the tables of all tasks of a file of rows."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in csv.reader(path.open())]
    for task in dict.fromkeys(row["task"] for row in rows):
        chosen = [row for row in rows if row["task"] == task]
        _table_of(task, chosen)


def _table_of(task: str, rows: list[dict[str, str]]) -> None:
    scores: Scores = defaultdict(lambda: defaultdict(list))
    seconds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        scores[row["set"]][row["candidate"]].append(float(row["measure"]))
        seconds[row["candidate"]].append(float(row["seconds"]))
    whole = [
        name
        for name in scores
        if all(len(scores[name][each]) == len(SEEDS) for each in CANDIDATES[task])
    ]
    measure_name, is_more = MEASURES[task]
    ranks = mean_ranks(scores, whole, is_more)
    print(f"## {task}\n\n| candidate | mean rank | mean {measure_name} | seconds of a training |")
    print("| --- | --- | --- | --- |")
    for each in sorted(ranks, key=lambda candidate: ranks[candidate]):
        mean = statistics.mean(statistics.mean(scores[name][each]) for name in whole)
        took = statistics.median(seconds[each])
        print(f"| {each} | {ranks[each]:.2f} | {mean:.3f} | {took:.1f} |")
    print(f"\n| set left out | chosen on the others | its {measure_name} | today's |  |")
    print("| --- | --- | --- | --- | --- |")
    wins = 0.0
    for name in whole:
        others = [other for other in whole if other != name]
        choice = best(scores, others, is_more)
        mine, today = scores[name][choice], scores[name][TODAY]
        gain = statistics.mean(mine) - statistics.mean(today)
        gain = gain if is_more else -gain
        wins += 0.5 if gain == 0 else float(gain > 0)
        verdict = "equal" if gain == 0 else ("better" if gain > 0 else "worse")
        print(f"| {name} | {choice} | {shown(mine)} | {shown(today)} | {verdict} |")
    print(f"\nBetter than today's on {wins:g} of {len(whole)} sets, a tie as a half.\n")


def main() -> None:
    """Run trainings, or print the tables of those that ran."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("tasks", nargs="+", choices=SETS)
    running.add_argument("--after", type=Path)
    commands.add_parser("table").add_argument("file", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "run":
        run(arguments.tasks, arguments.after)
    else:
        print(f"# Defaults\n\n{cpu_name()}, torch {torch.__version__}, one thread.\n")
        table(arguments.file)


if __name__ == "__main__":
    main()
