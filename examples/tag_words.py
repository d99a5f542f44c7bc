"""Tag the part of speech of each word: English sentences of the web, 17 tags, a bidirectional LSTM.

PATH is a folder with ewt_train_form_upos.tsv.gz, and the same for dev and test: a word, a tab and
its tag a line, a blank line between sentences. The features of a word are its lower-case form, its
last three letters and its capitalisation. A form that occurs less than twice in training is the
unknown word, number 0, and so is every new one.

    python examples/tag_words.py PATH

Test accuracy per word after 3 epochs: 0.937.
"""

from __future__ import annotations

import argparse
import gzip
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch.nn.functional import cross_entropy

import raglane as rl

Sentence = list[tuple[str, str]]  # words with their tags
Numbers = dict[str, int]
Part = dict[
    str, rl.Ragged
]  # words, suffixes, capitals, tags: four ragged batches of numbers with the same lengths


class Tagger(torch.nn.Module):
    """Three concatenated embeddings of a word, a bidirectional LSTM, a linear layer: Ragged in,
    Ragged out.
    """

    def __init__(self, words: int, suffixes: int, tags: int) -> None:
        super().__init__()
        self.embed_word = torch.nn.Embedding(words, 64)
        self.embed_suffix = torch.nn.Embedding(suffixes, 32)
        self.embed_capitals = torch.nn.Embedding(3, 4)
        self.dropout = torch.nn.Dropout(0.25)
        self.lstm = rl.nn.LSTM(64 + 32 + 4, 64, bidirectional=True)
        self.head = torch.nn.Linear(128, tags)

    def forward(self, part: Part) -> rl.Ragged:
        """Map ragged batches of numbers ``(N,)`` to a Ragged of logits ``(N, tags)``."""
        words, suffixes = self.embed_word(part["words"]), self.embed_suffix(part["suffixes"])
        embedded = torch.cat([words, suffixes, self.embed_capitals(part["capitals"])], dim=-1)
        out, _ = self.lstm(self.dropout(embedded))
        return cast(rl.Ragged, self.head(self.dropout(out)))


def read(path: Path) -> list[Sentence]:
    """Return the sentences of a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        blocks = file.read().strip("\n").split("\n\n")
    return [
        [(word, tag) for word, tag in (line.split("\t") for line in block.split("\n"))]
        for block in blocks
    ]


def number(values: list[str]) -> Numbers:
    """Return a number from 1 for each value that occurs at least twice; 0 is for all others."""
    kept = sorted(value for value, count in Counter(values).items() if count > 1)
    return {value: place for place, value in enumerate(kept, start=1)}


def encode(sentences: list[Sentence], words: Numbers, suffixes: Numbers, tags: Numbers) -> Part:
    """Return the sentences as numbers; capitals: 1 for a capital at the start, 2 for all capitals,
    else 0.
    """
    return {
        "words": rl.Ragged(
            [[words.get(word.lower(), 0) for word, _ in sentence] for sentence in sentences]
        ),
        "suffixes": rl.Ragged(
            [[suffixes.get(word.lower()[-3:], 0) for word, _ in sentence] for sentence in sentences]
        ),
        "capitals": rl.Ragged(
            [[word[0].isupper() + word.isupper() for word, _ in sentence] for sentence in sentences]
        ),
        "tags": rl.Ragged([[tags[tag] for _, tag in sentence] for sentence in sentences]),
    }


def accuracy(part: Part, model: Tagger) -> float:
    """Return the accuracy per word."""
    model.eval()
    with torch.no_grad():
        guesses = model(part).argmax(-1)
    return float((guesses == part["tags"]).float().mean())


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, print the accuracy on dev after each epoch, and return the accuracy on test."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="the folder with the three files")
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the training part (default: 3)"
    )
    options = parser.parse_args(arguments)

    try:
        files = [
            read(options.path / f"ewt_{part}_form_upos.tsv.gz") for part in ("train", "dev", "test")
        ]
    except OSError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    seen = [word.lower() for sentence in files[0] for word, _ in sentence]
    words, suffixes = number(seen), number([word[-3:] for word in seen])
    tags = {
        tag: place
        for place, tag in enumerate(sorted({tag for file in files for s in file for _, tag in s}))
    }
    train, dev, test = (encode(file, words, suffixes, tags) for file in files)
    print(
        f"{len(files[0])} sentences of {len(seen)} words to train on; {len(words)} known words, {len(tags)} tags"
    )

    torch.manual_seed(0)
    model = Tagger(len(words) + 1, len(suffixes) + 1, len(tags))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    # Batches have sentences of similar lengths, because the longest one determines the number of
    # steps.
    batches = rl.data.BatchSampler(train["words"].lengths, batch_size=32, bucket=True)
    for epoch in range(options.epochs):
        model.train()
        for rows in batches:
            batch = {name: ragged[rows] for name, ragged in train.items()}
            optimizer.zero_grad()
            # The mean over the values counts each word once; there is no padding to mask.
            loss = cross_entropy(model(batch), batch["tags"])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}/{options.epochs}: dev accuracy {accuracy(dev, model):.4f}")
    result = accuracy(test, model)
    print(f"test accuracy {result:.4f}")
    return result


if __name__ == "__main__":
    main()
