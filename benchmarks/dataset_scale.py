"""A dataset of millions of sequences on two processors: conversion, opening, the batches of an
epoch, and lengths.

    python benchmarks/dataset_scale.py FOLDER > benchmarks/results/dataset.md            # 50
    million sequences python benchmarks/dataset_scale.py FOLDER 1000000

A Parquet file of generated sequences, its conversion and files of lengths are written to ``FOLDER``
and kept. Each step runs in a separate process. The system reports its peak memory: anonymous
memory, and memory with the pages of mapped files, which the system can reclaim.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness.memory import status

import raglane as rl
from raglane.data import BatchLimit, BatchSampler, Dataset, EpochOrder, convert
from raglane.native.machine import cpu_name

SEQUENCES, BATCH, HIDDEN = 50_000_000, 256, 128
# The number of batches that are read, and of batches that are trained.
CUT, TRAINED = 4_000, 40
# The number of lengths: some gigabytes.
LENGTHS = 400_000_000
_ROWS = 1_000_000


def write(folder: Path, count: int) -> dict[str, float]:
    """Generate the Parquet file: 1 to 15 steps of one channel, and one of ten labels."""
    chance, start = np.random.default_rng(0), time.perf_counter()
    schema = pa.schema([("x", pa.list_(pa.float32())), ("kind", pa.string())])
    names = pa.array([f"class {name}" for name in range(10)])
    with pq.ParquetWriter(
        folder / "in.parquet", schema, compression="none", use_dictionary=["kind"]
    ) as writer:
        for first in range(0, count, _ROWS):
            lengths = chance.integers(1, 16, min(_ROWS, count - first))
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            values = pa.array(chance.standard_normal(int(lengths.sum()), dtype=np.float32))
            labels = names.take(pa.array(chance.integers(0, 10, len(lengths))))
            writer.write_table(
                pa.table([pa.ListArray.from_arrays(offsets, values), labels], schema=schema)
            )
    return {"seconds": time.perf_counter() - start, "bytes": (folder / "in.parquet").stat().st_size}


def converted(folder: Path, count: int) -> dict[str, float]:
    """Convert it."""
    start = time.perf_counter()
    found = convert(folder / "in.parquet", folder / "out", overwrite=True).statistics
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in (folder / "out").iterdir())
    return {
        "seconds": seconds,
        "per_second": found.elements / seconds,
        "sequences": count,
        "bytes": size,
    }


def opened(folder: Path, count: int) -> dict[str, float]:
    """Open it, with its lengths and the first batch."""
    start = time.perf_counter()
    data = Dataset(folder / "out")
    lengths = data.lengths
    ready = time.perf_counter() - start
    assert len(lengths) == count
    rl.collate(data.__getitems__(torch.randint(0, count, (BATCH,)).tolist()))
    return {"seconds": ready, "first_batch": time.perf_counter() - start - ready}


def fed(folder: Path, count: int) -> dict[str, float]:  # noqa: ARG001
    """Shuffle all sequences, and cut some thousand batches of the epoch."""
    torch.set_num_threads(2)
    start = time.perf_counter()
    data = Dataset(folder / "out")
    order = BatchSampler(data.lengths, BatchLimit(sequences=BATCH), EpochOrder.random())
    batches = iter(order)
    first = next(batches)
    shuffled = time.perf_counter() - start
    # Opens each file, which an epoch does once.
    rl.collate(data.__getitems__(first))
    elements, done, start = 0, 0, time.perf_counter()
    for rows in islice(batches, CUT):
        elements += rl.collate(data.__getitems__(rows))["inputs"].values.shape[0]
        done += 1
    seconds = time.perf_counter() - start
    return {
        "shuffle": shuffled,
        "batches": done,
        "seconds": seconds,
        "per_second": elements / seconds,
    }


def trained(folder: Path, count: int) -> dict[str, float]:
    """Train on such batches, in memory, as fast as the kernels can.

    Two threads wait for each other, so on a busy machine one thread gives a better measurement.
    """
    data = Dataset(folder / "out")
    batches = [
        rl.collate(data.__getitems__(torch.randint(0, count, (BATCH,)).tolist()))
        for _ in range(TRAINED)
    ]
    elements = sum(batch["inputs"].values.shape[0] for batch in batches)
    rates = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, layer in (("LSTM", rl.nn.LSTM(1, HIDDEN)), ("GRU", rl.nn.GRU(1, HIDDEN))):
            for batch in batches[:5]:
                layer(batch["inputs"])[0].values.sum().backward()
            start = time.perf_counter()
            for batch in batches:
                layer(batch["inputs"])[0].values.sum().backward()
            rates[f"{name}, H {HIDDEN}, on {threads} thread{'s' * (threads > 1)}"] = elements / (
                time.perf_counter() - start
            )
    return rates


def planned(folder: Path, count: int) -> dict[str, float]:  # noqa: ARG001
    """Map a file of lengths, count them, and draw them in a random order."""
    path = folder / "lengths.npy"
    if not path.exists():
        lengths = np.lib.format.open_memmap(path, "w+", np.int32, (LENGTHS,))
        chance = np.random.default_rng(1)
        for first in range(0, LENGTHS, 10_000_000):
            lengths[first : first + 10_000_000] = chance.integers(
                1, 1000, min(10_000_000, LENGTHS - first)
            )
    start = time.perf_counter()
    lengths = np.load(path, mmap_mode="r")
    counts = np.zeros(1000, np.int64)
    for first in range(0, LENGTHS, 10_000_000):
        counts += np.bincount(lengths[first : first + 10_000_000], minlength=1000)
    return {
        "seconds": time.perf_counter() - start,
        "lengths": LENGTHS,
        "elements": float(counts @ np.arange(1000)),
    }


STEPS: dict[str, Callable[[Path, int], dict[str, float]]] = {
    "write": write,
    "convert": converted,
    "open": opened,
    "feed": fed,
    "train": trained,
    "lengths": planned,
}


def _memory() -> dict[str, float]:
    """Return bytes: the peak with mapped files, and the anonymous memory at the end."""
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "own": status("RssAnon"),
    }


def _step(name: str, folder: Path, count: int) -> dict[str, float]:
    """Run a step in a separate process."""
    command = [sys.executable, __file__, str(folder), str(count), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(name, found, file=sys.stderr, flush=True)
    return found


def report(folder: Path, count: int) -> None:
    """Run all steps, and print a table."""
    found: dict[str, Any] = {name: _step(name, folder, count) for name in STEPS}

    def gib(value: float) -> str:
        return f"{value / 2**30:.2f} GiB"

    def row(*cells: str) -> None:
        print(f"| {' | '.join(cells)} |")

    feed, train, convert_, open_ = found["feed"], found["train"], found["convert"], found["open"]
    print("# A dataset of many sequences\n")
    print(
        f"`python benchmarks/dataset_scale.py FOLDER {count}`: {cpu_name()}, 2 processors, torch {torch.__version__}."
    )
    print(
        "The machine was shared with other work, so times are too long. Two threads of a layer wait for each other:"
    )
    print(
        "on a busy machine they may be slower than one; on an idle one they are at most twice as fast.\n"
    )
    print(
        f"{count:,} sequences of 1 to 15 steps of one channel, with a label each; batches of {BATCH}.\n"
    )
    row("step", "result", "time", "greatest memory, with mapped files", "own memory at the end")
    row(*["---"] * 5)
    rate = (
        f"{convert_['per_second'] / 1e6:.1f} million elements/s; {gib(convert_['bytes'])} on disk"
    )
    row(
        "convert from Parquet",
        rate,
        f"{convert_['seconds']:.0f} s",
        gib(convert_["peak"]),
        gib(convert_["own"]),
    )
    first = f"first batch after another {1000 * open_['first_batch']:.0f} ms"
    row(
        "open, with all lengths",
        first,
        f"{open_['seconds']:.2f} s",
        gib(open_["peak"]),
        gib(open_["own"]),
    )
    row("shuffle an epoch", "", f"{feed['shuffle']:.1f} s", "", "")
    cut = f"{feed['per_second'] / 1e6:.2f} million elements/s"
    row(
        f"cut {feed['batches']:,.0f} of its batches",
        cut,
        f"{feed['seconds']:.0f} s",
        gib(feed["peak"]),
        gib(feed["own"]),
    )
    for name in (name for name in train if " on " in name):
        ratio = feed["per_second"] / train[name]
        row(
            f"train {name}",
            f"{train[name] / 1e6:.2f} million elements/s: fed {ratio:.1f} times as fast",
            "",
            "",
            "",
        )
    plan = found["lengths"]
    what = f"{plan['lengths']:,.0f} lengths in {gib(4 * plan['lengths'])}"
    row("count lengths", what, f"{plan['seconds']:.1f} s", gib(plan["peak"]), gib(plan["own"]))


if __name__ == "__main__":
    place, *rest = sys.argv[1:]
    number = int(rest[0]) if rest else SEQUENCES
    if len(rest) == 2:
        print(json.dumps({**STEPS[rest[1]](Path(place), number), **_memory()}))
    else:
        Path(place).mkdir(parents=True, exist_ok=True)
        report(Path(place), number)
