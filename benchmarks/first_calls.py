"""The time of the first call under ``torch.compile``, with a cold and a warm cache on the disk.

    python benchmarks/first_calls.py > benchmarks/results/first-calls.md

A classifier of 8 sequences of 20 to 40 tokens: an embedding, an LSTM of 64 units, the last state, a
linear layer. Ours takes a Ragged, torch's a padded tensor and lengths. Each row is a process of its
own, which imports, compiles at its first call, and then calls with other lengths: once more for the
second batch, which compiles again for any sizes, and then for eight batches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import raglane as rl
from raglane.native.machine import cpu_name

TOKENS, UNITS, CLASSES = 100, 64, 5


class Ours(nn.Module):
    """The classifier on a Ragged."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, UNITS)
        self.layer = rl.nn.LSTM(UNITS, UNITS)
        self.head = nn.Linear(UNITS, CLASSES)

    def forward(self, batch: rl.Ragged) -> Tensor:
        return self.head(self.layer(self.embedding(batch))[1][0][-1])


class Theirs(nn.Module):
    """The classifier on a padded tensor and lengths, with the last valid step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, UNITS)
        self.layer = nn.LSTM(UNITS, UNITS, batch_first=True)
        self.head = nn.Linear(UNITS, CLASSES)

    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        outputs = self.layer(self.embedding(padded))[0]
        return self.head(outputs[torch.arange(len(lengths)), lengths - 1])


def batches(name: str) -> Iterator[tuple[Any, ...]]:
    """Yield batches of sequences of unseen lengths, as one of the classifiers takes them."""
    torch.manual_seed(0)
    while True:
        lengths = torch.randint(20, 41, (8,))
        sequences = [torch.randint(TOKENS, (length,)) for length in lengths.tolist()]
        if name == "raglane":
            yield (rl.Ragged(sequences),)
        else:
            yield nn.utils.rnn.pad_sequence(sequences, batch_first=True), lengths


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, is_training: bool) -> dict[str, float]:
    """Return the seconds of the first calls of a compiled classifier."""
    model = Ours() if name == "raglane" else Theirs()
    compiled = torch.compile(model)
    given = batches(name)

    def step() -> None:
        if is_training:
            compiled(*next(given)).sum().backward()
            return
        with torch.inference_mode():
            compiled(*next(given))

    seconds = {"first": seconds_of(step), "second": seconds_of(step)}
    later = [seconds_of(step) for _ in range(8)]
    return seconds | {"later": sum(later), "eager": _eager(model, given, is_training)}


def _eager(model: nn.Module, given: Iterator[tuple[Any, ...]], is_training: bool) -> float:
    def step() -> None:
        with torch.set_grad_enabled(is_training):
            result = model(*next(given)).sum()
        if is_training:
            result.backward()

    return seconds_of(step)


def in_a_process(name: str, mode: str, folder: str) -> dict[str, float]:
    """Measure in a process of its own, with a folder for the caches of torch.compile."""
    command = [sys.executable, __file__, "--of", name, "--mode", mode]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=("raglane", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=("train", "infer"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of:
        print(json.dumps(measure(arguments.of, arguments.mode == "train")))
        return
    print(f"# First calls of torch.compile\n\n{cpu_name()}, torch {torch.__version__}. Seconds.\n")
    print(
        "| model | mode | cache | first call | second call, other lengths | 8 more | eager call |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for mode in ("infer", "train"):
        for name in ("raglane", "torch"):
            with tempfile.TemporaryDirectory() as folder:
                for cache in ("cold", "warm"):
                    row = in_a_process(name, mode, folder)
                    cells = [f"{row[key]:.2f}" for key in ("first", "second", "later", "eager")]
                    print(f"| {name} | {mode} | {cache} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
