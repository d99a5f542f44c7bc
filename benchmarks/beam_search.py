"""Time ragged beam search and teacher forcing against padded ones of the same attention decoder in plain torch.

    python benchmarks/beam_search.py --threads 2 > benchmarks/results/beam-search.md

The padded search keeps the rows of finished items until the last item is done. Its model is torch's LSTM cell and
attention by batched products over the padded memory. An item of L tokens has a memory of 2 L elements. The decoders are
not trained: the end token is impossible before token L, and the others afterwards, so that outputs have the drawn
lengths. Both take turns, a ratio is the median over rounds, and the scores of both are compared first.

Teacher forcing is a training step, the loss and all gradients.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from harness.lengths import LENGTHS
from harness.timing import interleave
from torch import Tensor, nn
from torch.nn import functional as F

import raglane as rl
from raglane.nn.transduction.decoder import _Stepping
from safety import processor

ITEMS, HIDDEN, TOKENS = 64, 512, 1000
NEVER = -30.0


def stopped(log_probs: Tensor, late: Tensor) -> Tensor:
    """Forbid the end token, 0, before an item's length, and all others after it."""
    others = log_probs[:, 1:] + NEVER * late.unsqueeze(1)
    return torch.cat([(log_probs[:, 0] + NEVER * ~late).unsqueeze(1), others], 1)


class Ragged:
    """The library's search and loss."""

    def __init__(self, decoder: Any, memory: rl.Ragged, targets: rl.Ragged) -> None:
        self.decoder, self.memory, self.targets = decoder, memory, targets

    def search(self, beam: int, rows: int | None) -> Tensor:
        inner, stops = _Stepping(self.decoder, self.memory, 0), self.targets.lengths

        def step(tokens: Tensor, state: Any) -> Any:
            log_probs, inside = inner.step(tokens, state["inside"])
            late = state["position"] >= stops[inside["item"]]
            return stopped(log_probs, late), {"inside": inside, "position": state["position"] + 1}

        count = len(self.memory)
        cell = tuple(torch.zeros(count, 1, HIDDEN) for _ in range(2))
        state = {"inside": {"item": torch.arange(count), "cell": cell}, "position": torch.zeros(count).long()}
        starts = torch.zeros(count, dtype=torch.int64)
        options: dict[str, Any] = {"beam": beam, "max_length": self.targets.lengths + 8, "rows": rows}
        with torch.no_grad():
            return rl.nn.beam_search(step, starts, state, end=0, **options).scores

    def loss(self) -> Tensor:
        return self.decoder.loss(self.memory, self.targets)


class Padded:
    """The same model and search on padded tensors."""

    def __init__(self, decoder: Any, memory: rl.Ragged, targets: rl.Ragged) -> None:
        self.decoder, self.lengths = decoder, targets.lengths
        self.cell, self.layer = nn.LSTMCell(HIDDEN, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.layer.load_state_dict(decoder.recurrent.state_dict())
        weights = decoder.recurrent.state_dict().items()
        self.cell.load_state_dict({name.removesuffix("_l0"): part for name, part in weights})
        self.memory, _ = memory.to_padded(batch_first=True)
        self.missing = ~memory.mask().unsqueeze(1)
        self.targets, _ = targets.to_padded(batch_first=True)
        self.goals = F.pad(self.targets, (0, 1))
        self.goals[torch.arange(self.goals.shape[1]) > self.lengths.unsqueeze(1)] = -100

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits ``(B, U, V)`` of outputs ``(B, U, H)`` of the layer."""
        decoder = self.decoder
        query = decoder.attention.query(outputs)
        if decoder.attention.key is None:
            scores = query @ self.memory.transpose(1, 2)
        else:
            keys = decoder.attention.key(self.memory)
            scores = (query.unsqueeze(2) + keys.unsqueeze(1)).tanh() @ decoder.attention.vector
        context = scores.masked_fill(self.missing, -torch.inf).softmax(2) @ self.memory
        return decoder.head(torch.tanh(decoder.combine(torch.cat([context, outputs], 2))))  # type: ignore[no-any-return]

    def loss(self) -> Tensor:
        outputs, _ = self.layer(self.decoder.embedding(F.pad(self.targets, (1, 0))))
        return F.cross_entropy(self.logits(outputs).flatten(0, 1), self.goals.flatten())

    def search(self, beam: int) -> Tensor:
        with torch.no_grad():
            return self._search(beam)

    def _search(self, beam: int) -> Tensor:
        count = len(self.lengths)
        scores = torch.full((count, beam), -torch.inf)
        scores[:, 0] = 0
        tokens, state = torch.zeros(count * beam, dtype=torch.int64), None
        best = torch.full((count,), -torch.inf)
        shift = torch.arange(count).unsqueeze(1) * beam
        # The paths that a search must keep to return its tokens.
        parents, path = [], []
        for position in range(int(self.lengths.max()) + 8):
            state = self.cell(self.decoder.embedding(tokens), state)
            log_probs = self.logits(state[0].view(count, beam, HIDDEN)).log_softmax(2)
            late = (position >= self.lengths).repeat_interleave(beam)
            log_probs = stopped(log_probs.flatten(0, 1), late).view(count, beam, -1)
            totals, order = (scores.unsqueeze(2) + log_probs).flatten(1).topk(2 * beam)
            token, parent = order % TOKENS, order // TOKENS
            ended = totals[:, :beam].masked_fill(token[:, :beam] != 0, -torch.inf)
            best = torch.maximum(best, ended.amax(1))
            scores, places = totals.masked_fill(token == 0, -torch.inf).topk(beam)
            tokens, rows = token.gather(1, places).flatten(), (parent.gather(1, places) + shift).flatten()
            state = tuple(part[rows] for part in state)
            parents.append(rows)
            path.append(tokens)
            if bool((best >= scores[:, 0]).all()):
                break
        return best


def parts(attention: str) -> tuple[Ragged, Padded]:
    torch.manual_seed(0)
    decoder = rl.nn.AttentionDecoder(TOKENS, HIDDEN, HIDDEN, attention=attention)
    lengths = torch.tensor(LENGTHS["lognormal"].draw(ITEMS))
    memory = rl.Ragged.from_flat(torch.randn(2 * int(lengths.sum()), HIDDEN), lengths=2 * lengths)
    targets = rl.Ragged.from_flat(torch.randint(1, TOKENS, (int(lengths.sum()),)), lengths=lengths)
    return Ragged(decoder, memory, targets), Padded(decoder, memory, targets)


def step(model: Ragged | Padded, wanted: list[nn.Parameter]) -> Any:
    return torch.autograd.grad(model.loss(), wanted)


def compare(ours: Any, theirs: Any, rounds: int, seconds: float) -> str:
    times = interleave({"padded": theirs, "ragged": ours}, rounds, most_seconds=seconds)
    ratio = statistics.median(a / b for a, b in zip(times["padded"], times["ragged"], strict=True))
    padded, ragged = (statistics.median(times[name]) for name in ("padded", "ragged"))
    return f"{1e3 * padded:,.0f} | {1e3 * ragged:,.0f} | {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="the most seconds per row of the table")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    limits = chosen.rounds, chosen.seconds
    print("# Beam search and attention decoders\n")
    print(f"`python benchmarks/beam_search.py --threads {chosen.threads}`: {processor()}, torch {torch.__version__}.")
    print(f"{ITEMS} items of lognormal lengths, LSTM of {HIDDEN}, {TOKENS} tokens, float32.\n")
    print("| what | attention | rows | padded, ms | ragged, ms | padded / ragged |")
    print("| --- | --- | --- | --- | --- | --- |")
    for attention in ("dot", "additive"):
        ragged, padded = parts(attention)
        for beam in (4, 16) if attention == "dot" else (4,):
            expected = padded.search(beam)
            for rows in (None, ITEMS // 4 * beam):
                torch.testing.assert_close(ragged.search(beam, rows), expected, rtol=1e-4, atol=1e-3)
                line = compare(partial(ragged.search, beam, rows), partial(padded.search, beam), *limits)
                print(f"| beam {beam} | {attention} | {rows or 'all'} | {line} |", flush=True)
        wanted = list(ragged.decoder.parameters())
        theirs = [
            *padded.layer.parameters(),
            *(p for n, p in ragged.decoder.named_parameters() if "recurrent" not in n),
        ]
        torch.testing.assert_close(ragged.loss(), padded.loss(), rtol=1e-4, atol=1e-4)
        line = compare(partial(step, ragged, wanted), partial(step, padded, theirs), *limits)
        print(f"| training step | {attention} | | {line} |", flush=True)


if __name__ == "__main__":
    main()
