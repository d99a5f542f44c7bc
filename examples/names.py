"""Predict the language of a name: eighteen languages, names of 2 to 20 characters.

PATH is a folder with one text file a language, one name a line. Duplicates within a language count
once; a random 80 % of the pairs are for training, the others for the test. A bidirectional GRU with
64 units reads the characters.

    python examples/names.py PATH

Test accuracy: 0.814. Macro accuracy, the mean over languages of the share of their names found:
0.422.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import raglane as rl

# The characters of a name, and its language.
Sample = tuple[list[int], int]


class NameClassifier(torch.nn.Module):
    """An embedding, a bidirectional GRU, and a linear layer on the final state of each
    direction.
    """

    def __init__(self, characters: int, languages: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(characters, 32)
        self.gru = rl.nn.GRU(32, 64, bidirectional=True)
        self.dropout = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(128, languages)

    def forward(self, names: rl.Ragged) -> Tensor:
        """Map a ragged batch of characters ``(N,)`` to logits ``(B, languages)``."""
        out, state = self.gru(self.embed(names))
        # Not out.last(): there the backward direction has read only the last character.
        final = self.gru.final(out, state)
        return cast(Tensor, self.head(self.dropout(final)))


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Return the unique (name, language) pairs of a folder, in alphabetical order."""
    records = rl.data.read(path, format="folder")
    names = ["".join(records.values[start:end]).strip() for start, end in pairwise(records.offsets)]
    return sorted(set(zip(names, records.labels or (), strict=True)))


def make_samples(
    pairs: list[tuple[str, str]], characters: dict[str, int], languages: dict[str, int]
) -> list[Sample]:
    """Return the numbers of a name's characters and of its language; an unknown character is number
    0.
    """
    return [
        ([characters.get(character, 0) for character in name], languages[language])
        for name, language in pairs
    ]


def train(data: list[Sample], model: NameClassifier, epochs: int, seed: int) -> None:
    """Train with Adam on batches of 32 names of similar lengths."""
    lengths = [len(name) for name, _ in data]
    batches = rl.data.BatchSampler(lengths, batch_size=32, bucket=True, seed=seed)
    loader: DataLoader[Sample] = DataLoader(
        cast(Dataset[Sample], data), batch_sampler=batches, collate_fn=rl.collate
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(epochs):
        total = 0.0
        for names, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(names), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(names)
        print(f"epoch {epoch + 1}/{epochs}: loss {total / len(data):.3f}")


def evaluate(data: list[Sample], model: NameClassifier) -> tuple[float, float]:
    """Return accuracy, and macro accuracy over the languages that occur."""
    names, targets = rl.collate(data)
    model.eval()
    with torch.no_grad():
        is_right = (model(names).argmax(-1) == targets).double()
    count = torch.bincount(targets)
    found = torch.bincount(targets, weights=is_right)
    return float(is_right.mean()), float((found / count)[count > 0].mean())


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Split, train, test; return accuracy and macro accuracy on the test part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="a folder with one .txt file a language")
    parser.add_argument(
        "--epochs", type=int, default=6, help="passes over the training part (default: 6)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the split and of the training (default: 0)"
    )
    options = parser.parse_args(arguments)

    try:
        pairs = read_pairs(options.path)
    except rl.errors.DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    torch.manual_seed(options.seed)
    order = torch.randperm(len(pairs)).tolist()
    cut = round(0.8 * len(pairs))
    train_pairs, test_pairs = ([pairs[row] for row in part] for part in (order[:cut], order[cut:]))
    seen = sorted({character for name, _ in train_pairs for character in name})
    characters = {character: number for number, character in enumerate(seen, start=1)}
    languages = {
        language: number
        for number, language in enumerate(sorted({language for _, language in pairs}))
    }
    print(
        f"{len(pairs)} pairs: {len(train_pairs)} to train on, {len(test_pairs)} to test; {len(languages)} languages"
    )

    model = NameClassifier(len(characters) + 1, len(languages))
    train(make_samples(train_pairs, characters, languages), model, options.epochs, options.seed)
    accuracy, macro = evaluate(make_samples(test_pairs, characters, languages), model)
    print(f"test accuracy {accuracy:.4f}, macro accuracy {macro:.4f}")
    return accuracy, macro


if __name__ == "__main__":
    main()
