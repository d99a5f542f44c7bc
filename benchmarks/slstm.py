"""The sLSTM cell of xlstm, with its vanilla backend and with rl.accelerate: times of a call and of
a training step.

Requires xlstm. The rows of the table are sizes: units, sequences, steps.

    python benchmarks/slstm.py --threads 1
"""

from __future__ import annotations

import argparse
import copy
import statistics
from functools import partial
from typing import Any

import torch
from harness.timing import interleave

import raglane as rl

SIZES = ((64, 8, 64), (128, 16, 128), (256, 8, 128), (512, 8, 128))
HEADS = 4


def call(cell: Any, gates: torch.Tensor) -> None:
    """Run a cell without gradients."""
    with torch.no_grad():
        cell(gates)


def train(cell: Any, gates: torch.Tensor) -> None:
    """Run a cell and its backward pass."""
    cell(gates)[0].square().mean().backward()


def main() -> None:
    """Print the table."""
    from xlstm.blocks.slstm.cell import sLSTMCell, sLSTMCellConfig

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(
        "| units, sequences, steps | xlstm ms | Raglane ms | ratio | training: xlstm | Raglane | ratio |"
    )
    print("| --- " * 7 + "|")
    for units, sequences, steps in SIZES:
        options = {"backend": "vanilla", "recurrent_weight_init": "standard"}
        theirs = sLSTMCell(sLSTMCellConfig(hidden_size=units, num_heads=HEADS, **options))
        ours = rl.accelerate(copy.deepcopy(theirs))
        gates = torch.randn(sequences, steps, 4 * units)
        torch.testing.assert_close(ours(gates)[0], theirs(gates)[0], rtol=1e-5, atol=1e-5)
        cells = [f"{units}, {sequences}, {steps}"]
        for run in (call, train):
            calls = {"xlstm": partial(run, theirs, gates), "Raglane": partial(run, ours, gates)}
            times = [
                1e3 * statistics.median(samples)
                for samples in interleave(calls, chosen.rounds).values()
            ]
            cells += [*(f"{ms:.3g}" for ms in times), f"{times[0] / times[1]:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
