"""Which notes come next? Piano rolls of 24 notes, made by a chain of chords: binary vectors, forecast.

A roll stays on a chord for some frames, then goes to a chord that may follow it. A frame holds the notes of the chord,
each left out now and then, and sometimes a note too many. rl.fit sees that every channel is 0 or 1, and so learns
probabilities. The figure is nats per frame; beside it stand two rules at their best: each note told by its frequency
(independent), and by how often it stays or changes (persistence).

    python examples/piano_rolls.py

Test nats per frame: 2.59; persistence 4.58; independent notes 6.41.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

import raglane as rl

NOTES = 24
CHORDS = [(0, 4, 7), (5, 9, 12), (7, 11, 14), (9, 12, 16), (2, 5, 9)]
# The chords that may follow each.
NEXT = [(1, 2, 3), (0, 2), (0, 3), (1, 4), (2,)]


def roll(random: np.random.Generator) -> Any:
    """A roll of 20 to 60 frames, ``(L, NOTES)``."""
    chord, frames = int(random.integers(len(CHORDS))), []
    for _ in range(random.integers(20, 61)):
        frame = np.zeros(NOTES, np.float32)
        frame[list(CHORDS[chord])] = random.random(3) < 0.95
        if random.random() < 0.2:
            frame[random.integers(NOTES)] = 1
        frames.append(frame)
        if len(frames) % 4 == 0:
            chord = int(random.choice(NEXT[chord]))
    return np.stack(frames)


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Train, test, and return the nats of the model and of persistence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rolls", type=int, default=300, help="rolls to train on (default: 300)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training part (default: 20)")
    options = parser.parse_args(arguments)
    random = np.random.default_rng(0)
    training, test = ([roll(random) for _ in range(count)] for count in (options.rolls, 100))
    run = rl.fit(training, task="forecast", cell="lstm", hidden_size=64, lr=0.01, epochs=options.epochs)
    result = run.evaluate(test)
    nats, persistence = result["nats"], result["persistence_nats"]
    print(f"test nats {nats:.2f}, persistence {persistence:.2f}, independent notes {result['independent_nats']:.2f}")
    return nats, persistence


if __name__ == "__main__":
    main()
