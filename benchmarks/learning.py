"""Mamba-2 and a GRU on three small tasks, side by side: selective copying, induction, and a set of
recordings.

Selective copying: a few symbols between blanks, and as many markers at the end, at which the
symbols are to be repeated in their order (Gu and Dao 2023, section 4.1.1). Induction: a symbol that
followed a mark once is to follow it again. Both are drawn anew in each step of the training. The
recordings are those of ``raglane demo``.

    python benchmarks/learning.py --steps 600
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import raglane as rl

CELLS = ("gru", "mamba2")
SYMBOLS = 8
BLANK = SYMBOLS
MARK = SYMBOLS + 1
COPIED = 4

Batch = tuple[rl.Ragged, Tensor, Tensor]
"""Tokens, the elements that are asked, and their answers."""


def selective_copying(count: int) -> Batch:
    """Draw sequences of 24 to 40 tokens and their questions."""
    sequences = []
    answers = []
    for length in torch.randint(20, 37, (count,)).tolist():
        symbols = torch.randint(SYMBOLS, (COPIED,))
        tokens = torch.full((length + COPIED,), BLANK)
        tokens[torch.randperm(length)[:COPIED].sort().values] = symbols
        tokens[length:] = MARK
        sequences.append(tokens)
        answers.append(symbols)
    batch = rl.Ragged(sequences)
    ends = batch.offsets[1:, None] - COPIED + torch.arange(COPIED)
    return batch, ends.flatten(), torch.cat(answers)


def induction(count: int) -> Batch:
    """Draw sequences of 21 to 40 tokens that end with a mark, which was there before."""
    sequences = []
    answers = []
    for length in torch.randint(20, 40, (count,)).tolist():
        tokens = torch.randint(SYMBOLS, (length + 1,))
        place = int(torch.randint(length - 1, ()))
        tokens[[place, length]] = MARK
        sequences.append(tokens)
        answers.append(tokens[place + 1])
    batch = rl.Ragged(sequences)
    return batch, batch.offsets[1:] - 1, torch.stack(answers)


TASKS: dict[str, Callable[[int], Batch]] = {
    "selective copying": selective_copying,
    "induction": induction,
}


class Model(nn.Module):
    """Two layers over embedded tokens, and a score for each symbol."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"state_size": 32} if cell == "mamba2" else {}
        self.encoder = rl.nn.SequenceEncoder(
            32, 64, cell, num_embeddings=SYMBOLS + 2, pooling=None, num_layers=2, **options
        )
        self.head = nn.Linear(64, SYMBOLS)

    def forward(self, batch: rl.Ragged, asked: Tensor) -> Tensor:
        return self.head(self.encoder(batch).values[asked])


def learn(task: str, cell: str, steps: int) -> tuple[float, int, float]:
    """Train a model; return its share of right answers, its weights, and the seconds of a step."""
    torch.manual_seed(0)
    model = Model(cell)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    began = time.perf_counter()
    for _ in range(steps):
        batch, asked, answers = TASKS[task](32)
        loss = nn.functional.cross_entropy(model(batch, asked), answers)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    seconds = (time.perf_counter() - began) / steps
    batch, asked, answers = TASKS[task](512)
    with torch.no_grad():
        right = (model.eval()(batch, asked).argmax(1) == answers).float().mean()
    return float(right), sum(weight.numel() for weight in model.parameters()), seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="steps of a training, of 32 each")
    steps = parser.parse_args().steps
    print("| task | cell | weights | right answers | ms per step |")
    print("| --- | --- | --- | --- | --- |")
    for task in TASKS:
        for cell in CELLS:
            right, weights, seconds = learn(task, cell, steps)
            print(
                f"| {task} | {cell} | {weights:,} | {right:.3f} | {1e3 * seconds:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
