"""Predict whether two names have the same language: a siamese encoder with a contrastive loss.

PATH is a folder with one text file a language, one name a line. One encoder reads both names of a
pair. The loss moves vectors of the same language together and others apart (Hadsell and others,
2006). In training and in the test, half of the pairs have the same language. The two ragged batches
of a pair have different lengths.

    python examples/same_language.py PATH

Test accuracy: 0.732; half of the pairs have the same language.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

import raglane as rl

Named = dict[str, list[Tensor]]  # the names of each language, as numbers


class Encoder(torch.nn.Module):
    """An encoder from a ragged batch of characters ``(N,)`` to a vector per name."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.encoder = rl.nn.SequenceEncoder(
            32, 64, "gru", num_embeddings=characters, bidirectional=True
        )
        self.out = torch.nn.Linear(128, 32)

    def forward(self, names: rl.Ragged) -> Tensor:
        """Return vectors ``(B, 32)``."""
        return cast(Tensor, self.out(self.encoder(names)))


def read(path: str) -> tuple[Named, Named, int]:
    """Return the names of training and test by language, and the number of characters."""
    records = rl.data.read(path, format="folder")
    names = ["".join(records.values[start:end]).strip() for start, end in pairwise(records.offsets)]
    table = {character: place for place, character in enumerate(sorted(set("".join(names))))}
    parts: tuple[Named, Named] = ({}, {})
    for place, (name, language) in enumerate(
        sorted(set(zip(names, records.labels or (), strict=True)))
    ):
        # Every fifth pair of name and language is for the test.
        numbers = torch.tensor([table[character] for character in name])
        parts[place % 5 == 0].setdefault(language, []).append(numbers)
    return *parts, len(table)


def pairs(named: Named, count: int) -> tuple[rl.Ragged, rl.Ragged, Tensor]:
    """Draw pairs of names, with 1.0 if both have the same language."""
    languages, (left, right) = list(named), ([], [])
    same = (torch.rand(count) < 0.5).float()
    for is_same in same.tolist():
        first, step = torch.randint(len(languages), ()), torch.randint(1, len(languages), ())
        second = first if is_same else (first + step) % len(languages)
        for side, language in ((left, first), (right, second)):
            among = named[languages[int(language)]]
            side.append(among[int(torch.randint(len(among), ()))])
    return rl.Ragged(left), rl.Ragged(right), same


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, test, and return the accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="a folder with one .txt file a language")
    parser.add_argument("--steps", type=int, default=600, help="batches of 64 pairs (default: 600)")
    options = parser.parse_args(arguments)
    try:
        training, test, characters = read(options.path)
    except rl.errors.DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    torch.manual_seed(0)
    encoder = Encoder(characters)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.003)
    for step in range(options.steps):
        left, right, same = pairs(training, 64)
        distance = (encoder(left) - encoder(right)).norm(dim=1)
        loss = (same * distance**2 + (1 - same) * (1 - distance).clamp(min=0) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 250 == 0:
            print(f"step {step + 1}/{options.steps}: loss {loss.item():.3f}")
    left, right, same = pairs(test, 4000)
    with torch.no_grad():
        near = (encoder(left) - encoder(right)).norm(dim=1) < 0.5
    accuracy = float((near == (same > 0)).float().mean())
    print(f"test accuracy {accuracy:.3f} of 4000 pairs")
    return accuracy


if __name__ == "__main__":
    main()
