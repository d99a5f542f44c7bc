"""Translate words to digits: sequence to sequence with attention, on generated numbers.

"three hundred and five" becomes "305". An encoder reads the words; a decoder writes the digits, and
attends to the encoder's outputs, which stay ragged. Training uses teacher forcing; in the test the
decoder takes the most likely digit at each step. The numbers of the test are not in the training
data.

    python examples/say_numbers.py

Test numbers written right: 0.962.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import raglane as rl

BEGIN, END = 10, 11  # after the ten digits
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
ONES += "seventeen eighteen nineteen".split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = {word: place for place, word in enumerate([*ONES, *TENS[2:], "hundred", "thousand", "and"])}


def words_of(number: int) -> list[str]:
    """Return a number below a million in words."""
    if number < 20:
        return [ONES[number]]
    if number < 100:
        return [TENS[number // 10], *(words_of(number % 10) if number % 10 else [])]
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = words_of(number % unit) if number % unit else []
    return [
        *words_of(number // unit),
        name,
        *(["and"] if rest and number % unit < 100 else []),
        *rest,
    ]


class Writer(nn.Module):
    """An encoder of words, and a decoder of digits that attends to them (Luong and others,
    2015).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(len(WORDS), size), nn.Embedding(12, size)
        self.encoder, self.decoder = rl.nn.GRU(size, size), rl.nn.GRU(size, size)
        self.key, self.out = nn.Linear(size, size, bias=False), nn.Linear(2 * size, 12)

    def logits(self, memory: rl.Ragged, hidden: Tensor, owner: Tensor) -> Tensor:
        """Return logits ``(M, 12)`` of states ``(M, size)``; row m belongs to sequence
        ``owner[m]``.
        """
        pairs = memory[owner]
        scores = (self.key(pairs) * hidden[:, None]).sum(-1, keepdim=True)
        read = (pairs * scores.softmax(1)).sum(1)
        return torch.as_tensor(self.out(torch.cat([hidden, read], 1)))

    def forward(self, words: rl.Ragged, written: rl.Ragged) -> Any:
        """Return the logits of each digit after the correct previous ones."""
        memory, state = self.encoder(self.source(words))
        hidden, _ = self.decoder(self.target(written), state)
        return hidden.map(lambda rows: self.logits(memory, rows, hidden.segment_ids))

    @torch.no_grad()
    def write(self, words: rl.Ragged, most: int = 8) -> list[str]:
        """Return the most likely digit at each step, for all sequences at once."""
        memory, state = self.encoder(self.source(words))
        rows, token = torch.arange(len(words)), torch.full((len(words),), BEGIN)
        steps = []
        for _ in range(most):
            hidden, state = self.decoder.step(self.target(token), state)
            token = self.logits(memory, hidden, rows).argmax(1)
            steps.append(token)
        texts = torch.stack(steps, 1).tolist()
        return ["".join(str(digit) for digit in text[: [*text, END].index(END)]) for text in texts]


def batch_of(numbers: Sequence[int]) -> tuple[Any, Any]:
    """Return words, and digits between begin and end."""
    words = rl.Ragged([[WORDS[word] for word in words_of(number)] for number in numbers])
    return words, rl.Ragged([[BEGIN, *map(int, str(number)), END] for number in numbers])


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, test, and return the share of numbers that are written right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="batches of 64 numbers (default: 1000)"
    )
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Writer(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(options.steps):
        # Numbers of one to six digits, each equally likely; one in ten is for the test.
        drawn = [int(10 ** (6 * torch.rand(()))) for _ in range(64)]
        words, digits = batch_of([number for number in drawn if number % 10 != 7])
        loss = cross_entropy(model(words, digits[:, :-1]), digits[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            print(f"step {step + 1}/{options.steps}: loss {loss.item():.3f}")
    test = [10 * int(10 ** (5 * torch.rand(()))) + 7 for _ in range(500)]
    written = model.write(batch_of(test)[0])
    share = sum(text == str(number) for text, number in zip(written, test, strict=True)) / len(test)
    print(f"{' '.join(words_of(test[0]))}: {written[0]}")
    print(f"{share:.3f} of {len(test)} numbers are written right")
    return share


if __name__ == "__main__":
    main()
